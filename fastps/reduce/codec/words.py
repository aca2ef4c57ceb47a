# SPDX-License-Identifier: Apache-2.0
"""The words that the kernels of codecs are written in: views of memory, bits, lots, sums, masks.

What is added up goes to LANES sums, element i to sum i mod LANES, which are added in order at the
end: the same bits with any vector length. Imports Numba; see kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import float32, float64, int64, types, uint16, uint32, uint64
from numba.extending import intrinsic

from fastps.reduce.kernels import FORMS, _float_to_half, _splat
from fastps.types import DType

LANES = 64
SIZE_BITS = 0x7FFFFFFF
_njit: Any = numba.njit
_Pointer: Any = types.CPointer


def jit(function: Callable[..., Any]) -> Any:
    """Let kernels call a function."""
    return _njit(function, error_model="numpy", boundscheck=False, _nrt=False)


def word(function: Callable[..., Any]) -> Any:
    """Let kernels call what LLVM emits."""
    return intrinsic(function)


@word
def cast(_context: Any, pointer: Any, kind: Any) -> Any:
    """Take a pointer for one to another type."""
    target = _Pointer(kind.instance_type)

    def emit(context: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.bitcast(args[0], context.get_value_type(target))

    return target(pointer, kind), emit


@word
def bits_of(_context: Any, _x: Any) -> Any:
    """Return the bits of a float32."""
    return uint32(float32), lambda _c, b, _s, args: b.bitcast(args[0], ir.IntType(32))


@word
def real_of(_context: Any, _x: Any) -> Any:
    """Return the float32 of some bits."""
    return float32(uint32), lambda _c, b, _s, args: b.bitcast(args[0], ir.FloatType())


@word
def at(_context: Any, pointer: Any, _index: Any) -> Any:
    """Return the pointer to a later element."""
    return pointer(pointer, int64), lambda _c, b, _s, args: b.gep(args[0], [args[1]])


def _emit_half(b: Any, x: Any, *, convert: str) -> Any:
    """Convert one number from or to float16, as the sums do."""
    lane, form = ir.Constant(ir.IntType(32), 0), FORMS[DType.FLOAT16]
    if form.narrow is not _float_to_half:  # without instructions
        one = b.bitcast(x, ir.VectorType(x.type, 1))
        return b.extract_element(getattr(form, convert)(b, one), lane)
    half, real = ir.HalfType(), ir.FloatType()
    if convert == "narrow":
        return b.bitcast(b.fptrunc(x, half), ir.IntType(16))
    return b.fpext(b.bitcast(x, half), real)


@word
def half_of(_context: Any, _x: Any) -> Any:
    """Round to nearest, ties to even."""
    return uint16(float32), lambda _c, b, _s, args: _emit_half(b, args[0], convert="narrow")


@word
def float_of_half(_context: Any, _x: Any) -> Any:
    """Widen a float16."""
    return float32(uint16), lambda _c, b, _s, args: _emit_half(b, args[0], convert="widen")


@jit
def bfloat_of(x: Any) -> Any:
    """Round to nearest, ties to even; a NaN stays one."""
    bits = bits_of(x)
    rounded = uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1)))
    return uint16((rounded if x == x else bits | uint32(0x400000)) >> uint32(16))


@jit
def float_of_bfloat(x: Any) -> Any:
    """Widen; exact."""
    return real_of(uint32(uint32(x) << uint32(16)))


@jit
def random_word(index: Any, first: Any, second: Any) -> Any:
    """Hash a counter to 32 bits: Wellons' lowbias32 with a word of the seed before and within."""
    x = _mixed(index, first, second)
    return uint32(x ^ (x >> uint32(16)))


@jit
def random_mantissa(index: Any, first: Any, second: Any) -> Any:
    """Hash a counter to 23 bits: the upper ones before the last step, which mixes the lower."""
    return uint32(_mixed(index, first, second) >> uint32(9))


@jit
def _mixed(index: Any, first: Any, second: Any) -> Any:
    x = uint32(uint32(index) + first)
    x = uint32((x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32((x ^ (x >> uint32(15))) + second)
    return uint32(x * uint32(0x846CA68B))


@jit
def _total(lanes: Any) -> Any:
    total = float64(0.0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


@jit
def sum_of_sizes(v: Any, count: Any, lanes: Any) -> Any:
    """Add up |v|."""
    for lane in range(LANES):
        lanes[lane] = 0.0
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += float64(abs(v[i + lane]))
    for i in range(whole, count):
        lanes[i - whole] += float64(abs(v[i]))
    return _total(lanes)


@jit
def sum_of_squares(v: Any, count: Any, lanes: Any) -> Any:
    """Sum in lanes, in double precision."""
    for lane in range(LANES):
        lanes[lane] = 0.0
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            x = float64(v[i + lane])
            lanes[lane] += x * x
    for i in range(whole, count):
        x = float64(v[i])
        lanes[i - whole] += x * x
    return _total(lanes)


@jit
def largest(v: Any, first: Any, end: Any) -> Any:
    """Return the bits of the largest |v|; those of a NaN are larger than any other."""
    words = cast(v, uint32)
    most = uint32(0)
    for i in range(first, end):
        most = max(most, uint32(words[i] & uint32(SIZE_BITS)))
    return most


@word
def negative(_context: Any, v: Any, _index: Any) -> Any:
    """Return a mask of which of 32 floats from an index on are below 0."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        row = ir.VectorType(ir.FloatType(), 32)
        place = b.bitcast(b.gep(args[0], [args[1]]), row.as_pointer())
        zeros = ir.Constant(row, [0.0] * 32)
        return b.bitcast(b.fcmp_ordered("<", b.load(place, align=4), zeros), ir.IntType(32))

    return uint32(v, int64), emit


@word
def reaching(_context: Any, words: Any, _index: Any, _least: Any) -> Any:
    """Return a mask of which of LANES floats from an index on have at least this size."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        row = ir.VectorType(ir.IntType(32), LANES)
        place = b.bitcast(b.gep(args[0], [args[1]]), row.as_pointer())
        sizes = b.and_(b.load(place, align=4), ir.Constant(row, [SIZE_BITS] * LANES))
        mask = b.icmp_unsigned(">=", sizes, _splat(b, args[2], LANES))
        return b.bitcast(mask, ir.IntType(LANES))

    return uint64(words, int64, uint32), emit


@word
def first_bit(_context: Any, _mask: Any) -> Any:
    """Return the place of the lowest bit that is set; of none their number."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return uint64(uint64), emit


@word
def bits_set(_context: Any, _mask: Any) -> Any:
    """Count the bits that are set."""
    return uint64(uint64), lambda _c, b, _s, args: b.ctpop(args[0])
