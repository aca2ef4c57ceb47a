# SPDX-License-Identifier: Apache-2.0
"""Members of an exchange die in the middle of anything; each other hears of it at its own time.

The engine itself, over pipes that are stepped by hand: Hypothesis chooses who starts its next
operation, whose frames move, who dies and who notices, in any order. Whatever the order was, in
the end nobody waits, no operation has bytes of another one, a source of an operation is there as a
whole or left out, and members that are alive hear each other always. Members leave out edges to
those of whose death they know when they begin, as graph/neighbors.py and programs do.
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
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastps.collectives import schedule as collective_plans
from fastps.collectives._exchange import Operation, Program
from fastps.errors import Status
from fastps.graph import schedule as plans
from fastps.graph.schedule import Edges

CHANNEL = 77
SIZES = (8, 5_000, 40_000, 300_000)  # bytes: unasked, asked for, in several chunks
MAX_MEMBERS = 4
OF_ALL = ("all", "pass")  # which cannot do without anybody
KINDS = ("some", "ring", "less", *OF_ALL)


def content(rank: int, number: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Make what a member brings to an operation."""
    return np.random.default_rng([rank, number]).integers(0, 256, nbytes, np.uint8)


class Losses(RuleBasedStateMachine):
    """A job of exchanges in this process."""

    @initialize(n=st.integers(2, MAX_MEMBERS), data=st.data())
    def begin(self, n: int, data: st.DataObject) -> None:
        self.n = n
        kinds = st.tuples(st.sampled_from(SIZES), st.sampled_from(KINDS))
        self.kinds = data.draw(st.lists(kinds, min_size=1, max_size=6))
        self.edges = [self.draw_edges(kind, data) for _, kind in self.kinds]
        self.fleet = Fleet(n, goes_on=True)
        self.pipes, self.exchanges = self.fleet.pipes, self.fleet.exchanges
        self.operations: list[list[Operation]] = [[] for _ in range(n)]
        self.outputs: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(n)]
        self.heard: list[list[list[int]]] = [[] for _ in range(n)]
        self.dead: set[int] = set()
        self.noticed: set[tuple[int, int]] = set()

    def draw_edges(self, kind: str, data: st.DataObject) -> set[tuple[int, int]]:
        pairs = [(a, b) for a in range(self.n) for b in range(self.n) if a != b]
        if kind == "ring":
            return {(a, b) for a, b in pairs if b == (a + 1) % self.n}
        return {pair for pair in pairs if data.draw(st.booleans())}

    @property
    def alive(self) -> list[int]:
        return [member for member in range(self.n) if member not in self.dead]

    def sources(self, member: int, number: int) -> list[int]:
        """List whom a member hears in an operation."""
        if self.kinds[number][1] in OF_ALL:
            return list(range(self.n)) if self.kinds[number][1] == "all" else [0]
        return sorted(a for a, b in self.ends(member, number) if b == member)

    def ends(self, member: int, number: int) -> list[tuple[int, int]]:
        """List the edges of an operation that a member knows of when it begins."""
        gone = self.exchanges[member].gone if self.kinds[number][1] == "less" else ()
        return [(a, b) for a, b in self.edges[number] if a not in gone and b not in gone]

    def start(self, member: int) -> None:
        """Begin the member's next operation."""
        number = len(self.operations[member])
        nbytes, kind = self.kinds[number]
        heard = self.sources(member, number)
        self.heard[member].append(heard)
        if kind == "all":
            steps = collective_plans.allgather(member, [nbytes] * self.n, [0] * self.n)
        elif kind == "pass":
            steps = collective_plans.broadcast(member, self.n, nbytes, 0, [0] * self.n)
        else:
            targets = sorted(b for a, b in self.ends(member, number) if a == member)
            edges = Edges((), tuple((one, -1) for one in targets), is_checked=True)
            sizes = [nbytes] * len(heard)
            steps = plans.neighbor_allgather(member, edges, nbytes, sizes, heard)
        out = np.zeros(nbytes * len(heard), np.uint8)
        own = content(member, number, nbytes)
        if kind == "pass" and member == 0:
            out[:] = own
        self.outputs[member].append(out)
        self.operations[member].append(
            self.exchanges[member].start(
                Program(steps.steps, steps.scratch_bytes, range(self.n)),
                CHANNEL, name=f"{kind} {number}", input=own, output=out, code=1,
                goes_on=kind not in OF_ALL,
            )
        )  # fmt: skip

    @rule(data=st.data())
    def starts(self, data: st.DataObject) -> None:
        able = [m for m in self.alive if len(self.operations[m]) < len(self.kinds)]
        if able:
            self.start(data.draw(st.sampled_from(able)))

    @rule(data=st.data(), times=st.integers(1, 5))
    def moves(self, data: st.DataObject, times: int) -> None:
        member = data.draw(st.sampled_from(self.alive))
        for _ in range(times):
            self.pipes[member].step()

    @precondition(lambda self: len(self.dead) < self.n - 1)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.alive))
        self.dead.add(dead)
        for member in self.alive:
            if data.draw(st.booleans()):
                self.notice(member, dead)

    @rule(data=st.data())
    def notices(self, data: st.DataObject) -> None:
        unknown = [(m, d) for m in self.alive for d in self.dead if (m, d) not in self.noticed]
        if unknown:
            self.notice(*data.draw(st.sampled_from(sorted(unknown))))

    def notice(self, member: int, dead: int) -> None:
        self.noticed.add((member, dead))
        self.exchanges[member].lose(dead)

    def teardown(self) -> None:
        if not hasattr(self, "exchanges"):
            return
        for member in self.alive:
            while len(self.operations[member]) < len(self.kinds):
                self.start(member)
            for dead in self.dead:
                self.notice(member, dead)
        self.fleet.settle(self.alive)
        try:
            for member in self.alive:
                self.check(member)
        finally:
            self.fleet.close()

    def check(self, member: int) -> None:
        for number, operation in enumerate(self.operations[member]):
            assert operation.is_done, (member, number, operation.awaited)
            status = operation.wait(timeout_s=0.0)
            nbytes, kind = self.kinds[number]
            heard = self.heard[member][number]
            if kind in OF_ALL:
                assert status == 0 or (
                    status == Status.PEER_LOST and operation.culprit in self.dead
                )
            else:
                assert status == 0, (member, number, status)
            missed = set(operation.missed)
            assert missed <= self.dead
            rows = self.outputs[member][number].reshape(len(heard), nbytes)
            for row, source in zip(rows, heard, strict=True):
                if status == 0 and source not in missed:
                    np.testing.assert_array_equal(row, content(source, number, nbytes))


