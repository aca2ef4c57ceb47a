# SPDX-License-Identifier: Apache-2.0
"""Rules of a key: what replaces the average where some workers may lie.

Decides parameters, their bounds, and how they change where fewer updates come than there are
workers. Pure: it never sees an element. fastps.byzantine has what users call, and reference forms
of each kind in NumPy; reduce/_combiner.pxi applies them on servers.
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
MAX_SUBSETS = 1 << 16  # that MDA and SMEA compare: a second at most
MAX_NAME = 200
FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kind(IntEnum):
    """How the workers' updates are combined."""

    NONE = 0  # by their sum
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
    MDA = 14
    SMEA = 15
    CAF = 16


# Rules that combine each element by itself: a tensor may be cut.
BY_ELEMENT = (
    Kind.AVERAGE, Kind.TRIMMED_MEAN, Kind.MEDIAN, Kind.PHOCAS, Kind.MEAN_AROUND_MEDIAN,
    Kind.SIGN_MAJORITY,
)  # fmt: skip
SUBSETS = (Kind.MDA, Kind.SMEA)
MAJORITY = (
    Kind.TRIMMED_MEAN, Kind.PHOCAS, Kind.MEAN_AROUND_MEDIAN, Kind.CAF, *SUBSETS
)  # fmt: skip
KRUMS = (Kind.KRUM, Kind.MULTI_KRUM)
CLIPPING = (Kind.NORM_CLIPPING, Kind.CENTERED_CLIPPING)


