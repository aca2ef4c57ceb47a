# SPDX-License-Identifier: Apache-2.0
"""What each worker started where an operation of a group fails since they differ.

The engine notices that members mean different things, not what each of them means. So whoever
gets that error tells the other members what it started, over their connections to the scheduler,
and each of them answers, by its control thread: one error with both sides, the same on all.
Threads: those that wait for operations, and the control thread.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fastps.collectives.descriptions import About, Membership, differing_text
from fastps.collectives.objects import decode_object, encode_object
from fastps.control.blame import VERDICT_WAIT_S
from fastps.control.protocol import MAX_TEXT_CHARS
from fastps.native.condition import Condition

if TYPE_CHECKING:
    from fastps.control.protocol import Told
    from fastps.session.host import SessionHost

_MEANT = "meant"
MANY = 64  # operations of which it is kept what each worker started
Key = tuple[int, int]  # channel, and number of the operation on it


class Differences:
    """What workers have told each other of operations for which they differ."""

    def __init__(self, session: SessionHost) -> None:
        self._session: SessionHost = weakref.proxy(session)  # which goes at once when it ends
        self._news = Condition()
        self._started: dict[Key, dict[int, str]] = {}
        self._told: set[Key] = set()
        self._gone: set[int] = set()  # workers that are lost or have left; they say nothing more

    def explain(self, group: Membership, name: str | None, channel: int, number: int) -> str:
        """Word the error of an operation; blocks until all members have said what they started.

        For VERDICT_WAIT_S at most, for some may not come to it at all; members that are gone are
        not waited for.
        """
        key = channel, number
        about = self._session.connections.exchange.recall(channel, number)
        self._tell(key, group.ranks, about)
        with self._news:
            self._news.wait_for(
                lambda: self._gone.union(self._of(key)).issuperset(group.ranks), VERDICT_WAIT_S
            )
            told, gone = self._of(key), set(self._gone)
            started = [(rank, told.get(rank)) for rank in sorted(group.ranks)]
        what = f"operation {number} without a name" if name is None else f"tensor {name!r}"
        is_among_neighbors = about is not None and str(about.key[0]).startswith("neighbor")
        return differing_text(
            f"{what}{group.of}", started, gone=gone, is_among_neighbors=is_among_neighbors
        )

    def lose(self, rank: int) -> None:
        """Wait no more for a worker that is lost or has left; on the control thread."""
        with self._news:
            self._gone.add(rank)
            self._news.notify_all()

    def on_message(self, event: Told) -> bool:
        """Take what another worker started, and answer; on the control thread."""
        kind, *told = decode_object(event.data)
        if kind != _MEANT:
            return False
        channel, number, words = told
        self._note((channel, number), event.member, words[:MAX_TEXT_CHARS])
        about = self._session.connections.exchange.recall(channel, number)
        if about is not None:  # else its own error lets it answer, when it comes to it
            self._tell((channel, number), about.group.ranks, about)
        return True

    def _tell(self, key: Key, ranks: tuple[int, ...], about: About | None) -> None:
        """Tell the members once what this worker started."""
        words = "something that it does not remember" if about is None else about.words()
        with self._news:
            if key in self._told:
                return
            self._told.add(key)
        self._note(key, self._session.rank, words)
        others = [rank for rank in ranks if rank != self._session.rank]
        self._session.tell(others, encode_object((_MEANT, *key, words)))

    def _note(self, key: Key, rank: int, words: str) -> None:
        with self._news:
            if key not in self._started and len(self._started) >= MANY:
                oldest = next(iter(self._started))
                self._told.discard(oldest)
                del self._started[oldest]
            self._of(key)[rank] = words
            self._news.notify_all()

    def _of(self, key: Key) -> dict[int, str]:
        return self._started.setdefault(key, {})
