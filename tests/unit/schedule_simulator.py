# SPDX-License-Identifier: Apache-2.0
"""All members of a group at once: their schedules are run in any order that is allowed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastps.collectives.schedule import (
    MAX_MESSAGE_BYTES,
    Kind,
    Place,
    Schedule,
    Source,
    Step,
)

POISON = 0xA5  # what is in an array before something was written
Message = tuple[int, int, int]  # sender, receiver, label


@dataclass
class Member:
    """One member: its arrays, its steps, and how far they are."""

    index: int
    schedule: Schedule
    arrays: dict[Place, np.ndarray]
    started: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    depth: dict[int, int] = field(default_factory=dict)  # of a step: messages one after the other

    def __post_init__(self) -> None:
        for number, step in enumerate(self.schedule.steps):
            assert all(0 <= before < number for before in step.after)
            assert 0 < step.nbytes <= MAX_MESSAGE_BYTES

    def view(self, place: Place, offset: int, nbytes: int) -> np.ndarray:
        """Give bytes of an array; they must be there."""
        array = self.arrays[place]
        assert 0 <= offset <= offset + nbytes <= array.size, (place, offset, nbytes, array.size)
        return array[offset : offset + nbytes]

    def target(self, step: Step) -> np.ndarray:
        """Give what a step sends or writes."""
        return self.view(step.place, step.offset, step.nbytes)

    def own(self, step: Step) -> list[tuple[Source, np.ndarray]]:
        """List what a FOLD or COPY reads here."""
        sources = [source for source in step.sources if source.peer == self.index]
        return [(one, self.view(one.place, one.offset, step.nbytes)) for one in sources]


class Simulator:
    """Runs schedules and doubles final sums; a SEND ends when consumed or, by chance, at once."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        *,
        dtype: np.dtype | type = np.uint8,
        seed: int = 0,
        weights: Sequence[Sequence[float]] = (),
    ) -> None:
        self.weights = weights  # of each member
        self.dtype = np.dtype(dtype)
        self.random = random.Random(seed)
        self.members = [
            Member(
                index,
                schedule,
                {
                    Place.INPUT: inputs[index].view(np.uint8),
                    Place.OUTPUT: outputs[index].view(np.uint8),
                    Place.SCRATCH: np.full(schedule.scratch_bytes, POISON, np.uint8),
                },
            )
            for index, schedule in enumerate(schedules)
        ]
        self.sends = self._sends()
        self.receivers = self._receivers()
        self.early: dict[Message, np.ndarray] = {}

    def _sends(self) -> dict[Message, int]:
        found: dict[Message, int] = {}
        for member in self.members:
            for number, step in enumerate(member.schedule.steps):
                if step.kind is Kind.SEND:
                    message = (member.index, step.peer, step.label)
                    assert step.peer != member.index
                    assert message not in found, f"two messages {message}"
                    found[message] = number
        return found

    def _receivers(self) -> dict[Message, int]:
        found: dict[Message, int] = {}
        for member in self.members:
            for number, step in enumerate(member.schedule.steps):
                for sender, label in self.awaited(member, step):
                    message = (sender, member.index, label)
                    assert message not in found, f"{message} is awaited twice"
                    found[message] = number
                    sent = self.members[sender].schedule.steps[self.sends[message]]
                    assert sent.nbytes == step.nbytes, message
        assert set(found) == set(self.sends), "a message without a partner"
        return found

    @staticmethod
    def awaited(member: Member, step: Step) -> list[tuple[int, int]]:
        """List (sender, label) of the messages that a step takes."""
        if step.kind is Kind.RECEIVE:
            return [(step.peer, step.label)]
        return [(one.peer, one.label) for one in step.sources if one.peer != member.index]

    def go(self, *, without: int | None = None) -> None:
        """Take random steps as long as there are any; one member may take none."""
        while moves := [move for move in self._moves() if move[1].index != without]:
            move, member, number = self.random.choice(moves)
            (self._start if move else self._finish)(member, number)

    def run(self) -> None:
        """Take steps until all are done; none may be left."""
        self.go()
        for member in self.members:
            left = set(range(len(member.schedule.steps))) - member.done
            assert not left, f"member {member.index} is stuck before steps {sorted(left)}"

    def _moves(self) -> list[tuple[bool, Member, int]]:
        moves = []
        for member in self.members:
            for number, step in enumerate(member.schedule.steps):
                if number not in member.started:
                    if set(step.after) <= member.done:
                        moves.append((True, member, number))
                elif number not in member.done and self._can_finish(member, step):
                    moves.append((False, member, number))
        return moves

    def _can_finish(self, member: Member, step: Step) -> bool:
        """A SEND is ended by whoever consumes it."""
        return step.kind is not Kind.SEND and all(
            self.sends[sender, member.index, label] in self.members[sender].started
            for sender, label in self.awaited(member, step)
        )

    def _start(self, member: Member, number: int) -> None:
        step = member.schedule.steps[number]
        member.started.add(number)
        member.depth[number] = max((member.depth[one] for one in step.after), default=0)
        if step.kind is not Kind.SEND:
            self._check_write(member, number)
            return
        message = (member.index, step.peer, step.label)
        self._check_write(self.members[step.peer], self.receivers[message])
        if self.random.random() < 0.5:
            self.early[message] = member.target(step).copy()
            member.done.add(number)

    def _is_writing(self, member: Member, number: int) -> bool:
        """Tell whether the first bytes of a step may be written now, and the last one not yet."""
        step = member.schedule.steps[number]
        has_begun = number in member.started and number not in member.done
        return has_begun and (step.kind is Kind.FOLD or self._can_finish(member, step))

    def _check_write(self, member: Member, number: int) -> None:
        """Check that a step that begins to write meets no other that is still at work."""
        if not self._is_writing(member, number):
            return
        target = member.target(member.schedule.steps[number])
        for other in member.started - member.done - {number}:
            step = member.schedule.steps[other]
            touched = [view for _, view in member.own(step)]
            if step.kind is Kind.SEND or self._is_writing(member, other):
                touched.append(member.target(step))
            assert not any(np.shares_memory(target, view) for view in touched), (
                f"member {member.index}: step {number} writes what step {other} still uses"
            )

    def _finish(self, member: Member, number: int) -> None:
        step = member.schedule.steps[number]
        came = {
            message[:2]: self._take((message[0], member.index, message[1]))
            for message in self.awaited(member, step)
        }
        depths = [depth + 1 for depth, _ in came.values()]
        member.depth[number] = max([member.depth[number], *depths])
        own = iter(view.copy() for _, view in member.own(step))
        parts = [
            next(own) if one.peer == member.index else came[one.peer, one.label][1]
            for one in step.sources
        ] or [came[step.peer, step.label][1]]
        rows = [part.view(self.dtype if step.kind is Kind.FOLD else np.uint8) for part in parts]
        if step.weights >= 0:
            some = self.weights[member.index][step.weights : step.weights + len(rows)]
            rows = [self.dtype.type(one) * row for one, row in zip(some, rows, strict=True)]
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        if step.is_final:  # as an average would divide: once
            total = total * 2
        member.target(step)[:] = total.view(np.uint8)
        member.done.add(number)

    def _take(self, message: Message) -> tuple[int, np.ndarray]:
        sender, number = self.members[message[0]], self.sends[message]
        data = self.early.get(message)
        if data is None:
            data = sender.target(sender.schedule.steps[number]).copy()
        sender.done.add(number)
        return sender.depth[number], data

    # ---- figures ----
    @property
    def rounds(self) -> int:
        """Give the messages on the longest way."""
        return max(max(member.depth.values(), default=0) for member in self.members)

    def messages(self, member: int) -> int:
        """Count what a member sends."""
        return sum(message[0] == member for message in self.sends)

    def sent_bytes(self, member: int) -> int:
        """Count the bytes that a member sends."""
        return self._bytes(lambda sender, _: sender == member)

    def received_bytes(self, member: int) -> int:
        """Count the bytes that are sent to a member."""
        return self._bytes(lambda _, receiver: receiver == member)

    def crossing(self, machines: Sequence[int]) -> tuple[Counter[int], Counter[int]]:
        """Count the bytes out of and into each machine."""
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for (sender, receiver, _), number in self.sends.items():
            if machines[sender] != machines[receiver]:
                nbytes = self.members[sender].schedule.steps[number].nbytes
                out[machines[sender]] += nbytes
                into[machines[receiver]] += nbytes
        return out, into

    def _bytes(self, counts) -> int:
        return sum(
            self.members[message[0]].schedule.steps[number].nbytes
            for message, number in self.sends.items()
            if counts(message[0], message[1])
        )
