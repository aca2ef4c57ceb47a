# SPDX-License-Identifier: Apache-2.0
"""Rules against liars: the formulas, what their parameters mean, and the kernels beside them."""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps import byzantine as bz
from fastps.byzantine import reference
from fastps.contract.rule import Kind, Rule
from fastps.errors import ConfigError
from fastps.reduce._partition import Combiner
from fastps.reduce.user_rules import find_own
from fastps.types import DType

RULES = {
    "average": bz.Average(),
    "trimmed": bz.TrimmedMean(2),
    "share": bz.TrimmedMean(share=0.2),
    "median": bz.Median(),
    "phocas": bz.Phocas(2),
    "phocas share": bz.Phocas(share=0.2),
    "around median": bz.MeanAroundMedian(2),
    "signs": bz.SignMajority(),
    "clip": bz.NormClipping(3.0),
    "centered": bz.CenteredClipping(2.0, iterations=3),
    "centered once": bz.CenteredClipping(2.0),
    "geometric": bz.GeometricMedian(iterations=5),
    "krum": bz.Krum(2),
    "multi-krum": bz.MultiKrum(2),
    "multi-krum of 3": bz.MultiKrum(2, keep=3),
    "bulyan": bz.Bulyan(2),
    "mda": bz.MDA(2),
    "smea": bz.SMEA(2),
    "caf": bz.CAF(2),
    "nnm smea": bz.NNM(bz.SMEA(2)),
    "clip nnm caf": bz.Clipping(bz.NNM(bz.CAF(2)), 80.0),
    "clip median": bz.Clipping(bz.Median(), 20.0),
    "buckets of mda": bz.Bucketing(bz.MDA(1), size=2),
    "buckets": bz.Bucketing(bz.Median(), size=2, seed=7),
    "buckets of krum": bz.Bucketing(bz.Krum(1), size=2),
    "nnm trimmed": bz.NNM(bz.TrimmedMean(2)),
    "nnm average": bz.NNM(bz.Average(), 2),
    "nnm signs": bz.NNM(bz.SignMajority(), 2),
    "nnm krum": bz.NNM(bz.Krum(2)),
    "nnm multi-krum": bz.NNM(bz.MultiKrum(2)),
    "nnm clip": bz.NNM(bz.NormClipping(3.0), 2),
    "arc": bz.ARC(bz.Average(), 2),
    "arc trimmed": bz.ARC(bz.TrimmedMean(2)),
    "arc nnm geometric": bz.ARC(bz.NNM(bz.GeometricMedian(iterations=5), 2)),
    "arc nnm centered": bz.ARC(bz.NNM(bz.CenteredClipping(2.0), 2)),
    "buckets arc nnm median": bz.Bucketing(bz.ARC(bz.NNM(bz.Median(), 1)), size=2),
}
# Rules that no f of n updates can lead out of what the others say, element by element.
BOUNDED = ("trimmed", "median", "phocas", "around median", "bulyan")
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


