# SPDX-License-Identifier: Apache-2.0
"""Nested states taken apart into tensors and plain values, and put together again.

A state is a tree of dict, list, tuple and named tuple. Its leaves are tensors, and plain values as
`broadcast_object()` carries them. Each tensor has a name: the keys on the way to it, joined by
dots, as torch.distributed.checkpoint names them. What a tensor is, a Kind knows: NumPy's is here,
each framework has one of its own. Pure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastps.collectives.objects import decode_object, encode_object, remake
from fastps.worker.handle import Array

MARK = "fastps.checkpoint tensor"  # begins the tuple in the place of a tensor
RESERVED = "__metadata__"  # in the header of a safetensors file

# dtype by name: its code in safetensors, and the elements of that code in one of its own
CODES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1),
    "uint16": ("U16", 1), "int16": ("I16", 1), "uint32": ("U32", 1), "int32": ("I32", 1),
    "uint64": ("U64", 1), "int64": ("I64", 1),
    "float16": ("F16", 1), "bfloat16": ("BF16", 1), "float32": ("F32", 1), "float64": ("F64", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("F32", 2), "complex128": ("F64", 2),
}  # fmt: skip
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element."""
    code, count = CODES[dtype]
    return SIZES[code] * count


class Shard:
    """A part of a global tensor, as a leaf of a state: the box that this worker holds.

    array: the part. shape: that of the global tensor. offsets: where the part begins in it, by
    dimension. The parts of all workers cover the tensor once.
    """

    def __init__(self, array: Any, shape: Sequence[int], offsets: Sequence[int]) -> None:
        """Note the part; ValueError if it lies outside of the tensor."""
        self.array = array
        self.shape, self.offsets = tuple(map(int, shape)), tuple(map(int, offsets))
        part = tuple(map(int, array.shape))
        if not len(part) == len(self.shape) == len(self.offsets) or any(
            at < 0 or at + length > whole
            for at, length, whole in zip(self.offsets, part, self.shape, strict=True)
        ):
            raise ValueError(
                f"Shard: an array of shape {part} at offsets {self.offsets} lies outside of a "
                f"tensor of shape {self.shape}"
            )


class Tensor(NamedTuple):
    """The description of a tensor.

    kind: of the framework. is_sharded: workers hold parts of it; else each holds all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    is_sharded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * itemsize_of(self.dtype)


class Kind(Protocol):
    """What tensors of a framework are."""

    name: str

    def is_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor of this kind."""

    def describe(self, value: Any) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape; TypeError for a tensor that cannot be saved."""

    def read(self, value: Any, start: int, stop: int) -> Array:
        """Return the bytes of some elements in C order, start to stop, as uint8."""

    def make(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """Return an uninitialised tensor, and its bytes as uint8."""


class NumPyKind:
    """NumPy arrays, and what is like them: a dtype, a shape and `__array__`."""

    name = "numpy"

    def is_tensor(self, value: Any) -> bool:
        """Return whether it is an array; NumPy's scalars are plain values."""
        if isinstance(value, np.ndarray):
            return True
        is_array = all(hasattr(value, name) for name in ("__array__", "dtype", "shape"))
        return is_array and not isinstance(value, np.generic)

    def describe(self, value: Any) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape; TypeError for objects, text and masked arrays."""
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(value, masked.MaskedArray):
            raise TypeError("masked arrays cannot be saved: save its data and its mask")
        name = str(value.dtype).removeprefix("torch.")
        name = name if name in CODES else np.dtype(value.dtype).name  # of other byte orders
        if name not in CODES:
            raise TypeError(
                f"arrays of dtype {value.dtype} cannot be saved; use {', '.join(CODES)}"
            )
        return name, tuple(value.shape)

    def read(self, value: Any, start: int, stop: int) -> Array:
        """Return the bytes of some elements in C order."""
        array = np.asarray(value)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        some: Array = np.ascontiguousarray(array).reshape(-1)[start:stop]
        return some.view(np.uint8)

    def make(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """Return an uninitialised array, and its bytes."""
        array: Array = np.empty(shape, dtype_named(dtype))
        return array, array.reshape(-1).view(np.uint8)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name; TypeError where that needs a package that is missing."""
    try:
        return np.dtype(name)
    except TypeError:
        try:
            import ml_dtypes  # noqa: PLC0415  (few arrays need it)
        except ImportError:
            raise TypeError(
                f"NumPy has no dtype {name}: run `pip install ml_dtypes`, or restore the "
                "checkpoint with fastps.torch.checkpoint"
            ) from None
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


