# SPDX-License-Identifier: Apache-2.0
"""Trimmed means and distances against NumPy: every float type, NaN and infinities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce_oracle import (
    FLOATS,
    HALVES,
    STORAGE,
    assert_same,
    divisor_at,
    random_values,
    table,
)

from aids.kernels import SUM_TYPE
from fastps.reduce import distance_kernel, kernels, reduce_kernel, robust_kernel
from fastps.types import DType, ReduceOp

GUARD = 64  # bytes on both sides of the output that nobody may touch
COUNTS = st.one_of(st.integers(0, 600), st.sampled_from([63, 64, 65, 255, 256, 257, 1025]))
SEEDS = st.integers(0, 2**32 - 1)


def expected_mean(code: DType, sources: Sequence[np.ndarray], trim: int) -> np.ndarray:
    """Sort each element's values, NaN last and equal ones by source; add those in the middle."""
    wide = np.float32 if code in HALVES else STORAGE[code]
    n = len(sources)
    with np.errstate(all="ignore"):
        rows = np.array([source.astype(wide) for source in sources])
        places = np.argsort(np.argsort(rows, axis=0, kind="stable"), axis=0)
        total = np.zeros(rows.shape[1], wide)
        for row, place in zip(rows, places, strict=True):
            total = total + np.where((place >= trim) & (place < n - trim), row, wide(0))
        return (total * wide(1 / (n - 2 * trim))).astype(STORAGE[code])


def call_mean(code: DType, sources: Sequence[np.ndarray], out: np.ndarray, trim: int) -> int:
    function = SUM_TYPE(reduce_kernel(ReduceOp.TRIMMED_MEAN, code))
    places, n = table(sources), len(sources)
    return function(places, n, out.ctypes.data, out.size, divisor_at(trim))


@pytest.mark.parametrize("code", FLOATS)
@given(
    n=st.integers(1, 9), trim=st.integers(0, 4), count=COUNTS, shift=st.integers(0, 15),
    place=st.integers(-1, 8), is_close=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_any_trimmed_mean_equals_numpy(code, n, trim, count, shift, place, is_close, seed):
    """place: the source that is written over; -1: none. is_close: many elements are equal."""
    rng, size, trim = np.random.default_rng(seed), code.itemsize, min(trim, (n - 1) // 2)
    sources = [random_values(code, count + shift, rng)[shift:] for _ in range(n)]
    if is_close:
        sources = [rng.integers(-1, 2, count).astype(STORAGE[code]) for _ in range(n)]
    want = expected_mean(code, sources, trim)
    area = np.full(GUARD + (shift + count) * size + GUARD, 0xA5, np.uint8)
    inner = slice(GUARD + shift * size, GUARD + (shift + count) * size)
    out = area[inner].view(STORAGE[code])
    if 0 <= place < n:
        out[:] = sources[place]
        sources[place] = out
    assert call_mean(code, sources, out, trim) == kernels.OK
    assert_same(code, out, want)
    area[inner] = 0xA5
    assert (area == 0xA5).all()


@pytest.mark.parametrize("code", FLOATS)
def test_so_many_liars_as_are_trimmed_move_nothing_out_of_range(code):
    rng = np.random.default_rng(1)
    honest = [rng.standard_normal(1000).astype(STORAGE[code]) for _ in range(5)]
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    with np.errstate(all="ignore"):
        for one, other in ((np.nan, np.nan), (np.inf, -np.inf), (np.nan, -6e4), (-6e4, -np.inf)):
            liars = [np.full(1000, lie).astype(STORAGE[code]) for lie in (one, other)]
            out = np.empty_like(low)
            assert call_mean(code, [liars[0], *honest, liars[1]], out, 2) == kernels.OK
            assert ((low <= out) & (out <= high)).all()


def test_the_median_of_even_many_is_the_mean_of_two():
    sources = [np.full(3, value) for value in (9.0, 1.0, 3.0, -7.0)]
    out = np.empty(3)
    assert call_mean(DType.FLOAT64, sources, out, 1) == kernels.OK
    assert out.tolist() == [2.0] * 3
    assert call_mean(DType.FLOAT64, sources, out, 2) == kernels.BAD_ARGUMENT
    assert call_mean(DType.FLOAT64, sources, out, -1) == kernels.BAD_ARGUMENT
    function = SUM_TYPE(reduce_kernel(ReduceOp.TRIMMED_MEAN, DType.FLOAT64))
    assert function(table(sources), 4, out.ctypes.data, 3, None) == kernels.BAD_ARGUMENT
    for make in (lambda code: reduce_kernel(ReduceOp.TRIMMED_MEAN, code), distance_kernel):
        with pytest.raises(TypeError, match="is for floats, not int32"):
            make(DType.INT32)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-19, 1e18, 1e25])
def test_distances_of_all_pairs_equal_numpy_at_any_scale(scale):
    """The squares of float32 differences may leave its range."""
    rng = np.random.default_rng(1)
    function = SUM_TYPE(robust_kernel("pair_distances", DType.FLOAT32))
    for count in (1, 64, 1500):
        sources = [(rng.standard_normal(count) * scale).astype(np.float32) for _ in range(3)]
        sources.append(sources[0].copy())
        found = np.full((4, 4), -1.0)
        assert function(table(sources), 4, found.ctypes.data, count, None) == kernels.OK
        wide = [source.astype(np.float64) for source in sources]
        wanted = [[np.square(x - y).sum() for y in wide] for x in wide]
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=0)
    sources[1][700] = np.nan
    assert function(table(sources), 4, found.ctypes.data, count, None) == kernels.OK
    assert (np.isnan(found).sum(), found[0, 3]) == (6, 0.0)


@pytest.mark.parametrize("code", FLOATS)
@given(n=st.integers(1, 6), count=COUNTS, center=st.integers(0, 5), seed=SEEDS)
def test_any_distance_equals_numpy(code, n, count, center, seed):
    rng, center = np.random.default_rng(seed), min(center, n - 1)
    sources = [rng.standard_normal(count).astype(STORAGE[code]) for _ in range(n)]
    wild = count > 9 and n > 1
    if wild:
        sources[(center + 1) % n][5] = (np.nan, np.inf)[seed % 2]
    function, found = SUM_TYPE(distance_kernel(code)), np.full(n, -1.0)
    args, places = ctypes.byref(ctypes.c_int64(center)), table(sources)
    assert function(places, n, found.ctypes.data, count, args) == kernels.OK
    gaps = [source.astype(np.float64) - sources[center].astype(np.float64) for source in sources]
    np.testing.assert_allclose(found, [np.dot(gap, gap) for gap in gaps], rtol=1e-12)
    assert found[center] == 0.0
    outside = ctypes.byref(ctypes.c_int64(n))
    assert function(places, n, found.ctypes.data, count, outside) == kernels.BAD_ARGUMENT
