# SPDX-License-Identifier: Apache-2.0
"""Graphs of workers, and how each worker weighs what its neighbours send.

Decides which worker receives from which, and with which weight; never knows tensors, links or a
session. Pure. A topology is a matrix A: A[i, j] is the weight, at worker j, of what worker i
sends; the diagonal is the weight of a worker's own value. All graphs made here are doubly
stochastic, so that repeated mixing leads to the average. Exceptions: with_sources() and
with_destinations(), which take any edges.

Graphs and weights: Ying et al., "BlueFog: make decentralized algorithms practical for optimization
and deep learning", 2021; one-peer exponential: Ying et al., "Exponential graph is provably
efficient for decentralized deep training", NeurIPS 2021.
"""

from __future__ import annotations

import importlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from fastps.errors import ArgumentError

Matrix: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ranks: TypeAlias = list[int]
Turn: TypeAlias = tuple[Ranks, Ranks]  # targets and sources of a worker in one round

MANY_ROUNDS = 10_000  # of mixing; slower graphs count as never agreeing


@dataclass(frozen=True, eq=False)
class Topology:
    """A weighted directed graph of workers 0 to size - 1, with self loops.

    weights: float64[size, size], read-only; a weight of 0 means that there is no edge.
    """

    weights: Matrix

    def __post_init__(self) -> None:
        matrix = np.array(self.weights, np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(
                f"weights of shape {matrix.shape}: give a square matrix with a row for each worker"
            )
        matrix.flags.writeable = False
        object.__setattr__(self, "weights", matrix)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.weights)

    def in_neighbors(self, rank: int) -> Ranks:
        """List the workers that a worker receives from, ascending, without itself."""
        return [int(one) for one in np.flatnonzero(self.weights[:, rank]) if one != rank]

    def out_neighbors(self, rank: int) -> Ranks:
        """List the workers that a worker sends to, ascending, without itself."""
        return [int(one) for one in np.flatnonzero(self.weights[rank]) if one != rank]

    def receive_weights(self, rank: int) -> tuple[float, dict[int, float]]:
        """Return the weight of a worker's own value, and those of its in-neighbours' values."""
        column = self.weights[:, rank]
        return float(column[rank]), {one: float(column[one]) for one in self.in_neighbors(rank)}

    def send_weights(self, rank: int) -> tuple[float, dict[int, float]]:
        """Return the weight of a worker's own value, and those it has at its out-neighbours."""
        row = self.weights[rank]
        return float(row[rank]), {one: float(row[one]) for one in self.out_neighbors(rank)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and np.array_equal(self.weights, other.weights)

    def __hash__(self) -> int:
        return hash(self.weights.tobytes())


# ---- static graphs ----


def exponential_graph(n: int, base: int = 2) -> Topology:
    """Connect each worker to those 1, base, base**2, ... places on; all weights equal."""
    _check_size(n)
    return _circulant(n, {0, *_powers(n, base)})


def symmetric_exponential_graph(n: int, base: int = 4) -> Topology:
    """Connect each worker to those a power of base away, the shorter way round; weights equal."""
    _check_size(n)
    near = {0, *_powers(n, base)}
    return _circulant(n, {d for d in range(n) if min(d, n - d) in near})


def ring_graph(n: int, connect_style: int = 0) -> Topology:
    """Connect each worker to its neighbours on a ring; all weights equal.

    connect_style: 0 sends both ways, 1 to the worker before, 2 to the one after.
    """
    _check_size(n)
    if connect_style not in (0, 1, 2):
        raise ValueError(f"connect_style={connect_style} must be 0, 1 or 2")
    steps = ((0, 1, -1), (0, -1), (0, 1))[connect_style]
    return _circulant(n, {step % n for step in steps})


def star_graph(n: int, center_rank: int = 0) -> Topology:
    """Connect all workers to one, both ways, with weight 1 / n."""
    _check_size(n)
    if not 0 <= center_rank < n:
        raise ValueError(f"center_rank={center_rank} must be a rank from 0 to {n - 1}")
    weights = np.diag(np.full(n, 1 - 1 / n))
    weights[center_rank, :] += 1 / n
    weights[:, center_rank] += 1 / n
    weights[center_rank, center_rank] = 1 / n
    for leaf in set(range(n)) - {center_rank}:
        weights[leaf, leaf] = 1 - 1 / n
    return Topology(weights)


def mesh_grid_2d_graph(n: int, shape: tuple[int, int] | None = None) -> Topology:
    """Connect each worker to those beside it on a grid, with Metropolis-Hastings weights.

    shape: (rows, columns); None: as square as n allows. An edge weighs 1 / the larger number of
    neighbours at its two ends, self counted; a worker keeps what is left.
    """
    _check_size(n)
    rows = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    rows, columns = shape or (rows, n // rows)
    if rows * columns != n:
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} places, not {n}: give a shape "
            "with n places"
        )
    places = [divmod(rank, columns) for rank in range(n)]
    edges = np.array([[abs(a - c) + abs(b - d) == 1 for c, d in places] for a, b in places])
    return _metropolis(edges)


