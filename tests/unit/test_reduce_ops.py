# SPDX-License-Identifier: Apache-2.0
"""Minimum, maximum, product and bits against NumPy: every element type, bit for bit."""

from __future__ import annotations

import ctypes
import re

import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce_oracle import (
    FLOATS,
    HALVES,
    STORAGE,
    assert_same,
    call_op,
    expected_op,
    random_values,
    table,
)

from aids.kernels import SUM_TYPE
from fastps.reduce import kernels, reduce_kernel, sum_kernel
from fastps.types import DType, Op, ReduceOp

OTHERS = [op for op in ReduceOp if ReduceOp.SUM < op < ReduceOp.MIX]
CASES = [(op, code) for op in OTHERS for code in DType if op.has_meaning(code)]
ids = [f"{op.name}-{code.name}".lower() for op, code in CASES]
GUARD = 64  # bytes on both sides of the output that nobody may touch
every_case = pytest.mark.parametrize(("op", "code"), CASES, ids=ids)


@every_case
@given(
    n_sources=st.integers(1, 9),
    count=st.one_of(st.integers(0, 600), st.sampled_from([63, 64, 65, 255, 256, 257, 1025])),
    shift=st.integers(0, 15),
    place=st.integers(-1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_result_equals_numpy(op, code, n_sources, count, shift, place, seed):
    """place: the source that is written over; -1: none."""
    rng, size = np.random.default_rng(seed), code.itemsize
    sources = [random_values(code, count + shift, rng)[shift:] for _ in range(n_sources)]
    want = expected_op(op, code, sources)
    area = np.full(GUARD + (shift + count) * size + GUARD, 0xA5, np.uint8)
    inner = slice(GUARD + shift * size, GUARD + (shift + count) * size)
    out = area[inner].view(STORAGE[code])
    if 0 <= place < n_sources:
        out[:] = sources[place]
        sources[place] = out
        if n_sources == 1:
            want = out.copy()  # nothing to do: even bools are left as they are
    before = [source.tobytes() for source in sources]
    assert call_op(op, code, sources, out) == kernels.OK
    assert_same(code, out, want)
    area[inner] = 0xA5
    assert (area == 0xA5).all()
    for index, source in enumerate(sources):
        assert index == place or source.tobytes() == before[index]


@every_case
def test_many_sources(op, code):
    rng = np.random.default_rng(3)
    sources = [random_values(code, 1027, rng) for _ in range(100)]
    want = expected_op(op, code, sources)
    assert call_op(op, code, sources, sources[50]) == kernels.OK
    assert_same(code, sources[50], want)


@pytest.mark.parametrize("code", FLOATS)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_extremes_do_not_depend_on_the_order_of_sources(op, code):
    """A NaN wins wherever it stands, and -0.0 is less than 0.0."""
    values = [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0]
    first = np.repeat(values, 6 * 50).astype(STORAGE[code])
    second = np.tile(values, 6 * 50).astype(STORAGE[code])
    one, other = np.empty_like(first), np.empty_like(first)
    assert call_op(op, code, [first, second], one) == kernels.OK
    assert call_op(op, code, [second, first], other) == kernels.OK
    assert_same(code, one, other)
    has_nan = np.isnan(first.astype("f4")) | np.isnan(second.astype("f4"))
    np.testing.assert_array_equal(np.isnan(one.astype("f4")), has_nan)


@pytest.mark.parametrize("code", HALVES)
def test_products_of_halves_are_rounded_once(code):
    step = 1 + 2.0**-10 if code is DType.FLOAT16 else 1 + 2.0**-7
    sources = [np.full(131, value).astype(STORAGE[code]) for value in (step, step, step)]
    out = np.empty_like(sources[0])
    assert call_op(ReduceOp.PRODUCT, code, sources, out) == kernels.OK
    np.testing.assert_array_equal(out, np.full(131, np.float32(step**3)).astype(STORAGE[code]))


@pytest.mark.parametrize("code", [DType.INT64, DType.FLOAT16, DType.BOOL])
def test_bad_arguments_are_refused(code):
    function = SUM_TYPE(reduce_kernel(ReduceOp.MAX, code))
    area = np.arange(1024, dtype=np.uint8)
    before, start = area.copy(), area.ctypes.data
    good = table([area, area[256:]])
    for arguments in (
        (good, 0, start, 8),
        (good, 2, start, -1),
        (None, 2, start, 8),
        (good, 2, None, 8),
        (good, 2, start + code.itemsize, 8),
        ((ctypes.c_void_p * 2)(start, None), 2, start, 8),
    ):
        assert function(*arguments, None) == kernels.BAD_ARGUMENT
    assert (area == before).all()
    assert function(None, 2, None, 0, None) == kernels.OK


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
@pytest.mark.parametrize("code", FLOATS)
def test_floats_have_no_bits(op, code):
    with pytest.raises(TypeError, match=f"op {op.name.lower()} .* not {code.name.lower()}"):
        reduce_kernel(op, code)


def test_one_address_for_good_for_each_kernel():
    addresses = {reduce_kernel(op, code) for op, code in CASES}
    assert len(addresses) == len(CASES)
    assert addresses == {reduce_kernel(op, code) for op, code in CASES}
    assert reduce_kernel(ReduceOp.SUM, DType.INT8) == sum_kernel(DType.INT8)


def test_what_users_ask_for_has_a_kernel():
    among_neighbors = {ReduceOp.MIX, ReduceOp.TRIMMED_MEAN}
    assert {op.reduction for op in Op if op is not Op.ADASUM} == set(ReduceOp) - among_neighbors
    assert Op.AVERAGE.reduction is ReduceOp.SUM
    assert [op.value for op in ReduceOp] == list(range(1, 10))  # they travel: add at the end


@every_case
def test_hot_loops_call_nothing(op, code):
    if not llvmlite.binding.get_host_cpu_features().get("avx2"):
        pytest.skip("whole vectors are known to be enough for AVX2 and above only")
    text = kernels.compile_kernel(op, code)._library.get_asm_str()
    assert not re.findall(r"^\s*call\w*\s+[^*%].*", text, re.MULTILINE)
