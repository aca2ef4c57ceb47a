# SPDX-License-Identifier: Apache-2.0
"""Workers that the launcher starts while an elastic job runs: instead of lost ones.

Such a worker joins the job at its next boundary (control/newcomers.py). Used from the launcher's
main thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from fastps.launch.limits import StartError
from fastps.launch.output import Screen
from fastps.launch.plan import JOINS, ProcessSpec
from fastps.launch.processes import Child


class Respawn:
    """Starts a worker instead of each lost one, so many times."""

    def __init__(
        self, count: int, plan: Sequence[ProcessSpec], start: Callable[[ProcessSpec], Child],
        screen: Screen,
    ) -> None:  # fmt: skip
        """count: how many to start. plan: the processes of the job on this machine."""
        self._left = count
        self._specs = {spec.rank: spec for spec in plan if spec.role == "worker"}
        self._start, self._screen = start, screen

    def replace(self, lost: Child) -> Child | None:
        """Return a worker with the rank of a lost one; None if no more may be started."""
        spec = self._specs.get(lost.rank)
        if not self._left or spec is None or lost.role != "worker":
            return None
        self._left -= 1
        self._specs[lost.rank] = spec = dataclasses.replace(
            spec, environment={**spec.environment, **JOINS}, start=spec.start + 1
        )
        try:
            child = self._start(spec)
        except StartError as error:
            self._screen.report(f"{error}; {spec.name} is not replaced", is_alarm=True)
            return None
        self._screen.report(
            f"{child.describe()} is started instead, and joins at the next commit() of elastic.run"
        )
        return child
