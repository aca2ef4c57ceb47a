# SPDX-License-Identifier: Apache-2.0
"""Kernels for sources that may lie: means of what lies in the middle, and distances.

Made of the words of kernels.py, by rows and in the same types, on any thread, without the GIL. An
element's place among n is found by comparing it with all others, which needs no memory and no
branch: n^2 comparisons of rows that are in the first cache. Everything that decides what the
machine code does must stay here and in kernels.py: the cache is keyed by their content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types

from fastps.reduce import kernels
from fastps.reduce.kernels import BAD_ARGUMENT, OK, Element, Row
from fastps.types import DType, ReduceOp

# What kernels.py says of its own words; Numba takes them for functions of this file.
_word, _load, _splat, _Pointer = kernels._word, kernels._load, kernels._splat, kernels._Pointer
_store, _divided, _width, _address = (
    kernels._store, kernels._divided, kernels._width, kernels._address,
)  # fmt: skip
_njit: Any = numba.njit
_plus_product = kernels._intrinsic("fmuladd")  # fused where the processor does that as fast
_I64, _F64 = ir.IntType(64), ir.DoubleType()
BLOCK = 1024  # elements of each source between which distances are added: in the first cache
LEAST, MOST = 2.0**-80, 1e300  # sums of float32 squares below or above may miss some of them


def _inlined(function: Callable[..., Any]) -> Any:
    """Let kernels call a function whose code becomes part of theirs."""
    return _njit(function, error_model="numpy", boundscheck=False, _nrt=False, forceinline=True)


def _is_less(b: Any, x: Any, y: Any) -> Any:
    """Compare two rows; a NaN is the largest, and equal to any other."""
    return b.and_(b.fcmp_unordered("<", x, y), b.fcmp_ordered("ord", x, x))


def _number_row(b: Any, number: Any, like: Any) -> Any:
    return _splat(b, b.sitofp(number, like.type.element), like.type.count)


# ---- words ----
@_word
def _row(_context: Any, source: Any, index: Any, like: Any) -> tuple[Any, Any]:
    """Load a row of a source, as wide as another row."""
    row = Row(source.dtype, like.width)

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return _load(b, args[0], args[1], row)

    return row(source, types.int64, like), emit


@_word
def _nothing(_context: Any, target: Any, source: Any, whole: Any) -> tuple[Any, Any]:
    """Return zeros of the target's type: as many as a whole row of the source has, or one."""
    row = Row(target.dtype, source.dtype.width if whole.literal_value else 1)
    zeros = ir.Constant(ir.VectorType(row.element.form.accumulator, row.width), [0.0] * row.width)
    return row(target, source, whole), lambda _c, _b, _s, _args: zeros


@_word
def _placed(_context: Any, place: Any, x: Any, other: Any, is_first: Any) -> tuple[Any, Any]:
    """Add 1 to the places of x where the other source comes before it; is_first: also if equal."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        is_later = b.not_(_is_less(b, args[1], args[2]))
        is_before = is_later if is_first.literal_value else _is_less(b, args[2], args[1])
        return b.fadd(args[0], b.uitofp(is_before, args[0].type))

    return place(place, x, other, is_first), emit


@_word
def _kept(
    _context: Any, total: Any, x: Any, place: Any, low: Any, high: Any
) -> tuple[Any, Any]:  # fmt: skip
    """Add x to a total where its place is low or more and less than high."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        total, x, place, low, high = args
        is_in = b.and_(
            b.fcmp_ordered(">=", place, _number_row(b, low, place)),
            b.fcmp_ordered("<", place, _number_row(b, high, place)),
        )
        return b.fadd(total, b.select(is_in, x, ir.Constant(x.type, [0.0] * x.type.count)))

    return total(total, x, place, types.int64, types.int64), emit


@_word
def _squared(_context: Any, total: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Add the squares of x - y, in float64."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        wide = [one if one.type == args[0].type else b.fpext(one, args[0].type)
                for one in args[1:]]  # fmt: skip
        gap = b.fsub(*wide)
        return b.fadd(args[0], b.fmul(gap, gap))

    return total(total, x, y), emit


