# SPDX-License-Identifier: Apache-2.0
"""Small models and batches that the tests of the PyTorch plugin share; imported after torch."""

from __future__ import annotations

from typing import Any

import torch
from fake_session import FakeCluster

from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer

nn = torch.nn

# What wrap() gives unless told otherwise; the fixture `travel` changes it.
TRAVEL: dict[str, Any] = {}
# The ways in which gradients can travel; results must be the same in all.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "loose": {"bucket_bytes": 0, "gradient_views": False},
    "copied": {"bucket_bytes": 200, "gradient_views": False},
    "views": {"bucket_bytes": 100, "gradient_views": True},
}
ALL_WAYS: dict[str, dict[str, Any]] = {**WAYS, "shared": {}}  # for each value of `travel`


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))


def batch(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator)


def part(step: int, rank: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.chunk(size)[rank] for x in batch(step))


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def make_models(cluster: FakeCluster) -> list[nn.Module]:
    return [make_model() for _ in range(cluster.size)]


def assert_same_weights(models: list[nn.Module], twin: nn.Module | None, tol: float = 0) -> None:
    for name, value in models[0].state_dict().items():
        for other in models[1:]:
            assert torch.equal(value, other.state_dict()[name]), name
        if twin is not None:
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=tol, atol=tol)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedOptimizer(optimizer, model.named_parameters(), **{**TRAVEL, **options})


class Branches(nn.Module):
    """Ranks use different layers; one layer is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.arms = nn.ModuleList([nn.Linear(6, 1) for _ in range(2)])
        self.nobody = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, arm: int) -> torch.Tensor:
        return self.arms[arm](x)
