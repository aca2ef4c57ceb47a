# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_decentralized.py do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastps.torch as fps
from fastps import Compression, topology
from fastps.errors import FastPSError
from fastps.launch.graph import one_peer_rounds

ROWS, WIDTH = 12, 5  # of each worker's least-squares problem
RATE = 0.05
LOCAL = 5  # steps between two of NoLoCo's meetings


def start() -> tuple[int, int]:
    torch.set_num_threads(1)
    fps.init()
    return fps.rank(), fps.size()


def end() -> str:
    fps.barrier()
    fps.shutdown()
    return "done"


def mean_of_machines() -> float:
    """Give the mean of ranks here and on neighbours: all are one machine, or each is its own."""
    if fps.machine_size() == 1:
        return (fps.size() - 1) / 2
    heard = [fps.machine_rank(), *fps.in_neighbor_machine_ranks()]
    return sum(heard) / len(heard)


# ---- operations ----


def operations() -> str:
    """Mix tensors of all kinds, one and many, also such as are not contiguous."""
    me, n = start()
    sources = fps.in_neighbor_ranks()
    mean = sum([me, *sources]) / (1 + len(sources))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.full((23, 23), float(me), dtype=dtype)
        found = fps.neighbor_allreduce(x)
        assert found.dtype is dtype
        assert found.shape == x.shape
        assert torch.allclose(found.double(), torch.tensor(mean).double(), rtol=1e-2)
        assert (x == me).all()
    strided = torch.arange(12.0).reshape(3, 4).t() + me
    assert torch.allclose(fps.neighbor_allreduce(strided), strided - me + mean)
    assert fps.neighbor_allreduce(torch.tensor(float(me))).dim() == 0
    assert fps.neighbor_allreduce(torch.empty(0, 2)).shape == (0, 2)
    many = [torch.full((size,), float(me + size)) for size in (1, 70_000, 3, 300_000)]
    for one, found in zip(many, fps.synchronize(fps.neighbor_allreduce_async(many)), strict=True):
        assert torch.allclose(found, one - me + mean)
    after, before = (me + 1) % n, (me - 1) % n
    moved = fps.neighbor_allreduce(
        many[1], self_weight=0.0, src_weights={before: 1.0}, dst_weights=[after]
    )
    assert (moved == before + 70_000).all()
    rows = fps.neighbor_allgather(torch.full((me + 1, 2), me), src_ranks=[before],
                                  dst_ranks=[after])  # fmt: skip
    assert rows.tolist() == [[before, before]] * (before + 1)
    assert fps.pair_gossip(torch.tensor([float(me)]), me ^ 1).item() == me // 2 * 2 + 0.5
    whole = fps.hierarchical_neighbor_allreduce(torch.tensor(float(me)))
    assert whole.item() == pytest.approx(mean_of_machines())
    state = {"w": torch.full((3,), float(me)), "n": torch.tensor(me)}
    fps.average_parameters(state)
    assert state["w"].tolist() == [(n - 1) / 2] * 3
    assert state["n"].item() == me
    return end()


# ---- algorithms on least squares, beside their recursions in NumPy ----


