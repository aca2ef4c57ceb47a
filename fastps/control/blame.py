# SPDX-License-Identifier: Apache-2.0
"""Which member is to blame for a failure, and the text of the error.

Decides the first cause. The scheduler is the authority: members report broken links, the
scheduler suspects the member at the other end, waits for better evidence, and names one member
(`Suspicions`). A worker records the scheduler's events, reports its own broken links, and writes
the error of an operation (`Witness`). Pure: no clock, no connection; the membership, the session
and the server carry it out.

A member is dead when its connection has ended, when its launcher says so, or when it was silent
for its lease and others confirm that (`Inquest`). In a job of four members or more the scheduler
asks up to five others shortly before the lease ends; they send the silent one a probe, which its
pulse thread answers. Two that reach it: it lives, only its path to the scheduler is cut, and its
lease begins anew. If most of those that answer deny that, its lease does so twice at most. If
the time is up before, or all have answered, it is dead: the others may be silent for the same
reason. In a smaller job two others cannot be asked apart from the one that may be cut off itself,
so silence alone counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from fastps.config import Config
from fastps.control.protocol import (
    Event,
    OwnerLeft,
    PeerLeft,
    PeerLost,
    ReportLost,
    TensorPoisoned,
)
from fastps.errors import FastPSError, MismatchError, Status, error_of

BEATS = 6  # heartbeats in a short lease
MAX_PULSE_S = 0.5  # between heartbeats of a long lease
VOTES = 2  # members that reach a silent one, so that it lives; or whose words count together
MIN_MEMBERS = 4  # of a job in which others are asked
MAX_ASKED = 5
MAX_DISPUTED = 2  # leases of a silent member on the word of two that most others contradict
MAX_CONFIRM_S = 0.5
MISSED_BEATS = 3  # after so many missed heartbeats the silence is mentioned in errors
PATIENCE_S = 1.0  # the most that the scheduler waits for better evidence; see patience_s()
VERDICT_WAIT_S = 2.0  # for a failed operation to learn which member is to blame

LEFT = "left the job while others still had work"
# How an operation ended, if nothing more is known.
ENDINGS = {
    Status.SHUTDOWN: "shutdown() was called before it was complete",
    Status.PEER_LOST: "a process of the job is lost",
    Status.PROTOCOL: "a peer broke the protocol, or a user-defined rule failed",
    Status.NOMEM: "its buffer pool is full: raise FASTPS_POOL_BYTES",
    Status.SYS: "a system call on a link failed",
    Status.LINK_TIMEOUT: "a server's machine or the network to it is down",
}
_AGAIN = "start the job again from a checkpoint, or let fastps-run --restarts do that"
# Why a job with FASTPS_ON_LOSS=reweight ends, by the role of the lost member.
NEEDED = {
    "validator": "FASTPS_ON_LOSS=reweight continues without a lost worker, but not without a "
    f"validator, since no other process judges its workers: {_AGAIN}",
    "server": "FASTPS_ON_LOSS=reweight continues without a lost worker, but not without a server, "
    f"since no other process holds its share of the tensors: {_AGAIN}",
}


def pulse_s(config: Config) -> float:
    """Return the time between two heartbeats of a member, and of the scheduler."""
    return config.heartbeat_s or min(config.lease_s / BEATS, MAX_PULSE_S)


def patience_s(lease_s: float) -> float:
    """Return how long the scheduler waits for better evidence: a third of a short lease."""
    return min(PATIENCE_S, lease_s / 3)


def join_names(names: list[str]) -> str:
    """Return the first 16 names, and the number of the others."""
    shown = ", ".join(names[:16])
    return shown if len(names) <= 16 else f"{shown} and {len(names) - 16} more"


# ---- the scheduler ----


@dataclass(frozen=True)
class Suspicion:
    """A member that another one cannot reach, or contradicts."""

    suspect: int
    reporter: int
    since: float
    until: float
    text: str
    text_of_reporter: str  # in case the reporter turns out to be to blame


class Suspicions:
    """Members, by peer number, that others cannot reach, until evidence shows which is dead."""

    def __init__(self, wait_s: float = PATIENCE_S, *, has_validators: bool = False) -> None:
        """Start without suspicions; wait_s: for better evidence.

        has_validators: workers are not believed about others.
        """
        self._wait_s = wait_s
        self._has_validators = has_validators
        self._all: list[Suspicion] = []

    def add(
        self, suspect: tuple[int, str], reporter: tuple[int, str], report: str, now: float
    ) -> None:
        """Suspect a member, as (peer, name), whose connection another member reports as lost."""
        if self._has_validators and reporter[1].startswith("worker"):
            suspect, reporter = reporter, suspect
        (peer, name), (other, name_of_other) = suspect, reporter
        text = f"{name_of_other} lost its data connection to it: {report}"
        self.accuse(peer, other, text, f"it lost its data connection to {name}: {report}", now)

    def accuse(
        self, suspect: int, reporter: int, text: str, own: str, now: float, *,
        wait_s: float | None = None,
    ) -> None:  # fmt: skip
        """Suspect one member on the word of another, once; text, own: as of a Suspicion."""
        if not any(one.suspect == suspect and one.reporter == reporter for one in self._all):
            until = now + (self._wait_s if wait_s is None else wait_s)
            self._all.append(Suspicion(suspect, reporter, now, until, text, own))

    def accusers(self, peer: int) -> set[int]:
        """Return the members that suspect one."""
        return {item.reporter for item in self._all if item.suspect == peer}

    def by(self, peer: int) -> Suspicion | None:
        """Return the first report of a member."""
        return next((item for item in self._all if item.reporter == peer), None)

    def postpone(self, item: Suspicion, until: float) -> None:
        """Wait longer for evidence."""
        self._all[self._all.index(item)] = replace(item, until=until)

    def of(self, peer: int) -> str | None:
        """Return the first report against a member."""
        return next((item.text for item in self._all if item.suspect == peer), None)

    def due(self, now: float) -> list[Suspicion]:
        """List the suspicions that no evidence has resolved in time."""
        return [item for item in self._all if item.until <= now]

    def deadlines(self) -> list[float]:
        """List the times when suspicions become due."""
        return [item.until for item in self._all]

    def cause(self, peer: int, cause: str, *, role: str = "") -> str:
        """Return why a member is lost, with its earlier reports and those of others.

        role: of the member, in a job that continues without lost workers.
        """
        related = [item.text for item in self._all if item.suspect == peer]
        related += [item.text_of_reporter for item in self._all if item.reporter == peer]
        related = [item for item in related if item not in cause]
        return "; ".join([cause, *related, *([NEEDED[role]] if role in NEEDED else [])])

    def drop(self, peer: int) -> None:
        """Drop the suspicions against a member that is gone, and its own."""
        self._all = [item for item in self._all if peer not in (item.suspect, item.reporter)]

    def clear(self) -> None:
        """Drop all suspicions."""
        self._all.clear()


def confirm_s(lease_s: float) -> float:
    """Return how long others are asked about a silent member, before its lease ends."""
    return min(MAX_CONFIRM_S, lease_s / 3)


class Inquest:
    """Whether a silent member is dead, by the answers of others that were asked."""

    def __init__(self, asked: Iterable[int], until: float) -> None:
        """Begin with the peers that are asked; until: when their time is up."""
        self.until = until
        self._asked = set(asked)
        self._said: dict[int, bool] = {}

    def add(self, peer: int, *, is_reached: bool) -> bool:
        """Take the first answer of a peer, if it was asked; return whether it was."""
        if peer in self._asked:
            self._said.setdefault(peer, is_reached)
        return peer in self._asked

    def denied_by(self) -> list[int]:
        """List the peers that do not reach the member."""
        return [peer for peer, is_reached in self._said.items() if not is_reached]

    def is_alive(self, now: float) -> bool | None:
        """Return the verdict, or None as long as it is open."""
        if sum(self._said.values()) >= VOTES:
            return True
        is_over = now >= self.until or len(self._said) == len(self._asked)
        return False if is_over else None

    @property
    def is_denied_by_most(self) -> bool:
        """Whether most of those that have answered do not reach the member."""
        return 2 * len(self.denied_by()) > len(self._said)


def life_text(silent_s: float, *, beat_s: float) -> str:
    """Return the text about the heartbeats of a member that others cannot reach."""
    if silent_s < MISSED_BEATS * beat_s:
        return "it still sends heartbeats"
    return f"it has given no sign of life for {silent_s:.1f} s"


def start_text(missing: str, timeout_s: float) -> str:
    """Return the text of a job that did not start in time; missing: from missing_text()."""
    return (
        f"the job did not start within {round(timeout_s, 1):g} s: {missing}; start the missing "
        "processes, or raise FASTPS_START_TIMEOUT_S if they are only slow"
    )


def silence_text(lease_s: float) -> str:
    """Return the text of a member whose lease has ended."""
    return (
        f"it was silent for longer than its lease of {lease_s:g} s (stopped, swapped out or cut "
        "off); raise FASTPS_LEASE_S if such pauses are normal"
    )


def unreached_text(names: list[str]) -> str:
    """Return which members do not reach a silent one either."""
    return f"; {join_names(names)} cannot reach it either" if names else ""


def machine_text(host: str, n: int) -> str:
    """Return the text of a machine whose n members, two or more, are all silent."""
    return (
        f"machine {host} does not answer: all {n} members there are silent (it is stopped, cut "
        "off or without power)"
    )


def unheard_text(seconds: float) -> str:
    """Return why the scheduler counts as lost for a member that has not heard it for so long."""
    return (
        f"it has been silent for {seconds:.1f} s: its machine or process is stopped, cut off or "
        "without power; raise FASTPS_LEASE_S if such pauses are normal"
    )


def cut_off_text(heard: Iterable[tuple[str, bool]]) -> str:
    """Return why the scheduler is to blame for the silence of others; empty if it is not.

    heard: the machine of each member, and whether the member is heard. A scheduler that hears one
    machine at most, its own, and two or more others no longer, is cut off itself.
    """
    found: dict[str, bool] = {}
    for machine, is_heard in heard:
        found[machine] = found.get(machine, False) or is_heard
    silent = sorted(machine for machine, is_heard in found.items() if not is_heard)
    if len(silent) < 2 or len(found) - len(silent) > 1:
        return ""
    return (
        "its machine is cut off: it hears no member on other machines any more "
        f"({join_names(silent)}); check the network of the machine that the scheduler runs on"
    )


def stopped_text(slept_s: float, name: str) -> str:
    """Return why the scheduler itself is to blame; name: of a member that has given up."""
    return (
        f"its process was stopped for {slept_s:.1f} s, or got no processor, and {name} gave it "
        "up; raise FASTPS_LEASE_S if such pauses are normal"
    )


def deaf_text(seconds: float, slept_s: float) -> str:
    """Return why a member is lost that has not heard the scheduler.

    slept_s: how long the scheduler itself was stopped, 0 if it was not.
    """
    if slept_s:
        return (
            f"it has not heard the scheduler for {seconds:.1f} s, whose process was stopped for "
            f"{slept_s:.1f} s, or got no processor"
        )
    return (
        f"it has not heard the scheduler for {seconds:.1f} s, which runs: it was stopped, or the "
        "path to it is cut"
    )


def broke_text(why: str) -> str:
    """Return why a member is lost that sent what it may not."""
    return f"it broke the control protocol: {why}"


def difference_text(entry: str, said: Collection[int], other: str, theirs: Collection[int]) -> str:
    """Return what a worker says of the members of an operation, against another one's word."""
    return (
        f"it says that operation {entry[:80]!r} is of workers {sorted(said)[:16]}, and {other} "
        f"that it is of workers {sorted(theirs)[:16]}"
    )