def updates_of(n: int, count: int, seed: int, kind: str = "float32") -> list[np.ndarray]:
    """Make updates around one direction."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=count) + rng.normal(size=(n, count))
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else kind
    return [np.ascontiguousarray(row) for row in made.astype(dtype)]


def same(found: np.ndarray, wanted: np.ndarray, kind: str = "float32", **more: float) -> None:
    """Compare, as closely as the element type allows."""
    limit = TOLERANCE[kind]
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    np.testing.assert_allclose(found.astype(float), wanted, atol=limit * scale, rtol=limit)


def run(rule: Rule, updates: list, *, n: int = 11, version: int = 1, code=DType.FLOAT32):
    """Let the kernels do it."""
    count = next(one.size for one in updates if one is not None)
    return Combiner(rule, code, n=n, count=count).combine(updates, version=version)


@pytest.mark.parametrize("name", RULES)
def test_kernels_do_what_the_formulas_say(name):
    rule = RULES[name]
    for count in (0, 1, 15, 16, 64, 1023, 5000):
        updates = updates_of(11, count, seed=count)
        found, refused = run(rule, updates, version=3)
        same(found, bz.combine(rule, updates, version=3))
        assert refused == []


@pytest.mark.parametrize("name", RULES)
def test_updates_that_are_missing_or_no_numbers_do_not_count(name):
    rule, updates = RULES[name], updates_of(11, 333, seed=5)
    for bad in (np.nan, np.inf, -np.inf):
        broken = list(updates)
        broken[4] = updates[4].copy()
        broken[4][200] = bad
        broken[7] = None
        left = [one for place, one in enumerate(updates) if place not in (4, 7)]
        found, refused = run(rule, broken, version=2)
        assert refused == [4]
        same(found, bz.combine(rule, broken, version=2))
        same(found, bz.combine(rule, left, version=2))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("m", [0, 1, 2, 3, 4])
def test_few_updates_make_do_with_what_they_stand(name, m):
    rule, updates = RULES[name], updates_of(11, 40, seed=m)
    given_ones = [*updates[:m], *([None] * (11 - m))]
    if m == 0:
        made = Combiner(rule, DType.FLOAT32, n=11, count=40).combine(given_ones)[0]
        assert made.shape == (40,)
        assert not made.any()
        return
    found, _ = run(rule, given_ones)
    same(found, bz.combine(rule, given_ones))
    if rule.share and m <= 2:
        assert not found.any()


@pytest.mark.parametrize("name", RULES)
def test_all_element_types(name):
    for kind in ("float64", "float16", "bfloat16"):
        updates = updates_of(11, 777, seed=8, kind=kind)
        found, _ = run(RULES[name], updates, code=DType[kind.upper()])
        assert found.dtype == updates[0].dtype
        same(found, bz.combine(RULES[name], updates), kind)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 40])
def test_networks_and_counting_agree_for_any_number(n):
    f = (n - 1) // 2
    updates = updates_of(n, 100, seed=n)
    for rule in (bz.Median(), bz.TrimmedMean(f), bz.Phocas(f), bz.MeanAroundMedian(f)):
        found, _ = run(rule, updates, n=n)
        same(found, bz.combine(rule, updates))


def test_zero_updates_are_updates():
    updates = [np.zeros(30, np.float32)] * 3 + updates_of(8, 30, seed=1)
    for rule in RULES.values():
        found, refused = run(rule, updates)
        same(found, bz.combine(rule, updates))
        assert refused == []
    found, _ = run(bz.NormClipping(1.0), [np.zeros(30, np.float32)] * 11)
    assert not found.any()


@pytest.mark.parametrize(("iterations", "count"), [(2, 64), (1, 64), (1, 10_001)])
def test_centered_clipping_goes_on_from_its_last_result(iterations, count):
    rule, last = bz.CenteredClipping(0.5, iterations=iterations), np.zeros(count)
    combiner = Combiner(rule, DType.FLOAT32, n=5, count=count)
    for version in range(1, 5):
        updates = updates_of(5, count, seed=version)
        found, _ = combiner.combine(updates, version=version)
        last = bz.combine(rule, updates, last=last)
        same(found, last)


def test_buckets_are_drawn_anew_in_each_round():
    rule, updates = bz.Bucketing(bz.Median(), size=3, seed=1), updates_of(11, 50, seed=3)
    rounds = [run(rule, updates, version=version)[0] for version in range(1, 4)]
    assert not np.array_equal(rounds[0], rounds[1])
    for version, found in enumerate(rounds, 1):
        same(found, bz.combine(rule, updates, version=version))
    assert sorted(reference.bucket_order(11, 1, 1)) == list(range(11))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(RULES)))
def test_the_order_of_workers_means_nothing(seed, name):
    if RULES[name].bucket or name == "bulyan":
        return  # whose last choices go by one nearest other, and two are each other's
    rng = np.random.default_rng(seed)
    updates = updates_of(11, 21, seed=seed)
    order = rng.permutation(11)
    first, _ = run(RULES[name], updates)
    second, _ = run(RULES[name], [updates[i] for i in order])
    np.testing.assert_allclose(first, second, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), name=st.sampled_from(BOUNDED),
    lie=st.sampled_from([1e-9, 1.0, 1e3, 1e30, -1e30, 3e38, np.inf, np.nan]),
)  # fmt: skip
def test_two_liars_cannot_lead_out_of_what_the_others_say(seed, name, lie):
    honest = updates_of(9, 17, seed=seed)
    rng = np.random.default_rng(seed)
    lies = [(np.float32(lie) * np.sign(rng.normal(size=17))).astype("f4") for _ in range(2)]
    updates = [*honest, *lies]
    order = rng.permutation(11)
    found, _ = run(RULES[name], [updates[i] for i in order])
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    slack = 1e-5 * (np.abs(low) + np.abs(high))
    if name in ("phocas", "around median", "bulyan"):  # a lie near the center may count
        spread = high - low
        assert (found >= low - spread).all()
        assert (found <= high + spread).all()
    else:
        assert (found >= low - slack).all()
        assert (found <= high + slack).all()


@pytest.mark.parametrize(
    "name", ["krum", "multi-krum", "geometric", "centered", "clip", "mda", "smea", "caf"]
)
@pytest.mark.parametrize("lie", [10.0, 1e4, 1e12, 1e30])
def test_two_liars_cannot_move_whole_vectors_far(name, lie):
    honest = updates_of(9, 500, seed=4)
    truth = np.mean(honest, axis=0)
    lies = [np.full(500, lie, np.float32)] * 2
    rule = bz.NormClipping(30.0) if name == "clip" else RULES[name]
    rule = bz.GeometricMedian() if name == "geometric" else rule
    rounds = Combiner(rule, DType.FLOAT32, n=11, count=500)
    for _ in range(30):
        found, refused = rounds.combine([*honest, *lies])
    assert refused == []
    assert np.linalg.norm(found - truth) < 40  # honest ones are 22 from it
    average = np.mean([*honest, *lies], axis=0, dtype=np.float64)
    assert np.linalg.norm(average - truth) > 40  # what the rule is for


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), far=st.sampled_from([1e3, 1e12, 1e30]))
def test_what_comes_before_a_rule(seed, far):
    honest = updates_of(9, 2100, seed=seed)
    lies = [np.full(2100, far, np.float32), np.full(2100, -far, np.float32)]
    near, mean = bz.NNM(bz.Average(), 2), np.mean(honest, axis=0)
    spread = max(np.linalg.norm(one - mean) for one in honest)
    for rule in (bz.NNM(bz.Median(), 2), bz.NNM(bz.Krum(2)), bz.NNM(bz.TrimmedMean(2))):
        found, _ = run(rule, [*honest, *lies])  # no honest one is mixed with a lie
        assert np.linalg.norm(found - mean) <= spread
    clipped, _ = run(bz.ARC(bz.Average(), 2), [*honest, *lies])
    longest = max(np.linalg.norm(one) for one in honest)
    assert np.linalg.norm(clipped) <= longest * (1 + 1e-6)
    same(run(near, honest[:1] * 11)[0], honest[0])  # equal updates stay what they are
    same(run(bz.ARC(bz.Median(), 2), honest[:1] * 11)[0], honest[0])
    for rule in (bz.Median(), bz.Krum(0), bz.TrimmedMean(0)):  # of one update f is 0: no change
        same(run(bz.ARC(bz.NNM(rule, 1), 1), [*honest[:1], *[None] * 10])[0], honest[0])
    mixed, wanted = bz.NNM(bz.Bulyan(2)), updates_of(11, 2100, seed=1)
    same(run(mixed, wanted)[0], bz.combine(mixed, wanted))


def covariance_top(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Return mean, largest eigenvalue and eigenvector of the covariance, by its definition."""
    mean = weights @ rows / weights.sum()
    covariance = (weights[:, None] * (rows - mean)).T @ (rows - mean) / weights.sum()
    values, vectors = np.linalg.eigh(covariance)
    return mean, values[-1], vectors[:, -1]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(3, 9), far=st.sampled_from([0.0, 2.0, 1e3, 1e9])
)  # fmt: skip
def test_spectra_and_subsets_are_those_of_the_papers(seed, n, far):
    f = (n - 1) // 2
    rows = np.array(updates_of(n, 7, seed, "float64"))
    rows[:f] += far * np.random.default_rng(seed).normal(size=(f, 7))
    subsets = [list(one) for one in itertools.combinations(range(n), n - f)]
    even = np.ones(n - f)
    diameters = [max(np.linalg.norm(a - b) for a in rows[s] for b in rows[s]) for s in subsets]
    spreads = [covariance_top(rows[s], even)[1] for s in subsets]
    counts, best, least = np.ones(n), rows.mean(axis=0), np.inf
    while counts.sum() > n - 2 * f:
        mean, value, vector = covariance_top(rows, counts)
        best, least = (mean, value) if value < least else (best, least)
        tau = np.where(counts > 0, ((rows - mean) @ vector) ** 2, 0)
        counts = counts * (1 - tau / tau.max())
    wanted = {
        bz.MDA(f): rows[subsets[int(np.argmin(diameters))]].mean(axis=0),
        bz.SMEA(f): rows[subsets[int(np.argmin(spreads))]].mean(axis=0),
        bz.CAF(f): best,
    }
    for rule, value in wanted.items():
        np.testing.assert_allclose(bz.combine(rule, rows), value, rtol=1e-5, atol=1e-5)
        found, _ = run(rule, list(rows), n=n, code=DType.FLOAT64)
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)


