# SPDX-License-Identifier: Apache-2.0
"""Kernels compute in one floating-point state, and leave a thread the one that it had."""

from __future__ import annotations

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from aids import faces
from aids.floats import STATES, control_word, floats_set
from fastps import byzantine as bz
from fastps.collectives.adasum import combine as adasum
from fastps.contract.codec import Codec, Coding, Option
from fastps.contract.rule import Rule
from fastps.graph.combine import combine
from fastps.graph.edge_codecs import Track
from fastps.graph.rules import SelfCentredClipping
from fastps.native._floats import DefaultFloats
from fastps.reduce import norms, sum_kernel
from fastps.reduce._partition import Coder, Combiner
from fastps.types import DType, dtype_of
from fastps.worker.handle import scale

COUNT = 1000
states = pytest.mark.parametrize("state", STATES)


@functools.cache  # made in the usual state
def numbers(seed: int, dtype: str = "f4") -> np.ndarray:
    """Make subnormal numbers and others, whose sums and products have to be rounded."""
    random = np.random.default_rng(seed)
    small = random.integers(1, 1 << 22, COUNT // 2).astype(np.uint32).view(np.float32)
    large = random.standard_normal(COUNT - small.size, dtype=np.float32)
    return np.concatenate([small, large]).astype(dtype)


def summed() -> np.ndarray:
    out = np.empty(COUNT, np.float32)
    sources = [numbers(j).view(np.uint8) for j in range(3)]
    faces.fold_by_pool(sum_kernel(DType.FLOAT32), sources, out.view(np.uint8), 4, 3, 0)
    return out


def coded(codec: Codec, k: float = 0.0, options: int = 0) -> Callable[[], np.ndarray]:
    def turn() -> np.ndarray:
        how = {"nbytes": 8 * COUNT, "chunk_bytes": 1 << 16, "name": "t"}
        coder = Coder(Coding(codec, k, options), DType.FLOAT64, **how)
        out = np.empty(COUNT)
        for version in (1, 2):
            wire = coder.encode(numbers(0, "f8").view(np.uint8), version=version)
            coder.decode(wire, out.view(np.uint8), version=version)
        return out

    return turn


def ruled(rule: Rule) -> Callable[[], np.ndarray]:
    def turn() -> np.ndarray:
        combiner = Combiner(rule, DType.FLOAT32, n=5, count=COUNT)
        return combiner.combine([numbers(j) for j in range(5)])[0]

    return turn


def known_of_an_edge() -> np.ndarray:
    track = Track(COUNT)
    track.add(numbers(0))
    track.add(numbers(1))
    return track.known


def clipped_among_neighbors() -> np.ndarray:
    out = np.empty(COUNT, np.float32)
    arrays, weights = [numbers(j) for j in range(3)], [0.5, 0.3, 0.2]
    combine(SelfCentredClipping(9.0), arrays, 0, weights, out, DType.FLOAT32, is_mean=False)
    return out


def scaled(dtype: str) -> Callable[[], np.ndarray]:
    def turn() -> np.ndarray:
        array = numbers(0).astype(dtype)
        scale(array, DType[array.dtype.name.upper()], 0.3)
        return array

    return turn


def scaled_bfloat16() -> np.ndarray:
    array = (numbers(0).view(np.uint32) >> 16).astype(np.uint16)
    scale(array, DType.BFLOAT16, 0.3)
    return array


WORKS: dict[str, Callable[[], np.ndarray]] = {
    "sum": summed,
    "int8": coded(Codec.INT8, options=Option.FEEDBACK),
    "onebit": coded(Codec.ONEBIT, options=Option.FEEDBACK | Option.SCALING),
    "bf16": coded(Codec.BF16),
    "median": ruled(bz.Median()),
    "krum": ruled(bz.Krum(1)),
    "clipping": ruled(bz.CenteredClipping(0.5)),
    "norms": lambda: norms.square_norms([numbers(0)]),
    "mix": lambda: norms.mix([numbers(0), numbers(1)], [0.3, 0.7], numbers(0)),
    "adasum": lambda: adasum(numbers(0), numbers(1)),
    "edge": known_of_an_edge,
    "neighbors": clipped_among_neighbors,
    "scaled": scaled("f4"),
    "scaled halves": scaled("f2"),
    "scaled bfloat16": scaled_bfloat16,
}


@states
@pytest.mark.parametrize("name", WORKS)
def test_results_are_those_of_the_default_state(name, state):
    want = WORKS[name]()
    with floats_set(state):
        before = control_word()
        found = WORKS[name]()
        assert control_word() == before
    np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


@states
def test_a_context_sets_the_default_and_restores_what_was(state):
    usual = control_word()
    with floats_set(state):
        before = control_word()
        assert before != usual
        with DefaultFloats():
            assert control_word() == usual
        assert control_word() == before
    with DefaultFloats(), floats_set(state):
        assert control_word() != usual
    assert control_word() == usual


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "c8", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (100, 3)])
def test_floats_are_scaled_and_rounded_once(kind, shape):
    array = np.asarray(np.random.default_rng(5).standard_normal(shape) * 100).astype(kind)
    wide = array if array.dtype.itemsize > 2 else array.astype(np.float32)
    want = (wide * wide.real.dtype.type(1 / 3)).astype(kind)
    made, code = array.copy(), dtype_of(array.real.dtype)
    scale(made, code, 1 / 3)
    np.testing.assert_array_equal(made, want)
    if code is DType.BFLOAT16:
        bits = array.view(np.uint16).copy()
        scale(bits, code, 1 / 3)
        np.testing.assert_array_equal(bits, want.view(np.uint16))


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8", "u1", "u2"])
def test_integers_are_scaled_in_float64_and_cut(kind):
    array = np.arange(100).astype(kind)
    scale(array, dtype_of(array.dtype), 0.7)
    assert array.tolist() == [int(i * 0.7) for i in range(100)]
