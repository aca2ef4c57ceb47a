# SPDX-License-Identifier: Apache-2.0
"""Plain values with their types kept, as structures that MessagePack can carry.

MessagePack knows no tuple and only string-like keys; training scripts have both. Each value
becomes a pair of a tag and its content; tensors are taken out, in order, and travel by
themselves. Knows no framework (it is told what a tensor is) and no network; never runs code that
came from a peer. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

__all__ = ["pack", "unpack"]

# What MessagePack carries by itself.
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
# Deeper structures are refused on both sides, before Python's own recursion limit.
_MOST_LEVELS = 64

Node: TypeAlias = list[Any]
Describe: TypeAlias = Callable[[Any], list[Any] | None]


def pack(value: object, describe: Describe, path: str = "value") -> tuple[Node, list[Any]]:
    """Turn a value into tagged lists, and give its tensors in the order of their marks.

    describe(x) gives None for what is no tensor, else plain values from which an empty twin can
    be made. Raises TypeError that names the path to the first value that cannot travel.
    """
    tensors: list[Any] = []
    return _pack(value, describe, path, tensors, 0), tensors


def unpack(node: Node, make: Callable[[list[Any]], Any]) -> tuple[Any, list[Any]]:
    """Turn tagged lists into the value again; make(description) gives each tensor.

    Gives the value and its tensors in the order of their marks. Raises ValueError on what pack()
    cannot have made.
    """
    tensors: list[Any] = []
    return _unpack(node, make, tensors, 0), tensors


def _pack(value: Any, describe: Describe, path: str, tensors: list[Any], level: int) -> Node:
    if level > _MOST_LEVELS:
        raise TypeError(f"{path} is nested deeper than {_MOST_LEVELS} levels")
    description = describe(value)
    if description is not None:
        tensors.append(value)
        return ["x", description]
    scalar = _pack_scalar(value)
    if scalar is not None:
        return scalar
    if isinstance(value, dict):
        return ["d", list(_pack_items(value, describe, path, tensors, level))]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        tag = "l" if isinstance(value, list) else "t"
        parts = enumerate(value)
        return [tag, [_pack(x, describe, f"{path}[{i}]", tensors, level + 1) for i, x in parts]]
    raise TypeError(
        f"{path} is of type {type(value).__name__}, which cannot be sent: use None, bool, int, "
        "float, str, bytes, tuple, list, dict, NumPy scalars and tensors"
    )


def _pack_scalar(value: Any) -> Node | None:
    if isinstance(value, np.generic):
        return _pack_numpy(value)
    if isinstance(value, bool) or value is None or type(value) in (float, str, bytes):
        return ["s", value]
    if type(value) is int:
        return ["s", value] if _INT_MIN <= value <= _INT_MAX else ["i", hex(value)]
    return None


def _pack_numpy(value: np.generic) -> Node | None:
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        return None
    return ["n", value.dtype.str, value.item()]


def _pack_items(
    items: dict[Any, Any], describe: Describe, path: str, tensors: list[Any], level: int
) -> Iterator[list[Node]]:
    for key, value in items.items():
        packed_key = _pack(key, lambda _: None, f"a key of {path}", [], level + 1)
        yield [packed_key, _pack(value, describe, f"{path}[{key!r}]", tensors, level + 1)]


def _unpack(node: Node, make: Callable[[list[Any]], Any], tensors: list[Any], level: int) -> Any:
    if level > _MOST_LEVELS or not isinstance(node, list | tuple) or len(node) < 2:
        raise ValueError("malformed value from a peer")
    tag, content = node[0], node[1]
    if tag == "s":
        return content
    if tag == "x":
        tensors.append(make(content))
        return tensors[-1]
    if tag in ("l", "t"):
        parts = [_unpack(part, make, tensors, level + 1) for part in content]
        return parts if tag == "l" else tuple(parts)
    if tag == "d":
        return _unpack_items(content, make, tensors, level)
    if tag == "i":
        return int(content, 16)
    if tag == "n":
        return _unpack_numpy(content, node[2])
    raise ValueError(f"malformed value from a peer: unknown tag {tag!r}")


def _unpack_items(
    items: list[list[Node]], make: Callable[[list[Any]], Any], tensors: list[Any], level: int
) -> dict[Any, Any]:
    value: dict[Any, Any] = {}
    for key, item in items:
        unpacked_key = _unpack(key, make, [], level + 1)
        value[unpacked_key] = _unpack(item, make, tensors, level + 1)
    return value


def _unpack_numpy(code: str, item: Any) -> np.generic:
    dtype = np.dtype(code)
    if dtype.kind not in "biuf":
        raise ValueError(f"malformed value from a peer: NumPy dtype {code!r}")
    scalar: np.generic = dtype.type(item)
    return scalar
