# SPDX-License-Identifier: Apache-2.0
"""What a job had to do about an event, and what it did instead: findings. Pure.

Decides from the event, the layout and what was observed. Two expectations: a job "ends" (each
survivor ends with an error that names the culprit, in time, and the launcher's exit code and last
line say the same), or an elastic job "goes on" (going_on.py: the survivors finish all steps).
"""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.chaos import going_on, history
from tools.chaos.events import CUTS, STEPS, Event
from tools.chaos.layouts import LEASE_S, Layout
from tools.chaos.seen import Seen

SOON_S = 5.0  # between a death and the last error, as docs/failures.md promises
END_S = 20.0  # between the last error and the end of all, with the grace of launchers
STALLED_S = 0.5  # a driver that was so late was itself without a processor
OURS = {"PeerLostError", "ShutdownError", "StallError", "TransportTimeout", "TransportError",
        "ViewChangedError"}  # fmt: skip
CAME_LATE = "no scheduler at"  # to a start, from another machine, when the others had ended
TORCHS = {"DistBackendError", "RuntimeError"}


@dataclass
class Finding:
    """One thing that should not have happened; text: what was seen, in full."""

    kind: str
    text: str


@dataclass
class Verdict:
    """The result of one event.

    detections: seconds to each survivor's error or next step; news: until it knew of the loss.
    """

    expected: str
    outcome: str = ""
    detections: list[float] = field(default_factory=list)
    news: list[float] = field(default_factory=list)
    blames: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        """Record a finding."""
        self.findings.append(Finding(kind, text))

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def expectation(event: Event) -> str:
    """Return "fine" (a job of code 0), "lost" (a member is lost), "either", or "gone".

    gone: the only launcher was killed, and everything with it.
    """
    if event.kind in ("none", "disk", "clock"):
        return "fine"
    is_short = event.seconds and event.seconds < LEASE_S
    if event.kind in (*CUTS, "stop") and is_short:
        return "fine"
    if event.phase == "leaving":
        return "either"
    if event.kind == "stop" and (
        event.phase == "start" or event.role in ("launcher", "scheduler")
    ):
        return "either"
    if event.role == "launcher" and event.kind == "term":
        return "either"
    if event.role == "launcher":
        return "gone"
    return "lost"


def dead_of(event: Event, layout: Layout) -> set[tuple[str, int]]:
    """Return the members that die with the victim, or are cut off by it."""
    if event.role == "launcher":
        return {*layout.members_of(event.rank), ("launcher", event.rank)}
    dead = {(event.role, event.rank)}
    return dead | {(event.then_role, event.then_rank)} if event.then_role else dead


def culprits(event: Event, layout: Layout, machine: int) -> re.Pattern[str]:
    """Return what an error or a last line on a machine must name at least one of.

    A machine that a split has cut off from the scheduler has to name the scheduler, as the
    scheduler's own machine has to where all others are on the other side.
    """
    names: list[str] = []
    if event.kind == "split":
        is_alone = len(event.side) == len(layout.machines) - 1  # the scheduler's machine
        machines: tuple[int, ...] = (0,) if is_alone or machine in event.side else ()
        members = [one for off in event.side for one in layout.members_of(off) if not machines]
    elif event.kind in CUTS:
        members = [*layout.members_of(event.rank), *layout.members_of(event.other)]
        machines = (event.rank, event.other)
    elif event.role == "launcher":
        members, machines = layout.members_of(event.rank), (event.rank,)
    else:
        members, machines = sorted(dead_of(event, layout)), ()
    names += [f"{role} {rank}" for role, rank in members if role != "scheduler"]
    is_schedulers = event.role == "scheduler" or 0 in machines
    if is_schedulers or (layout.launcher == "torchrun" and ("worker", 0) in members):
        names.append("scheduler")
    if event.role == "launcher":
        names.append("fastps-run")
    if event.phase == "start" and layout.servers:
        names.append(f"of {layout.servers} servers? joined")  # its number is not known yet
    if event.phase == "start" and len(layout.machines) > 1:
        names.append(CAME_LATE)
    return re.compile("|".join(rf"\b{name}\b" for name in names))


