# SPDX-License-Identifier: Apache-2.0
"""Small Python objects as bytes, without pickle: what broadcast_object can carry.

MessagePack with extensions, so that tuples, sets, arrays and the like come back as what they
were. Members of an Enum and named tuples come back as such where their class is in a module that
the receiver has imported. Decoding makes plain values, and looks classes up; no code of a peer's
choice ever runs, and nothing is imported for it. Pure.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

from fastps.errors import ProtocolError

# MessagePack extension codes
TUPLE, SET, ARRAY, INTEGER, PAIRS, ORDERED, NAMESPACE, PATH, DTYPE, ENUM, NAMED, TEXT = range(
    1, 13
)
_PLAIN = (type(None), bool, float, bytes)
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
_DTYPE = re.compile(r"[<>|][biufcmMOSUV][0-9]*(\[[0-9]*[a-zA-Z]+\])?")
_SUPPORTED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, set, NumPy arrays and dtypes, Path, "
    "argparse.Namespace, Enum and named tuples"
)


# What decoding raises for bytes that encode_object() does not make: from msgspec (a ValueError),
# from unpacking, from NumPy, and from a class that has no such member.
_MALFORMED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


class Unsendable:
    """In the place of an object that a framework could not make plain: encoding raises why."""

    def __init__(self, why: Exception) -> None:
        self.why = why


def encode_object(obj: Any) -> bytes:
    """Encode nested plain values; TypeError names a type that cannot travel."""
    return msgspec.msgpack.encode(_to_plain(obj))


def decode_object(data: bytes) -> Any:
    """Decode what encode_object made. Raises ProtocolError when it is malformed."""
    try:
        return _from_plain(msgspec.msgpack.decode(data))
    except _MALFORMED as error:
        text = f"{type(error).__name__}: {error}"
        raise ProtocolError(f"an object of another process is malformed ({text})") from error


def encode_for_all(obj: Any, most: float = math.inf) -> bytes:
    """Encode an object for other workers, or else why it cannot travel; most: bytes.

    Whatever the object raises meanwhile: the others wait for the outcome.
    """
    try:
        data = encode_object((True, obj))
    except Exception as error:
        return refusal_of(error)
    if len(data) <= most:
        return data
    text = f"it has {len(data)} bytes, {most} are allowed; broadcast large data as arrays"
    return encode_object((False, text))


def refusal_of(error: Exception) -> bytes:
    """Encode, for other workers, why an object cannot travel."""
    text = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
    return encode_object((False, text))


def decode_of(rank: int, data: bytes) -> Any:
    """Decode what encode_for_all() made on a worker; TypeError if that could not travel."""
    found = decode_object(data)
    if not isinstance(found, tuple) or len(found) != 2 or type(found[0]) is not bool:
        raise ProtocolError(f"worker {rank} sent an object that is malformed")
    is_whole, found = found
    if not is_whole:
        raise TypeError(f"worker {rank} could not send its object: {found}")
    return found


def remake(value: Any, items: Iterable[Any]) -> Any:
    """Return a dict, list or tuple of items, of the value's type if that type can travel."""
    if isinstance(value, dict):
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, list):
        return list(items)
    make = getattr(type(value), "_make", tuple)  # a named tuple's
    return make(items)


def _to_plain(obj: Any) -> Any:
    if type(obj) in _PLAIN:
        return obj
    if type(obj) is str:
        return obj if obj.isascii() else _text(obj)
    if type(obj) is int:
        return obj if _MIN_INT <= obj <= _MAX_INT else _integer(obj)
    if type(obj) is list:
        return [_to_plain(item) for item in obj]
    if isinstance(obj, tuple):
        items = [_to_plain(item) for item in obj]
        return (
            _extension(NAMED, [*_name_of(obj), items])
            if _is_named(type(obj))
            else (_extension(TUPLE, items))
        )
    if type(obj) is set:
        return _extension(SET, [_to_plain(item) for item in obj])
    if isinstance(obj, dict):
        return _extension(ORDERED if isinstance(obj, OrderedDict) else PAIRS, _pairs(obj))
    is_array = isinstance(obj, np.ndarray | np.generic) and not _is_masked(obj)
    if is_array and obj.dtype.kind in "biufc":
        shape = list(obj.shape) if isinstance(obj, np.ndarray) else None  # None: a scalar
        return _extension(ARRAY, [obj.dtype.str, shape, obj.tobytes()])
    if isinstance(obj, enum.Enum):
        return _extension(ENUM, [*_name_of(obj), obj.name])
    if isinstance(obj, PurePath):
        return _extension(PATH, [_to_plain(str(obj))])
    if isinstance(obj, np.dtype) and obj.fields is None:
        return _extension(DTYPE, [obj.str])
    if type(obj).__name__ == "Namespace" and type(obj).__module__ == "argparse":
        return _extension(NAMESPACE, _pairs(vars(obj)))
    if isinstance(obj, Unsendable):
        raise obj.why
    raise TypeError(f"objects of type {type(obj).__name__} cannot be broadcast; use {_SUPPORTED}")


