# SPDX-License-Identifier: Apache-2.0
"""Windows that are created while a worker dies: they are of those that are left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.collectives._exchange import Exchange
from fastps.errors import MismatchError
from fastps.graph.windows import WindowTable
from fastps.topology import fully_connected_graph
from fastps.types import DType
from fastps.worker._engine import WorkerEngine

SIZE = 3
DEAD = 2  # after worker 0 has listed its neighbours, before all tell each other of theirs


class Host:
    """Worker 0 of three, as far as its windows look."""

    me, arena, arenas, timeout_s = 0, None, {}, 30.0

    def __init__(self, theirs: list[Any]) -> None:
        engine = WorkerEngine(me=0, n_members=SIZE, lanes={})
        self.exchange = Exchange(me=0, n_members=SIZE, engine=engine, goes_on=True)
        self._theirs = theirs

    def living(self) -> Any:
        return SimpleNamespace(ranks=tuple(range(SIZE)))

    def start_gather(self, own: list[Any], _name: str) -> Any:
        return SimpleNamespace(wait=lambda: {0: own, 1: self._theirs})

    def check_usable(self) -> None: ...

    def reach(self, members: list[int]) -> None:
        assert sorted(members) == [1, DEAD]


def made(theirs: list[Any]) -> WindowTable:
    """Make the windows of worker 0; theirs: what worker 1 tells of its own."""
    graph = SimpleNamespace(topology=fully_connected_graph(SIZE), is_weighted=False)
    group: Any = SimpleNamespace(size=SIZE)
    neighbors: Any = SimpleNamespace(graph=graph)
    host: Any = Host(theirs)
    return WindowTable(host, group, neighbors)


@pytest.mark.parametrize("ends", [[0], [0, DEAD]])  # worker 1 knew of the death, or did not
def test_a_neighbour_that_dies_meanwhile_is_left_out(ends):
    table = made([40, int(DType.FLOAT64), ends, ends, -1, -1])
    try:
        assert table.create(np.ones(5), "x", zero_init=True)
        known = table.find("x")
        assert known.window.targets == (1,)
        assert known.self_weight == 0.5
        assert known.weights == {1: 0.5}
    finally:
        table.close(timeout_s=5.0)


def test_graphs_that_differ_among_those_left_are_still_told():
    table = made([40, int(DType.FLOAT64), [DEAD], [DEAD], -1, -1])
    try:
        with pytest.raises(MismatchError, match="workers 0 and 1 have different graphs"):
            table.create(np.ones(5), "x", zero_init=True)
    finally:
        table.close(timeout_s=5.0)