def judge(event: Event, layout: Layout, seen: Seen, *, least: int | None = None) -> Verdict:
    """Return what the job did about the event, with all that was wrong.

    least: how many workers an elastic job goes on with.
    """
    expected = expectation(event) if seen.event_at is not None else "fine"
    if event.kind == "stop" and event.rank == 0 and layout.launcher == "torchrun":
        expected = "either"  # rank 0's process has the scheduler, which stops with it
    if (event.role, event.kind) == ("scheduler", "term") and layout.launcher == "fastps-run":
        expected = "fine"  # it takes orders from its launcher alone
    if expected == "lost" and _was_too_late(event, layout, seen):
        expected = "either"
    if least is not None and seen.event_at is not None:
        expected = going_on.expectation(event, layout, least, seen, expected)
    if expected == "gone" and len(layout.machines) > 1:
        expected = "lost"
    verdict = Verdict(expected)
    has_ended_well = all(one["code"] == 0 for one in seen.launchers.values())
    verdict.outcome = "hung" if seen.is_hung else "ended well" if has_ended_well else "failed"
    if seen.is_hung:
        still = [name for name, one in seen.launchers.items() if one["code"] is None]
        verdict.add("hang", f"{', '.join(still)} did not end; {seen.last_words()}")
    for text in seen.left:
        verdict.add("left behind", text)
    _check_history(layout, seen, verdict, is_elastic=least is not None)
    if seen.is_hung:
        return verdict
    is_fine = expected == "fine" or (expected == "either" and has_ended_well)
    if expected == "goes on":
        _check_going_on(event, layout, seen, verdict)
    elif is_fine:
        _check_fine(event, layout, seen, verdict)
    elif expected != "gone" and not (event.role == "launcher" and event.kind == "term"):
        _check_errors(event, layout, seen, verdict)
        _check_report(event, layout, seen, verdict)
        _check_end(event, layout, seen, verdict)
        if has_ended_well:
            verdict.add("unnoticed", "the job ended with code 0, although a member was lost")
    elif expected == "gone" and has_ended_well:
        verdict.add("exit code", "the killed launcher returned 0")
    if event.role == "launcher" and event.kind == "term" and not has_ended_well:
        _check_term(event, layout, seen, verdict)
    return verdict


def _was_too_late(event: Event, layout: Layout, seen: Seen) -> bool:
    """Return whether all others had taken all steps before the event."""
    assert seen.event_at is not None
    dead = dead_of(event, layout)
    left = [rank for rank in range(layout.workers) if ("worker", rank) not in dead]
    began = [record["at"] for rank in left for record in seen.of(rank, "leave")]
    return len(began) == len(left) and max(began, default=seen.event_at) < seen.event_at + 0.1


def _check_history(layout: Layout, seen: Seen, verdict: Verdict, *, is_elastic: bool) -> None:
    for text in history.check(
        seen.records, seed=int(seen.load["seed"]), ranks=layout.workers,
        has_fractions=layout.has_fractions, goes_on=is_elastic,
    ):  # fmt: skip
        verdict.add("wrong result", text)


