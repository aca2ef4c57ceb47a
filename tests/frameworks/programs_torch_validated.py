# SPDX-License-Identifier: Apache-2.0
"""What workers and validators of test_torch_validated.py do."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

import fastps
import fastps.torch as fps
from fastps import byzantine

HALF = torch.bfloat16


def net(seed: int) -> torch.nn.Module:
    """Make a model, one parameter of which is not trained."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model[2].bias.requires_grad_(False)
    return model


def data(seed: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=random)
    return x, torch.tanh(x.sum(dim=1, keepdim=True))


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    x, y = data(seed)
    return (model(x) - y).square().mean()


def step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def digest(model: torch.nn.Module) -> list[float]:
    return [float(one.detach().double().sum()) for one in model.parameters()]


class Liar(fps.ValidatedOptimizer):
    """Pushes six times the opposite of what it found."""

    def told(self, change: np.ndarray, place: int) -> np.ndarray:
        return np.asarray(-6 * change)


def mostly_liars(rounds: int, asynchronous: bool) -> Any:
    """Three of four workers lie; give the values, what is left of the loss, and shares."""
    torch.set_num_threads(1)
    fps.init()
    model = net(fps.rank())
    inner = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    rank, options = fps.rank(), {"asynchronous": asynchronous}
    if fps.role() == "validator":

        def train() -> None:
            for k in range(8):
                step(model, inner, 1000 + k)

        rule = byzantine.ZenoPlusPlus(alpha=0.5) if asynchronous else byzantine.FLTrust()
        judge = fps.Validator(model, rule, train, by_block=False, **options)
        for _ in range(rounds * (fps.size() if asynchronous else 1)):
            judged = judge.judge() if asynchronous else judge.round()
            assert judged is not None
        judge.close()
        counts = judge.statistics()
        shares = [counts[f"accepted_share_of_worker_{w}"] for w in range(fps.size())]
        held = judge.held
    else:
        kind = fps.ValidatedOptimizer if rank == 0 else Liar
        optimizer = kind(model, inner, sync_every=8, sparsity=0.2, seed=3, **options)
        for k in range(8 * rounds):
            step(model, optimizer, 8 * 100 * rank + k)
        shares, held = [], optimizer.held
    fps.barrier()
    held.pull()
    begun = float(loss_of(net(fps.size()), 99))
    bits = float(sum(np.abs(one.astype(np.float64)).sum() for one in held.arrays))
    error = float(loss_of(model, 99)) / begun
    fps.barrier()
    fps.shutdown()
    return bits, error, shares


def resumed() -> str:
    """Go on from a checkpoint beside what went on; what a codec keeps is part of it."""
    torch.set_num_threads(1)
    fps.init(min_compress_bytes=0)
    model = net(fps.rank())
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    how = {"compression": fastps.Compression.int8(ef="vanilla")}
    if fps.role() == "validator":
        judge = fps.Validator(model, "average", prefix="a.", **how)
        for _ in range(2):
            judge.round()
        second = fps.Validator(model, "average", prefix="b.", **how)
        for _ in range(3):
            judge.round()
            second.round()
        for one, other in zip(judge.arrays, second.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        terms = {"sync_every": 2, "sparsity": 0.4, "participation": 0.8, "seed": 9, **how}
        optimizer = fps.ValidatedOptimizer(model, inner, prefix="a.", **terms)
        for k in range(4):
            step(model, optimizer, 31 * fps.rank() + k)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        again = net(50)
        adam = torch.optim.Adam(again.parameters(), lr=0.05)
        other = fps.ValidatedOptimizer(again, adam, prefix="b.", **terms)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
        for k in range(4, 10):
            step(model, optimizer, 31 * fps.rank() + k)
            step(again, other, 31 * fps.rank() + k)
        assert digest(model) == digest(again)
        with pytest.raises(ValueError, match="not of ValidatedSteps"):
            other.load_state_dict({"ahead": []})
    fps.barrier()
    fps.shutdown()
    return "done"


def halves() -> list[float]:
    """Train a model of halves: small changes of it add up where it is held."""
    torch.set_num_threads(1)
    fps.init()
    model = torch.nn.Linear(8, 1, bias=False).to(HALF)
    torch.nn.init.constant_(model.weight, 256.0 if fps.role() == "validator" else 0.0)
    if fps.role() == "validator":
        judge = fps.Validator(model, "average")
        for _ in range(8):
            judge.round()
        assert np.all(judge.arrays[0] == 256 + 8 * 1.0), judge.arrays
    else:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = fps.ValidatedOptimizer(model, inner)
        for _ in range(8):  # by 2 of one of two workers; halves of 256 are 2 apart
            model.weight.grad = torch.full_like(model.weight, -2.0 * (fps.rank() == 0))
            optimizer.step()
    assert model.weight.dtype is HALF
    fps.barrier()
    fps.shutdown()
    return [float(one) for one in model.weight.detach().reshape(-1)]
