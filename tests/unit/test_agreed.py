# SPDX-License-Identifier: Apache-2.0
"""Rounds of those who are left, on a network that loses workers at the worst moments.

Each worker is a thread. What one who dies has sent has come to some and not to others, and each
hears of the death in its own time; until then it waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from fastps.errors import PeerLostError
from fastps.graph.survivor_rounds import Agreed

DEADLINE_S = 30.0
ROUNDS, WORKERS = 8, 5


class Died(Exception):
    """What a thread ends with whose worker dies."""


class Net:
    """Who has sent what to whom, who is lost, and who has heard of it."""

    def __init__(self, chance: random.Random, deaths: dict[int, int]) -> None:
        self.chance, self.deaths = chance, deaths  # deaths: after so many messages
        self.news = threading.Condition()
        self.sent: dict[Any, dict[int, Any]] = defaultdict(dict)  # operation, receiver: by sender
        self.counts: dict[Any, int] = defaultdict(int)
        self.n_sent = [0] * WORKERS
        self.lost: set[int] = set()
        self.heard: list[set[int]] = [set() for _ in range(WORKERS)]

    def send(self, me: int, operation: Any, ranks: Sequence[int], value: Any) -> None:
        """Let a value be on its way to all, or to some of them if we die now."""
        with self.news:
            self.n_sent[me] += 1
            is_dead = self.n_sent[me] == self.deaths.get(me)
            for rank in ranks:
                if not is_dead or self.chance.random() < 0.5:
                    self.sent[operation, rank][me] = value
            if is_dead:
                self.lost.add(me)
            self.news.notify_all()
        if is_dead:
            raise Died

    def receive(self, me: int, operation: Any, ranks: Sequence[int]) -> dict[int, Any]:
        """Wait for what all have sent, or until we hear that one of them is lost."""
        deadline = time.monotonic() + DEADLINE_S
        with self.news:
            while not set(self.sent[operation, me]) >= set(ranks):
                if self.heard[me] & set(ranks):
                    raise PeerLostError(f"{operation}: somebody is lost")
                for one in self.lost - self.heard[me]:
                    if self.chance.random() < 0.3:
                        self.heard[me].add(one)
                self.news.wait(0.0005)
                assert time.monotonic() < deadline, (me, operation, self.heard)
            return self.sent[operation, me]


class GroupBase:
    """What Agreed needs of a group: each operation gives everybody what all have brought."""

    def __init__(self, net: Net, me: int, ranks: Sequence[int]) -> None:
        self.net, self.me, self.ranks = net, me, tuple(ranks)

    def gone(self) -> list[int]:
        return [i for i, rank in enumerate(self.ranks) if rank in self.net.heard[self.me]]

    def begin(self, name: str, value: Any, sink: list[Any]) -> Any:
        key = (self.me, self.ranks, name)
        self.net.counts[key] += 1
        operation = (self.ranks, name, self.net.counts[key])
        self.net.send(self.me, operation, self.ranks, value)
        net, me, ranks = self.net, self.me, self.ranks

        class GroupHandle:
            def wait(self) -> None:
                sink[:] = [net.receive(me, operation, ranks)]

        return GroupHandle()

    def barrier(self, *, name: str) -> Any:
        return self.begin(name, None, [])


def gather(members: GroupBase, value: int, name: str) -> list[int]:
    sink: list[dict[int, int]] = []
    members.begin(name, value, sink).wait()
    return [sink[0][rank] for rank in members.ranks]


def work(net: Net, me: int, results: dict[int, list[Any]]) -> None:
    """Go through all rounds of two operations each."""
    agreed = Agreed(  # type: ignore[arg-type]
        GroupBase(net, me, range(WORKERS)),
        lambda: GroupBase(net, me, [r for r in range(WORKERS) if r not in net.heard[me]]),
        gather, "means",
    )  # fmt: skip
    try:
        for number in range(ROUNDS):
            sinks: list[list[Any]] = [[], []]
            for part, sink in enumerate(sinks):
                agreed.start(
                    lambda group, part=part, sink=sink, number=number: group.begin(
                        f"part {part}", (me, number), sink
                    )
                )
            agreed.finish()
            results[me].append([dict(sink[0]) for sink in sinks])
    except Died:
        return
    with net.news:  # who is through leaves, and others need not wait for it
        net.lost.add(me)
        net.news.notify_all()


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_all_who_are_left_have_the_same_results_of_each_round(first):
    for seed in range(first, first + 50):
        check(seed)


def check(seed: int) -> None:
    """Run one job in which one to three die."""
    chance = random.Random(seed)
    dead = chance.sample(range(WORKERS), chance.randint(1, 3))
    net = Net(chance, {rank: chance.randint(1, 3 * ROUNDS) for rank in dead})
    results: dict[int, list[Any]] = defaultdict(list)
    threads = [threading.Thread(target=work, args=(net, me, results)) for me in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()
    left = [rank for rank in range(WORKERS) if len(results[rank]) == ROUNDS]
    assert set(left) >= set(range(WORKERS)) - set(dead)
    for number in range(ROUNDS):
        found = [results[rank][number] for rank in left]
        assert all(one == found[0] for one in found), (seed, number, found)
        for part in found[0]:  # nobody's value of another round, and of all who are left
            assert all(value == (rank, number) for rank, value in part.items()), (seed, part)
            assert set(part) >= set(left), (seed, number, part)
