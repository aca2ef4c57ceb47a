# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_tuning.py do."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import fastps.torch as fps
from fastps.errors import FastPSError
from fastps.session.current import current

MOST_STEPS = 400
WIDTH = 640


def make_model() -> nn.Module:
    """Make layers of which one is cut into partitions, and the others travel in buckets."""
    torch.manual_seed(0)
    small = [nn.Linear(16, 16) for _ in range(12)]
    return nn.Sequential(*small, nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def step(model: nn.Module, number: int) -> None:
    """Make this worker's gradients of a step."""
    generator = torch.Generator().manual_seed(1000 * number + fps.rank())
    model(torch.randn(4, 16, generator=generator)).square().mean().backward()


def tuned(model: nn.Module, is_wrapped: bool) -> tuple[int, set[tuple[float, ...]]]:
    """Train until tuning is over, and somewhat longer; give the steps and the settings seen."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained = model
    if is_wrapped:
        trained = fps.DistributedDataParallel(model, bucket_bytes=1 << 20)
    else:
        optimizer = fps.DistributedOptimizer(optimizer, model.named_parameters())
    seen = set()
    for number in range(MOST_STEPS):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        step(trained, number)
        optimizer.step()
        counts = current().statistics()
        words = ("credit_bytes", "partition_bytes", "bucket_bytes")
        seen.add(tuple(counts.get(f"autotune_{word}", 0) for word in words))
        if counts.get("autotune_is_over") and number % 10 == 9:
            break
    return number + 1, seen


def plain(model: nn.Module, steps: int) -> None:
    """Train in the same way, with averages of one gradient after the other."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        step(model, number)
        for name, parameter in model.named_parameters():
            parameter.grad = fps.push_pull(parameter.grad, name=f"plain.{name}")
        optimizer.step()


def everything(is_wrapped: bool) -> dict[str, float]:
    """Train tuned and plain to bitwise the same weights; give what tuning says."""
    logging.basicConfig(level="INFO")  # as a program would that wants to know
    fps.init()
    torch.set_num_threads(1)
    one, other = make_model(), make_model()
    with pytest.raises(FastPSError, match="while settings are tuned"):
        fps.join()
    steps, seen = tuned(one, is_wrapped)
    counts = dict(current().statistics())
    fps.join()
    plain(other, steps)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    fps.shutdown()
    counts["seen"] = len(seen)
    return counts
