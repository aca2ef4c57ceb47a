# SPDX-License-Identifier: Apache-2.0
"""What a group needs of its session; session/groups.py has it. Types only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fastps.errors import FastPSError
from fastps.worker.handle import Array, Waiting

if TYPE_CHECKING:
    from fastps.collectives._exchange import Exchange, Operation
    from fastps.collectives.descriptions import Membership
    from fastps.collectives.staged import Lines


class GroupContext(Protocol):
    """What a group needs of its session."""

    @property
    def me(self) -> int:
        """Rank of this worker."""

    @property
    def exchange(self) -> Exchange:
        """The engine."""

    @property
    def has_joined_peers(self) -> bool:
        """Whether somebody has run out of data."""

    def reach(self, members: Sequence[int]) -> None:
        """Make the links to members that there are not yet; blocks."""

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that a worker is on."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Make an array for a result."""

    def check_usable(self) -> None:
        """Raise NotInitializedError in a forked child."""

    def check_name(self, group: Membership, name: str) -> None:
        """Raise MismatchError for a name that has failed for all workers."""

    @property
    def lines(self) -> Lines:
        """What lets operations of several exchanges go on."""

    @property
    def waiting(self) -> Waiting:
        """What handles need to wait for operations of groups."""

    def keep(self, operation: Operation) -> None:
        """Keep what may be over here before those know of it who have run out of data."""

    def tell(self, operation: Operation) -> None:
        """Let those take part who have run out of data."""

    def explain(self, operation: Operation, status: int | None, timeout_s: float) -> FastPSError:
        """Word the error of an operation that failed, or, if status is None, did not end."""

    def refusal(self, operation: Operation) -> str:
        """Return why others made an operation fail, where that is known; else empty."""

    def differing(self, group: Membership, name: str | None, channel: int, number: int) -> str:
        """Word the error of an operation that members do not mean alike; asks all of them."""

    def removed(self, name: str) -> Exception:
        """Word the error of an operation of members that are none any more."""

    def ended(self, name: str, error: FastPSError) -> FastPSError:
        """Word the error of an operation that could not begin, since the job has ended."""
