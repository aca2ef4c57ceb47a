# SPDX-License-Identifier: Apache-2.0
"""Attacks that know honest updates: what their papers say of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps import byzantine as bz
from fastps.byzantine import attacks

SEEDS = st.integers(0, 2**32 - 1)


def honest_of(seed: int, m: int = 6, count: int = 25) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list((rng.normal(size=count) + rng.normal(size=(m, count))).astype("f4"))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_min_max_and_min_sum_hide_among_honest_updates(seed):
    honest = honest_of(seed)
    table = np.array(honest, float)
    gaps = ((table[:, None] - table) ** 2).sum(axis=2)
    far = ((table - attacks.min_max(honest)) ** 2).sum(axis=1)
    assert far.max() == pytest.approx(gaps.max(), rel=1e-4)
    near = ((table - attacks.min_max(honest, is_sum=True)) ** 2).sum(axis=1)
    assert near.sum() == pytest.approx(gaps.sum(axis=1).max(), rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_mimic_sends_the_honest_update_along_the_largest_spread(seed):
    honest = honest_of(seed)
    table = np.array(honest, float)
    values, vectors = np.linalg.eigh(np.cov(table.T))
    along = np.abs((table - table.mean(axis=0)) @ vectors[:, -1])
    np.testing.assert_array_equal(attacks.mimic(honest), honest[int(np.argmax(along))])
    assert values[-1] > 0


@pytest.mark.parametrize("rule", [bz.TrimmedMean(2), bz.Median(), bz.Krum(2)])
def test_optimal_attacks_do_no_less_damage_than_the_same_with_a_fixed_factor(rule):
    honest = honest_of(3)
    mean = np.mean(honest, axis=0, dtype=float)

    def combine(updates: list[np.ndarray]) -> np.ndarray:
        return bz.combine(rule, updates)

    def damage(lie: np.ndarray) -> float:
        return float(np.linalg.norm(combine([*honest, lie, lie]) - mean))

    best = damage(attacks.optimal_alie(honest, 2, combine))
    assert best >= max(damage(attacks.alie(honest, 8, 2, z=z)) for z in (0.625, 1.25, 2.5))
    best = damage(attacks.optimal_inner_product(honest, 2, combine))
    fixed = (damage(attacks.inner_product(honest, scale=one)) for one in (0.625, 1.25, 2.5))
    assert best >= max(fixed)


def test_what_is_simple():
    honest = honest_of(1)
    np.testing.assert_allclose(attacks.sign_flip(honest), -np.mean(honest, axis=0), rtol=1e-5)
    assert np.isposinf(attacks.infinite(honest[0])).all()
    assert not np.isnan(bz.combine(bz.Median(), [*honest, attacks.infinite(honest[0])])).any()
    lie, mean = attacks.spectral(honest, scale=2.0), np.mean(honest, axis=0)
    away = lie - mean
    assert away @ mean <= 1e-6
    deviation = ((np.array(honest) - mean) @ (away / np.linalg.norm(away))).std()
    assert np.linalg.norm(away) == pytest.approx(2 * deviation, rel=1e-4)
    shaped = [one.reshape(5, 5) for one in honest]
    for made in (attacks.spectral(shaped), attacks.mimic(shaped)):
        assert made.shape == (5, 5)
        assert made.dtype == np.float32
    with pytest.raises(ValueError, match="above 0"):
        attacks.spectral(honest, scale=0.0)