def _check_fine(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    for rank in range(layout.workers):
        if event.phase == "leaving" and event.rank == rank:
            continue
        steps = seen.of(rank, "step")
        if len(steps) < STEPS:
            errors = [one["text"] for one in seen.of(rank, "error")]
            verdict.add("lost job", f"worker {rank} took {len(steps)} steps of {STEPS}: {errors}")
        if seen.event_at is not None and event.role != "machine":
            later = [one["at"] for one in steps if one["at"] > seen.event_at]
            verdict.detections += [min(later) - seen.event_at] if later else []
    if any(one["code"] != 0 for one in seen.launchers.values()):
        codes = {name: one["code"] for name, one in seen.launchers.items()}
        verdict.add(
            "exit code", f"nothing was lost, but the codes are {codes}; {seen.last_words()}"
        )


def _check_going_on(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    """Check that survivors took all steps, and how those ended that were lost."""
    for kind, text in going_on.check(event, layout, seen):
        verdict.add(kind, text)
    left = going_on.survivors(event, layout, seen)
    verdict.detections, verdict.news = going_on.stalls(seen, left)
    limit = limit_s(event, layout, seen)
    for after_s in verdict.detections:
        if after_s > limit:
            verdict.add("late", f"the next step came after {after_s:.2f} s (limit: {limit:.1f} s)")
    for rank in set(range(layout.workers)) - left:
        for error in seen.of(rank, "error"):
            if error["type"] not in OURS:
                verdict.add("wrong type", f"worker {rank}: {error['type']}: {error['text']}")
        if event.kind in CUTS:
            _check_cut_off(event, layout, seen, verdict, rank)


def _check_cut_off(event: Event, layout: Layout, seen: Seen, verdict: Verdict, rank: int) -> None:
    """Check that a worker which is cut off from a job that goes on ends soon, and knows why."""
    assert seen.event_at is not None
    if not (errors := seen.of(rank, "error")):
        verdict.add("no error", f"worker {rank} was cut off and got no error")
        return
    after_s, limit = errors[0]["at"] - seen.event_at, limit_s(event, layout, seen)
    what = f"worker {rank}, {after_s:.2f} s after the event: {errors[0]['text']}"
    if after_s > limit:
        verdict.add("late", f"{what} (limit: {limit:.1f} s)")
    wanted = culprits(event, layout, layout.machine_of("worker", rank))
    if not wanted.search(what):
        verdict.add("wrong blame", f"{what} (wanted: {wanted.pattern})")


def limit_s(event: Event, layout: Layout, seen: Seen) -> float:
    """Return how long after the event the last error may come."""
    silent = event.kind in (*CUTS, "stop")
    limit = SOON_S + (layout.lease_s + 1.0 if silent else 0.0)  # user timeout of TCP: the same 3 s
    return limit + _start_s(event, layout) + seen.spare_s


def _start_s(event: Event, layout: Layout) -> float:
    """Return how long others wait for the victim to start, where no launcher reports its end."""
    if event.phase == "start" and (layout.launcher != "fastps-run" or layout.is_lab):
        return float(layout.environment.get("FASTPS_START_TIMEOUT_S", "15"))
    return 0.0


def _check_errors(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    assert seen.event_at is not None
    dead, limit = dead_of(event, layout), limit_s(event, layout, seen)
    named: list[tuple[int, set[str]]] = []
    for rank in range(layout.workers):
        if ("worker", rank) in dead or not seen.of(rank, "begin"):
            continue
        errors = seen.of(rank, "error")
        if not errors:
            was_told = seen.of(rank, "term") or not event.is_polite
            if (
                not seen.of(rank, "left")
                and not was_told
                and not _was_ended_at_start(event, seen, rank)
            ):
                verdict.add(
                    "no error", f"worker {rank} ended without an error; {seen.last_words()}"
                )
            elif seen.of(rank, "term") and not seen.of(rank, "left") and seen.of(rank, "joined"):
                verdict.add("no error", f"worker {rank} got no error before SIGKILL")
            continue
        error, wanted = errors[0], culprits(event, layout, layout.machine_of("worker", rank))
        after_s = error["at"] - seen.event_at
        verdict.detections.append(after_s)
        what = f"worker {rank}, {after_s:.2f} s after the event: {error['type']}: {error['text']}"
        if error["type"] not in OURS | (TORCHS if layout.work in ("torch", "ddp") else set()):
            verdict.add("wrong type", what)
        if wanted.search(error["text"]):
            verdict.blames += 1
            if CAME_LATE not in error["text"]:
                named.append((rank, set(wanted.findall(error["text"]))))
        elif _is_of_one_that_left(error["text"], wanted, seen):
            verdict.blames += 1
        else:
            verdict.add("wrong blame", f"{what} (wanted: {wanted.pattern})")
        if after_s > limit:
            verdict.add("late", f"{what} (limit: {limit:.1f} s)")
    if named and event.kind not in CUTS and not set.intersection(*(names for _, names in named)):
        verdict.add("wrong blame", f"survivors blame different members: {named}")


def _is_of_one_that_left(text: str, wanted: re.Pattern[str], seen: Seen) -> bool:
    """Return whether an error names a worker that left with an error of the right blame."""
    found = re.search(r"\bworker (\d+) left the job", text)
    errors = seen.of(int(found[1]), "error") if found else []
    return any(wanted.search(error["text"]) for error in errors)


def _was_ended_at_start(event: Event, seen: Seen, rank: int) -> bool:
    """Return whether a launcher may have ended a worker before it could handle SIGTERM."""
    return event.phase == "start" and not seen.of(rank, "joined")


def _code_of(event: Event) -> int | None:
    """Return the exit code that a job must have, if its victim determines it."""
    if event.kind in ("kill", "term", "segv"):
        number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV}
        return 128 + number[event.kind]
    return None


def _check_report(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    own = layout.machine_of(event.role, event.rank)
    for name, one in seen.launchers.items():
        if layout.launcher == "none":
            continue
        machine = int(name.rpartition(" ")[2])
        wanted = culprits(event, layout, machine)
        if event.role == "launcher" and machine == event.rank:
            continue
        if one["code"] == 0 and not _has_nothing_left(layout, machine, seen):
            verdict.add("exit code", f"{name} returned 0 although a member was lost")
        if layout.launcher != "fastps-run" or one["code"] == 0:
            continue
        is_here = machine == own and event.role in ("worker", "server")
        code = _code_of(event) if is_here and not _ended_elsewhere(event, layout, seen) else None
        if code is not None and one["code"] != code and not _is_orderly(event):
            text = f"{name} returned {one['code']}, not {code}: {seen.last(name)}"
            verdict.add("exit code", text)
        if not wanted.search(seen.last(name)):
            verdict.add("wrong report", f"{name}: {seen.last(name)} (wanted: {wanted.pattern})")


def _ended_elsewhere(event: Event, layout: Layout, seen: Seen) -> bool:
    """Return whether a job outlived a loss, and a second one elsewhere may have ended it."""
    has_view = any(record["what"] == "view" for record in seen.records)
    own, other = (
        layout.machine_of(role, rank)
        for role, rank in ((event.role, event.rank), (event.then_role, event.then_rank))
    )
    return bool(event.then_role) and has_view and own != other


def _is_orderly(event: Event) -> bool:
    """Return whether a server got SIGTERM, which it obeys in order."""
    return event.kind == "term" and event.role == "server"


def _has_nothing_left(layout: Layout, machine: int, seen: Seen) -> bool:
    """Return whether all workers of a machine had left in order."""
    ranks = [rank for role, rank in layout.members_of(machine) if role == "worker"]
    return all(seen.of(rank, "left") for rank in ranks)


def _check_term(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    for name, one in seen.launchers.items():
        is_own = int(name.rpartition(" ")[2]) == event.rank
        if is_own and one["code"] not in (128 + signal.SIGTERM, -signal.SIGTERM):
            verdict.add(
                "exit code", f"{name} got SIGTERM and returned {one['code']}: {seen.last(name)}"
            )


def _check_end(event: Event, layout: Layout, seen: Seen, verdict: Verdict) -> None:
    ends = [one["at"] for one in seen.records if one["what"] in ("error", "event")]
    limit = END_S + seen.spare_s + (30.0 if layout.launcher == "torchrun" else 0.0)
    limit += _start_s(event, layout)  # where servers alone are left, they have that time
    after_s = seen.ended_at - max(ends, default=seen.event_at or seen.ended_at)
    if after_s > limit:
        verdict.add("slow end", f"the last process ended {after_s:.1f} s after the last error")
    has_joined = any("workers joined" in one.get("text", "") for one in seen.records)
    for name, one in seen.launchers.items():
        if has_joined and "nobody joined" in one["stderr"]:
            verdict.add("wrong report", f"{name} says that nobody joined: {seen.last(name)}")
