# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_async.py do."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import fastps.torch as fps
from fastps.errors import MismatchError

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "adam": partial(torch.optim.AdamW, lr=0.03, weight_decay=0.0),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.3, max_iter=2),
}


def data_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a worker's data; the same weights fit that of all workers."""
    generator = torch.Generator().manual_seed(rank + 1)
    inputs = torch.randn(40, 12, generator=generator)
    wanted = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return inputs, inputs @ wanted + 1.5


def fits(kind: str, staleness: float | None, prefix: str) -> None:
    """Train on this worker's data, at this worker's pace; all arrive at what fits all data."""
    torch.manual_seed(fps.rank())  # rank 0's weights are what all begin with
    net = nn.Linear(12, 3)
    optimizer = OPTIMIZERS[kind](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    found = fps.DistributedOptimizer(
        optimizer, net.named_parameters(), asynchronous=True, staleness=staleness, prefix=prefix
    )
    assert found is optimizer
    assert isinstance(optimizer, type(OPTIMIZERS[kind](net.parameters())))
    inputs, labels = data_of(fps.rank())

    def loss_of() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), labels)
        loss.backward()
        return loss

    for _ in range(600):
        for _ in range(500 * fps.rank()):
            pass
        optimizer.step(loss_of)
        scheduler.step()
    fps.barrier()
    with torch.no_grad():
        for rank in range(fps.size()):
            inputs, labels = data_of(rank)
            loss = float(nn.functional.mse_loss(net(inputs), labels))
            assert loss < 1e-2, (kind, staleness, rank, loss)


def compensates(way: float | str, prefix: str) -> None:
    """Train with delays made up for, each group with a learning rate of its own."""
    torch.manual_seed(fps.rank())
    net = nn.Linear(12, 3)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    names = [("weight", net.weight), ("bias", net.bias)]
    fps.DistributedOptimizer(
        optimizer, names, asynchronous=True, prefix=prefix, delay_compensation=way
    )
    inputs, labels = data_of(fps.rank())
    for _ in range(600):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), labels).backward()
        optimizer.step()
    fps.barrier()
    with torch.no_grad():
        assert float(nn.functional.mse_loss(net(inputs), labels)) < 1e-2


def steps_add_up() -> None:
    """In step, parameters are those of rank 0 plus the steps of all, whatever their layout."""
    torch.manual_seed(fps.rank())
    wide = nn.Parameter(torch.randn(300, 200).t())
    whole = nn.Parameter(torch.randn(5, dtype=torch.float64))
    half = nn.Parameter(torch.full((4,), 8.0, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.full((2,), float(fps.rank())), requires_grad=False)
    parameters = [wide, whole, half, frozen]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # has put a step() into it
    fps.DistributedOptimizer(optimizer, asynchronous=True, staleness=0)
    seeds = [fps.push_pull(p.detach() * (fps.rank() == 0), average=False, name=f"seed{i}")
             for i, p in enumerate(parameters)]  # fmt: skip
    for p, seed in zip(parameters[:3], seeds, strict=False):
        assert torch.equal(p, seed)
    for _ in range(4):
        for p in parameters[:3]:
            p.grad = torch.full_like(p, float(fps.rank() + 1))
        whole.grad = None if fps.rank() else whole.grad
        optimizer.step()
    total = sum(range(1, fps.size() + 1))
    wanted = [seeds[0] - 2 * total, seeds[1] - 2.0, seeds[2] - 2 * total]
    for p, want in zip(parameters, wanted, strict=False):
        assert torch.allclose(p, want, rtol=1e-4, atol=1e-4)
    assert (frozen == fps.rank()).all()


def refuses() -> None:
    """Say what cannot be."""
    net = nn.Linear(2, 2)
    make = partial(torch.optim.SGD, list(net.parameters()), lr=0.1)
    for options, text in [
        ({"asynchronous": False, "staleness": 2}, "needs asynchronous=True"),
        ({"asynchronous": True, "op": fps.Adasum}, "does not support op="),
        ({"asynchronous": True, "compression": fps.Compression.fp16}, "remove it, or use"),
        ({"asynchronous": True, "staleness": -3}, "staleness must be >= 0"),
        ({"asynchronous": False, "delay_compensation": 1.0}, "needs asynchronous=True"),
        ({"asynchronous": True, "delay_compensation": "much"}, "must be a number"),
    ]:
        said = ""
        try:
            fps.DistributedOptimizer(make(), **options)
        except ValueError as error:
            said = str(error)
        assert text in said
    for other in (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(net.parameters()),
    ):
        said = ""
        try:
            fps.DistributedOptimizer(other, asynchronous=True, delay_compensation=0.04)
        except ValueError as error:
            said = str(error)
        assert "use torch.optim.SGD(momentum=0)" in said
    said = ""
    try:  # rank 0 has given its own before it can hear of others
        fps.DistributedOptimizer(
            make(), asynchronous=True, staleness=fps.rank(), prefix="differ."
        ).step()
    except MismatchError as error:
        said = str(error)
    assert "staleness" in said


def everything() -> None:
    """Train with several optimizers and bounds in one job; the environment says how."""
    fps.init()
    torch.set_num_threads(1)
    fits("sgd", None, "a.")
    fits("adam", 3, "b.")
    fits("lbfgs", 0, "c.")
    compensates(0.04, "d.")
    compensates("adaptive", "e.")
    steps_add_up()
    refuses()
    net = nn.Linear(2, 2)
    optimizer = fps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), prefix="f.")
    assert type(optimizer).__name__ == "AsynchronousSGD", "FASTPS_ENABLE_ASYNC"
    plain = fps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), asynchronous=False, prefix="p."
    )
    assert type(plain).__name__ == "DistributedSGD"
    fps.shutdown()
