# SPDX-License-Identifier: Apache-2.0
"""The kernel: one Numba function, compiled once per operation and element type.

Theory of operation. The kernel walks the output in rows of 256 bytes of accumulators. Per row it
loads the first source, adds the other sources in rank order, divides, rounds once and stores.
Where it says "add", another operation takes the minimum, the product and so on, and divides not;
a mix multiplies each source by its weight first, and divides not either.
A row is an LLVM vector, so each step is a handful of SIMD instructions by construction: nothing
is left to the loop vectoriser, hence no run-time alias test that would send a sum in place to a
scalar loop, no index wrap-around test, and no special case for any number of sources. The
accumulator lives in registers, so n sources cost n + 1 streams of memory traffic. Elements after
the last whole row go through the same steps in rows of one element.

Rank order is the order of the address table. The same table gives the same bits on every run.
float16 and bfloat16 are stored as 16-bit words and accumulated in float32 over all sources.
Without fastmath: NaN and inf pass through, -0.0 and subnormals are kept.

Everything that decides what the machine code does must stay in this file: the cache is keyed by
its content (see cache.py). Importing this module imports Numba (118 MB); only compiler.py
may do so. Kernels run on any thread, without
the GIL, allocate nothing and never raise.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from fastps.types import DType, ReduceOp

ROW_BYTES = 256  # accumulators of one row: four 512-bit or eight 256-bit registers
MAX_DIVISOR = 2**31 - 1  # keeps the floor division of int64 exact in float64 arithmetic
OK = 1  # 0 is what a Numba callback returns after an exception
BAD_ARGUMENT = -4  # E_PROTOCOL of _core.pxd

# Numba's types are incomplete, so what lacks them is called through Any.
_cfunc: Any = numba.cfunc
_settings: Any = numba.config
_declare: Any = cgutils.get_or_insert_function
_Model: Any = models.PrimitiveModel
_Pointer: Any = types.CPointer

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

_BYTES = {_I8: 1, _I16: 2, _I32: 4, _I64: 8, _F32: 4, _F64: 8}

_Unary = Callable[[Any, Any], Any]  # (builder, row) -> row
_Binary = Callable[[Any, Any, Any], Any]  # (builder, row, row or divisor) -> row
_Emit = Callable[[Any, Any, Any, Any], Any]  # code generator of an intrinsic


# ---- what LLVM emits for one row; b is the IR builder, x and y are vectors ----
def _vector(element: Any, like: Any) -> Any:
    return ir.VectorType(element, like.type.count)


def _constant(value: float, like: Any) -> Any:
    return ir.Constant(like.type, [value] * like.type.count)


def _splat(b: Any, scalar: Any, count: int) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return b.shuffle_vector(first, undefined, lanes)


def _intrinsic(name: str) -> Callable[..., Any]:
    """Call what LLVM has for whole vectors."""

    def emit(b: Any, *rows: Any) -> Any:
        kind = rows[0].type
        letter = "f" if kind.element in (_F32, _F64) else "i"
        typed = f"llvm.{name}.v{kind.count}{letter}{8 * _BYTES[kind.element]}"
        return b.call(_declare(b.module, ir.FunctionType(kind, [kind] * len(rows)), typed), rows)

    return emit


def _instruction(name: str) -> _Binary:
    return lambda b, x, y: getattr(b, name)(x, y)


_floor = _intrinsic("floor")


def _same(_b: Any, x: Any) -> Any:
    return x


def _half_to_float(b: Any, x: Any) -> Any:
    return b.fpext(b.bitcast(x, _vector(_F16, x)), _vector(_F32, x))


def _float_to_half(b: Any, x: Any) -> Any:
    return b.bitcast(b.fptrunc(x, _vector(_F16, x)), _vector(_I16, x))


def _half_to_float_portably(b: Any, x: Any) -> Any:
    """Do without conversion instructions: shift, then mend the exponent by a multiplication."""
    wide = b.zext(x, _vector(_I32, x))
    sign = b.shl(b.and_(wide, _constant(0x8000, wide)), _constant(16, wide))
    size = b.shl(b.and_(wide, _constant(0x7FFF, wide)), _constant(13, wide))
    real = b.bitcast(size, _vector(_F32, x))
    finite = b.bitcast(b.fmul(real, _constant(2.0**112, real)), size.type)
    endless = b.or_(size, _constant(0x7F800000, size))  # inf and NaN
    is_endless = b.icmp_unsigned(">=", size, _constant(0x0F800000, size))
    return b.bitcast(b.or_(sign, b.select(is_endless, endless, finite)), real.type)


def _float_to_half_portably(b: Any, x: Any) -> Any:
    """Do without conversion instructions; to nearest, ties to even, a NaN stays a NaN."""
    bits = b.bitcast(x, _vector(_I32, x))
    sign = b.lshr(b.and_(bits, _constant(0x80000000, bits)), _constant(16, bits))
    size = b.and_(bits, _constant(0x7FFFFFFF, bits))
    is_odd = b.and_(b.lshr(size, _constant(13, size)), _constant(1, size))
    moved = b.add(b.add(size, _constant(0xC8000FFF, size)), is_odd)  # exponent less 112
    normal = b.lshr(moved, _constant(13, size))
    half = b.fadd(b.bitcast(size, x.type), _constant(0.5, x))  # its last place is 2**-24
    small = b.sub(b.bitcast(half, bits.type), _constant(0x3F000000, bits))
    is_small = b.icmp_unsigned("<", size, _constant(0x38800000, size))
    is_nan = b.icmp_unsigned(">", size, _constant(0x7F800000, size))
    large = b.select(is_nan, _constant(0x7E00, size), _constant(0x7C00, size))
    is_large = b.icmp_unsigned(">=", size, _constant(0x47800000, size))
    word = b.select(is_large, large, b.select(is_small, small, normal))
    return b.trunc(b.or_(sign, word), _vector(_I16, x))


def _has_half_instructions() -> bool:
    """Return whether the target converts float16; if not, LLVM would call a function it lacks."""
    if platform.machine() == "aarch64":
        return True
    if _settings.CPU_NAME not in (None, "host", llvmlite.binding.get_host_cpu_name()):
        return "+f16c" in (_settings.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


def _lanes(b: Any, x: Any, y: Any, first: int, count: int) -> Any:
    """Return `count` lanes of x and y laid end to end."""
    numbers = ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))
    return b.shuffle_vector(x, y, numbers)


def _bfloat_to_float(b: Any, x: Any) -> Any:
    """Move 16 bits up. Even elements come before odd ones, which saves the slow widening.

    All sources are permuted alike and _float_to_bfloat undoes it.
    """
    count = x.type.count
    if count == 1:
        wide = b.zext(x, _vector(_I32, x))
        return b.bitcast(b.shl(wide, _constant(16, wide)), _vector(_F32, x))
    pairs = b.bitcast(x, ir.VectorType(_I32, count // 2))
    even, odd = b.shl(pairs, _constant(16, pairs)), b.and_(pairs, _constant(0xFFFF0000, pairs))
    return b.bitcast(_lanes(b, even, odd, 0, count), _vector(_F32, x))


def _float_to_bfloat(b: Any, x: Any) -> Any:
    """Round to nearest, ties to even, by integer arithmetic; a NaN stays a (quiet) NaN.

    The hardware instruction is not used: it flushes subnormals to zero. The NaN test compares
    the float with itself, which vectorises better than a test on bits.
    """
    bits = b.bitcast(x, _vector(_I32, x))
    is_odd = b.and_(b.lshr(bits, _constant(16, bits)), _constant(1, bits))
    rounded = b.add(bits, b.add(is_odd, _constant(0x7FFF, bits)))
    quiet = b.or_(bits, _constant(0x400000, bits))
    return _upper_halves(b, b.select(b.fcmp_ordered("==", x, x), rounded, quiet))


def _upper_halves(b: Any, word: Any) -> Any:
    """Take the upper 16 bits of words that are in the order of _bfloat_to_float."""
    count = word.type.count
    if count == 1:
        return b.trunc(b.lshr(word, _constant(16, word)), _vector(_I16, word))
    even, odd = (_lanes(b, word, word, first, count // 2) for first in (0, count // 2))
    pairs = b.or_(b.lshr(even, _constant(16, even)), b.and_(odd, _constant(0xFFFF0000, odd)))
    return b.bitcast(pairs, ir.VectorType(_I16, count))


def _bfloat_as_it_was(b: Any, x: Any) -> Any:
    return _upper_halves(b, b.bitcast(x, _vector(_I32, x)))


def _zero_or_one(b: Any, x: Any) -> Any:
    return b.zext(b.icmp_unsigned("!=", x, _constant(0, x)), x.type)


def _times_reciprocal(b: Any, x: Any, divisor: Any) -> Any:
    """Multiply by 1 / divisor, computed in float64 and rounded to the accumulator's type."""
    scale = b.fdiv(ir.Constant(_F64, 1.0), b.sitofp(divisor, _F64))
    if x.type.element == _F32:
        scale = b.fptrunc(scale, _F32)
    return b.fmul(x, _splat(b, scale, x.type.count))


