# SPDX-License-Identifier: Apache-2.0
"""Workers that wait to join a running elastic job: counted by nobody until they are admitted.

A newcomer says hello, and builds what it trains with while the others train. Then it awaits the
start: from now on it is ready. The Membership admits those that are ready when all workers are at
a boundary, up to FASTPS_ELASTIC_MAX; the others stay ready, as spares. A newcomer that ends before
changes nothing. Workers leave at a boundary too: the next view begins when they have.

A newcomer with a rank has proven that by the token of that rank, which is for one process at a
time: it stays a spare while a member has the rank. One without a rank has proven that it is of the
job, and gets a rank that no member has. Pure: a part of the Membership, which passes it events
with the time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from fastps.config import Config
from fastps.control.actions import Action, Close, Phase, Send
from fastps.control.admission import Peer, places_of, refuse_links
from fastps.control.blame import join_names
from fastps.control.collectives import Answers, Entry
from fastps.control.protocol import (
    AskClock,
    AwaitStart,
    ClockTold,
    Done,
    Failed,
    JobOver,
    Join,
    Joined,
    Leave,
    Malformed,
    PeerLost,
    Regrouped,
    Request,
    ToMember,
    ToScheduler,
    Unheard,
    ViewJoined,
    ViewLost,
    text_of,
)
from fastps.control.protocol import Newcomers as Announcement
from fastps.control.start_watch import NEVER, StartWatch
from fastps.control.view_log import NOT_REPLAYED, Replay

log = logging.getLogger(__name__)

MAX_WAITING = 256  # newcomers at once
ALL_LEFT = "all workers have left the job"
NO_NEWCOMERS = (
    "the job goes on after a loss, and takes no process instead of the lost one; start a new job"
)
JOIN_IT = (
    "the job runs, and only newcomers join it: start this worker with fastps-run --join, or "
    "with FASTPS_ELASTIC_JOIN=1"
)
NO_BOUNDARY = (
    "they join when all workers call commit() or check_host_updates() of a State within "
    "elastic.run, while nothing is in flight"
)


def too_late(config: Config) -> str:
    """Return why a process that is no newcomer cannot join a job that has begun another view."""
    return JOIN_IT if config.elastic_max else NO_NEWCOMERS


class Newcomers:
    """The workers that wait to join."""

    def __init__(self, config: Config) -> None:
        """Begin without newcomers."""
        self._config = config
        self._peers: dict[int, Peer] = {}
        self._watch = StartWatch(config.start_watch_s)
        self.announced = 0  # how many would join now, as workers know

    def __bool__(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._peers)

    def __contains__(self, peer: int) -> bool:
        """Return whether a peer waits."""
        return peer in self._peers

    def get(self, peer: int) -> Peer | None:
        """Return a newcomer; None for other peers."""
        return self._peers.get(peer)

    @property
    def all(self) -> list[Peer]:
        """List all that wait, in the order of their coming."""
        return list(self._peers.values())

    @property
    def ready(self) -> list[Peer]:
        """List those that could join at once, in the order of their coming."""
        return [item for item in self._peers.values() if item.start_request is not None]

    def refuse(self, join: Join) -> str | None:
        """Return why a process cannot wait here, or None if it can."""
        config = self._config
        if not (config.is_elastic and config.elastic_max):
            return (
                "no worker joins this job while it runs; start it with FASTPS_ELASTIC_MIN and "
                "FASTPS_ELASTIC_MAX (fastps-run --min N --max M)"
            )
        if join.role != "worker":
            return f"a {join.role} cannot join a job that runs, only workers can"
        if config.replay:
            return "this job makes another one again (FASTPS_REPLAY), and no worker joins it"
        if len(self._peers) >= MAX_WAITING:
            return f"{MAX_WAITING} workers wait to join already"
        return None

    def add(self, item: Peer) -> None:
        """Let a worker wait."""
        self._peers[item.peer] = item

    def pop(self, peer: int) -> Peer | None:
        """Forget a newcomer, and return it."""
        found = self._peers.pop(peer, None)
        self._end_watch()
        return found

    def receive(self, item: Peer, message: ToScheduler, now: float) -> Answers:
        """Handle a message of a newcomer, other than Leave; return the answers."""
        if isinstance(message, AwaitStart) and item.start_request is None:
            item.start_request = message
            item.join = replace(item.join, port=message.port, unix=message.unix)
            log.info("%s waits to join", item.full_name)
            self._watch.begin(now)
            return []
        if isinstance(message, AskClock):
            return [(item.peer, ClockTold(message.request, now))]
        if isinstance(message, Request):
            text = f"a worker that waits to join cannot send {type(message).__name__}"
            return [(item.peer, Failed(message.request, "protocol", text))]
        return []

    def leave(self, item: Peer, message: Leave) -> Answers:
        """Let a newcomer go."""
        self.pop(item.peer)
        return [*_failed(item, "shutdown", "this process leaves the job"),
                (item.peer, Done(message.request))]  # fmt: skip

    def silent(self, now: float) -> list[Peer]:
        """List those whose lease has ended, and what the scheduler itself was late."""
        return [item for item in self._peers.values() if item.lease_until + item.late_s <= now]

    def remind(self, now: float) -> None:
        """Log that newcomers wait for a boundary, when that is due."""
        if self._watch.due <= now and self.announced:
            names = join_names([item.full_name for item in self.ready])
            waited_s = self._watch.next(now)
            log.warning("%s: waiting to join for %.0f s; %s", names, waited_s, NO_BOUNDARY)
        elif self._watch.due <= now:  # spares
            self._watch.next(now)

    def next_deadline(self) -> float:
        """Return when silent() or remind() has something to do."""
        ends = [item.lease_until + item.late_s for item in self._peers.values()]
        return min([*ends, self._watch.due])

    def admissible(self, room: int, taken: Iterable[int | None]) -> list[Peer]:
        """List those that would join now, up to room of them, in the order in which they join.

        taken: places of members.
        """
        places, found = set(taken), list[Peer]()
        for item in self.ready:
            if len(found) < room and (item.place is None or item.place not in places):
                places.add(item.place)
                found.append(item)
        return found

    def admit(self, admitted: Sequence[Peer], taken: Iterable[int | None]) -> None:
        """Take out newcomers that join, each with a place of its own; taken: as above."""
        places = {*taken, *(item.place for item in admitted)}
        for item in admitted:
            del self._peers[item.peer]
            if item.place is None:
                free = (one for one in itertools.count(self._config.size) if one not in places)
                item.place = next(free)
                places.add(item.place)
        self._end_watch()

    def end(self, kind: str, text: str) -> Answers:
        """Let all go, since the job is over."""
        found = [answer for item in self._peers.values() for answer in _failed(item, kind, text)]
        self._peers.clear()
        self._end_watch()
        return found

    def waiting(self) -> Sequence[tuple[int, int]]:
        """List (peer, request) of those that are ready."""
        return [(one.peer, one.start_request.request) for one in self.ready if one.start_request]

    def _end_watch(self) -> None:
        if not self.ready:
            self._watch.end()
            assert self._watch.due == NEVER


def _failed(item: Peer, kind: str, text: str) -> Answers:
    asked, item.start_request = item.start_request, None
    return [] if asked is None else [(item.peer, Failed(asked.request, kind, text))]


class JoiningMixin:
    """Newcomers, for the Membership."""

    phase: Phase
    generation: int
    has_begun: bool
    is_changing: bool
    first_cause: PeerLost | None
    _config: Config
    _view: Config
    _peers: dict[int, Peer]
    _out: list[Action]
    _in_view: tuple[int, ...]
    _newcomers: Newcomers
    _replay: Replay
    # newcomers that join, and peers that leave, where all workers are at a boundary
    _joining: Sequence[Peer] = ()
    _leavers: Sequence[int] = ()

    def _send(self, peer: int, message: ToMember) -> None:
        raise NotImplementedError

    def _send_all(self, answers: Answers) -> None:
        raise NotImplementedError

    def _programs(self) -> list[Peer]:
        raise NotImplementedError

    def _leaving(self) -> list[Peer]:
        raise NotImplementedError

    def _dismiss(self, leaving: list[Peer]) -> None:
        raise NotImplementedError

    def _lost(self, member: Peer, cause: str) -> PeerLost:
        raise NotImplementedError

    def _fail_job(self, cause: PeerLost) -> None:
        raise NotImplementedError

    def _begin_change(self, cause: str, *, has_boundary: bool = False) -> None:
        raise NotImplementedError

    def _call_to_view(self, members: list[Peer], event: ViewLost | ViewJoined, now: float) -> None:
        raise NotImplementedError

    def _count_survivors(self, survivors: Iterable[Peer]) -> None:
        raise NotImplementedError

    def _refuse_newcomer(self, join: Join) -> tuple[str, str] | None:
        """Return why a newcomer cannot wait: kind and message."""
        is_running = self.is_changing or self.phase is Phase.RUNNING
        if self.has_begun and not is_running:
            return "shutdown", ALL_LEFT
        text = self._newcomers.refuse(join) or refuse_links(join, list(self._peers.values()))
        return None if text is None else ("config", text)

    def _greet(self, item: Peer) -> None:
        """Let a newcomer wait, and tell it the rank and size that it would have now."""
        self._newcomers.add(item)
        if item.place is not None and item.place in self._places():
            log.warning(
                "%s waits to join as worker %d until the process that has the token of this rank "
                "has left", item.full_name, item.place,
            )  # fmt: skip
        rank = (len(self._programs()) or self._view.size) + len(self._newcomers.all) - 1
        self._send(item.peer, Joined(item.join.request, item.peer, rank=rank, size=rank + 1))

    def _hear_newcomer(self, item: Peer, message: ToScheduler | Malformed, now: float) -> None:
        if isinstance(message, Malformed):
            self._send(item.peer, Failed(message.request, "protocol", message.message))
        elif isinstance(message, Leave):
            self._send_all(self._newcomers.leave(item, message))
            self._out.append(Close(item.peer))
        elif isinstance(message, Unheard):
            self._let_newcomer_go(item.peer, "it has not heard the scheduler")
        else:
            self._send_all(self._newcomers.receive(item, message, now))

    def _let_newcomer_go(self, peer: int, why: str) -> None:
        """Forget a peer if it is a newcomer, which changes nothing for the others."""
        if (item := self._newcomers.pop(peer)) is not None:
            log.info("%s does not join: %s", item.full_name, why)
            self._out.append(Close(peer))

    def _end_newcomers(self, text: str) -> None:
        """Let all newcomers go, since there is nothing to join any more."""
        peers = [item.peer for item in self._newcomers.all]
        kind = "shutdown" if self.first_cause is None else "peer_lost"
        self._send_all(self._newcomers.end(kind, text))
        for peer in peers:
            self._out += [Send(peer, self.first_cause or JobOver(text)), Close(peer)]

    def _places(self) -> list[int | None]:
        """List the ranks that the workers of the job began with, or have proven."""
        return [item.place for item in self._programs()]

    def _admissible(self, n_leavers: int = 0) -> list[Peer]:
        """List the newcomers that would join at a boundary now."""
        places = self._places()
        room = self._config.elastic_max - len(places) + n_leavers
        return self._newcomers.admissible(room, places)

    def _announce_newcomers(self) -> None:
        """Tell the workers of a view how many newcomers would join it, where that has changed."""
        count = len(self._admissible()) if self._newcomers else 0
        if self.phase is Phase.RUNNING and count != self._newcomers.announced:
            self._newcomers.announced = count
            told = Announcement(count)
            self._out += [Send(item.peer, told) for item in self._programs() if item.is_working]

    def _regroup(self, asked: Mapping[int, Entry]) -> Answers:
        """Answer the workers, all of which are at a boundary; _admit_where_due() follows."""
        leavers = [it.peer for it in asked.values() if getattr(it.asked, "leaves", False)]
        left = len(asked) - len(leavers)
        joining = self._admissible(len(leavers)) if left else []  # nobody has values for them
        if 0 < left < self._config.elastic_min - len(joining):
            leavers, joining = [], self._admissible()  # too few would go on
        self._leavers, self._joining = leavers, joining
        generation = (self.generation + 1) * bool(leavers or joining)
        return [(it.peer, Regrouped(it.asked.request, generation)) for it in asked.values()]

    def _without(self, leavers: Sequence[int]) -> list[Peer]:
        return [item for peer, item in self._peers.items() if peer not in leavers]

    def _admit_where_due(self, now: float) -> None:
        """Begin the next view, with newcomers, who come last, and without those that leave."""
        newcomers, leavers = self._joining, self._leavers
        if not (newcomers or leavers):
            return
        self._joining, self._leavers = (), ()
        places = self._places()
        self._newcomers.admit(newcomers, places)
        gone = [self._peers[peer] for peer in leavers]
        if gone and not self._replay.next_view(places_of(self._without(leavers))):
            self._fail_job(self._lost(gone[0], f"it leaves the job; {NOT_REPLAYED}"))
            return
        changes = ((newcomers, "joined"), (gone, "left"))
        cause = text_of("; ".join(
            f"{join_names([item.full_name for item in some])} {what}"
            for some, what in changes if some
        ))  # fmt: skip
        log.info("%s; %d workers go on", cause, len(places) + len(newcomers) - len(gone))
        self._dismiss(self._leaving())
        self._begin_change(cause, has_boundary=True)
        event = ViewJoined(self.generation, cause)
        for item in gone:
            self._send(item.peer, replace(event, survives=False))
            item.is_out = True
        self._call_to_view([*self._peers.values()], event, now)
        last = max((item.rank or 0 for item in self._programs()), default=-1)
        for rank, item in enumerate(newcomers, last + 1):
            item.rank, item.start_deadline = rank, now + 2 * self._config.start_timeout_s
            self._peers[item.peer] = item
        self._in_view = places_of(self._peers.values())
        self._count_survivors(self._peers.values())
