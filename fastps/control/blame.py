# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when something fails: what the scheduler, a worker and a server say of it.

Decides the first cause. The scheduler is the authority: others report links that broke, it
suspects, waits for something that tells more, and names one member (`Suspicions`). A worker
keeps what it heard, reports what it saw, and words the error of an operation (`Witness`). Pure:
no clock, no connection; the membership, the session and the server carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastps.control.protocol import (
    Event,
    OwnerLeft,
    PeerLeft,
    PeerLost,
    ReportLost,
    TensorPoisoned,
)
from fastps.errors import FastPSError, MismatchError, Status, error_of

MISSED_BEATS = 3  # so many heartbeats without a sign of life are worth telling
SUSPICION_S = 1.0  # how long a reported member may take to turn out dead by itself
VERDICT_WAIT_S = 2.0  # how long a failed operation waits to hear who is to blame

LEFT = "left the job while others still had work"
# How an operation can have ended, where nobody knows more.
ENDINGS = {
    Status.SHUTDOWN: "shutdown() was called before it was complete",
    Status.PEER_LOST: "a process of the job is lost",
    Status.PROTOCOL: "a peer sent what no peer may send, or a rule of your own failed",
    Status.NOMEM: "there is no memory left for it: raise FASTPS_POOL_BYTES",
    Status.SYS: "a system call on a link failed",
    Status.LINK_TIMEOUT: "a server's machine, or the network to it, is gone",
}
_AGAIN = "start the job again from a checkpoint, or let fastps-run --restarts do that"
# Why a job ends that goes on without workers, by the role of who is lost.
NEEDED = {
    "validator": "FASTPS_ON_LOSS=reweight goes on without workers, not without a validator, for "
    f"nobody else judges what its workers push: {_AGAIN}",
    "server": "FASTPS_ON_LOSS=reweight goes on without workers, not without a server, for nobody "
    f"else holds its share of the tensors: {_AGAIN}",
}


def join_names(names: list[str]) -> str:
    """Write a list of members so that a thousand of them stay readable."""
    shown = ", ".join(names[:16])
    return shown if len(names) <= 16 else f"{shown} and {len(names) - 16} more"


# ---- the scheduler ----


@dataclass(frozen=True)
class Suspicion:
    """A member that another one cannot reach."""

    suspect: int
    reporter: int
    until: float
    text: str
    text_of_reporter: str  # should that one be the one to blame


class Suspicions:
    """Members, by peer number, that others cannot reach: they may turn out dead, or not."""

    def __init__(self, *, is_judged: bool = False) -> None:
        """Know of nobody; is_judged: workers may lie, and are not believed of others."""
        self._is_judged = is_judged
        self._all: list[Suspicion] = []

    def add(
        self, suspect: tuple[int, str], reporter: tuple[int, str], report: str, now: float
    ) -> None:
        """Suspect a member, (peer, name), because another one reports a lost connection."""
        if self._is_judged and reporter[1].startswith("worker"):
            suspect, reporter = reporter, suspect
        (peer, name), (other, name_of_other) = suspect, reporter
        text = f"{name_of_other} lost its data connection to it: {report}"
        own = f"it lost its data connection to {name}: {report}"
        self._all.append(Suspicion(peer, other, now + SUSPICION_S, text, own))

    def of(self, peer: int) -> str | None:
        """Return the first thing said against a member."""
        return next((item.text for item in self._all if item.suspect == peer), None)

    def due(self, now: float) -> list[Suspicion]:
        """List those that nothing has explained in time."""
        return [item for item in self._all if item.until <= now]

    def deadlines(self) -> list[float]:
        """List when they become due."""
        return [item.until for item in self._all]

    def cause(self, peer: int, cause: str, *, role: str = "") -> str:
        """Return why a member is lost, with what others and it itself said before.

        role: what it was, in a job that goes on without workers.
        """
        related = [item.text for item in self._all if item.suspect == peer]
        related += [item.text_of_reporter for item in self._all if item.reporter == peer]
        related = [item for item in related if item not in cause]
        return "; ".join([cause, *related, *([NEEDED[role]] if role in NEEDED else [])])

    def drop(self, peer: int) -> None:
        """Suspect a member no more: it is gone."""
        self._all = [item for item in self._all if item.suspect != peer]

    def clear(self) -> None:
        """Suspect nobody any more."""
        self._all.clear()


def life_text(silent_s: float, *, heartbeat_s: float) -> str:
    """Return whether a member that others cannot reach gives signs of life."""
    if silent_s < MISSED_BEATS * heartbeat_s:
        return "it is alive otherwise"
    return f"it has given no sign of life for {silent_s:.1f} s"