def start_among(fleet: Fleet, member: int, targets: list[int], sources: list[int]) -> Operation:
    """Begin a member's next operation among neighbours, of 8 bytes."""
    edges = Edges((), tuple((one, -1) for one in targets), is_checked=True)
    steps = plans.neighbor_allgather(member, edges, 8, [8] * len(sources), sources)
    return fleet.exchanges[member].start(
        Program(steps.steps, steps.scratch_bytes, range(len(fleet.exchanges))),
        CHANNEL, name="some", input=np.zeros(8, np.uint8),
        output=np.zeros(8 * len(sources), np.uint8), code=1, goes_on=True,
    )  # fmt: skip


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_what_a_member_expected_that_is_gone_is_nobodys_mistake(end):
    fleet = Fleet(3, goes_on=True)
    try:
        start_among(fleet, 0, [], [1])  # whose check of this edge comes to worker 1 early
        fleet.settle(range(3))
        if end == "dies":
            fleet.exchanges[1].lose(0)
        else:
            fleet.exchanges[0].leave()
            fleet.pipes[0].leave()
            fleet.settle(range(3))
        assert fleet.exchanges[1].gone == [0]
        found = [start_among(fleet, 1, [], [2]), start_among(fleet, 2, [1], [])]
        fleet.settle([1, 2])
        found += [start_among(fleet, 1, [2], []), start_among(fleet, 2, [], [1])]
        fleet.settle([1, 2])
        assert [one.is_done for one in found] == [True] * 4
        assert [Status(one.wait(timeout_s=0.0)) for one in found] == [Status.OK] * 4
    finally:
        fleet.close()


def test_whoever_is_left_ends_every_operation():
    run_state_machine_as_test(
        Losses, settings=settings(max_examples=150, stateful_step_count=60, deadline=None)
    )