# ---- a server ----


def cause_of_link(server: str, status: Status, trouble: str) -> str:
    """Return why a server's link to a worker ended; trouble: details, if known."""
    cause = f"its link to {server} broke (status {status.name})"
    if status is Status.NOMEM:
        cause = f"the buffer pool of {server} is full: raise FASTPS_POOL_BYTES"
    return f"{cause}; {trouble}" if trouble else cause


# ---- a worker ----


@dataclass(frozen=True)
class Failure:
    """What a worker knows about an operation that failed.

    said: the engine's text, if there is more than a status. culprit: the member that a server or
    the shared memory named. owner: the member whose link ended first, with its name, and in
    `why` what broke, in brackets. is_ours: links broke for a fault on this side. view: of these
    links, 0 if it is not known; the numbers of members are those of this view.
    """

    tensor: str
    status: Status
    said: str = ""
    culprit: int | None = None
    owner: int | None = None
    owner_name: str = ""
    why: str = ""
    is_ours: bool = False
    is_operation: bool = False  # of a group, not on a declared tensor
    silent: str = ""  # the scheduler's address, if it does not answer either
    view: int = 0

    @property
    def is_loss(self) -> bool:
        """Return whether the scheduler may know the cause."""
        return self.status in (Status.PEER_LOST, Status.LINK_TIMEOUT, Status.SHUTDOWN)


