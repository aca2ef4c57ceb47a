# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_horovod.py do: every check runs on all of them, in this order."""

from __future__ import annotations

import torch
from torch import nn

import fastps
import fastps.torch as hvd

CHECKS = []


def check(function):
    """Add a check to the list."""
    CHECKS.append(function)
    return function


def everything() -> None:
    """Run all checks."""
    hvd.init()
    torch.set_num_threads(1)
    for function in CHECKS:
        try:
            function(hvd.rank(), hvd.size())
        except BaseException as error:
            raise AssertionError(f"{function.__name__} on worker {hvd.rank()}") from error
    hvd.shutdown()


def sent() -> float:
    """Count the bytes that this worker has sent, whatever the way."""
    numbers = fastps.statistics()
    return sum(n for name, n in numbers.items() if name in ("bytes_sent", "bytes_started"))


class Table(nn.Module):
    """A large table of which few rows are touched, a small one, and something dense."""

    def __init__(self, rows: int, *, sparse: bool = True) -> None:
        super().__init__()
        self.large = nn.Embedding(rows, 16, sparse=sparse)
        self.small = nn.Embedding(20, 4, sparse=sparse)
        self.unused = nn.Embedding(30, 4, sparse=sparse)
        self.back = nn.Linear(20, 1)
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 7 / 9)
                parameter.add_(place)

    def forward(self, places: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        whole = [self.large(places), self.small(places % 20)]
        if not is_first:
            whole[1] = whole[1] + self.unused(places % 30)
        return self.back(torch.cat(whole, 1)).square().mean()


def places_of(step: int, rank: int, rows: int) -> torch.Tensor:
    """Give the rows that a worker touches; some twice, some of several workers."""
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randint(0, rows, (12,), generator=generator).repeat(2)[: 18 - rank]


def same_everywhere(parameters) -> None:
    """Check that all workers have the same bits."""
    digest = [p.detach().double().sum().item() for p in parameters]
    assert all(one == digest for one in hvd.allgather_object(digest)), digest


@check
def sparse_gradients(rank, size):
    for name, how in (
        ("average", {}), ("sum", {"op": hvd.Sum}), ("dense", {"sparse_as_dense": True}),
        ("loose", {"bucket_bytes": 0, "gradient_views": False}), ("ddp", {}),
    ):  # fmt: skip
        model, twin = Table(50), Table(50, sparse=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        net = model
        if name == "ddp":
            net = hvd.DistributedDataParallel(model)
        else:
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), prefix=name, **how
            )
        alone = torch.optim.SGD(twin.parameters(), lr=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            # in the first step one worker alone has the gradient of one table
            net(places_of(step, rank, 50), is_first=step == 0 and rank != 0).backward()
            optimizer.step()
            alone.zero_grad()
            for other in range(size):
                loss = twin(places_of(step, other, 50), is_first=step == 0 and other != 0)
                (loss if how.get("op") is hvd.Sum else loss / size).backward()
            alone.step()
            assert model.large.weight.grad.is_sparse == (name != "dense")
            assert model.unused.weight.grad.is_sparse == (name != "dense")
        for one, want in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, want)
        same_everywhere(model.parameters())


@check
def sums_of_sparse_gradients_accumulate(rank, size):
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=0.1), prefix="accumulated.", op=hvd.Sum
    )
    for step in range(3):
        table(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
        assert table.weight.grad.to_dense()[4].tolist() == [size * (step + 1)] * 2


@check
def a_large_table_costs_the_rows_touched(rank, size):
    model = nn.Embedding(10_000_000, 4, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(model.parameters()), model.named_parameters(), prefix="large."
    )
    for step in range(2):
        optimizer.zero_grad()
        places = torch.arange(1000) * 977 + step
        before = sent()
        model(places).sum().backward()
        optimizer.step()
        cost = sent() - before
        assert cost < (size - 1) * 1000 * (8 + 16) + 5000, cost
        assert model.weight.grad.coalesce().indices().shape == (1, 1000)


@check
def a_process_set_trains_by_itself(rank, size):
    some = hvd.add_process_set([size - 1])
    if some.included():
        net = hvd.DistributedDataParallel(
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), process_set=some
        )
        for _ in range(2):
            net(torch.ones(4, 2)).sum().backward()
    whole = hvd.add_process_set(range(size))
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net = hvd.DistributedDataParallel(model, process_set=whole)
    same_everywhere(model.parameters())
    for _ in range(2):
        net(torch.full((4, 2), rank + 1.0)).sum().backward()
        same_everywhere([p.grad for p in model.parameters()])
    assert model[2].bias.grad.item() == 8


@check
def complex_parameters(rank, size):
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    dense = nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, dense], lr=1.0), prefix="complex."
    )
    for compression in (None, hvd.Compression.bf16):
        optimizer.zero_grad()
        (weight * (rank + 1j)).abs().square().sum().backward()
        dense.sum().backward()
        optimizer.synchronize()
        want = sum(2 * (other * other + 1) for other in range(size)) / size
        assert torch.allclose(weight.grad, torch.full((3,), want + 0j), rtol=1e-2), weight.grad
        if compression is None:
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight, dense], lr=1.0), compression=hvd.Compression.bf16,
                prefix="small complex.",
            )  # fmt: skip
