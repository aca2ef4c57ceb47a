# SPDX-License-Identifier: Apache-2.0
"""Members of an exchange call different operations; each hears of each mistake once.

The engine itself, over pipes that are stepped by hand: Hypothesis chooses where members differ,
who starts its next operation, and whose frames move, in any order. Whatever the order was, nobody
waits, what is right and ends well is right, and each member has one error for each mistake: of
the operation itself, or of the next but one at the latest. Of several mistakes that a member has
yet to hear of, its next operation names the latest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

from aids.mailbox import Mailbox
from aids.wire import FrameKind
from fastps.collectives import schedule as plans
from fastps.collectives._exchange import Operation, Program
from fastps.collectives.schedule import Kind, Place, Schedule, Step
from fastps.errors import Status

CHANNEL = 77
SIZES = (8, 5_000, 40_000)  # bytes: unasked, asked for
MAX_MEMBERS = 4
AMONG = 2  # so many operations of all later everybody has heard
MOST = 4  # operations in which members may differ


@dataclasses.dataclass
class Call:
    """What one member does: a broadcast if there is a root, else an all-gather."""

    nbytes: int = 8
    root: int | None = None
    code: int = 1


def mistaken(calls: Sequence[Call]) -> bool:
    """Whether members do not mean the same."""
    return any(call != calls[0] for call in calls)


class Members:
    """What each member started, in a fleet."""

    def __init__(self, n: int, **how: Any) -> None:
        self.n = n
        self.fleet = Fleet(n, **how)
        self.operations: list[list[Operation]] = [[] for _ in range(n)]
        self.outputs: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(n)]

    def start(self, member: int, call: Call) -> Operation:
        """Begin the member's next operation."""
        number = len(self.operations[member])
        own, steps = content(member, number, call.nbytes), self.steps(member, call)
        is_gather = call.root is None
        out = np.zeros(call.nbytes * (self.n if is_gather else 1), np.uint8)
        if call.root == member:
            out[:] = own
        self.outputs[member].append(out)
        self.operations[member].append(
            self.fleet.exchanges[member].start(
                Program(steps.steps, steps.scratch_bytes, range(self.n)), CHANNEL,
                name=f"{number}", input=own, output=out, code=call.code + is_gather,
            )
        )  # fmt: skip
        return self.operations[member][-1]

    def steps(self, member: int, call: Call) -> Schedule:
        if call.root is None:
            return plans.allgather(member, [call.nbytes] * self.n, [0] * self.n)
        return plans.broadcast(member, self.n, call.nbytes, call.root, [0] * self.n)

    def errors(self, member: int) -> list[int]:
        """List the operations that failed; all are over."""
        found = []
        for number, operation in enumerate(self.operations[member]):
            assert operation.is_done, (member, number, operation.awaited)
            status = operation.wait(timeout_s=0.0)
            assert status in (0, Status.MISMATCH)
            found += [number] * (status != 0)
        return found


