# SPDX-License-Identifier: Apache-2.0
"""A copy of what a worker writes, so that training may change the tensors at once.

The copy is the data of the worker's file, as it will be. Its memory is kept for the next one:
fresh pages would take longer than the copy. Threads: one copies; another may write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastps.checkpoint.formats import header_of, order_of
from fastps.checkpoint.shares import Piece, flat_range
from fastps.checkpoint.trees import Kind, Shard, Tensor, itemsize_of, kind_of
from fastps.worker.handle import Array

_spare: list[Array] = []  # memory of an earlier snapshot


class Snapshot:
    """The pieces of some tensors, copied."""

    def __init__(
        self, tensors: Sequence[Tensor], values: Sequence[Any], pieces: Sequence[Piece],
        kinds: Sequence[Kind],
    ) -> None:  # fmt: skip
        """Copy pieces of tensors; values: the tensors, or their Shards."""
        self.stored = order_of(tensors, pieces)
        self.header = header_of(tensors, self.stored)
        sizes = [one.n_elements * itemsize_of(tensors[one.tensor].dtype) for one in self.stored]
        self.nbytes = sum(sizes)
        self.places: list[int] = []  # the first byte of each piece
        self._data = _room(self.nbytes)
        at = 0
        for piece, size in zip(self.stored, sizes, strict=True):
            _copy(self._data[at : at + size], tensors[piece.tensor], values[piece.tensor], piece,
                  kinds)  # fmt: skip
            self.places.append(at)
            at += size
        self._sizes = sizes

    def pieces(self) -> Iterator[Array]:
        """Yield the bytes of each piece."""
        for at, size in zip(self.places, self._sizes, strict=True):
            yield self._data[at : at + size]

    def free(self) -> None:
        """Keep the memory for the next snapshot."""
        _spare[:] = [self._data if self._data.base is None else self._data.base]
        self._data = np.empty(0, np.uint8)


def _room(nbytes: int) -> Array:
    memory = _spare.pop() if _spare else None
    if memory is None or memory.nbytes < nbytes:
        memory = None  # gone before there is more
        memory = np.empty(nbytes, np.uint8)
    return memory[:nbytes]


def _copy(place: Array, tensor: Tensor, value: Any, piece: Piece, kinds: Sequence[Kind]) -> None:
    if isinstance(value, Shard):
        value, span = value.array, (0, piece.n_elements)
    else:
        found = flat_range(tensor, piece)
        assert found is not None, "shares are cut at rows"
        span = found
    kind = kind_of(value, kinds)
    assert kind is not None, "it was taken apart with these kinds"
    place[...] = kind.read(value, *span)
