# SPDX-License-Identifier: Apache-2.0
"""Values that are followed by encoded changes: nothing is lost or counted twice, both ways."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_gathered import JOIN, SHORT_S, House, Model, N

from fastps import byzantine
from fastps.algorithms import outer
from fastps.contract.codec import Codec, Coding, Option
from fastps.types import DType

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from codec_oracle import Reference

EF = Option.FEEDBACK
# A codec, and how much of the largest difference may be left of any after an answer.
CODECS = [
    (Coding(Codec.FP16, 0, EF), 1e-3),
    (Coding(Codec.BF16), 1e-2),
    (Coding(Codec.INT8, 0, EF), 0.005),
    (Coding(Codec.INT4, 0, EF), 0.08),
    (Coding(Codec.INT4, 11, EF), 0.11),
    (Coding(Codec.TOPK, 0.1, EF), 1.0),
    (Coding(Codec.RANDOMK, 0.2, EF, seed=3), 1.0),
    (Coding(Codec.ONEBIT, 0, EF | Option.SCALING), 2.0),
]
# Of a round: who pushes, and who of the others sits it out.
ROUNDS = st.lists(
    st.tuples(st.sets(st.integers(0, N - 1), min_size=1), st.sets(st.integers(0, N - 1))),
    min_size=1, max_size=6,
)  # fmt: skip


class Coded(Model):
    """The server, and what the workers' codecs make of their updates."""

    def __init__(self, house: House, optimizer: outer.Outer, coding: Coding) -> None:
        super().__init__(house, optimizer, byzantine.Average())
        self.pieces = [(at // 4, (at + nbytes) // 4) for at, nbytes in house.pieces]
        self.coders = [
            [Reference(coding, end - at, name="t", partition=i, rank=rank, pushes=True)
             for i, (at, end) in enumerate(self.pieces)]
            for rank in range(N)
        ]  # fmt: skip
        self.has = [self.value.copy() for _ in range(N)]
        self.answers: list[tuple[int, ...]] = [()] * N

    def encode(self, house: House, rank: int, update: np.ndarray) -> np.ndarray:
        """Give what the server decodes of a worker's next push."""
        version = house.tensors[rank].version + 1
        return np.concatenate([
            coder.encode(update[at:end], version)
            for coder, (at, end) in zip(self.coders[rank], self.pieces, strict=True)
        ])  # fmt: skip

    def check_answer(self, house: House, rank: int, share: float) -> None:
        """A worker is nearer to the value; with the same answers as another, just where that is.

        share: of the largest difference that may be left.
        """
        assert house.wait(rank) == 0
        self.answers[rank] = (*self.answers[rank], house.tensors[rank].stamp)
        was, found = np.abs(self.value - self.has[rank]).max(), house.values[rank].copy()
        assert np.abs(self.value - found).max() <= share * was + 1e-4
        self.has[rank] = found
        for other in range(N):
            if self.answers[other] == self.answers[rank]:
                assert (self.has[other] == found).all()


def run_round(
    house: House, model: Coded, givers: set[int], sitting: set[int], step: int, share: float
) -> None:
    """Do a round with those who push, late ones among them, and those who sit it out."""
    present = []
    for rank in sorted(givers):
        update = house.drawn(rank, step)
        decoded = model.encode(house, rank, update)
        house.push(rank, update)
        if model.push(rank, decoded):
            present.append(rank)
        else:
            model.check_answer(house, rank, share)
    for rank in sorted(sitting - givers):
        if model.seen[rank] == model.stamp:
            house.pull(rank, JOIN)
            present.append(rank)
    if not present:
        return
    if len(present) < N:
        time.sleep(SHORT_S)  # for what was pushed to be there
    while house.wait(present[-1], 0.001) is None:
        house.end()
    for rank in present:
        assert house.wait(rank) == 0
    found = house.store.absences()
    # else the machine was so slow that more were late than should be
    assume([found.get(rank, (0, 0))[1] for rank in range(N)] == model.late)
    model.end(present, list(range(N)))
    for rank in present:
        model.check_answer(house, rank, share)


@pytest.mark.parametrize(("coding", "share"), CODECS, ids=lambda one: str(one)[:32])
@settings(max_examples=8)
@given(rounds=ROUNDS)
def test_updates_count_once_and_what_codecs_lose_comes_later(coding, share, rounds):
    with closing(
        House("inproc", outer.Nesterov(), byzantine.Average(), DType.FLOAT32, coding, 3000)
    ) as house:
        model = Coded(house, outer.Nesterov(), coding)
        house.say(model.value, -1.0)
        for rank in range(N):
            assert (house.read(rank) == model.value).all()
        for step, (givers, sitting) in enumerate(rounds):
            run_round(house, model, givers, sitting, step, share)
        for rank in range(N):
            for kept, coder in zip(house.tensors[rank].kept(), model.coders[rank], strict=True):
                if coding.has(EF):
                    np.testing.assert_array_equal(np.frombuffer(kept[0], "f4"), coder.residual)
        if model.kept:  # of those who came too late for the last round
            rank = model.seen.index(model.stamp)
            house.pull(rank, JOIN)
            while house.wait(rank, 0.001) is None:
                house.end()
            model.end([rank], list(range(N)))
        np.testing.assert_allclose(house.read(1), model.value, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("coding", [Coding(Codec.TOPK, 0.3, EF), Coding(Codec.INT4, 11, EF)])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_who_was_away_comes_back_to_the_value_though_answers_lose(coding, dtype):
    with closing(House("tcp4", outer.Outer(), byzantine.Average(), dtype, coding)) as house:
        house.say(house.drawn(99), -1.0)
        for rank in range(1, N):
            house.read(rank)
        for step in range(3):
            for rank in range(1, N):
                house.push(rank, house.drawn(rank, step))
            assert house.wait(1, SHORT_S) is None
            while house.wait(1, 0.001) is None:
                house.end()
            for rank in range(2, N):
                assert house.wait(rank) == 0
        nothing = np.zeros(house.count, house.dtype)
        apart = []
        for _ in range(30):
            for rank in range(N):
                house.push(rank, nothing)
            while house.wait(N - 1, 0.001) is None:  # in the first worker 0 is late
                house.end()
            for rank in range(N):
                assert house.wait(rank) == 0
            apart.append(max(np.abs(one - house.values[0]).max() for one in house.values))
        assert apart[0] > 0.1  # worker 0 had one answer in the place of three
        assert apart[-1] < 1e-5
        np.testing.assert_allclose(house.read(1), house.values[0], atol=1e-5)
