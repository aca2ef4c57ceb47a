# SPDX-License-Identifier: Apache-2.0
"""Sizes that stayed the same are not asked for again: what a group remembers of them. Pure.

Where first dimensions may differ members tell theirs before the rows travel. Who sends as much as
it did when they last told, takes for granted that the others do too, and begins with the rows.
Where somebody does not, it tells its sizes instead, and nobody gets all that it waits for: so all
members notice, and then all tell. All have to remember the same for that, so what they remember
depends on nothing but what they told each other, and every block has bytes.

A wrong guess costs more than a question. So sizes have to come again before they are taken for
granted, twice as often after each time that this was wrong, and after MOST_MISSES not any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fastps.errors import MismatchError

MANY = 512  # sizes that are remembered
MOST_MISSES = 32


class SizesDifferError(MismatchError):
    """Members remembered other sizes: they ask each other, and no user sees this."""


class SizeGuess:
    """What an operation takes for granted, if anything: how much comes of each member.

    key: what all members know of it. holds: nobody has told anything else since.
    """

    __slots__ = ("came", "holds", "key")

    def __init__(self, key: Hashable, came: Sequence[int] = ()) -> None:
        self.key = key
        self.came = list(came)
        self.holds = bool(came)


class _Sizes:
    """What members told of one kind of operation when they last did."""

    __slots__ = ("came", "equal", "guess", "needed", "sent")

    def __init__(self, needed: int) -> None:
        self.sent: Sequence[int] = ()
        self.came: Sequence[int] = ()
        self.equal = 0  # times that they told the same again
        self.needed = needed
        self.guess: SizeGuess | None = None  # that it will be so again

    def change(self) -> None:
        """Let nobody take it for granted, for now."""
        self.equal = 0
        if self.guess is not None:
            self.guess.holds, self.guess = False, None


class SizeCache:
    """The sizes of the operations of a group; key: what all members know of one of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Sizes] = {}
        self._missed: set[Hashable] = set()
        self._misses = 0

    def guess(self, key: Hashable, sent: Sequence[int]) -> SizeGuess | None:
        """Return what comes of each member if it is as before; None: ask."""
        known = self._known.get(key)
        return known.guess if known is not None and known.sent == sent else None

    def told(self, key: Hashable, sent: Sequence[int], came: Sequence[int]) -> None:
        """Remember what this member sent, and what came of each; all blocks have bytes."""
        if self._misses >= MOST_MISSES:
            return
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MANY:
                self._forget()
            known = self._known[key] = _Sizes(needed=1)
        if known.sent != sent or known.came != came:
            known.change()
            known.sent, known.came = list(sent), list(came)
            return
        known.equal += 1
        if known.equal == known.needed:
            known.guess = SizeGuess(key, came)

    def missed(self, key: Hashable) -> None:
        """Note that somebody took sizes for granted, and somebody had others."""
        self._misses += 1
        self._missed.add(key)
        known = self._known.get(key)
        if known is not None:
            known.change()
            known.needed *= 2
        if self._misses >= MOST_MISSES:
            self.end()

    def was_missed(self, key: Hashable) -> bool:
        """Tell, once, whether all members heard that sizes are not as before, and tell them."""
        is_missed = key in self._missed
        self._missed.discard(key)
        return is_missed

    def end(self) -> None:
        """Take nothing for granted any more: this member may not have heard what others told."""
        self._misses = MOST_MISSES
        self._forget()

    def _forget(self) -> None:
        for known in self._known.values():
            known.change()
        self._known.clear()
