# SPDX-License-Identifier: Apache-2.0
"""Element types on the wire, the one table of their codes, and bounds of users' arguments.

Knows NumPy and nothing else. bfloat16 has no NumPy dtype: such arrays travel as uint16 views
with the code BFLOAT16 beside them (or as ml_dtypes arrays, recognised by name). A uint16 array
without that code is one of integers.
"""

from __future__ import annotations

import enum

import numpy as np

MAX_SECONDS = 1e9  # the longest wait


class DType(enum.IntEnum):
    """Wire code of an element type; fits in one byte."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    UINT8 = 9
    BOOL = 10
    UINT16 = 11

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_BY_NAME = {code.name.lower(): code for code in DType}
# the usual dtypes without making their names, which takes microseconds
_BY_DTYPE = {np.dtype(name): code for name, code in _BY_NAME.items() if name != "bfloat16"}
_OF_CODE = {code: dtype for dtype, code in _BY_DTYPE.items()}
_OF_CODE[DType.BFLOAT16] = np.dtype(np.uint16)


def dtype_of(dtype: np.dtype[np.generic]) -> DType:
    """Return the wire code of a NumPy dtype; TypeError names what is supported."""
    code = _BY_DTYPE.get(dtype)
    if code is not None:
        return code
    code = _BY_NAME.get(dtype.name)
    if code is None or not dtype.isnative:
        raise TypeError(f"dtype {dtype} is not supported; use one of {', '.join(_BY_NAME)}")
    return code


def numpy_dtype(code: DType) -> np.dtype[np.generic]:
    """Return the NumPy dtype that holds a wire code's elements; uint16 for BFLOAT16."""
    return _OF_CODE[code]


class ReduceOp(enum.IntEnum):
    """How the elements of several arrays are combined; code on the wire and of a kernel."""

    SUM = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    BAND = 5  # bitwise and, or, exclusive or: of integers and bool
    BOR = 6
    BXOR = 7
    MIX = 8  # a sum in which each array has a weight: of floats
    TRIMMED_MEAN = 9  # without the largest and smallest: of floats

    def has_meaning(self, dtype: DType) -> bool:
        """Return whether a dtype allows it: bits need integers or bool, and mixes floats."""
        is_float = dtype <= DType.BFLOAT16
        return self < ReduceOp.BAND or is_float == (self >= ReduceOp.MIX)

    def check(self, dtype: DType) -> None:
        """Raise TypeError where a dtype does not allow it."""
        if not self.has_meaning(dtype):
            right = "floats" if self >= ReduceOp.MIX else "integers and bool"
            raise TypeError(f"op {self.name.lower()} is for {right}, not {dtype.name.lower()}")


class Op(enum.Enum):
    """The op= of users: an operation, or the average, which is a sum with a divisor."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    ADASUM = "adasum"  # not element by element: see collectives/adasum.py

    @property
    def reduction(self) -> ReduceOp:
        """The operation of its kernel. Raises TypeError where it has none."""
        if self is Op.ADASUM:
            raise TypeError(
                "op=Adasum is allowed in allreduce() and DistributedOptimizer() only; use Sum or "
                "Average here"
            )
        return _REDUCTIONS[self]


_REDUCTIONS = {op: ReduceOp[op.name] for op in Op if op.name in ReduceOp.__members__} | {
    Op.AVERAGE: ReduceOp.SUM
}


_ITEMSIZE = {code: numpy_dtype(code).itemsize for code in DType}


def checked_seconds(timeout_s: float) -> float:
    """Return a time to wait as a float. Raises ValueError, also for NaN."""
    if not 0 <= timeout_s <= MAX_SECONDS:
        raise ValueError(f"timeout_s={timeout_s} must be 0 to {MAX_SECONDS:g} seconds")
    return float(timeout_s)
