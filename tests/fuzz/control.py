# SPDX-License-Identifier: Apache-2.0
"""Targets: messages of control connections, on both sides, and those of launchers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
from control_driver import Driver, make_spec

from fastps.contract.contract import Givers, Policy
from fastps.control import launcher_protocol
from fastps.control.actions import Action, Finish, Phase, Send
from fastps.control.declared import pack_spec, unpack_spec
from fastps.control.printable import cleaned
from fastps.control.protocol import (
    Absent,
    AskClock,
    Attend,
    AwaitEnds,
    Confirm,
    Confirmed,
    DeclareKeys,
    Dispute,
    Dropped,
    Forget,
    Job,
    Join,
    KeysFailed,
    KeysReady,
    NewJob,
    PeerLost,
    Regroup,
    ReportLost,
    ResultsLanded,
    Started,
    Tell,
    ToScheduler,
    Unheard,
    ViewLost,
    Waiting,
    Whereabouts,
    pack,
    unpack_to_member,
    unpack_to_scheduler,
)
from fastps.control.protocol import (
    Member as MemberOfJob,
)

from .target import Target

HEAD = struct.Struct("<BI")  # peer, bytes of the message
SILENT_S = 100.0  # after which all that waits has ended
JOBS: tuple[dict[str, Any], ...] = (
    {"size": 2, "num_servers": 1},
    {"size": 3, "num_servers": 0, "elastic_min": 1},
    {"size": 2, "num_servers": 1, "num_validators": 1},
    {"size": 2, "num_servers": 0, "elastic_min": 1, "elastic_max": 4},
)


class Recorded(Driver):
    """A driver that keeps what was said, by whom."""

    def __init__(self, **settings: Any) -> None:
        self.said: list[tuple[int, ToScheduler]] = []
        super().__init__(**settings)

    def say(self, peer: int, message: ToScheduler) -> None:
        self.said.append((peer, message))
        super().say(peer, message)


def all_requests(driver: Recorded) -> None:
    """Let a job begin, and its members send a message of each kind."""
    workers, servers = [], []
    for role, count, peers in (("server", driver.config.num_servers, servers),
                               ("worker", driver.config.size, workers),
                               ("validator", driver.config.num_validators, workers)):  # fmt: skip
        given = {"cookie": b"c" * 32, "num_validators": driver.config.num_validators}
        peers += [driver.enter(role, **given) for _ in range(count)]
    spec = make_spec("w")
    if driver.config.num_validators:
        spec = make_spec("w", policy=Policy.ACCEPTED, givers=Givers.VALIDATORS)
        workers = [*workers[-1:], *workers[:-1]]
    for peer in workers:
        driver.declare(peer, spec, make_spec("v", (3,), nbytes=12))
    for batch, peer in enumerate(servers):
        driver.say(peer, KeysReady(batch))
        driver.say(peer, KeysFailed(7, "no memory"))
    for peer in workers:
        driver.barrier(peer)
        driver.blob(peer, 0, b"object" if peer == workers[0] else None)
        driver.say(peer, Dispute(driver.request(), "w", 1, "sum", 5.0))
        driver.say(peer, Forget(driver.request(), (("v", 3),), 5.0))
        driver.say(peer, ResultsLanded(1, ("w#1", "3#2#"), (0, 1)))
    first, second = workers[:2]
    if driver.config.elastic_max:
        driver.say(driver.enter(is_newcomer=True), AskClock(driver.request()))
    for peer in workers:
        driver.say(peer, Regroup(driver.request(), "boundary", 1, 5.0, peer == second))
    driver.say(first, Dropped(4))
    driver.say(first, AskClock(driver.request()))
    driver.say(first, Tell((1,), b"data", True))
    driver.say(first, Waiting(driver.request(), "w", 2, "a sum", (0, 1), 3.0))
    driver.say(second, Whereabouts(1, 1, "nothing", "main()"))
    driver.say(second, ReportLost(0, "reset", True, 1))
    driver.say(first, Confirmed(1, None))
    driver.leave(first)
    driver.say(second, Unheard(3.0))
    driver.say(0, Absent("worker", 1, "h", 102, "it was killed"))


class Scheduler(Target):
    """Messages of members, each behind its peer: decoded, cleaned, and handled by a Membership.

    The first byte chooses the job. Peer 0 is a launcher; a zero byte as message ends a connection.
    """

    name = "scheduler"
    per_round = 800
    tree = (lambda item: msgspec.msgpack.decode(item[HEAD.size :]), msgspec.msgpack.encode)

    def seeds(self) -> Sequence[bytes]:
        found = []
        for which, job in enumerate(JOBS):
            driver = Recorded(**job)
            all_requests(driver)
            items = [self._item(peer, bytes(pack(message))[4:]) for peer, message in driver.said]
            found.append(self.join([bytes([which]), *items]))
            found.append(self.join([bytes([which]), *items, self._item(1, b"\0")]))
        return found

    def run(self, data: bytes) -> None:
        which, *items = self.split(data)
        driver = Driver(**JOBS[which[0] % len(JOBS)] if which else JOBS[0])
        known: set[int] = set()
        for item in items:
            peer, body = item[0], item[HEAD.size :]
            if body == b"\0":
                self._do(driver, driver.machine.closed(peer, "it was cut off", driver.now))
                continue
            message = cleaned(unpack_to_scheduler(body))
            is_first = isinstance(message, Join | Absent | Attend)
            if (is_first and peer in known) or not (is_first or peer in known):
                return  # which Scheduler._read_join() refuses
            known.add(peer)
            if isinstance(message, Attend | AwaitEnds):
                continue  # of launchers, which the Membership does not see
            self._do(driver, driver.machine.receive(peer, message, driver.now))
            if driver.finish is not None:
                return
        end = driver.now + SILENT_S
        while driver.finish is None and (due := driver.machine.next_deadline()) is not None:
            if due > end:
                return
            driver.now = max(driver.now, due) + 1e-3
            self._do(driver, driver.machine.tick(driver.now))

    def split(self, data: bytes) -> list[bytes]:
        items, at = [data[:1]], 1
        while at + HEAD.size <= len(data):
            end = at + HEAD.size + HEAD.unpack_from(data, at)[1]
            items.append(data[at:end])
            at = end
        return items

    def join(self, items: Sequence[bytes]) -> bytes:
        """Write lengths anew: changes of a message are to reach the decoder."""
        first, *rest = items or [b"\0"]
        return first[:1] + b"".join(
            self._item(one[0], one[HEAD.size :]) for one in rest if len(one) >= HEAD.size
        )

    def _change(self, random: Any, item: bytes, others: list[bytes]) -> bytes:
        if len(item) <= HEAD.size:
            return random.randbytes(1)
        peer = random.randrange(6) if random.random() < 0.2 else item[0]
        if random.random() < 0.3:
            return self._item(peer, item[HEAD.size :])
        changed = super()._change(random, item, others)
        is_whole = changed[: HEAD.size] == item[: HEAD.size]
        return self._item(peer, changed[HEAD.size :] if is_whole else changed)

    def _item(self, peer: int, body: bytes) -> bytes:
        return HEAD.pack(peer, len(body)) + body

    def _do(self, driver: Driver, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                pack(action.message)
            elif isinstance(action, Finish):
                driver.finish = action


class Member(Target):
    """A message of the scheduler, and what a member looks up in it."""

    name = "member"
    per_round = 15_000
    tree = (msgspec.msgpack.decode, msgspec.msgpack.encode)

    def seeds(self) -> Sequence[bytes]:
        places = (("worker", 0), ("worker", 1), ("server", 0))
        members = tuple(MemberOfJob(*one, "h", 1, 2, "node", 0, "", "b") for one in places)
        job = Job("job", 1, 0, 2, 0, 2, members, (2,), False)
        lost = PeerLost("worker", 1, "h", 7, "it was killed")
        sent = [Started(1, job, b"k" * 96), NewJob(job), lost, ViewLost(2, lost, True),
                Confirm(1, "127.0.0.1", 7000, b"c" * 32, 1.0)]  # fmt: skip
        for settings in JOBS:
            driver = Recorded(**settings)
            all_requests(driver)
            sent += [one for messages in driver.sent.values() for one in messages]
        found = [bytes(pack(one))[4:] for one in sent]
        return [*dict.fromkeys(found), pack_spec(make_spec())]

    def run(self, data: bytes) -> None:
        if data[:1] == b"\x92" and data[1:2] == b"\xa1":  # a name of one letter: a declaration
            unpack_spec(data)
            return
        message = unpack_to_member(data)
        if isinstance(message, DeclareKeys):
            list(message.keys)
        elif isinstance(message, Started | NewJob):
            job = message.job
            _ = job.machines, job.weights, job.servers, list(map(job.owner_name, job.owners))


class Launcher(Target):
    """A stream of frames from a launcher to its scheduler, or back: the first byte says it."""

    name = "launcher"
    per_round = 12_000

    def seeds(self) -> Sequence[bytes]:
        protocol = launcher_protocol
        orders = [protocol.End("why"), protocol.EndWhenLeft("why"),
                  protocol.ExpectEnds((("worker", 0), ("server", 1)), "why"),
                  protocol.RequestLocations(3),
                  Absent("worker", 1, "h", 102, "it was killed")]  # fmt: skip
        cause = PeerLost("worker", 0, "", 0, "it was killed")
        news = [protocol.State(Phase.RUNNING, 1, 3, True, True, cause), protocol.Located(3)]
        return [self.join([bytes([way]), *(bytes(protocol.pack(one)) for one in some)])
                for way, some in ((0, orders), (1, news))]  # fmt: skip

    def run(self, data: bytes) -> None:
        unpack: Any = launcher_protocol.unpack_news
        if data[:1] == b"\0":
            unpack = launcher_protocol.unpack_order
        reader = launcher_protocol.FrameReader()
        for at in range(1, len(data), 7):  # however its bytes arrive
            for body in reader.feed(data[at : at + 7]):
                unpack(body)

    def split(self, data: bytes) -> list[bytes]:
        items, at = [data[:1]], 1
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            items.append(data[at:end])
            at = end
        return items
