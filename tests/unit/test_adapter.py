# SPDX-License-Identifier: Apache-2.0
"""The round of one optimizer step against a plain model, and the naming of parameters."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastps.errors import FastPSError, MismatchError, PeerLostError, StallError
from fastps.frameworks import _adapter
from fastps.frameworks._adapter import Average, Round, Sum, check_name, derived_names, given_names

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

    def __init__(self) -> None:
        super().__init__()
        self.passes = 1
        self.round: Round[int] = Round([f"p{i}" for i in range(COUNT)], 1)
        self.counts = dict.fromkeys(range(COUNT), 0)
        self.flying: list[int] = []
        self.sent: set[int] = set()
        self.is_closed = False

    def reset(self) -> None:
        self.counts = dict.fromkeys(range(COUNT), 0)
        self.sent, self.is_closed = set(), False

    @rule(index=st.integers(0, COUNT - 1))
    def gradient(self, index: int) -> None:
        if self.is_closed:
            self.reset()
        if index in self.sent:
            with pytest.raises(FastPSError, match=f"'p{index}' was computed more than"):
                self.round.arrived(index)
            return
        self.counts[index] += 1
        is_due = self.counts[index] == self.passes
        assert self.round.arrived(index) is is_due
        if is_due:
            self.start([index])

    def start(self, indices: list[int]) -> None:
        self.round.started(DoneHandle(), indices, indices)
        self.flying.extend(indices)
        self.sent.update(indices)

    @rule()
    def synchronize(self) -> None:
        missing = self.round.missing(range(COUNT))
        assert missing == [i for i in range(COUNT) if i not in self.sent]
        if missing:
            self.start(missing)
        self.wait()
        assert not self.round.missing(range(COUNT))
        self.round.close()
        self.is_closed = True

    @rule()
    def wait(self) -> None:
        handles, flights = self.round.take()
        assert flights == self.flying
        assert bool(handles) is bool(flights)
        self.flying = []

    @precondition(lambda self: not self.flying)
    @rule()
    def step(self) -> None:
        self.round.reopen()
        self.reset()

    @rule(passes=st.integers(1, 3))
    def set_passes(self, passes: int) -> None:
        started = any(self.counts.values())
        if self.flying:
            with pytest.raises(FastPSError, match="communicated"):
                self.round.set_passes(passes)
        elif not started:
            self.round.set_passes(passes)
            self.passes = passes

    @invariant()
    def same_view(self) -> None:
        assert self.round.in_flight is bool(self.flying)
        assert self.round.names_in_flight() == [f"p{i}" for i in self.flying]


RoundMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRound = RoundMachine.TestCase


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
    assert _adapter.check_op(Sum) is Sum
    assert _adapter.check_op(Average) is Average
    with pytest.raises(ValueError, match="Average or Sum"):
        _adapter.check_op("sum")


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
        _adapter.wait_all(handles)
    assert [len(handle.timeouts) for handle in handles] == [1, 1, 1, 1]
    assert handles[1].timeouts == [None]
    assert late.timeouts[0] is not None
    assert 0 <= late.timeouts[0] <= 5


def test_wait_all_prefers_a_cause_to_its_consequences() -> None:
    errors = [PeerLostError("left"), StallError("late"), MismatchError("shapes"), TypeError("x")]
    with pytest.raises(MismatchError, match="shapes"):
        _adapter.wait_all([DoneHandle(error) for error in errors])