def _floor_quotient(b: Any, x: Any, divisor: Any, real: Any) -> Any:
    """Return floor(x / divisor) as float row; exact while `real` holds every value of x.

    The quotient nearest below an integer k is k - 1 / divisor, far more than half a unit in the
    last place away from k, so the correctly rounded division never reaches k.
    """
    return _floor(b, b.fdiv(x, _splat(b, b.sitofp(divisor, real), x.type.count)))


def _floor_divide_unsigned(b: Any, x: Any, divisor: Any) -> Any:
    row = b.uitofp(x, _vector(_F32, x))
    return b.fptoui(_floor_quotient(b, row, divisor, _F32), x.type)


def _floor_divide_short(b: Any, x: Any, divisor: Any) -> Any:
    row = b.sitofp(x, _vector(_F32, x))
    return b.fptosi(_floor_quotient(b, row, divisor, _F32), x.type)


def _floor_divide(b: Any, x: Any, divisor: Any) -> Any:
    row = b.sitofp(x, _vector(_F64, x))
    return b.fptosi(_floor_quotient(b, row, divisor, _F64), x.type)


def _floor_divide_long(b: Any, x: Any, divisor: Any) -> Any:
    """Divide twice: the first quotient is within 2**11 of the true one, the remainder mends it.

    With divisor <= MAX_DIVISOR the remainder is below 2**44 and so exact in float64; the
    products wrap, which cancels in the difference. Many times faster than 64-bit idiv.
    """
    guess = _floor_divide(b, x, divisor)
    rest = b.sub(x, b.mul(guess, _splat(b, divisor, x.type.count)))
    return b.add(guess, _floor_divide(b, rest, divisor))


