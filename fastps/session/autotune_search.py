# SPDX-License-Identifier: Apache-2.0
"""Which setting makes steps shortest: a search that is told what steps took, and asks for more.

Decides what is tried next; never knows what a setting does or how time is taken. One knob after
another is searched, in an order that the seed gives, until a sweep over all of them finds nothing
better: first the ends and the middle of its values, as a line may have two valleys, then by golden
section around the best of these (Kiefer, Proc. AMS 1953). Then the best few and the start take
turns, and what wins is taken only where it beats the start clearly: ByteScheduler (Peng et al.,
SOSP 2019, section 4.3) takes what was best once, and once is often luck. Pure: the same seed and
the same measurements give the same choices.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

Setting: TypeAlias = tuple[int, ...]  # a value of each knob
Asking: TypeAlias = Generator[Setting, float, Setting]  # which yields what to measure

MAX_SWEEPS = 2
FINALISTS = 3  # besides the start
TURNS = 4  # of each of them
GAIN = 0.02  # smaller gains are noise


class Knob(NamedTuple):
    """What may be turned: its values in rising order, and the one it has; it need not be one."""

    name: str
    values: tuple[int, ...]
    start: int


class Search:
    """One search; measure `setting`, tell it by measured(), until is_over."""

    def __init__(self, knobs: Sequence[Knob], *, seed: int = 0) -> None:
        """Start with what the knobs have. ValueError without knobs, or with one of no values."""
        if not knobs or not all(knob.values for knob in knobs):
            raise ValueError("a search needs at least one knob, and at least one value for each")
        self.knobs = tuple(knobs)
        self.start: Setting = tuple(knob.start for knob in knobs)
        self.setting = self.start  # to be measured now; in the end what was chosen
        self.is_over = False
        self.trials = 0
        self.gain = 0.0  # share of a step that the choice saves
        self._order = random.Random(seed).sample(range(len(knobs)), len(knobs))
        self._seconds: dict[Setting, float] = {}
        self._best = self.start
        self._asking = self._search()
        next(self._asking)

    def measured(self, seconds: float) -> None:
        """Tell how long a step takes with `setting`; the next one stands there then."""
        self.trials += 1
        try:
            self.setting = self._asking.send(seconds)
        except StopIteration as end:
            self.setting, self.is_over = end.value, True

    def _search(self) -> Asking:
        yield from self._ask(self.start)
        for _ in range(MAX_SWEEPS):
            before = self._best
            for place in self._order:
                yield from self._line(place)
            if self._best == before:
                break
        return (yield from self._final())

    def _ask(self, setting: Setting) -> Generator[Setting, float, float]:
        """Return the seconds of a setting, measured unless it was before."""
        if setting not in self._seconds:
            self._seconds[setting] = yield setting
            if self._seconds[setting] < self._seconds[self._best]:
                self._best = setting
        return self._seconds[setting]

    def _line(self, place: int) -> Generator[Setting, float, None]:
        """Search the values of one knob, with the others as in the best setting."""
        base, values = self._best, self.knobs[place].values

        def at(index: int) -> Setting:
            return (*base[:place], values[index], *base[place + 1 :])

        probes = sorted({0, len(values) // 2, len(values) - 1})
        seconds = []
        for index in probes:
            seconds.append((yield from self._ask(at(index))))
        first, last = _around(probes, seconds.index(min(seconds)))
        while last - first > 1:
            near, far = _sections(first, last)
            near_s = yield from self._ask(at(near))
            far_s = yield from self._ask(at(far))
            first, last = (first, far - 1) if near_s <= far_s else (near + 1, last)
        for index in range(first, last + 1):
            yield from self._ask(at(index))

    def _final(self) -> Asking:
        """Measure the best few and the start in turns; who wins has to win clearly."""
        best = sorted(self._seconds, key=self._seconds.__getitem__)[:FINALISTS]
        if self._best == self.start:
            return self.start
        found: dict[Setting, list[float]] = {setting: [] for setting in (*best, self.start)}
        for turn in range(TURNS):  # a drift helps none
            for setting in list(found)[:: -1 if turn % 2 else 1]:
                found[setting].append((yield setting))
        seconds = {setting: statistics.median(each) for setting, each in found.items()}
        winner = min(seconds, key=seconds.__getitem__)
        if seconds[winner] > (1 - GAIN) * seconds[self.start]:
            return self.start
        self.gain = 1 - seconds[winner] / seconds[self.start]
        return winner


def _around(probes: Sequence[int], best: int) -> tuple[int, int]:
    """Return the places between the neighbours of the best probe."""
    first = probes[best - 1] + 1 if best else probes[0]
    last = probes[best + 1] - 1 if best + 1 < len(probes) else probes[-1]
    return first, last


def _sections(first: int, last: int) -> tuple[int, int]:
    """Return the two places that cut a range of three or more by the golden ratio."""
    near = first + round(0.382 * (last - first))
    far = last - round(0.382 * (last - first))
    return (near, far) if near < far else (near, near + 1)