def test_exact_numbers_by_hand():
    rows = [np.array([float(x)]) for x in (0, 1, 2, 3, 100)]
    wanted = {
        bz.Median(): 2, bz.TrimmedMean(1): 2, bz.TrimmedMean(2): 2, bz.Average(): 21.2,
        bz.MeanAroundMedian(2): 2, bz.MeanAroundMedian(1): 1.5, bz.Phocas(1): 1.5,
        bz.SignMajority(): 1, bz.Krum(1): 1, bz.MultiKrum(1): 1.5, bz.MultiKrum(1, keep=1): 1,
        bz.NormClipping(2.0): 7 / 5, bz.CenteredClipping(2.0): 7 / 5,
        bz.TrimmedMean(share=0.2): 2, bz.Phocas(share=0.2): 1.5,
        bz.NNM(bz.Average(), 1): (4 * 1.5 + 26.5) / 5, bz.NNM(bz.Krum(1)): 1.5,
        bz.MDA(1): 1.5, bz.MDA(2): 1, bz.SMEA(1): 1.5, bz.CAF(0): 21.2,
        bz.Clipping(bz.Average(), 4.0): 2, bz.ARC(bz.Average(), 1): 9 / 5,
        bz.NNM(bz.Median(), 2): 2,
    }  # fmt: skip
    for rule, value in wanted.items():
        assert bz.combine(rule, rows)[0] == pytest.approx(value), rule
        assert run(rule, rows, n=5, code=DType.FLOAT64)[0][0] == pytest.approx(value), rule


