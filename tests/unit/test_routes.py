# SPDX-License-Identifier: Apache-2.0
"""What workers start under a name: a difference is found, and all say the same of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fastps.contract.contract import Policy
from fastps.control.protocol import TensorPoisoned, Told
from fastps.errors import MismatchError
from fastps.session import routes
from fastps.session.host import TENSOR, Pending, StartedTensor
from fastps.session.routes import RouteChecker
from fastps.types import DType

SIZE = 3
SUM = -1  # the operation of a tensor that is no broadcast


class Worker:
    """What a RouteChecker needs of its session; others are reached over one line."""

    known_groups = None
    n_forgotten = 0
    size = SIZE

    def __init__(self, rank: int, line: deque[tuple[Sequence[int], Told]]) -> None:
        self.rank, self._line = rank, line
        self.gone: list[int] = []
        self._tensors: dict[str, StartedTensor] = {}
        self.poisoned: list[str] = []
        self.routes = RouteChecker(self, SimpleNamespace(is_on=False, round=0))  # type: ignore[arg-type]

    def started(self, names: Sequence[str]) -> list[StartedTensor]:
        return [self._tensors[name] for name in names if name in self._tensors]

    def tell(self, ranks: Sequence[int], data: bytes) -> None:
        self._line.append((ranks, Told(self.rank, data)))

    def poison(self, event: TensorPoisoned) -> None:
        self.poisoned.append(event.name)

    def begin(self, name: str, n: int = 1) -> None:
        """Begin sums of a declared tensor."""
        tensor: Any = SimpleNamespace(count=n, operation=SUM)
        layout: Any = SimpleNamespace(policy=Policy.SUM, parts=(), dtype=DType.FLOAT32, shape=(7,))
        self._tensors[name] = StartedTensor(tensor, layout)

    def begin_grouped(self, name: str) -> None:
        """Begin the sum of two tensors under one name."""
        for part in (names := (f"{name}.0", f"{name}.1")):
            self.begin(part)
        self.routes.group(name, names)

    def wait_for(self, *names: str) -> None:
        """See that these have not come to an end for long."""
        self.routes.look([Pending(TENSOR + name, 1, 1, "", (), name) for name in names])

    def why(self, name: str) -> str:
        """Return why nothing more can begin under a name; empty if something can."""
        try:
            self.routes.check(name)
        except MismatchError as error:
            return str(error)
        return ""


class Workers(list[Worker]):
    """All workers, and what is under way between them."""

    def __init__(self) -> None:
        self._line: deque[tuple[Sequence[int], Told]] = deque()
        super().__init__(Worker(rank, self._line) for rank in range(SIZE))

    def hear(self, *deaf: int) -> None:
        """Let all but some hear what is said, in one order."""
        while self._line:
            ranks, told = self._line.popleft()
            for rank in ranks:
                assert rank in deaf or self[rank].routes.on_message(told)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(range(SIZE), 2)))
def test_who_comes_later_finds_a_difference_wherever_both_are(first, second):
    workers = Workers()
    workers[first].begin("x")
    workers[first].wait_for("x")
    workers.hear()
    assert not any(worker.why("x") for worker in workers)
    workers[second].begin_grouped("x")
    workers[second].wait_for("x")
    workers.hear()
    (text,) = {worker.why("x") for worker in workers}
    one, way = "float32 of shape (7,)", "by way of the servers or shared memory"
    for rank, words in (
        (first, f"started allreduce (sum) of {one} {way}"),
        (second, f"started allreduce (sum) of {one} and {one} {way}"),
        (SIZE - first - second, "did not start it"),
    ):
        assert f"worker {rank} {words}" in text
    for worker in workers:
        assert worker.poisoned == ["x", "x", "x.0", "x.1"]
        assert worker.why("x.1") == text
        assert not worker.why("y")


def test_who_says_nothing_in_time_is_not_waited_for(monkeypatch):
    workers = Workers()
    workers[0].begin("x")
    workers[1].begin_grouped("x")
    workers[1].wait_for("x")
    workers.hear(2)
    workers[1].wait_for("x")
    assert not workers[1].why("x")
    monkeypatch.setattr(routes, "VERDICT_WAIT_S", -1.0)
    workers[1].wait_for("x")
    assert "worker 2 did not start it" in workers[1].why("x")


def test_who_is_lost_is_not_waited_for_and_not_blamed():
    workers = Workers()
    workers[0].begin("x")
    workers[1].begin_grouped("x")
    workers[1].wait_for("x")
    for worker in workers[:2]:
        worker.gone.append(2)
    workers.hear(2)
    for worker in workers[:2]:
        assert "worker 2 died or left the job" in worker.why("x")
        assert "worker 1 started allreduce" in worker.why("x")


def test_who_has_begun_more_does_not_differ():
    workers = Workers()
    workers[1].begin("x", 2)
    workers[2].begin("x", 1)
    workers[1].wait_for("x")
    workers[2].wait_for("x")
    workers.hear()
    assert not any(worker.why("x") for worker in workers)


def test_what_was_counted_before_names_were_forgotten_is_not_compared():
    workers = Workers()
    workers[0].n_forgotten = 1
    workers[0].begin("x")
    workers[1].begin_grouped("x")
    workers[1].wait_for("x")
    workers.hear(1, 2)
    assert not any(worker.why("x") for worker in workers)


def test_one_worker_makes_no_other_remember_names_without_a_bound(monkeypatch):
    monkeypatch.setattr(routes, "MANY_SIDES", 8)
    monkeypatch.setattr(routes, "MANY_PASSED", 8)
    worker = Worker(0, deque())
    for number in range(50):
        differ = (routes._DIFFER, f"n{number}", {})
        assert worker.routes.on_message(Told(1, routes.encode_object(differ)))
        begun = (routes._BEGUN, worker.routes._age(), {f"m{number}": {"own": 1}})
        assert worker.routes.on_message(Told(1, routes.encode_object(begun)))
        again = (routes._BEGUN, worker.routes._age(), {"m": {"own": number}})
        assert worker.routes.on_message(Told(1, routes.encode_object(again)))
    assert len(worker.routes._sides) == 8
    assert len(worker.routes._passed) == 9


def test_one_worker_makes_no_other_remember_tensors_without_a_bound(monkeypatch):
    monkeypatch.setattr(routes, "MANY_TEXTS", 20)
    worker = Worker(0, deque())

    def say(*words: object) -> None:
        assert worker.routes.on_message(Told(1, routes.encode_object(words)))

    say(routes._DIFFER, "x" * 2000, {})
    assert not worker.routes._sides
    for number in range(50):
        name = f"n{number}"
        say(routes._DIFFER, name, {})
        say(routes._SIDE, name, "words", ["y" * 2000, *(f"{name}.{part}" for part in range(12))])
        worker.gone = [1, 2]
        worker.routes._note(0, name, "ours", [])
    assert 20 <= len(worker.routes._texts) <= 20 + 13
    assert not worker.routes._sides
