# SPDX-License-Identifier: Apache-2.0
"""Four workers and two validators: whatever comes, each update is judged once, and by its values.

The inboxes are real, with their threads; links are queues, on which messages are doubled, replayed
or end with the death of their sender, in any order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.algorithms.update_inbox import LOST, UpdateQueue
from fastps.byzantine.judges import Case, judge_of
from fastps.byzantine.update_codecs import Codes
from fastps.byzantine.updates import DOUBLED, REPLAYED, RefusalStats, Update, UpdateHeader
from fastps.errors import MismatchError, PeerLostError

N, V, WAIT_S = 4, 2, 30.0
LIKES = [np.zeros((3, 2)), np.zeros(5, np.float32), np.zeros(())]
NAMES = ["a", "b", "c"]
MAX_ROUNDS = 4


class Wire:
    """A link from a worker to its validator; it looks like a group of two."""

    rank = 1

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()

    def receive(self, out: np.ndarray, source: int, tag: int) -> Any:
        def wait(timeout_s: float) -> None:
            message = self.messages.get(timeout=WAIT_S)
            if message is None:
                raise PeerLostError("it was killed")
            if len(message) != out.nbytes:
                raise MismatchError("another size")
            out[...] = np.frombuffer(message, np.uint8)

        return SimpleNamespace(wait=wait)

    def say(self, worker: int, number: int, place: int, block: np.ndarray | None) -> None:
        """Send what a worker sends of one block."""
        nbytes = 0 if block is None else block.nbytes
        self.messages.put(UpdateHeader(worker, number, 0, place, block is None, nbytes).pack())
        if block is not None:
            self.messages.put(block.tobytes())


def block_of(worker: int, number: int, place: int) -> np.ndarray | None:
    """Give what a worker's update of a round has in a place; now and then nothing."""
    rng = np.random.default_rng([worker, number, place])
    like = LIKES[place]
    return None if rng.random() < 0.25 else np.array(rng.normal(size=like.shape), like.dtype)


@dataclass
class Sender:
    """What a worker sends in one round, and what of it counts, by construction."""

    worker: int
    number: int
    order: list[int]  # of blocks
    again: list[tuple[int, int, int]]  # after how many blocks, round, block
    alive: int  # blocks that it sends before it is killed; more than there are: it is not
    refused: Counter[str] = field(default_factory=Counter)

    def speak(self, wire: Wire) -> bool:
        """Send; tell whether all of the round's update was sent."""
        for step, place in enumerate(self.order):
            if step >= self.alive:
                break
            wire.say(self.worker, self.number, place, block_of(self.worker, self.number, place))
            for after, number, other in self.again:
                if after == step:
                    self.repeat(wire, step, number, other)
        if self.alive <= len(self.order):
            wire.messages.put(None)
        return self.alive >= len(self.order)

    def repeat(self, wire: Wire, step: int, number: int, place: int) -> None:
        """Send what was sent before once more."""
        is_open = number == self.number and step < len(self.order) - 1
        if number > self.number or (is_open and place not in self.order[: step + 1]):
            return  # not sent yet
        wire.say(self.worker, number, place, block_of(self.worker, number, place))
        self.refused[DOUBLED if is_open else REPLAYED] += 1


@st.composite
def jobs(draw: st.DrawFn) -> list[list[Sender]]:
    """Draw the rounds of a job, each with those who are alive."""
    deaths = draw(st.dictionaries(st.integers(0, N - 1), st.tuples(
        st.integers(1, MAX_ROUNDS), st.integers(0, len(LIKES))), max_size=3))  # fmt: skip
    rounds = []
    for number in range(1, draw(st.integers(1, MAX_ROUNDS)) + 1):
        senders = []
        for worker in draw(st.permutations(range(N))):
            last, alive = deaths.get(worker, (MAX_ROUNDS + 1, 0))
            if number > last:
                continue
            order = list(draw(st.permutations(range(len(LIKES)))))
            repeats = st.tuples(st.integers(0, 2), st.integers(1, number), st.integers(0, 2))
            again = draw(st.lists(repeats, max_size=4))
            sent = alive if number == last else len(LIKES) + 1
            senders.append(Sender(worker, number, order, again, sent))
        rounds.append(senders)
    return rounds


