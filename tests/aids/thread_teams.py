# SPDX-License-Identifier: Apache-2.0
"""Threads that stand for the workers of a job while they save a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastps.checkpoint import saving
from fastps.checkpoint.trees import NUMPY, Kind


class Board:
    """Where threads that stand for workers leave their words."""

    def __init__(self, size: int) -> None:
        self.size, self.words = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadTeam:
    """A Team whose workers are threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.size, self.is_lead = rank, board.size, rank == 0
        self._board = board

    def exchange_once(self, words: Any) -> list[Any]:
        """Return the words of all threads."""
        self._board.words[self.rank] = words
        self._board.barrier.wait()
        found = list(self._board.words)
        self._board.barrier.wait()
        return found

    exchange = exchange_once

    def look(self) -> None:
        """Do nothing: nobody is lost."""


def save_by(
    states: list[Any], folder: Path, *, step: int = 1, own: list[Any] | None = None,
    keep: int | None = None, kinds: Sequence[Kind] = (NUMPY,),
) -> list[saving.SaveHandle]:  # fmt: skip
    """Save by as many workers as states; return their handles once all have ended."""
    board = Board(len(states))
    savers = []
    for rank, state in enumerate(states):
        team = ThreadTeam(board, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "Team", lambda _, team=team: team)
            request = saving.SaveRequest(folder, step, keep)
            savers.append(saving._Saver(request, state, own and own[rank], kinds))
    for saver in savers:
        saver.start()
    for saver in savers:
        assert saver.handle._ended.wait(60)
    return [saver.handle for saver in savers]
