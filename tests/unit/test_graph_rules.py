# SPDX-License-Identifier: Apache-2.0
"""Clipping as weights of a plain mix, beside the paper's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.graph.combine import combine
from fastps.graph.rules import (
    AdaptiveClipping,
    CoordinateMedian,
    SelfCentredClipping,
    TrimmedMean,
    clipped_weights,
)
from fastps.types import DType


@given(
    n=st.integers(1, 7), own=st.integers(0, 6), radius=st.floats(0, 5),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_weights_give_what_the_paper_says(n, own, radius, seed):
    rng, own = np.random.default_rng(seed), min(own, n - 1)
    x, weights = rng.standard_normal((n, 4)), rng.uniform(0, 1, n)
    gaps = x - x[own]
    sizes = np.linalg.norm(gaps, axis=1)
    scales = np.minimum(1, np.divide(radius, sizes, out=np.ones(n), where=sizes > 0))
    wanted = weights.sum() * x[own] + (weights * scales) @ gaps
    found = clipped_weights(SelfCentredClipping(radius), own, weights, sizes**2)
    np.testing.assert_allclose(np.array(found) @ x, wanted, atol=1e-12)


def test_what_is_not_finite_weighs_nothing_whatever_the_radius():
    rules = (SelfCentredClipping(math.inf), SelfCentredClipping(0.0), AdaptiveClipping(0.5))
    for rule in rules:
        for bad in (math.nan, math.inf):
            found = clipped_weights(rule, 1, [0.25] * 4, [bad, 0.0, 0.0, bad])
            assert found == [0.0, 0.75, 0.25, 0.0]


def test_an_adaptive_radius_follows_the_nearest():
    weights, squares = [0.2] * 5, [0.0, 4.0, 1.0, 1e12, 9.0]
    radius = AdaptiveClipping(0.2).radius_of(weights, squares)
    assert radius == pytest.approx(math.sqrt(0.2 * (1 + 4 + 9) / 0.2))
    assert AdaptiveClipping(0.2).radius_of(weights, [0.0, 4.0, 1.0, math.nan, 9.0]) == radius
    assert AdaptiveClipping(0.9).radius_of(weights, squares) == 0.0  # oneself is enough


def test_rules_refuse_what_makes_no_sense():
    assert [CoordinateMedian().trim_of(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert TrimmedMean(2).trim_of(5) == 2
    with pytest.raises(ValueError, match="leaves nothing of 4 arrays"):
        TrimmedMean(2).trim_of(4)
    for make, value in ((TrimmedMean, -1), (SelfCentredClipping, -1.0),
                        (SelfCentredClipping, math.nan), (AdaptiveClipping, 1.0)):  # fmt: skip
        with pytest.raises(ValueError, match=f"={value}"):
            make(value)


@pytest.mark.parametrize(("n", "keeps"), [(5, False), (4, True), (2, True), (1, True)])
def test_a_trimmed_mean_of_too_few_that_are_left_is_ones_own_array(n, keeps):
    arrays = [np.full(3, float(value)) for value in (1, 1e9, 1e9, 2, 3)][:n]
    out = np.empty(3)
    combine(TrimmedMean(2), arrays, 0, [1 / n] * n, out, DType.FLOAT64, is_mean=True)
    assert (out == (1.0 if keeps else 3.0)).all(), out
