# SPDX-License-Identifier: Apache-2.0
"""What the driver observes of one job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """What the driver observed of one job; times are of CLOCK_MONOTONIC.

    event_at: None where the event never happened. launchers: exit code (None: it never ended) and
    stderr of each machine's launcher; without launchers, of each process by name. records: of all
    workers. left: what remained afterwards. load: of the machine.
    """

    event_at: float | None = None
    ended_at: float = 0.0
    began_at: float = 0.0
    launchers: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    is_hung: bool = False
    load: dict[str, float] = field(default_factory=dict)

    def of(self, rank: int, what: str) -> list[dict[str, Any]]:
        """List the records of one kind of one worker."""
        return [one for one in self.records if one["rank"] == rank and one["what"] == what]

    @property
    def spare_s(self) -> float:
        """Return how much later than on an idle machine things may happen.

        What the driver waited for a processor, ten times over: each of several processes may wait.
        """
        return 10 * self.load.get("driver_late_s", 0.0)

    def last(self, launcher: str) -> str:
        """Return the last line that a launcher wrote."""
        lines: Sequence[str] = self.launchers[launcher]["stderr"].strip().splitlines()
        return lines[-1] if lines else ""

    def last_words(self) -> str:
        """Return the last lines of all launchers."""
        return "; ".join(f"{name}: {self.last(name)}" for name in self.launchers)
