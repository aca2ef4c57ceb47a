# SPDX-License-Identifier: Apache-2.0
"""Tuning on all workers: they change in the same step, and only what may be changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.session.autotune import NAME, Layout, Tuner

DEFAULT = Layout(4096000, 1 << 20)


class Exchange:
    """What can be laid out anew."""

    def __init__(self) -> None:
        self.layout = DEFAULT

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout


class Worker:
    """One rank's session, as far as tuning goes; `board` carries broadcasts."""

    def __init__(self, rank: int, board: list[Any], *, credit: int = 0, exchanges: int = 1):
        self.rank, self.credit, self._board, self._told = rank, credit, board, 0
        self.config = SimpleNamespace(
            autotune_steps=2, autotune_seed=3, credit_bytes=credit, partition_bytes=4096000
        )
        self.connections = SimpleNamespace(
            owners=(0,), statistics=lambda: {"credit_bytes": 1}, set_credit=self._set_credit
        )
        self.exchanges = [Exchange() for _ in range(exchanges)]
        self.tuner = Tuner(self)  # type: ignore[arg-type]
        for exchange in self.exchanges:
            self.tuner.offer(exchange)

    def _set_credit(self, credit_bytes: int) -> None:
        self.credit = credit_bytes

    def broadcast_async(self, array: np.ndarray, root: int, name: str) -> Any:
        assert (root, name) == (0, NAME)
        if self.rank == 0:
            self._board.append(array.copy())
        self._told += 1

        def wait() -> None:
            array[:] = self._board[self._told - 1]

        return SimpleNamespace(wait=wait)

    @property
    def setting(self) -> tuple[int, ...]:
        return (self.credit, *(part for each in self.exchanges for part in each.layout))


def run(seconds_of: Any, **options: Any) -> tuple[list[Worker], set[tuple[int, ...]]]:
    """Step all workers until it is over; ranks above 0 see other times, which do not count."""
    board: list[Any] = []
    workers = [Worker(rank, board, **options) for rank in range(3)]
    seen = set()
    for _ in range(400):
        assert len({worker.setting for worker in workers}) == 1, "one step, one setting"
        seen.add(workers[0].setting)
        for worker in workers:
            worker.tuner.step(seconds_of(worker.setting) * (1 + worker.rank))
        if all(worker.tuner.is_over for worker in workers):
            return workers, seen
    raise AssertionError("no end")


def test_all_change_together_to_what_is_best():
    workers, seen = run(lambda setting: 2.0 if setting[2] == 256 << 10 else 3.0)
    assert all(worker.exchanges[0].layout.bucket_bytes == 256 << 10 for worker in workers)
    counts = workers[0].tuner.statistics()
    assert counts["autotune_gain"] == pytest.approx(1 / 3)
    assert counts["autotune_bucket_bytes"] == 256 << 10
    assert len(seen) > 8


def test_without_a_gain_all_is_as_before():
    workers, _ = run(lambda setting: 1.0)
    assert all(worker.setting == (0, *DEFAULT) for worker in workers)


def test_with_two_exchanges_only_credit_is_tuned():
    workers, seen = run(lambda setting: 1.0 if setting[0] == 1 << 20 else 2.0, exchanges=2)
    assert {setting[1:] for setting in seen} == {(*DEFAULT, *DEFAULT)}
    assert all(worker.credit == 1 << 20 for worker in workers)


def test_a_credit_of_the_settings_stays():
    _, seen = run(lambda setting: 1.0, credit=700_000)
    assert {setting[0] for setting in seen} == {700_000}


def test_where_nothing_can_be_tuned_it_ends():
    workers, seen = run(lambda setting: 1.0, credit=700_000, exchanges=0)
    assert len(seen) == 1
    assert all(worker.tuner.is_over for worker in workers)
