# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_one_sided.py do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from programs_decentralized import RATE, ROWS, WIDTH, end, problem, start
from torch import nn

import fastps.bluefog.torch as bf
import fastps.torch as fps
from fastps import topology
from fastps.bluefog.common import topology_util
from fastps.frameworks.torch.decentralized.corrections import pair_of

Gradient = Callable[[np.ndarray], np.ndarray]


def trained(
    wrap: Callable[..., Any], steps: int, passes: int, change: Callable[[Any, int], None]
) -> np.ndarray:
    """Minimise our least squares with a wrapped SGD, a step after each pass; give z."""
    matrix, right = (torch.from_numpy(one) for one in problem(fps.rank()))
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=RATE), model, passes)
    optimizer.force_barrier = True
    for step in range(steps):
        change(optimizer, step // passes)
        optimizer.zero_grad()
        (((model(matrix)[:, 0] - right) ** 2).sum() / (2 * ROWS)).backward()
        optimizer.step()
    optimizer.unregister_window()
    return model.weight.detach().numpy()[0]


def gradient_of(rank: int) -> Gradient:
    matrix, right = problem(rank)
    return lambda x: matrix.T @ (matrix @ x - right) / ROWS


def with_combine(n: int, graph: topology.Topology, steps: int, passes: int) -> np.ndarray:
    """Give x of all workers: x <- A(x) - opt(g), local steps in between.

    With several passes what was put is the model before the last of them.
    """
    x = np.zeros((n, WIDTH))
    for step in range(steps):
        g = np.stack([gradient_of(rank)(x[rank]) for rank in range(n)])
        if (step + 1) % passes == 0:
            mixed = [np.mean(x[[rank, *graph.in_neighbors(rank)]], axis=0) for rank in range(n)]
            x = np.stack(mixed)
        x = x - RATE * g
    return x


def put_to_one(n: int, steps: int) -> np.ndarray:
    """Give x of all workers where each puts to one other at a time: the rest is old."""
    x, graph = np.zeros((n, WIDTH)), topology.exponential_graph(n)
    put = np.zeros((n, n, WIDTH))  # what j has put to i last: [j, i]
    for step in range(steps):
        g = np.stack([gradient_of(rank)(x[rank]) for rank in range(n)])
        for rank in range(n):
            put[rank, (rank + 2 ** (step % 2)) % n] = x[rank]
        x = np.stack([
            np.mean([x[rank], *(put[j, rank] for j in graph.in_neighbors(rank))], axis=0)
            for rank in range(n)
        ]) - RATE * g  # fmt: skip
    return x


def push(
    n: int, steps: int, passes: int, matrix_of: Callable[[int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Give z and w of all workers by the recursion of stochastic gradient push."""
    x, w = np.zeros((n, WIDTH)), np.ones(n)
    z = x.copy()
    for step in range(steps):
        g = np.stack([gradient_of(rank)(z[rank]) for rank in range(n)])
        x, z = x - RATE * g, z - RATE * g
        if (step + 1) % passes == 0:
            shares = matrix_of(step // passes)  # shares[i, j]: what i sends to j
            x, w = shares.T @ x, shares.T @ w
            z = x / w[:, None]
    return z, w


def uneven_graph(n: int) -> topology.Topology:
    """Make a directed graph whose workers have different numbers of edges."""
    weights = np.eye(n)
    for i in range(n):
        weights[i, (i + 1) % n] = 1.0
    weights[0, 2:] = 1.0
    return topology.Topology(weights)


def shares_of(graph: topology.Topology, _turn: int) -> np.ndarray:
    """Give what each worker sends to whom: even shares."""
    shares = np.eye(graph.size)
    for i in range(graph.size):
        targets = graph.out_neighbors(i)
        shares[i, [i, *targets]] = 1 / (len(targets) + 1)
    return shares


def keep(_optimizer: Any, _round: int) -> None:
    """Leave the attributes as they are."""


def recursions() -> str:
    """Compare every optimizer with its recursion, in step."""
    me, n = start()
    for make in (lambda n: topology.ring_graph(n, 1), topology.star_graph, uneven_graph):
        graph = make(n)
        fps.set_topology(graph)
        for passes in (1, 3):
            for wrap in (fps.DistributedWinPutOptimizer, fps.DistributedPullGetOptimizer):
                found = trained(wrap, 12, passes, keep)
                wanted = with_combine(n, graph, 12, passes)[me]
                np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
            found = trained(fps.DistributedPushSumOptimizer, 12, passes, keep)
            z, _ = push(n, 12, passes, functools.partial(shares_of, graph))
            np.testing.assert_allclose(found, z[me], rtol=1e-9, atol=1e-12)
    fps.set_topology(topology.exponential_graph(n))

    def one_peer(optimizer: Any, turn: int) -> None:
        optimizer.dst_weights = [(me + 2 ** (turn % 2)) % n]

    def matrix(turn: int) -> np.ndarray:
        return (np.eye(n) + np.roll(np.eye(n), 2 ** (turn % 2), axis=1)) / 2

    found = trained(fps.DistributedWinPutOptimizer, 12, 1, one_peer)
    np.testing.assert_allclose(found, put_to_one(n, 12)[me], rtol=1e-9, atol=1e-12)
    found = trained(fps.DistributedPushSumOptimizer, 12, 1, one_peer)
    np.testing.assert_allclose(found, push(n, 12, 1, matrix)[0][me], rtol=1e-9, atol=1e-12)
    return end()


def buffers() -> str:
    """Let every optimizer average running statistics, and compare them with NumPy's averages."""
    me, n = start()
    heard = sorted([me, *fps.in_neighbor_ranks()])

    def statistics(model: nn.Module) -> np.ndarray:
        return torch.cat([model[1].running_mean, model[1].running_var]).numpy().copy()

    def of_rank(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
        model[1].running_mean.fill_(float(rank))
        return model

    def own_pass(model: nn.Module, rank: int) -> None:
        made = torch.Generator().manual_seed(rank)
        model(torch.randn(8, 2, generator=made, dtype=torch.double) + rank).sum().backward()

    models = [of_rank(rank) for rank in range(n)]
    before = np.stack([statistics(model) for model in models])
    for rank, model in enumerate(models):
        own_pass(model, rank)
    after = np.stack([statistics(model) for model in models])
    peer = pair_of(me, n, seed=0, number=0)
    assert peer is not None
    moved = after[me] - before[me]
    wanted = dict.fromkeys(("AdaptThenCombine", "AdaptWithCombine", "DecentLaM",
                            "ExactDiffusion", "GradientTracking", "PushSum"),
                           after[heard].mean(axis=0))  # fmt: skip
    wanted |= dict.fromkeys(("WinPut", "PullGet"), before[heard].mean(axis=0) + moved)
    wanted["NoLoCo"] = after[[me, peer]].mean(axis=0)
    for name, values in wanted.items():
        model = of_rank(me)
        word = "window_prefix" if name in ("WinPut", "PullGet", "PushSum") else "prefix"
        optimizer = getattr(fps, f"Distributed{name}Optimizer")(
            torch.optim.SGD(model.parameters(), lr=0.0), model, num_steps_per_communication=1,
            average_buffers=True, **{word: "buffers."},
        )  # fmt: skip
        optimizer.force_barrier = True
        own_pass(model, me)
        optimizer.step()
        np.testing.assert_allclose(statistics(model), values, rtol=1e-12, err_msg=name)
        assert int(model[1].num_batches_tracked) == 1
    return end()


def refusals() -> str:
    """See what is refused, and several parameters, types and models."""
    me, n = start()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    optimizer = fps.DistributedPushSumOptimizer(torch.optim.Adam(model.parameters()), model)
    other = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="pass another window_prefix"):
        fps.DistributedPushSumOptimizer(torch.optim.Adam(other.parameters()), other)
    fps.DistributedWinPutOptimizer(torch.optim.Adam(other.parameters()), other, 1, "other.")
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step_of()
    optimizer.unregister_window()
    assert all("PushSum" not in name for name in fps.get_current_created_window_names())
    assert 0 <= me < n
    return end()


# ---- programs in the shape of BlueFog's examples ----


def consensus(asynchronous: bool) -> list[float]:
    """Average by push-sum, in step or not; give the error and P."""
    bf.init(topology_util.ExponentialTwoGraph)
    torch.set_num_threads(1)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(bf.rank()), dtype=torch.double)
    mean = bf.allreduce(x, average=True)
    bf.turn_on_win_ops_with_associated_p()
    bf.win_create(x, name="x", zero_init=True)
    targets = bf.out_neighbor_ranks()
    share = 1.0 / (len(targets) + 1)
    weights = dict.fromkeys(targets, share)
    for _ in range(200):
        if asynchronous:
            handle = bf.win_accumulate_nonblocking(
                x, name="x", self_weight=share, dst_weights=weights, require_mutex=True
            )
            bf.win_wait(handle)
        else:
            bf.neighbor_win_accumulate(
                x, name="x", self_weight=share, dst_weights=weights, require_mutex=True
            )
            bf.barrier()
        bf.win_update_then_collect(name="x")
    bf.barrier()
    for _ in range(30):  # what was late, and who was
        bf.win_accumulate(x, name="x", self_weight=share, dst_weights=weights)
        bf.barrier()
        bf.win_update_then_collect(name="x")
        bf.barrier()
    p = bf.win_associated_p(name="x")
    error = float((x / p - mean).norm() / mean.norm())
    total = float(bf.allreduce(torch.tensor([p], dtype=torch.double), average=True)[0])
    bf.win_free("x")
    bf.turn_off_win_ops_with_associated_p()
    bf.shutdown()
    return [error, total]


def push_diging() -> float:
    """Find the least squares of all by Push-DIGing over one window; give the error."""
    bf.init()
    torch.set_num_threads(1)
    bf.set_topology(topology_util.RingGraph(bf.size(), 2))
    me, n = bf.rank(), bf.size()
    matrix, right = (torch.from_numpy(one) for one in problem(me))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return matrix.t() @ (matrix @ x - right) / ROWS

    targets = bf.out_neighbor_ranks()
    weights = {rank: 1 / (2 * len(targets)) for rank in targets}
    x = torch.zeros(WIDTH, dtype=torch.double)
    before = gradient(x)
    w = torch.zeros(2 * WIDTH + 1, dtype=torch.double)  # u, y, v
    w[WIDTH : 2 * WIDTH] = before
    w[-1] = 1.0
    bf.win_create(w, name="w", zero_init=True)
    for _ in range(1500):
        w[:WIDTH] -= 0.02 * w[WIDTH : 2 * WIDTH]
        bf.neighbor_win_accumulate(
            w, name="w", self_weight=0.5, dst_weights=weights, require_mutex=True
        )
        bf.barrier()
        w = bf.win_update_then_collect(name="w")
        x = w[:WIDTH] / w[-1]
        now = gradient(x)
        w[WIDTH : 2 * WIDTH] += now - before
        before = now
        bf.barrier()
    bf.win_free()
    rows = [problem(rank) for rank in range(n)]
    a, b = np.concatenate([one for one, _ in rows]), np.concatenate([one for _, one in rows])
    best = np.linalg.lstsq(a, b, rcond=None)[0]
    error = float(np.linalg.norm(x.numpy() - best) / np.linalg.norm(best))
    bf.shutdown()
    return error


def regression(one_peer: bool = False) -> float:
    """Train a linear model with noise as BlueFog's test does; give the error over the noise.

    one_peer: put to another neighbour in each step, not to all.
    """
    bf.init()
    torch.set_num_threads(1)
    me, n = bf.rank(), bf.size()
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + me)
    inputs = torch.randn(1024, 16, generator=own)
    noise = 1e-5 * torch.randn(1024, 3, generator=own)
    labels = inputs @ torch.randn(16, 3, generator=shared) + noise
    model = nn.Sequential(nn.Linear(16, 3, bias=False))
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    adam = torch.optim.Adam(model.parameters(), lr=0.01 * n)
    optimizer = bf.DistributedWinPutOptimizer(adam, model)
    optimizer.force_barrier = True  # a busy machine stops some of them for epochs
    for _ in range(50):
        for first in range(0, 1024, 128):
            if one_peer:
                optimizer.dst_weights = {(me + 2 ** (first // 128 % 2)) % n: 1.0}
            optimizer.zero_grad()
            some = slice(first, first + 128)
            nn.functional.mse_loss(model(inputs[some]), labels[some]).backward()
            optimizer.step()
    with torch.no_grad():
        error = float((model(inputs) - labels).square().mean()) / 1e-10
    optimizer.unregister_window()
    bf.shutdown()
    return error
