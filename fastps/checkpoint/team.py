# SPDX-License-Identifier: Apache-2.0
"""The workers that save or restore together, and what they say to each other.

A save communicates on a thread of its own. In an elastic job the program must hear of a new view,
and this thread must not hear it first, so its operations are made without news
(session/elastic_groups.py). Threads: one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from fastps.collectives.row_counts import gather_objects
from fastps.errors import ViewChangedError
from fastps.session import current
from fastps.session.view import without_news


class Team:
    """All workers of the job as they are now, or this process alone."""

    def __init__(self, name: str) -> None:
        """Note rank and size; name: of the operations, the same on all workers."""
        self._name = name
        session = current.current() if current.is_initialized() else None
        if session is None or session.size == 1:
            self.rank, self.size = 0, 1
        else:
            world = session.groups.world
            self.rank, self.size = world.rank, world.size
        self._is_alone = self.size == 1
        self.is_lead = self.rank == 0  # as of the last exchange

    def exchange(self, words: Any) -> list[Any]:
        """Return the words of all workers that are left; blocks.

        In an elastic job this goes on past a loss: the words are exchanged in the next view.
        """
        while True:
            with contextlib.suppress(ViewChangedError):
                return self.exchange_once(words)

    def exchange_once(self, words: Any) -> list[Any]:
        """Return the words of all workers; in an elastic job ViewChangedError after a loss."""
        if self._is_alone:
            return [words]
        with without_news():
            world = current.current().groups.world
            self.is_lead = world.rank == 0
            found: list[Any] = gather_objects(world, words, self._name)
        return found

    def look(self) -> None:
        """Find out whether this worker leads now."""
        if not self._is_alone:
            with without_news():
                self.is_lead = current.current().groups.world.rank == 0


def first_error(replies: Sequence[Any]) -> str:
    """Return the first error among replies; empty: none."""
    return next((reply["error"] for reply in replies if reply.get("error")), "")
