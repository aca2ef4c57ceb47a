# SPDX-License-Identifier: Apache-2.0
"""What happens to a job, drawn by a seed: which process, which fault, at which moment. Pure.

Kinds: kill, term, segv (signals that end a process), stop (SIGSTOP, and SIGCONT after `seconds`:
longer than a lease, or a short pause), cut and cut-one-way (links between two machines; healed
after `seconds`, or never if 0), disk (the folder of logs and temporary files is full), clock (one
machine's monotonic clock is a day ahead: a time namespace), none.

A clock that jumps while processes run is left out: the offsets of a time namespace are fixed
before its first process starts, and CLOCK_REALTIME has no namespace.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.chaos.layouts import LEASE_S, Layout

SIGNALS = {
    "kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP,
}  # fmt: skip
CUTS = ("cut", "cut-one-way")
PHASES = ("start", "running", "inside", "waiting", "late", "leaving")
STEPS = 40
LATE_S = 0.6  # how late the straggler is that others wait for
LONG_S = LEASE_S + 2.0
PROBES = ("worker_start", "worker_result", "link_send", "local_arrive", "local_chunk")


@dataclass(frozen=True)
class Event:
    """One fault of one job.

    role: worker, server, scheduler, launcher, or machine (of a cut, a disk or a clock); other: the
    second machine of a cut. phase: the moment of the victim, or of the job. delay_s: after that
    moment. probe: a value of FASTPS_FAULT, the exact moment inside a step. is_polite: the other
    workers survive SIGTERM for a while.
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

    @property
    def name(self) -> str:
        """Return kind and victim, as tables show them."""
        length = ""
        if self.kind == "stop" or (self.kind in CUTS and self.seconds):
            length = " long" if self.seconds > LEASE_S else " short"
        return f"{self.kind}{length} {self.role}".strip()

    def words(self) -> str:
        """Return the event as one line."""
        where = f"{self.role} {self.rank}" + (f" and {self.other}" if self.kind in CUTS else "")
        moment = f"{self.phase}, step {self.step} + {1000 * self.delay_s:.1f} ms"
        parts = [self.name.partition(" ")[0], where, self.probe or moment]
        if self.seconds:
            parts.append(f"for {self.seconds:.1f} s")
        return f"{self.layout}: {', '.join(parts)} (seed {self.seed})"

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def kinds_of(layout: Layout, *, has_disk: bool, has_clock: bool) -> list[str]:
    """List the kinds of events that a layout can meet."""
    kinds = ["kill", "kill", "term", "segv", "stop"]
    if layout.is_lab:
        kinds += ["cut", "cut-one-way"]
    if layout.launcher == "fastps-run":
        kinds += ["disk"] * (has_disk and not layout.is_lab) + ["clock"] * has_clock
    return kinds


def victims_of(layout: Layout) -> list[tuple[str, int]]:
    """List the processes of a layout that a signal may hit."""
    found = [one for m in range(len(layout.machines)) for one in layout.members_of(m)]
    if layout.launcher == "none":
        return [*found, ("scheduler", 0)]
    if layout.launcher == "fastps-run":
        found += [("launcher", machine) for machine in range(len(layout.machines))]
    return found


def draw(seed: int, layout: Layout, *, has_disk: bool = True, has_clock: bool = True) -> Event:
    """Draw the event of one job; the same seed and layout give the same event."""
    chance = random.Random(f"{seed} {layout.name}")
    kind = chance.choice(kinds_of(layout, has_disk=has_disk, has_clock=has_clock))
    step = chance.randint(3, STEPS // 2)
    polite = chance.random() < 0.8
    machines = range(len(layout.machines))
    if kind in CUTS:
        one, other = chance.sample(machines, 2)
        seconds = chance.choice([0.0, 0.0, 0.4])
        phase = chance.choice(["running", "waiting", "leaving"])
        return Event(seed, layout.name, kind, "machine", one, phase, step,
                     chance.uniform(0, 0.005), seconds, other, is_polite=polite)  # fmt: skip
    if kind in ("disk", "clock"):
        return Event(seed, layout.name, kind, "machine", chance.choice(machines), "start")
    role = chance.choice(sorted({role for role, _ in victims_of(layout)}))
    rank = chance.choice([rank for one, rank in victims_of(layout) if one == role])
    return _signal_event(
        chance, Event(seed, layout.name, kind, role, rank, is_polite=polite, step=step)
    )


def _signal_event(chance: random.Random, event: Event) -> Event:
    phases = PHASES if event.role == "worker" else ("start", "running", "waiting", "leaving")
    phase = chance.choice(phases)
    most_s = {"start": 0.8, "running": 0.005, "inside": 0.002, "waiting": LATE_S / 2,
              "late": 0.3, "leaving": 0.004}[phase]  # fmt: skip
    seconds, probe, step = 0.0, "", event.step if phase not in ("start", "leaving") else 0
    if event.kind == "stop":
        seconds = chance.choice([LONG_S, 0.4])
    elif event.kind == "kill" and phase == "inside" and chance.random() < 0.5:
        probe = f"{chance.choice(PROBES)}@{chance.randint(5, 60)}:kill"
    fields = asdict(event) | {"phase": phase, "delay_s": chance.uniform(0, most_s), "step": step}
    return Event(**fields | {"seconds": seconds, "probe": probe})


def plan(seed: int, count: int, layouts: Sequence[Layout], **able: bool) -> list[Event]:
    """Draw the events of a run: layouts in turn, and each with another seed."""
    return [
        draw(seed + number // len(layouts), layouts[number % len(layouts)], **able)
        for number in range(count)
    ]