@dataclass
class Witness:
    """The scheduler's events that one worker has received about other members.

    left: workers that left; owners_left: those of them whose keys went with them, both in order:
    later departures and broken links may be consequences of the first. gone: workers that left or
    are lost while the job continues.
    """

    me: int = 0
    left: list[int] = field(default_factory=list)
    owners_left: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    poisoned: dict[str, TensorPoisoned] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # workers without which the job continues

    def on_event(self, event: Event) -> None:
        """Record an event of the scheduler; called on the control thread."""
        if isinstance(event, TensorPoisoned):
            self.poisoned[event.name] = event
        elif isinstance(event, PeerLeft):
            self.left.append(event.member)
            self.gone.append(event.member)
        elif isinstance(event, OwnerLeft):
            self.owners_left.append(event.member)
        elif isinstance(event, PeerLost) and event.goes_on and event.rank != self.me:
            self.lost[event.rank] = str(event)
            self.gone.append(event.rank)

    def report(self, failure: Failure) -> ReportLost | None:
        """Return the report for the scheduler: a link broke, or our device."""
        if failure.owner is None or failure.status is Status.SHUTDOWN:
            return None
        if failure.is_ours:
            return ReportLost(self.me, f"its own links broke{failure.why}")
        if self.departure(failure.owner, None):
            return None
        cause = f"its link to a worker broke{failure.why}"
        return ReportLost(failure.owner, cause, is_owner=True)

    def departure(self, owner: int | None, culprit: int | None) -> str:
        """Return which worker left, if that explains the end of a link or a server's error."""
        if culprit in self.lost:
            return self.lost[culprit]
        for member in (*self.owners_left[:1], owner):
            if member in self.left:
                return f"{left_text(member)}, and the server in it too"
        is_explained = culprit in self.left or (owner is None and culprit is None)
        return left_text(self.left[0]) if self.left and is_explained else ""

    def error(self, failure: Failure, verdict: str | None = None) -> FastPSError:
        """Return the error of an operation; verdict: the scheduler's answer, if it was asked."""
        poison = self.poisoned.get(failure.tensor)
        if poison is not None:
            return MismatchError(poison.message)
        # a machine that is gone counts as a lost peer
        is_timeout = failure.status is Status.LINK_TIMEOUT
        status = Status.PEER_LOST if is_timeout else failure.status
        seen = (
            self.lost.get(-1 if failure.culprit is None else failure.culprit)
            or verdict
            or (status is Status.PEER_LOST and self.departure(failure.owner, failure.culprit))
            or _seen_here(failure)
        )
        is_ours = seen == ENDINGS[Status.SHUTDOWN]
        cure = ". Restart the job" if failure.is_loss and not is_ours else ""
        if LEFT in seen:
            cure = f"; let all workers call join() where numbers of steps differ{cure}"
        if failure.culprit in self.lost:
            cure = "; operations and process sets that do not need it continue"
        what = f"tensor {failure.tensor!r} cannot be reduced"
        if failure.is_operation:
            what = f"{failure.tensor} cannot be completed"
        return error_of(status, f"{what}: {seen}{cure}")


