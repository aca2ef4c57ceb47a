# SPDX-License-Identifier: Apache-2.0
"""Steps of the training: what each of them waited for, of all that was communicated.

Communication is under way while any operation that was started is in flight; what the user's
threads waited meanwhile was not hidden behind the computation. Nothing is measured before the
first mark. Threads: the user's, one at a time.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

from fastps import _core
from fastps.telemetry import spans

if TYPE_CHECKING:
    from fastps.session.autotune import Exchange, Tuner
    from fastps.session.host import SessionHost
    from fastps.telemetry.recorder import Recorder
    from fastps.worker._engine import WorkerEngine


class Steps:
    """The steps of one session."""

    def __init__(self, session: SessionHost) -> None:
        self._session: SessionHost = weakref.proxy(session)  # which goes at once when it ends
        self.count = 0  # marks
        self.seconds = 0.0  # of the last step
        self._marked = 0.0
        self._busy = self._waited = 0.0  # of the last step
        self._before = (0.0, 0.0)  # busy and waited, at the last mark
        self._generation = 0  # of the job then: each view of an elastic one has its own engine
        self._totals = (0.0, 0.0)  # of all steps
        self._tuner = _tuner_of(session)

    def mark(self) -> None:
        """Mark the end of a step and the start of the next; blocks only where it tunes."""
        now = time.perf_counter()
        connections = getattr(self._session, "connections", None)
        engine = None if connections is None else connections.engine
        busy = 0.0 if engine is None else engine.busy_seconds()
        waited = self._session.wait_seconds[0]
        if connections is not None and connections.job.generation != self._generation:
            self._generation = connections.job.generation
            self._before = (0.0, self._before[1])
        if self.count:
            self.seconds = now - self._marked
            self._busy, self._waited = busy - self._before[0], waited - self._before[1]
            self._totals = (self._totals[0] + self._busy, self._totals[1] + self._waited)
            began, ended = round(self._marked * 1e9), round(now * 1e9)
            _core.mark(spans.STEP, began, ended, version=self.count)
            if self._tuner is not None and engine is not None and self._session.size > 1:
                self._tuner.step(self.seconds)
        self.count += 1
        self._marked, self._before = now, (busy, waited)

    @property
    def _engine(self) -> WorkerEngine | None:
        """What runs the operations; None in a job of one."""
        connections = getattr(self._session, "connections", None)
        return None if connections is None else connections.engine

    @property
    def recorder(self) -> Recorder | None:
        """What writes the trace of this process; None where there is none."""
        connections = getattr(self._session, "connections", None)
        return None if connections is None else connections.recorder

    def offer(self, exchange: Exchange) -> None:
        """Let an exchange of gradients be tuned with the steps, where that is asked for."""
        if self._tuner is not None:
            self._tuner.offer(exchange)

    @property
    def is_tuning(self) -> bool:
        """Return whether settings are still being tried, which takes all workers."""
        return self._tuner is not None and not self._tuner.is_over and self._session.size > 1

    def speed(self) -> tuple[int, float] | None:
        """Take the oldest measurement of what is pushed; see fastps.get_pushpull_speed()."""
        engine = self._engine
        window = None if engine is None else engine.speed()
        if window is None:
            return None
        age_s = (_core.clock_ns() - window[0]) * 1e-9
        return round((time.time() - age_s) * 1000), window[1]

    def statistics(self) -> dict[str, float]:
        """Return steps, and the shares of their communication that nothing hid; empty without."""
        if self.count < 2:
            return {}
        tuned = {} if self._tuner is None else self._tuner.statistics()
        return {
            **tuned,
            "steps": self.count - 1,
            "step_seconds": self.seconds,
            "communication_seconds": self._totals[0],
            "exposed_share": _share(*self._totals),
            "exposed_share_of_step": _share(self._busy, self._waited),
        }


def _tuner_of(session: SessionHost) -> Tuner | None:
    if not session.config.autotune:
        return None
    # imported here: most jobs tune nothing
    from fastps.session.autotune import Tuner  # noqa: PLC0415

    return Tuner(session)


def _share(busy: float, waited: float) -> float:
    return min(waited / busy, 1.0) if busy > 0 else 0.0
