# SPDX-License-Identifier: Apache-2.0
"""Bring the clocks of several machines together. Pure.

A round trip to another process tells how far its clock is ahead, and a bound of the error. It read
its clock between our question and the arrival of its answer, so the middle is right within half of
the round trip (Cristian, *Probabilistic clock synchronization*, 1989). Of several the shortest
counts. Between two samples the offset is taken to change evenly, which follows clocks that drift.
Processes of one machine read one clock, and share the best offset that any of them has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fastps.telemetry.spans import Recording, Spans


class Sample(NamedTuple):
    """How far the scheduler's clock is ahead of ours; nanoseconds."""

    when: int
    offset: int
    bound: int


def sample_of(sent: int, remote: int, received: int) -> Sample:
    """Return the sample of one round trip: our clock, the other's, our clock."""
    middle = (sent + received) // 2
    return Sample(middle, remote - middle, (received - sent + 1) // 2)


def best_of(samples: Iterable[Sample]) -> Sample:
    """Return the sample with the least bound of its error."""
    return min(samples, key=lambda sample: sample.bound)


def machines_of(recordings: Sequence[Recording]) -> dict[str, list[Sample]]:
    """Return the samples of every machine, by its boot id, in the order of time."""
    found: dict[str, list[Sample]] = {}
    for recording in recordings:
        samples = found.setdefault(recording.who["boot"], [])
        samples.extend(Sample(*clock) for clock in recording.clocks)
    for samples in found.values():
        samples.sort()
    return found


class Alignment:
    """The clocks of the machines of a trace, brought to that of the reference."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        """Align to the scheduler's clock; without samples, to that of the first process."""
        self._machines = machines_of(recordings)

    def bound_ns(self, boot: str) -> int:
        """Return the bound of the error of this machine's offsets, -1 without samples."""
        return min((sample.bound for sample in self._machines[boot]), default=-1)

    def shift(self, boot: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """Return begin and end of spans on the clock of the reference."""
        samples = self._trusted(boot)
        if not samples:
            return spans["began"], spans["ended"]
        when = np.array([sample.when for sample in samples], np.float64)
        offsets = np.array([sample.offset - samples[0].offset for sample in samples], np.float64)
        drift = np.interp(spans["began"].astype(np.float64), when, offsets).astype(np.int64)
        offset = samples[0].offset + drift
        return spans["began"] + offset, spans["ended"] + offset

    def _trusted(self, boot: str) -> list[Sample]:
        """Return the samples with a bound near the best: round trips vary more than clocks."""
        samples = self._machines[boot]
        least = self.bound_ns(boot)
        return [sample for sample in samples if sample.bound <= 4 * max(least, 1)]
