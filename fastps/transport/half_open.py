# SPDX-License-Identifier: Apache-2.0
"""Who may stand at a door without having shown the token, and who must go for whom: pure.

Knows visitors, the sources they come from and the times that it is told; never a socket or a
clock. Whoever stands there costs memory, so their number is bounded; but who is silent must not
keep out who knows the token. So a newcomer always gets a place, and where there is none the one
that waits longest goes, of the source that has the most. Invariants: at most `limit` in all, at
most `per_source` of one source; while callers heed `wait_s`, nobody goes within `grace_s`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_HALF_OPEN = 256  # each costs a descriptor and a few KB
MAX_PER_SOURCE = 128
GRACE_S = 0.1  # a handshake takes two round trips and some 0.2 ms of our time

VisitorT = TypeVar("VisitorT", bound=Hashable)


class HalfOpen(Generic[VisitorT]):
    """The visitors of one process's doors; times are of any clock that only goes forward."""

    def __init__(
        self,
        *,
        limit: int = MAX_HALF_OPEN,
        per_source: int = MAX_PER_SOURCE,
        grace_s: float = GRACE_S,
    ) -> None:
        self._limit = limit
        self._per_source = per_source
        self._grace_s = grace_s
        self._sources: dict[VisitorT, str] = {}
        self._came: dict[str, dict[VisitorT, float]] = {}  # of each source, the oldest first

    def __len__(self) -> int:
        """Count them."""
        return len(self._sources)

    def enter(self, visitor: VisitorT, source: str, *, now: float) -> VisitorT | None:
        """Take a newcomer in; give the one that has to go for it, if any."""
        crowd = self._came.get(source, {})
        if len(crowd) < self._per_source:
            crowd = self._busiest() if len(self) >= self._limit else {}
        leaver = next(iter(crowd), None)
        if leaver is not None:
            self.leave(leaver)
        self._sources[visitor] = source
        self._came.setdefault(source, {})[visitor] = now
        return leaver

    def leave(self, visitor: VisitorT) -> None:
        """Forget one that showed the token or has gone; idempotent."""
        source = self._sources.pop(visitor, None)
        if source is not None:
            del self._came[source][visitor]
            if not self._came[source]:
                del self._came[source]

    def wait_s(self, now: float) -> float:
        """Return the seconds until a newcomer of any source sends nobody away too early."""
        crowds = [crowd for crowd in self._came.values() if len(crowd) >= self._per_source]
        if len(self) >= self._limit:
            crowds.append(self._busiest())
        ages = [now - next(iter(crowd.values())) for crowd in crowds]
        return max(self._grace_s - min(ages), 0.0) if ages else 0.0

    def _busiest(self) -> dict[VisitorT, float]:
        """Return the visitors of the source that has the most; of several, who waits longest."""
        return max(
            self._came.values(), key=lambda crowd: (len(crowd), -next(iter(crowd.values())))
        )
