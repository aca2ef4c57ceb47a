# SPDX-License-Identifier: Apache-2.0
"""Memory between two pages that nobody may touch: what strays from an array ends there."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
PROT_NONE = 0
UNTOUCHED = 0xA5


class Fenced:
    """Room for an array that ends where the second fence begins, or begins behind the first.

    What the array leaves of the room is compared afterwards: see check().
    """

    def __init__(self, nbytes: int) -> None:
        self._room = -(-nbytes // PAGE) * PAGE
        self._map = mmap.mmap(-1, self._room + 2 * PAGE)
        memory = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (0, PAGE + self._room):
            place = ctypes.c_void_p(memory.ctypes.data + fence)
            if libc.mprotect(place, ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._bytes = memory[PAGE : PAGE + self._room]
        self._begin = self._end = 0

    def array(
        self, count: int, dtype: type | str = np.uint8, *, alignment: int = 1, is_last: bool
    ) -> np.ndarray:
        """Return an array that is_last before the fence, as near as alignment allows, or first."""
        nbytes = count * np.dtype(dtype).itemsize
        self._begin = (self._room - nbytes) // alignment * alignment if is_last else 0
        self._end = self._begin + nbytes
        near = slice(max(self._begin - PAGE, 0), self._end + PAGE)
        self._bytes[near] = UNTOUCHED
        return self._bytes[self._begin : self._end].view(dtype)

    def check(self) -> None:
        """Raise AssertionError where something beside the array was written."""
        for near in (slice(max(self._begin - PAGE, 0), self._begin),
                     slice(self._end, self._end + PAGE)):  # fmt: skip
            assert (self._bytes[near] == UNTOUCHED).all()
