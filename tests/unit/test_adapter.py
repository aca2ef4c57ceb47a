# SPDX-License-Identifier: Apache-2.0
"""The round of one optimizer step against a plain model, and the naming of parameters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fastps.errors import FastPSError, MismatchError, PeerLostError, StallError
from fastps.frameworks import gradient_round
from fastps.frameworks.gradient_round import (
    Average,
    Round,
    Sum,
    check_name,
    derived_names,
    given_names,
    plan_buckets,
)

COUNT = 4


class DoneHandle:
    """A handle that ends at once, well or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.timeouts: list[float | None] = []

    def wait(self, timeout_s: float | None = None) -> None:
        self.timeouts.append(timeout_s)
        if self.error is not None:
            raise self.error


class RoundMachine(RuleBasedStateMachine):
    """Drive a Round and a model of it: sets of positions instead of stages."""

    @initialize(kind=st.lists(st.integers(0, COUNT - 1), min_size=COUNT, max_size=COUNT))
    def begin(self, kind: list[int]) -> None:
        """Sort gradients into buckets of random shapes."""
        found = [[i for i in range(COUNT) if kind[i] == k] for k in range(COUNT)]
        self.buckets = [members for members in found if members]
        self.passes = 1
        self.round: Round[int] = Round([], 1)
        self.round.extend([f"p{i}" for i in range(COUNT)], self.buckets)
        self.flying: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.counts = dict.fromkeys(range(COUNT), 0)
        self.ready: list[int] = []  # of buckets that are not
        self.sent: set[int] = set()
        self.is_closed = False

    def bucket_of(self, index: int) -> int:
        return next(b for b, members in enumerate(self.buckets) if index in members)

    @rule(index=st.integers(0, COUNT - 1))
    def gradient(self, index: int) -> None:
        if self.is_closed:
            self.reset()
        bucket = self.bucket_of(index)
        assert self.round.bucket_of(index) == bucket
        if bucket in self.sent or index in self.ready:
            with pytest.raises(FastPSError, match=f"'p{index}' was computed more than"):
                self.round.arrived(index)
            return
        self.counts[index] += 1
        if self.counts[index] == self.passes:
            self.ready.append(index)
        is_due = all(self.counts[i] >= self.passes for i in self.buckets[bucket])
        assert self.round.arrived(index) is is_due
        if is_due:
            self.start([bucket])

    def start(self, buckets: list[int]) -> None:
        self.round.started(DoneHandle(), buckets, buckets)
        self.flying.extend(buckets)
        self.sent.update(buckets)
        self.ready = [i for i in self.ready if self.bucket_of(i) not in self.sent]

    @rule()
    def synchronize(self) -> None:
        places = range(len(self.buckets))
        missing = self.round.missing(places)
        assert missing == [b for b in places if b not in self.sent]
        if missing:
            self.start(missing)
        self.wait()
        assert not self.round.missing(places)
        self.round.close()
        self.is_closed = True

    @precondition(lambda self: not self.ready)
    @rule()
    def wait(self) -> None:
        handles, flights = self.round.take()
        assert flights == self.flying
        assert bool(handles) is bool(flights)
        self.flying = []

    @precondition(lambda self: not self.flying and not self.ready)
    @rule()
    def step(self) -> None:
        self.round.reopen()
        self.reset()

    @rule(passes=st.integers(1, 3))
    def set_passes(self, passes: int) -> None:
        started = any(self.counts.values())
        if self.flying or self.ready:
            with pytest.raises(FastPSError, match="communicated"):
                self.round.set_passes(passes)
        elif not started:
            self.round.set_passes(passes)
            self.passes = passes

    @invariant()
    def same_view(self) -> None:
        assert self.round.in_flight is bool(self.flying or self.ready)
        flying = [i for bucket in self.flying for i in self.buckets[bucket]]
        assert self.round.names_in_flight() == [f"p{i}" for i in flying + self.ready]
        is_counting = any(self.counts.values()) and not self.is_closed
        assert self.round.has_arrivals is is_counting


RoundMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRound = RoundMachine.TestCase


