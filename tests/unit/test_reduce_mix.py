# SPDX-License-Identifier: Apache-2.0
"""Weighted sums against NumPy: every float type, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce_oracle import (
    FLOATS,
    STORAGE,
    assert_same,
    call_mix,
    expected_mix,
    random_values,
    table,
)

from aids.kernels import SUM_TYPE
from fastps.reduce import kernels, reduce_kernel
from fastps.types import DType, ReduceOp

GUARD = 64  # bytes on both sides of the output that nobody may touch
WEIGHTS = st.one_of(st.floats(-4, 4), st.sampled_from([0.0, 1.0, 1 / 3, 1e-300, np.inf]))


@pytest.mark.parametrize("code", FLOATS)
@given(
    weights=st.lists(WEIGHTS, min_size=1, max_size=9),
    count=st.one_of(st.integers(0, 600), st.sampled_from([63, 64, 65, 255, 256, 257, 1025])),
    shift=st.integers(0, 15),
    place=st.integers(-1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mix_equals_numpy(code, weights, count, shift, place, seed):
    """place: the source that is written over; -1: none."""
    rng, size = np.random.default_rng(seed), code.itemsize
    sources = [random_values(code, count + shift, rng)[shift:] for _ in weights]
    with np.errstate(over="ignore"):
        want = expected_mix(code, weights, sources)
    area = np.full(GUARD + (shift + count) * size + GUARD, 0xA5, np.uint8)
    inner = slice(GUARD + shift * size, GUARD + (shift + count) * size)
    out = area[inner].view(STORAGE[code])
    if 0 <= place < len(weights):
        out[:] = sources[place]
        sources[place] = out
    assert call_mix(code, weights, sources, out) == kernels.OK
    assert_same(code, out, want)
    area[inner] = 0xA5
    assert (area == 0xA5).all()


def test_a_mix_needs_weights_and_floats():
    area = np.ones(64)
    function = SUM_TYPE(reduce_kernel(ReduceOp.MIX, DType.FLOAT64))
    assert function(table([area]), 1, area.ctypes.data, 8, None) == kernels.BAD_ARGUMENT
    weight = ctypes.byref(ctypes.c_double(0.5))
    assert function(table([area]), 1, area.ctypes.data, 8, weight) == kernels.OK  # in place
    assert area.tolist() == [0.5] * 8 + [1.0] * 56
    with pytest.raises(TypeError, match="op mix is for floats, not int32"):
        reduce_kernel(ReduceOp.MIX, DType.INT32)
