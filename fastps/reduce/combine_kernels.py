# SPDX-License-Identifier: Apache-2.0
"""Kernels for a fixed number of sources that may lie: elements are put in order by a network.

Made of the words of kernels.py, by rows of one cache line, in the same types, on any thread,
without the GIL. Comparisons are fixed beforehand (Batcher, "Sorting networks and their
applications", AFIPS 1968), so a row of each source is loaded once, and 19 pairs of minimum and
maximum put eight of them in order in registers. robust.py does the same for any number of sources
by counting, many times slower. Everything that decides what the machine code does must stay
here, in robust.py and in kernels.py: the cache is keyed by their content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import register_model

from fastps.reduce import kernels, robust
from fastps.reduce.kernels import BAD_ARGUMENT, OK, Element, Row
from fastps.types import DType, ReduceOp

NOT_FINITE = 2  # what was made is not to be used: some source has NaN or infinity
KINDS = ("average", "trimmed", "around_median", "phocas")
_LINE_BYTES = 64

_word, _load, _Pointer, _address = kernels._word, kernels._load, kernels._Pointer, kernels._address
_put_row, _I64 = kernels._store, ir.IntType(64)


class Ordered(Element):
    """An element of one of n sources, and what is made of them; trim: how many lie at an end."""

    def __init__(self, kind: str, code: DType, n: int, trim: int) -> None:
        super().__init__(ReduceOp.TRIMMED_MEAN, code)
        self.kind, self.n, self.trim = kind, n, trim
        self.width = _LINE_BYTES // kernels._BYTES[self.form.accumulator]
        types.Type.__init__(self, name=f"fastps_{kind}_{n}_{trim}_{code.name}".lower())


register_model(Ordered)(kernels._element_model)


def comparisons(n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of Batcher's odd-even merge sort, for any n."""
    step = 1
    while step < n:
        gap = step
        while gap:
            for first in range(gap % step, n - gap, 2 * gap):
                for low in range(first, min(first + gap, n - gap)):
                    if low // (2 * step) == (low + gap) // (2 * step):
                        yield low, low + gap
            gap //= 2
        step *= 2


# ---- what LLVM emits for rows; b is the IR builder ----
def _zeros(like: Any) -> Any:
    return ir.Constant(like, [0.0] * like.count)


def _sorted(b: Any, rows: list[Any]) -> list[Any]:
    rows = list(rows)
    for low, high in comparisons(len(rows)):
        x, y = rows[low], rows[high]
        rows[low] = b.select(b.fcmp_ordered("<", x, y), x, y)
        rows[high] = b.select(b.fcmp_ordered(">", x, y), x, y)
    return rows


def _total(b: Any, rows: list[Any]) -> Any:
    total = rows[0]
    for row in rows[1:]:
        total = b.fadd(total, row)
    return total


def _mean(b: Any, rows: list[Any], element: Ordered) -> Any:
    total = _total(b, rows)
    if len(rows) == 1:
        return total
    return element.form.divide(b, total, ir.Constant(_I64, len(rows)))


def _middle(b: Any, rows: list[Any], trim: int, element: Ordered) -> Any:
    return _mean(b, rows[trim : len(rows) - trim], element)


def _mean_near(b: Any, rows: list[Any], center: Any, element: Ordered) -> Any:
    """Average the n - trim nearest to the center: of rows in order they lie side by side.

    The k-th smallest is left out if the (k + n - trim)-th is nearer, which is then in.
    """
    trim, keep = element.trim, len(rows) - element.trim
    is_out = [
        b.fcmp_ordered(">", b.fsub(center, low), b.fsub(high, center))
        for low, high in zip(rows, rows[keep:], strict=False)
    ]
    total = _zeros(rows[0].type)
    for place, row in enumerate(rows):
        kept = row
        if place < trim:
            kept = b.select(is_out[place], _zeros(row.type), kept)
        if place >= keep:
            kept = b.select(is_out[place - keep], kept, _zeros(row.type))
        total = b.fadd(total, kept)
    return element.form.divide(b, total, ir.Constant(_I64, keep))