@given(
    gradients=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=30),
    bucket_bytes=st.integers(0, 120),
    small_bytes=st.integers(0, 80),
)
def test_buckets(gradients: list[tuple[str, int]], bucket_bytes: int, small_bytes: int) -> None:
    kinds, sizes = [kind for kind, _ in gradients], [size for _, size in gradients]
    buckets = plan_buckets(kinds, sizes, bucket_bytes=bucket_bytes, small_bytes=small_bytes)
    places = [place for bucket in buckets for place in bucket]
    assert sorted(places) == list(range(len(gradients)))
    assert buckets == sorted(sorted(bucket) for bucket in buckets)
    shared = [bucket for bucket in buckets if len(bucket) > 1]
    for bucket in shared:
        assert len({kinds[place] for place in bucket}) == 1
        assert sum(sizes[place] for place in bucket) <= bucket_bytes
        assert max(sizes[place] for place in bucket) <= small_bytes
        # Nothing that could have come along lies between its members.
        between = [i for i in range(bucket[0], bucket[-1]) if kinds[i] == kinds[bucket[0]]]
        small = [i for i in between if sizes[i] <= min(small_bytes, bucket_bytes)]
        assert set(small) <= set(bucket)


def test_small_gradients_fill_buckets_from_the_end() -> None:
    sizes = [30, 30, 500, 30, 30, 30]
    buckets = plan_buckets(["x"] * 6, sizes, bucket_bytes=100, small_bytes=50)
    assert buckets == [[0, 1], [2], [3, 4, 5]]
    assert plan_buckets(["x"] * 6, sizes, bucket_bytes=0) == [[i] for i in range(6)]


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, None])
def test_passes_must_be_a_positive_integer(passes: object) -> None:
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        Round(["a"], passes)  # type: ignore[arg-type]


def test_message_lists_few_of_many_names() -> None:
    names = [f"layer{i}" for i in range(50)]
    many: Round[int] = Round(names)
    many.started(DoneHandle(), range(50), range(50))
    with pytest.raises(FastPSError, match=r"layer4 and 45 more\)"):
        many.check_idle("zero_grad()")


def test_check_op() -> None:
    assert gradient_round.check_op(Sum) is Sum
    assert gradient_round.check_op(Average) is Average
    with pytest.raises(ValueError, match="Average or Sum"):
        gradient_round.check_op("sum")


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_name_is_needed(name: object) -> None:
    with pytest.raises(ValueError, match="push_pull needs a name"):
        check_name(name, "push_pull")  # type: ignore[arg-type]


def test_derived_names_are_unique_over_groups() -> None:
    names = derived_names([2, 0, 3])
    assert names == ["group0.0", "group0.1", "group2.0", "group2.1", "group2.2"]


def test_given_names() -> None:
    assert given_names(iter([("a", 1), ("b", 2), ("again", 1)]), int) == {1: "a", 2: "b"}


@pytest.mark.parametrize("pair", [7, ["a", 1], ("a",), ("a", 1, 2), (1, "a"), ("a", "b")])
def test_given_names_must_be_tuples(pair: object) -> None:
    with pytest.raises(ValueError, match=r"tuples \(name, parameter\)"):
        given_names([("first", 1), pair], int)


def test_given_names_lists_all_duplicates() -> None:
    pairs = [("b", 1), ("a", 2), ("b", 3), ("a", 4), ("c", 5)]
    with pytest.raises(ValueError, match=r"more than once: a, b$"):
        given_names(pairs, int)


def test_wait_all_raises_the_first_error_and_waits_for_the_rest() -> None:
    late = DoneHandle(StallError("late"))
    handles = [DoneHandle(), DoneHandle(PeerLostError("rank 1")), late, DoneHandle()]
    with pytest.raises(PeerLostError, match="rank 1"):
        gradient_round.wait_all(handles)
    assert [len(handle.timeouts) for handle in handles] == [1, 1, 1, 1]
    assert handles[1].timeouts == [None]
    assert late.timeouts[0] is not None
    assert 0 <= late.timeouts[0] <= 5


def test_wait_all_prefers_a_cause_to_its_consequences() -> None:
    errors = [PeerLostError("left"), StallError("late"), MismatchError("shapes"), TypeError("x")]
    with pytest.raises(MismatchError, match="shapes"):
        gradient_round.wait_all([DoneHandle(error) for error in errors])
