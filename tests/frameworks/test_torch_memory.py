# SPDX-License-Identifier: Apache-2.0
"""Gradients that are given other memory, as p.grad.data = x does, stay averages."""

from __future__ import annotations

from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.errors import FastPSError

torch = pytest.importorskip("torch")

from torch_models import ALL_WAYS, batch, loss_of, make_model  # noqa: E402

from fastps.frameworks.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402

nn = torch.nn


def of_data(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad.data = p.grad.data.clamp(-9, 9)


def of_set(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad.set_(p.grad.clone())


def of_one_gradient(module: nn.Module) -> None:
    module[2].weight.grad.data = module[2].weight.grad.data.clone()


def of_a_forgotten_gradient(module: nn.Module) -> None:
    of_data(module)
    module.zero_grad(set_to_none=True)


def of_halves(module: nn.Module) -> None:
    module.bfloat16()
    module.float()


CHANGES = [
    of_data,
    of_set,
    of_one_gradient,
    of_a_forgotten_gradient,
    of_halves,
    nn.Module.share_memory,
    lambda module: module.to(memory_format=torch.channels_last),
]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.Flatten())


def image(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(4, 2, 3, 3, generator=generator)


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_given_other_memory_stay_averages(
    cluster: FakeCluster, wrap: Any, change: Any
) -> None:
    modules, wants = [convolutional() for _ in range(2)], []

    def body(rank: int) -> None:
        model, optimizer = wrap(modules[rank])
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 1)
            model(image(step, rank)).square().mean().backward()
            if step == 3 and rank == 0:
                twin = convolutional()
                twin.load_state_dict(modules[0].state_dict())
                losses = [twin(image(step, other)).square().mean() / 2 for other in range(2)]
                sum(losses).backward()
                wants.extend(p.grad for p in twin.parameters())
            optimizer.step()
            if step < 3:
                change(modules[rank])

    cluster.run(body)
    for first, second, want in zip(*(m.parameters() for m in modules), wants, strict=True):
        assert torch.equal(first.grad, second.grad)
        assert torch.equal(first, second)
        torch.testing.assert_close(first.grad, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [of_data, of_set, of_one_gradient])
@pytest.mark.usefixtures("travel")
def test_gradients_given_other_memory_in_flight(
    alone: FakeCluster, change: Any, travel: str
) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **ALL_WAYS[travel]
    )
    loss_of(model, batch(0)).backward()
    change(model)
    with pytest.raises(FastPSError, match=r"Gradient\.\d\.\w+' was changed while it was"):
        optimizer.step()
