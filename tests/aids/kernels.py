# SPDX-License-Identifier: Apache-2.0
"""A sum as the store calls it, and one that begins and then waits until it may go on."""

from __future__ import annotations

import ctypes
import threading

from fastps.reduce import sum_kernel
from fastps.types import DType

SUM_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
)


class GatedSum:
    """A sum of float32 that waits between begun and go; lives as long as who calls its address.

    address: of what to call in the place of the sum.
    """

    def __init__(self, *, timeout_s: float, address: int = 0) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls = 0
        self._timeout_s = timeout_s
        self._real = SUM_TYPE(address or sum_kernel(DType.FLOAT32))
        self._callback = SUM_TYPE(self._run)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _run(self, sources: int, n: int, into: int, count: int, args: int) -> int:
        self.calls += 1
        self.begun.set()
        self.go.wait(self._timeout_s)
        return int(self._real(sources, n, into, count, args))
