# SPDX-License-Identifier: Apache-2.0
"""Which connections may be half open (not authenticated yet), and which one to drop: pure.

Knows connections, their sources and the times that callers pass; never a socket or a clock. Each
half-open connection costs memory, so their number is bounded. But silent connections must not keep
out a member that knows the token. So a new connection is always accepted; if there are too many,
the oldest connection of the source with the most is dropped. Invariants: at most `limit` in all
and `per_source` of one source; while callers observe `wait_s`, none is dropped within `grace_s`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_HALF_OPEN = 256  # each costs a descriptor and a few KB
MAX_PER_SOURCE = 128
GRACE_S = 0.1  # a handshake takes two round trips and 0.2 ms of processor time

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class HalfOpen(Generic[ConnectionT]):
    """The half-open connections of a process; times are of any monotonic clock."""

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
        self._sources: dict[ConnectionT, str] = {}
        self._opened: dict[str, dict[ConnectionT, float]] = {}  # by source, the oldest first

    def __len__(self) -> int:
        """Return the number of half-open connections."""
        return len(self._sources)

    def enter(self, connection: ConnectionT, source: str, *, now: float) -> ConnectionT | None:
        """Add a connection; return the one to drop for it, or None."""
        group = self._opened.get(source, {})
        if len(group) < self._per_source:
            group = self._busiest() if len(self) >= self._limit else {}
        dropped = next(iter(group), None)
        if dropped is not None:
            self.leave(dropped)
        self._sources[connection] = source
        self._opened.setdefault(source, {})[connection] = now
        return dropped

    def leave(self, connection: ConnectionT) -> None:
        """Remove a connection that was authenticated or closed; idempotent."""
        source = self._sources.pop(connection, None)
        if source is not None:
            del self._opened[source][connection]
            if not self._opened[source]:
                del self._opened[source]

    def wait_s(self, now: float) -> float:
        """Return the seconds until a new connection drops none younger than grace_s."""
        groups = [group for group in self._opened.values() if len(group) >= self._per_source]
        if len(self) >= self._limit:
            groups.append(self._busiest())
        ages = [now - next(iter(group.values())) for group in groups]
        return max(self._grace_s - min(ages), 0.0) if ages else 0.0

    def _busiest(self) -> dict[ConnectionT, float]:
        """Return the connections of the source with the most; among equals, the oldest."""
        return max(
            self._opened.values(), key=lambda group: (len(group), -next(iter(group.values())))
        )