def fully_connected_graph(n: int) -> Topology:
    """Connect all workers to each other, with weight 1 / n: one mixing is the average."""
    _check_size(n)
    return _circulant(n, set(range(n)))


def hypercube_graph(n: int) -> Topology:
    """Connect workers whose numbers differ in one bit; all weights equal, n a power of 2."""
    _check_size(n)
    if n & (n - 1):
        raise ValueError(f"a hypercube of {n} workers: n must be a power of 2")
    bits = [0, *(1 << k for k in range(n.bit_length() - 1))]
    return _uniform([{rank ^ bit for bit in bits} for rank in range(n)])


def inner_outer_ring_graph(size: int, local_size: int) -> Topology:
    """Connect all workers of a machine, and each to its counterpart on the next machine."""
    machines = _machines_of(size, local_size)
    return _inner_outer(size, local_size, {1} if machines > 1 else set())


def inner_outer_exp2_graph(size: int, local_size: int) -> Topology:
    """Connect all workers of a machine, and each to counterparts 1, 2, 4, ... machines on."""
    return _inner_outer(size, local_size, _powers(_machines_of(size, local_size), 2))


def equi_static_graph(
    n: int, neighbors: int, *, seed: int = 0, is_symmetric: bool = False
) -> Topology:
    """Connect each worker to those at `neighbors` distances drawn at random, the same for all.

    W is the mean over draws a, with replacement, of (n - 1)/n P^a + I/n, where P^a sends to the
    worker a places on. How fast it mixes does not depend on n: the other eigenvalues stay below
    epsilon with a probability of 1 - p for 8 ln(2 n / p) / (3 epsilon^2) neighbors. is_symmetric:
    send both ways. Song, Li, Jin, Shi, Yan, Yin and Yuan, "Communication-efficient topologies for
    decentralized learning with O(1) consensus rate", NeurIPS 2022. Raises ValueError.
    """
    _check_size(n)
    if neighbors < 1:
        raise ValueError(f"neighbors={neighbors} must be at least 1")
    weights = np.zeros((n, n))
    for distance in _distances(n, neighbors, seed):
        part = _shifted(n, distance)
        weights += (part + part.T) / 2 if is_symmetric else part
    return Topology(weights / neighbors)


GRAPHS: dict[str, Callable[..., Topology]] = {
    "exp2": exponential_graph,
    "symmetric": symmetric_exponential_graph,
    "ring": ring_graph,
    "star": star_graph,
    "mesh": mesh_grid_2d_graph,
    "full": fully_connected_graph,
    "hypercube": hypercube_graph,
}  # by the names of the command line; those that need only a size


# ---- graphs that change from round to round ----


