# SPDX-License-Identifier: Apache-2.0
"""A scheduler that takes over from one that died: its state, as the members report it.

The death of the scheduler is a change of view without a lost member. Each member that was in the
job comes back with the last job that it knows, and what it was told in that view (journal.py). The
members of the job are those of the latest one that somebody knows. When all of them have come, or
have ended, or are late, all are told what any of them knows to be committed, and which meetings
have ended. Then the view ends for all as after a loss, and the next one begins by the same code.
A member that is missing is lost in it. Members of an earlier view, who are not in the latest, were
lost before. Pure, as the Membership is.

One member's word is no verdict here either. A view that has begun was announced to all members
before. So a report of a view is believed if half of those that came back report the same one, or
were told of it and await it. A member that reports a later view than that is lost. Only what most
members say lets the scheduler begin before it is time without those that have yet to come back.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastps.config import Config
from fastps.contract.partition import MAX_PIECES
from fastps.control.actions import Action, Close, Phase
from fastps.control.admission import Peer, places, places_of
from fastps.control.commits import Commits, is_operation, key_of, parts_of
from fastps.control.landing import BoardLog
from fastps.control.protocol import (
    MAX_MEMBERS,
    Absent,
    BlobData,
    Committed,
    Failed,
    Job,
    JobOver,
    Join,
    Member,
    Met,
    PeerLost,
    Rejoin,
    Rejoined,
    Success,
    ToMember,
    ViewJoined,
    ViewLost,
)

log = logging.getLogger(__name__)

COME_S = 5.0  # beyond a lease, for members to come back
DIED = "its process died, and its launcher has started another one, which takes over"
STALE = "this process was taken for lost, or came back too late"
CONTRADICTED = "most members that came back know of no such view as it reports"
LATE = "it did not come back within {:g} s after the scheduler had died"
Identity = tuple[str, int, str, int]  # role, rank at the beginning, host name and process


def _identity(member: Member) -> Identity:
    return member.role, member.place, member.hostname, member.pid


def _reporter(report: Rejoin) -> Identity:
    """Return who reports; its token has proven role and rank, see refusal()."""
    return _identity(report.job.members[report.job.me])


@dataclass(frozen=True)
class Takeover:
    """What all reports together say; numbers are those of members in the job.

    generation: the last one that was announced. has_boundary: it was one for newcomers.
    """

    job: Job
    generation: int
    has_boundary: bool
    peers: dict[int, int]  # peer of each member that is here, by number
    left: frozenset[int]
    missing: tuple[int, ...]
    stale: tuple[int, ...]  # peers
    contradicted: tuple[int, ...]  # members, which are missing too
    committed: dict[tuple[int, ...], dict[str, None]]  # entries, by members
    met: dict[tuple[str, int], Success]

    def committed_to(self, number: int, known: Committed) -> Committed:
        """Return the results of a member that are committed, without those that it knows."""
        has = {entry for _, entries in known for entry in entries}
        found = ((members, tuple(entry for entry in entries if entry not in has))
                 for members, entries in self.committed.items()
                 if not members or number in members)  # fmt: skip
        return tuple((members, entries) for members, entries in found if entries)

    def met_by_others(self, known: Met) -> Met:
        """Return the answers that a member does not know."""
        has = {(key, number) for key, number, _ in known}
        return tuple((*place, answer) for place, answer in self.met.items() if place not in has)

    @property
    def last(self) -> dict[str, int]:
        """The last number that is committed, by the keys of the log of views."""
        n, found = self.job.size, Counter[str]()
        for members, entries in self.committed.items():
            if len(members) == 1 < n:
                continue
            for name, number in map(parts_of, entries):
                key = key_of(name, frozenset(members or range(n)), n)
                found[key] = max(found[key], number)
        return dict(found)


class Recovery:
    """The reports of members that come back."""

    def __init__(self, term: int, n_members: int) -> None:
        """Begin without any; term: of this scheduler; n_members: with which the job began."""
        self._term = term
        self._n_members = n_members
        self._reports: dict[int, Rejoin] = {}  # by peer
        self._ended: dict[Identity, Absent] = {}

    def refusal(self, report: Rejoin) -> str:
        """Return why a report is none; empty if it is one."""
        job, join = report.job, report.join
        if report.term >= self._term:
            return (
                f"it has heard the scheduler of term {report.term}, and this one has term "
                f"{self._term}; restart the job"
            )
        if report.told - job.generation > MAX_MEMBERS:  # each change loses or admits some
            return f"it is in view {job.generation}, and reports that {report.told} was announced"
        n_kept = len(report.met)
        for members, entries in report.committed:
            n_kept += 1 + len(entries) + len(members) // 8  # a rank takes less than an entry
        if n_kept > MAX_PIECES:
            return f"it reports {n_kept} results and meetings, and at most {MAX_PIECES} are kept"
        if not all(one.hostname.isprintable() for one in job.members):
            return "a host name in its report has control characters"
        me = job.members[job.me]
        if any(self._reports[one].job.generation > job.generation for one in self.rivals(report)):
            return STALE
        place = me.place if join.rank is None else join.rank
        if _identity(me) != (join.role, place, join.hostname, join.pid):
            return f"it is {join.role} {join.rank}, and reports the job of {me.role} {me.place}"
        return ""

    def rivals(self, report: Rejoin) -> list[int]:
        """List the peers that came back with the role and rank of a report."""
        who = _reporter(report)[:2]
        return [peer for peer, one in self._reports.items() if _reporter(one)[:2] == who]

    def add(self, peer: int, report: Rejoin) -> None:
        """Take a member's report, in place of one that it made on another connection."""
        for rival in self.rivals(report):
            self.drop(rival)
        self._reports[peer] = report

    def drop(self, peer: int) -> None:
        """Forget a member whose connection has ended."""
        self._reports.pop(peer, None)

    def note_end(self, absent: Absent) -> None:
        """Take a launcher's report that a process has ended."""
        self._ended[absent.role, absent.rank, absent.host, absent.pid] = absent

    def report_of(self, peer: int) -> Rejoin:
        """Return the report of a peer."""
        return self._reports[peer]

    def waiting(self) -> list[tuple[int, int]]:
        """List (peer, request) of those that came back."""
        return [(peer, one.request) for peer, one in self._reports.items()]

    def cause_of(self, member: Member) -> str:
        """Return how a missing member ended; empty if nobody has said."""
        found = self._ended.get(_identity(member))
        return "" if found is None else found.cause

    def takeover(self) -> Takeover | None:
        """Return what the reports say; None if there are none."""
        if not self._reports:
            return None
        reports = self._reports.values()
        job = self._believed([*reports])
        inside = [one for one in reports if _is_same(one.job, job)]
        numbers = {_identity(member): number for number, member in enumerate(job.members)}
        found = {peer: numbers.get(_reporter(one)) for peer, one in self._reports.items()}
        later = {peer for peer, one in self._reports.items()
                 if one.job.generation >= job.generation and one not in inside}  # fmt: skip
        peers = {number: peer for peer, number in found.items()
                 if number is not None and peer not in later}  # fmt: skip
        said = Counter(number for one in inside for number in {*one.left})
        left = {number for number in said if 2 * said[number] > len(inside)}
        left |= {number for who, number in numbers.items()
                 if who in self._ended and self._ended[who].has_succeeded}  # fmt: skip
        left -= peers.keys()
        announced = max(one.told for one in reports)
        return Takeover(
            job,
            max(announced, job.generation),
            any(one.boundary > job.generation for one in reports),
            peers,
            frozenset(left),
            tuple(one for one in numbers.values() if one not in peers and one not in left),
            tuple(peer for peer in self._reports if peer not in peers.values()),
            tuple(one for peer in later if (one := found[peer]) is not None),
            _all_committed(one.committed for one in inside),
            _all_met(one.met for one in inside),
        )

    @staticmethod
    def _believed(reports: Sequence[Rejoin]) -> Job:
        """Return the latest job that at least half of the members know of or await."""
        known: list[tuple[bool, int, int, Job]] = []
        for job in (one.job for one in reports):
            members = {_identity(member) for member in job.members}
            n_for = sum(
                _is_same(one.job, job)
                or (one.job.generation < job.generation <= one.told
                    and _reporter(one) in members)
                for one in reports
            )  # fmt: skip
            known.append((2 * n_for >= len(reports), job.generation, n_for, job))
        return max(known, key=lambda one: one[:3] if one[0] else (one[0], one[2], one[1]))[-1]

    def is_complete(self, found: Takeover) -> bool:
        """Return whether all members have come, or have ended, and are most of the job's."""
        places = {who[:2] for who in self._ended}
        if 2 * len(found.peers) <= self._n_members - len(places):
            return False
        missing = [one for one in found.missing if one not in found.contradicted]
        return all(_identity(found.job.members[one]) in self._ended for one in missing)