def problem(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a worker's matrix and right side; all have optima of their own."""
    rng = np.random.default_rng(rank)
    return rng.standard_normal((ROWS, WIDTH)), rng.standard_normal(ROWS)


class Recursion:
    """All workers at once: rows of x are workers, `a` mixes from the left; shares: for q."""

    def __init__(self, n: int, graph: topology.Topology, shares: np.ndarray | None = None) -> None:
        self.n, self.a, self.shares = n, graph.weights.T, shares
        self.problems = [problem(rank) for rank in range(n)]

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return np.stack([m.T @ (m @ one - b) / ROWS
                         for one, (m, b) in zip(x, self.problems, strict=True)])  # fmt: skip

    def optimum(self) -> np.ndarray:
        matrix = np.concatenate([m for m, _ in self.problems])
        return np.linalg.lstsq(matrix, np.concatenate([b for _, b in self.problems]), rcond=None)[
            0
        ]

    def atc(self, steps: int) -> np.ndarray:
        x = np.zeros((self.n, WIDTH))
        for _ in range(steps):
            x = self.a @ (x - RATE * self.gradient(x))
        return x

    def awc(self, steps: int) -> np.ndarray:
        x = np.zeros((self.n, WIDTH))
        for _ in range(steps):
            x = self.a @ x - RATE * self.gradient(x)
        return x

    def decentlam(self, steps: int) -> np.ndarray:
        x, m = np.zeros((self.n, WIDTH)), np.zeros((self.n, WIDTH))
        for _ in range(steps):
            m = 0.5 * m + (x - self.a @ (x - RATE * self.gradient(x))) / RATE
            x = x - RATE * m
        return x

    def exact_diffusion(self, steps: int) -> np.ndarray:
        x = psi = np.zeros((self.n, WIDTH))
        half = (self.a + np.eye(self.n)) / 2
        for _ in range(steps):
            before, psi = psi, x - RATE * self.gradient(x)
            x = half @ (psi + x - before)
        return x

    def tracking(self, steps: int) -> np.ndarray:
        x = np.zeros((self.n, WIDTH))
        q = g = self.gradient(x)
        for _ in range(steps):
            x = self.a @ x - RATE * q
            before, g = g, self.gradient(x)
            q = (self.a if self.shares is None else self.shares) @ q + g - before
        return x

    def extra(self, steps: int) -> np.ndarray:
        half = (self.a + np.eye(self.n)) / 2
        before, g = np.zeros((self.n, WIDTH)), self.gradient(np.zeros((self.n, WIDTH)))
        x = self.a @ before - RATE * g
        for _ in range(steps - 1):
            last, g = g, self.gradient(x)
            before, x = x, 2 * half @ x - half @ before - RATE * (g - last)
        return x

    def beer(self, steps: int, keeps: int, share: float) -> np.ndarray:
        def coded(v: np.ndarray) -> np.ndarray:
            least = -np.sort(-np.abs(v), axis=1)[:, keeps - 1 : keeps]
            return np.where(np.abs(v) >= least, v, 0)

        x, known_x, known_q = np.zeros((3, self.n, WIDTH))
        q = g = self.gradient(x)
        step = share * (self.a - np.eye(self.n))
        for _ in range(steps):
            known_x = known_x + coded(x - known_x)
            known_q = known_q + coded(q - known_q)
            x = x + step @ known_x - RATE * q
            before, g = g, self.gradient(x)
            q = q + step @ known_q + g - before
        return x

    def quasi_global(self, steps: int, passes: int = 1) -> np.ndarray:
        x, m = np.zeros((self.n, WIDTH)), np.zeros((self.n, WIDTH))
        for _ in range(steps // passes):
            before, d = x, m
            for _ in range(passes):
                d = 0.5 * d + self.gradient(x)
                x = x - RATE * d
            x = self.a @ x
            m = 0.5 * m + 0.5 * (before - x) / (passes * RATE)
        return x

    def quasi_global_adam(self, steps: int) -> np.ndarray:
        x, m, v = np.zeros((3, self.n, WIDTH))
        for step in range(1, steps + 1):
            before, g = x, self.gradient(x)
            up, down = 0.9 * m + g, np.sqrt((0.999 * v + 0.001 * g**2) / (1 - 0.999**step))
            x = self.a @ (x - 0.1 * RATE * up / (1 - 0.9**step) / (down + 1e-8))
            d = (before - x) / np.linalg.norm(before - x, axis=1, keepdims=True)
            m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d**2
        return x

    def noloco(self, steps: int) -> np.ndarray:
        slow, m = np.zeros((self.n, WIDTH)), np.zeros((self.n, WIDTH))
        for number in range(steps // LOCAL):
            x = slow
            for _ in range(LOCAL):
                x = x - RATE * self.gradient(x)
            pairs = np.eye(self.n)
            order = np.random.default_rng([7, number]).permutation(self.n)
            for a, b in order[: self.n // 2 * 2].reshape(-1, 2):
                pairs[np.ix_([a, b], [a, b])] = 0.5
            m = 0.5 * m + 0.8 * pairs @ (x - slow) - 0.6 * (slow - pairs @ slow)
            slow = slow + m
        return slow


def noloco(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    return fps.DistributedNoLoCoOptimizer(
        optimizer, model, LOCAL, outer_lr=0.8, outer_momentum=0.5, gamma=0.6, seed=7
    )


def trained(wrap: Callable[..., Any], steps: int, momentum: float | None = 0.0,
            **options: Any) -> Any:  # fmt: skip
    """Minimise our least squares with a wrapped SGD, or Adam for no momentum; give x."""
    matrix, right = (torch.from_numpy(one) for one in problem(fps.rank()))
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    if momentum is not None:
        inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    optimizer = wrap(inner, model, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        (((model(matrix)[:, 0] - right) ** 2).sum() / (2 * ROWS)).backward()
        optimizer.step()
    return model.weight.detach().numpy()[0]


WAYS: dict[str, tuple[Callable[..., Any], Callable[[Recursion, int], np.ndarray], float]] = {
    "atc": (fps.DistributedAdaptThenCombineOptimizer, Recursion.atc, 0.0),
    "awc": (fps.DistributedAdaptWithCombineOptimizer, Recursion.awc, 0.0),
    "decentlam": (fps.DistributedDecentLaMOptimizer, Recursion.decentlam, 0.5),
    "noloco": (noloco, Recursion.noloco, 0.0),
    "exact": (fps.DistributedExactDiffusionOptimizer, Recursion.exact_diffusion, 0.0),
    "extra": (partial(fps.DistributedExactDiffusionOptimizer, extra=True), Recursion.extra, 0.0),
    "tracking": (fps.DistributedGradientTrackingOptimizer, Recursion.tracking, 0.0),
}


def algorithms() -> dict[str, float]:
    """Compare every algorithm with its recursion after 20 steps; give the errors after 600.

    Those of what is exact are by then 1e-8 in NumPy, and biases what they stay.
    """
    me, n = start()
    graph = topology.mesh_grid_2d_graph(n)
    fps.set_topology(graph, is_weighted=True)
    recursion, errors = Recursion(n, graph), {}
    optimum = recursion.optimum()
    for name, (wrap, follow, momentum) in WAYS.items():
        x = trained(wrap, 20, momentum)
        np.testing.assert_allclose(x, follow(recursion, 20)[me], rtol=1e-9, atol=1e-12)
        x = trained(wrap, 600, momentum)
        errors[name] = float(np.linalg.norm(x - optimum) / np.linalg.norm(optimum))
    x = trained(fps.DistributedAdaptThenCombineOptimizer, 20, overlap=False)
    np.testing.assert_allclose(x, recursion.atc(20)[me], rtol=1e-9, atol=1e-12)
    errors |= directed(me, n)
    fps.set_topology(graph, is_weighted=True)
    for momentum, passes, wanted in (
        (0.5, 1, recursion.quasi_global(21)), (0.5, 3, recursion.quasi_global(21, 3)),
        (None, 1, recursion.quasi_global_adam(21)),
    ):  # fmt: skip
        x = trained(
            fps.DistributedAdaptThenCombineOptimizer, 21, momentum, quasi_global=True,
            num_steps_per_communication=passes,
        )  # fmt: skip
        np.testing.assert_allclose(x, wanted[me], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"momentum=0\.0: pass SGD with momentum=0\.9, or Adam"):
        trained(fps.DistributedAdaptThenCombineOptimizer, 1, quasi_global=True)
    end()
    return errors


def directed(me: int, n: int) -> dict[str, float]:
    """Track gradients where no weights are doubly stochastic: a ring one way, and an edge more."""
    edges = np.eye(n) + np.roll(np.eye(n), 1, axis=1)
    edges[0, 2] = 1.0
    graph = topology.Topology(edges / edges.sum(axis=0))
    fps.set_topology(graph)
    shares = (edges / edges.sum(axis=1, keepdims=True)).T
    recursion = Recursion(n, graph, shares)
    wrap = partial(fps.DistributedGradientTrackingOptimizer, push_pull=True)
    x = trained(wrap, 20)
    np.testing.assert_allclose(x, recursion.tracking(20)[me], rtol=1e-9, atol=1e-12)
    best = recursion.optimum()
    return {
        name: float(np.linalg.norm(trained(way, 600) - best) / np.linalg.norm(best))
        for name, way in (
            ("push-pull", wrap), ("directed", fps.DistributedGradientTrackingOptimizer),
            ("directed awc", fps.DistributedAdaptWithCombineOptimizer),
        )
    }  # fmt: skip


def compressed() -> dict[str, float]:
    """Adapt, then combine what travels encoded; give the distances from what comes without."""
    me, n = start()
    graph = topology.ring_graph(n)
    fps.set_topology(graph, is_weighted=True)
    recursion = Recursion(n, graph)
    wanted, found = recursion.atc(200)[me], {}
    for name, coding in {
        "fp16": Compression.fp16(), "int4 ef": Compression.int4(ef="vanilla"),
        "topk ef": Compression.topk(2, ef="vanilla"), "topk": Compression.topk(2),
        "onebit": Compression.onebit(),
    }.items():  # fmt: skip

        def wrap(sgd: Any, model: nn.Module, name: str = name, coding: Any = coding) -> Any:
            optimizer = fps.DistributedAdaptThenCombineOptimizer(sgd, model, prefix=name)
            optimizer.compression = coding
            optimizer.consensus_step = 0.5 if name == "topk ef" else None
            return optimizer

        x = trained(wrap, 200)
        found[name] = float(np.linalg.norm(x - wanted) / np.linalg.norm(wanted))
    best = recursion.optimum()

    def with_topk(kind: Any, name: str, steps: int) -> np.ndarray:
        def wrap(sgd: Any, model: nn.Module) -> Any:
            optimizer = kind(sgd, model, prefix=name)
            optimizer.compression = Compression.topk(2, ef="vanilla")
            optimizer.consensus_step = 0.5
            return optimizer

        return trained(wrap, steps)

    for name, kind in (
        ("choco", fps.DistributedAdaptThenCombineOptimizer),
        ("beer", fps.DistributedGradientTrackingOptimizer),
    ):
        x = with_topk(kind, name, 300)
        found[name] = float(np.linalg.norm(x - best) / np.linalg.norm(best))
    x = with_topk(fps.DistributedGradientTrackingOptimizer, "beer 20", 20)
    np.testing.assert_allclose(x, recursion.beer(20, 2, 0.5)[me], rtol=1e-4, atol=1e-5)
    tensor = torch.full((300,), float(me), dtype=torch.bfloat16)
    mean = fps.neighbor_allreduce(tensor, compression=Compression.fp16)
    torch.testing.assert_close(mean, fps.neighbor_allreduce(tensor))
    model = nn.Linear(2, 1)
    optimizer = fps.DistributedAdaptThenCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, fps.CommunicationType.allreduce,
        overlap=False,
    )  # fmt: skip
    optimizer.compression = Compression.int8()
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=r"compression needs .*neighbor_allreduce, not allreduce"):
        optimizer.step()
    end()
    return found


# ---- a neighbour that lies ----


def distance_beside_a_liar(me: int, n: int, rule: Any, **options: Any) -> float:
    """Solve the same least squares on all but the last, who sends garbage; give our error."""
    matrix, right = (torch.from_numpy(one) for one in problem(0))
    matrix = torch.linalg.qr(matrix).Q * ROWS**0.5  # so that each step takes 5 % of the error
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, float(me))
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer = fps.DistributedAdaptThenCombineOptimizer(sgd, model, **options)
    optimizer.rule = rule
    for step in range(150):
        if me == n - 1:
            with torch.no_grad():
                model.weight.fill_((1e6, torch.nan, torch.inf, -1e6)[step % 4])
        optimizer.zero_grad()
        (((model(matrix)[:, 0] - right) ** 2).sum() / (2 * ROWS)).backward()
        optimizer.step()
    optimum = torch.linalg.lstsq(matrix, right[:, None]).solution[:, 0]
    return float((model.weight.detach()[0] - optimum).norm())


def liars() -> dict[str, float]:
    """Give the errors by every rule; refuse rules where they have no meaning."""
    me, n = start()
    fps.set_topology(topology.fully_connected_graph(n))
    errors = {"none": distance_beside_a_liar(me, n, None)}
    errors["trimmed"] = distance_beside_a_liar(me, n, fps.TrimmedMean(1))
    errors["clipped"] = distance_beside_a_liar(me, n, fps.AdaptiveClipping(0.2), overlap=False)
    x = torch.arange(3.0, dtype=torch.bfloat16) + me
    some = fps.neighbor_allreduce([x, x[:2].clone()], rule=fps.CoordinateMedian())
    assert [one.tolist() for one in some] == [[2.0, 3.0, 4.0], [2.0, 3.0]]
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fps.DistributedAdaptThenCombineOptimizer(
        sgd, model, fps.CommunicationType.allreduce, overlap=False
    )
    optimizer.rule = fps.CoordinateMedian()
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=r"rule= needs .*neighbor_allreduce, not allreduce"):
        optimizer.step()
    end()
    return {} if me == n - 1 else errors


# ---- every optimizer of torch, J passes, changing edges, buffers, hierarchy ----


class Net(nn.Module):
    """A net with a shared layer, one that is never used, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(2, 2)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.relu(self.shared(self.first(x))))
        return self.last(self.norm(x))


# Not Rprop: it goes by the sign of what is rounding alone, the gradient of a bias before the norm.
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.RAdam(p, lr=0.01),
    lambda p: torch.optim.Adamax(p, lr=0.01),
    lambda p: torch.optim.ASGD(p, lr=0.01),
]


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=made), torch.randn(8, 3, generator=made)


def make(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def gradients(model: nn.Module, rank: int, step: int) -> None:
    inputs, labels = (one.double() for one in batch(rank, step))
    nn.functional.mse_loss(model(inputs), labels).backward()


def mixed_by_hand(flats: list[torch.Tensor], graph: topology.Topology, me: int) -> torch.Tensor:
    return sum(flats[j] * graph.weights[j, me] for j in range(len(flats)))


def put(model: nn.Module, values: torch.Tensor) -> None:
    with torch.no_grad():
        start_at = 0
        for one in model.parameters():
            one.copy_(values[start_at : start_at + one.numel()].view_as(one))
            start_at += one.numel()


def by_hand(make_optimizer: Any, n: int, graph_of: Callable[[int], topology.Topology], steps: int,
            style: str, passes: int, each: bool) -> list[torch.Tensor]:  # fmt: skip
    """Train all workers in this process; give their parameters. graph_of: the graph of a round."""
    models = [make(5) for _ in range(n)]
    optimizers = [make_optimizer(model.parameters()) for model in models]
    for step in range(steps):
        is_last, graph = (step + 1) % passes == 0, graph_of(step // passes)
        starts = [flat(model) for model in models]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if each or step % passes == 0:
                optimizer.zero_grad()
            gradients(model, rank, step)
        if is_last and style == "awc":
            for rank, model in enumerate(models):
                put(model, mixed_by_hand(starts, graph, rank))
        if is_last or each:
            for optimizer in optimizers:
                optimizer.step()
        if is_last and style == "atc":
            stepped = [flat(model) for model in models]
            for rank, model in enumerate(models):
                put(model, mixed_by_hand(stepped, graph, rank))
    return [flat(model) for model in models]


STYLES = {
    "atc": fps.DistributedAdaptThenCombineOptimizer,
    "awc": fps.DistributedAdaptWithCombineOptimizer,
}


def follow(
    graph_of: Callable[[int], topology.Topology], make_optimizer: Any, style: str, passes: int,
    each: bool, *, rounds: int, change: Callable[[Any, int], None] = lambda optimizer, turn: None,
) -> None:  # fmt: skip
    """Compare a few rounds of an optimizer with one process; change: sets attributes before each.

    each: step after every pass, not only after all of a round.
    """
    me, n = fps.rank(), fps.size()
    wanted = by_hand(make_optimizer, n, graph_of, rounds * passes, style, passes, each)
    model = make(5)
    optimizer = STYLES[style](make_optimizer(model.parameters()), model,
                              num_steps_per_communication=passes)  # fmt: skip
    for step in range(rounds * passes):
        if step % passes == 0:
            change(optimizer, step // passes)
        if each or step % passes == 0:
            optimizer.zero_grad()
        gradients(model, me, step)
        if each or (step + 1) % passes == 0:
            optimizer.step()
    torch.testing.assert_close(
        flat(model), wanted[me], rtol=1e-9, atol=1e-9,
        msg=lambda text: f"{style}, {passes} passes, {each=}, {optimizer}: {text}",
    )  # fmt: skip


def optimizers() -> str:
    """Compare ATC and AWC around every optimizer, J passes in both usages, with one process."""
    _, n = start()
    graph = topology.exponential_graph(n)
    for make_optimizer, style in itertools.product(OPTIMIZERS, STYLES):
        follow(lambda _: graph, make_optimizer, style, 1, True, rounds=6)
    for passes, style, each in itertools.product((3, 4, 8, 32), STYLES, (True, False)):
        for make_optimizer in OPTIMIZERS[: 2 if passes == 3 else 1]:
            follow(lambda _: graph, make_optimizer, style, passes, each, rounds=2)
    return end()


def kinds() -> str:
    """Compare what mixes with all, with nobody, and with another peer at each step."""
    me, n = start()
    mixings = {
        fps.CommunicationType.allreduce: topology.fully_connected_graph(n),
        fps.CommunicationType.empty: topology.Topology(np.eye(n)),
    }
    rounds = list(itertools.islice(one_peer_rounds(topology.exponential_graph(n)), 6))
    turns = list(itertools.islice(topology.one_peer(topology.exponential_graph(n), me), 6))

    def change(optimizer: Any, turn: int) -> None:
        sends, receives = turns[turn]
        optimizer.self_weight, optimizer.dst_weights = 0.5, sends
        optimizer.src_weights = dict.fromkeys(receives, 0.5)

    for style in STYLES:
        for kind, graph in mixings.items():

            def choose(optimizer: Any, _turn: int, kind: Any = kind) -> None:
                optimizer.communication_type = kind

            follow(lambda _, graph=graph: graph, OPTIMIZERS[1], style, 1, True, rounds=4,
                   change=choose)  # fmt: skip
        for passes in (1, 2):
            follow(rounds.__getitem__, OPTIMIZERS[0], style, passes, True, rounds=6, change=change)
    return end()


def machines() -> str:
    """Follow the recursions of optimizers that mix machines, with weights of their own."""
    me, n = start()
    members = [[rank for rank in range(n) if "abbab"[rank] == name] for name in "ab"]
    ours, m = fps.machine_rank(), fps.machine_size()
    assert (ours, m) == ("ab".index("abbab"[me]), 2)
    recursion = Recursion(n, topology.ring_graph(n))
    recursion.a = np.zeros((n, n))  # what each gets of whom
    for rank in range(n):
        machine = "ab".index("abbab"[rank])
        recursion.a[rank, members[machine]] = 0.3 / len(members[machine])
        recursion.a[rank, members[1 - machine]] = 0.7 / len(members[1 - machine])

    def wrap(style: str) -> Callable[..., Any]:
        def made(sgd: torch.optim.Optimizer, model: nn.Module) -> Any:
            kind = fps.CommunicationType.hierarchical_neighbor_allreduce
            optimizer = STYLES[style](sgd, model, kind)
            optimizer.self_weight = 0.3
            optimizer.src_machine_weights = {1 - ours: 0.35}
            optimizer.dst_machine_weights = {1 - ours: 2.0}
            return optimizer

        return made

    for style, wanted in (("atc", recursion.atc(20)), ("awc", recursion.awc(20))):
        np.testing.assert_allclose(trained(wrap(style), 20), wanted[me], rtol=1e-9, atol=1e-12)
    return end()


def knobs() -> str:
    """Change edges and kind of communication at every iteration; refuse."""
    me, n = start()
    model = make(me)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fps.DistributedAdaptThenCombineOptimizer(sgd, model)
    turns = topology.one_peer(fps.load_topology(), me)
    starts = [flat(make(rank)) for rank in range(n)]
    for _ in range(2):  # of 4 workers: the exact average
        sends, receives = next(turns)
        optimizer.self_weight = 0.5
        optimizer.src_weights = dict.fromkeys(receives, 0.5)
        optimizer.dst_weights = sends
        gradients(model, me, 0)
        optimizer.step()
    average = sum(starts) / n
    torch.testing.assert_close(flat(model), average)
    kinds = fps.CommunicationType
    for kind, wanted in (
        (kinds.empty, float(me)), (kinds.allreduce, (n - 1) / 2),
        (kinds.hierarchical_neighbor_allreduce, mean_of_machines()),
    ):  # fmt: skip
        put(model, torch.full_like(average, float(me)))
        optimizer.communication_type = kind
        optimizer.self_weight = optimizer.src_weights = optimizer.dst_weights = None
        gradients(model, me, 0)
        optimizer.step()
        torch.testing.assert_close(flat(model), torch.full_like(average, wanted))
    gradients(model, me, 0)
    with pytest.raises(FastPSError, match="2 backward passes without step"):
        gradients(model, me, 0)
    with pytest.raises(ValueError, match="distributed one already"):
        fps.DistributedDecentLaMOptimizer(optimizer, model)
    other = torch.optim.SGD(make(0).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="list of all models"):
        fps.DistributedExactDiffusionOptimizer(other, model)
    with pytest.raises(TypeError, match="cannot be copied"):
        optimizer.__reduce_ex__(4)
    torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ValueError, match="learning rate scheduler already"):
        fps.DistributedAdaptThenCombineOptimizer(other, make(0))
    forward_alone(me)
    for place, style in enumerate(itertools.product((True, False), (1, 2))):
        clipped(me, n, *style, prefix=f"{place}.")
    return end()


def forward_alone(me: int) -> None:
    """Step after a forward pass without a backward one, whose mixing is under way."""
    model = make(me)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fps.DistributedAdaptWithCombineOptimizer(sgd, model, prefix="alone.")
    model(batch(me, 0)[0].double())
    optimizer.step()
    ranks = sorted([me, *fps.in_neighbor_ranks()])
    torch.testing.assert_close(flat(model), sum(flat(make(one)) for one in ranks) / len(ranks))


def clipped(me: int, n: int, has_closure: bool, passes: int, prefix: str) -> None:
    """Step by a closure, and with gradients that were changed before the step."""
    model = make(7)
    optimizer = fps.DistributedAdaptThenCombineOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=False, prefix=prefix,
        num_steps_per_communication=passes,
    )  # fmt: skip

    def closure() -> float:
        optimizer.zero_grad()
        for step in range(passes):
            gradients(model, me, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return 1.5

    before = flat(model)
    if has_closure:
        assert optimizer.step(closure) == 1.5
    else:
        closure()
        optimizer.step()
    assert 0 < (flat(model) - before).norm() <= 1.0001e-4