def base_graphs(n: int, peers: int = 1) -> list[Topology]:
    """Return the graphs of rounds after which all have the exact average, whatever n is.

    peers: of a worker in a round, at most. At most 2 log n + 2 rounds, the logarithm to the base
    peers + 1; then begin anew. Each graph is symmetric. The Base-(k+1) graph of Takezawa, Sato,
    Bao, Niwa and Yamada, "Beyond exponential graph: communication-efficient topologies for
    decentralized learning via finite-time convergence", NeurIPS 2023. Raises ValueError.
    """
    _check_size(n)
    if operator.index(peers) < 1:
        raise ValueError(f"peers={peers}: a worker needs at least 1 peer in a round")
    return [_weighted(n, one) for one in base_shares(n, peers)]


def base_shares(n: int, peers: int) -> list[dict[tuple[int, int], Fraction]]:
    """Return the weights of base_graphs() as fractions, without those of own values."""
    smooth = math.prod(_factors(n, peers + 1))
    plain = _simple_base(n, peers)
    if smooth == 1 or smooth == n:
        return plain
    rest = n // smooth  # average inside groups of so many, then among groups
    inside = [
        {(g * rest + i, g * rest + j): w for g in range(smooth) for (i, j), w in one.items()}
        for one in _simple_base(rest, peers)
    ]
    among = [
        {(i * rest + g, j * rest + g): w for g in range(rest) for (i, j), w in one.items()}
        for one in _hypercube(smooth, peers)
    ]
    return min(plain, inside + among, key=len)


def equi_one_peer_rounds(n: int, *, seed: int = 0, step: float = 0.5) -> Iterator[Topology]:
    """Yield graphs in which each worker sends to the one at a random distance, the same for all.

    W = (1 - step) I + step ((n - 1)/n P^a + I/n): OD-EquiDyn of equi_static_graph()'s paper. All
    workers pass the same seed.
    """
    rng = _random(n, seed, step)
    while True:
        distance = 0 if n == 1 else int(rng.integers(1, n))
        yield Topology((1 - step) * np.eye(n) + step * _shifted(n, distance))


def equi_matching_rounds(n: int, *, seed: int = 0, step: float = 0.5) -> Iterator[Topology]:
    """Yield graphs in which pairs at a random distance exchange, both ways; some have no peer.

    A pair's weights are step (n - 1)/n: OU-EquiDyn, as above. All workers pass the same seed.
    """
    rng = _random(n, seed, step)
    while True:
        distance, first = (0, 0) if n == 1 else (int(rng.integers(1, n)), int(rng.integers(n)))
        weights, free = np.eye(n), set(range(n))
        for one in (place % n for place in range(first, first + n)):
            other = (one + distance) % n
            if one != other and {one, other} <= free:
                free -= {one, other}
                weights[[one, other], [other, one]] = step * (n - 1) / n
                weights[[one, other], [one, other]] = 1 - step * (n - 1) / n
        yield Topology(weights)


# ---- one peer at a time: endless rounds, the same number of calls on all workers ----


def one_peer(topology: Topology, rank: int) -> Iterator[Turn]:
    """Yield rounds in which each worker sends to one out-neighbour: targets and sources.

    Neighbours take turns clockwise from each worker on. On an exponential graph of a power of 2
    of workers, log2 n rounds of equal weights make the exact average.
    """
    around = [_clockwise(topology, one) for one in range(topology.size)]
    for turn in itertools.count():
        targets = [one[turn % len(one)] if one else None for one in around]
        target = targets[rank]
        yield [] if target is None else [target], [q for q, to in enumerate(targets) if to == rank]


def one_peer_machines(machines: int, machine: int) -> Iterator[Turn]:
    """Yield which machine to send to and receive from: 1, 2, 4, ... machines away."""
    distances = sorted(_powers(machines, 2))
    for turn in itertools.count():
        if not distances:
            yield [], []
            continue
        step = distances[turn % len(distances)]
        yield [(machine + step) % machines], [(machine - step) % machines]


def inner_outer_ring_rounds(size: int, local_size: int, rank: int) -> Iterator[Turn]:
    """Yield rounds in which one worker of each machine, in turn, speaks with the next machine.

    The others form a ring inside their machine. local_size: 3 at least.
    """
    machines = _machines_of(size, local_size)
    return _inner_outer_rounds(local_size, rank, [1], [1] if machines > 1 else [], machines)