def _is_same(one: Job, other: Job) -> bool:
    """Return whether two members are in the same view: one scheduler started it for all alike."""
    return (one.generation, one.members, one.owners) == (
        other.generation, other.members, other.owners,
    )  # fmt: skip


def _all_committed(reports: Iterable[Committed]) -> dict[tuple[int, ...], dict[str, None]]:
    """Merge what is committed; of each name, the last that somebody knows."""
    found: dict[tuple[int, ...], dict[str, None]] = {}
    last: dict[str, tuple[int, str]] = {}
    for members, entries in (each for report in reports for each in report):
        for entry in entries:
            if is_operation(entry):
                found.setdefault(members, {})[entry] = None
            else:
                name, number = parts_of(entry)
                last[name] = max(last.get(name, (0, "")), (number, entry))
    found.setdefault((), {}).update(dict.fromkeys(entry for _, entry in last.values()))
    return found


def _all_met(reports: Iterable[Met]) -> dict[tuple[str, int], Success]:
    """Merge the answers of meetings; an object is more than that there was one."""
    found: dict[tuple[str, int], Success] = {}
    for key, number, answer in (each for report in reports for each in report):
        if not isinstance(found.get((key, number)), BlobData):
            found[key, number] = answer
    return found


class RecoveryMixin:
    """Members that come back, for the Membership."""

    phase: Phase
    generation: int
    is_changing: bool
    has_begun: bool
    has_been_tried: bool
    _config: Config
    _view: Config
    _peers: dict[int, Peer]
    _out: list[Action]
    _commits: Commits
    _board: BoardLog | None
    _n_views: int
    _views_before: int
    _in_view: tuple[int, ...]
    _idle_until: float
    _recovery: Recovery | None = None  # while members are awaited
    _come_until = float("inf")
    _began = 0.0

    def _send(self, peer: int, message: ToMember) -> None:
        raise NotImplementedError

    def _fail_job(self, cause: PeerLost) -> None:
        raise NotImplementedError

    def _drop(self, peer: int, cause: str, now: float) -> None:
        raise NotImplementedError

    def _begin_change(self, cause: str, *, has_boundary: bool = False) -> None:
        raise NotImplementedError

    def _call_to_view(self, members: list[Peer], event: ViewLost | ViewJoined, now: float) -> None:
        raise NotImplementedError

    def _after_departure(self, now: float) -> None:
        raise NotImplementedError

    def _begin_recovery(self, term: int, views_before: int, now: float) -> None:
        """Await the members of a job whose scheduler died; see Membership."""
        members = (places(self._config, role)[0] for role in ("worker", "validator", "server"))
        self._recovery = Recovery(term, sum(members))
        self.has_begun = self.has_been_tried = self.is_changing = True
        self._views_before = views_before
        self._began, self._come_until = now, now + self._config.lease_s + COME_S

    def _rejoin(self, peer: int, report: Rejoin, now: float) -> None:
        """Take a member that comes back."""
        recovery = self._recovery
        text = STALE if recovery is None else recovery.refusal(report)
        if recovery is None or text:
            log.warning("refused %s, pid %d: %s", report.join.role, report.join.pid, text)
            self._refuse_return(peer, report, text)
            return
        for rival in recovery.rivals(report):
            self._refuse_return(rival, recovery.report_of(rival), STALE)
        recovery.add(peer, report)
        self._take_over_if_complete(now)

    def _refuse_return(self, peer: int, report: Rejoin, text: str) -> None:
        self._send(peer, Failed(report.request, "peer_lost", text))
        self._out.append(Close(peer))

    def _take_over_if_complete(self, now: float) -> None:
        """Take over when all members have come back, or have ended, or it is time."""
        recovery = self._recovery
        found = None if recovery is None else recovery.takeover()
        if recovery is None or found is None:
            return
        if recovery.is_complete(found) or self._come_until <= now:
            self._take_over(recovery, found, now)

    def _take_over_late(self, now: float) -> None:
        """Take over without those that are missing, or wait on where nobody has come."""
        self._take_over_if_complete(now)
        if self._recovery is not None:
            self._come_until = now + COME_S

    def _end_recovery(self, reason: str) -> None:
        """Let all go that have come back, since the job ends."""
        recovery, self._recovery, self._come_until = self._recovery, None, float("inf")
        for peer, request in () if recovery is None else recovery.waiting():
            self._send(peer, JobOver(reason))
            self._send(peer, Failed(request, "shutdown", f"the job is over: {reason}"))
            self._out.append(Close(peer))

    def _take_over(self, recovery: Recovery, found: Takeover, now: float) -> None:
        """Be in the view that the reports tell of, and end it for all."""
        job = found.job
        self._recovery, self._come_until, self._idle_until = None, float("inf"), float("inf")
        self.phase, self.is_changing, self.generation = Phase.RUNNING, False, found.generation
        self._n_views = self._views_before + job.view - 1
        for peer in found.stale:
            report = recovery.report_of(peer)
            is_later = report.job.generation >= job.generation
            self._refuse_return(peer, report, CONTRADICTED if is_later else STALE)
        lease = now + self._config.lease_s + self._config.handshake_timeout_s
        leaving: list[int] = []
        members: list[Peer] = []
        for number, member in enumerate(job.members):
            peer = found.peers.get(number, -1 - number)  # who is missing has no connection
            join = _join_of(member)
            if peer >= 0:
                report = recovery.report_of(peer)
                join = report.join
                if report.leaves:
                    leaving.append(peer)
                self._send(peer, Rejoined(
                    report.request, peer, committed=found.committed_to(number, report.committed),
                    met=found.met_by_others(report.met),
                ))  # fmt: skip
            item = Peer(
                peer, join, member.rank, lease, lease, has_started=True, place=member.place,
                number=number, is_owner=number in job.owners,
            )  # fmt: skip
            members.append(item)
            if number not in found.left and not (peer >= 0 and report.leaves):
                self._peers[peer] = item
        self._view = dataclasses.replace(
            self._config, size=job.n_workers, num_servers=len(job.members) - job.size
        )
        self._in_view = places_of(members)
        self._commits.last = found.last
        self._board = BoardLog(job.generation) if job.has_board else None
        for peer in leaving:
            self._out.append(Close(peer))
        log.warning(
            "took over from a scheduler that died: %d of %d members came back within %.2f s",
            len(found.peers), len(job.members) - len(found.left), now - self._began,
        )  # fmt: skip
        self._end_taken_view(recovery, found, now)

    def _end_taken_view(self, recovery: Recovery, found: Takeover, now: float) -> None:
        """End the view in which the scheduler died, and lose those that are missing."""
        lost = PeerLost("scheduler", 0, "", 0, DIED)
        self._begin_change(str(lost), has_boundary=found.has_boundary)
        event = (ViewJoined(self.generation, str(lost)) if found.has_boundary
                 else ViewLost(self.generation, lost, survives=True))  # fmt: skip
        self._call_to_view([*self._peers.values()], event, now)
        waited = LATE.format(now - self._began)
        for number in found.missing:
            cause = recovery.cause_of(found.job.members[number])
            late = CONTRADICTED if number in found.contradicted else waited
            self._drop(-1 - number, cause or late, now)
        self._after_departure(now)


def _join_of(member: Member) -> Join:
    """Return what is known of the Join of a member that is missing."""
    return Join(
        0, member.role, None, None, None, 0, 0, member.host, member.port, member.pid,
        member.hostname, member.host_id, f"machine {member.machine}", member.unix,
    )  # fmt: skip