class House:
    """Two validators' inboxes, and the wires of their workers."""

    def __init__(self) -> None:
        self.wires = [Wire() for _ in range(N)]
        session: Any = SimpleNamespace(
            connections=SimpleNamespace(reach=lambda workers: None), left=set(),
            groups=SimpleNamespace(pair=lambda worker: self.wires[worker]),
        )  # fmt: skip
        self.ledgers = [RefusalStats() for _ in range(V)]
        self.inboxes = [
            UpdateQueue(
                session,
                {w: Codes(None, NAMES, LIKES, w, min_bytes=0) for w in range(v, N, V)},
                LIKES, self.ledgers[v], channel=1,
            )
            for v in range(V)
        ]  # fmt: skip

    def counts(self) -> Counter[tuple[int, str]]:
        """Give what was refused, by worker and reason."""
        return Counter({key: n for one in self.ledgers for key, n in one.counts.items() if key[1]})

    def read_all(self) -> None:
        """Kill who is left, and wait until all that was sent has been read."""
        for wire in self.wires:
            wire.messages.put(None)
        deadline = time.monotonic() + WAIT_S
        for inbox in self.inboxes:
            assert inbox.take(deadline - time.monotonic()) is None
            assert not inbox.reading

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.close()
        for wire in self.wires:
            wire.messages.put(None)
        for thread in threading.enumerate():
            if thread.name.startswith("fastps:inbox"):
                thread.join(WAIT_S)


def expected_refusals(rounds: list[list[Sender]]) -> Counter[tuple[int, str]]:
    found = Counter({(worker, LOST): 1 for worker in range(N)})  # in the end of all
    for sender in (one for row in rounds for one in row):
        found.update({(sender.worker, why): n for why, n in sender.refused.items()})
    return found


def check_blocks(update: Update) -> None:
    """Compare with what this worker sends in this round."""
    for place, block in enumerate(update.blocks):
        wanted = block_of(update.worker, update.round, place)
        assert (block is None) == (wanted is None)
        if block is not None and wanted is not None:
            np.testing.assert_array_equal(block, wanted)


@settings(max_examples=40)
@given(rounds=jobs())
def test_in_step_each_update_counts_once_and_values_are_those_of_numpy(rounds):
    house = House()
    try:
        value = [one.copy() for one in LIKES]
        judges = [judge_of("average", [like], N // V) for like in LIKES]
        for number, senders in enumerate(rounds, 1):
            sent = [one.worker for one in senders if one.speak(house.wires[one.worker])]
            new = []
            for v, inbox in enumerate(house.inboxes):
                came = sorted(inbox.take_round(number, WAIT_S), key=lambda one: one.worker)
                assert [one.worker for one in came] == sorted(w for w in sent if w % V == v)
                for one in came:
                    assert one.round == number
                    check_blocks(one)
                new.append(judged(judges, value, came))
            model = [numpys(value, [w for w in sent if w % V == v], number) for v in range(V)]
            for found, wanted in zip(new, model, strict=True):
                for one, other in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
            value = [np.mean(pair, axis=0) for pair in zip(*new, strict=True)]
        house.read_all()
    finally:
        house.close()
    refused = house.counts()
    for key, count in expected_refusals(rounds).items():
        assert refused.pop(key) == count
    assert not refused


def judged(judges: list[Any], value: list[np.ndarray], came: list[Update]) -> list[np.ndarray]:
    """Do as Validator.round() does."""
    made = [one.copy() for one in value]
    for place, judge in enumerate(judges):
        if came:
            case = Case([[one.blocks[place]] for one in came], [one.worker for one in came],
                        [LIKES[place]], [value[place]])  # fmt: skip
            made[place] = value[place] + judge.judge(case)[1][0]
    return made


def numpys(value: list[np.ndarray], workers: list[int], number: int) -> list[np.ndarray]:
    """Average what each block has."""
    made = []
    for place, old in enumerate(value):
        blocks = [block_of(worker, number, place) for worker in workers]
        given_ = [one for one in blocks if one is not None]
        made.append(old + np.mean(given_, axis=0) if given_ else old)
    return made


@settings(max_examples=40)
@given(rounds=jobs(), data=st.data())
def test_at_their_pace_each_update_is_added_once(rounds, data):
    house = House()
    try:
        wanted: Counter[tuple[int, int]] = Counter()
        for row in rounds:  # the inboxes read while it is said
            for one in row:
                if one.speak(house.wires[one.worker]):
                    wanted[one.worker, one.number] += 1
        found: Counter[tuple[int, int]] = Counter()
        while found.total() < wanted.total():
            left = [v for v in range(V) if any(w % V == v for w, _ in wanted - found)]
            update = house.inboxes[data.draw(st.sampled_from(left))].take(WAIT_S)
            assert update is not None
            check_blocks(update)
            found[update.worker, update.round] += 1
        assert found == wanted
    finally:
        house.close()
    for inbox in house.inboxes:
        assert inbox.take(0) is None
