# SPDX-License-Identifier: Apache-2.0
"""The sum kernels against NumPy: every element type, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce_oracle import (
    HALVES,
    INTEGERS,
    STORAGE,
    assert_same,
    call,
    divisor_at,
    expected,
    kernel,
    random_values,
    table,
)

from fastps.reduce import kernels
from fastps.types import DType

GUARD = 64  # bytes before and after the output that nobody may touch
ALL = tuple(DType)
ids = [code.name.lower() for code in ALL]


def guarded(count: int, itemsize: int, shift: int) -> tuple[np.ndarray, slice]:
    """Make bytes with a margin around `count` elements that start `shift` elements late."""
    first = GUARD + shift * itemsize
    area = np.full(first + count * itemsize + GUARD, 0xA5, dtype=np.uint8)
    return area, slice(first, first + count * itemsize)


@given(
    code=st.sampled_from(ALL),
    n_sources=st.integers(1, 9),
    count=st.one_of(st.integers(0, 600), st.sampled_from([511, 512, 1025, 4099])),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    is_in_place=st.booleans(),
    divisor=st.sampled_from([1, 2, 3, 7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sum_equals_numpy(code, n_sources, count, shifts, is_in_place, divisor, seed):
    rng = np.random.default_rng(seed)
    storage = np.dtype(STORAGE[code])
    divisor = 1 if code is DType.BOOL else divisor
    sources = [random_values(code, count + shifts[0], rng)[shifts[0] :] for _ in range(n_sources)]
    want = expected(code, sources, divisor)
    area, inner = guarded(count, storage.itemsize, shifts[1])
    out = area[inner].view(storage)
    if is_in_place:
        out[:] = sources[0]
        sources[0] = out
        if n_sources == divisor == 1:
            want = out.copy()  # nothing to do: even bools are left as they are
    before = [source.copy() for source in sources]
    assert call(code, sources, out, divisor) == 1
    assert_same(code, out, want)
    area[inner] = 0xA5
    assert (area == 0xA5).all()
    for source, old in zip(sources[is_in_place:], before[is_in_place:], strict=True):
        assert source.tobytes() == old.tobytes()


@pytest.mark.parametrize("code", ALL, ids=ids)
@pytest.mark.parametrize("n_sources", [2, 8, 300])
def test_megabytes_and_many_sources(code, n_sources):
    rng = np.random.default_rng(n_sources)
    count = 2_000_003 // n_sources
    sources = [random_values(code, count, rng) for _ in range(n_sources)]
    want = expected(code, sources)
    assert call(code, sources, sources[0]) == 1
    assert_same(code, sources[0], want)


@pytest.mark.parametrize("code", HALVES, ids=["float16", "bfloat16"])
def test_every_half_with_every_neighbour_in_size(code):
    # Sums of a value and one near it in size meet every rounding case, ties among them.
    words = np.arange(65536, dtype=np.uint16)
    for step in (0, 1, 2, 3, 100, 0x03FF, 0x0400, 0x0801, 0x7FFF, 0x8000, 0x8001):
        sources = [words.view(STORAGE[code]), (words + np.uint16(step)).view(STORAGE[code])]
        out = np.empty_like(sources[0])
        for divisor in (1, 3):
            assert call(code, sources, out, divisor) == 1
            assert_same(code, out, expected(code, sources, divisor))


@pytest.mark.parametrize("code", HALVES, ids=["float16", "bfloat16"])
def test_halves_are_rounded_once(code):
    # 1 + eps/2 + eps/2 is 1 + eps when accumulated in float32, but 1 when rounded at each step.
    storage = STORAGE[code]
    eps = 2.0**-10 if code is DType.FLOAT16 else 2.0**-7
    sources = [np.full(1001, value).astype(storage) for value in (1.0, eps / 2, eps / 2)]
    out = np.empty_like(sources[0])
    assert call(code, sources, out) == 1
    assert (out.astype(np.float64) == 1.0 + eps).all()


@pytest.mark.parametrize("code", HALVES, ids=["float16", "bfloat16"])
def test_a_half_average_may_pass_through_a_larger_sum(code):
    # The sum of two maxima overflows the stored type but not float32 for float16.
    sources = [np.full(99, 60000.0).astype(STORAGE[code])] * 2
    out = np.empty_like(sources[0])
    assert call(code, sources, out, 2) == 1
    np.testing.assert_array_equal(out, sources[0])


@pytest.mark.parametrize("code", [DType.INT8, DType.UINT8, DType.INT16])
def test_floor_division_of_every_short_integer(code):
    limits = np.iinfo(STORAGE[code])
    values = np.arange(limits.min, limits.max + 1).astype(STORAGE[code])
    out = np.empty_like(values)
    for divisor in [*range(1, 301), 32767, 32768, 2**24 + 1, 2**31 - 1]:
        assert call(code, [values], out, divisor) == 1
        np.testing.assert_array_equal(out, values.astype(np.int64) // divisor)


@pytest.mark.parametrize("code", [DType.INT32, DType.INT64])
@given(divisor=st.integers(1, kernels.MAX_DIVISOR), seed=st.integers(0, 2**32 - 1))
def test_floor_division_next_to_multiples(code, divisor, seed):
    rng = np.random.default_rng(seed)
    limits = np.iinfo(STORAGE[code])
    quotients = rng.integers(limits.min // divisor, limits.max // divisor, 200)
    near = quotients[:, None] * divisor + np.array([-1, 0, 1])
    edges = [limits.min, limits.min + 1, -1, 0, 1, limits.max - 1, limits.max]
    values = np.concatenate([near.ravel(), edges, rng.integers(limits.min, limits.max, 200)])
    values = values.clip(limits.min, limits.max).astype(STORAGE[code])
    out = np.empty_like(values)
    assert call(code, [values], out, divisor) == 1
    np.testing.assert_array_equal(out, np.floor_divide(values, np.int64(divisor)))


def test_integers_wrap_before_they_are_divided():
    sources = [np.full(300, 200, np.uint8)] * 2
    out = np.empty_like(sources[0])
    assert call(DType.UINT8, sources, out, 2) == 1
    assert (out == (400 - 256) // 2).all()


def test_negative_zero_subnormals_and_nan_in_float32():
    tiny = np.float32(1e-45)
    a = np.array([-0.0, tiny, np.nan, np.inf, np.inf, -0.0] * 50, np.float32)
    b = np.array([-0.0, tiny, 1.0, -np.inf, 1.0, 0.0] * 50, np.float32)
    assert call(DType.FLOAT32, [a, b], a) == 1
    assert np.signbit(a[0])
    assert a[1] == 2 * tiny
    assert np.isnan(a[2:4]).all()
    assert a[4] == np.inf
    assert not np.signbit(a[5])


@pytest.mark.parametrize("code", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16])
def test_order_is_the_order_of_the_table(code):
    values = {sign: np.full(77, sign * 2.0**60).astype(STORAGE[code]) for sign in (1, -1)}
    one, out = np.full(77, 1.0).astype(STORAGE[code]), np.empty(77, STORAGE[code])
    for sources, want in (
        ([values[1], values[-1], one], 1.0),
        ([values[1], one, values[-1]], 0.0),
        ([one, values[1], values[-1]], 0.0),
    ):
        assert call(code, sources, out) == 1
        assert (out == want).all()


@pytest.mark.parametrize("code", ALL, ids=ids)
def test_bad_arguments_are_refused_before_anything_is_written(code):
    function = kernel(code)
    size = code.itemsize
    area = np.arange(4096, dtype=np.uint8)
    before = area.copy()
    a, b, c = (area.ctypes.data + offset for offset in (0, 1024, 2048))

    def refuses(srcs, n_srcs, dst, count, divisor):
        addresses = (ctypes.c_void_p * len(srcs))(*srcs) if srcs is not None else None
        return function(addresses, n_srcs, dst, count, divisor_at(divisor)) == kernels.BAD_ARGUMENT

    assert refuses([a, b], 0, c, 8, 1)
    assert refuses([a, b], -1, c, 8, 1)
    assert refuses([a, b], 2, c, -1, 1)
    assert refuses([a, b], 2, c, 8, 0)
    assert refuses([a, b], 2, c, 8, -2)
    assert refuses([a, b], 2, c, 8, 2**31)
    assert refuses(None, 2, c, 8, 1)
    assert refuses([a, None], 2, c, 8, 1)
    assert refuses([a, b], 2, None, 8, 1)
    assert refuses([a, b], 2, a + size, 8, 1)
    assert refuses([a, b], 2, b - size, 8, 1)
    assert refuses([a, b], 2, b + 7 * size, 8, 1)
    if code is DType.BOOL:
        assert refuses([a, b], 2, c, 8, 2)
    if size > 1:
        assert refuses([a, b + 1], 2, c, 8, 1)
        assert refuses([a, b], 2, c + 1, 8, 1)
    addresses = (ctypes.c_void_p * 2)(a, b)
    assert function(addresses, 2, c, 8, None) == kernels.BAD_ARGUMENT
    assert (area == before).all()
    assert function(None, 2, None, 0, divisor_at(1)) == 1  # no address is looked at


@pytest.mark.parametrize("code", INTEGERS)
@pytest.mark.parametrize("place", range(4))
def test_any_source_may_be_written_over(code, place):
    rng = np.random.default_rng(place)
    sources = [random_values(code, 1037, rng) for _ in range(4)]
    fresh = np.empty_like(sources[0])
    assert call(code, sources, fresh) == 1
    assert call(code, sources, sources[place]) == 1
    np.testing.assert_array_equal(sources[place], fresh)


def test_neighbours_that_touch_are_not_an_overlap():
    area = np.arange(96, dtype=np.int32)
    low, middle, high = area[:32], area[32:64], area[64:]
    want = low + high
    assert call(DType.INT32, [low, high], middle) == 1
    np.testing.assert_array_equal(middle, want)


@pytest.mark.parametrize("code", INTEGERS)
def test_one_source_is_copied_or_scaled(code):
    values = random_values(code, 777, np.random.default_rng(1))
    out = np.zeros_like(values)
    assert call(code, [values], out) == 1
    np.testing.assert_array_equal(out, values)
    assert call(code, [values], values, 3) == 1
    np.testing.assert_array_equal(values, expected(code, [out], 3))


def test_table_may_be_longer_than_the_sources():
    values = [np.full(10, index, np.float32) for index in range(5)]
    out = np.empty(10, np.float32)
    assert kernel(DType.FLOAT32)(table(values), 3, out.ctypes.data, 10, divisor_at(1)) == 1
    assert (out == 0 + 1 + 2).all()


def test_every_wire_code_has_a_form_of_its_size():
    assert set(kernels.FORMS) == set(DType)
    for code, form in kernels.FORMS.items():
        assert np.dtype(STORAGE[code]).itemsize == code.itemsize
        assert kernels._BYTES[form.storage] == code.itemsize
