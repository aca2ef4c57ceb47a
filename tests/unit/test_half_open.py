# SPDX-License-Identifier: Apache-2.0
"""Who stands at the door: bounds, who goes for whom, and when nobody may come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastps.transport.half_open import HalfOpen

LIMIT, PER_SOURCE, GRACE_S = 6, 3, 10.0


class Door(RuleBasedStateMachine):
    """A door beside a plain list of (source, when, number), the first to come first."""

    def __init__(self) -> None:
        super().__init__()
        self.door: HalfOpen[int] = HalfOpen(limit=LIMIT, per_source=PER_SOURCE, grace_s=GRACE_S)
        self.inside: list[tuple[str, float, int]] = []
        self.now = 0.0
        self.count = 0

    def of(self, source: str) -> list[tuple[str, float, int]]:
        return [item for item in self.inside if item[0] == source]

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    def time_goes(self, seconds: float) -> None:
        self.now += seconds

    @rule(source=st.sampled_from("abcd"), is_patient=st.booleans())
    def somebody_comes(self, source: str, is_patient: bool) -> None:
        if is_patient:  # as the caller is asked to be
            self.now += self.door.wait_s(self.now)
        crowds = [self.of(name) for name in "abcd"]
        most = max(map(len, crowds))
        is_crowd = len(self.of(source)) >= PER_SOURCE
        self.count += 1
        leaver = self.door.enter(self.count, source, now=self.now)
        assert (leaver is not None) == (is_crowd or len(self.inside) >= LIMIT)
        if leaver is not None:
            gone = next(item for item in self.inside if item[2] == leaver)
            assert gone == self.of(gone[0])[0], "the oldest of its source"
            assert gone[0] == source if is_crowd else len(self.of(gone[0])) == most
            assert not is_patient or self.now - gone[1] >= GRACE_S
            self.inside.remove(gone)
        self.inside.append((source, self.now, self.count))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def somebody_shows_the_token_or_goes(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.inside))
        self.inside.remove(item)
        self.door.leave(item[2])
        self.door.leave(item[2])

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.door) == len(self.inside) <= LIMIT
        assert all(len(self.of(name)) <= PER_SOURCE for name in "abcd")
        wait_s = self.door.wait_s(self.now)
        assert 0 <= wait_s <= GRACE_S
        has_crowd = any(len(self.of(name)) == PER_SOURCE for name in "abcd")
        if len(self.inside) < LIMIT and not has_crowd:
            assert wait_s == 0


TestDoor = Door.TestCase


@given(st.integers(1, 200))
def test_a_quiet_source_keeps_its_place_beside_a_loud_one(loud):
    door: HalfOpen[object] = HalfOpen(limit=LIMIT, per_source=PER_SOURCE, grace_s=0.0)
    door.enter("quiet", "a", now=0.0)
    assert "quiet" not in [door.enter(number, "b", now=1.0) for number in range(loud)]


def test_of_many_sources_with_one_each_the_oldest_goes():
    door: HalfOpen[int] = HalfOpen(limit=LIMIT, per_source=PER_SOURCE, grace_s=GRACE_S)
    for number in range(LIMIT):
        assert door.enter(number, f"source {number}", now=float(number)) is None
    assert door.wait_s(5.0) == pytest.approx(GRACE_S - 5.0)
    assert door.enter(99, "one more", now=10.0) == 0
