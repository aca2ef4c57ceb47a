# SPDX-License-Identifier: Apache-2.0
"""Copy a module's buffers from one rank to all, as bytes side by side in one operation.

Buffers may be replaced by others of another size on all ranks; their layouts are compared each
time before they are sent. They travel as bytes, because a buffer may have any dtype. Receivers
write only buffers that differ, because a write to a buffer that autograd has saved makes the next
backward pass fail. Running statistics of a batch norm in training are always written, without a
new version, because its backward pass does not use them. Blocks; called by all ranks at the same
point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase

from fastps.frameworks.torch.gradients.buckets import ALIGNMENT
from fastps.frameworks.torch.ops.tensors import (
    Array,
    check_memory,
    copy_each,
    free_name,
    make_room,
    tensor_over,
    write_over,
)
from fastps.frameworks.torch.optimizer.weight_check import (
    Entry,
    check_alike,
    exchange_prints,
    print_of,
)
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType

if TYPE_CHECKING:
    from fastps.session.session import Session

_Buffer: TypeAlias = tuple[torch.nn.Module, str, torch.Tensor]  # its owner, and path in the module

_CURE = (
    "buffers are copied from the first worker before each forward pass, so each needs the same "
    "shape and dtype on all workers; or pass broadcast_buffers=False"
)


class BufferSync:
    """The buffers of a module, and one array that holds them all.

    The buffers are those the module has now; each may be replaced by another tensor later.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        prefix: str,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._name, self._comparison = f"{prefix}Buffers", f"{prefix}buffers"
        self._process_set = process_set
        self._owners: list[tuple[torch.nn.Module, str, str]] = []  # with key, and path to it
        known: set[torch.Tensor] = set()
        for path, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and buffer not in known:
                    where = f"{path}.{key}" if path else key
                    check_memory(buffer, where)
                    known.add(buffer)
                    self._owners.append((owner, key, where))
        self._layout: list[Entry] = []
        self._print = print_of(self._layout)
        self._label = ""
        self._array: Array
        self._slots: list[torch.Tensor] = []
        self._copy_each: Callable[..., object] = torch._foreach_copy_

    def check_alike(self) -> None:
        """Raise MismatchError on all ranks that names the first buffer that differs."""
        mine = _described(self._current_buffers())
        check_alike(mine, self._comparison, self._process_set, cure=_CURE)

    def synchronize(self) -> None:
        """Copy the buffers of the first rank to all, in place.

        Raises MismatchError on all ranks if shapes or dtypes differ; it names the first such
        buffer.
        """
        if not self._owners:
            return
        session, root_rank = current.current(), self._process_set.first
        found = self._current_buffers()
        layout = _described(found)
        if layout != self._layout:
            self._layout, self._print, self._slots = layout, print_of(layout), []
        self._check_layout(session)
        if not found:
            return
        tensors = [buffer for _, _, buffer in found]
        is_here = all(tensor.is_cpu for tensor in tensors)
        self._copy_each = torch._foreach_copy_ if is_here else copy_each
        if not self._slots:
            self._make_slots(session, tensors)
        with torch.no_grad():
            if self._copy(session, root_rank, tensors):
                self._take([owner for owner, _, _ in found], tensors)

    def _copy(self, session: Session, root_rank: int, tensors: list[torch.Tensor]) -> bool:
        """Fill the slots with the root's buffers; return whether those may be others."""
        if session.rank == root_rank:
            self._copy_each(self._slots, tensors)
        if self._process_set is global_process_set:
            session.broadcast_async(self._array, root_rank, self._label).wait()
        else:
            self._process_set.group().broadcast(self._array, root=0, name=self._name).wait()
        return session.rank != root_rank

    def _current_buffers(self) -> list[_Buffer]:
        """Return the present buffers, with their owners and names."""
        found = [(owner, path, owner._buffers.get(key)) for owner, key, path in self._owners]
        return [(owner, path, buffer) for owner, path, buffer in found if buffer is not None]

    def _check_layout(self, session: Session) -> None:
        """Raise MismatchError on all ranks if their layouts differ."""
        if session.size == 1:
            return
        prints = exchange_prints(self._print, f"{self._comparison}.layout", self._process_set)
        if len({tuple(one) for one in prints.values()}) > 1:
            self.check_alike()

    def _make_slots(self, session: Session, tensors: list[torch.Tensor]) -> None:
        """Lay the buffers out side by side, under a name that no other layout has used."""
        starts, nbytes = [], 0
        for tensor in tensors:
            starts.append(nbytes)
            nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._array = make_room(session, nbytes, DType.UINT8)
        self._slots = [
            tensor_over(self._array[start : start + tensor.nbytes], tensor.dtype).view(
                tensor.shape
            )
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        self._label = free_name(session, self._name, self._array.shape, DType.UINT8)

    def _take(self, owners: list[torch.nn.Module], tensors: list[torch.Tensor]) -> None:
        """Write the root's values into the buffers."""
        targets: list[torch.Tensor] = []  # without version counters
        sources: list[torch.Tensor] = []
        for owner, tensor, slot in zip(owners, tensors, self._slots, strict=True):
            if isinstance(owner, _NormBase) and owner.training:
                targets.append(tensor.data)
                sources.append(slot)
            elif not torch.equal(tensor, slot.to(tensor.device)):
                write_over(tensor, slot)
        if targets:
            self._copy_each(targets, sources)


def _described(found: list[_Buffer]) -> list[Entry]:
    return [(path, tuple(buffer.shape), str(buffer.dtype)) for _, path, buffer in found]