@_word
def _sum_of(_context: Any, row: Any) -> tuple[Any, Any]:
    """Add the lanes of a row of float64, in their order."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        total = ir.Constant(_F64, 0.0)
        for lane in range(row.width):
            total = b.fadd(total, b.extract_element(args[0], ir.Constant(ir.IntType(32), lane)))
        return total

    return types.float64(row), emit


@_word
def _put(_context: Any, target: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """Write one float64."""

    def emit(context: Any, b: Any, _s: Any, args: Any) -> Any:
        b.store(args[2], b.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(target, types.int64, types.float64), emit


@_word
def _gapped(_context: Any, total: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Add the squares of x - y, which is made in the accumulator's type, in the total's type."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        gap = b.fsub(args[1], args[2])
        wide = gap if gap.type == args[0].type else b.fpext(gap, args[0].type)
        return _plus_product(b, wide, wide, args[0])

    return total(total, x, y), emit


@_word
def _times(_context: Any, total: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Add the products of x and y, in float64."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        wide = [one if one.type == args[0].type else b.fpext(one, args[0].type)
                for one in args[1:]]  # fmt: skip
        return _plus_product(b, *wide, args[0])

    return total(total, x, y), emit


@_word
def _folded(_context: Any, row: Any) -> tuple[Any, Any]:
    """Add the lanes of a row in float64, halves to halves."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        total, count = args[0], row.width
        if total.type.element != _F64:
            total = b.fpext(total, ir.VectorType(_F64, count))
        while count > 1:
            count //= 2
            total = b.fadd(
                kernels._lanes(b, total, total, 0, count),
                kernels._lanes(b, total, total, count, count),
            )
        return b.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float64(row), emit


@_word
def _at(_context: Any, target: Any, index: Any) -> tuple[Any, Any]:
    """Read one float64."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.load(b.gep(args[0], [args[1]]))

    return types.float64(target, types.int64), emit


@_word
def _nearer(
    _context: Any, place: Any, x: Any, other: Any, center: Any, is_first: Any
) -> tuple[Any, Any]:
    """Add 1 to the places of x where the other source is nearer to the center.

    Of two as near the smaller is, of equal ones the first.
    """

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        place, x, y, center = args[:4]
        mine, its = (_distance(b, one, center) for one in (x, y))
        is_before = b.fcmp_ordered("<=" if is_first.literal_value else "<", y, x)
        is_as_near = b.and_(b.fcmp_ordered("==", its, mine), is_before)
        is_nearer = b.or_(b.fcmp_ordered("<", its, mine), is_as_near)
        return b.fadd(place, b.uitofp(is_nearer, place.type))

    return place(place, x, other, center, is_first), emit


def _distance(b: Any, x: Any, center: Any) -> Any:
    gap = b.fsub(x, center)
    is_below = b.fcmp_ordered("<", gap, ir.Constant(gap.type, [0.0] * gap.type.count))
    return b.select(is_below, b.fneg(gap), gap)


@_word
def _voted(_context: Any, total: Any, x: Any) -> tuple[Any, Any]:
    """Add 1 where x is above 0, take 1 away where it is below."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.fadd(args[0], _signs(b, args[1]))

    return total(total, x), emit


@_word
def _sign(_context: Any, row: Any) -> tuple[Any, Any]:
    """Return 1, -1 or 0."""
    return row(row), lambda _c, b, _s, args: _signs(b, args[0])


def _signs(b: Any, x: Any) -> Any:
    zeros, ones, minus = (ir.Constant(x.type, [sign] * x.type.count) for sign in (0.0, 1.0, -1.0))
    below = b.select(b.fcmp_ordered("<", x, zeros), minus, zeros)
    return b.select(b.fcmp_ordered(">", x, zeros), ones, below)


# ---- kernels ----
@_inlined
def _mean_of_middle(srcs: Any, n_srcs: int, i: int, trim: int, zeros: Any) -> Any:
    """Average one row of the sources without the `trim` smallest and largest elements.

    zeros: a row of them, as wide as what is averaged.
    """
    total = zeros
    for j in range(n_srcs):
        x, place = _row(srcs[j], i, zeros), zeros
        for k in range(j):
            place = _placed(place, x, _row(srcs[k], i, zeros), True)
        for k in range(j + 1, n_srcs):
            place = _placed(place, x, _row(srcs[k], i, zeros), False)
        total = _kept(total, x, place, trim, n_srcs - trim)
    return _divided(total, n_srcs - 2 * trim)