class Rule(NamedTuple):
    """A rule and its parameters; travels with the declaration of a tensor.

    f: updates that may be lies. share: of TRIMMED_MEAN and PHOCAS, in place of f, as ZenoPS
    has it. keep: of MULTI_KRUM, how many are averaged, 0 for all but f. radius: of clipping.
    iterations: of CENTERED_CLIPPING and GEOMETRIC_MEDIAN. nu: of GEOMETRIC_MEDIAN, the least
    distance that counts. bucket: updates that are averaged at random first; seed: of that choice.
    own: where a user's rule is found, module:name. arc, nnm: f of adaptive clipping, and of mixing
    nearest neighbors after it, before the rule; 0 for none of it. clip: radius of clipping there.
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
    arc: int = 0
    nnm: int = 0
    clip: float = 0.0

    def __str__(self) -> str:
        """Describe the rule for errors."""
        if self.kind is Kind.NONE:
            return "summed"
        fields = zip(self._fields[1:], self[1:], strict=True)
        words = [f"{name}={value}" for name, value in fields if value]
        return f"under the rule {self.kind.name.lower()}({', '.join(words)})"

    def check(self) -> None:
        """Raise ValueError for parameters that are out of bounds for any number of workers."""
        if not all(isinstance(count, Integral) for count in (self.f, self.keep, self.iterations)):
            raise ValueError(
                f"f={self.f!r}, keep={self.keep or None!r}, iterations={self.iterations!r} must "
                "be whole numbers; rules that trim a part of the updates take share="
            )
        if not all(isinstance(one, Integral) and 0 <= one < MAX_VOICES for one in self.early):
            raise ValueError(
                f"f before a rule must be a whole number from 0 to {MAX_VOICES - 1}, got "
                f"arc={self.arc!r}, nnm={self.nnm!r}"
            )
        if not all(isinstance(one, Real) for one in (self.share, self.radius, self.nu, self.clip)):
            raise ValueError(
                f"share={self.share!r}, radius={self.radius!r}, nu={self.nu!r}, "
                f"clip={self.clip!r} must be floats"
            )
        if not (0 <= self.f < MAX_VOICES and 0 <= self.keep <= MAX_VOICES):
            raise ValueError(
                f"f must be 0 to {MAX_VOICES - 1} and keep 0 to {MAX_VOICES}, got f={self.f}, "
                f"keep={self.keep}"
            )
        if not (0 <= self.share < 0.5 and (self.share == 0 or self.f == 0)):
            raise ValueError(
                "share must be 0 to below 0.5 and excludes f, got "
                f"share={self.share:g}, f={self.f}"
            )
        if not all(0 <= one < math.inf for one in (self.radius, self.nu, self.clip)):
            raise ValueError(
                f"radius, nu and clip must be finite and 0 or more, got {self.radius:g}, "
                f"{self.nu:g} and {self.clip:g}"
            )
        if self.kind in CLIPPING and not self.radius:
            raise ValueError("clipping needs radius above 0, got 0")
        if not 0 <= self.iterations <= MAX_ITERATIONS:
            raise ValueError(f"iterations must be 0 to {MAX_ITERATIONS}, got {self.iterations}")
        if not (0 <= self.bucket <= MAX_VOICES and 0 <= self.seed < 1 << 63):
            raise ValueError(
                f"bucket must be 0 to {MAX_VOICES} and seed 0 to 2**63 - 1, got "
                f"bucket={self.bucket}, seed={self.seed}"
            )
        self._check_own()

    def _check_own(self) -> None:
        is_named = len(self.own) <= MAX_NAME and _PLACE.fullmatch(self.own) is not None
        if (self.kind is Kind.OWN) != bool(self.own) or (self.own and not is_named):
            raise ValueError(f"a user's rule is named module:function, got {self.own!r}")
        if self.own and self.is_mixed:
            raise ValueError(
                f"updates are not mixed or clipped before a user's rule, {self.own!r}: let it do "
                "so itself"
            )

    def check_voices(self, n: int, dtype: DType) -> None:
        """Raise ValueError or TypeError where n workers or this element type do not allow it."""
        self.check()
        if dtype not in FLOATS:
            raise TypeError(f"a rule is for floats, not {dtype.name.lower()}")
        if n > MAX_VOICES:
            raise ValueError(f"robust rules support at most {MAX_VOICES} workers, got {n}")
        m = self.voices(n)
        least = self.least(self.f)
        if m < 2 * max(self.early) + 1:
            raise ValueError(
                f"arc={self.arc}, nnm={self.nnm} need {2 * max(self.early) + 1} updates or more, "
                f"got {m}: take f={(m - 1) // 2} at most"
            )
        if m < least:
            buckets = f" in {m} buckets of {self.bucket}" if self.bucket else ""
            cure = f"f={self.most(m)} at most, or another rule"
            raise ValueError(
                f"{self.kind.name.lower()} with f={self.f} needs {least} updates or more; there "
                f"are {n} workers{buckets}: take {cure if self.most(m) >= 0 else 'another rule'}"
            )
        if self.keep > m:
            raise ValueError(f"keep must be at most the {m} updates, got {self.keep}")
        if self.kind in SUBSETS and math.comb(m, self.f) > MAX_SUBSETS:
            raise ValueError(
                f"{self.kind.name.lower()} with f={self.f} of {m} updates compares "
                f"{math.comb(m, self.f)} subsets, more than {MAX_SUBSETS}: take CAF, or less f"
            )

    def voices(self, m: int) -> int:
        """Return how many updates the rule itself compares where m came."""
        return -(-m // self.bucket) if self.bucket else m

    def least(self, f: int) -> int:
        """Return the fewest updates among which f may be lies."""
        if self.kind in KRUMS:
            return 2 * f + 3
        if self.kind is Kind.BULYAN:
            return 4 * f + 3
        return 2 * f + 1 if self.kind in MAJORITY else 1

    @property
    def full(self) -> int:
        """The fewest updates among which f may be lies and that give a result."""
        least = max(self.least(self.f), 2 * max(self.early) + 1)
        return next(
            m for m in range(1, MAX_VOICES + 1)
            if self.voices(m) >= least and not self.gives_nothing(m)
        )  # fmt: skip

    def most(self, m: int) -> int:
        """Return the most lies among m updates that the rule tolerates; below 0: m is too few."""
        if self.kind in KRUMS:
            return (m - 3) // 2
        if self.kind is Kind.BULYAN:
            return (m - 3) // 4
        return (m - 1) // 2

    def lies_among(self, m: int) -> int:
        """Return the f to use where m updates came, which may be fewer than workers.

        Of a share it is ZenoPS's number, which may be 0 where there is nothing to trim.
        """
        if self.share and self.kind is Kind.PHOCAS:
            return min(int(max(1, self.share * m)), max((m - 1) // 2, 0))
        if self.share:
            return int(max(min((m - 2) // 2, self.share * m), 0))
        return min(self.f, max(self.most(m), 0))

    def gives_nothing(self, m: int) -> bool:
        """Return whether m updates are too few for a result, which is zeros then."""
        return m == 0 or (self.share > 0 and m <= 2)

    @property
    def early(self) -> tuple[int, int]:
        """The f of what comes before the rule."""
        return self.arc, self.nnm

    @property
    def is_mixed(self) -> bool:
        """Return whether updates are clipped or mixed before the rule."""
        return any(self.early) or self.clip > 0

    @property
    def is_by_element(self) -> bool:
        """Return whether pieces of a tensor may go to different servers."""
        return self.kind in BY_ELEMENT and not self.is_mixed

    @property
    def wants_whole(self) -> bool:
        """Return whether one server has to see all of a tensor."""
        return self.has_meaning() and not self.is_by_element

    def has_meaning(self) -> bool:
        """Return whether there is a rule."""
        return self.kind is not Kind.NONE


SUMMED = Rule()

# What users give as a rule: None is as declared before, or no rule; a name is that of a rule
# without parameters.
Choice: TypeAlias = Rule | str | Callable[..., Any] | None