def start_text(missing: str, timeout_s: float) -> str:
    """Return the text of a job that cannot start in time; missing: who has joined, and who not."""
    return (
        f"the job did not start within {round(timeout_s, 1):g} s: {missing}; start the missing "
        "processes, or raise FASTPS_START_TIMEOUT_S if they are only slow"
    )


def silence_text(lease_s: float) -> str:
    """Return the text of a member that is taken for dead."""
    return (
        f"it was silent for longer than its lease of {lease_s:g} s (stopped, swapped out or cut "
        "off); raise FASTPS_LEASE_S if such pauses are normal"
    )


# ---- a server ----


def cause_of_link(server: str, status: Status, trouble: str) -> str:
    """Return why a server's link to a worker ended; trouble: what else is known of it, if any."""
    cause = f"its link to {server} broke (status {status.name})"
    if status is Status.NOMEM:
        cause = f"the buffer pool of {server} is full: raise FASTPS_POOL_BYTES"
    return f"{cause}; {trouble}" if trouble else cause


# ---- a worker ----


@dataclass(frozen=True)
class Failure:
    """What a worker sees of an operation that failed.

    said: by the engine, if it said more than a status. culprit: the member that a server, or the
    memory of our machine, named. owner: whose link was the first to end by itself, with its
    name and what broke on it in brackets. is_ours: links broke for a fault on this side.
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

    @property
    def is_loss(self) -> bool:
        """Return whether the scheduler may know more."""
        return self.status in (Status.PEER_LOST, Status.LINK_TIMEOUT, Status.SHUTDOWN)


@dataclass
class Witness:
    """What one worker has heard: who left, and who of them took along what it owned.

    In both the first one comes first: what others do after that, and links that end, are
    consequences. gone: who left or is lost, while the job goes on.
    """

    me: int = 0
    left: list[int] = field(default_factory=list)
    owners_left: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    poisoned: dict[str, TensorPoisoned] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # workers without which the job goes on

    def hear(self, event: Event) -> None:
        """Take news from the scheduler; on its thread."""
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
        """Make what to tell the scheduler: a link broke, or our device."""
        if failure.owner is None or failure.status is Status.SHUTDOWN:
            return None
        if failure.is_ours:
            return ReportLost(self.me, f"its own links broke{failure.why}")
        if self.departure(failure.owner, None):
            return None
        cause = f"its link to a worker broke{failure.why}"
        return ReportLost(failure.owner, cause, is_owner=True)

    def departure(self, owner: int | None, culprit: int | None) -> str:
        """Return who left, if that explains the end of a link or a server's words; else empty."""
        if culprit in self.lost:
            return self.lost[culprit]
        for member in (*self.owners_left[:1], owner):
            if member in self.left:
                return f"{left_text(member)}, and the server in it too"
        is_explained = culprit in self.left or (owner is None and culprit is None)
        return left_text(self.left[0]) if self.left and is_explained else ""

    def error(self, failure: Failure, verdict: str | None = None) -> FastPSError:
        """Word the error of an operation; verdict: what the scheduler says, if it was asked."""
        poison = self.poisoned.get(failure.tensor)
        if poison is not None:
            return MismatchError(poison.message)
        # that a machine is gone is the loss of a peer
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
            cure = "; what does not need it goes on, as do process sets without it"
        what = f"tensor {failure.tensor!r} cannot be reduced"
        if failure.is_operation:
            what = f"{failure.tensor} cannot be completed"
        return error_of(status, f"{what}: {seen}{cure}")


def _seen_here(failure: Failure) -> str:
    """Return what the worker knows by itself: there is no scheduler to say who is to blame."""
    if failure.status is Status.SHUTDOWN:  # then we ended our links ourselves
        return ENDINGS[failure.status]
    unsaid = f"and the scheduler did not say within {VERDICT_WAIT_S:g} s who is lost"
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
        return f"{failure.owner_name} sent what no peer may send{failure.why}; its link is cut"
    if failure.culprit is not None:
        return left_text(failure.culprit)
    seen = failure.said or ENDINGS.get(failure.status, f"it failed with {failure.status.name}")
    return f"{seen}, {unsaid}" if failure.silent and failure.is_loss else seen


def left_text(rank: int | None) -> str:
    """Return the text of a worker that left too early."""
    return f"worker {rank} {LEFT}"


def stall_text(what: str, why: str, timeout_s: float) -> str:
    """Return the text of an operation that is late though nobody is lost; why: what is known."""
    return (
        f"{what} was not complete within {timeout_s:g} s: "
        f"{why or 'the scheduler does not say who holds it up'}. Let all workers call the same "
        "in the same order and equally often, process sets in one order on all their members, or "
        "join() where they have different numbers of steps; raise FASTPS_OP_TIMEOUT_S if they are "
        "only slow"
    )
