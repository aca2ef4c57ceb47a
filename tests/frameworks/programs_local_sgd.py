# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_local_sgd.py do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.torch as fps
from fastps.algorithms import outer

STEPS = 13
Make = Callable[[Any], torch.optim.Optimizer]


def start() -> tuple[int, int]:
    torch.set_num_threads(1)
    fps.init(min_compress_bytes=0)
    return fps.rank(), fps.size()


def end() -> str:
    fps.barrier()
    fps.shutdown()
    return "done"


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a model of four parameters: of 24, 4, 4 and 1 elements."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Make the loss of a worker's own data."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(dtype)
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) * (1 + rank))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def average(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


# ---- against the algorithm, all workers of it in one process ----

# parameters of each fragment, by hand: each to the one that has the fewest bytes
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 3: [[0], [1, 3], [2]]}


def simulate(
    size: int, make: Make, *, every: int, fragments: int = 1, delay: int = 0, keep: float = 0.0
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Give every worker's parameters after each step."""
    models = [net() for _ in range(size)]
    inners = [sgd(model.parameters()) for model in models]
    agreed = [one.detach().clone() for one in models[0].parameters()]
    outer = make(agreed)
    sent: dict[int, tuple[int, list[torch.Tensor]]] = {}
    history = []
    for step in range(1, STEPS + 1):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            loss_of(model, rank, step).backward()
            inner.step()
        own = [[one.detach() for one in model.parameters()] for model in models]
        for number, places in enumerate(FRAGMENTS[fragments]):
            if (step + number * every // fragments) % every == 0:
                gap = [sum(agreed[i] - mine[i] for mine in own) / size for i in places]
                sent[number] = step + delay, gap
            if number in sent and sent[number][0] == step:
                for i, gradient in zip(places, sent.pop(number)[1], strict=True):
                    agreed[i].grad = gradient
                outer.step()
                for i in places:
                    agreed[i].grad = None
                    for mine in own:
                        mine[i].copy_(keep * mine[i] + (1 - keep) * agreed[i])
        history.append([[one.clone() for one in mine] for mine in own])
    return history


def recursions() -> str:
    """Follow the algorithm step by step, with every outer optimizer, in parts and with delays."""
    rank, size = start()
    cases: list[tuple[Make | None, dict[str, Any]]] = [
        (None, {"every": 3}),
        (nesterov, {"every": 4}),
        (adam, {"every": 1}),
        (nesterov, {"every": 4, "fragments": 2}),
        (nesterov, {"every": 5, "fragments": 3, "delay": 2, "keep": 0.5}),
        (adam, {"every": 4, "delay": 3, "keep": 0.25}),
    ]
    for number, (make, how) in enumerate(cases):
        expected = simulate(size, make or average, **how)
        model = net()
        if rank:
            for one in model.parameters():
                nn.init.zeros_(one)  # what rank 0 has is what counts
        more = {key: value for key, value in how.items() if key not in ("every", "keep")}
        if how.get("keep") != 0.5:
            more["keep"] = how.get("keep")
        local = fps.LocalSGD(
            model, sgd(model.parameters()), None if make is None else make(model.parameters()),
            sync_every=how["every"], prefix=f"{number}.", **more,
        )  # fmt: skip
        for step in range(1, STEPS + 1):
            local.zero_grad()
            loss_of(model, rank, step).backward()
            local.step()
            for found, one in zip(model.parameters(), expected[step - 1][rank], strict=True):
                assert torch.allclose(found, one, rtol=0, atol=1e-12), (how, step)
        local.synchronize()
        everybody = fps.allgather(nn.utils.parameters_to_vector(model.parameters())[None].detach())
        assert bool((everybody == everybody[:1]).all()), how
    return end()


# ---- the rest ----


def checkpoints() -> str:
    """Go on from a state as if nothing had happened, with a fragment under way."""
    rank, _ = start()

    go_on(rank, lambda model: nesterov(model.parameters()))
    return end()


def go_on(rank: int, optimizer: Any, *, prefix: str = "", **words: Any) -> None:
    """Train on from a state, beside one who was not interrupted."""

    def make(label: str) -> tuple[nn.Module, fps.LocalSGD]:
        model = net(torch.float32)
        return model, fps.LocalSGD(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), optimizer(model),
            sync_every=4, fragments=2, delay=2, prefix=prefix + label, **words,
        )  # fmt: skip

    def train(model: nn.Module, local: fps.LocalSGD, steps: range) -> None:
        for step in steps:
            local.zero_grad()
            loss_of(model, rank, step).backward()
            local.step()

    model, local = make("first.")
    train(model, local, range(9))
    saved = copy.deepcopy((model.state_dict(), local.state_dict()))
    assert any(one["numbers"][2] is not None for one in saved[1]["fragments"])
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file)
    train(model, local, range(9, 20))
    again, second = make("second.")
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(again, second, range(9, 20))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    whole = fps.LocalSGD(again, sgd(again.parameters()), sync_every=4, prefix=f"{prefix}third.")
    with pytest.raises(ValueError, match="the same fragments"):
        whole.load_state_dict(saved[1])