def _keep(_b: Any, x: Any, _divisor: Any) -> Any:
    return x


class Form(NamedTuple):
    """How one element type is stored, accumulated and rounded."""

    storage: Any  # LLVM type in memory
    accumulator: Any  # LLVM type in registers
    widen: _Unary
    plus: _Binary
    divide: _Binary
    narrow: _Unary
    others: dict[ReduceOp, _Binary]  # what stands for plus in other operations
    max_divisor: int = MAX_DIVISOR  # 0: there is none


_fadd, _add, _or = _instruction("fadd"), _instruction("add"), _instruction("or_")
# IEEE 754's minimum and maximum: a NaN wins, and -0.0 is less than 0.0, in any order of sources.
_FLOATS: dict[ReduceOp, _Binary] = {
    ReduceOp.MIN: _intrinsic("minimum"),
    ReduceOp.MAX: _intrinsic("maximum"),
    ReduceOp.PRODUCT: _instruction("fmul"),
}
_BITS: dict[ReduceOp, _Binary] = {
    ReduceOp.BAND: _instruction("and_"),
    ReduceOp.BOR: _or,
    ReduceOp.BXOR: _instruction("xor"),
}
_INTEGERS = _BITS | {
    ReduceOp.MIN: _intrinsic("smin"),
    ReduceOp.MAX: _intrinsic("smax"),
    ReduceOp.PRODUCT: _instruction("mul"),
}
_UNSIGNED = _INTEGERS | {ReduceOp.MIN: _intrinsic("umin"), ReduceOp.MAX: _intrinsic("umax")}
_BOOLS = _BITS | {
    ReduceOp.MIN: _BITS[ReduceOp.BAND],
    ReduceOp.MAX: _or,
    ReduceOp.PRODUCT: _BITS[ReduceOp.BAND],
}

_HALF = Form(_I16, _F32, _half_to_float, _fadd, _times_reciprocal, _float_to_half, _FLOATS)
_PORTABLE_HALF = _HALF._replace(widen=_half_to_float_portably, narrow=_float_to_half_portably)

FORMS: dict[DType, Form] = {
    DType.FLOAT32: Form(_F32, _F32, _same, _fadd, _times_reciprocal, _same, _FLOATS),
    DType.FLOAT64: Form(_F64, _F64, _same, _fadd, _times_reciprocal, _same, _FLOATS),
    DType.FLOAT16: _HALF if _has_half_instructions() else _PORTABLE_HALF,
    DType.BFLOAT16: _HALF._replace(widen=_bfloat_to_float, narrow=_float_to_bfloat),
    DType.INT8: Form(_I8, _I8, _same, _add, _floor_divide_short, _same, _INTEGERS),
    DType.INT16: Form(_I16, _I16, _same, _add, _floor_divide_short, _same, _INTEGERS),
    DType.INT32: Form(_I32, _I32, _same, _add, _floor_divide, _same, _INTEGERS),
    DType.INT64: Form(_I64, _I64, _same, _add, _floor_divide_long, _same, _INTEGERS),
    DType.UINT8: Form(_I8, _I8, _same, _add, _floor_divide_unsigned, _same, _UNSIGNED),
    DType.BOOL: Form(_I8, _I8, _same, _or, _keep, _zero_or_one, _BOOLS, max_divisor=1),
    DType.UINT16: Form(_I16, _I16, _same, _add, _floor_divide_unsigned, _same, _UNSIGNED),
}


