# SPDX-License-Identifier: Apache-2.0
"""What happens to a job, drawn by a seed: which process, which fault, at which moment. Pure.

Kinds: kill, term, segv (signals that end a process), stop (SIGSTOP, and SIGCONT after `seconds`:
longer than a lease, or a short pause), cut and cut-one-way (links between two machines; healed
after `seconds`, or never if 0), split (of the network in two: no machine of one side reaches one
of the other), disk (the folder of logs and temporary files is full), clock (one
machine's monotonic clock is a day ahead: a time namespace), none.

A clock that jumps while processes run is left out: the offsets of a time namespace are fixed
before its first process starts, and CLOCK_REALTIME has no namespace.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tools.chaos.layouts import LEASE_S, Layout

SIGNALS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP,
}  # fmt: skip
CUTS = ("cut", "cut-one-way", "split")
PHASES = ("start", "running", "inside", "waiting", "late", "leaving")
STEPS = 40
LATE_S = 0.6  # how late the straggler is that others wait for
LONG_S = LEASE_S + 2.0
PROBES = {
    "links": ("worker_start", "worker_result", "link_send", "link_recv"),
    "memory": ("worker_start", "local_arrive", "local_chunk"),
    "server": ("server_landing", "server_sum", "server_result"),
}
NAMED = ("push_pull", "compression", "local_sgd")  # works whose operations pass those probes
ROLES = {"worker": 5, "server": 3, "scheduler": 3, "launcher": 2}  # how often each is the victim


@dataclass(frozen=True)
class Event:
    """One fault of one job.

    role: worker, server, scheduler, launcher, or machine (of a cut, a disk or a clock); other: the
    second machine of a cut. side: the machines of a split that are apart from the scheduler.
    then_role, then_rank, then_s: a member that is killed so many seconds after the first one.
    phase: the moment of the victim, or of the job. delay_s: after that moment. probe: a value of
    FASTPS_FAULT, the exact moment inside a step. is_polite: the other workers survive SIGTERM for
    a while.
    """

    seed: int
    layout: str
    kind: str = "none"
    role: str = ""
    rank: int = 0
    phase: str = "running"
    step: int = 0
    delay_s: float = 0.0
    seconds: float = 0.0
    other: int = 0
    probe: str = ""
    is_polite: bool = True
    then_role: str = ""
    then_rank: int = 0
    then_s: float = 0.0
    side: tuple[int, ...] = ()

    def ways(self, machines: int) -> list[tuple[int, int]]:
        """List the ways that a cut interrupts, as (from, to)."""
        if self.kind == "split":
            rest = [machine for machine in range(machines) if machine not in self.side]
            pairs = list(itertools.product(self.side, rest))
            return [*pairs, *((to, source) for source, to in pairs)]
        ways = [(self.rank, self.other), (self.other, self.rank)]
        return ways[: 1 if self.kind == "cut-one-way" else 2]

    @property
    def name(self) -> str:
        """Return kind and victim, as tables show them."""
        length = ""
        if self.kind == "stop" or (self.kind in CUTS and self.seconds):
            length = " long" if self.seconds > LEASE_S else " short"
        more = f" +{self.then_role}" if self.then_role else ""
        return f"{self.kind}{length} {self.role}{more}".strip()

    def words(self) -> str:
        """Return the event as one line."""
        where = f"{self.role} {self.rank}" + (f" and {self.other}" if self.kind in CUTS else "")
        if self.kind == "split":
            where = f"machines {', '.join(map(str, self.side))} off"
        moment = f"{self.phase}, step {self.step} + {1000 * self.delay_s:.1f} ms"
        parts = [self.name.partition(" ")[0], where, self.probe or moment]
        if self.seconds:
            parts.append(f"for {self.seconds:.1f} s")
        if self.then_role:
            parts.append(f"then kill {self.then_role} {self.then_rank} {self.then_s:.2f} s later")
        return f"{self.layout}: {', '.join(parts)} (seed {self.seed})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def kinds_of(layout: Layout, *, has_disk: bool, has_clock: bool) -> list[str]:
    """List the kinds of events that a layout can meet."""
    kinds = ["kill"] * 4 + ["term", "segv"] + ["stop"] * 3
    if layout.is_lab:
        return kinds + ["cut"] * 4 + ["cut-one-way"] * 3 + ["clock"] * has_clock
    return kinds + ["disk"] * (has_disk and layout.launcher == "fastps-run")


def victims_of(layout: Layout, *, has_scheduler: bool = False) -> list[tuple[str, int]]:
    """List the processes of a layout that a signal may hit.

    has_scheduler: the scheduler of fastps-run is a process, and not a thread of it.
    """
    found = [one for m in range(len(layout.machines)) for one in layout.members_of(m)]
    if layout.launcher == "none":
        return [*found, ("scheduler", 0)]
    if layout.launcher == "fastps-run":
        found += [("launcher", machine) for machine in range(len(layout.machines))]
        found += [("scheduler", 0)] * has_scheduler
    return found


def draw(
    seed: int, layout: Layout, *, has_disk: bool = True, has_clock: bool = True,
    has_scheduler: bool = False,
) -> Event:  # fmt: skip
    """Draw the event of one job; the same seed and layout give the same event."""
    chance = random.Random(f"{seed} {layout.name}")
    if layout.is_split:
        return _partition(chance, seed, layout)
    kind = chance.choice(kinds_of(layout, has_disk=has_disk, has_clock=has_clock))
    step = chance.randint(3, STEPS // 2)
    polite = chance.random() < 0.8
    machines = range(len(layout.machines))
    if kind in CUTS:
        one, other = chance.sample(machines, 2)
        seconds = chance.choice([0.0, 0.0, 0.4])
        phase = chance.choice(["start", "running", "running", "waiting", "leaving"])
        delay_s = chance.uniform(0, 0.8 if phase == "start" else 0.005)
        return Event(seed, layout.name, kind, "machine", one, phase, step, delay_s, seconds, other,
                     is_polite=polite)  # fmt: skip
    if kind in ("disk", "clock"):
        return Event(seed, layout.name, kind, "machine", chance.choice(machines), "start")
    victims = victims_of(layout, has_scheduler=has_scheduler)
    roles = sorted({role for role, _ in victims})
    (role,) = chance.choices(roles, [ROLES[one] for one in roles])
    rank = chance.choice([rank for one, rank in victims if one == role])
    event = Event(seed, layout.name, kind, role, rank, step=step, is_polite=polite)
    return _signal_event(chance, event, layout)


def _partition(chance: random.Random, seed: int, layout: Layout) -> Event:
    """Draw the moment of a partition; which one, the seed counts: splits, then one-way cuts.

    All splits into two sides of which one has one or two machines.
    """
    machines = range(len(layout.machines))
    step, delay_s = chance.randint(3, STEPS // 2), chance.uniform(0, 0.01)
    small = [*itertools.combinations(machines, 1), *itertools.combinations(machines, 2)]
    off = [side if 0 not in side else tuple(set(machines) - set(side)) for side in small]
    ways = [(one, other) for one in machines for other in machines if one != other]
    place = seed % (len(off) + len(ways))
    event = Event(seed, layout.name, "split", "machine", step=step, delay_s=delay_s)
    if place < len(off):
        return replace(event, side=off[place])
    one, other = ways[place - len(off)]
    return replace(event, kind="cut-one-way", rank=one, other=other)


def _signal_event(chance: random.Random, event: Event, layout: Layout) -> Event:
    """Draw the moment of a signal, and what else happens then."""
    if event.role == "worker":
        phases = (*PHASES, "inside", "running")
    else:
        phases = ("start", "running", "running", "waiting", "leaving")
    phase = chance.choice(phases)
    most_s = {"start": 0.8, "running": 0.005, "inside": 0.002, "waiting": LATE_S / 2,
              "late": 0.3, "leaving": 0.004}[phase]  # fmt: skip
    changes: dict[str, Any] = {"phase": phase, "delay_s": chance.uniform(0, most_s)}
    if phase in ("start", "leaving"):
        changes["step"] = 0
    if event.kind == "stop":
        changes["seconds"] = chance.choice([LONG_S, 0.4])
    is_probed = event.kind == "kill" and phase in ("inside", "running") and chance.random() < 0.6
    if is_probed and (point := _point(chance, event, layout)):
        changes["probe"] = f"{point}@{chance.randint(5, 60)}:kill"
    others = [one for one in victims_of(layout)
              if one != (event.role, event.rank) and one[0] in ("worker", "server")]  # fmt: skip
    is_double = event.kind in ("kill", "segv") and event.role in ("worker", "server")
    if is_double and len(others) > 1 and phase != "leaving" and chance.random() < 0.25:
        role, rank = chance.choice(others)
        changes |= {"then_role": role, "then_rank": rank, "then_s": chance.uniform(0, 0.4)}
    return replace(event, **changes)


def _point(chance: random.Random, event: Event, layout: Layout) -> str:
    """Draw a point inside a step that the victim passes in this layout."""
    if event.role == "server":
        return chance.choice(PROBES["server"]) if layout.launcher == "none" else ""
    if event.role != "worker" or layout.work not in NAMED:
        return ""
    uses_memory = not layout.environment.get("FASTPS_SHARED_MEMORY") and not layout.is_lab
    return chance.choice(PROBES["memory" if uses_memory else "links"])


def plan(seed: int, count: int, layouts: Sequence[Layout], **able: bool) -> list[Event]:
    """Draw the events of a run: layouts in turn, and each with another seed."""
    return [
        draw(seed + number // len(layouts), layouts[number % len(layouts)], **able)
        for number in range(count)
    ]