@_inlined
def _mean_of_nearest(srcs: Any, n_srcs: int, i: int, keep: int, center: Any, zeros: Any) -> Any:
    """Average the `keep` elements of the sources nearest to the center, for one row."""
    total = zeros
    for j in range(n_srcs):
        x, place = _row(srcs[j], i, zeros), zeros
        for k in range(j):
            place = _nearer(place, x, _row(srcs[k], i, zeros), center, True)
        for k in range(j + 1, n_srcs):
            place = _nearer(place, x, _row(srcs[k], i, zeros), center, False)
        total = _kept(total, x, place, 0, keep)
    return _divided(total, keep)


def _trimmed_mean(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Average, element by element, what is left without the largest and the smallest.

    dst[i] = sum of x over the x in sources with trim <= place(x) < n - trim, / (n - 2 trim), where
    places count from 0 for the smallest of n elements i; of equal ones the earlier source comes
    first. The median is trim = (n - 1) / 2, rounded down: of even n the mean of the middle two.

    srcs: table of n_srcs addresses of element[count], IN. dst: element[count], OUT; each source is
    dst itself or disjoint from it. args: int64[1], IN, trim, 0 or more and 2 trim < n. Kept ones
    are added in the order of sources, in the accumulator's type, and rounded once. NaN counts as
    larger than all: it is trimmed as such, and where more sources than trim have one, some may be
    kept and the result be NaN. A sum begins with 0.0, so none is -0.0. Runs without the GIL;
    allocates nothing. Returns OK, or BAD_ARGUMENT before anything was written.
    Source: Yin, Chen, Ramchandran and Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", ICML 2018, definitions 1 and 2.
    """
    if _address(srcs) == 0 or _address(args) == 0 or n_srcs < 1 or count < 0:
        return BAD_ARGUMENT
    trim = args[0]
    if trim < 0 or trim > (n_srcs - 1) // 2 or (_address(dst) == 0 and count > 0):
        return BAD_ARGUMENT
    width = _width(dst)
    whole = count - (count & (width - 1))
    row, one = _nothing(dst, dst, True), _nothing(dst, dst, False)
    for i in range(0, whole, width):
        _store(dst, i, _mean_of_middle(srcs, n_srcs, i, trim, row))
    for i in range(whole, count):
        _store(dst, i, _mean_of_middle(srcs, n_srcs, i, trim, one))
    return OK


def _square_distances(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Sum the squares of differences to one of the sources: dst[j] = |srcs[j] - srcs[center]|^2.

    srcs: table of n_srcs addresses of element[count], IN. dst: float64[n_srcs], OUT. args:
    int64[1], IN, center. Differences, squares and sums are of float64, by lanes and then over
    lanes: the same bits for the same count. NaN and inf pass through. Runs without the GIL;
    allocates nothing. Returns OK, or BAD_ARGUMENT before anything was written.
    """
    if _address(srcs) == 0 or _address(args) == 0 or _address(dst) == 0 or count < 0:
        return BAD_ARGUMENT
    center = args[0]
    if center < 0 or center >= n_srcs:
        return BAD_ARGUMENT
    width = _width(srcs[0])
    whole = count - (count & (width - 1))
    for j in range(n_srcs):
        rows = _nothing(dst, srcs[0], True)
        for i in range(0, whole, width):
            rows = _squared(rows, _row(srcs[j], i, rows), _row(srcs[center], i, rows))
        rest = _nothing(dst, srcs[0], False)
        for i in range(whole, count):
            rest = _squared(rest, _row(srcs[j], i, rest), _row(srcs[center], i, rest))
        _put(dst, j, _sum_of(rows) + _sum_of(rest))
    return OK


def _nearest_mean(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Average, element by element, those that are nearest to a trimmed mean.

    dst[i] = mean of the `keep` of n elements i nearest to their mean without `trim` at either end
    (for trim = (n - 1) / 2 their median); of two as near the smaller counts, of equal ones the
    earlier source. All are finite. srcs, dst, types and order as in _trimmed_mean(). args:
    int64[2], IN, trim and keep. Runs without the GIL; allocates nothing. Returns OK, or
    BAD_ARGUMENT before anything was written.
    Source: Xie, Koyejo and Gupta, "Phocas", 2018, and "Generalized Byzantine-tolerant SGD", 2018.
    """
    if _address(srcs) == 0 or _address(args) == 0 or n_srcs < 1 or count < 0:
        return BAD_ARGUMENT
    trim, keep = args[0], args[1]
    if trim < 0 or trim > (n_srcs - 1) // 2 or keep < 1 or keep > n_srcs:
        return BAD_ARGUMENT
    if _address(dst) == 0 and count > 0:
        return BAD_ARGUMENT
    width = _width(dst)
    whole = count - (count & (width - 1))
    row, one = _nothing(dst, dst, True), _nothing(dst, dst, False)
    for i in range(0, whole, width):
        center = _mean_of_middle(srcs, n_srcs, i, trim, row)
        _store(dst, i, _mean_of_nearest(srcs, n_srcs, i, keep, center, row))
    for i in range(whole, count):
        middle = _mean_of_middle(srcs, n_srcs, i, trim, one)
        _store(dst, i, _mean_of_nearest(srcs, n_srcs, i, keep, middle, one))
    return OK


def _sign_majority(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Write the majority's sign of each element: 1, -1, or 0 where as many are above as below.

    srcs, dst: as in _trimmed_mean(). args: nothing. NaN votes for nothing. Runs without the GIL;
    allocates nothing. Returns OK, or BAD_ARGUMENT before anything was written.
    Source: Bernstein et al., "signSGD with majority vote", ICLR 2019, algorithm 1.
    """
    if _address(srcs) == 0 or n_srcs < 1 or count < 0 or (_address(dst) == 0 and count > 0):
        return BAD_ARGUMENT
    width = _width(dst)
    whole = count - (count & (width - 1))
    for i in range(0, whole, width):
        total = _nothing(dst, dst, True)
        for j in range(n_srcs):
            total = _voted(total, _row(srcs[j], i, total))
        _store(dst, i, _sign(total))
    for i in range(whole, count):
        one = _nothing(dst, dst, False)
        for j in range(n_srcs):
            one = _voted(one, _row(srcs[j], i, one))
        _store(dst, i, _sign(one))
    return OK


@_inlined
def _gaps(srcs: Any, j: int, k: int, start: int, end: int, zeros: Any) -> Any:
    """Add the squares of two sources' differences by lanes, in the type and width of zeros."""
    rows = zeros
    for i in range(start, end, _width(srcs[0])):
        rows = _gapped(rows, _row(srcs[j], i, zeros), _row(srcs[k], i, zeros))
    return _folded(rows)


def _pair_distances(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Sum the squares of differences of all pairs: dst[n j + k] = |srcs[j] - srcs[k]|^2.

    srcs: table of n_srcs addresses of element[count], IN. dst: float64[n_srcs^2], OUT. args:
    nothing. Differences and their squares are of the accumulator's type, of which a lane adds 16
    in a block that stays in the first cache; lanes and blocks are added in float64: one pass over
    the sources in memory, and a relative error of about 1e-6 at most. A block whose squares leave
    the range of float32 is added in float64. NaN and inf pass through. Runs without the GIL;
    allocates nothing. Returns OK, or BAD_ARGUMENT before anything was written.
    """
    if _address(srcs) == 0 or _address(dst) == 0 or n_srcs < 1 or count < 0:
        return BAD_ARGUMENT
    width = _width(srcs[0])
    fast, slow = _nothing(srcs[0], srcs[0], True), _nothing(dst, srcs[0], True)
    for j in range(n_srcs * n_srcs):
        _put(dst, j, 0.0)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        whole = end - ((end - start) & (width - 1))
        for j in range(1, n_srcs):
            for k in range(j):
                found = _gaps(srcs, j, k, start, whole, fast)
                if not LEAST <= found <= MOST:
                    found = _gaps(srcs, j, k, start, whole, slow)
                rest = _nothing(dst, srcs[0], False)
                for i in range(whole, end):
                    rest = _gapped(rest, _row(srcs[j], i, rest), _row(srcs[k], i, rest))
                total = _at(dst, n_srcs * j + k) + (found + _folded(rest))
                _put(dst, n_srcs * j + k, total)
                _put(dst, n_srcs * k + j, total)
    return OK


def _square_norms(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Sum the squares of each source: dst[j] = |srcs[j]|^2.

    srcs: table of n_srcs addresses of element[count], IN. dst: float64[n_srcs], OUT. args:
    nothing. Squares and sums are of float64, by lanes. NaN and inf pass through. Runs without the
    GIL; allocates nothing. Returns OK, or BAD_ARGUMENT before anything was written.
    """
    if _address(srcs) == 0 or _address(dst) == 0 or n_srcs < 1 or count < 0:
        return BAD_ARGUMENT
    width = _width(srcs[0])
    whole = count - (count & (width - 1))
    for j in range(n_srcs):
        rows, none = _nothing(dst, srcs[0], True), _nothing(srcs[0], srcs[0], True)
        for i in range(0, whole, width):
            rows = _gapped(rows, _row(srcs[j], i, rows), none)
        rest, zero = _nothing(dst, srcs[0], False), _nothing(srcs[0], srcs[0], False)
        for i in range(whole, count):
            rest = _gapped(rest, _row(srcs[j], i, rest), zero)
        _put(dst, j, _folded(rows) + _folded(rest))
    return OK


def _inner_products(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Multiply each source with the last one and with itself.

    dst[2 j] = <srcs[j], srcs[n - 1]>, dst[2 j + 1] = |srcs[j]|^2.

    srcs: table of n_srcs addresses of element[count], IN. dst: float64[2 n_srcs], OUT. args:
    nothing. Products and sums are of float64, by lanes of blocks that stay in the first cache:
    one pass over the sources in memory, the same bits for the same count. NaN and inf pass
    through. Runs without the GIL; allocates nothing. Returns OK, or BAD_ARGUMENT before anything
    was written.
    """
    if _address(srcs) == 0 or _address(dst) == 0 or n_srcs < 1 or count < 0:
        return BAD_ARGUMENT
    width, last = _width(srcs[0]), n_srcs - 1
    for j in range(2 * n_srcs):
        _put(dst, j, 0.0)
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        whole = end - ((end - start) & (width - 1))
        for j in range(2 * n_srcs):
            one, other = j // 2, last if j % 2 == 0 else j // 2
            rows = _nothing(dst, srcs[0], True)
            for i in range(start, whole, width):
                rows = _times(rows, _row(srcs[one], i, rows), _row(srcs[other], i, rows))
            rest = _nothing(dst, srcs[0], False)
            for i in range(whole, end):
                rest = _times(rest, _row(srcs[one], i, rest), _row(srcs[other], i, rest))
            _put(dst, j, _at(dst, j) + (_folded(rows) + _folded(rest)))
    return OK


# By name: the function, what its sources are taken for, and whether it fills in float64.
_ROBUST: dict[str, tuple[Any, ReduceOp, bool]] = {
    "trimmed_mean": (_trimmed_mean, ReduceOp.TRIMMED_MEAN, False),
    "nearest_mean": (_nearest_mean, ReduceOp.TRIMMED_MEAN, False),
    "sign_majority": (_sign_majority, ReduceOp.TRIMMED_MEAN, False),
    "square_distances": (_square_distances, ReduceOp.MIX, True),
    "pair_distances": (_pair_distances, ReduceOp.MIX, True),
    "square_norms": (_square_norms, ReduceOp.MIX, True),
    "inner_products": (_inner_products, ReduceOp.MIX, True),
}


def compile_robust(what: str, code: DType) -> Any:
    """Compile one of these for one element type, as kernels.compile_kernel() does a sum."""
    function, op, is_measure = _ROBUST[what]
    pointer = _Pointer(Element(op, code))
    target = _Pointer(Element(ReduceOp.MIX, DType.FLOAT64)) if is_measure else pointer
    return _compile(function, pointer, target)


def _compile(function: Any, pointer: Any, target: Any) -> Any:
    args = _Pointer(types.int64)
    signature = types.int64(_Pointer(pointer), types.int64, target, types.int64, args)
    make = kernels._cfunc(signature, error_model="numpy", boundscheck=False, _nrt=False)
    return make(function)