def _made(b: Any, rows: list[Any], element: Ordered) -> Any:
    if element.kind == "average":
        return _mean(b, rows, element)
    ordered = _sorted(b, rows)
    if element.kind == "trimmed":
        return _middle(b, ordered, element.trim, element)
    trim = element.trim if element.kind == "phocas" else (len(rows) - 1) // 2
    return _mean_near(b, ordered, _middle(b, ordered, trim, element), element)


# ---- words ----
@_word
def _none(_context: Any, target: Any, whole: Any) -> tuple[Any, Any]:
    """Return a row of zeros, in the accumulator's type."""
    row = Row(target.dtype, target.dtype.width if whole.literal_value else 1)
    zeros = _zeros(ir.VectorType(row.element.form.accumulator, row.width))
    return row(target, whole), lambda _c, _b, _s, _args: zeros


@_word
def _loaded(_context: Any, srcs: Any, index: Any, flaw: Any) -> tuple[Any, Any]:
    """Make a row of the result; flaw: the type of row alone counts."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        rows = []
        for number in range(flaw.element.n):
            source = b.load(b.gep(args[0], [ir.Constant(_I64, number)]))
            rows.append(_load(b, source, args[1], flaw))
        return _made(b, rows, flaw.element)

    return flaw(srcs, types.int64, flaw), emit


@_word
def _flawed(_context: Any, flaw: Any, srcs: Any, index: Any) -> tuple[Any, Any]:
    """Add 0 times the sum of all sources: it stays 0 as long as all are finite."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        rows = []
        for number in range(flaw.element.n):
            source = b.load(b.gep(args[1], [ir.Constant(_I64, number)]))
            rows.append(_load(b, source, args[2], flaw))
        total = _total(b, rows)
        return b.fadd(args[0], b.fmul(total, _zeros(total.type)))

    return flaw(flaw, srcs, types.int64), emit


@_word
def _is_zero(_context: Any, flaw: Any) -> tuple[Any, Any]:
    """Return 1 where a row is all zeros, else 0."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        found = ir.Constant(ir.IntType(1), 1)
        same = b.fcmp_ordered("==", args[0], _zeros(args[0].type))
        for lane in range(flaw.width):
            one = b.extract_element(same, ir.Constant(ir.IntType(32), lane))
            found = b.and_(found, one)
        return b.zext(found, _I64)

    return types.int64(flaw), emit


@_word
def _count_of(_context: Any, target: Any) -> tuple[Any, Any]:
    """Return the number of sources."""
    return kernels._number_of(target, target.dtype.n)


# ---- the kernel ----
def _ordered(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Make of n sources, element by element, what a rule says; in one pass.

    srcs: table of n_srcs addresses of element[count], IN, as many as it was compiled for. dst:
    element[count], OUT; each source is dst itself or disjoint from it. args: nothing. With s_1 to
    s_n an element of all sources in order: trimmed gives the mean of s without `trim` at either
    end (the median for trim = (n - 1) / 2); around_median that of the n - trim nearest to the
    median, of two as near the smaller; phocas to the trimmed mean. average is one over all, in
    the order of sources. Sums are made in this order in the accumulator's type and rounded once.
    Runs without the GIL; allocates nothing. Returns OK; NOT_FINITE where the sum of all sources
    is not a finite number, and dst then holds nothing that means anything; or BAD_ARGUMENT before
    anything was written.
    """
    if _address(srcs) == 0 or n_srcs != _count_of(dst) or count < 0:
        return BAD_ARGUMENT
    if _address(dst) == 0 and count > 0:
        return BAD_ARGUMENT
    width = kernels._width(dst)
    whole = count - (count & (width - 1))
    flaw = _none(dst, True)
    for i in range(0, whole, width):
        made = _loaded(srcs, i, flaw)
        flaw = _flawed(flaw, srcs, i)
        _put_row(dst, i, made)
    rest = _none(dst, False)
    for i in range(whole, count):
        one = _loaded(srcs, i, rest)
        rest = _flawed(rest, srcs, i)
        _put_row(dst, i, one)
    if _is_zero(flaw) + _is_zero(rest) == 2:
        return OK
    return NOT_FINITE


def compile_ordered(kind: str, code: DType, n: int, trim: int) -> Any:
    """Compile what a rule makes of n sources, as kernels.compile_kernel() does a sum."""
    pointer = _Pointer(Ordered(kind, code, n, trim))
    return robust._compile(_ordered, pointer, pointer)
