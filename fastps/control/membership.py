# SPDX-License-Identifier: Apache-2.0
"""The members of the job: joins, ranks, leases, losses, departures, generations.

A pure state machine: no socket, no clock, no thread. The scheduler passes it events with the
time, and carries out the actions it returns. A peer is the number of one control connection and
is never used twice.

Phases:  LOBBY --all joined--> RUNNING --all workers left--> LOBBY of the next generation
         RUNNING --a member is lost--> BROKEN --all gone--> OVER
         RUNNING --a member is lost, or newcomers join, elastic--> LOBBY of the next generation,
         its next view
         LOBBY --members of a scheduler that died have come back--> RUNNING --at once--> LOBBY
         LOBBY --no member came for too long--> OVER

Servers stay from generation to generation; workers join each generation again, and may already
wait for the next one while others have yet to leave this one. A worker whose process serves too
leaves when all workers have asked to leave, or at its own deadline. After that, broken links are
no evidence any more, and workers that need no server may still leave in order.

Where an elastic job loses a member, and enough workers are left, its next generation begins at
once, with the members that are there (the survivors) and with ranks in the order of before: a new
view. Each survivor ends what it had with the others, and then awaits the start. What was asked in
the old view fails with the kind "view". Workers that join a running job (newcomers.py) come last
in the next view, which begins when all workers are at a boundary.

Invariants: ranks are unique per role; the generation only grows; the first cause is recorded once
and never replaced; every request is answered, or its peer gets a PeerLost and is dropped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from fastps.config import Config
from fastps.control.actions import Action, Close, Finish, Phase, Send
from fastps.control.admission import (
    Peer,
    Plan,
    local_ranks,
    number,
    places,
    places_of,
    plan_job,
    refuse,
)
from fastps.control.blame import (
    Suspicions,
    join_names,
    patience_s,
    start_text,
)
from fastps.control.collectives import Answers, Collectives
from fastps.control.commits import Commits
from fastps.control.declarations import Declarations
from fastps.control.landing import BoardLog, LandingMixin
from fastps.control.newcomers import ALL_LEFT, JoiningMixin, Newcomers, too_late
from fastps.control.protocol import (
    Absent,
    AskClock,
    Attend,
    AwaitEnds,
    AwaitStart,
    BoardRead,
    ClockTold,
    Confirmed,
    Declare,
    Done,
    Dropped,
    Failed,
    JobOver,
    Join,
    Joined,
    KeysFailed,
    KeysReady,
    Leave,
    Locate,
    Malformed,
    Meeting,
    NewGeneration,
    NewJob,
    OwnerLeft,
    PeerLeft,
    PeerLost,
    Regroup,
    Rejoin,
    ReportLost,
    ResultsLanded,
    Started,
    Tell,
    TensorPoisoned,
    Told,
    ToMember,
    ToScheduler,
    Unheard,
    ViewJoined,
    ViewLost,
    Waiting,
    Whereabouts,
)
from fastps.control.recovery import RecoveryMixin
from fastps.control.silence import SilenceMixin
from fastps.control.start_watch import MissingMembers, Place, StartWatch
from fastps.control.testimony import TestimonyMixin
from fastps.control.view_log import ALL_LEFT as VIEW_OVER
from fastps.control.view_log import NOT_REPLAYED, Replay, ViewRecord
from fastps.errors import ConfigError

log = logging.getLogger(__name__)

LAUNCHER = 0  # in place of a peer's number; a launcher's reports come on no control connection
MAX_NOTES = 8  # departures before the start that the text about missing members lists
PULSE_CLOSED = "its pulse connection closed: it crashed, was killed or was cut off"
GAVE_UP = "gave up waiting for the job to start"
VIEW_CHANGES = "a member was lost, and the job goes on in a new view"
TOGETHER_S = 10.0  # members whose waits for the start end within this time end together


class Membership(SilenceMixin, TestimonyMixin, JoiningMixin, LandingMixin, RecoveryMixin):
    """The members of one job, their collectives and declarations."""

    def __init__(
        self,
        config: Config,
        *,
        now: float,
        machines: Mapping[Place, str] | None = None,
        state_of: Callable[[int, Join], str] = lambda *_: "",
        replay: Sequence[ViewRecord] = (),
        takes_over: tuple[int, int] | None = None,
    ) -> None:
        """Open the first lobby; machines: of future members, as far as a launcher knows them.

        state_of: returns the state of the thread that sends a peer's heartbeats, if its process
        can be seen from here, or UNREACHED. replay: views of another job, which this one makes
        again. takes_over: from a scheduler that died: term of this one, and how many views have
        ended before the present program's first.
        """
        self.phase = Phase.LOBBY
        self.generation = 1
        self.has_been_tried = self.has_begun = False  # by a worker; by all of them, ever
        self.first_cause: PeerLost | None = None
        self._config = config
        self._state_of = state_of
        self._peers: dict[int, Peer] = {}
        self._patience_s = patience_s(config.lease_s)
        self._suspicions = Suspicions(self._patience_s, has_validators=config.num_validators > 0)
        self._slept: tuple[float, float] = (-float("inf"), 0.0)  # until when, and how long
        self._departure = ""  # text about a member that stopped serving while others worked
        self._ends: dict[int, None] = {}  # peers whose connections have ended, in that order
        self._notes: list[str] = []
        self._to_end: set[Place] = set()  # their launcher is about to end these
        self._why_to_end = ""
        self._why_no_start = ""  # as was told to those who first waited in vain
        self._out: list[Action] = []
        self._idle_until = now + config.start_timeout_s
        self._watch = StartWatch(config.start_watch_s)
        self._missing = MissingMembers(machines or {}, self._patience_s)
        self._goes_on = False
        self._view = config  # with the numbers of workers and servers that now make a job
        self.is_changing = False  # the survivors of a view are about to await the next..
        self._change_until = float("inf")  # ..and are lost if they do not by then
        self._why_change = ""  # of the last change
        self._is_finished = False
        self._end_reason = ""
        self._end_code = 0
        self.refused: dict[str, int] = {}  # number of refused requests, by kind
        self._declarations = Declarations(config, owners={}, refused=self.refused)
        self._collectives = Collectives(config.n_programs, self._declarations)
        self._replay = Replay(replay)
        self._commits = Commits(self._replay)
        self._newcomers = Newcomers(config)
        self._n_views = 0  # that have ended, and before the present program's first
        self._views_before = 0
        self._in_view: tuple[int, ...] = ()  # workers, by the ranks that they began with
        if takes_over is not None:
            self._begin_recovery(*takes_over, now)

    # ---- events ----

    def receive(self, peer: int, message: ToScheduler | Malformed, now: float) -> list[Action]:
        """Handle a message of a peer."""
        member = self._peers.get(peer)
        if isinstance(message, Join):
            self._join(peer, message, now)
        elif isinstance(message, Rejoin):
            self._rejoin(peer, message, now)
        elif isinstance(message, Absent) and peer == LAUNCHER:
            self._take_report(message, now)
        elif (newcomer := self._newcomers.get(peer)) is not None:
            self._hear_newcomer(newcomer, message, now)
        elif member is None or isinstance(message, Absent | Attend | AwaitEnds):
            self._out.append(Close(peer))
        elif isinstance(message, ResultsLanded):
            self._land(member, message, now)
        elif isinstance(message, BoardRead):
            self._take_board(member, message, now)
        elif self.is_changing and isinstance(message, Declare | Meeting | Waiting):
            self._fail(member, message.request, "view", VIEW_CHANGES)
        elif isinstance(message, Malformed):
            self._fail(member, message.request, "protocol", message.message)
        elif isinstance(message, Leave):
            self._leave(member, message, now)
        elif isinstance(message, AskClock):
            self._out.append(Send(peer, ClockTold(message.request, now)))
        elif isinstance(message, AwaitStart):
            self._await_start(member, message, now)
        elif isinstance(message, ReportLost):
            self._report_lost(member, message, now)
        elif isinstance(message, Unheard):
            self._give_up(member, message, now)
        elif isinstance(message, Confirmed):
            self._take_answer(member, message, now)
        elif isinstance(message, KeysReady | KeysFailed):
            self._keys(member, message)
        elif isinstance(message, Tell):
            self._relay(member, message)
        elif isinstance(message, Dropped):
            self._declarations.dropped(peer, message.request)
        elif isinstance(message, Whereabouts):
            self._send_all(self._collectives.stalls.answer(member.number, message))
        else:
            self._collective(member, message, now)
        return self._drain(now)

    def closed(self, peer: int, cause: str, now: float) -> list[Action]:
        """Handle the end of a peer's control connection without a leave."""
        self._let_newcomer_go(peer, cause)
        if self._recovery is not None:
            self._recovery.drop(peer)
        self._end_of(peer, cause, now)
        return self._drain(now)

    def pulse_closed(self, peer: int, now: float) -> list[Action]:
        """Handle the end of a pulse connection, which confirms a suspicion."""
        text = self._suspicions.of(peer)
        if text is not None:
            self._end_of(peer, f"{PULSE_CLOSED}; {text}", now)
        return self._drain(now)

    def stop(self, reason: str, now: float) -> list[Action]:
        """End the job from outside (a signal)."""
        if self.phase is not Phase.OVER:
            self._end(reason, 0 if self.first_cause is None else 1, now)
        return self._drain(now)

    def request_locations(self, now: float) -> list[Action]:
        """Find out, and log, which workers wait for which."""
        workers = self._of_role("worker")
        self._out += [Send(item.peer, Locate(0, "")) for item in workers if item.is_working]
        self._send_all(self._collectives.look(now))
        return self._drain(now)

    @property
    def inquiries(self) -> int:
        """Return the number of inquiries under way."""
        return self._collectives.stalls.count

    def expect_ends(self, places: Iterable[Place], why: str) -> None:
        """Record that a launcher is about to end these processes, and why."""
        self._to_end.update(places)
        self._why_to_end = why

    def tick(self, now: float) -> list[Action]:
        """Handle everything that is due; to be called at next_deadline()."""
        self._drop_ended(now)
        self._judge_silences(now)
        self._drop_suspects(now)
        for newcomer in self._newcomers.silent(now):
            self._let_newcomer_go(newcomer.peer, "it was silent")
        self._newcomers.remind(now)
        for member in list(self._peers.values()):
            if member.start_request is not None and member.start_deadline <= now:
                self._start_timed_out(member, now)
        impatient = [item for item in self._leaving() if item.leave_deadline <= now]
        for item in impatient:
            self._note_departure(item)
        self._finish_leaving(impatient, now)
        self._send_all(self._collectives.expire(now))
        self._send_declared(self._declarations.expire(now))
        if self._change_until <= now:
            self._drop_absent_survivors(now)
        if self._come_until <= now:
            self._take_over_late(now)
        if self._idle_until <= now:
            self._idle_timed_out(now)
        if self._watch.due <= now:
            log.warning("no start after %.0f s: %s", self._watch.next(now), self.missing_text())
        self._end_start_in_vain(now)
        return self._drain(now)

    def next_deadline(self) -> float | None:
        """Return the time of the next tick, None when nothing can become due."""
        times = [member.judge_at for member in self._peers.values()]
        times += [member.ended_until for member in self._ended()[:1]]
        times += self._suspicions.deadlines()
        times += [
            member.start_deadline
            for member in self._peers.values()
            if member.start_request is not None
        ]
        times += [member.leave_deadline for member in self._leaving()]
        parts = (self._collectives.next_deadline(), self._declarations.next_deadline())
        times += [time for time in parts if time is not None]
        times += [self._idle_until, self._watch.due, self._change_until, self._come_until]
        times.append(self._newcomers.next_deadline())
        if self._is_starting:
            times.append(self._missing.next_deadline())
        first = min(times)
        return None if first == float("inf") or self._is_finished else first

    def pending(self) -> set[tuple[int, int]]:
        """List (peer, request) of all unanswered requests."""
        waiting = set(self._collectives.waiting()) | set(self._declarations.waiting())
        waiting |= set(self._newcomers.waiting())
        waiting |= set(() if self._recovery is None else self._recovery.waiting())
        asked = ((one.peer, what) for one in self._peers.values()
                 for what in (one.start_request, one.leave_request))  # fmt: skip
        return waiting | {(peer, what.request) for peer, what in asked if what is not None}

    def members(self) -> tuple[tuple[int, str, int | None], ...]:
        """List (peer, role, rank) of all members; the rank is the one that they began with."""
        return tuple((item.peer, item.join.role, item.place) for item in self._peers.values())

    def peers_of(self, numbers: Iterable[int]) -> list[int]:
        """List the peers that have these numbers in the job that runs."""
        wanted = set(numbers)
        return [item.peer for item in self._peers.values() if item.number in wanted]

    def missing_text(self) -> str:
        """Return which members have joined, which have not, and which were lost."""
        if self.phase is Phase.RUNNING:
            running = [item.full_name for item in self._programs() if item.is_working]
            return f"the job's earlier run goes on: {join_names(running)} did not leave it"
        parts: list[str] = []
        for role in ("worker", "validator", "server"):
            if total := places(self._config, role)[0]:
                parts += self._missing.describe(role, total, self._of_role(role))
        return "; ".join(parts + [f"earlier: {note}" for note in self._notes])

    # ---- joining ----

    def _join(self, peer: int, join: Join, now: float) -> None:
        if peer in self._peers or peer in self._newcomers:
            self._send(peer, Failed(join.request, "protocol", "this connection joined already"))
            return
        refusal = self._refuse(join)
        if refusal is not None:
            kind, text = refusal
            log.warning("refused a %s of %s, pid %d: %s", join.role, join.hostname, join.pid, text)
            self._send(peer, Failed(join.request, kind, text))
            self._out.append(Close(peer))
            return
        lease = now + self._config.lease_s + self._config.handshake_timeout_s
        if join.is_newcomer:
            self._greet(Peer(peer, join, None, lease, lease, place=join.rank))
            return
        self._peers[peer] = Peer(peer, join, join.rank, lease, lease, place=join.rank)
        self.has_been_tried = self.has_been_tried or join.role == "worker"
        if join.role != "server" or self.generation == 1:
            self._idle_until = float("inf")
        self._send(peer, Joined(join.request, peer))

    def _refuse(self, join: Join) -> tuple[str, str] | None:
        """Return why a process cannot join: kind and message."""
        if self.first_cause is not None:
            return "peer_lost", f"the job is broken: {self.first_cause}"
        if self.phase is Phase.OVER:
            return "shutdown", "the job is over; start a new one"
        if join.role == "scheduler":
            return "config", "a scheduler cannot join a job; set FASTPS_ROLE"
        members = list(self._peers.values())
        if join.is_newcomer:
            return self._refuse_newcomer(join)
        if self.is_changing or (self.phase is Phase.RUNNING and self._view is not self._config):
            return "config", too_late(self._config)
        text = refuse(join, self._config, self._rivals(join.role), members)
        return None if text is None else ("config", text)

    def _rivals(self, role: str) -> list[Peer]:
        """List the members that compete with a new one for places and ranks."""
        working = [item for item in self._programs() if item.is_working]
        has_one_left = self.phase is Phase.RUNNING and len(working) < self._view.n_programs
        if role != "server" and has_one_left:
            return [item for item in self._of_role(role) if not item.has_started]
        return self._of_role(role)

    def _await_start(self, member: Peer, message: AwaitStart, now: float) -> None:
        if member.has_started or member.start_request is not None or member.is_out:
            self._fail(member, message.request, "protocol", "asked for the start twice, or left")
            return
        if self._answer_ended(member, message.request):
            return
        member.start_request = message
        member.start_deadline = now + message.timeout_s
        if message.port or message.unix:
            member.join = replace(member.join, port=message.port, unix=message.unix)
        if self.phase is Phase.LOBBY:
            self._watch.begin(now)
        self._start_if_complete(now)
        self._end_start_in_vain(now)

    def _end_start_in_vain(self, now: float) -> None:
        """End a start for which some members wait although others will never come."""
        if not self._is_starting:
            return
        absent = self._missing.first(
            {
                (item.join.role, item.place)
                for item in self._peers.values()
                if item.place is not None
            },
            now,
            is_first_start=self.generation == 1,
        )
        if absent and any(item.start_request for item in self._peers.values()):
            log.warning("the job cannot start: %s %d: %s", absent.role, absent.rank, absent.cause)
            self._fail_job(
                PeerLost(absent.role, absent.rank, absent.host, absent.pid, absent.cause)
            )
            self._after_departure(now)

    @property
    def _is_starting(self) -> bool:
        """Whether members await a start that some may never come to."""
        return self.phase is Phase.LOBBY and not self.is_changing

    def _start_if_complete(self, now: float) -> None:
        if self.phase is not Phase.LOBBY or self._recovery is not None:
            return
        workers, servers = self._programs(), self._of_role("server")
        if len(workers) < self._view.n_programs or len(servers) < self._view.num_servers:
            return
        if any(not item.has_started and item.start_request is None for item in workers + servers):
            return
        validators = number(self._of_role("validator"))
        self._start(number(self._of_role("worker")) + validators, number(servers), now)

    def _start(self, workers: list[Peer], servers: list[Peer], now: float) -> None:
        try:
            plan = plan_job(self._view, workers, servers)
        except ConfigError as error:
            for item in workers + servers:
                self._fail_start(item, "config", str(error))
            self._end(f"it cannot start: {error}", 1, now)
            return
        self.phase = Phase.RUNNING
        self.has_begun = True
        if not self.is_changing:
            self._views_before = self._n_views
        self.is_changing, self._change_until = False, float("inf")
        self._watch.end()
        self._notes.clear()
        for place, item in enumerate(plan.peers):
            item.number, item.is_owner = place, place in plan.owners
        owners = {place: plan.peers[place].peer for place in plan.owners}
        self._declarations = Declarations(
            self._view, owners=owners, weights=plan.weights, refused=self.refused
        )
        self._goes_on = workers[0].join.goes_on
        self._board = BoardLog(self.generation) if plan.has_board(self._view) else None
        self._collectives = Collectives(
            self._view.n_programs, self._declarations,
            regroup=self._regroup if self._config.is_elastic else None,
            goes_on=self._goes_on, watch_s=self._config.stall_watch_s,
            peers={item.number or 0: (item.peer, item.full_name) for item in workers},
        )  # fmt: skip
        self._in_view = places_of(workers)
        for group in (servers, workers):
            self._tell_started(plan, group)
        self._look_around(now)
        self._replay_loss(now)

    def _tell_started(self, plan: Plan, group: list[Peer]) -> None:
        places = local_ranks(group)
        for item in group:
            item.has_started = True
            request, item.start_request = item.start_request, None
            job = plan.job(
                self._view, item, self.generation, places[item.peer],
                view=self._n_views - self._views_before + 1,
            )  # fmt: skip
            if request is None:  # a server of an earlier generation
                self._send(item.peer, NewJob(job))
            else:
                self._send(item.peer, Started(request.request, job))

    def _start_timed_out(self, member: Peer, now: float) -> None:
        """End the wait of a member, and of those whose waits end soon: they miss the same ones.

        In a view that begins each has its own time, so that one cannot end the waits of others.
        """
        assert member.start_request is not None
        asked = member.start_request
        text = start_text(self.missing_text(), asked.limit_s or asked.timeout_s)
        self._why_no_start = self._why_no_start or text
        until = now + TOGETHER_S * (not self.is_changing)
        for item in list(self._peers.values()):
            if item.start_request is not None and item.start_deadline <= until:
                self._fail_start(item, "stall", text)
                self._drop(item.peer, GAVE_UP, now)

    # ---- at work ----

    def _collective(self, member: Peer, message: Declare | Meeting | Waiting, now: float) -> None:
        if self._answer_ended(member, message.request):
            return
        if isinstance(message, Regroup) and message.generation != self.generation:
            self._fail(member, message.request, "view", VIEW_CHANGES)
            return
        rank = member.number
        if not (member.is_worker and member.is_working) or rank is None:
            text = f"{type(message).__name__.lower()} is for workers of a started job"
            self._fail(member, message.request, "protocol", text)
        elif isinstance(message, Declare) and self._departure:
            self._fail(member, message.request, "peer_lost", self._departure)
        elif isinstance(message, Declare):
            self._send_declared(self._declarations.declare(rank, member.peer, message, now))
        else:
            self._send_all(self._collectives.enter(rank, member.peer, message, now))
            self._admit_where_due(now)

    def _keys(self, member: Peer, message: KeysReady | KeysFailed) -> None:
        if member.number is None or not (member.is_owner and member.has_started):
            return
        if isinstance(message, KeysReady):
            answers = self._declarations.keys_ready(member.number, message.request_id)
        else:
            answers = self._declarations.keys_failed(
                member.number, message.request_id, message.message
            )
        self._send_declared(answers)

    def _answer_ended(self, member: Peer, request: int) -> bool:
        """Answer a request that comes after the end of the job; return whether it has ended."""
        if self.first_cause is not None:
            self._fail(member, request, "peer_lost", str(self.first_cause))
        elif self.phase is Phase.OVER:
            self._fail(member, request, "shutdown", "the job is over")
        return self.phase in (Phase.BROKEN, Phase.OVER)

    # ---- leaving and losing ----

    def _leave(self, member: Peer, message: Leave, now: float) -> None:
        if member.leave_request is not None:
            self._fail(member, message.request, "protocol", "leaving was asked for twice")
            return
        member.leave_request, member.leave_deadline = message, now + message.timeout_s
        is_needed = self._is_needed(member)
        if not member.is_worker and is_needed:
            self._send(member.peer, Done(message.request))
            self._drop(member.peer, "it left in order while workers still need it", now)
            return
        if member.has_started and self.phase is Phase.RUNNING:
            self._note_left(member)
        if not is_needed:
            self._finish_leaving([member], now)

    def _note_left(self, member: Peer) -> None:
        """Announce a worker's departure; fail its own requests and those that wait for it."""
        assert member.number is not None
        for peer, request in [*self._collectives.waiting(), *self._declarations.waiting()]:
            if peer == member.peer:
                self._fail(member, request, "shutdown", "this process leaves the job")
        if member.is_worker:
            event = PeerLeft(member.number)
            self._out += [Send(peer, event) for peer in self._peers if peer != member.peer]
            self._send_all(self._collectives.remove(member.number))
            self._declarations.remove(member.number)

    def _note_departure(self, member: Peer) -> None:
        """Announce to active workers that a server leaves with its worker, before links end."""
        if not self._is_needed(member):
            return
        assert member.number is not None
        self._out += [
            Send(item.peer, OwnerLeft(member.number))
            for item in self._programs()
            if item.is_working
        ]
        if not self._departure:
            self._departure = (
                f"{member.full_name} left the job while others still had work, and the server "
                "in it too"
            )
            log.warning("%s", self._departure)
            self._suspicions.clear()
            self._send_all(self._declarations.fail_all("peer_lost", self._departure))

    def _finish_leaving(self, leaving: list[Peer], now: float) -> None:
        """Answer the members that asked to leave, and end their membership."""
        self._dismiss(leaving)
        if leaving:
            self._after_departure(now)

    def _dismiss(self, leaving: list[Peer]) -> None:
        for item in leaving:
            assert item.leave_request is not None
            self._send(item.peer, Done(item.leave_request.request))
            self._remove(item)

    def _leaving(self) -> list[Peer]:
        """List the workers that have left and only serve the others."""
        return [item for item in self._peers.values() if item.leave_request is not None]

    def _is_needed(self, owner: Peer) -> bool:
        """Return whether active workers need the keys of this member."""
        return (
            self.phase is Phase.RUNNING
            and owner.is_owner
            and any(item.is_working for item in self._programs())
        )

    def _end_of(self, peer: int, cause: str, now: float) -> None:
        """Drop a member whose connection has ended, once its launcher has said how."""
        member = self._peers.get(peer)
        if member is None or member.ended:
            return
        waits = member.join.is_watched and self.phase is Phase.RUNNING
        member.ended, member.ended_until = cause, now + self._patience_s * waits
        self._ends[peer] = None
        self._drop_ended(now)

    def _take_report(self, message: Absent, now: float) -> None:
        """Take a launcher's report: before the start, others may wait in vain for this process."""
        if self._recovery is not None:
            self._recovery.note_end(message)
            self._take_over_if_complete(now)
            return
        if self.phase is Phase.LOBBY and not (self.is_changing or message.is_newcomer):
            cause = f"{message.cause} before the job had started"
            self._missing.add(replace(message, cause=cause))
            self._end_start_in_vain(now)
            return
        for member in self._of_role(message.role):
            if (member.place, member.join.pid) == (message.rank, message.pid):
                self._ends[member.peer] = None
                member.ended = f"{message.cause} before it had left the job"
                member.ended_until = now
        self._drop_ended(now)

    def _ended(self) -> list[Peer]:
        """List the members that have ended, in that order."""
        self._ends = {peer: None for peer in self._ends if peer in self._peers}
        return [self._peers[peer] for peer in self._ends]

    def _drop_ended(self, now: float) -> None:
        """Drop members whose connections have ended: a later end never comes before a first."""
        for member in self._ended():
            if member.ended_until > now:
                return
            self._lose(member, member.ended, now)

    def _drop(self, peer: int, cause: str, now: float) -> None:
        """Lose a member that has not left in order, after those whose connections have ended."""
        for item in self._ended():
            self._lose(item, item.ended, now)
        if (member := self._peers.get(peer)) is not None:
            self._lose(member, cause, now)

    def _drop_suspects(self, now: float) -> None:
        """Judge the reports that no better evidence has come before, one at a time.

        In an elastic job the first loss clears the others: it may be why their links broke.
        """
        while due := self._suspicions.due(now):
            if ended := self._ended():
                self._lose(ended[0], ended[0].ended, now)
                continue
            self._judge_report(due[0], now)

    def _lose(self, member: Peer, cause: str, now: float) -> None:
        """Remove a member that did not leave in order."""
        if member.peer not in self._peers:
            return
        is_first = not (self.first_cause or self.phase is Phase.OVER or cause == GAVE_UP)
        if (member.join.role, member.place) in self._to_end:
            is_first, cause = False, self._why_to_end
        (log.warning if is_first else log.info)("%s is lost: %s", member.full_name, cause)
        if self._can_change_view(member):
            self._change_view(member, cause, now)
        elif self._is_last(member):  # all others have what they came for: the job ends in order
            self._send_all(self._collectives.fail_all("peer_lost", cause))
            self._send_all(self._declarations.fail_all("peer_lost", cause))
        elif member.has_started and self.phase is Phase.RUNNING and self._can_spare(member):
            self._announce_loss(member, cause)
        elif self.is_changing or (member.has_started and self.phase is Phase.RUNNING):
            before = (
                f"; before, {self._why_change}" if self.is_changing else ""
            )  # or because of it
            self._fail_job(self._lost(member, cause + before))
            self._dismiss([item for item in self._leaving() if item is not member])
        elif self.phase is Phase.LOBBY:
            self._note_early_end(member, cause, now)
        self._remove(member)
        self._end_start_in_vain(now)
        self._after_departure(now)

    def _note_early_end(self, member: Peer, cause: str, now: float) -> None:
        """Record a member lost before the start, which ends the start that others await."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append(f"{member.full_name} joined and was lost: {cause}")
        others = (item for item in self._peers.values() if item is not member)
        if cause != GAVE_UP and any(item.start_request for item in others):
            group = self._of_role(member.join.role)
            rank = group.index(member) if member.rank is None else member.rank
            text = f"{cause}, before the job had started"
            join = member.join
            absent = Absent(join.role, rank, join.hostname, join.pid, text)
            self._missing.note_lost(absent, now, may_be_reported=bool(member.ended))

    def _lost(self, member: Peer, cause: str) -> PeerLost:
        join, goes_on = member.join, self._can_spare(member)
        text = self._suspicions.cause(member.peer, cause, role=join.role * self._goes_on)
        return PeerLost(join.role, member.rank or 0, join.hostname, join.pid, text, goes_on)

    def _can_change_view(self, member: Peer) -> bool:
        """Return whether the job goes on in a new view without a member."""
        left = self._staying([member])
        is_in = self.is_changing or (member.has_started and self.phase is Phase.RUNNING)
        return is_in and 0 < self._config.elastic_min <= len(left)

    def _ends_without(self, dead: Sequence[Peer]) -> bool:
        """Return whether the job, or its start, ends when members are lost together."""
        left = self._staying(dead)
        goes_on = 0 < self._config.elastic_min <= len(left) or all(map(self._can_spare, dead))
        return self._is_awaited(dead) and (self._is_starting or not goes_on)

    def _is_last(self, member: Peer) -> bool:
        """Return whether all other workers of an elastic job left in order, and are enough."""
        others = self._staying([member])
        is_elastic = 0 < self._config.elastic_min < self._view.n_programs
        is_in = member.is_worker and member.has_started and self.phase is Phase.RUNNING
        return is_elastic and is_in and not others

    def _change_view(self, member: Peer, cause: str, now: float) -> None:
        """Begin the next view, which all others shall await; what they asked has failed."""
        lost = self._lost(member, cause)
        there = filter(self._is_in_job, self._peers.values())
        survivors = [item for item in there if item is not member]
        if member.is_worker and not self._replay.next_view(places_of(survivors)):
            self._fail_job(replace(lost, cause=f"{lost.cause}; {NOT_REPLAYED}"))
            return
        self._dismiss([item for item in self._leaving() if item is not member])
        self._begin_change(str(lost))
        self._send(member.peer, ViewLost(self.generation, lost, survives=False))
        self._call_to_view(survivors, ViewLost(self.generation, lost, survives=True), now)

    def _begin_change(self, cause: str, *, has_boundary: bool = False) -> None:
        """End the view, fail what was asked in it, and refuse those that await another job."""
        for item in [one for one in self._peers.values() if not self._is_in_job(one)]:
            self._fail_start(item, "config", too_late(self._config))
            self._remove(item)
        self.generation += 1
        self.phase, self.is_changing, self._departure = Phase.LOBBY, True, ""
        self._why_change = cause
        self._suspicions.clear()
        self._newcomers.announced = 0
        self._send_all(self._collectives.fail_all("view", cause))
        self._send_all(self._declarations.fail_all("view", cause))
        self._end_view(cause, has_boundary=has_boundary)

    def _call_to_view(self, members: list[Peer], event: ViewLost | ViewJoined, now: float) -> None:
        """Let the members of the last view come to the next one."""
        for item in members:
            self._fail_start(item, "view", event.cause)
            if not item.is_out:  # who leaves knows that, and nothing else concerns it
                self._send(item.peer, event)
            item.has_started, item.is_owner, item.number = False, False, None
        self._in_view = places_of(members)
        self._count_survivors(members)
        self._change_until = now + self._config.start_timeout_s
        self._watch.begin(now)

    def _count_survivors(self, survivors: Iterable[Peer]) -> None:
        """Set the numbers of workers and servers that make the next view."""
        roles = [item.join.role for item in survivors]
        self._view = dataclasses.replace(
            self._config, size=roles.count("worker"), num_servers=roles.count("server")
        )

    def _drop_absent_survivors(self, now: float) -> None:
        """Drop the survivors that did not await the next view in time."""
        self._change_until = float("inf")
        waited_s = self._config.start_timeout_s
        text = (
            f"it did not come to the next view within {waited_s:g} s; raise "
            "FASTPS_START_TIMEOUT_S if its program holds Python's lock for so long"
        )
        for item in list(self._peers.values()):
            if item.start_request is None:
                self._drop(item.peer, text, now)

    def _can_spare(self, member: Peer) -> bool:
        """Return whether the job continues without a member; validators and servers are needed."""
        return self._goes_on and member.join.role == "worker"

    def _announce_loss(self, member: Peer, cause: str) -> None:
        """Continue without a worker: announce the loss to all members, the lost one included."""
        assert member.number is not None
        if member.is_working:
            self._tell_all(self._lost(member, cause))
            self._send_all(self._collectives.remove(member.number))
            self._declarations.remove(member.number)

    def _fail_job(self, cause: PeerLost) -> None:
        """Record the first cause, send it to all members, lost ones too, and fail all requests."""
        self.first_cause, self.phase = cause, Phase.BROKEN
        self.is_changing, self._change_until = False, float("inf")
        self._watch.end()
        self._suspicions.clear()
        self._tell_all(self.first_cause)
        message = str(self.first_cause)
        self._send_all(self._collectives.fail_all("peer_lost", message))
        self._send_all(self._declarations.fail_all("peer_lost", message))
        for item in self._peers.values():
            self._fail_start(item, "peer_lost", message)
        self._end_newcomers(message)

    def _remove(self, member: Peer) -> None:
        del self._peers[member.peer]
        self._suspicions.drop(member.peer)
        self._out.append(Close(member.peer))

    def _after_departure(self, now: float) -> None:
        """Enter the next phase if the last worker or the last member has gone."""
        if self.phase is Phase.RUNNING and not any(item.is_working for item in self._programs()):
            self._dismiss(self._leaving())
            self._next_generation(now)
        if self.phase is Phase.BROKEN and not self._programs():
            self._end(f"the job is broken: {self.first_cause}", 1, now)
        if self.is_changing and self._programs():  # one may have left instead of coming
            self._count_survivors(self._peers.values())
            self._start_if_complete(now)
        if self.phase is Phase.LOBBY and not self._programs():
            self.is_changing, self._change_until = False, float("inf")
            if self.has_begun:
                self._end_newcomers(ALL_LEFT)
            if self.generation > 1:
                self._idle_until = min(self._idle_until, now + self._config.linger_s)
            elif not self._peers:
                self._watch.end()
                self._idle_until = now + self._config.start_timeout_s

    def _next_generation(self, now: float) -> None:
        if self._config.elastic_min:
            self._end_view(VIEW_OVER)
        self._end_newcomers(ALL_LEFT)
        self.phase = Phase.LOBBY
        self.generation += 1
        self._departure = ""
        self._suspicions.clear()
        for server in self._of_role("server"):
            if server.has_started:
                self._send(server.peer, NewGeneration(self.generation))
        self._start_if_complete(now)

    def _report_lost(self, member: Peer, report: ReportLost, now: float) -> None:
        """Suspect a reported member; the end of its own connections may explain it better.

        A member that reports itself is dropped at once: its device or network failed. After a
        server has left with its worker there are no suspicions any more: when one link ends,
        members end all links.
        """
        if self.phase is not Phase.RUNNING or not member.has_started or self._departure:
            return
        if report.generation not in (0, self.generation):
            return
        if report.member == member.number and not report.is_owner:
            self._drop(member.peer, report.cause, now)
            return
        for item in self._peers.values():
            is_meant = item.is_owner if report.is_owner else item.is_working
            if item.number == report.member and is_meant:
                self._suspect(item, member, report, now)

    def _relay(self, member: Peer, message: Tell) -> None:
        """Send a worker's data to the workers it names."""
        if member.number is None or self.phase is not Phase.RUNNING:
            return
        if message.has_joined:
            self._send_all(self._collectives.join(member.number))
        told, members = Told(member.number, message.data), set(message.members)
        for item in self._programs():
            if item.is_working and item.number in members:
                self._send(item.peer, told)

    # ---- the end ----

    def _idle_timed_out(self, now: float) -> None:
        self._idle_until = float("inf")
        if self.phase is Phase.OVER:
            self._finish(f"{self._end_reason}; some members did not leave in time")
        elif self.generation > 1:
            self._end("all workers left", 0, now)
        elif self._why_no_start:
            self._end(f"all that had joined gave up: {self._why_no_start}", 1, now)
        else:
            self._end(
                f"nobody joined within {self._config.start_timeout_s:g} s; set "
                "FASTPS_SCHEDULER_HOST and FASTPS_SCHEDULER_PORT of servers and workers to this "
                "scheduler's address, or raise FASTPS_START_TIMEOUT_S if they start late", 1, now,
            )  # fmt: skip

    def _end(self, reason: str, code: int, now: float) -> None:
        """Announce the end of the job to all members and wait for them to leave."""
        self.phase = Phase.OVER
        self.is_changing, self._change_until = False, float("inf")
        self._watch.end()
        self._end_reason, self._end_code = reason, code
        self._suspicions.clear()
        self._send_all(self._collectives.fail_all("shutdown", reason))
        self._send_all(self._declarations.fail_all("shutdown", reason))
        for item in self._peers.values():
            self._fail_start(item, "shutdown", f"the job is over: {reason}")
        self._end_newcomers(reason)
        self._end_recovery(reason)
        self._dismiss(self._leaving())
        self._tell_all(JobOver(reason))
        self._idle_until = now + self._config.shutdown_timeout_s

    def _finish(self, reason: str) -> None:
        self._is_finished = True
        for peer in list(self._peers):
            self._out.append(Close(peer))
        self._peers.clear()
        self._out.append(Finish(self._end_code, reason))

    # ---- small things ----

    def _drain(self, now: float) -> list[Action]:
        self._announce_newcomers()
        if self.phase is Phase.OVER and not self._peers and not self._is_finished:
            self._finish(self._end_reason)
        out, self._out = self._out, []
        return out

    def _send(self, peer: int, message: ToMember) -> None:
        self._out.append(Send(peer, message))

    def _send_all(self, answers: Answers) -> None:
        self._out += [Send(peer, message) for peer, message in answers]

    def _send_declared(self, answers: Answers) -> None:
        """Send what declarations answer, and let nobody wait to forget what they poisoned."""
        self._send_all(answers)
        if any(isinstance(message, TensorPoisoned) for _, message in answers):
            self._send_all(self._collectives.end_poisoned())

    def _tell_all(self, message: ToMember) -> None:
        self._out += [Send(peer, message) for peer in self._peers]

    def _fail(self, member: Peer, request: int, kind: str, text: str) -> None:
        self._send(member.peer, Failed(request, kind, text))

    def _fail_start(self, member: Peer, kind: str, text: str) -> None:
        request, member.start_request = member.start_request, None
        if request is not None:
            self._fail(member, request.request, kind, text)

    def _programs(self) -> list[Peer]:
        """List the workers, and the validators."""
        return [item for item in self._peers.values() if item.is_worker]

    def _is_in_job(self, item: Peer) -> bool:
        """Return whether a peer is in the job, or comes to its next view; others came too late."""
        return item.has_started or self.is_changing

    def _staying(self, without: Sequence[Peer]) -> list[Peer]:
        """List the workers of the job, or of its next view, that stay, except some."""
        there = filter(self._is_in_job, self._programs())
        return [item for item in there if item.is_staying and item not in without]

    def _of_role(self, role: str) -> list[Peer]:
        return [item for item in self._peers.values() if item.join.role == role]
