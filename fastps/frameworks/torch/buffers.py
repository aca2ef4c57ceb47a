# SPDX-License-Identifier: Apache-2.0
"""A module's buffers on all ranks as on one: copied side by side, sent as bytes in one operation.

Bytes, because a buffer may have any dtype. Others take over only what differs, since a write to a
buffer that autograd has saved makes the next backward pass fail; running statistics of a batch
norm that trains are written unseen, because its backward pass does not use them. Blocks; called
by all ranks at the same point.
"""

from __future__ import annotations

import hashlib

import torch
from torch.nn.modules.batchnorm import _NormBase

from fastps import session
from fastps.frameworks.torch.agreement import Entry
from fastps.frameworks.torch.buckets import ALIGNMENT
from fastps.frameworks.torch.tensors import Array, check_memory, make_room, tensor_over
from fastps.sets import ProcessSet, global_process_set
from fastps.types import DType


class BufferSync:
    """The buffers of a module, and one array that holds them all.

    The buffers are those the module has now; each may be replaced by another tensor later.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._name = name
        self._process_set = process_set
        self._owners: list[tuple[torch.nn.Module, str]] = []
        seen: set[torch.Tensor] = set()
        for path, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and buffer not in seen:
                    check_memory(buffer, f"{path}.{key}" if path else key)
                    seen.add(buffer)
                    self._owners.append((owner, key))
        self._layout: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._label = ""
        self._array: Array
        self._slots: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Count the buffers."""
        return len(self._owners)

    def describe(self) -> list[Entry]:
        """Give name, shape and dtype of each buffer, for workers to compare."""
        return [
            (key, tuple(buffer.shape), str(buffer.dtype))
            for _, key, buffer in self._current_buffers()
        ]

    def synchronize(self) -> None:
        """Give every rank the buffers of the first one, in place."""
        found = self._current_buffers()
        if not found:
            return
        current, root_rank = session.current(), self._process_set.first
        tensors = [buffer for _, _, buffer in found]
        self._make_slots(current, tensors)
        with torch.no_grad():
            if current.rank == root_rank:
                torch._foreach_copy_(self._slots, tensors)
            if self._process_set is global_process_set:
                current.broadcast_async(self._array, root_rank, self._label).wait()
            else:
                self._process_set.group().broadcast(self._array, root=0, name=self._label).wait()
            if current.rank != root_rank:
                self._take([owner for owner, _, _ in found], tensors)

    def _current_buffers(self) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Look up the tensors that are buffers now, with their owners and names."""
        found = [(owner, key, owner._buffers.get(key)) for owner, key in self._owners]
        return [(owner, key, buffer) for owner, key, buffer in found if buffer is not None]

    def _make_slots(self, current: session.Session, tensors: list[torch.Tensor]) -> None:
        """Lay the buffers out one after the other, unless they lie so already."""
        layout = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if layout == self._layout:
            return
        starts, nbytes = [], 0
        for tensor in tensors:
            starts.append(nbytes)
            nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._array = make_room(current, nbytes, DType.UINT8)
        self._slots = [
            tensor_over(self._array[start : start + tensor.nbytes], tensor.dtype).view(
                tensor.shape
            )
            for start, tensor in zip(starts, tensors, strict=True)
        ]
        self._layout = layout
        self._label = f"{self._name}.{hashlib.sha256(repr(layout).encode()).hexdigest()[:12]}"

    def _take(self, owners: list[torch.nn.Module], tensors: list[torch.Tensor]) -> None:
        """Write the root's values over ours."""
        unseen: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for owner, tensor, slot in zip(owners, tensors, self._slots, strict=True):
            if isinstance(owner, _NormBase) and owner.training:
                unseen.append(tensor.data)
                sources.append(slot)
            elif not torch.equal(tensor, slot):
                tensor.copy_(slot)
        if unseen:
            torch._foreach_copy_(unseen, sources)