def inner_outer_exp2_rounds(size: int, local_size: int, rank: int) -> Iterator[Turn]:
    """Yield rounds as inner_outer_ring_rounds(), at distances 1, 2, 4, ... inside and outside.

    A worker takes the next outer distance each time it is its turn, so all are used by all.
    """
    machines = _machines_of(size, local_size)
    inner = sorted(_powers(local_size - 1, 2))
    return _inner_outer_rounds(local_size, rank, inner, sorted(_powers(machines, 2)), machines)


def _inner_outer_rounds(
    local_size: int, rank: int, inner: Sequence[int], outer: Sequence[int], machines: int
) -> Iterator[Turn]:
    if local_size < 3:
        raise ValueError(
            f"machines of {local_size} workers: one of them speaks with other machines, and the "
            "rest need a ring, so local_size must be 3 or more"
        )
    machine, local = divmod(rank, local_size)
    for turn in itertools.count():
        outside = turn % local_size
        if local == outside:
            lap = turn // local_size
            ways = [outer[lap % len(outer)]] if outer else []
            yield (
                [(machine + way) % machines * local_size + local for way in ways],
                [(machine - way) % machines * local_size + local for way in ways],
            )
            continue
        step = inner[turn % len(inner)]
        onward = step + (step >= (outside - local) % local_size)  # past the worker that is outside
        backward = step + (step >= (local - outside) % local_size)
        first = machine * local_size
        yield (
            [first + (local + onward) % local_size],
            [first + (local - backward) % local_size],
        )


# ---- what follows from a graph ----


def with_sources(sources: Sequence[Iterable[int]]) -> Topology:
    """Return the graph in which worker j receives from sources[j].

    Each worker weighs its sources and itself alike, so its weights sum to 1.
    """
    return _uniform([{j, *_checked(some, j, len(sources))} for j, some in enumerate(sources)])


def with_destinations(destinations: Sequence[Iterable[int]]) -> Topology:
    """Return the graph in which worker i sends to destinations[i]; weights as with_sources()."""
    n = len(destinations)
    sent = [set(_checked(some, i, n)) for i, some in enumerate(destinations)]
    return with_sources([[i for i in range(n) if j in sent[i]] for j in range(n)])


def round_of(turns: Sequence[Turn]) -> Topology:
    """Return the graph of one round of all workers; weights as with_sources().

    Raises ValueError where one worker sends to another that does not receive from it, or the
    other way round.
    """
    topology = with_sources([receives for _, receives in turns])
    for rank, (sends, _) in enumerate(turns):
        if sorted(sends) != topology.out_neighbors(rank):
            raise ValueError(
                f"worker {rank} sends to {sorted(sends)}, but {topology.out_neighbors(rank)} "
                "receive from it: both ends must name an edge"
            )
    return topology


def is_regular(topology: Topology) -> bool:
    """Return whether all workers have the same number of edges, in and out together."""
    edges = topology.weights != 0
    return len(set(edges.sum(axis=0) + edges.sum(axis=1))) == 1


def is_doubly_stochastic(topology: Topology) -> bool:
    """Return whether mixing keeps the sum of all values, and what all agree on."""
    sums = (topology.weights.sum(axis=axis) for axis in (0, 1))
    return all(np.allclose(one, 1.0, rtol=0, atol=1e-12) for one in sums)


def spectral_gap(topology: Topology) -> float:
    """Return 1 - the second largest size of an eigenvalue: how fast mixing converges, 0 to 1."""
    sizes = np.sort(np.abs(np.linalg.eigvals(topology.weights)))
    return float(1.0 - sizes[-2]) if len(sizes) > 1 else 1.0


def rounds_to_consensus(rounds: Iterable[Topology], tolerance: float = 1e-6) -> int | None:
    """Count rounds until all workers are within tolerance of the average, whatever their values.

    tolerance: relative to the largest size of a value. None: not in MANY_ROUNDS, or all agree on
    another value.
    """
    product: Matrix | None = None
    for count, one in enumerate(itertools.islice(rounds, MANY_ROUNDS)):
        product = np.eye(one.size) if product is None else product
        if np.abs(product - 1 / one.size).sum(axis=0).max() <= tolerance:
            return count
        if np.abs(product - product[:, :1]).sum(axis=0).max() <= tolerance / 10:
            return None
        product = product @ one.weights
    return None


