# SPDX-License-Identifier: Apache-2.0
"""What a sum kernel must give, in NumPy; and how the tests call one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from aids.kernels import SUM_TYPE
from fastps.reduce import reduce_kernel, sum_kernel
from fastps.types import DType, ReduceOp

STORAGE = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
    DType.UINT8: np.uint8,
    DType.BOOL: np.uint8,
    DType.UINT16: np.uint16,
}
HALVES = (DType.FLOAT16, DType.BFLOAT16)
FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
INTEGERS = (DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.UINT16)


def kernel(code: DType):
    """Make the kernel callable from Python; ctypes releases the GIL around the call."""
    return SUM_TYPE(sum_kernel(code))


def table(arrays: Sequence[np.ndarray]):
    """Make the table of addresses."""
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


def divisor_at(divisor: int):
    """Give what a sum wants besides its sources."""
    return ctypes.byref(ctypes.c_int64(divisor))


def call(code: DType, sources: Sequence[np.ndarray], out: np.ndarray, divisor: int = 1) -> int:
    """Sum `sources` into `out`."""
    args = divisor_at(divisor)
    return kernel(code)(table(sources), len(sources), out.ctypes.data, out.size, args)


def expected(code: DType, sources: Sequence[np.ndarray], divisor: int = 1) -> np.ndarray:
    """Sum one source after the other; round or divide once at the end."""
    if code is DType.BOOL:
        return np.logical_or.reduce([source != 0 for source in sources]).astype(np.uint8)
    storage = STORAGE[code]
    wide = np.float32 if code in HALVES else storage
    with np.errstate(all="ignore"):
        total = sources[0].astype(wide)
        for source in sources[1:]:
            total = total + source.astype(wide)
        if divisor == 1:
            return total.astype(storage)
        if code in FLOATS:
            return (total * wide(1.0 / divisor)).astype(storage)
        return np.floor_divide(total.astype(np.int64), divisor).astype(storage)


def call_mix(
    code: DType, weights: Sequence[float], sources: Sequence[np.ndarray], out: np.ndarray
) -> int:
    """Add sources by their weights."""
    args = (ctypes.c_double * len(weights))(*weights)
    function = SUM_TYPE(reduce_kernel(ReduceOp.MIX, code))
    return function(table(sources), len(sources), out.ctypes.data, out.size, args)


def expected_mix(
    code: DType, weights: Sequence[float], sources: Sequence[np.ndarray]
) -> np.ndarray:
    """Multiply, then add, one source after the other; round halves once at the end."""
    wide = np.float32 if code in HALVES else STORAGE[code]
    with np.errstate(all="ignore"):
        total = wide(weights[0]) * sources[0].astype(wide)
        for weight, source in zip(weights[1:], sources[1:], strict=True):
            total = total + wide(weight) * source.astype(wide)
        return total.astype(STORAGE[code])


UFUNCS = {
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
TRUTHS = {ReduceOp.MIN: np.logical_and, ReduceOp.MAX: np.logical_or}
TRUTHS |= {ReduceOp.PRODUCT: np.logical_and, ReduceOp.BAND: np.logical_and}
TRUTHS |= {ReduceOp.BOR: np.logical_or, ReduceOp.BXOR: np.logical_xor}


def call_op(op: ReduceOp, code: DType, sources: Sequence[np.ndarray], out: np.ndarray) -> int:
    """Do an operation other than a sum, which wants nothing besides."""
    function = SUM_TYPE(reduce_kernel(op, code))
    return function(table(sources), len(sources), out.ctypes.data, out.size, None)


def expected_op(op: ReduceOp, code: DType, sources: Sequence[np.ndarray]) -> np.ndarray:
    """Take one source after the other; halves in float32, rounded once at the end."""
    if code is DType.BOOL:
        return TRUTHS[op].reduce([source != 0 for source in sources]).astype(np.uint8)
    wide = np.float32 if code in HALVES else STORAGE[code]
    rows = [source.astype(wide) for source in sources]
    with np.errstate(all="ignore"):
        total = UFUNCS[op].reduce(rows, dtype=wide)
        if code in FLOATS and op is not ReduceOp.PRODUCT:  # NumPy takes either zero
            signs = np.signbit(rows)
            negative = signs.any(axis=0) if op is ReduceOp.MIN else signs.all(axis=0)
            total = np.where(total == 0, np.where(negative, -0.0, 0.0).astype(wide), total)
        return total.astype(STORAGE[code])


def assert_same(code: DType, got: np.ndarray, want: np.ndarray) -> None:
    """Compare bit for bit, except that any NaN equals any other."""
    words = np.dtype(f"u{got.itemsize}")
    if code in FLOATS:
        with np.errstate(invalid="ignore"):  # a signalling NaN is no news here
            nan = np.isnan(want.astype(np.float64))
            np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
        got, want = got[~nan], want[~nan]
    np.testing.assert_array_equal(got.view(words), want.view(words))


def specials(code: DType) -> np.ndarray:
    """List the values that break careless kernels."""
    storage = STORAGE[code]
    if code in FLOATS:
        info = ml_dtypes.finfo(storage) if code is DType.BFLOAT16 else np.finfo(storage)
        small = [info.smallest_subnormal, info.tiny, -info.smallest_subnormal]
        large = [info.max, -info.max, np.inf, -np.inf, np.nan]
        return np.array([0.0, -0.0, 1.0, -1.0, *small, *large]).astype(storage)
    if code is DType.BOOL:
        return np.array([0, 0, 0, 1, 2, 128, 255], dtype=storage)
    limits = np.iinfo(storage)
    near = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2, 3, 7]
    return np.array(near, dtype=storage)


def random_values(code: DType, count: int, rng: np.random.Generator) -> np.ndarray:
    """Mix random bit patterns, ordinary numbers and special values."""
    storage = STORAGE[code]
    with np.errstate(all="ignore"):
        bits = rng.integers(0, 256, count * code.itemsize, dtype=np.uint8).view(storage)
        usual = (rng.standard_normal(count) * 50).astype(np.int8 if code in INTEGERS else "f8")
        choice = rng.integers(0, 3, count)
        special = rng.choice(specials(code), count) if count else bits
        return np.select([choice == 0, choice == 1], [bits, usual.astype(storage)], special)
