# SPDX-License-Identifier: Apache-2.0
"""The pace of a job: one line under the output of fastps-run.

It comes from the processes of this machine (telemetry/watch.py). In a job that a leader started on
several machines, each follower forwards its machine's share, and the leader merges them. Threads:
fastps:live queries, so that a stopped process delays nothing; the job's loop shows or forwards the
latest result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from fastps.launch.output import Screen
from fastps.native.condition import Flag
from fastps.telemetry.watch import Pace, in_one_line, look, paces

PERIOD_S = 2.0
_STOP_S = 2.0
_MOST_WORKERS = 1000  # of one machine, so that a line to the leader stays whole


class LiveLine:
    """The line of a job on this machine, updated every PERIOD_S seconds until close()."""

    def __init__(self, job_id: str) -> None:
        self.paces: list[Pace] = []
        self._job_id = job_id
        self._is_over = Flag()
        self._thread = threading.Thread(target=self._work, name="fastps:live", daemon=True)
        self._thread.start()

    def show(self, screen: Screen) -> None:
        """Show the latest paces below the output."""
        screen.live(in_one_line(self.paces))

    def close(self) -> None:
        """Stop; idempotent."""
        self._is_over.set()
        self._thread.join(_STOP_S)

    def _work(self) -> None:
        before = look(self._job_id)
        while not self._is_over.wait(PERIOD_S):
            after = look(self._job_id)
            self.paces = paces(before, after)
            before = after


class ForwardedLine(LiveLine):
    """A machine's share of the line, forwarded to the leader instead of shown."""

    def __init__(self, job_id: str, forward: Callable[[list[list[float]]], None]) -> None:
        """Forward: sends the argument of `MergedLine.update`; called in the thread that shows."""
        super().__init__(job_id)
        self._forward = forward
        self._forwarded = self.paces

    def show(self, screen: Screen) -> None:
        """Forward new paces."""
        if self._forwarded is not self.paces:
            self._forwarded = self.paces
            self._forward(_pack(self._forwarded))

    def close(self) -> None:
        """Stop, and forward that no worker runs here any more; idempotent."""
        super().close()
        self._forward([])


class MergedLine:
    """The line of a job on several machines, from the latest share of each."""

    def __init__(self) -> None:
        self._paces: dict[int, list[Pace]] = {}

    def update(self, machine: int, packed: Sequence[Sequence[float]]) -> None:
        """Replace a machine's share."""
        self._paces[machine] = [_unpack(*fields) for fields in packed]

    def show(self, screen: Screen) -> None:
        """Show the latest paces below the output."""
        screen.live(in_one_line([one for found in self._paces.values() for one in found]))

    def close(self) -> None:
        """Do nothing: there is no thread."""


def _pack(found: Sequence[Pace]) -> list[list[float]]:
    """Return the numbers of each worker that the line needs, for JSON."""
    return [
        [one.about["rank"], *(float(f"{value:.4g}") for value in (
            one.steps, one.operations, one.bytes_started, one.waiting))]
        for one in found if one.about["role"] == "worker"
    ][:_MOST_WORKERS]  # fmt: skip


def _unpack(
    rank: float, steps: float, operations: float, bytes_started: float, waiting: float
) -> Pace:
    about = {"role": "worker", "rank": int(rank)}
    return Pace(about, steps, operations, bytes_started, 0.0, 0.0, waiting, 0)