def content(rank: int, number: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Make what a member brings to an operation."""
    return np.random.default_rng([rank, number]).integers(0, 256, nbytes, np.uint8)


class Mistakes(RuleBasedStateMachine):
    """Members that differ, in any order of frames."""

    after = AMONG + 1  # operations that all mean alike, at the end

    @initialize(n=st.integers(2, MAX_MEMBERS), data=st.data())
    def begin(self, n: int, data: st.DataObject) -> None:
        self.n = n
        self.members = Members(n)
        count = data.draw(st.integers(1, MOST))
        self.calls = [self.draw_calls(data) for _ in range(count)]
        self.calls += [[Call()] * n] * self.after

    def draw_calls(self, data: st.DataObject) -> list[Call]:
        """Draw what members call; somebody sends unasked, else they wait until they remind."""
        nbytes = data.draw(st.sampled_from(SIZES))
        kind = data.draw(st.sampled_from(["all", "pass", "roots", "size", "kinds"]))
        ranks = st.integers(0, self.n - 1)
        if kind == "all":
            return [Call(nbytes)] * self.n
        if kind == "pass":
            return [Call(nbytes, data.draw(ranks))] * self.n
        one = data.draw(ranks)
        if kind == "size":
            return [Call(8 if member == one else 16) for member in range(self.n)]
        if kind == "kinds":
            return [Call(8, one) if member == one else Call(8) for member in range(self.n)]
        roots = [one if member == one else data.draw(ranks) for member in range(self.n)]
        return [Call(8, root) for root in roots]

    @rule(data=st.data())
    def starts(self, data: st.DataObject) -> None:
        begun = self.members.operations
        able = [
            m for m in range(self.n)
            if len(begun[m]) < len(self.calls) and all(one.is_done for one in begun[m][-2:-1])
        ]  # fmt: skip
        if able:
            self.start(data.draw(st.sampled_from(able)))

    def start(self, member: int) -> None:
        number = len(self.members.operations[member])
        self.members.start(member, self.calls[number][member])

    @rule(data=st.data(), times=st.integers(1, 5))
    def moves(self, data: st.DataObject, times: int) -> None:
        member = data.draw(st.integers(0, self.n - 1))
        for _ in range(times):
            self.members.fleet.pipes[member].step()

    def teardown(self) -> None:
        if not hasattr(self, "members"):
            return
        try:
            self.finish()
            for member in range(self.n):
                self.check(member)
        finally:
            self.members.fleet.close()

    def finish(self) -> None:
        """Let each start its next when its last is over, as programs do."""
        begun = self.members.operations
        able: list[int] = [*range(self.n)]
        while able:
            self.settle()
            able = [
                member for member, some in enumerate(begun)
                if len(some) < len(self.calls) and all(one.is_done for one in some)
            ]  # fmt: skip
            for member in able:
                self.start(member)
        self.settle()
        assert all(len(some) == len(self.calls) for some in begun), "somebody waits in vain"

    def settle(self) -> None:
        """Let frames move until none does."""
        self.members.fleet.settle(range(self.n))

    def check(self, member: int) -> None:
        errors = self.members.errors(member)
        wrong = [number for number, calls in enumerate(self.calls) if mistaken(calls)]
        assert len(errors) <= len(wrong), "nobody hears of a mistake twice"
        for number in wrong:
            again = [
                later
                for later in range(number + 1, len(self.calls))
                if self.calls[later][0].root is None and not mistaken(self.calls[later])
            ]
            assert any(number <= error <= again[AMONG - 1] for error in errors), (wrong, errors)
        assert len(self.calls) - 1 not in errors
        for number, calls in enumerate(self.calls):
            if number not in errors and number not in wrong:
                self.check_result(member, number, calls[0])

    def check_result(self, member: int, number: int, call: Call) -> None:
        sources = range(self.n) if call.root is None else [call.root]
        rows = self.members.outputs[member][number].reshape(len(sources), call.nbytes)
        for row, source in zip(rows, sources, strict=True):
            np.testing.assert_array_equal(row, content(source, number, call.nbytes))


class Silences(Mistakes):
    """Members that differ where no bytes need tell: they remind others of what they wait for.

    Who waits has an error; who was through, or had his, may have another in his next operation.
    An operation that failed waits for nobody any more, so its member is that much ahead of who
    tells of the next mistake.
    """

    after = AMONG + 2 + MOST

    def draw_calls(self, data: st.DataObject) -> list[Call]:
        """Draw what members call: of any sizes, none too, and roots."""
        sizes, roots = st.sampled_from((0, *SIZES)), st.integers(0, self.n - 1)
        kind = data.draw(st.sampled_from(["all", "sizes", "roots", "both", "kinds"]))
        nbytes, root = data.draw(sizes), data.draw(roots)
        if kind == "all":
            return [Call(nbytes, root)] * self.n
        return [
            Call(
                data.draw(sizes) if kind in ("sizes", "both") else nbytes,
                data.draw(roots) if kind in ("roots", "both") else
                data.draw(st.sampled_from([root, None])) if kind == "kinds" else root,
            )
            for _ in range(self.n)
        ]  # fmt: skip

    @rule(data=st.data())
    def reminds(self, data: st.DataObject) -> None:
        self.remind(data.draw(st.integers(0, self.n - 1)))

    def remind(self, member: int) -> None:
        for operation in self.members.operations[member]:
            if not operation.is_done:
                operation.remind()

    def settle(self) -> None:
        super().settle()
        for member in range(self.n):
            self.remind(member)
        super().settle()

    def check(self, member: int) -> None:
        """Look at what a member has; several mistakes in a row may be one error."""
        errors = self.members.errors(member)
        wrong = [number for number, calls in enumerate(self.calls) if mistaken(calls)]
        heard_of = [number for number in wrong if not self.is_nothing(number)]
        assert bool(errors) == bool(heard_of), (heard_of, errors)
        latest = len(self.calls) - self.after + AMONG + max(len(heard_of) - 1, 0)
        assert not errors or heard_of[0] <= errors[-1] <= latest < len(self.calls) - 1
        for number, calls in enumerate(self.calls):
            if number not in wrong and number not in errors:
                self.check_result(member, number, calls[0])

    def is_nothing(self, number: int) -> bool:
        """Whether a mistake concerns nobody: no member has anything to send or to wait for."""
        return all(call.nbytes == 0 for call in self.calls[number])


@pytest.mark.parametrize(("machine", "examples"), [(Mistakes, 200), (Silences, 200)])
def test_each_member_hears_of_each_mistake(machine, examples):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,
        ),
    )


@pytest.fixture
def three():
    members = Members(3)
    yield members
    members.fleet.close()


def test_who_has_had_the_error_is_not_told_again_by_what_comes_late(three):
    """A message of a mistake lies unread until the operation after the one that told of it."""
    pipes = three.fleet.pipes
    for member in (0, 1):
        three.start(member, Call(root=member))  # each is through: it sent what it had
        three.start(member, Call())
    while pipes[1].step():
        pass
    assert three.operations[1][1].mistake == 1
    three.start(2, Call(root=2))
    three.start(2, Call())
    three.fleet.settle([0, 2])  # what came of it lies before member 1
    assert [three.errors(member) for member in (0, 2)] == [[1], [1]]
    after = [three.start(member, Call()) for member in (1, 0, 2)]
    three.fleet.settle(range(3))
    assert [three.errors(member) for member in range(3)] == [[1], [1], [1]]
    assert all(one.wait(timeout_s=0.0) == 0 for one in after)


def test_who_was_through_hears_while_the_others_go_on(three):
    """Others have had their error, so the next operation fails for one of them alone."""
    three.start(0, Call(root=0))
    three.start(1, Call(root=0))
    three.start(2, Call(root=0, code=3))
    three.fleet.settle([1, 2])
    assert [three.errors(member) for member in range(3)] == [[], [], [0]]
    last = [three.start(member, Call()) for member in range(3)]
    three.fleet.settle(range(3))
    assert [three.errors(member) for member in range(3)] == [[1], [1], [0]]
    assert [one.mistake for one in last] == [1, 1, 0]
    assert last[0].culprit == last[1].culprit == 2
    for member in range(3):
        np.testing.assert_array_equal(
            three.outputs[member][1].reshape(3, -1),
            [content(source, 1, 8) for source in range(3)],
        )


def test_who_hears_late_does_not_wait_for_those_who_do_not_come(three):
    """Others gave up after their error: who was through ends after a second all the same."""
    three.start(0, Call(root=0))
    for member in (1, 2):
        three.start(member, Call(root=0, code=3))
    three.fleet.settle(range(3))
    late = three.start(0, Call())
    three.fleet.settle(range(3))
    assert not late.is_done, "it may be that the others come"
    assert late.wait(timeout_s=20.0) == Status.MISMATCH
    assert late.mistake == 1
    others = [three.start(member, Call()) for member in (1, 2)]
    three.fleet.settle(range(3))
    assert all(one.wait(timeout_s=0.0) == Status.MISMATCH for one in others)
    assert [one.mistake for one in others] == [1, 1]
    after = [three.start(member, Call()) for member in range(3)]
    three.fleet.settle(range(3))
    assert all(one.wait(timeout_s=0.0) == 0 for one in after)


def test_what_came_before_an_operation_that_does_not_want_it_is_a_mistake_at_once(three):
    three.start(0, Call(root=0))
    three.start(1, Call(root=0))
    three.fleet.settle(range(3))
    assert three.start(2, Call(root=1)).is_done, "from whom it waits for a message sends none"
    after = [three.start(member, Call()) for member in range(3)]
    three.fleet.settle(range(3))
    assert [three.errors(member) for member in range(3)] == [[1], [1], [0]]
    assert [one.mistake for one in after] == [1, 1, 0]


def test_a_message_that_is_on_its_way_when_it_is_reminded_of_leaves_nothing_behind(three):
    exchanges, nbytes = three.fleet.exchanges, 40_000

    def start(me: int, peer: int, kind: Kind) -> Operation:
        place = Place.INPUT if kind is Kind.SEND else Place.OUTPUT
        program = Program([Step(kind, peer, 0, place, 0, nbytes)], 0, range(3))
        array = np.zeros(nbytes, np.uint8)
        given = {"input": array} if kind is Kind.SEND else {"output": array}
        return exchanges[me].start(program, CHANNEL, name="one", is_numbered=True, **given)

    wanted = start(0, 1, Kind.RECEIVE)
    ours = [start(1, 0, Kind.SEND), start(1, 0, Kind.RECEIVE)]  # both are the first of their way
    three.fleet.settle([1])
    wanted.remind()
    three.fleet.settle([1])
    ours.append(start(0, 1, Kind.SEND))
    three.fleet.settle(range(3))
    assert all(one.is_done for one in (wanted, *ours))
    assert exchanges[1].statistics()["messages_kept"] == 2  # how many went and came


@pytest.fixture
def refused():
    """Two members; a mailbox stands for the second, and a function makes it refuse."""
    box = Mailbox()
    members = Members(2, strangers={1: box})

    def refuse(number: int) -> None:
        box.post(
            0, b"", kind=FrameKind.REFUSE, key=CHANNEL, key_version=number, sender=1,
            status=Status.MISMATCH,
        )  # fmt: skip
        members.fleet.settle(range(2))

    yield members, refuse
    members.fleet.close()


def broadcasts(members: Members, count: int) -> list[tuple[int, int]]:
    """Broadcast from member 0, which is through at once; list the status and mistake of each."""
    made = [members.start(0, Call(root=0)) for _ in range(count)]
    members.fleet.settle(range(2))
    return [(one.wait(timeout_s=0.0), one.mistake) for one in made]


def test_of_several_mistakes_that_nobody_has_heard_of_the_latest_is_named(refused):
    members, refuse = refused
    assert broadcasts(members, 3) == [(0, 0)] * 3
    for number in (1, 3, 2):
        refuse(number)
    assert broadcasts(members, 3) == [(Status.MISMATCH, 3), (0, 0), (0, 0)]


def test_an_old_mistake_that_is_refused_again_repeats_no_error_and_hides_no_new_one(refused):
    members, refuse = refused
    broadcasts(members, 2)
    refuse(2)
    assert broadcasts(members, 3) == [(Status.MISMATCH, 2), (0, 0), (0, 0)]
    refuse(1)
    assert broadcasts(members, 1) == [(0, 0)], "its user has had an error since"
    refuse(5)
    refuse(2)
    assert broadcasts(members, 2) == [(Status.MISMATCH, 5), (0, 0)]


def test_a_channel_on_which_something_went_wrong_is_not_forgettable(refused):
    members, refuse = refused
    exchange = members.fleet.exchanges[0]
    broadcasts(members, 1)
    assert exchange.is_forgettable(CHANNEL)
    refuse(1)
    assert not exchange.is_forgettable(CHANNEL), "the next operation has to tell of it"
    broadcasts(members, 2)
    assert not exchange.is_forgettable(CHANNEL), "others may tell of it once more"


def test_a_channel_on_which_somebody_waited_long_is_not_forgettable(refused):
    members, _ = refused
    exchange = members.fleet.exchanges[0]
    members.start(0, Call()).remind()
    exchange.fail(Status.SHUTDOWN)
    members.fleet.settle(range(2))
    assert not exchange.is_forgettable(CHANNEL)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("lost", range(3))
def test_who_asks_for_a_message_of_what_failed_for_a_lost_member_hears_of_no_mistake(
    lost, goes_on
):
    """One has heard of the loss, the other asks it before it hears of that itself."""
    some = Members(3, goes_on=goes_on)
    knows, asks = sorted({0, 1, 2} - {lost})
    for member in (knows, asks):
        some.start(member, Call(40_000))
    some.fleet.exchanges[knows].lose(lost)
    some.operations[asks][0].remind()
    some.fleet.settle([knows])
    some.operations[asks][0].remind()
    some.fleet.settle([knows, asks])
    some.fleet.exchanges[asks].lose(lost)
    for member in (knows, asks):
        assert some.operations[member][0].wait(timeout_s=0.0) == Status.PEER_LOST
        assert some.operations[member][0].culprit == lost
    some.fleet.close()