def form_of(op: ReduceOp, code: DType) -> Form:
    """Return how an operation treats an element type, for which it must have a meaning."""
    form = FORMS[code]
    if op is ReduceOp.SUM:
        return form
    if op >= ReduceOp.MIX:
        return form._replace(max_divisor=0)
    # Any byte but 0 is true: 1 and 2 have no bit in common.
    widen = _zero_or_one if code is DType.BOOL else form.widen
    is_exact = code is DType.BFLOAT16 and op in (ReduceOp.MIN, ReduceOp.MAX)
    narrow = _bfloat_as_it_was if is_exact else form.narrow
    return form._replace(plus=form.others[op], widen=widen, narrow=narrow, max_divisor=0)


# ---- the two types Numba sees ----
class Element(types.Type):
    """One element in memory, of the given wire code, and what is done to it."""

    def __init__(self, op: ReduceOp, code: DType) -> None:
        self.form = form_of(op, code)
        self.is_weighted = op is ReduceOp.MIX
        self.width = ROW_BYTES // _BYTES[self.form.accumulator]
        super().__init__(name=f"fastps_{op.name}_{code.name}".lower())


class Row(types.Type):
    """`width` accumulators of one element type, in registers."""

    def __init__(self, element: Element, width: int) -> None:
        self.element = element
        self.width = width
        super().__init__(name=f"row({element.name} x {width})")


def _element_model(manager: Any, element: Element) -> Any:
    return _Model(manager, element, element.form.storage)


def _row_model(manager: Any, row: Row) -> Any:
    vector = ir.VectorType(row.element.form.accumulator, row.width)
    return _Model(manager, row, vector)


register_model(Element)(_element_model)
register_model(Row)(_row_model)


# ---- the words the kernel is written in ----
def _word(function: Callable[..., tuple[Any, _Emit]]) -> Any:
    return intrinsic(prefer_literal=True)(function)


def _load(b: Any, pointer: Any, index: Any, row: Row) -> Any:
    form = row.element.form
    place = b.bitcast(b.gep(pointer, [index]), ir.VectorType(form.storage, row.width).as_pointer())
    return form.widen(b, b.load(place, align=_BYTES[form.storage]))


def _weighted(b: Any, x: Any, weights: Any, number: Any, row: Row) -> Any:
    """Multiply the row of a source by its weight, a float64 rounded to the accumulator's type."""
    if not row.element.is_weighted:
        return x
    weight = b.load(b.gep(b.bitcast(weights, _F64.as_pointer()), [number]))
    if row.element.form.accumulator == _F32:
        weight = b.fptrunc(weight, _F32)
    return b.fmul(x, _splat(b, weight, row.width))


@_word
def _first(_context: Any, source: Any, index: Any, weights: Any, whole: Any) -> tuple[Any, _Emit]:
    """Load a whole row (or one element) of the first source, in the accumulator's type."""
    row = Row(source.dtype, source.dtype.width if whole.literal_value else 1)

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        x = _load(b, args[0], args[1], row)
        return _weighted(b, x, args[2], ir.Constant(_I64, 0), row)

    return row(source, types.int64, weights, whole), emit


@_word
def _plus(
    _context: Any, row: Any, source: Any, index: Any, weights: Any, number: Any
) -> tuple[Any, _Emit]:
    """Add the row of the source of a number."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        x = _load(b, args[1], args[2], row)
        return row.element.form.plus(b, args[0], _weighted(b, x, args[3], args[4], row))

    return row(row, source, types.int64, weights, types.int64), emit


@_word
def _divided(_context: Any, row: Any, divisor: Any) -> tuple[Any, _Emit]:
    """Divide a row by the divisor."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return row.element.form.divide(b, args[0], args[1])

    return row(row, types.int64), emit


@_word
def _store(_context: Any, target: Any, index: Any, row: Any) -> tuple[Any, _Emit]:
    """Round a row to the stored type and write it."""

    def emit(context: Any, b: Any, _s: Any, args: Any) -> Any:
        form = row.element.form
        value = form.narrow(b, args[2])
        place = b.bitcast(b.gep(args[0], [args[1]]), value.type.as_pointer())
        b.store(value, place, align=_BYTES[form.storage])
        return context.get_dummy_value()

    return types.void(target, types.int64, row), emit


