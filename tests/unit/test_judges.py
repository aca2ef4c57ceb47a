# SPDX-License-Identifier: Apache-2.0
"""What judges make of updates in blocks, against NumPy; skipped blocks are left out."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from fastps import byzantine as bz
from fastps.byzantine import reference
from fastps.byzantine.judges import Case, are_sound, as_floats, joined, judge_of
from fastps.byzantine.scores import Verdict, measured
from fastps.contract.rule import Kind
from fastps.errors import ConfigError
from fastps.reduce import norms

SHAPES = ((30, 7), (1,), (0,), (1200,))
N = 8
BY_DISTANCE = {
    "clip": bz.NormClipping(20.0),
    "centered": bz.CenteredClipping(15.0, iterations=3),
    "geometric": bz.GeometricMedian(iterations=9),
    "krum": bz.Krum(2),
    "multi-krum": bz.MultiKrum(2),
    "multi-krum of 3": bz.MultiKrum(1, keep=3),
    "bulyan": bz.Bulyan(1),
    "mda": bz.MDA(2),
    "smea": bz.SMEA(2),
    "caf": bz.CAF(2),
}
BY_ELEMENT = {
    "average": "average",
    "median": "median",
    "trimmed": bz.TrimmedMean(2),
    "share": bz.TrimmedMean(share=0.2),
    "phocas": bz.Phocas(2),
    "signs": bz.SignMajority(),
}


def blocks(seed: int, kind: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape)).astype(kind) for shape in SHAPES]


def rows_of(n: int = N, *, skipped: float = 0.0, seed: int = 0) -> list[list[np.ndarray | None]]:
    rng = np.random.default_rng([seed, n])
    return [
        [None if rng.random() < skipped else one for one in blocks(seed * 100 + j)]
        for j in range(n)
    ]


def case_of(rows, trusted=None, **more) -> Case:
    trusted = blocks(77) if trusted is None else trusted
    return Case(rows, range(len(rows)), trusted, [np.zeros_like(one) for one in trusted], **more)


def close(found, wanted, limit: float = 1e-6) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit * scale)


def by_block(rule, rows, **more) -> list[np.ndarray]:
    likes = blocks(77)
    return [
        np.asarray(bz.combine(rule, [row[place] for row in rows], **more)).reshape(like.shape)
        for place, like in enumerate(likes)
    ]


# ---- kernels


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 63, 1024, 1025, 5000])
def test_products_are_numpys(kind, count):
    rng = np.random.default_rng(count)
    *updates, trusted = (rng.standard_normal(count).astype(kind) for _ in range(4))
    found = norms.products(updates, trusted)
    wanted = [measured(one, trusted)[:2] for one in (*updates, trusted)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(found, norms.products(updates, trusted))
    np.testing.assert_allclose(norms.square_norms(updates), found[:-1, 1], rtol=1e-12)


def test_kernels_take_arrays_of_one_kind_alone():
    whole = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="C-contiguous"):
        norms.products([np.ones(16, np.float32)[::2]], whole)
    with pytest.raises(TypeError, match="one element type"):
        norms.products([np.ones(8)], whole)
    with pytest.raises(TypeError, match="float"):
        norms.square_norms([np.ones(8, np.int32)])
    np.testing.assert_array_equal(norms.mix([whole * np.nan], [0.0], whole), 0 * whole)
    assert not are_sound([None, np.array([1.0, np.nan])])
    assert not are_sound([np.array([1e200])])
    assert are_sound([None, np.zeros(0), *as_floats([np.arange(3)])])


# ---- rules without trusted data


@pytest.mark.parametrize("name", BY_ELEMENT)
@pytest.mark.parametrize("skipped", [0.0, 0.4])
def test_rules_by_element_are_the_same_for_blocks_and_models(name, skipped):
    rule, rows = BY_ELEMENT[name], rows_of(skipped=skipped)
    verdicts, changes = judge_of(rule, blocks(77), N).judge(case_of(rows))
    close(changes, by_block(rule, rows))
    assert [one is None for one in verdicts] == [all(b is None for b in row) for row in rows]


@pytest.mark.parametrize("name", [*BY_DISTANCE, "clip caf"])
def test_rules_by_distance_of_one_block_and_of_whole_models(name):
    rule, rows = BY_DISTANCE.get(name, bz.Clipping(bz.CAF(2), 30.0)), rows_of()
    for place, like in enumerate(blocks(77)):
        column = [[row[place]] for row in rows]
        _, changes = judge_of(rule, [like], N).judge(case_of(column, [like]))
        close(changes, [by_block(rule, rows)[place]])
    _, changes = judge_of(rule, blocks(77), N).judge(case_of(rows))
    flat = bz.combine(rule, [joined(row) for row in rows])
    close([joined(changes)], [flat])


def partial(rule, rows, last=None) -> list[np.ndarray]:
    """Do the whole rules with NaN for what is skipped, in NumPy, by their definitions."""
    likes = blocks(77)
    table = np.array([
        np.concatenate([
            np.full(v.size, np.nan) if u is None else u.ravel().astype(float)
            for u, v in zip(row, likes, strict=True)
        ])
        for row in rows
    ])  # fmt: skip
    there = np.array([[one is not None for one in row] for row in rows])
    cuts = np.cumsum([one.size for one in likes])[:-1]
    d = table.shape[1]

    def gap(row, z):
        return math.sqrt(np.nansum((row - z) ** 2))

    def nanmean(parts):
        with np.errstate(invalid="ignore"):
            n = np.sum(~np.isnan(parts), axis=0)
            return np.where(n > 0, np.nansum(parts, axis=0) / np.maximum(n, 1), 0.0)

    if rule.kind is Kind.NORM_CLIPPING:
        flat = nanmean([row * min(1, rule.radius / gap(row, 0)) for row in table])
    elif rule.kind is Kind.CENTERED_CLIPPING:
        flat = np.zeros(d) if last is None else last
        for _ in range(rule.iterations):
            steps = [(row - flat) * min(1, rule.radius / gap(row, flat)) for row in table]
            flat = flat + nanmean(steps)
        flat = np.where(np.isnan(table).all(axis=0), 0.0, flat)
    elif rule.kind is Kind.GEOMETRIC_MEDIAN:
        flat = nanmean(table)
        for _ in range(rule.iterations):
            w = np.array([1 / max(gap(row, flat), rule.nu) for row in table])[:, None]
            total = np.sum(w * ~np.isnan(table), axis=0)
            flat = np.nansum(w * table, axis=0) / np.where(total > 0, total, 1)
    else:
        squares = np.full((len(rows), len(rows)), reference.FARTHEST)
        for i, one in enumerate(table):
            for j, other in enumerate(table):
                common = np.sum(~np.isnan(one - other))
                if common:
                    squares[i, j] = np.nansum((one - other) ** 2) * d / common
        np.fill_diagonal(squares, 0)
        flat = np.zeros(d)
        for place, part in enumerate(np.split(np.arange(d), cuts)):
            who = np.flatnonzero(there[:, place])
            if not len(who):
                continue
            f, among = rule.lies_among(len(who)), squares[np.ix_(who, who)]
            if rule.kind is Kind.BULYAN:
                chosen = table[who[reference.bulyan_choice(among, f)]][:, part]
                keep = len(chosen) - 2 * f
                flat[part] = reference.mean_near(chosen, np.median(chosen, axis=0), keep)
                continue
            if rule.kind is Kind.CAF:
                flat[part] = reference.caf_weights(among, f) @ table[who][:, part]
                continue
            if rule.kind in (Kind.MDA, Kind.SMEA):
                find = {Kind.MDA: reference.least_diameter, Kind.SMEA: reference.least_spread}
                flat[part] = table[who[find[rule.kind](among, f)]][:, part].mean(axis=0)
                continue
            order = np.argsort(reference.krum_scores(among, f), kind="stable")
            keep = 1 if rule.kind is Kind.KRUM else min(rule.keep or len(who) - f, len(who))
            flat[part] = table[who[order[:keep]]][:, part].mean(axis=0)
    return [one.reshape(v.shape) for one, v in zip(np.split(flat, cuts), likes, strict=True)]


@pytest.mark.parametrize("name", BY_DISTANCE)
@pytest.mark.parametrize("seed", range(4))
def test_whole_models_leave_out_what_is_skipped(name, seed):
    rule, rows = BY_DISTANCE[name], rows_of(skipped=0.35, seed=seed + 1)
    rows[seed][3] = None
    _, changes = judge_of(rule, blocks(77), N).judge(case_of(rows))
    close(changes, partial(rule, rows), 2e-6)
    for nobody in ([], [[None] * len(SHAPES)]):
        verdicts, changes = judge_of(rule, blocks(77), N).judge(case_of(nobody))
        assert not any(verdicts)
        assert not any(one.any() for one in changes)


def test_what_a_rule_keeps_goes_from_round_to_round():
    rule, rows = bz.CenteredClipping(0.5), [[np.full((2, 2), 3.0)], [np.full((2, 2), 3.0)]]
    like, last = [np.zeros((2, 2))], np.zeros((2, 2))
    judge = judge_of(rule, like, 2)
    two = judge_of(rule, [like[0], np.zeros(3)], 2)
    for number in range(1, 5):
        _, changes = judge.judge(case_of(rows, like, number=number))
        last = bz.combine(rule, [row[0] for row in rows], last=last)
        close(changes, [last])
        some = [[one, None] for (one,) in rows]
        _, changes = two.judge(case_of(some, [like[0], np.zeros(3)], number=number))
        close(changes, [last, np.zeros(3)])
    np.testing.assert_allclose(last, 1.0)


@pytest.mark.parametrize("rule", [bz.Krum(1), bz.ARC(bz.NNM(bz.TrimmedMean(1)))])
@pytest.mark.parametrize("whole", [False, True])
def test_buckets_are_drawn_anew_in_each_round(whole, rule):
    rule, rows = bz.Bucketing(rule, size=2, seed=3), rows_of()
    found = []
    for number in (1, 2, 3, 1):
        likes = blocks(77) if whole else blocks(77)[:1]
        some = rows if whole else [row[:1] for row in rows]
        _, changes = judge_of(rule, likes, N).judge(case_of(some, likes, number=number))
        flat = [joined(row) for row in some]
        close([joined(changes)], [bz.combine(rule, flat, version=number)])
        found.append(joined(changes))
    np.testing.assert_array_equal(found[0], found[3])
    assert not np.array_equal(found[0], found[1])


def test_a_mix_of_nearest_updates_has_the_blocks_that_were_sent():
    likes = [np.zeros(2), np.zeros(1)]
    rows = [[np.full(2, 1.0), None], [np.full(2, 2.0), np.ones(1)], [np.full(2, 9.0), np.ones(1)]]
    _, changes = judge_of(bz.NNM(bz.Average(), 1), likes, 3).judge(case_of(rows, likes))
    close(changes, [np.full(2, (1.5 + 1.5 + 5.5) / 3), np.ones(1)])
    _, changes = judge_of(bz.ARC(bz.Average(), 1), likes, 3).judge(case_of(rows, likes))
    factor = 3 / math.sqrt(163)  # of the longest, to the length of the next
    close(changes, [np.full(2, (1 + 2 + 9 * factor) / 3), np.full(1, (1 + factor) / 2)])


def test_f_goes_down_to_what_is_there():
    for rule in (bz.Krum(2), bz.Bulyan(2), bz.TrimmedMean(3), bz.MultiKrum(2, keep=9)):
        for n in (1, 2, 5):
            rows = [row[:1] for row in rows_of(n)]
            _, changes = judge_of(rule, blocks(77)[:1], n).judge(case_of(rows, blocks(77)[:1]))
            close(changes, [bz.combine(rule, [row[0] for row in rows])])


# ---- rules with trusted data


@pytest.mark.parametrize("rule", [bz.Zeno(), bz.FLTrust(), bz.Zeno(eta=0.0)])
def test_trusted_data_judge_blocks_and_models(rule):
    trusted = blocks(77)
    rows = [
        [
            None if (j + place) % 4 == 3 else (-1) ** (j + place) * (0.4 * one + 0.3 * v)
            for place, (one, v) in enumerate(zip(blocks(j), trusted, strict=True))
        ]
        for j in range(N)
    ]
    for place, like in enumerate(trusted):
        column = [row[place] for row in rows]
        made, wanted = rule.combine(column, like)
        verdicts, changes = judge_of(rule, [like], N).judge(case_of([[u] for u in column], [like]))
        close(changes, [made])
        assert [one and one[::3] for one in verdicts] == [one and one[::3] for one in wanted]
        for one, other in zip(verdicts, wanted, strict=True):
            assert one is None or one.score == pytest.approx(other.score)
    there = [[place for place, one in enumerate(row) if one is not None] for row in rows]
    wanted = [
        rule.score(joined(row), joined([trusted[place] for place in places]))
        for row, places in zip(rows, there, strict=True)
    ]
    verdicts, changes = judge_of(rule, trusted, N).judge(case_of(rows, trusted))
    for one, other in zip(verdicts, wanted, strict=True):
        assert one == pytest.approx(other)
    assert len({one.is_accepted for one in wanted}) == 2
    for place, change in enumerate(changes):
        senders = [j for j in range(N) if rows[j][place] is not None]
        total = sum(rule.weight(wanted[j]) for j in senders)
        made = sum(wanted[j].factor * rows[j][place].astype(float) for j in senders)
        close([change], [made / total if total else 0 * made])


def test_single_updates_by_delay_and_trusted_data():
    u, model = [np.ones(4, np.float32)], np.zeros(4, np.float32)

    def alone(rule, update, trusted, delay=0):
        judge = judge_of(rule, [model], 1)
        return judge.judge_alone(Case([update], [0], trusted, [model], delay=delay))

    (verdict,), changes = alone(bz.FedAsync(alpha=1.0, power=1.0), u, u, delay=3)
    assert verdict.factor == 0.25
    close(changes, [0.25 * u[0]])
    (verdict,), changes = alone(bz.FedAsync(alpha=0.5, is_damped=True), u, [0 * u[0]])
    assert verdict.factor == 0.25
    (verdict,), changes = alone(bz.ZenoPlusPlus(), [-u[0]], u)
    assert not verdict.is_accepted
    assert not changes[0].any()
    (verdict,), changes = alone(bz.ZenoPlusPlus(alpha=0.5, is_strict=False), [-2 * u[0]], u)
    close(changes, [0.5 * u[0]])  # turned back, and no longer than the trusted one
    (verdict,), changes = alone(bz.ZenoPlusPlus(), [None], u)
    assert verdict is None
    assert not changes[0].any()


def test_history_is_of_each_block_by_itself():
    rule = bz.Kardam(f=0)
    judges = [judge_of(rule, [np.zeros(size)], 1) for size in (3, 5)]
    whole = judge_of(rule, [np.zeros(3), np.zeros(5)], 1)
    apart = [bz.Kardam(f=0), bz.Kardam(f=0)]
    for step in range(4):
        models = [np.full(3, float(step)), np.full(5, 100.0 * step)]
        update = [0.1 * models[0], 7.0 * models[1]]
        for place, judge in enumerate(judges):
            case = Case([[update[place]]], [4], [models[place]], [models[place]])
            (found,), _ = judge.judge_alone(case)
            assert found == apart[place].score(4, update[place], models[place])
        partly = [update[0], None if step == 2 else update[1]]
        (found,), _ = whole.judge_alone(Case([partly], [4], models, models))
        wanted = (0.0, 7.0, 0.1, 7.0)[step]  # the second block is 100 times as long
        assert found.score == pytest.approx(wanted, rel=1e-3)


class FirstElement:
    """A rule of one's own."""

    def score(self, update, trusted):
        assert update.shape == trusted.shape
        good = update[0] > 0
        return Verdict(good, float(update[0]), float(good), "" if good else "negative")


