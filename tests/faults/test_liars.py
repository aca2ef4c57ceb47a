# SPDX-License-Identifier: Apache-2.0
"""A worker with its own token speaks for nobody else, and writes no key that is not its own."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable

import programs_lost
import programs_validators
import pytest
from job import WAIT_S, Job

from aids.wire import FrameFlag, FrameKind, Header, pack_header
from fastps.config import Config, load
from fastps.contract.contract import Givers, Policy
from fastps.control.client import ControlClient
from fastps.control.protocol import Layout, TensorSpec
from fastps.errors import ConfigError, FastPSError, MismatchError
from fastps.security.handshake import ACCEPT_BYTES, CHALLENGE_BYTES, ClientHandshake, Purpose
from fastps.security.tokens import CONTROL, Token
from fastps.telemetry.watch import look
from fastps.transport.tcp import dial, pack_lane
from fastps.types import DType

ROUNDS = 3
CLEAR = {"FASTPS_ENCRYPT": "off"}  # they write frames of their own, which are not sealed
EAGER = 0x80  # flag of a message that was not asked for
LETTER = 30_000  # bytes
SIZES = {"w": 1000, "b": 3}
_numbers = itertools.count()


def settings(job: Job, own: Token, **changes: object) -> Config:
    """Make what a process goes by that has one token."""
    given = {
        "scheduler_host": "127.0.0.1", "scheduler_port": job.scheduler_port, "size": 2,
        "num_servers": 1, "num_validators": 1, "rank": own.rank, "token": own.text(),
        "job_id": job.job_id, "on_loss": "reweight",
    }  # fmt: skip
    return load(given | changes, {})


def join(config: Config, role: str) -> ControlClient:
    """Join the job in a role."""
    return ControlClient.connect(
        config, role=role, data_address=None, on_event=lambda event: None, serves=False,
        machine=f"liar-{next(_numbers)}",
    )  # fmt: skip


def is_let_in(
    address: tuple[str, int], key: bytes, purpose: Purpose, sender: int, lane: int
) -> bool:
    """Try a handshake without asking whether the other side knows the key."""
    handshake = ClientHandshake(key, purpose=purpose, sender=sender, lane=lane)
    with socket.create_connection(address, timeout=WAIT_S) as sock:
        sock.sendall(handshake.hello())
        challenge = b""
        while len(challenge) < CHALLENGE_BYTES and (piece := sock.recv(4096)):
            challenge += piece
        with contextlib.suppress(FastPSError):
            sock.sendall(handshake.answer(challenge))
        with contextlib.suppress(OSError):
            sock.sendall(bytes(32))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while len(answer) < ACCEPT_BYTES and (piece := sock.recv(4096)):
                answer += piece
    return answer[6:7] == b"\0"


def spec(name: str, **changes: object) -> TensorSpec:
    """Declare a held name, but otherwise than validators do."""
    nbytes = 4 * 77
    fields = {"dtype": int(DType.FLOAT32), "shape": (77,), "nbytes": nbytes,
              "partition_bytes": 1 << 20, "chunk_bytes": 1 << 16}  # fmt: skip
    return TensorSpec(name, Layout(**fields | changes))


def speak_for_others(job: Job, own: Token) -> None:
    """Join as who the token does not prove, and dial the scheduler as others."""
    for role, rank in (("validator", 0), ("server", 0), ("worker", 0)):
        with pytest.raises(ConfigError, match="worker 1 claims to be"):
            join(settings(job, own, rank=rank), role)
    address = ("127.0.0.1", job.scheduler_port)
    key = own.key(CONTROL, job.job_id)
    for lane in (3, 2, 0):
        assert not is_let_in(address, key, Purpose.CONTROL, 0, lane)
    assert is_let_in(address, key, Purpose.CONTROL, 1, own.lane)
    assert not is_let_in(address, key, Purpose.PULSE, 1, 0)


def dial_as_others(client: ControlClient) -> None:
    """Call server and validator in the name of worker 0, with the keys that we have."""
    job = client.job
    for number, purpose in ((3, Purpose.DATA), (2, Purpose.PEER)):
        member = job.members[number]
        for peer in range(4):
            lane = pack_lane(job.generation, 0)
            address = (member.host, member.port)
            assert not is_let_in(address, client.keys.of(peer), purpose, 0, lane)


def declare_wrongly(client: ControlClient, errors: list[FastPSError]) -> threading.Thread:
    """Take held names before validators do, as an ordinary one and with another layout."""
    client.declare([spec("Held.w")], timeout_s=WAIT_S)

    def wait() -> None:
        other = spec("Held.b", policy=Policy.ACCEPTED, givers=Givers.VALIDATORS)
        try:
            client.declare([other], timeout_s=WAIT_S)
        except FastPSError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def say_to_server(client: ControlClient, config: Config, kind: FrameKind) -> None:
    """Push to what validators alone write, or read what is nobody's; the server cuts the link."""
    server = client.job.members[3]
    descriptor = dial(
        (server.host, server.port), config, key=client.keys.of(3), sender=1,
        lane=pack_lane(client.job.generation, 0), what="server",
    ).descriptor  # fmt: skip
    frame = b""
    keys, length = (range(1, 3), 12) if kind is FrameKind.PUSH else ([4321], 0)
    for number in keys:
        head = Header(kind=kind, dtype=DType.FLOAT32, key=number << 16, key_version=1,
                      sender=1, length=length)  # fmt: skip
        frame += pack_header(head) + bytes(length)
    with socket.socket(fileno=descriptor) as sock:
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            sock.sendall(frame)
            while sock.recv(4096):
                pass


