# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_rules.py do."""

from __future__ import annotations

import pytest
import torch

import fastps.torch as fps
from fastps.byzantine import TrimmedMean


def lie_to_all() -> str:
    """Let worker 0 lie to the optimizer, to DistributedDataParallel and to push_pull."""
    fps.init()
    rank = fps.rank()
    value = 1000.0 if rank == 0 else float(rank)  # median 2.5 of 1, 2, 3 and 1000
    x = torch.full((1, 4), value)
    stepped(x, {"rule": "median"}, 2.5)
    stepped(x, {}, 251.5)  # the average believes it
    stepped(x, {"rule": TrimmedMean(1), "bucket_bytes": 0}, 2.5)
    module = fps.DistributedDataParallel(torch.nn.Linear(4, 3), rule="median")
    module(x).sum().backward()
    assert torch.allclose(module.module.weight.grad, torch.full((3, 4), 2.5))
    pushed = x[0].clone().requires_grad_()
    found = fps.push_pull(pushed, name="x", rule="median")
    assert torch.allclose(found, torch.full((4,), 2.5))
    (found * value).sum().backward()
    assert torch.allclose(pushed.grad, torch.full((4,), 2.5))
    optimizer = torch.optim.SGD(torch.nn.Linear(4, 3).parameters(), lr=1.0)
    for options in ({"op": fps.Sum}, {"op": fps.Adasum}, {"asynchronous": True}):
        with pytest.raises(ValueError, match="rule"):
            fps.DistributedOptimizer(optimizer, rule="median", **options)
    fps.shutdown()
    return "done"


def stepped(x: torch.Tensor, options: dict[str, object], wanted: float) -> None:
    """Take a step whose gradient is x on each worker."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prefix = f"{sorted(options)}"
    optimizer = fps.DistributedOptimizer(
        optimizer, model.named_parameters(), prefix=prefix, **options
    )
    before = model.weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert torch.allclose(before - model.weight, torch.full((3, 4), wanted), atol=1e-4)
