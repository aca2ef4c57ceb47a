# SPDX-License-Identifier: Apache-2.0
"""Warn where weights that were equal on all workers drift apart without being exchanged.

Each worker tells rank 0 what its weights amount to after a step that nobody helped with, once;
rank 0 compares when all have told. Nothing waits for it, and nothing but a warning follows.
Threads: tell() runs on any, on_message() on the control thread.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastps.collectives.objects import decode_object, encode_object
from fastps.control.blame import join_names
from fastps.control.protocol import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from fastps.control.protocol import Told
    from fastps.session.host import SessionHost
    from fastps.session.join import JoinState

log = logging.getLogger(__name__)

_STEPPED = "stepped alone"
N_PRINTS = 2  # of the weights of a worker


class Drift:
    """What one worker knows of others' weights; one for each session."""

    def __init__(self, session: SessionHost, join_state: JoinState) -> None:
        self._session: SessionHost = weakref.proxy(session)
        self._join_state = join_state
        self._told: dict[int, tuple[str, list[int]]] = {}  # by rank

    def begun(self) -> dict[str | int, int] | None:
        """Count what was begun under each name; None where that does not show in counts."""
        groups = self._session.known_groups
        if groups is not None and groups.has_windows:
            return None
        return self._join_state.counts()

    def tell(self, what: str, prints: Sequence[int]) -> None:
        """Tell rank 0 what the weights amount to. what: which weights, and after which step."""
        self._session.tell([0], encode_object((_STEPPED, what, list(prints))))

    def on_message(self, event: Told) -> bool:
        """Take what another worker tells, if it is for us; warn when all have told."""
        kind, *told = decode_object(event.data)
        if kind != _STEPPED:
            return False
        what, prints = told
        if self._session.rank == 0:
            self._told.setdefault(event.member, (what[:MAX_TEXT_CHARS], list(prints[:N_PRINTS])))
        if len(self._told) == self._session.size:
            self._compare()
        return True

    def _compare(self) -> None:
        """Warn where the workers have told of the same weights, and these differ."""
        what, prints = self._told[0]
        told = {rank: one for rank, one in sorted(self._told.items()) if one[0] == what}
        differing = [f"worker {rank}" for rank, one in told.items() if one[1] != prints]
        if len(told) == len(self._told) and differing:
            log.warning(
                "after %s the weights of %s differ from those of worker 0, and nothing was "
                "exchanged in between: each worker trains a model of its own. Wrap the optimizer "
                "in DistributedOptimizer() or the model in DistributedDataParallel(), or set "
                "FASTPS_CHECK_WEIGHTS=0 where local models are to differ",
                what, join_names(differing),
            )  # fmt: skip
