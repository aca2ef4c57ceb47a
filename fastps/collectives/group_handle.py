# SPDX-License-Identifier: Apache-2.0
"""What a group gives for an operation that it has begun, and how that may end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastps.errors import MismatchError
from fastps.worker.handle import Handle

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation


class SizesDifferError(MismatchError):
    """Members remembered other sizes: they ask each other, and no user sees this."""


class MeanwhileError(Exception):
    """A call that was made again went well, and something changed while it was under way."""

    def __init__(self, operation: Operation, result: Any) -> None:
        super().__init__(operation.name)
        self.operation = operation
        self.result = result


class GroupHandle(Handle):
    """The handle of an operation of a group."""

    def __init__(
        self, operations: Sequence[Operation], *args: Any, members: Sequence[int], **options: Any
    ) -> None:
        super().__init__(operations, *args, **options)
        self._members = members

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations of the group that it is the promise of; none in a group of one."""
        return self.tickets

    @property
    def number(self) -> int:
        """Place of the operation among those of its name; 0 in a group of one."""
        return self.operations[0].number if self.operations else 0

    @property
    def source(self) -> int:
        """Member that a receive from anybody received from; only when it is done."""
        return self._members.index(self.operations[0].met)

    @property
    def missed(self) -> list[int]:
        """Members whose messages were left out, for they are lost; only when it is done."""
        missed = self.operations[0].missed if self.operations else ()
        return [self._members.index(rank) for rank in missed]
