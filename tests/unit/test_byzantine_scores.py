# SPDX-License-Identifier: Apache-2.0
"""Rules that compare with a trusted update, and attacks: formulas and edges, in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastps.byzantine import (
    FedAsync,
    FLTrust,
    Kardam,
    Zeno,
    ZenoDescent,
    ZenoPlusPlus,
    ZenoPlusPlusDescent,
    attacks,
    is_sound,
)

V = np.array([3.0, 4.0])


def test_zeno_wants_direction_and_length():
    rule = Zeno(eta=-0.001, rho=0.6)
    assert rule.score(V, V) == (True, 1.0, 1.0, "")
    assert rule.score(-V, V)[0] is False
    assert rule.score(V * math.sqrt(1.6), V).reason == "length"
    assert rule.score(V * math.sqrt(1.59), V).is_accepted
    assert rule.score(np.array([4.0, -3.0]), V).is_accepted  # at a right angle: above eta
    assert not Zeno(eta=0.0).score(np.array([4.0, -3.0]), V).is_accepted
    assert rule.score(np.zeros(2), V).is_accepted  # <0, v> = 0 > -0.001 |v|^2
    assert not rule.score(V, 0 * V).is_accepted


def test_zeno_averages_what_it_accepts():
    found, verdicts = Zeno().combine([V, None, 0.5 * V, -V, V * np.nan], V)
    np.testing.assert_allclose(found, 0.75 * V)
    assert [one and one.is_accepted for one in verdicts] == [True, None, True, False, False]
    assert verdicts[4].reason.startswith("NaN")
    for nobody in ([], [None], [-V], [V * np.inf]):
        found, _ = Zeno().combine(nobody, V)
        np.testing.assert_array_equal(found, 0 * V)
    found, _ = Zeno().combine([V], 0 * V)
    np.testing.assert_array_equal(found, 0 * V)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_zeno_plus_plus_caps_the_length(scale):
    verdict = ZenoPlusPlus(alpha=0.8).score(scale * V, V)
    assert verdict.is_accepted
    assert verdict.factor == pytest.approx(0.8 * min(1, 1 / scale))


def test_zeno_plus_plus_drops_or_multiplies_by_the_cosine():
    assert ZenoPlusPlus().score(-2 * V, V).factor == 0
    literal = ZenoPlusPlus(alpha=0.8, is_strict=False).score(-2 * V, V)
    assert not literal.is_accepted
    assert literal.factor == pytest.approx(-0.8 * 0.5)
    assert ZenoPlusPlus().score(np.zeros(2), V).is_accepted
    for rule in (ZenoPlusPlus(), ZenoPlusPlus(is_strict=False)):
        assert rule.score(V, 0 * V)[2] == 0
        assert rule.score(V * np.nan, V)[2] == 0
        assert rule.score(np.zeros(3), V).reason == "shape (3,), not (2,)"


@pytest.mark.parametrize("seed", range(5))
def test_zeno_plus_plus_as_it_was_published(seed):
    rng = np.random.default_rng(seed)
    v, rule = rng.normal(size=7), ZenoPlusPlusDescent(0.3, rho=0.2, epsilon=0.4, alpha=0.5)
    n_accepted = 0
    for u in rng.normal(size=(40, 7)) * 10.0 ** rng.uniform(-3, 3, (40, 1)):
        scaled = u / np.linalg.norm(u) * np.linalg.norm(v)
        score = 0.3 * v @ scaled - 0.2 * scaled @ scaled
        verdict = rule.score(u, v)
        assert verdict.score == pytest.approx(score, rel=1e-9)
        assert verdict.is_accepted == (score >= -0.3 * 0.4)
        taken = 0.5 * scaled if verdict.is_accepted else 0 * u
        np.testing.assert_allclose(verdict.factor * u, taken, rtol=1e-9)
        n_accepted += verdict.is_accepted
    assert 0 < n_accepted < 40
    assert rule.score(0 * v, v).is_accepted
    for u, like in ((v, 0 * v), (v * np.nan, v), (v * np.inf, v)):
        assert rule.score(u, like)[2] == 0


def test_zeno_of_2019_averages_who_descends_most():
    right = np.array([1.0, -2.0, 3.0])
    model = np.zeros(3)

    def loss(change):
        return float(np.square(model + change - right).sum())

    updates = [0.1 * right, 0.2 * right, None, -6 * right, right * np.nan, 100 * right, 0 * right]
    for b, rho in ((2, 0.0), (2, 0.5), (3, 0.0), (0, 0.0), (9, 0.0)):
        found, verdicts = ZenoDescent(loss, b, rho).combine(updates, right)
        given = [u for u in updates if u is not None and np.isfinite(u).all()]
        scores = [loss(0 * right) - loss(u) - rho * u @ u for u in given]
        best = np.argsort(scores)[::-1][: max(len(given) - b, 0)]
        wanted = np.mean([given[i] for i in best], axis=0) if len(best) else 0 * right
        np.testing.assert_allclose(found, wanted)
        told = [one.score for place, one in enumerate(verdicts) if one and place != 4]
        np.testing.assert_allclose(told, scores)
        assert verdicts[2] is None
        assert verdicts[4].reason.startswith("NaN")
        assert sum(one.is_accepted for one in verdicts if one) == len(best)
    model[:] = right  # the loss is that of the model that is there: nothing descends any more
    assert ZenoDescent(loss, 1).combine([0.1 * right, 0 * right], right)[1][0].reason == "descent"
    lost = ZenoDescent(lambda change: math.nan if change.any() else 0.0, 0)
    assert not lost.combine([right], right)[1][0].is_accepted
    np.testing.assert_array_equal(lost.combine([], right)[0], 0 * right)
    with pytest.raises(ValueError, match="b=-1"):
        ZenoDescent(loss, -1)


def test_fltrust_is_the_papers_average():
    updates = [2 * V, np.array([4.0, -3.0]), -V, np.array([5.0, 0.0]), np.zeros(2), V * np.inf]
    found, verdicts = FLTrust().combine(updates, V)
    trusts = [max(0.0, float(u @ V) / (np.linalg.norm(u) * 5)) for u in updates[:4]]
    wanted = sum(t * 5 / np.linalg.norm(u) * u for t, u in zip(trusts, updates, strict=False))
    np.testing.assert_allclose(found, wanted / sum(trusts))
    assert [one.is_accepted for one in verdicts] == [True, False, False, True, False, False]
    np.testing.assert_array_equal(FLTrust().combine([V], 0 * V)[0], 0 * V)


def test_fed_async_takes_all_but_nan():
    assert FedAsync(alpha=0.4).score(V).factor == 0.4
    assert FedAsync(alpha=0.4, power=0.5).score(V, staleness=3).factor == pytest.approx(0.2)
    assert FedAsync(alpha=0.4, is_damped=True).score(V).factor == pytest.approx(0.4 / 13.5)
    assert not FedAsync().score(V * np.nan).is_accepted


def test_kardam_refuses_who_changes_faster_than_most():
    rule, rng = Kardam(f=1), np.random.default_rng(0)
    models = [rng.normal(size=4) for _ in range(6)]
    refused = dict.fromkeys(range(4), 0)
    for step, model in enumerate(models):
        for worker in range(4):
            wild = worker == 3
            update = rng.normal(size=4) * 100 if wild else 0.1 * model
            verdict = rule.score(worker, update, model)
            assert verdict.is_accepted or step > 0
            refused[worker] += not verdict.is_accepted
    assert refused[3] >= 4
    assert not any(refused[worker] for worker in range(3))
    assert not rule.score(0, models[0] * np.nan, models[0]).is_accepted


def test_what_is_not_sound_is_named():
    assert is_sound(V, V) == ""
    assert "shape" in is_sound(V[:1], V)
    assert is_sound(np.array([1e200, 0.0]))


def test_attacks_are_what_they_say_and_come_again():
    update = np.linspace(-1, 1, 4000, dtype=np.float32)
    rng = attacks.Liars(seed=1).generator(2, 3, 4)
    noise = attacks.random(update, rng, scale=10)
    assert noise.dtype == np.float32
    assert noise.std() == pytest.approx(10, rel=0.1)
    again = attacks.random(update, attacks.Liars(seed=1).generator(2, 3, 4), scale=10)
    np.testing.assert_array_equal(noise, again)
    longer = attacks.scaled_random(update, rng, scale=8)
    assert np.linalg.norm(longer) == pytest.approx(8 * np.linalg.norm(update), rel=1e-5)
    np.testing.assert_allclose(attacks.negative(update, scale=2), -2 * update)
    np.testing.assert_array_equal(attacks.label_flip(np.arange(10), 10), np.arange(9, -1, -1))
    with pytest.raises(ValueError, match="scale=0"):
        attacks.negative(update, scale=0)


def test_liars_are_fixed_or_drawn_for_each_block():
    fixed = attacks.Liars(fixed=frozenset({1, 5}))
    assert [fixed.lies(worker, 0) for worker in range(6)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    drawn = attacks.Liars(rate=0.2, seed=3)
    lies = [drawn.lies(w, s, b) for w in range(10) for s in range(20) for b in range(5)]
    assert np.mean(lies) == pytest.approx(0.2, abs=0.04)
    assert lies == [drawn.lies(w, s, b) for w in range(10) for s in range(20) for b in range(5)]
    assert not attacks.Liars().lies(0, 0)


def test_colluding_attacks_know_the_honest():
    honest = [np.array([1.0, 2.0]), np.array([3.0, 2.0])]
    np.testing.assert_allclose(attacks.alie(honest, 8, 2, z=1.5), [2 - 1.5, 2.0])
    np.testing.assert_allclose(attacks.inner_product(honest, scale=0.5), [-1.0, -1.0])
    # of 50 workers 24 lie: 2 honest ones have to be further out, 24 of 26 nearer
    assert attacks.little_enough(50, 24) == pytest.approx(1.426, abs=1e-3)


def test_what_was_right_once_is_sent_again():
    liar = attacks.Stale(delay=2)
    assert [float(liar.told(np.array([k * 1.0]))[0]) for k in range(6)] == [0, 0, 0, 1, 2, 3]
    again = attacks.Replayed(after=2)
    sent = [again.pushes(k, [np.array([float(k)]), None]) for k in range(1, 5)]
    assert [[number for number, _ in one] for one in sent] == [[1], [2], [3, 1], [4, 2]]
    assert [float(updates[0][0]) for _, updates in sent[3]] == [4, 2]
    for make in (attacks.Stale, attacks.Replayed):
        with pytest.raises(ValueError, match="1 or more"):
            make(0)
