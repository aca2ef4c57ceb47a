# SPDX-License-Identifier: Apache-2.0
"""What the parts of a session need of it, so that they know nothing of the session. Types only.

session.py implements SessionHost, groups.py implements GroupTable. A part that needs another part
(the stall watch needs the steps) is handed that one when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastps.errors import FastPSError
from fastps.types import DType
from fastps.worker.handle import Array, Handle

if TYPE_CHECKING:
    import numpy as np

    from fastps.collectives.descriptions import Membership
    from fastps.collectives.group import Group
    from fastps.config import Config
    from fastps.control.client import PendingReply
    from fastps.control.protocol import Done, Layout, TensorPoisoned, TensorSpec
    from fastps.session.connections import Connections
    from fastps.worker._plan import PlannedTensor


class StartedTensor(NamedTuple):
    """The last operation on a declared tensor."""

    tensor: PlannedTensor
    layout: Layout


TENSOR, CHANNEL = "tensor ", "channel "  # begin the place of an operation


class Pending(NamedTuple):
    """An operation in flight: what counts it, and how many all of its members must have begun.

    number: at least; version: which one it is; both from 1. name: of all workers; or empty.
    """

    place: str
    number: int
    version: int
    what: str
    members: tuple[int, ...]
    name: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether it is an operation on a declared tensor."""
        return self.place.startswith(TENSOR)


class GroupTable(Protocol):
    """The groups of a session."""

    @property
    def world(self) -> Group:
        """The group of all workers; ConfigError on a validator, which is none."""

    @property
    def known(self) -> Mapping[str, Group]:
        """The groups that were made, by key."""

    @property
    def has_windows(self) -> bool:
        """Whether windows were made."""

    def of_key(self, key: str, ranks: Sequence[int]) -> Group:
        """Return the group that others know by a key, though this worker has not used it."""

    def is_world(self, group: Membership) -> bool:
        """Return whether a group is that of all workers whose names servers know too."""

    def finish_lines(self, timeout_s: float) -> None:
        """Wait until the last exchange of all operations has begun; raises StallError."""


class SessionHost(Protocol):
    """A session, as its parts see it."""

    config: Config
    rank: int
    size: int
    wait_seconds: list[float]  # spent waiting in all handles
    n_forgotten: int  # calls of forget()
    gone: list[int]  # workers that are lost or have left
    connections: Connections

    @property
    def groups(self) -> GroupTable:
        """The groups, made at their first use."""

    @property
    def known_groups(self) -> GroupTable | None:
        """The groups, if there was a use for them."""

    def check_usable(self) -> None:
        """Raise where the session is suspended, has ended or is another process's."""

    def declare_as(self, spec: TensorSpec) -> None:
        """Declare a tensor just as another worker did. Blocks."""

    def push_pull_async(
        self, tensor: Array, name: str, *, average: bool, out: Array, dtype: DType
    ) -> Handle[Any]:
        """Start a sum over all workers."""

    def broadcast_async(
        self, tensor: Array, root_rank: int, name: str, *, dtype: DType | None = None
    ) -> Handle[Any]:
        """Start to copy the root's array into everybody's, in place."""

    def started(self, names: Sequence[str] | None = None) -> list[StartedTensor]:
        """List what was started last on tensors; None: on all, what is in flight."""

    def version_of(self, name: str) -> int:
        """Return how many operations were started on a tensor."""

    def versions(self) -> dict[str, int]:
        """Return how many operations were started on each tensor."""

    def tell(self, members: Sequence[int], data: bytes, **how: bool) -> None:
        """Send data to workers by the scheduler, in one order for all."""

    def result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array for a result, a large one in shared memory where there is some."""

    def enter_barrier(
        self, name: str = "barrier", *, timeout_s: float | None = None
    ) -> PendingReply[Done] | None:
        """Start a barrier of the scheduler; None where nobody else is to come."""

    def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Wait until every worker has come to a barrier of the scheduler."""

    def poison(self, poison: TensorPoisoned) -> None:
        """Let nobody use a tensor any more, and fail what is in flight on it."""

    def blame(
        self, name: str, status: int, *, said: str = "", culprit: int = -1,
        connections: Connections | None = None,
    ) -> FastPSError:  # fmt: skip
        """Return the error of a group's operation that failed."""