@_word
def _address(_context: Any, pointer: Any) -> tuple[Any, _Emit]:
    """Return a pointer as a number."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.ptrtoint(args[0], _I64)

    return types.int64(pointer), emit


def _number_of(pointer: Any, number: int) -> tuple[Any, _Emit]:
    return types.int64(pointer), lambda _c, _b, _s, _args: ir.Constant(_I64, number)


@_word
def _width(_context: Any, target: Any) -> tuple[Any, _Emit]:
    """Return the elements of one row."""
    return _number_of(target, target.dtype.width)


@_word
def _itemsize(_context: Any, target: Any) -> tuple[Any, _Emit]:
    """Return the bytes of one stored element."""
    return _number_of(target, _BYTES[target.dtype.form.storage])


@_word
def _is_weighted(_context: Any, target: Any) -> tuple[Any, _Emit]:
    """Return 1 where each source has a weight, else 0."""
    return _number_of(target, int(target.dtype.is_weighted))


@_word
def _max_divisor(_context: Any, target: Any) -> tuple[Any, _Emit]:
    """Return the largest divisor the element type allows."""
    return _number_of(target, target.dtype.form.max_divisor)


# ---- the kernel ----
def _reduce(srcs: Any, n_srcs: int, dst: Any, count: int, args: Any) -> int:
    """Sum n sources in rank order and divide: dst[i] = (srcs[0][i] + srcs[1][i] + ...) / divisor.

    Another operation puts its own sign for the +, and neither divides nor looks at args. A mix
    is weights[0] * srcs[0][i] + weights[1] * srcs[1][i] + ..., each product and sum rounded.

    srcs: table of n_srcs addresses of element[count], contiguous, aligned to the element, IN.
    dst: element[count], OUT; each source is dst itself or disjoint from it. args: int64[1], IN,
    the divisor, 1 to MAX_DIVISOR (bool: 1); of a mix weights, float64[n_srcs]. Floats are
    multiplied by 1 / divisor in the accumulator's type; integers wrap, then divide towards minus
    infinity; bool is a logical or.
    Runs without the GIL; allocates nothing; (n_srcs + 1) * count elements of memory traffic.
    Returns OK, or BAD_ARGUMENT before anything was written.
    """
    divisor = 1
    if _max_divisor(dst) != 0:
        if _address(args) == 0:
            return BAD_ARGUMENT
        divisor = args[0]
        if divisor < 1 or divisor > _max_divisor(dst):
            return BAD_ARGUMENT
    if n_srcs < 1 or count < 0 or (_is_weighted(dst) != 0 and _address(args) == 0):
        return BAD_ARGUMENT
    if count == 0:
        return OK
    if _address(srcs) == 0 or _address(dst) == 0:
        return BAD_ARGUMENT
    size = _itemsize(dst)
    nbytes = count * size
    for j in range(n_srcs):
        place = _address(srcs[j])
        gap = place - _address(dst)
        if place == 0 or (place | gap) & (size - 1) != 0:
            return BAD_ARGUMENT
        if -nbytes < gap and gap < nbytes and gap != 0:
            return BAD_ARGUMENT
    is_same = n_srcs == 1 and divisor == 1 and _address(srcs[0]) == _address(dst)
    if is_same and _is_weighted(dst) == 0:
        return OK
    width = _width(dst)
    whole = count - (count & (width - 1))
    for i in range(0, whole, width):
        row = _first(srcs[0], i, args, True)
        for j in range(1, n_srcs):
            row = _plus(row, srcs[j], i, args, j)
        if divisor != 1:
            row = _divided(row, divisor)
        _store(dst, i, row)
    for i in range(whole, count):
        one = _first(srcs[0], i, args, False)
        for j in range(1, n_srcs):
            one = _plus(one, srcs[j], i, args, j)
        if divisor != 1:
            one = _divided(one, divisor)
        _store(dst, i, one)
    return OK


def compile_kernel(op: ReduceOp, code: DType) -> Any:
    """Compile a kernel for one element type and give Numba's callback object.

    The address is valid as long as the object lives. Takes about 0.1 s, the first time in a
    process about 0.6 s.
    """
    pointer = _Pointer(Element(op, code))
    args = _Pointer(types.int64)
    signature = types.int64(_Pointer(pointer), types.int64, pointer, types.int64, args)
    make = _cfunc(signature, error_model="numpy", boundscheck=False, _nrt=False)
    return make(_reduce)
