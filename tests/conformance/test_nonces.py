# SPDX-License-Identifier: Apache-2.0
"""No key seals two messages with the same nonce, whatever ends, starts again, grows old or forks.

Real handshakes agree on the keys, and real ciphers and links seal with them; nothing is computed a
second time here. All payloads are zeros, so what comes out is the cipher's stream of bits, of
which two are the same only if key and nonce are.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transport_nets import TIMEOUT_S, tcp_pair

from aids.mailbox import Mailbox
from aids.wire import HEADER, HEADER_BYTES
from fastps.errors import AuthError
from fastps.security.ciphers import Opener, Sealer, Sealing
from fastps.security.handshake import ClientHandshake, Option, Purpose, ServerHandshake
from fastps.transport.tcp import pack_lane
from fastps.transport.tcp._transport import TcpTransport

KEY = bytes(range(32))
TAG_BYTES = 16
RECORD = 64 << 10
REKEY_RECORDS = 1 << 20
LAST = 2**64 - 1
ZEROS = bytes(32)
CHILD_S = 20  # for a child to try all ciphers


class Connection(NamedTuple):
    """Both ends of a control connection; each sealer with the opener at the other end."""

    ways: tuple[tuple[Sealer, Opener], tuple[Sealer, Opener]]
    is_lost: bool = False  # one end died: the other seals on, and nothing opens it


def agree(
    purpose: Purpose, sender: int, lane: int, option: Option,
    client_bytes: Callable[[int], bytes], server_bytes: Callable[[int], bytes],
) -> tuple[Sealing, Sealing]:  # fmt: skip
    """Shake hands; return the keys of client and server."""
    client = ClientHandshake(
        KEY, purpose=purpose, sender=sender, lane=lane, options=option, random_bytes=client_bytes
    )
    server = ServerHandshake(KEY, options=option, random_bytes=server_bytes)
    client.finish(server.accept(client.answer(server.challenge(client.hello()))))
    assert client.sealing is not None
    assert server.sealing is not None
    return client.sealing, server.sealing


def sealed_by_a_link(
    transport: TcpTransport, sealing: Sealing, opener: Opener, sizes: list[int]
) -> list[bytes]:
    """Return the records that a link sends of zeros, in the order in which opener opens them."""
    box = Mailbox(max_frame=1 << 20)
    near, sock = tcp_pair()
    sock.settimeout(TIMEOUT_S)
    with near, sock:
        transport.adopt(near.detach(), box, peer=0, sealing=sealing)
        file, found = sock.makefile("rb"), []
        for size in sizes:
            ticket = box.post(0, bytes(size))
            header, tag = file.read(HEADER_BYTES), file.read(TAG_BYTES)
            opener.open(tag, header)
            assert HEADER.unpack(header)[10] == size
            tag = file.read(TAG_BYTES)
            for start in range(0, size, RECORD):
                nbytes = min(size - start, RECORD)
                data = (tag if start == 0 else file.read(TAG_BYTES)) + file.read(nbytes)
                assert opener.open(data) == bytes(nbytes)
                found.append(data)
            ticket.wait(timeout_s=TIMEOUT_S)
        file.close()
    box.wait_ended(0, timeout_s=TIMEOUT_S)
    return found


class Nonces(RuleBasedStateMachine):
    """A job whose members connect, crash, change view, fork, and restore old randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.transport = TcpTransport()
        self.connections: list[Connection] = []
        self.seen: set[bytes] = set()
        self.restored: set[tuple[int, int]] = set()
        self.has_forked = False

    def teardown(self) -> None:
        self.transport.close(timeout_s=TIMEOUT_S)

    def note(self, sealed: bytes | bytearray) -> None:
        """Fail if these zeros were sealed before with the same key and nonce."""
        stream = bytes(sealed[TAG_BYTES : TAG_BYTES + len(ZEROS)])
        assert len(stream) == len(ZEROS)
        assert stream not in self.seen, "a nonce was used twice"
        self.seen.add(stream)

    def shake(
        self, data: st.DataObject, purposes: list[Purpose], mode: Option
    ) -> tuple[Sealing, Sealing]:
        """Agree on keys; at most one end has the random numbers that it had before."""
        pick = st.integers(0, 2)
        seeds = data.draw(pick), data.draw(pick)
        streams = [random.Random(f"{end} {seed}").randbytes for end, seed in enumerate(seeds)]
        if seeds in self.restored:
            streams[data.draw(st.integers(0, 1))] = os.urandom
        self.restored.add(seeds)
        lane = pack_lane(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1)))
        purpose = data.draw(st.sampled_from(purposes))
        return agree(purpose, data.draw(st.integers(0, 2)), lane, mode, streams[0], streams[1])

    @rule(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        client, server = self.shake(data, [Purpose.CONTROL, Purpose.PULSE], Option.ON)
        ways = (client.sealer(), server.opener()), (server.sealer(), client.opener())
        for one in (client, server):
            one.wipe()
            with pytest.raises(AuthError, match="used already"):
                one.sealer()
        self.connections.append(Connection(ways))

    @rule(data=st.data(), is_client=st.booleans())
    def link(self, data: st.DataObject, is_client: bool) -> None:
        """A lane to a server or another worker; then it is lost, at either end."""
        both = self.shake(data, [Purpose.DATA, Purpose.PEER], Option.AUTO | Option.LEAVES)
        ours, theirs = both if is_client else both[::-1]
        sizes = data.draw(st.lists(st.sampled_from([0, 32, RECORD + 32]), min_size=1, max_size=3))
        for one in sealed_by_a_link(self.transport, ours, theirs.opener(), sizes):
            self.note(one)
        near, far = tcp_pair()
        with near, far, pytest.raises(AuthError, match="used already"):
            self.transport.adopt(near.detach(), Mailbox(), peer=0, sealing=ours)

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), count=st.integers(1, 5))
    def talk(self, data: st.DataObject, count: int) -> None:
        """Send messages one way; they open at the other end, if there is one."""
        connection = data.draw(st.sampled_from(self.connections))
        sealer, opener = data.draw(st.sampled_from(connection.ways))
        for _ in range(count):
            if sealer.number == LAST:
                with pytest.raises(AuthError):
                    sealer.seal(ZEROS)
                return
            sealed = sealer.seal(ZEROS)
            self.note(sealed)
            if not connection.is_lost:
                assert opener.open(bytes(sealed)) == ZEROS

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), rounds=st.sampled_from([1, 2, LAST // REKEY_RECORDS + 1]))
    def grow_old(self, data: st.DataObject, rounds: int) -> None:
        """Go on shortly before the key is replaced, or before the last number."""
        connection = data.draw(st.sampled_from(self.connections))
        sealer, opener = data.draw(st.sampled_from(connection.ways))
        number = (sealer.number // REKEY_RECORDS + rounds) * REKEY_RECORDS - 2
        if sealer.number < number <= LAST:
            sealer.skip_to(number)
            opener.skip_to(number)

    @precondition(lambda self: self.connections)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Lose one end, which connects again by another handshake."""
        place = data.draw(st.integers(0, len(self.connections) - 1))
        self.connections[place] = self.connections[place]._replace(is_lost=True)
        self.connect(data)

    @precondition(lambda self: self.connections and not self.has_forked)
    @rule()
    def fork(self) -> None:
        """A child has copies of all ciphers, and can use none."""
        self.has_forked = True
        ways = [way for connection in self.connections for way in connection.ways]
        pid = os.fork()
        if pid == 0:
            signal.alarm(CHILD_S)
            used = 0
            for sealer, _ in ways:
                try:
                    sealer.seal(ZEROS)
                    used += 1
                except AuthError:
                    pass
            os._exit(min(used, 100))
        assert os.waitpid(pid, 0)[1] == 0, "a forked child has sealed with its parent's keys"


def test_no_key_has_a_nonce_twice():
    run_state_machine_as_test(
        Nonces, settings=settings(max_examples=20, stateful_step_count=25, deadline=None)
    )
