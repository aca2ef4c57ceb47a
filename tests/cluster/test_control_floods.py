# SPDX-License-Identifier: Apache-2.0
"""A member that floods the scheduler, or lies to it, is bounded, and the others go on.

It writes its messages in clear.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from control_cluster import TOKEN, WAIT_S, Member, SchedulerThread, started_job
from msgspec.structs import replace

from fastps.control import scheduler as scheduler_module
from fastps.control.dial import dial
from fastps.control.protocol import (
    LENGTH,
    Attend,
    AwaitStart,
    Failed,
    Join,
    Joined,
    PeerLost,
    Told,
    ToMember,
    body_nbytes,
    pack,
    unpack_to_member,
)
from fastps.control.scheduler import MAX_CONNECTIONS
from fastps.security.handshake import Purpose
from fastps.security.tokens import CONTROL, Token

MIB = 1 << 20
MANY, LARGE = 40, 4 * MIB  # messages of one worker to another, and their bytes


def connect(scheduler: SchedulerThread, role: str, rank: int) -> socket.socket:
    """Dial as a member that has a token of its own."""
    own = Token(TOKEN.encode()).own(role, rank)
    return dial(
        scheduler.config(), own.key(CONTROL, "job"), purpose=Purpose.CONTROL, sender=rank,
        lane=own.lane, deadline=time.monotonic() + WAIT_S,
    )  # fmt: skip


def is_closed(sock: socket.socket) -> bool:
    """Tell whether the other side has closed; one that has not says nothing for a while."""
    sock.settimeout(0.3)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_of_one_process_are_bounded():
    with SchedulerThread(encrypt="off") as scheduler:
        open_ones = []
        for _ in range(MAX_CONNECTIONS + 1):
            open_ones.append(connect(scheduler, "worker", 0))
            open_ones[-1].sendall(pack(Attend("worker", 0)))
        assert is_closed(open_ones[-1])
        assert not is_closed(open_ones[0])
        assert scheduler.scheduler.statistics().refused["too many connections"] == 1
        other = connect(scheduler, "worker", 1)
        other.sendall(pack(Attend("worker", 1)))
        assert not is_closed(other)
        open_ones.pop(0).close()
        time.sleep(0.1)
        again = connect(scheduler, "worker", 0)
        again.sendall(pack(Attend("worker", 0)))
        assert not is_closed(again)
        for sock in [*open_ones, other, again]:
            sock.close()


def say_hello(sock: socket.socket, rank: int) -> ToMember:
    """Ask to join a running job; return the answer."""
    hello = Join(1, "worker", rank, None, None, 0, 0, "", 0, 1, "node", "h", "m", "")
    sock.settimeout(WAIT_S)
    sock.sendall(pack(replace(hello, is_newcomer=True)))
    return read_message(sock)


def test_a_newcomer_has_the_rank_that_its_token_proves_and_no_other():
    with SchedulerThread(encrypt="off", elastic_min=1, elastic_max=4) as scheduler:
        sockets = [connect(scheduler, "worker", 7) for _ in range(3)]
        refused = say_hello(sockets[0], 6)
        assert isinstance(refused, Failed)
        assert "does not prove" in refused.message
        for sock in sockets[1:]:
            assert isinstance(say_hello(sock, 7), Joined)
        sockets.append(
            dial(
                scheduler.config(), Token(TOKEN.encode()).key(CONTROL, "job"),
                purpose=Purpose.CONTROL, sender=7, lane=0, deadline=time.monotonic() + WAIT_S,
            )
        )  # fmt: skip
        assert isinstance(say_hello(sockets[-1], 7), Joined)  # it holds the job's token
        waiting = scheduler.scheduler.membership._newcomers.all
        assert [one.place for one in waiting] == [7, 7, None]
        for sock in sockets:
            sock.close()


def read_message(sock: socket.socket) -> ToMember:
    """Read one message of the scheduler."""

    def read(nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = sock.recv(min(nbytes - len(data), 64 << 10))
            assert piece, "the scheduler has cut us off"
            data += piece
        return bytes(data)

    return unpack_to_member(read(body_nbytes(read(LENGTH.size))))


def test_who_is_flooded_by_another_is_not_lost(monkeypatch):
    """It reads late; the scheduler reads no more of the one that floods it until it does."""
    monkeypatch.setattr(scheduler_module, "MAX_FRAME_BYTES", MIB)
    monkeypatch.setattr(scheduler_module, "MAX_UNSENT_BYTES", 8 * LARGE)
    settings = {"num_servers": 1, "colocate": "off", "lease_s": 60.0, "encrypt": "off"}
    with SchedulerThread(**settings) as scheduler:
        victim = connect(scheduler, "worker", 0)
        victim.settimeout(WAIT_S)
        victim.sendall(
            pack(Join(1, "worker", 0, None, None, 2, 1, "", 0, 1, "node", "h", "m", ""))
            + pack(AwaitStart(2, WAIT_S))
        )
        with ThreadPoolExecutor(2) as pool:
            joining = [pool.submit(Member, scheduler.config(rank=rank), role)
                       for rank, role in ((1, "worker"), (0, "server"))]  # fmt: skip
        flooder, server = (one.result() for one in joining)
        thread = threading.Thread(
            target=lambda: [flooder.client.tell([0], bytes(LARGE)) for _ in range(MANY)]
        )
        thread.start()
        time.sleep(1.5)  # while the flood comes, if nothing holds it up
        found = 0
        while found < MANY:
            found += isinstance(read_message(victim), Told)
        thread.join(WAIT_S)
        assert len(scheduler.scheduler.membership.members()) == 3
        victim.close()
        for member in (flooder, server):
            member.client.close()


@pytest.mark.parametrize("n_members", [1, 1000])
def test_a_member_that_is_named_often_is_told_once(n_members):
    with SchedulerThread(num_servers=0) as scheduler:
        members: list[Member] = []
        threads = [
            threading.Thread(target=lambda rank=rank: members.append(
                Member(scheduler.config(rank=rank))))
            for rank in range(2)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        members.sort(key=lambda one: one.client.job.me)
        members[1].client.tell([0] * n_members, b"x")
        assert members[0].told.wait_for(Told) == Told(1, b"x")
        for member in members:
            member.client.close()


def test_a_liar_that_reports_all_others_is_lost_alone():
    with started_job(size=4, num_servers=0, on_loss="reweight") as (scheduler, workers, _):
        liar = workers.pop(2)
        for rank in (0, 1, 3):
            liar.client.report_lost(rank, "so says the liar")
        for member in (liar, *workers):
            lost = member.told.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert (lost.rank, lost.goes_on) == (2, True)
            assert "nobody else says so, and worker 0 still sends heartbeats" in lost.cause
        time.sleep(1.0)  # for reports that would count later
        assert len(scheduler.scheduler.membership.members()) == 3
        assert all(len(member.told.events) == 1 for member in workers)
        liar.client.close()
