# SPDX-License-Identifier: Apache-2.0
"""Rules of a key: what stands for the average where some workers may lie.

Decides parameters, their bounds, and what becomes of them where fewer updates come than there are
workers. Pure: it never sees an element. fastps.byzantine has what users call; its reference forms
say in NumPy what each kind does, reduce/_combiner.pxi does it on servers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

from fastps.types import DType

MAX_VOICES = 256  # workers under a rule: distances between all pairs are kept
MAX_ITERATIONS = 1000
MAX_NAME = 200
FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kind(IntEnum):
    """What is made of the workers' updates."""

    NONE = 0  # their sum, as always
    AVERAGE = 1
    TRIMMED_MEAN = 2
    MEDIAN = 3
    PHOCAS = 4
    MEAN_AROUND_MEDIAN = 5
    SIGN_MAJORITY = 6
    NORM_CLIPPING = 7
    CENTERED_CLIPPING = 8
    GEOMETRIC_MEDIAN = 9
    KRUM = 10
    MULTI_KRUM = 11
    BULYAN = 12
    OWN = 13


# Rules that look at each element by itself: a tensor may be cut.
BY_ELEMENT = (
    Kind.AVERAGE, Kind.TRIMMED_MEAN, Kind.MEDIAN, Kind.PHOCAS, Kind.MEAN_AROUND_MEDIAN,
    Kind.SIGN_MAJORITY,
)  # fmt: skip
TRIMMING = (Kind.TRIMMED_MEAN, Kind.PHOCAS, Kind.MEAN_AROUND_MEDIAN)
KRUMS = (Kind.KRUM, Kind.MULTI_KRUM)
CLIPPING = (Kind.NORM_CLIPPING, Kind.CENTERED_CLIPPING)


