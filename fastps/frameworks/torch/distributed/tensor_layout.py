# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch.distributed as contiguous flat arrays for a Group.

Tensors that are not contiguous are copied to be read; to be written they get a temporary tensor,
and a list of copies from there that are due when the operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from fastps.collectives.overlap import is_apart
from fastps.frameworks.torch.ops.tensors import (
    WIRE_DTYPES,
    Array,
    check_memory,
    check_on_cpu,
    check_writable,
    is_plain,
    is_sendable,
    sendable,
    wire_dtype,
    write_over,
)
from fastps.types import DType, numpy_dtype

# Wire type, and elements per number: complex numbers are pairs; other dtypes travel as bytes.
_FORMS = {dtype: (code, 1) for dtype, code in WIRE_DTYPES.items()} | {
    torch.complex32: (DType.FLOAT16, 2),
    torch.complex64: (DType.FLOAT32, 2),
    torch.complex128: (DType.FLOAT64, 2),
}
_TYPES = {code: numpy_dtype(code).str for code in DType}

_IN_PLACE = ("all_reduce", "reduce", "broadcast")  # their results for equal elements are equal

Pieces: TypeAlias = torch.Tensor | Sequence[torch.Tensor]  # one for all members, or one for each
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # target and source, for the end


class Side(NamedTuple):
    """One side of an operation: an array over `plain`, and elements of it for each member."""

    plain: torch.Tensor
    array: Array
    code: DType
    counts: list[int] | None  # None where there is one tensor for all
    copies: list[Copy]

    def scaled(self, elements: Sequence[int]) -> list[int]:
        """Convert counts of tensor elements to counts of array elements."""
        width = _form(self.plain.dtype)[1]
        return [count * width for count in elements]


def reading(pieces: Pieces, operation: str) -> Side:
    """Return tensors as one array to read; TypeError for other than dense CPU tensors."""
    if isinstance(pieces, torch.Tensor):
        return _side(_plain(pieces, operation), None, [])
    flat = [_plain(piece, operation).reshape(-1) for piece in pieces]
    one = _as_one(flat)
    return _side(torch.cat(flat) if one is None else one, pieces, [])


def landing(pieces: Pieces, operation: str) -> Side:
    """Return an array for the results; for a single tensor it holds the tensor's elements.

    ValueError for elements that share memory, as by expand(), where results may differ.
    """
    if isinstance(pieces, torch.Tensor):
        plain = _plain(pieces, operation)
        check_places(pieces, operation)
        return _side(plain, None, [] if is_sendable(pieces) else [(pieces, plain)])
    for piece in pieces:
        _check(piece, operation)
        check_places(piece, operation)
    if all(map(is_sendable, pieces)):
        one = _as_one([piece.detach().reshape(-1) for piece in pieces])
        if one is not None:
            return _side(one, pieces, [])
    counts = [piece.numel() for piece in pieces]
    room = torch.empty(sum(counts), dtype=pieces[0].dtype)
    places = torch.split(room, counts)
    return _side(room, pieces, list(zip(pieces, places, strict=True)))


def apart(of: Side, to: Side, place: int | None = None) -> Side:
    """Return the side that is read, as a copy if it overlaps the side that is written.

    place: the element of `to` where `of` will be written; if it lies exactly there, as FSDP2
    passes it, it stays.
    """
    return of if is_apart(of.array, to.array, place) else of._replace(array=of.array.copy())


def copy_all(copies: Sequence[Copy]) -> None:
    """Do the copies."""
    for target, source in copies:
        write_over(target, source)


def check_numbers(tensor: torch.Tensor, operation: str) -> None:
    """Raise TypeError for a dtype that travels as bytes and has no sum."""
    if tensor.dtype not in _FORMS:
        wire_dtype(tensor.dtype, operation)


def _check(tensor: torch.Tensor, operation: str) -> None:
    if not is_plain(tensor):
        check_memory(tensor, operation)
        check_on_cpu(tensor, operation, 'the backend "fastps"')


def _plain(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    _check(tensor, operation)
    return sendable(tensor)


def check_places(tensor: torch.Tensor, operation: str) -> None:
    """Raise ValueError if elements share memory and the operation's results may differ."""
    check_writable(tensor, operation)
    if operation in _IN_PLACE or tensor.is_contiguous():
        return
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and not stride for size, stride in sides):
        raise ValueError(
            f"{operation}: the tensor of shape {tuple(tensor.shape)} has elements that share "
            "memory, as by expand(), and cannot hold the result: pass tensor.clone()"
        )


def _form(dtype: torch.dtype) -> tuple[DType, int]:
    return _FORMS.get(dtype) or (DType.UINT8, dtype.itemsize)


def _as_one(flat: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return flat tensors as one if they follow each other in one storage."""
    first, end = flat[0], flat[0].data_ptr()
    for tensor in flat:
        is_next = tensor.data_ptr() == end and tensor.dtype is first.dtype
        if (
            not is_next
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        end += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in flat),), (1,))


class _ArrayInterface:
    """A tensor's memory for NumPy; after torch's numpy() the storage can never be resized."""

    def __init__(self, tensor: torch.Tensor, count: int, code: DType) -> None:
        self.tensor = tensor  # alive as long as an array over it
        self.__array_interface__ = {
            "shape": (count,), "typestr": _TYPES[code], "data": (tensor.data_ptr(), False),
            "version": 3,
        }  # fmt: skip


def _side(tensor: torch.Tensor, pieces: Sequence[torch.Tensor] | None, copies: list[Copy]) -> Side:
    code, width = _form(tensor.dtype)
    array = np.asarray(_ArrayInterface(tensor, tensor.numel() * width, code))
    counts = None if pieces is None else [piece.numel() * width for piece in pieces]
    return Side(tensor, array, code, counts, copies)