def test_a_rule_of_the_users_in_python_and_in_machine_code():
    numba = pytest.importorskip("numba")
    types = numba.types
    row = types.CPointer(types.float32)
    signature = types.int64(
        types.CPointer(row), types.int64, row, types.int64, types.CPointer(types.int64)
    )

    @numba.cfunc(signature)
    def largest(sources, n, target, count, version):
        for i in range(count):
            target[i] = max([sources[j][i] for j in range(n)])
        return 1

    updates = updates_of(4, 50, seed=2)
    updates[2][7] = np.nan
    for function in (lambda rows: rows.max(axis=0), largest):
        combiner = Combiner(bz.Own("some:rule"), DType.FLOAT32, n=4, count=50, function=function)
        found, refused = combiner.combine(updates)
        np.testing.assert_array_equal(found, np.max([updates[i] for i in (0, 1, 3)], axis=0))
        assert refused == [2]
    failing = Combiner(
        bz.Own("some:rule"), DType.FLOAT32, n=4, count=50, function=lambda rows: rows
    )
    with pytest.raises(RuntimeError, match="status"):
        failing.combine(updates)
    with pytest.raises(TypeError, match="a function or a Numba cfunc"):
        Combiner(bz.Own("some:rule"), DType.FLOAT32, n=4, count=50, function=3)


def test_more_updates_than_it_has_room_for_are_refused():
    combiner = Combiner(bz.Krum(1), DType.FLOAT32, n=5, count=40)
    with pytest.raises(ValueError, match="5 updates at most, got 6"):
        combiner.combine(updates_of(6, 40, seed=1))