def _seen_here(failure: Failure) -> str:
    """Return what the worker knows by itself, without a verdict of the scheduler."""
    if failure.status is Status.SHUTDOWN:  # then we ended our links ourselves
        return ENDINGS[failure.status]
    unsaid = f"and the scheduler did not say within {VERDICT_WAIT_S:g} s which process is lost"
    if failure.silent:
        unsaid = (
            f"and the scheduler at {failure.silent} does not answer: its machine, or fastps-run "
            "there, is stopped, cut off or without power"
        )
    if failure.owner is not None and failure.is_loss:
        return f"the link to {failure.owner_name} broke{failure.why}, {unsaid}"
    if failure.culprit is not None and failure.silent:
        return f"worker {failure.culprit} gave up, {unsaid}"
    if failure.owner is not None and failure.status is Status.PROTOCOL:
        return f"{failure.owner_name} broke the protocol{failure.why}; its link was closed"
    if failure.culprit is not None:
        return left_text(failure.culprit)
    seen = failure.said or ENDINGS.get(failure.status, f"it failed with {failure.status.name}")
    return f"{seen}, {unsaid}" if failure.silent and failure.is_loss else seen


def left_text(rank: int | None) -> str:
    """Return the text about a worker that left too early."""
    return f"worker {rank} {LEFT}"


def stall_text(what: str, why: str, timeout_s: float) -> str:
    """Return the text of an operation that is late although no member is lost; why: the reason."""
    return (
        f"{what} was not complete within {timeout_s:g} s: "
        f"{why or 'the scheduler does not know which worker delays it'}. Let all workers call the "
        "same operations in the same order and equally often (process sets in one order on all "
        "their members), or join() where they have different numbers of steps; raise "
        "FASTPS_OP_TIMEOUT_S if they are only slow"
    )
