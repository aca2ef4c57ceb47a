# SPDX-License-Identifier: Apache-2.0
"""Small Python objects as bytes, without pickle: what broadcast_object can carry.

MessagePack with three extensions, so that tuples, sets and arrays come back as what they were.
Decoding makes plain values only; no code of a peer's choice ever runs. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

TUPLE, SET, ARRAY, INTEGER, PAIRS = 1, 2, 3, 4, 5  # MessagePack extension codes
_PLAIN = (type(None), bool, float, str, bytes)
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_SUPPORTED = "None, bool, int, float, str, bytes, list, tuple, dict, set and NumPy arrays"


def encode_object(obj: Any) -> bytes:
    """Encode nested plain values; TypeError names a type that cannot travel."""
    return msgspec.msgpack.encode(_to_plain(obj))


def decode_object(data: bytes) -> Any:
    """Decode what encode_object made; ValueError when it is malformed."""
    return _from_plain(msgspec.msgpack.decode(data))


def _to_plain(obj: Any) -> Any:
    if type(obj) in _PLAIN:
        return obj
    if type(obj) is int:
        fits = _MIN_INT <= obj <= _MAX_INT
        return obj if fits else msgspec.msgpack.Ext(INTEGER, str(obj).encode())
    if type(obj) is list:
        return [_to_plain(item) for item in obj]
    if isinstance(obj, tuple):
        return _extension(TUPLE, [_to_plain(item) for item in obj])
    if type(obj) is set:
        return _extension(SET, [_to_plain(item) for item in obj])
    if isinstance(obj, dict):
        return _extension(PAIRS, [[_to_plain(key), _to_plain(obj[key])] for key in obj])
    if isinstance(obj, np.ndarray | np.generic) and obj.dtype.kind in "biufc":
        shape = list(obj.shape) if isinstance(obj, np.ndarray) else None  # None: a scalar
        return _extension(ARRAY, [obj.dtype.str, shape, obj.tobytes()])
    raise TypeError(f"{type(obj).__name__} cannot be broadcast; use {_SUPPORTED}")


def _extension(code: int, value: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    if value.code == INTEGER:
        return int(bytes(value.data))
    items = msgspec.msgpack.decode(value.data)
    if value.code == TUPLE:
        return tuple(_from_plain(item) for item in items)
    if value.code == SET:
        return {_from_plain(item) for item in items}
    if value.code == PAIRS:
        return {_from_plain(key): _from_plain(item) for key, item in items}
    if value.code == ARRAY:
        dtype, shape, data = items
        array = np.frombuffer(data, dtype=np.dtype(dtype))
        return array[0] if shape is None else array.reshape(shape).copy()
    raise ValueError(f"unknown extension {value.code} in a broadcast object")