@pytest.mark.parametrize(
    ("rule", "n", "said"),
    [
        (bz.TrimmedMean(2), 4, "needs 5 updates or more; there are 4 workers: take f=1"),
        (bz.Phocas(1), 2, "needs 3"),
        (bz.MeanAroundMedian(3), 6, "needs 7"),
        (bz.Krum(1), 4, "needs 5"),
        (bz.MultiKrum(1), 4, "needs 5"),
        (bz.Bulyan(1), 6, "needs 7"),
        (bz.Bucketing(bz.Krum(1)), 8, "in 4 buckets of 2: take f=0"),
        (bz.Bucketing(bz.Krum(0)), 3, "in 2 buckets of 2: take another rule"),
        (bz.NNM(bz.Median(), 3), 6, "need 7 updates or more, got 6: take f=2"),
        (bz.SMEA(2), 4, "needs 5 updates or more"),
        (bz.MDA(10), 21, "compares 352716 subsets, more than 65536: take CAF"),
        (bz.MultiKrum(1, keep=6), 5, "at most the 5 updates, got 6"),
        (bz.Median(), 257, "at most 256"),
    ],
)
def test_parameters_that_n_workers_cannot_have(rule, n, said):
    with pytest.raises(ValueError, match=said):
        rule.check_voices(n, DType.FLOAT32)


def test_parameters_that_mean_nothing():
    for make in (
        lambda: bz.TrimmedMean(), lambda: bz.TrimmedMean(1, share=0.1), lambda: bz.TrimmedMean(-1),
        lambda: bz.TrimmedMean(share=0.5), lambda: bz.CenteredClipping(0.0),
        lambda: bz.CenteredClipping(1.0, iterations=0), lambda: bz.NormClipping(float("nan")),
        lambda: bz.GeometricMedian(iterations=0), lambda: bz.MultiKrum(1, keep=0),
        lambda: bz.Bucketing(bz.Median(), size=1), lambda: bz.rule_of("krum"),
        lambda: bz.Bucketing(bz.Bucketing(bz.Median())), lambda: bz.Own("nowhere"),
        lambda: bz.TrimmedMean(0.2), lambda: bz.TrimmedMean("1"), lambda: bz.NormClipping("1"),
        lambda: bz.rule_of(bz.Krum), lambda: bz.NNM(bz.Median()), lambda: bz.NNM(bz.Krum(1), -1),
        lambda: bz.Clipping(bz.Median(), 0), lambda: bz.Clipping(bz.Median(), -1.0),
        lambda: bz.ARC(bz.Clipping(bz.Krum(1), 1.0)),
        lambda: bz.NNM(bz.ARC(bz.Krum(1))), lambda: bz.ARC(bz.Own("some:rule"), 1),
        lambda: bz.rule_of(type("Made", (), {"__module__": "__main__", "__call__": len})()),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(TypeError):
        bz.rule_of(3)
    with pytest.raises(TypeError, match="for a rule"):
        bz.Bucketing("median")
    with pytest.raises(TypeError, match="floats"):
        bz.Median().check_voices(3, DType.INT32)
    assert bz.rule_of("median") == Rule(Kind.MEDIAN)
    assert bz.rule_of("my.module:rule").own == "my.module:rule"
    assert bz.rule_of(updates_of) == bz.Own(updates_of)
    assert "trimmed_mean(f=2)" in str(bz.TrimmedMean(2))


def test_a_server_finds_a_rule_of_the_user_s_in_the_present_folder(tmp_path, monkeypatch):
    tmp_path.joinpath("rules_of_mine.py").write_text("def least(table): return table.min(axis=0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    mine = bz.rule_of("rules_of_mine:least")
    assert find_own(mine, "rules_of_mine:least")(np.arange(6).reshape(2, 3)).tolist() == [0, 1, 2]
    assert find_own(bz.rule_of("median"), "") is None
    with pytest.raises(ConfigError, match="FASTPS_RULES"):
        find_own(mine, "other:least")
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_own(bz.rule_of("nowhere_to_be:found"), "nowhere_to_be:found")