class WithBuffers(nn.Module):
    """A model with running statistics, and a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.fixed = nn.Parameter(torch.full((3,), float(fps.rank())), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def kinds() -> str:
    """Train halves, buffers and steps of others; count bytes; refuse what is wrong."""
    rank, size = start()
    for dtype in (torch.float16, torch.bfloat16):
        model = net(dtype)
        local = fps.LocalSGD(model, sgd(model.parameters()), sync_every=2, prefix=f"{dtype}.")
        loss_of(model, rank, 0).backward()
        local.step()
        local.step()
        assert len({dtype, *(one.dtype for one in model.parameters())}) == 1
        mine = nn.utils.parameters_to_vector(model.parameters()).detach().float()
        assert torch.equal(mine, fps.push_pull(mine, name=f"check {dtype}"))
    model = WithBuffers()
    local = fps.LocalSGD(model, sgd(model.norm.parameters()), sync_every=1, prefix="buffers.")
    model(torch.full((4, 6), float(rank)) + torch.arange(4.0)[:, None]).sum().backward()
    local.inner.step()
    local.advance()  # as with a GradScaler, who does the step
    mean = 0.1 * (1.5 + (size - 1) / 2)
    assert torch.allclose(model.norm.running_mean, torch.full((6,), mean))
    assert model.fixed.tolist() == [float(rank)] * 3
    wide = nn.Linear(512, 512)
    local = fps.LocalSGD(
        wide, sgd(wide.parameters()), sync_every=2, prefix="wide.",
        compression=fastps.Compression.int4(ef="vanilla"),
    )  # fmt: skip
    before = fastps.statistics()["bytes_sent"]
    for _ in range(4):
        wide(torch.full((1, 512), 1.0 + rank)).sum().backward()
        local.step()
    sent = fastps.statistics()["bytes_sent"] - before
    assert 0 < sent < 2 * 4 * 512 * 513 * 0.2, sent  # twice the model, an eighth of it each time
    go_on(rank, lambda _: outer.Adam(0.05), outer_on="servers", prefix="held.")
    kept = [one.detach().clone() for one in wide.parameters()]
    local.synchronize()  # nothing has changed since
    assert all(map(torch.equal, kept, wide.parameters()))
    refused()
    outvoted(rank)
    left_out(rank)
    at_its_own_pace(rank)
    as_arrays(rank, fps.size())
    return end()


def train(model: nn.Module, local: Any, rank: int, steps: int) -> float:
    """Train, and give the loss on the worker's own data."""
    for step in range(steps):
        local.zero_grad()
        loss_of(model, rank, step).backward()
        local.step()
    return loss_of(model, rank, 1000).item()


def everybody(model: nn.Module) -> torch.Tensor:
    """Give the parameters of all workers' models."""
    return fps.allgather(nn.utils.parameters_to_vector(model.parameters())[None].detach())


def left_out(rank: int) -> None:
    """Leave workers and tensors out of exchanges, through a codec and under a rule."""
    model = net(torch.float32)
    before = loss_of(model, 0, 1000).item()
    local = fps.LocalSGD(
        model, sgd(model.parameters()), nesterov(model.parameters()), sync_every=3,
        participation=0.7, sparsity=0.3, rule="median", compression=fastps.Compression.int8(),
        prefix="left out.",
    )  # fmt: skip
    train(model, local, 0, 60)
    local.synchronize()
    found = everybody(model)
    assert bool((found == found[:1]).all())
    assert loss_of(model, 0, 1000).item() < before