# ---- graphs of networkx ----


def from_networkx(graph: Any) -> Topology:
    """Return the topology of a graph whose nodes are 0 to n - 1; edges without weight have 1."""
    if set(graph.nodes) != set(range(len(graph))):
        raise ValueError(
            f"nodes {sorted(graph.nodes, key=str)}: the nodes must be ranks, 0 to {len(graph) - 1}"
        )
    weights = np.zeros((len(graph), len(graph)))
    for source, target, weight in graph.edges(data="weight", default=1.0):
        weights[source, target] = weight
    if not graph.is_directed():
        weights = np.maximum(weights, weights.T)
    return Topology(weights)


def to_networkx(topology: Topology) -> Any:
    """Return a networkx.DiGraph of a topology; needs the extra fastps[graph]."""
    try:
        networkx = importlib.import_module("networkx")
    except ImportError as error:
        raise ImportError("networkx is not installed: pip install 'fastps[graph]'") from error
    return networkx.from_numpy_array(topology.weights, create_using=networkx.DiGraph)


def as_topology(graph: Any) -> Topology:
    """Return the topology of a Topology, a matrix of weights, or a graph of networkx."""
    if isinstance(graph, Topology):
        return graph
    if isinstance(graph, np.ndarray):
        return Topology(graph)
    if not hasattr(graph, "is_directed"):
        raise ArgumentError(
            f"a graph is needed, not {type(graph).__name__}: give a fastps.topology.Topology, a "
            "networkx.DiGraph or a square matrix of weights"
        )
    return from_networkx(graph)


# ---- parts ----


def _check_size(n: int) -> None:
    if operator.index(n) < 1:
        raise ValueError(f"n={n}: a graph needs a worker, so n must be at least 1")


def _machines_of(size: int, local_size: int) -> int:
    _check_size(size)
    if local_size < 1 or size % local_size:
        raise ValueError(
            f"{size} workers do not divide into machines of {local_size}: size must be a multiple "
            "of local_size"
        )
    return size // local_size


def _powers(n: int, base: int) -> set[int]:
    """List the powers of base below n: by multiplying, since logarithms round."""
    if base < 2:
        raise ValueError(f"base {base} must be at least 2, so that its powers grow")
    found, power = set(), 1
    while power < n:
        found.add(power)
        power *= base
    return found


def _uniform(sources: Sequence[set[int]]) -> Topology:
    """Weigh all sources of a worker alike; sources[j] holds j."""
    weights = np.zeros((len(sources), len(sources)))
    for rank, some in enumerate(sources):
        weights[sorted(some), rank] = 1 / len(some)
    return Topology(weights)


def _circulant(n: int, distances: set[int]) -> Topology:
    return _uniform([{(rank - step) % n for step in distances} for rank in range(n)])


_Shares: TypeAlias = dict[tuple[int, int], Fraction]


def _weighted(n: int, shares: _Shares) -> Topology:
    weights, kept = np.zeros((n, n)), [Fraction(1)] * n
    for (one, other), share in shares.items():
        weights[one, other] = float(share)
        kept[other] -= share
    np.fill_diagonal(weights, [float(share) for share in kept])
    return Topology(weights)


def _factors(n: int, most: int) -> list[int]:
    """List factors up to `most` of the largest divisor of n that has such ones only."""
    found = []
    for factor in range(most, 1, -1):
        while n % factor == 0:
            found.append(factor)
            n //= factor
    return found


def _hypercube(n: int, peers: int, first: int = 0) -> list[_Shares]:
    """Average n workers from the first on, whose prime factors are at most peers + 1."""
    rounds: list[_Shares] = []
    stride = 1
    for factor in _factors(n, peers + 1):
        shares: _Shares = {}
        for one in range(n):
            digit = one // stride % factor
            for step in range(1, factor):
                other = one + ((digit + step) % factor - digit) * stride
                shares[first + one, first + other] = Fraction(1, factor)
        rounds.append(shares)
        stride *= factor
    return rounds


