# SPDX-License-Identifier: Apache-2.0
"""Which worker writes which pieces of which tensors. Pure.

All workers hold a replicated tensor, so each writes a share of all of them: about the same number
of bytes. The tensors lie one behind the other, and the cuts are at whole rows, so a piece is a box
whose elements lie side by side. A sharded tensor is written as it lies on the workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fastps.checkpoint.trees import Tensor


class Piece(NamedTuple):
    """A box of a tensor; tensor: its number."""

    tensor: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def share_of(tensors: Sequence[Tensor], worker: int, n_workers: int) -> list[Piece]:
    """Return what a worker writes of replicated tensors; all workers know the same tensors."""
    cuts = [_cut_at(tensors, worker + one, n_workers) for one in (0, 1)]
    (first, low), (last, high) = cuts
    found = []
    for number in range(first, min(last + 1, len(tensors))):
        tensor = tensors[number]
        start = low if number == first else 0
        stop = high if number == last else _rows(tensor)
        if start < stop and not tensor.is_sharded:
            found.append(_rows_of(number, tensor, start, stop))
    return found


def flat_range(tensor: Tensor, piece: Piece) -> tuple[int, int] | None:
    """Return the first and the last element, in C order, of a piece that lies side by side."""
    axis = _axis(tensor.shape)
    if axis is None:
        return 0, piece.n_elements
    if any(
        at or length != whole
        for at, length, whole in zip(
            piece.offsets[axis + 1 :], piece.shape[axis + 1 :], tensor.shape[axis + 1 :],
            strict=True,
        )
    ):  # fmt: skip
        return None
    start = piece.offsets[axis] * math.prod(tensor.shape[axis + 1 :])
    return start, start + piece.n_elements


def covers(shape: tuple[int, ...], pieces: Sequence[Piece]) -> bool:
    """Return whether pieces cover a tensor of a shape, each element once."""
    for piece in pieces:
        if len(piece.offsets) != len(shape) or len(piece.shape) != len(shape) or any(
            at < 0 or length < 0 or at + length > whole
            for at, length, whole in zip(piece.offsets, piece.shape, shape, strict=True)
        ):  # fmt: skip
            return False
    if sum(piece.n_elements for piece in pieces) != math.prod(shape):
        return False
    filled = sorted((piece for piece in pieces if piece.n_elements), key=lambda one: one.offsets)
    axes = {axis for one in filled for axis, length in enumerate(one.shape)
            if length != shape[axis]}  # fmt: skip
    if len(axes) <= 1:  # cut along one dimension
        pairs = itertools.pairwise(filled)
        return all(a.offsets[x] + a.shape[x] <= b.offsets[x] for a, b in pairs for x in axes)
    return not any(_overlap(a, b) for a, b in itertools.combinations(filled, 2))


def _overlap(one: Piece, other: Piece) -> bool:
    return all(
        max(a, b) < min(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


def _axis(shape: tuple[int, ...]) -> int | None:
    """Return the first dimension that has several rows; None: there is none, or nothing."""
    if 0 in shape:
        return None
    return next((axis for axis, length in enumerate(shape) if length > 1), None)


def _rows(tensor: Tensor) -> int:
    axis = _axis(tensor.shape)
    return 1 if axis is None else tensor.shape[axis]


def _rows_of(number: int, tensor: Tensor, start: int, stop: int) -> Piece:
    axis = _axis(tensor.shape)
    if axis is None:
        return Piece(number, (0,) * len(tensor.shape), tensor.shape)
    offsets = tuple(start if one == axis else 0 for one in range(len(tensor.shape)))
    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return Piece(number, offsets, shape)


def _cut_at(tensors: Sequence[Tensor], worker: int, n_workers: int) -> tuple[int, int]:
    """Return the tensor and the row at which the share of a worker begins."""
    if worker in (0, n_workers):
        return (len(tensors) if worker else 0), 0
    total = sum(tensor.nbytes for tensor in tensors if not tensor.is_sharded)
    left = total * worker // n_workers
    for number, tensor in enumerate(tensors):
        nbytes = 0 if tensor.is_sharded else tensor.nbytes
        if left < nbytes:
            row = round(left * _rows(tensor) / nbytes)
            return (number, row) if row < _rows(tensor) else (number + 1, 0)
        left -= nbytes
    return len(tensors), 0
