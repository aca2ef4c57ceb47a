# SPDX-License-Identifier: Apache-2.0
"""Random graphs, weights, operations and orders through the engine, beside dense matrices.

All workers draw the same cases from one seed, so each knows what the others have and can compute
what it is to get; the order in which it starts and ends its operations is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fastps
from fastps import topology

COUNTS = (1, 7, 300, 40_000)  # of float64: the last in several chunks
Array = np.ndarray
Begun = tuple[Callable[[], Any], Array]  # begins an operation; what it is to give


class Case:
    """Some operations that are under way at once, as one worker sees them.

    x: rows of it are what the workers have. Everything but `own` is drawn alike by all.
    """

    def __init__(self, seed: int, number: int, me: int, n: int) -> None:
        self.draw = np.random.default_rng([seed, number])
        self.own = np.random.default_rng([seed, number, me])
        self.me, self.n, self.number = me, n, number
        self.graph = self.random_graph()
        self.is_weighted = bool(self.draw.integers(2))

    def random_graph(self) -> topology.Topology:
        """Draw edges and weights; everybody has itself."""
        is_edge = self.draw.random((self.n, self.n)) < self.draw.uniform(0.1, 0.9)
        weights = np.where(is_edge, self.draw.uniform(0.1, 1.0, is_edge.shape), 0.0)
        np.fill_diagonal(weights, self.draw.uniform(0.1, 1.0, self.n))
        return topology.Topology(weights)

    def rows(self) -> Array:
        return self.draw.standard_normal((self.n, int(self.draw.choice(COUNTS))))

    def static(self, name: str | None) -> Begun:
        """Mix on the graph, with its weights or as a mean."""
        x = self.rows()
        matrix = self.graph.weights
        if not self.is_weighted:
            matrix = (matrix > 0) / (matrix > 0).sum(axis=0)
        wanted = (matrix.T @ x)[self.me]
        return lambda: fastps.neighbor_allreduce_async(x[self.me], name=name), wanted

    def subset(self, name: str | None) -> Begun:
        """Weigh some of the in-neighbours; what the others send is no part of it."""
        x = self.rows()
        kept = (self.graph.weights > 0) & (self.draw.random((self.n, self.n)) < 0.6)
        matrix = np.where(kept, self.draw.normal(size=kept.shape), 0.0)
        np.fill_diagonal(matrix, self.draw.normal(size=self.n))
        return lambda: fastps.neighbor_allreduce_async(
            x[self.me], self_weight=matrix[self.me, self.me], name=name,
            src_weights={j: matrix[j, self.me] for j in range(self.n)
                         if kept[j, self.me] and j != self.me},
        ), (matrix.T @ x)[self.me]  # fmt: skip

    def dynamic(self, name: str | None) -> Begun:
        """Mix on edges of this call, weighed by receivers, and by senders if they want to."""
        x, me, others = self.rows(), self.me, ~np.eye(self.n, dtype=bool)
        edges = others & (self.draw.random((self.n, self.n)) < 0.5)
        weights = self.draw.normal(size=edges.shape)
        factors = self.draw.choice([0.5, 1.0, -2.0], size=edges.shape)
        factors[self.draw.random(self.n) < 0.4] = 1.0  # these workers give lists
        kept = self.draw.normal(size=self.n)
        wanted = kept[me] * x[me] + ((edges * weights * factors).T @ x)[me]
        to = [j for j in range(self.n) if edges[me, j]]
        targets = to if (factors[me] == 1.0).all() else {j: factors[me, j] for j in to}
        return lambda: fastps.neighbor_allreduce_async(
            x[me], self_weight=kept[me], dst_weights=targets, name=name,
            src_weights={j: weights[j, me] for j in range(self.n) if edges[j, me]},
        ), wanted  # fmt: skip

    def several(self, name: str | None) -> Begun:
        """Mix a list, whose small ones travel together; results one after the other."""
        some = [self.rows() for _ in range(int(self.draw.integers(1, 5)))]
        matrix = self.graph.weights > 0
        wanted = [((matrix / matrix.sum(axis=0)).T @ x)[self.me] for x in some]
        heard = self.graph.in_neighbors(self.me)
        share = 1 / (len(heard) + 1)
        return lambda: fastps.neighbor_allreduce_async(
            [x[self.me] for x in some], self_weight=share,
            src_weights=dict.fromkeys(heard, share), name=name,
        ), np.concatenate(wanted)  # fmt: skip

    def run(self) -> int:
        """Start all in an order of our own, and see what comes; give how many there were."""
        fastps.set_topology(self.graph, is_weighted=self.is_weighted)
        kinds = (self.static, self.subset, self.dynamic, self.several)
        begun = []
        for index in range(int(self.draw.integers(1, 7))):
            name = f"{self.number}.{index}" if self.draw.random() < 0.7 else None
            kind = kinds[int(self.draw.integers(len(kinds)))]
            begun.append((name, *kind(name)))
        named = [one for one in begun if one[0] is not None]
        order = [one for one in begun if one[0] is None]  # these are counted, so all alike
        for one in named:
            order.insert(int(self.own.integers(len(order) + 1)), one)
        flights = [(begin(), wanted) for _, begin, wanted in order]
        for place in self.own.permutation(len(flights)):
            flight, wanted = flights[place]
            found = fastps.synchronize(flight)
            found = np.concatenate(found) if isinstance(found, list) else found
            np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11,
                                       err_msg=f"case {self.number} of {order}")  # fmt: skip
        return len(flights)


class Windows:
    """Two windows on one random graph, and what each buffer has to hold, in dense arrays.

    x: [window, worker]; b, p_of_b: [window, writer, worker]. In each phase nobody's operation
    meets another's in one buffer, so what comes of it is known, whatever comes first.
    """

    def __init__(self, case: Case, count: int) -> None:
        self.case, self.count = case, count
        n, self.edges = case.n, case.graph.weights > 0
        np.fill_diagonal(self.edges, False)
        self.x = case.draw.standard_normal((2, n, count))
        self.b, self.p = np.zeros((2, n, n, count)), np.ones((2, n))
        self.p_of_b = np.zeros((2, n, n))
        self.mine = [one[case.me].copy() for one in self.x]
        self.names = [f"window {case.number}.{index}" for index in range(2)]

    def put(self, who: int) -> list[Any]:
        """Let a worker put or add several times, to some; begin it if that is us."""
        draw, flights = self.case.draw, []
        for _ in range(3):
            w, adds, kept = int(draw.integers(2)), draw.random() < 0.6, draw.choice([0.5, 1.0])
            targets = {int(j): float(draw.choice([0.25, 0.5, 1.0]))
                       for j in np.flatnonzero(self.edges[who])
                       if draw.random() < 0.7}  # fmt: skip
            if who == self.case.me:
                start = fastps.win_accumulate_async if adds else fastps.win_put_async
                flights.append(start(self.mine[w], self.names[w], float(kept), targets))
            for j, weight in targets.items():
                self.b[w, who, j] *= adds
                self.p_of_b[w, who, j] *= adds
                self.b[w, who, j] += weight * self.x[w, who]
                self.p_of_b[w, who, j] += weight * self.p[w, who]
            self.x[w, who] *= kept
            self.p[w, who] *= kept
        return flights

    def get(self, who: int) -> list[Any]:
        """Let a worker get what some of its in-neighbours have."""
        draw, w = self.case.draw, int(self.case.draw.integers(2))
        sources = {int(j): float(draw.choice([0.5, 1.0]))
                   for j in np.flatnonzero(self.edges[:, who]) if draw.random() < 0.7}  # fmt: skip
        for j, weight in sources.items():
            self.b[w, j, who] = weight * self.x[w, j]
        return [fastps.win_get_async(self.names[w], sources)] if who == self.case.me else []

    def update(self, who: int) -> list[Any]:
        """Let a worker mix what some of its buffers hold, and empty them or not."""
        draw, w = self.case.draw, int(self.case.draw.integers(2))
        kept, resets = float(draw.normal()), bool(draw.integers(2))
        weights = {int(j): float(draw.normal())
                   for j in np.flatnonzero(self.edges[:, who]) if draw.random() < 0.7}  # fmt: skip
        if who == self.case.me:
            fastps.win_update(self.names[w], kept, weights, reset=resets)
        self.x[w, who] = kept * self.x[w, who]
        self.p[w, who] *= kept
        for j, weight in weights.items():
            self.x[w, who] += weight * self.b[w, j, who]
            self.p[w, who] += weight * self.p_of_b[w, j, who]
            self.b[w, j, who] *= not resets
            self.p_of_b[w, j, who] *= not resets
        return []

    def run(self, phases: int) -> None:
        """Go through phases of one kind each, and compare our part with the whole."""
        me, names = self.case.me, self.names
        fastps.set_topology(self.case.graph)
        for name, own in zip(names, self.mine, strict=True):
            fastps.win_create(own, name, zero_init=True)
        for _ in range(phases):
            kind = (self.put, self.get, self.update)[int(self.case.draw.integers(3))]
            flights = [flight for who in range(self.case.n) for flight in kind(who)]
            for place in self.case.own.permutation(len(flights)):
                fastps.win_wait(flights[place])
            fastps.barrier()
            for w, own in enumerate(self.mine):
                np.testing.assert_allclose(own, self.x[w, me], rtol=1e-9, atol=1e-9)
                assert abs(fastps.win_associated_p(names[w]) - self.p[w, me]) < 1e-9
            fastps.barrier()
        for w, name in enumerate(names):  # what is left in the buffers
            heard = self.case.graph.in_neighbors(me)
            total = fastps.win_update(name, 0.0, dict.fromkeys(heard, 1.0))
            np.testing.assert_allclose(total, self.b[w, :, me].sum(axis=0), atol=1e-9)
            fastps.win_free(name)


def cases(*, seed: int, count: int) -> int:
    """Run so many cases of each sort; give how many operations among neighbours there were."""
    fastps.init()
    fastps.turn_on_win_ops_with_associated_p()
    me, n = fastps.rank(), fastps.size()
    operations = 0
    for number in range(count):
        operations += Case(seed, number, me, n).run()
        if number % 4 == 0:
            case = Case(seed, count + number, me, n)
            Windows(case, int(case.draw.choice(COUNTS))).run(8)
    fastps.barrier()
    fastps.shutdown()
    return operations
