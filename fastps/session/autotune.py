# SPDX-License-Identifier: Apache-2.0
"""Settings that are tuned while a job trains: credit, size of partitions, size of buckets.

Measures steps, a window of them with each setting, and lets the search (autotune_search.py) choose
the next; ByteScheduler (Peng et al., SOSP 2019, section 4.3) does the same. Rank 0 alone measures
and decides. What it decides travels as a broadcast of four numbers. The broadcast starts at the
end of one step and ends with the next, so all workers change in the same step and none waits.
Nothing that is tuned changes a bit of any sum: who adds what, and in which order, is fixed by the
cast. Partitions and buckets change where an exchange of gradients has offered itself, between two
steps: its names are forgotten and declared anew. Threads: the user's, which marks steps.
"""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fastps.session.autotune_search import Knob, Search

if TYPE_CHECKING:
    from fastps.session.host import SessionHost
    from fastps.worker.handle import Handle

log = logging.getLogger(__name__)

NAME = "fastps.autotune"  # of what rank 0 says
WARM_UP_STEPS = 5  # before the first window
CREDITS = tuple(1 << shift for shift in range(18, 25))  # 256 KiB to 16 MiB
PARTITIONS = tuple(1 << shift for shift in range(19, 25))
BUCKETS = tuple(1 << shift for shift in range(18, 24))


class Layout(NamedTuple):
    """How gradients are cut and joined, in bytes."""

    partition_bytes: int
    bucket_bytes: int


class Exchange(Protocol):
    """Who can cut and join gradients in another way between two steps."""

    @property
    def layout(self) -> Layout:
        """Return the one there is."""

    def lay_out(self, layout: Layout) -> None:
        """Take another, with all workers; nothing is in flight. Blocks."""


class Tuner:
    """The tuning of one session."""

    def __init__(self, session: SessionHost) -> None:
        self._session: SessionHost = weakref.proxy(session)
        self._steps = session.config.autotune_steps
        self._exchange: weakref.ref[Exchange] | None = None
        self._offers = 0
        self._search: Search | None = None  # of rank 0
        self._seconds: list[float] = []  # of the window's steps
        self._window = WARM_UP_STEPS
        self._order = np.zeros(4, np.int64)  # credit, partition, bucket, and whether it is over
        self._in_force: tuple[int, ...] = (0, 0, 0)
        self._coming: Handle[Any] | None = None
        self.trials = 0
        self.gain = 0.0
        self.is_over = False

    def offer(self, exchange: Exchange) -> None:
        """Let an exchange be tuned too; with a second one none is, as steps may interleave."""
        self._offers += 1
        self._exchange = weakref.ref(exchange) if self._offers == 1 else None

    def step(self, seconds: float) -> None:
        """Take a step of so many seconds; blocks only where a new layout is declared."""
        if self.is_over:
            return
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            self._obey()
            return
        self._seconds.append(seconds)
        if len(self._seconds) >= self._window:
            if self._session.rank == 0:
                self._decide(statistics.median(self._seconds))
            self._coming = self._session.broadcast_async(self._order, 0, NAME)

    # ---- rank 0 ----

    def _decide(self, seconds: float) -> None:
        """Choose what all do next; the first window only warms up."""
        if self._search is None:
            self._search = Search(self._knobs(), seed=self._session.config.autotune_seed)
        else:
            self._search.measured(seconds)
        wanted = dict(
            zip([knob.name for knob in self._search.knobs], self._search.setting, strict=True)
        )
        layout = self._layout
        self._order[:] = (
            wanted.get("credit_bytes", 0),
            wanted.get("partition_bytes", layout.partition_bytes),
            wanted.get("bucket_bytes", layout.bucket_bytes),
            self._search.is_over,
        )
        self.trials, self.gain = self._search.trials, self._search.gain

    def _knobs(self) -> Sequence[Knob]:
        """Return what there is to tune; what settings say of credit stays."""
        knobs = []
        config, connections = self._session.config, self._session.connections
        has_links = bool(connections.statistics().get("credit_bytes"))
        if has_links and not config.credit_bytes:
            knobs.append(Knob("credit_bytes", CREDITS, 0))
        if self._found is not None:
            layout = self._layout
            if connections.owners:
                knobs.append(Knob("partition_bytes", PARTITIONS, layout.partition_bytes))
            knobs.append(Knob("bucket_bytes", BUCKETS, layout.bucket_bytes))
        return knobs or [Knob("nothing", (0,), 0)]

    # ---- all ----

    @property
    def _found(self) -> Exchange | None:
        return None if self._exchange is None else self._exchange()

    @property
    def _layout(self) -> Layout:
        found = self._found
        return Layout(self._session.config.partition_bytes, 0) if found is None else found.layout

    def _obey(self) -> None:
        """Do what rank 0 says. The step in which it was told is not measured."""
        credit_bytes, partition_bytes, bucket_bytes, is_over = map(int, self._order)
        layout = Layout(partition_bytes, bucket_bytes)
        if credit_bytes != self._in_force[0]:
            self._session.connections.set_credit(credit_bytes)
        found = self._found
        if found is not None and found.layout != layout:
            found.lay_out(layout)
        self._in_force = (credit_bytes, *layout)
        self._seconds.clear()
        self._window = self._steps
        self.is_over = bool(is_over)
        if self.is_over and self._session.rank == 0:
            self._report(layout, credit_bytes)

    def _report(self, layout: Layout, credit_bytes: int) -> None:
        log.info(
            "tuned in %d windows of %d steps: partitions of %d bytes, buckets of %d, credit of "
            "%s; steps are %.1f %% shorter than before",
            self.trials, self._steps, layout.partition_bytes, layout.bucket_bytes,
            credit_bytes or "what links need", 100 * self.gain,
        )  # fmt: skip

    def statistics(self) -> dict[str, float]:
        """Return what is set now; how far tuning is, and what it gained, only rank 0 knows."""
        credit_bytes, partition_bytes, bucket_bytes = self._in_force
        return {
            "autotune_is_over": self.is_over,
            "autotune_trials": self.trials,
            "autotune_gain": self.gain,
            "autotune_credit_bytes": credit_bytes,
            "autotune_partition_bytes": partition_bytes,
            "autotune_bucket_bytes": bucket_bytes,
        }
