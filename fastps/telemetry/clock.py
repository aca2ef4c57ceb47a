# SPDX-License-Identifier: Apache-2.0
"""Bring the clocks of several machines together. Pure.

A round trip to somebody else says how far his clock is ahead, and how wrong that can be: what he
answers was read between our question and his answer's arrival, so the middle is right within half
of the round trip (Cristian, *Probabilistic clock synchronization*, 1989). Of several the shortest
counts. Between two samples the offset is taken to change evenly, so that clocks which drift are
followed. Processes of one machine read one clock, and share the best offset that any of them has.
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


def sample_of(asked: int, told: int, heard: int) -> Sample:
    """Make a sample of one round trip: ours, theirs, ours."""
    middle = (asked + heard) // 2
    return Sample(middle, told - middle, (heard - asked + 1) // 2)


def best_of(samples: Iterable[Sample]) -> Sample:
    """Choose the sample that can be least wrong."""
    return min(samples, key=lambda sample: sample.bound)


def machines_of(recordings: Sequence[Recording]) -> dict[str, list[Sample]]:
    """Gather the samples of every machine, by its boot id, in the order of time."""
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
        """Use the scheduler's clock; that of the first process where nobody has asked it."""
        self._machines = machines_of(recordings)

    def bound_ns(self, boot: str) -> int:
        """Return how far apart this machine's times and the reference's may be, at its samples."""
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
        """Leave out what says less than the best: a clock drifts slowly, a round trip jumps."""
        samples = self._machines[boot]
        least = self.bound_ns(boot)
        return [sample for sample in samples if sample.bound <= 4 * max(least, 1)]