class Longest:
    """Another one, which looks at all side by side."""

    def combine(self, updates, trusted):
        best = max((one for one in updates if one is not None), key=np.linalg.norm)
        return best, [one if one is None else Verdict(one is best, 0.0, 1.0) for one in updates]


def largest(table):
    """Take the largest of each element."""
    return table.max(axis=0)


def test_rules_of_ones_own():
    rows = [[np.array([1.0, 2.0])], [np.array([-1.0, 9.0])]]
    like = [np.zeros(2)]
    verdicts, changes = judge_of(FirstElement(), like, 2).judge(case_of(rows, like))
    close(changes, [np.array([0.5, 1.0])])
    assert [one.reason for one in verdicts] == ["", "negative"]
    verdicts, changes = judge_of(Longest(), like, 2).judge(case_of(rows, like))
    close(changes, rows[1])
    two = [np.zeros(2), np.zeros(1)]
    parts = [[rows[0][0], np.array([5.0])], [rows[1][0], None], [None, None]]
    verdicts, changes = judge_of(Longest(), two, 3).judge(case_of(parts, two))
    close(changes, parts[0])
    assert [one and one.reason for one in verdicts] == ["", "partial", None]
    verdicts, changes = judge_of(FirstElement(), two, 3).judge(case_of(parts, two))
    assert [one and one.reason for one in verdicts] == ["", "negative", None]
    for rule in (largest, f"{__name__}:largest"):
        _, changes = judge_of(rule, like, 2).judge(case_of(rows, like))
        close(changes, [np.array([1.0, 9.0])])
        verdicts, changes = judge_of(rule, two, 3).judge(case_of(parts, two))
        close(changes, parts[0])
        assert verdicts[1].reason == "partial"


@pytest.mark.parametrize(
    ("rule", "words"),
    [(bz.Zeno, "Zeno has no parameters yet"), (bz.TrimmedMean, "TrimmedMean has no"),
     (3, "neither score"), ("krum", "not one of"), ("none", "needs a rule"),
     ("no_such:place", "cannot be imported")],
)  # fmt: skip
def test_what_is_no_rule_is_said(rule, words):
    with pytest.raises(ConfigError, match=words):
        judge_of(rule, [np.zeros(3)], 2)
    with pytest.raises(ConfigError, match="add validators"):
        judge_of("median", [np.zeros(3)], 300)