class Rule(NamedTuple):
    """A rule and its parameters; travels with the declaration of a tensor.

    f: updates that may be lies. share: of TRIMMED_MEAN and PHOCAS, in place of f, as ZenoPS
    has it. keep: of MULTI_KRUM, how many are averaged, 0 for all but f. radius: of clipping.
    iterations: of CENTERED_CLIPPING and GEOMETRIC_MEDIAN. nu: the least distance that counts, of
    the latter. bucket: updates that are averaged by lot before, seed: of that lot. own: where a
    user's rule is found, module:name.
    """

    kind: Kind = Kind.NONE
    f: int = 0
    share: float = 0.0
    keep: int = 0
    radius: float = 0.0
    iterations: int = 0
    nu: float = 0.0
    bucket: int = 0
    seed: int = 0
    own: str = ""

    def __str__(self) -> str:
        """Return what it is, as errors do."""
        if self.kind is Kind.NONE:
            return "summed"
        fields = zip(self._fields[1:], self[1:], strict=True)
        words = [f"{name}={value}" for name, value in fields if value]
        return f"under the rule {self.kind.name.lower()}({', '.join(words)})"

    def check(self) -> None:
        """Raise ValueError for parameters that mean nothing, however many workers there are."""
        if not all(isinstance(count, Integral) for count in (self.f, self.keep, self.iterations)):
            raise ValueError(
                f"f={self.f!r}, keep={self.keep or None!r}, iterations={self.iterations!r}: whole "
                "numbers; a part of the updates is share=, where a rule takes it"
            )
        if not all(isinstance(one, Real) for one in (self.share, self.radius, self.nu)):
            raise ValueError(
                f"share={self.share!r}, radius={self.radius!r}, nu={self.nu!r}: floats"
            )
        if not (0 <= self.f < MAX_VOICES and 0 <= self.keep <= MAX_VOICES):
            raise ValueError(f"f={self.f}, keep={self.keep}: 0 to {MAX_VOICES - 1} updates")
        if not (0 <= self.share < 0.5 and (self.share == 0 or self.f == 0)):
            raise ValueError(f"share={self.share:g} is 0 to below 0.5, and f={self.f} 0 with it")
        if not (0 <= self.radius < math.inf and 0 <= self.nu < math.inf):
            raise ValueError(f"radius={self.radius:g}, nu={self.nu:g}: finite, and 0 or more")
        if self.kind in CLIPPING and not self.radius:
            raise ValueError("clipping to radius=0 leaves nothing")
        if not 0 <= self.iterations <= MAX_ITERATIONS:
            raise ValueError(f"iterations={self.iterations} is 0 to {MAX_ITERATIONS}")
        if not (0 <= self.bucket <= MAX_VOICES and 0 <= self.seed < 1 << 63):
            raise ValueError(f"bucket={self.bucket}, seed={self.seed} cannot be")
        self._check_own()

    def _check_own(self) -> None:
        is_named = len(self.own) <= MAX_NAME and _PLACE.fullmatch(self.own) is not None
        if (self.kind is Kind.OWN) != bool(self.own) or (self.own and not is_named):
            raise ValueError(f"a rule of one's own is named module:function, not {self.own!r}")

    def check_voices(self, n: int, dtype: DType) -> None:
        """Raise ValueError, or TypeError, where n workers and such elements cannot have it."""
        self.check()
        if dtype not in FLOATS:
            raise TypeError(f"a rule is for floats, not {dtype.name.lower()}")
        if n > MAX_VOICES:
            raise ValueError(f"{n} workers; rules compare at most {MAX_VOICES}")
        m = self.voices(n)
        least = self.least(self.f)
        if m < least:
            buckets = f" in {m} buckets of {self.bucket}" if self.bucket else ""
            cure = f"f={self.most(m)} at most, or another rule"
            raise ValueError(
                f"{self.kind.name.lower()} with f={self.f} needs {least} updates or more; there "
                f"are {n} workers{buckets}: take {cure if self.most(m) >= 0 else 'another rule'}"
            )
        if self.keep > m:
            raise ValueError(f"keep={self.keep} of {m} updates")

    def voices(self, m: int) -> int:
        """Return how many updates the rule itself compares where m came."""
        return -(-m // self.bucket) if self.bucket else m

    def least(self, f: int) -> int:
        """Return the fewest updates among which f may be lies."""
        if self.kind in KRUMS:
            return 2 * f + 3
        if self.kind is Kind.BULYAN:
            return 4 * f + 3
        return 2 * f + 1 if self.kind in TRIMMING else 1

    @property
    def full(self) -> int:
        """The fewest updates among which all f may be lies, and of which something is made."""
        least = self.least(self.f)
        return next(
            m for m in range(1, MAX_VOICES + 1)
            if self.voices(m) >= least and not self.gives_nothing(m)
        )  # fmt: skip

    def most(self, m: int) -> int:
        """Return the most lies that m updates stand; below 0: not even without any."""
        if self.kind in KRUMS:
            return (m - 3) // 2
        if self.kind is Kind.BULYAN:
            return (m - 3) // 4
        return (m - 1) // 2

    def lies_among(self, m: int) -> int:
        """Return the f to go by where m updates came, or fewer than there are workers.

        Of a share it is ZenoPS's number, which may be 0 where there is nothing to trim.
        """
        if self.share and self.kind is Kind.PHOCAS:
            return min(int(max(1, self.share * m)), max((m - 1) // 2, 0))
        if self.share:
            return int(max(min((m - 2) // 2, self.share * m), 0))
        return min(self.f, max(self.most(m), 0))

    def gives_nothing(self, m: int) -> bool:
        """Return whether m updates are too few to make anything of: the result is zeros."""
        return m == 0 or (self.share > 0 and m <= 2)

    @property
    def is_by_element(self) -> bool:
        """Return whether pieces of a tensor may go to different servers."""
        return self.kind in BY_ELEMENT

    @property
    def wants_whole(self) -> bool:
        """Return whether one server has to see all of a tensor."""
        return self.has_meaning() and not self.is_by_element

    def has_meaning(self) -> bool:
        """Return whether there is a rule."""
        return self.kind is not Kind.NONE


SUMMED = Rule()

# What is taken for a rule: None is as declared before, or none; a name is that of a rule without
# parameters.
Choice: TypeAlias = Rule | str | Callable[..., Any] | None
