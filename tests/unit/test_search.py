# SPDX-License-Identifier: Apache-2.0
"""The search for the best setting: bounded, repeatable, near the best, never worse than before."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.session.autotune_search import (
    FINALISTS,
    GAIN,
    MAX_SWEEPS,
    TURNS,
    Knob,
    Search,
    Setting,
)

KNOBS = (
    Knob("credit", tuple(1 << shift for shift in range(18, 25)), 0),
    Knob("partition", tuple(1 << shift for shift in range(19, 25)), 4096000),
    Knob("bucket", tuple(1 << shift for shift in range(18, 24)), 1 << 20),
)


def run(search: Search, seconds_of) -> list[Setting]:
    lines = MAX_SWEEPS * sum(len(knob.values) for knob in search.knobs)
    most = 1 + lines + TURNS * (FINALISTS + 1)  # each line measures fewer than its values
    asked = []
    while not search.is_over:
        asked.append(search.setting)
        assert len(asked) <= most
        search.measured(seconds_of(search.setting))
    assert search.trials == len(asked)
    return asked


def bowl(best: Setting, steepness: float):
    """Model a step that each knob makes longer the farther it is from its best, in octaves."""

    def seconds_of(setting: Setting) -> float:
        octaves = [
            math.log2(max(value, 1 << 19) / there)
            for value, there in zip(setting, best, strict=True)
        ]
        return 1 + steepness * sum(abs(octave) for octave in octaves)

    return seconds_of


settings = st.tuples(*(st.sampled_from(knob.values) for knob in KNOBS))
seeds = st.integers(0, 1 << 32)


@given(settings, st.floats(0.02, 1), seeds)
def test_the_best_of_a_bowl_is_found(best, steepness, seed):
    seconds_of = bowl(best, steepness)
    search = Search(KNOBS, seed=seed)
    run(search, seconds_of)
    least = min(seconds_of(best), seconds_of(search.start))
    assert seconds_of(search.setting) * (1 - GAIN) <= least  # a smaller gain is not taken


@given(seeds, seeds, st.floats(0, 0.5))
def test_whatever_is_measured_the_search_ends_and_repeats(seed, luck, noise):
    def measured(source):
        return lambda setting: 1 + noise * source.random()

    one, other = Search(KNOBS, seed=seed), Search(KNOBS, seed=seed)
    asked = run(one, measured(random.Random(luck)))
    assert asked == run(other, measured(random.Random(luck)))
    assert one.setting == other.setting
    assert one.gain == other.gain
    assert set(one.setting) <= {value for knob in KNOBS for value in (*knob.values, knob.start)}


@given(seeds, st.integers(0, 1 << 16))
def test_where_nothing_helps_what_was_there_stays(seed, luck):
    """Noise of 1 % is no gain."""
    source = random.Random(luck)
    search = Search(KNOBS, seed=seed)
    run(search, lambda setting: 1 + 0.01 * source.random())
    assert search.setting == search.start
    assert search.gain == 0


def test_the_better_of_two_valleys_is_found():
    seconds = {18: 0.8, 19: 0.9, 20: 1.0, 21: 0.97, 22: 0.95, 23: 0.93}
    search = Search((KNOBS[2],))
    run(search, lambda setting: seconds[setting[0].bit_length() - 1])
    assert search.setting == (1 << 18,)


def test_luck_in_one_measurement_does_not_win():
    lucky = (1 << 20, 4096000, 1 << 20)
    seen = []

    def seconds_of(setting: Setting) -> float:
        seen.append(setting)
        return 0.5 if setting == lucky and seen.count(lucky) == 1 else 1.0

    knobs = (Knob("credit", (1 << 20,), 0), *KNOBS[1:])
    search = Search(knobs)
    run(search, seconds_of)
    assert lucky in seen
    assert search.setting == search.start


def test_a_gain_is_told():
    search = Search((Knob("credit", (1, 2, 4), 0),))
    run(search, lambda setting: 3.0 if setting == (2,) else 4.0)
    assert search.setting == (2,)
    assert search.gain == pytest.approx(0.25)


@pytest.mark.parametrize("knobs", [(), (Knob("credit", (), 0),)])
def test_a_search_without_choice_is_refused(knobs):
    with pytest.raises(ValueError, match="a search needs"):
        Search(knobs)


def test_seeds_change_the_order():
    orders = {tuple(run(Search(KNOBS, seed=seed), bowl((1 << 20,) * 3, 0.1))) for seed in range(8)}
    assert len(orders) > 1
