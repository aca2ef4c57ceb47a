# SPDX-License-Identifier: Apache-2.0
"""What workers tell each other of an operation for which they differ: one text on all."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from fastps.collectives.objects import encode_object
from fastps.control.blame import VERDICT_WAIT_S
from fastps.control.protocol import Told
from fastps.session import differences
from fastps.session.differences import MANY, Differences

SIZE = 3
GROUP: Any = SimpleNamespace(ranks=tuple(range(SIZE)), of="")


class Worker:
    """What Differences needs of its session; the others hear at once what it tells."""

    def __init__(self, rank: int, workers: list[Worker]) -> None:
        self.rank, self._workers = rank, workers
        self.begun: dict[tuple[int, int], str] = {}
        self.told: list[tuple[int, ...]] = []
        self.connections = SimpleNamespace(exchange=SimpleNamespace(recall=self._recall))
        self.differences = Differences(self)  # type: ignore[arg-type]

    def _recall(self, channel: int, number: int) -> Any:
        words = self.begun.get((channel, number))
        if words is None:
            return None
        return SimpleNamespace(group=GROUP, key=(words.split()[0],), words=lambda: words)

    def tell(self, ranks: list[int], data: bytes) -> None:
        self.told.append(tuple(ranks))
        for rank in ranks:
            assert self._workers[rank].differences.on_message(Told(self.rank, data))

    def explain(self, number: int) -> str:
        return self.differences.explain(GROUP, "x", 7, number)


def made(*words: str) -> list[Worker]:
    """Make workers that have begun operations on one channel, none where there are no words."""
    workers: list[Worker] = []
    workers += [Worker(rank, workers) for rank in range(SIZE)]
    for worker, said in zip(workers, words, strict=True):
        if said:
            worker.begun[7, 1] = said
    return workers


def test_all_say_the_same_of_all_sides_and_each_tells_its_own_once():
    workers = made("allreduce of 3", "allgather of 3", "allreduce of 3")
    (text,) = {worker.explain(1) for worker in workers}
    assert "tensor 'x' is not the same operation" in text
    assert "workers 0, 2 started allreduce of 3; worker 1 started allgather of 3" in text
    assert "neighbors" not in text
    assert [worker.told for worker in workers] == [[(1, 2)], [(0, 2)], [(0, 1)]]


def test_who_has_not_come_to_it_is_waited_for_a_while(monkeypatch):
    monkeypatch.setattr(differences, "VERDICT_WAIT_S", 0.01)
    workers = made("neighbor_allreduce of 3", "neighbor_allreduce of 4", "")
    assert "worker 2 did not start it" in workers[0].explain(1)
    workers[2].begun[7, 1] = "neighbor_allreduce of 5"
    text = workers[2].explain(1)
    assert text == workers[0].explain(1)
    assert "worker 2 started neighbor_allreduce of 5" in text
    assert text.endswith("and let neighbors agree on who sends to whom")


def test_who_is_gone_is_not_waited_for_and_not_blamed():
    workers = made("allreduce of 3", "", "")
    differences = workers[0].differences
    differences.on_message(Told(1, encode_object(("meant", 7, 1, "allgather of 3"))))
    losing = threading.Thread(target=lambda: [differences.lose(rank) for rank in (1, 2)])
    losing.start()
    since = time.monotonic()
    text = workers[0].explain(1)
    losing.join()
    assert time.monotonic() - since < VERDICT_WAIT_S
    assert "worker 1 started allgather of 3; worker 2 died or left the job" in text


def test_only_the_last_operations_are_kept():
    workers = made("a", "b", "c")
    for number in range(1, MANY + 2):
        for worker in workers:
            worker.begun[7, number] = f"{number} of {worker.rank}"
        assert f"worker 1 started {number} of 1" in workers[0].explain(number)
    assert len(workers[0].differences._started) == MANY
    assert not workers[0].differences.on_message(Told(1, differences.encode_object(("other",))))