def _simple_base(n: int, peers: int) -> list[_Shares]:
    """Average by blocks of a (peers + 1)^p workers, for the digits a of n to this base.

    Blocks average inside. Then, from the largest on, each gives its average to workers of smaller
    blocks, weighted by sizes, so that each of its a parts has the average of all; parts average
    inside.
    """
    blocks = _blocks(n, peers + 1)  # (first worker, digit, part size)
    rounds = [list(_hypercube(digit * size, peers, first)) for first, digit, size in blocks]
    inside = max(len(one) for one in rounds)
    for place, (first, digit, size) in enumerate(blocks):
        mine = rounds[place]
        mine += [{}] * (inside - len(mine) + place)
        if place == len(blocks) - 1:
            break
        mine.append(_given(first, digit, size, n))
        parts = [_hypercube(size, peers, first + part * size) for part in range(digit)]
        mine += [_joined(some) for some in zip(*parts, strict=True)]
    return [_joined(some) for some in itertools.zip_longest(*rounds, fillvalue={})]


def _joined(parts: Iterable[_Shares]) -> _Shares:
    return dict(itertools.chain(*(one.items() for one in parts)))


def _blocks(n: int, base: int) -> list[tuple[int, int, int]]:
    """List the first worker, the digit and the power of each digit of n that is not 0."""
    found, first, power = [], 0, max(_powers(n + 1, base))
    while power:
        digit = (n - first) // power
        if digit:
            found.append((first, digit, power))
            first += digit * power
        power //= base
    return found


def _given(first: int, digit: int, size: int, n: int) -> _Shares:
    """Let each worker after a block exchange with one of each of its parts."""
    after = first + digit * size
    shares: _Shares = {}
    share = Fraction(size, n - first)
    for place, one in enumerate(range(after, n)):
        for part in range(digit):
            other = first + part * size + place
            shares[one, other] = shares[other, one] = share
    return shares


def _random(n: int, seed: int, step: float) -> np.random.Generator:
    _check_size(n)
    if not 0 < step <= 1:
        raise ValueError(f"step={step} must be above 0 and at most 1")
    return np.random.default_rng(seed)


def _distances(n: int, count: int, seed: int) -> list[int]:
    if n == 1:
        return [0] * count
    return [int(one) for one in np.random.default_rng(seed).integers(1, n, count)]


def _shifted(n: int, distance: int) -> Matrix:
    """Return (n - 1)/n P^distance + I/n."""
    shifted: Matrix = (n - 1) / n * np.roll(np.eye(n), distance, axis=1) + np.eye(n) / n
    return shifted


def _metropolis(edges: np.ndarray[Any, np.dtype[np.bool_]]) -> Topology:
    degrees = edges.sum(axis=0) + 1
    weights = edges / np.maximum.outer(degrees, degrees)
    np.fill_diagonal(weights, 1 - weights.sum(axis=0))
    return Topology(weights)


def _inner_outer(size: int, local_size: int, distances: set[int]) -> Topology:
    inside = [range(rank - rank % local_size, rank - rank % local_size + local_size)
              for rank in range(size)]  # fmt: skip
    steps = [step * local_size for step in distances]
    return _uniform(
        [{*inside[rank], *((rank - step) % size for step in steps)} for rank in range(size)]
    )


def _clockwise(topology: Topology, rank: int) -> Ranks:
    return sorted(topology.out_neighbors(rank), key=lambda one: (one - rank) % topology.size)


def _checked(ranks: Iterable[int], own: int, n: int) -> Ranks:
    found = [operator.index(rank) for rank in ranks]
    if len(set(found)) != len(found) or own in found or not all(0 <= one < n for one in found):
        raise ValueError(
            f"worker {own} names {found}: give different ones of {n} workers other than {own}"
        )
    return found