def at_its_own_pace(rank: int) -> None:
    """Add to what servers hold, without rounds."""
    model = net(torch.bfloat16)
    before = loss_of(model, 0, 1000).item()
    local = fps.AsyncLocalSGD(
        model, sgd(model.parameters()), sync_every=2, alpha=0.3, proximal=0.1
    )
    train(model, local, 0, 20 + 10 * rank)
    fps.barrier()
    local.exchange()
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert loss_of(model, 0, 1000).item() < before
    state, found = local.state_dict(), [one.detach().clone() for one in model.parameters()]
    train(model, local, 0, 3)
    local.load_state_dict(copy.deepcopy(state))
    assert local.steps == 20 + 10 * rank
    for one, before_it in zip(model.parameters(), found, strict=True):
        assert torch.equal(one, before_it)


def as_arrays(rank: int, size: int) -> None:
    """Do what NumPy's face does, by bit, with a codec and what is left out."""
    model = net(torch.float32)
    arrays = {name: one.detach().numpy().copy() for name, one in model.named_parameters()}
    words = {"alpha": 0.5, "participation": 0.7, "sparsity": 0.3, "proximal": 0.1, "seed": 2}
    codec = fastps.Compression.int4(11, ef="vanilla")
    local = fps.AsyncLocalSGD(
        model, sgd(model.parameters()), sync_every=2, compression=codec, prefix="torch", **words
    )
    twin = fastps.AsyncLocalSGD(arrays, sync_every=2, compression=codec, prefix="numpy", **words)
    fps.barrier()  # both begin with rank 0's, and nothing that was added since
    for step in range(12):
        for turn in range(size):
            if turn == rank:
                local.zero_grad()
                loss_of(model, rank, step).backward()
                before = {name: one.detach().clone() for name, one in model.named_parameters()}
                local.inner.step()
                for name, one in model.named_parameters():
                    arrays[name] += (one.detach() - before[name]).numpy()
                    with torch.no_grad():  # rounded as the other
                        one.copy_(torch.from_numpy(arrays[name]))
                local.advance()
                twin.step()
            fps.barrier()
        for name, one in model.named_parameters():
            np.testing.assert_array_equal(one.detach().numpy(), arrays[name])
    saved = copy.deepcopy(local.state_dict())
    assert any(len(part) for part in saved["kept"])
    local.load_state_dict(saved)


def outvoted(rank: int) -> None:
    """Train beside one that lies; by their median the others learn, by the average they do not."""
    losses = {}
    for rule in (None, "median"):
        model = net(torch.float32)
        local = fps.LocalSGD(
            model, sgd(model.parameters()), sync_every=5, rule=rule, prefix=f"under {rule}."
        )
        for step in range(60):
            local.zero_grad()
            loss_of(model, 0, step).backward()
            if rank == 2 and step % 5 == 4:
                with torch.no_grad():
                    for one in model.parameters():
                        one.add_(100.0)
            local.step()
        local.synchronize()
        losses[rule] = loss_of(model, 0, 1000).item()
    assert losses["median"] < 1.0 < 100.0 < losses[None], losses


def refused() -> None:
    """Say what is wrong, alike on all workers."""
    model = net()
    inner = sgd(model.parameters())
    for match, error, words in [
        ("fragments=3", ValueError, {"sync_every": 2, "fragments": 3}),
        ("delay must be", ValueError, {"sync_every": 4, "delay": 4}),
        ("keep must be", ValueError, {"sync_every": 4, "keep": 2.0}),
        ("fragments must be at most", ValueError, {"sync_every": 9, "fragments": 9}),
        ("other parameters", ValueError,
         {"sync_every": 2, "outer": nesterov([torch.zeros(2, requires_grad=True)])}),
        ("fastps.Compression.fp16", TypeError,
         {"sync_every": 2, "compression": fps.Compression.fp16}),
        ("outer_on='servers'", TypeError, {"sync_every": 2, "outer": outer.Nesterov()}),
        ("servers do not support SGD", TypeError,
         {"sync_every": 2, "outer": sgd(model.parameters()), "deadline_s": 1.0}),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            fps.LocalSGD(model, inner, prefix=f"refused {match}", **words)  # type: ignore[arg-type]
    stepped = nesterov(model.parameters())
    loss_of(model, 0, 0).backward()
    stepped.step()
    with pytest.raises(ValueError, match="has stepped already"):
        fps.LocalSGD(model, inner, stepped, sync_every=2, prefix="stepped.")