@pytest.mark.parametrize("kind", [FrameKind.PUSH, FrameKind.PULL])
def test_a_liar_is_refused_named_and_counted_and_disturbs_nobody(kind):
    with Job(
        programs_validators.honest, workers=2, servers=1, validators=1, own_tokens=True,
        skip=[("worker", 1)], environment={"FASTPS_ON_LOSS": "reweight", **CLEAR},
        arguments={"rounds": ROUNDS},
    ) as job:  # fmt: skip
        own = Token(job.token.encode()).own("worker", 1)
        speak_for_others(job, own)
        config = settings(job, own)
        errors: list[FastPSError] = []
        with contextlib.closing(join(config, "worker")) as client:
            thread = declare_wrongly(client, errors)
            dial_as_others(client)
            client.barrier("fastps.connected", timeout_s=WAIT_S)
            job.workers[0].wait_line("begun")
            thread.join(WAIT_S)
            assert isinstance(errors[0], MismatchError), errors
            (scheduler,) = [one for one in look(job.job_id) if one.about["role"] == "scheduler"]
            kinds = ("refused_declarations", "refused_another_s_place", "refused_wrong_token")
            assert [scheduler.numbers[kind] for kind in kinds] == [1, 3, 4], scheduler.numbers
            assert scheduler.numbers["refused"] == sum(
                n for name, n in scheduler.numbers.items() if name.startswith("refused_")
            )
            client.report_lost(2, "so says the liar")
            say_to_server(client, config, kind)
            right = [sum(range(1, ROUNDS + 1))]
            assert job.workers[0].result() == right
            assert [one.result() for one in job.of_role("validator")] == [right]
        said = job.scheduler.stderr() + job.servers[0].stderr()
        for words in (
            "another's place", "worker 1 claims to be validator 0",
            "claims to be validator 0, and does", "claims to be member 0, and does",
            "refused a declaration", "refuses worker 1",
        ):  # fmt: skip
            assert words in said, (words, said)


def test_a_flood_of_small_messages_is_an_error_that_names_its_sender():
    with Job(
        programs_lost.hear_of_a_flood, workers=2, servers=1, own_tokens=True,
        skip=[("worker", 1)],
        environment={"FASTPS_SHARED_MEMORY": "0", "FASTPS_COLOCATE": "off", **CLEAR},
    ) as job:  # fmt: skip
        own = Token(job.token.encode()).own("worker", 1)
        config = settings(job, own, num_validators=0, on_loss="fail", colocate="off")
        with contextlib.closing(join(config, "worker")) as client:
            client.barrier("fastps.connected", timeout_s=WAIT_S)
            job.workers[0].wait_line("ready")
            flood(client, config, when=lambda: job.workers[0].wait_line("begun"))
            flooded, after = job.workers[0].result()
    assert flooded[0] == after[0] == "ProtocolError", (flooded, after)
    for _, text in (flooded, after):
        assert "worker 1 broke the protocol" in text, text
        assert "beyond the 1 MiB" in text, text


def flood(client: ControlClient, config: Config, *, when: Callable[[], object]) -> None:
    """Send worker 0 small messages that it has not asked for until it cuts the link."""
    member = client.job.members[0]
    descriptor = dial(
        (member.host, member.port), config, key=client.keys.of(0), sender=1,
        lane=pack_lane(client.job.generation, 0), purpose=Purpose.PEER, what="worker",
    ).descriptor  # fmt: skip
    with socket.socket(fileno=descriptor) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(WAIT_S)
        when()
        for number in itertools.count(1):
            head = Header(
                kind=FrameKind.MESSAGE, flags=FrameFlag(EAGER), key=99, key_version=number,
                sender=1, length=LETTER, status=LETTER,
            )  # fmt: skip
            sock.sendall(pack_header(head) + bytes(LETTER))
