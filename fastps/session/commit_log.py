# SPDX-License-Identifier: Apache-2.0
"""Which results the workers of an elastic job may hand out: those that have landed on all of them.

Workers agree in rounds: each says which results have landed on it, and those that have landed on
all are committed. A committed result may be handed out; before, its operation can be done again
from the arrays that it began with, which nobody has changed. Rounds are counted, and each needs
all workers, so that no worker has completed two more than another. In a new view the survivors
compare the last round of each: what one has learned of it, all have landed.

An entry is "NAME#N": the N-th result of the name that was committed. Pure: no thread, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastps.errors import ProtocolError


class Round(NamedTuple):
    """The last round that a worker has completed: its number, and what was committed in it."""

    number: int
    committed: tuple[str, ...]


class CommitLog:
    """What one worker knows of the commits."""

    def __init__(self) -> None:
        self.last = Round(0, ())
        self._counts: dict[str, int] = {}  # of commits, by name

    def entry(self, name: str) -> str:
        """Return the entry of the operation on a name that is in flight or begins now."""
        return f"{name}#{self._counts.get(name, 0) + 1}"

    def complete(self, landed: Sequence[Iterable[str]]) -> tuple[str, ...]:
        """Complete a round, in which each worker has said what has landed; return the commits."""
        common = set(landed[0]).intersection(*landed[1:])
        return self._commit(Round(self.last.number + 1, tuple(sorted(common))))

    def adopt(self, rounds: Iterable[Round]) -> tuple[str, ...]:
        """Catch up with the survivors, of whom these are the last rounds; return the commits."""
        newest = max(rounds)
        missed = newest.number - self.last.number
        if missed not in (0, 1):
            raise ProtocolError(
                f"a worker has completed {missed} rounds of commits more than this one, and at "
                "most 1 is possible; please report this bug"
            )
        return self._commit(newest) if missed else ()

    def _commit(self, done: Round) -> tuple[str, ...]:
        self.last = done
        for entry in done.committed:
            name, _, number = entry.rpartition("#")
            self._counts[name] = int(number)
        return done.committed
