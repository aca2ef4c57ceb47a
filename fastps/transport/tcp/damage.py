# SPDX-License-Identifier: Apache-2.0
"""Frames that failed their checks on a TCP link, in words. Pure.

A link counts as lost then: what its peer sent is not known. The frame was delivered to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# by FrameKind of frame.pxd
_TENSORS = {1: "a contribution to", 2: "a result of", 3: "a request for", 4: "the error of"}
_MESSAGES = range(6, 11)
_WINDOW = 11
_KEY_BITS = 16  # of a key: the index of the partition


class Damage(NamedTuple):
    """A frame as its header announced it; kind 0: the header itself was damaged."""

    kind: int
    key: int
    version: int
    offset: int
    length: int
    is_sealed: bool = False


def damage_text(damage: Damage, name_of: Callable[[int], str | None]) -> str:
    """Return what arrived damaged, and what to do; name_of: of a tensor, by its id."""
    if damage.is_sealed:
        return (
            f"{_what(damage, name_of)} did not open and was not used: it was changed, repeated or "
            "moved on its way, or came from somebody without the keys; check the machines and "
            "switches of the path"
        )
    return (
        f"{_what(damage, name_of)} arrived damaged (its CRC-32C differs) and was not used; check "
        "memory, network cards and switches of the path by dmesg and `ethtool -S`, and that the "
        "program changes no tensor while an operation on it is in flight"
    )


def _what(damage: Damage, name_of: Callable[[int], str | None]) -> str:
    kind, key, version, offset, length, _ = damage
    where = f"bytes {offset} to {offset + length} of operation {version}"
    if kind in _TENSORS:
        name = name_of(key >> _KEY_BITS)
        tensor = f"tensor {name!r}" if name else f"the tensor of id {key >> _KEY_BITS}"
        part = key & ((1 << _KEY_BITS) - 1)
        return f"{_TENSORS[kind]} {tensor} (partition {part}, {where})"
    if kind in _MESSAGES:
        return f"a message of another worker ({where})"
    return f"a frame of a window ({where})" if kind == _WINDOW else "the header of a frame"
