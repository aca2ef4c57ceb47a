# SPDX-License-Identifier: Apache-2.0
"""Logistic regression of all workers' data: by algorithms that are exact, and by diffusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from programs_decentralized import end, start
from torch import nn

import fastps.torch as fps
from fastps import topology

ROWS, WIDTH = 30, 5
RHO, RATE, STEPS = 0.1, 0.3, 300  # what the weights cost; by the recursions 1e-9 after 250 steps


def problem(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a worker's inputs and labels, 1 or -1, by a truth of its own."""
    rng = np.random.default_rng([3, rank])
    inputs, truth = rng.standard_normal((ROWS, WIDTH)), rng.standard_normal(WIDTH)
    return inputs, np.where(rng.random(ROWS) < 1 / (1 + np.exp(-inputs @ truth)), 1.0, -1.0)


def optimum(n: int) -> np.ndarray:
    """Find by Newton's method what minimises the mean of all workers' losses."""
    inputs, labels = (np.concatenate(one) for one in zip(*map(problem, range(n)), strict=True))
    x = np.zeros(WIDTH)
    for _ in range(30):
        wrong = 1 / (1 + np.exp(labels * (inputs @ x)))
        gradient = RHO * x - inputs.T @ (labels * wrong) / len(labels)
        hessian = inputs.T @ ((wrong * (1 - wrong))[:, None] * inputs) / len(labels)
        x -= np.linalg.solve(hessian + RHO * np.eye(WIDTH), gradient)
    assert np.linalg.norm(gradient) < 1e-12
    return x


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = next(model.parameters())
    losses = nn.functional.softplus(-labels * model(inputs)[:, 0])
    return losses.mean() + RHO / 2 * x.square().sum()


def trained(wrap: Callable[..., Any], change: Callable[[Any], None] | None = None) -> np.ndarray:
    """Minimise with a wrapped SGD; change: sets attributes before each step. Gives x."""
    inputs, labels = (torch.from_numpy(one) for one in problem(fps.rank()))
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=RATE), model)
    for _ in range(STEPS):
        if change is not None:
            change(optimizer)
        optimizer.zero_grad()
        loss_of(model, inputs, labels).backward()
        optimizer.step()
    return model.weight.detach().numpy()[0]


def push_diging(n: int) -> np.ndarray:
    """Minimise by Push-DIGing over one window, on a ring that goes one way; give x."""
    me = fps.rank()
    inputs, labels = (torch.from_numpy(one) for one in problem(me))
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.weight[0] = x
        model.zero_grad()
        loss_of(model, inputs, labels).backward()
        return model.weight.grad[0].clone()

    fps.set_topology(topology.ring_graph(n, 2))
    before = gradient(torch.zeros(WIDTH, dtype=torch.float64))
    own = torch.zeros(2 * WIDTH, dtype=torch.float64)  # u, y
    own[WIDTH:] = before
    fps.turn_on_win_ops_with_associated_p()
    fps.win_create(own, "u, y", zero_init=True)
    for _ in range(STEPS):
        own[:WIDTH] -= RATE * own[WIDTH:]
        fps.win_accumulate(own, "u, y", 0.5, dict.fromkeys(fps.out_neighbor_ranks(), 0.5))
        fps.barrier()
        fps.win_update_then_collect("u, y")
        x = own[:WIDTH] / fps.win_associated_p("u, y")
        now = gradient(x)
        own[WIDTH:] += now - before
        before = now
        fps.barrier()
    fps.win_free("u, y")
    fps.turn_off_win_ops_with_associated_p()
    return x.numpy()


def algorithms() -> dict[str, float]:
    """Give how far each algorithm ends from the optimum, in shares of that."""
    me, n = start()
    best = optimum(n)
    turns = topology.one_peer(topology.exponential_graph(n), me)

    def change(optimizer: Any) -> None:
        sends, receives = next(turns)
        share = 1 / (len(receives) + 1)
        optimizer.self_weight, optimizer.dst_weights = share, sends
        optimizer.src_weights = dict.fromkeys(receives, share)

    fps.set_topology(topology.mesh_grid_2d_graph(n), is_weighted=True)
    found = {
        "diffusion": trained(fps.DistributedAdaptThenCombineOptimizer),
        "exact diffusion": trained(fps.DistributedExactDiffusionOptimizer),
        "tracking": trained(fps.DistributedGradientTrackingOptimizer),
        "tracking, changing": trained(fps.DistributedGradientTrackingOptimizer, change),
        "push-diging": push_diging(n),
    }
    end()
    return {name: float(np.linalg.norm(x - best) / np.linalg.norm(best))
            for name, x in found.items()}  # fmt: skip
