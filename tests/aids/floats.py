# SPDX-License-Identifier: Apache-2.0
"""Floating-point states of a thread that programs may set, by the C library's fenv_t."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_ROOM = 64  # bytes that fenv_t has at most
# Where the control word lies in fenv_t, and its bits: subnormals are zeros; rounding upwards.
_WORDS = {
    "x86_64": (28, {"flush": 0x8040, "upward": 0x4000}),
    "aarch64": (0, {"flush": 1 << 24, "upward": 1 << 22}),
}
STATES = ("flush", "upward")
_libm = ctypes.CDLL("libm.so.6")


def control_word() -> int:
    """Return this thread's control word; flags of what has happened are not in it."""
    return _read()[1] & ~0x3F


@contextmanager
def floats_set(state: str) -> Iterator[None]:
    """Have this thread compute in another state for a while."""
    before, word = _read()
    place, bits = _place()
    changed = bytearray(before)
    changed[place : place + 4] = (word | bits[state]).to_bytes(4, "little")
    _write(bytes(changed))
    try:
        yield
    finally:
        _write(before)


def _place() -> tuple[int, dict[str, int]]:
    if platform.machine() not in _WORDS:
        pytest.skip("where the control word lies on this processor is not known here")
    return _WORDS[platform.machine()]


def _read() -> tuple[bytes, int]:
    room = ctypes.create_string_buffer(_ROOM)
    assert _libm.fegetenv(room) == 0
    place = _place()[0]
    return room.raw, int.from_bytes(room.raw[place : place + 4], "little")


def _write(state: bytes) -> None:
    assert _libm.fesetenv(ctypes.create_string_buffer(state, _ROOM)) == 0