def _is_masked(obj: Any) -> bool:
    """Return whether it is an array with a mask, which its bytes lack."""
    masked = sys.modules.get("numpy.ma")  # which NumPy imports where it is used
    return masked is not None and isinstance(obj, masked.MaskedArray)


def _text(text: str) -> Any:
    """Encode a text; one with surrogates, as file names that are no UTF-8 have, by itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return msgspec.msgpack.Ext(TEXT, text.encode("utf-8", "surrogatepass"))
    return text


def _integer(number: int) -> Any:
    """Encode an integer of any length; its decimals would take time that grows with the square."""
    nbytes = number.bit_length() // 8 + 1
    return msgspec.msgpack.Ext(INTEGER, number.to_bytes(nbytes, "little", signed=True))


def _pairs(mapping: Mapping[Any, Any]) -> list[Any]:
    return [[_to_plain(key), _to_plain(mapping[key])] for key in mapping]


def _is_named(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(vars(kind).get("_fields"), tuple)


def _name_of(obj: Any) -> tuple[str, str]:
    return type(obj).__module__, type(obj).__qualname__


def _class_of(module: str, name: str) -> Any:
    """Look a class up where it is defined; ProtocolError if this process lacks it."""
    found: Any = sys.modules.get(module)
    for part in str(name).split("."):
        found = None if found is None else vars(found).get(part)
    if not isinstance(found, type):
        raise ProtocolError(
            f"the class {module}.{name} of a broadcast object is not imported here; import its "
            "module on all workers"
        )
    return found


def _extension(code: int, value: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, msgspec.msgpack.Ext):
        return value
    if value.code == INTEGER:
        return int.from_bytes(value.data, "little", signed=True)
    if value.code == TEXT:
        return bytes(value.data).decode("utf-8", "surrogatepass")
    items = msgspec.msgpack.decode(value.data)
    if value.code == TUPLE:
        return tuple(_from_plain(item) for item in items)
    if value.code == SET:
        return {_from_plain(item) for item in items}
    if value.code == PAIRS:
        return {_from_plain(key): _from_plain(item) for key, item in items}
    if value.code in _MAKERS:
        return _MAKERS[value.code](items)
    if value.code == ARRAY:
        dtype, shape, data = items
        array = np.frombuffer(data, _dtype_of(dtype))
        return array[0] if shape is None else array.reshape(shape).copy()
    raise ValueError(f"unknown extension {value.code} in a broadcast object")


def _dtype_of(text: Any) -> np.dtype[Any]:
    """Return a dtype by its str, as encoding writes it; nothing else that NumPy takes for one."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not the str of a dtype")
    return np.dtype(text)


def _named(items: list[Any]) -> Any:
    """Make a named tuple, without calling anything of its class."""
    kind, values = _class_of(*items[:2]), [_from_plain(item) for item in items[2]]
    if not _is_named(kind) or len(values) != len(kind._fields):
        raise ProtocolError(f"{items[1]} is no named tuple of {len(values)} here")
    return tuple.__new__(kind, values)


def _member(items: list[Any]) -> Any:
    """Return the member of an Enum."""
    kind, name = _class_of(*items[:2]), items[2]
    if not issubclass(kind, enum.Enum) or name not in kind._member_map_:
        raise ProtocolError(f"{items[1]}.{name} is no member of an Enum here")
    return kind._member_map_[name]


def _namespace(items: list[Any]) -> Any:
    from argparse import Namespace  # noqa: PLC0415  (few objects have one)

    found = Namespace()
    vars(found).update({key: _from_plain(item) for key, item in items})
    return found


_MAKERS = {
    ORDERED: lambda items: OrderedDict((_from_plain(key), _from_plain(one)) for key, one in items),
    NAMESPACE: _namespace,
    PATH: lambda items: Path(*map(_from_plain, items)),
    DTYPE: lambda items: _dtype_of(*items),
    ENUM: _member,
    NAMED: _named,
}
