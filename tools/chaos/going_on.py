# SPDX-License-Identifier: Apache-2.0
"""What an elastic job has to do about an event: who may be lost, and who goes on. Pure.

Decides from the event and the layout, and finds what a job did that had to go on and did not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.chaos.events import CUTS, STEPS, Event
from tools.chaos.layouts import Layout
from tools.chaos.seen import Seen

Finding = tuple[str, str]  # kind and text


def losses(event: Event, layout: Layout) -> list[set[tuple[str, int]]]:
    """Return the sets of members of which the job may lose one.

    A cut loses those on the side without the scheduler; or of two machines without it, either. A
    split loses all on that side.
    """
    machines = [set(layout.members_of(machine)) for machine in range(len(layout.machines))]
    if event.kind == "split":
        return [set[tuple[str, int]]().union(*(machines[machine] for machine in event.side))]
    if event.kind in CUTS:
        sides = [machine for machine in (event.rank, event.other) if machine]
        return [machines[side] for side in sides]
    if event.role == "launcher":
        return [machines[event.rank]]
    dead = {(event.role, event.rank)}
    return [dead | {(event.then_role, event.then_rank)} if event.then_role else dead]


def expectation(event: Event, layout: Layout, least: int, seen: Seen, expected: str) -> str:
    """Return what an elastic job has to do: "goes on", or as others do (`expected`).

    A loss around the start may also end the job.
    """
    if expected == "fine" or layout.elastic != "goes on":
        return expected
    is_schedulers = (event.role, event.rank) in (("scheduler", 0), ("launcher", 0))
    if (is_schedulers and not _is_followed(event, layout)) or (
        event.role == "launcher" and event.kind in ("term", "stop")
    ):
        return expected
    for lost in losses(event, layout):
        if sum(role == "worker" for role, _ in lost) > layout.workers - least:
            return expected
    if event.phase == "start" and not has_gone_on(event, layout, seen):
        return "either"
    return "goes on"


def _is_followed(event: Event, layout: Layout) -> bool:
    """Return whether the launcher starts a scheduler that takes over from the victim."""
    is_killed = event.kind in ("kill", "segv")
    return event.role == "scheduler" and is_killed and layout.launcher == "fastps-run"


def survivors(event: Event, layout: Layout, seen: Seen) -> set[int]:
    """Return the workers that must go on: all that cannot be lost, or that left in order."""
    found = set(range(layout.workers))
    for lost in losses(event, layout):
        found -= {rank for role, rank in lost if role == "worker"}
    return found | {rank for rank in range(layout.workers) if seen.of(rank, "left")}


def has_gone_on(event: Event, layout: Layout, seen: Seen) -> bool:
    """Return whether all that must go on have left in order."""
    return all(seen.of(rank, "left") for rank in survivors(event, layout, seen))


def check(event: Event, layout: Layout, seen: Seen) -> Iterator[Finding]:
    """Find what survivors of a job that had to go on did instead."""
    left = survivors(event, layout, seen)
    for rank in sorted(left):
        steps = len(seen.of(rank, "step"))
        errors = [f"{one['type']}: {one['text']}" for one in seen.of(rank, "error")]
        if steps < STEPS or errors or not seen.of(rank, "left"):
            was = "" if seen.of(rank, "left") else ", and did not leave in order"
            yield "lost job", f"worker {rank} took {steps} steps of {STEPS}{was}: {errors}"
    yield from _check_views(event, layout, seen, left)
    victims = set.union(*losses(event, layout))  # one that had left may be killed before its end
    yield from _check_codes(layout, seen, {("worker", rank) for rank in left} - victims)


def _check_views(event: Event, layout: Layout, seen: Seen, left: set[int]) -> Iterator[Finding]:
    most = max(len(lost) for lost in losses(event, layout))
    most_workers = max(sum(role == "worker" for role, _ in lost) for lost in losses(event, layout))
    for rank in sorted(left):
        views = seen.of(rank, "view")
        if len(views) > most:
            causes = [one["cause"] for one in views]
            yield "more views", f"worker {rank} came to {len(views)} more, not {most}: {causes}"
        if views and views[-1]["size"] < len(left):
            yield "more lost", f"{views[-1]['size']} of {len(left)} survivors: {views[-1]}"
        elif views and views[-1]["size"] < layout.workers - most_workers:
            size, causes = views[-1]["size"], [one["cause"] for one in views]
            yield "more lost", f"{size} workers go on, and one end of a cut was enough: {causes}"
    lost = set.union(*losses(event, layout))
    members = {one["member"] for one in seen.records if ("worker", one["rank"]) in lost}
    names = [f"pid {one.partition(':')[2]})" for one in sorted(members)]
    names += ["server "] * any(role == "server" for role, _ in lost)
    names += ["scheduler is lost"] * any(role == "scheduler" for role, _ in lost)
    for rank in sorted(left):
        for one in seen.of(rank, "view"):
            if not any(name in one["cause"] for name in names):
                yield "wrong blame", f"worker {rank}: {one['cause']} (wanted: {names})"


def _check_codes(layout: Layout, seen: Seen, workers: set[tuple[str, int]]) -> Iterator[Finding]:
    """Check that the processes of workers that nothing happened to ended with success."""
    for name, one in seen.launchers.items():
        role, _, rank = name.rpartition(" ")
        mine = layout.members_of(int(rank)) if role == "launcher" else [(role, int(rank))]
        is_fine = any(member in mine for member in workers) or role == "scheduler"
        if is_fine and one["code"] != 0:
            yield "exit code", f"{name} returned {one['code']}: {seen.last(name)}"


def stalls(seen: Seen, left: set[int]) -> tuple[list[float], list[float]]:
    """Return seconds from the event to each survivor's next step, and to the news of the loss.

    The next step is the first one in a new view.
    """
    steps, news = [], []
    for rank in sorted(left):
        views: list[dict[str, Any]] = seen.of(rank, "view")
        if not views or seen.event_at is None:
            continue
        news.append(max(views[0]["at"] - views[0]["seconds"] - seen.event_at, 0.0))
        later = [one["at"] for one in seen.of(rank, "step") if one["at"] > views[0]["at"]]
        steps += [min(later) - seen.event_at] if later else []
    return steps, news
