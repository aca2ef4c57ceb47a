# SPDX-License-Identifier: Apache-2.0
"""Members that take sizes for granted, and some that are wrong, in any order of frames.

The engine itself, over pipes that are stepped by hand. Who sends what it sent before begins with
the rows, or not, as it likes; others trade their sizes. All of them do what they meant, or all of
them hear that sizes differ, and the trade that they begin then is well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exchange_fleet import Fleet
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from fastps.collectives import schedule as plans
from fastps.collectives._exchange import Operation, Program
from fastps.errors import Status

CHANNEL, CODE, DTYPE = 5, 8, 3
MOST = 4  # members
SIZES = st.sampled_from([1, 9, 5_000, 40_000])  # bytes: unasked, asked for
TRADED = 16  # bytes of what a member tells each

Sent = list[list[int]]  # bytes, by sender and receiver
TRADE: Sent = [[TRADED] * MOST] * MOST


class Sizes(RuleBasedStateMachine):
    """All-to-alls, or gathers; members know the sizes of the last one that all of them told."""

    @initialize(n=st.integers(2, MOST), data=st.data())
    def begin(self, n: int, data: st.DataObject) -> None:
        self.n, self.fleet = n, Fleet(n)
        row = st.lists(SIZES, min_size=n, max_size=n)
        sent = data.draw(st.lists(row, min_size=n, max_size=n))
        self.root = data.draw(st.none() | st.integers(0, n - 1))  # of gathers
        self.told = [sent] * n  # what each remembers
        self.rounds: list[Sent] = []
        self.guesses: list[list[bool]] = []
        for _ in range(data.draw(st.integers(1, 4))):
            changed = data.draw(st.sets(st.integers(0, n - 1), max_size=1))
            sent = [data.draw(row) if i in changed else one for i, one in enumerate(sent)]
            self.rounds.append(sent)
            self.guesses.append([data.draw(st.booleans()) for _ in range(n)])
        self.begun: list[list[Operation]] = [[] for _ in range(n)]
        self.outputs: list[list[Any]] = [[] for _ in range(n)]
        self.at = [(0, False)] * n  # each member's round, and whether it tells again
        self.taken: list[list[int]] = [[] for _ in range(n)]  # statuses of what is over
        self.is_trade = [False] * n

    def sizes_of(self, member: int) -> Sent:
        """What a member begins its next operation with."""
        (number, is_again), known = self.at[member], self.told[member]
        is_as_before = self.rounds[number][member] == known[member]
        return known if is_as_before and self.guesses[number][member] and not is_again else TRADE

    def start_next(self, member: int) -> bool:
        """Begin what comes next, as a program would that waits."""
        if self.begun[member] and not self.begun[member][-1].is_done:
            return False
        if len(self.taken[member]) < len(self.begun[member]):
            self.take_end(member)
        number, is_again = self.at[member]
        if number >= len(self.rounds):
            return False
        sizes = self.sizes_of(member)
        gets = member if self.root is None or sizes is TRADE else self.root
        here, there = sizes[member][: self.n], [row[gets] for row in sizes[: self.n]]
        own = [content(number, member, i, size) for i, size in enumerate(here)]
        wanted = [content(number, i, member, size) for i, size in enumerate(there)]
        steps = plans.alltoall(member, here, there, [0] * self.n)
        if self.root is not None and sizes is not TRADE:
            own = own[self.root : self.root + 1]
            wanted = wanted if member == self.root else [np.zeros(0, np.uint8)]
            steps = plans.gather(member, there, self.root, is_confirmed=True)
        out = np.zeros(sum(map(len, wanted)), np.uint8)
        self.outputs[member].append((out, np.concatenate(wanted)))
        self.begun[member].append(
            self.fleet.exchanges[member].start(
                Program(steps.steps, steps.scratch_bytes, range(self.n)), CHANNEL, name="some",
                input=np.concatenate(own), output=out, code=CODE,
                dtype=0 if sizes is TRADE else DTYPE, may_differ=not is_again,
            )
        )  # fmt: skip
        self.is_trade[member] = sizes is TRADE
        return True

    def take_end(self, member: int) -> None:
        """Take the end of the last operation for what it is."""
        operation, (number, _) = self.begun[member][-1], self.at[member]
        status = operation.wait(timeout_s=0.0)
        self.taken[member].append(status)
        if status == Status.MISMATCH:
            assert operation.differs, "only sizes did"
            self.at[member] = number, True
            return
        assert status == 0
        self.at[member] = number + 1, False
        if self.is_trade[member]:
            self.told[member] = self.rounds[number]

    @rule(data=st.data())
    def starts(self, data: st.DataObject) -> None:
        self.start_next(data.draw(st.integers(0, self.n - 1)))

    @rule(data=st.data(), times=st.integers(1, 5))
    def moves(self, data: st.DataObject, times: int) -> None:
        member = data.draw(st.integers(0, self.n - 1))
        for _ in range(times):
            self.fleet.pipes[member].step()

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            self.fleet.settle(range(self.n))
            while any(self.start_next(member) for member in range(self.n)):
                self.fleet.settle(range(self.n))
            self.check()
        finally:
            self.fleet.close()

    def check(self) -> None:
        assert self.at == [(len(self.rounds), False)] * self.n, "somebody waits in vain"
        assert len({len(some) for some in self.begun}) == 1
        for member in range(self.n):
            for operation, (out, wanted) in zip(
                self.begun[member], self.outputs[member], strict=True
            ):
                if operation.wait(timeout_s=0.0) == 0:
                    np.testing.assert_array_equal(out, wanted)


def content(number: int, source: int, target: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Make what one member sends another in a round."""
    return np.random.default_rng([number, source, target]).integers(0, 256, nbytes, np.uint8)


def test_all_hear_that_sizes_differ_or_nobody():
    run_state_machine_as_test(
        Sizes,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, report_multiple_bugs=False
        ),
    )


@pytest.mark.parametrize("how", [{"code": CODE + 8}, {"code": CODE, "may_differ": False}])
def test_who_does_something_else_is_mistaken(how):
    """Another operation, or one that takes nothing for granted: an error that the user sees."""
    fleet = Fleet(2)
    try:
        operations = []
        for member, (size, options) in enumerate([(40_000, {"code": CODE}), (16, how)]):
            steps = plans.allgather(member, [size] * 2, [0] * 2)
            operations.append(
                fleet.exchanges[member].start(
                    Program(steps.steps, 0, range(2)), CHANNEL, name="some",
                    input=np.zeros(size, np.uint8), output=np.zeros(2 * size, np.uint8),
                    **({"may_differ": True} | options),
                )
            )  # fmt: skip
        fleet.settle(range(2))
        assert [one.wait(timeout_s=0.0) for one in operations] == [Status.MISMATCH] * 2
        assert not any(one.differs for one in operations)
    finally:
        fleet.close()