NUMPY = NumPyKind()


class Parts(NamedTuple):
    """A state taken apart.

    plain: the state with a mark for each tensor. tensors: their descriptions. values: the tensors.
    """

    plain: bytes
    tensors: list[Tensor]
    values: list[Any]


def take_apart(
    state: Any, kinds: Sequence[Kind], prefix: str = "", taken: Iterable[str] = ()
) -> Parts:
    """Take a state apart; TypeError names the place of a value that cannot be saved.

    prefix: begins the names of tensors; taken: names that others have.
    """
    taker = _Taker(kinds, prefix, taken)
    plain = taker.take(state, ())
    return Parts(encode_object(plain), taker.tensors, taker.values)


def put_together(plain: bytes, value_of: Callable[[int], Any]) -> Any:
    """Undo take_apart(); value_of(place): the tensor. ProtocolError if plain is malformed."""
    return _put_back(decode_object(plain), value_of)


def kind_of(value: Any, kinds: Sequence[Kind]) -> Kind | None:
    """Return the kind of a tensor; None: it is none."""
    return next((kind for kind in kinds if kind.is_tensor(value)), None)


class _Taker:
    def __init__(self, kinds: Sequence[Kind], prefix: str, taken: Iterable[str]) -> None:
        self._kinds, self._prefix = kinds, prefix
        self._names: set[str] = {RESERVED, *taken}
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []

    def take(self, value: Any, path: tuple[Any, ...]) -> Any:
        array = value.array if isinstance(value, Shard) else value
        if (kind := kind_of(array, self._kinds)) is not None:
            return self._take_tensor(value, array, kind, path)
        if isinstance(value, dict):
            self._check(list(value), path)
            return remake(value, ((key, self.take(it, (*path, key))) for key, it in value.items()))
        if isinstance(value, list | tuple):
            if _is_mark(value):
                raise TypeError(f"{_place(path)}: a tuple must not begin with {MARK!r}")
            fields = getattr(type(value), "_fields", None)
            keys = fields if isinstance(value, tuple) and fields else range(len(value))
            items = (self.take(it, (*path, k)) for k, it in zip(keys, value, strict=True))
            return remake(value, items)
        self._check(value, path)
        return value

    def _check(self, value: Any, path: tuple[Any, ...]) -> None:
        try:
            encode_object(value)
        except TypeError:
            raise TypeError(
                f"{_place(path)} is of type {type(value).__name__}, which cannot be saved; use "
                "arrays or tensors, None, bool, int, float, str, bytes, list, tuple, dict, set, "
                "Path, Enum and named tuples"
            ) from None

    def _take_tensor(self, value: Any, array: Any, kind: Kind, path: tuple[Any, ...]) -> Any:
        try:
            dtype, shape = kind.describe(array)
        except TypeError as error:
            raise TypeError(f"{_place(path)}: {error}") from None
        shape = value.shape if isinstance(value, Shard) else shape
        name = self._fresh(".".join([self._prefix, *map(str, path)] if self._prefix else
                                    map(str, path)) or "state")  # fmt: skip
        self.tensors.append(Tensor(name, dtype, shape, kind.name, isinstance(value, Shard)))
        self.values.append(value)
        return MARK, len(self.tensors) - 1

    def _fresh(self, name: str) -> str:
        """Return a name that no other tensor has: keys may contain dots."""
        name = name.encode("utf-8", "replace").decode()
        found, count = name, 1
        while found in self._names:
            count += 1
            found = f"{name}~{count}"
        self._names.add(found)
        return found


def _is_mark(value: Any) -> bool:
    is_named = isinstance(value, tuple) and len(value) and isinstance(value[0], str)
    return bool(is_named and value[0] == MARK)


def _place(path: tuple[Any, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)


def _put_back(value: Any, value_of: Callable[[int], Any]) -> Any:
    if isinstance(value, dict):
        return remake(value, ((key, _put_back(item, value_of)) for key, item in value.items()))
    if _is_mark(value):
        return value_of(value[1])
    if isinstance(value, list | tuple):
        return remake(value, (_put_back(item, value_of) for item in value))
    return value
