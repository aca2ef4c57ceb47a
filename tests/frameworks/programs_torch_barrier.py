# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_barrier.py do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import fastps.torch as fps
from fastps.errors import FastPSError, StallError


class Net(nn.Module):
    """Words with sparse gradients where asked for, layers of all sizes, one that is tied."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 40, sparse=sparse)
        self.wide = nn.Linear(40, 700)
        self.back = nn.Linear(700, 40)
        self.norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 50, bias=False)
        if not sparse:
            self.last.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return self.last(self.norm(x + self.back(torch.relu(self.wide(x)))))


def train(net: nn.Module, optimizer: Any, *, steps: int = 3, passes: int = 1) -> None:
    """Predict the token from itself, on data of this worker's own."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(fps.rank())
    for _ in range(steps):
        for _ in range(passes):
            tokens = torch.randint(0, 50, (16,), generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(tokens), tokens)
            loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def crosses(prefix: str, *, sparse: bool = False, passes: int = 1, **options: Any) -> None:
    """Give with and without the barrier the same bits, on all workers."""
    kind = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    nets = []
    for way in ("plain", "crossed"):
        torch.manual_seed(0)
        net = Net(sparse=sparse)
        words = {"prefix": f"{prefix}{way}.", "backward_passes_per_step": passes, **options}
        if way == "plain":
            optimizer = fps.DistributedOptimizer(
                kind(net.parameters()), net.named_parameters(), **words
            )
        else:
            optimizer = fps.CrossBarrier(net, kind(net.parameters()), num_steps=None, **words)
        train(net, optimizer, passes=passes)
        nets.append(net)
    for (name, value), other in zip(
        nets[0].state_dict().items(), nets[1].state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), (prefix, name)
        everybody = fps.allgather(value.reshape(1, -1), name=f"{prefix}check.{name}")
        assert (everybody == everybody[0]).all(), (prefix, name)


def steps_late(prefix: str, warmup: int, compression: Any = None) -> None:
    """Follow the recursion of PipeSGD, before and after a checkpoint."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(30000))
    other = nn.Parameter(torch.randn(10))
    twin = w.detach().clone()
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD([w, other], lr=0.25), staleness=1, pipesgd_warmup_iter=warmup,
        prefix=prefix, compression=compression,
    )  # fmt: skip
    target = [torch.full((30000,), float(rank)) for rank in range(fps.size())]
    held = None
    for step in range(9):
        optimizer.zero_grad()
        (0.5 * (w - target[fps.rank()]).square().sum() + 0 * other.sum()).backward()
        mean = torch.stack([twin - t for t in target]).sum(0) / fps.size()
        optimizer.step()
        apply, held = (mean, None) if step < warmup else (held, mean)
        if step == 6:
            optimizer.prepare_stale_states()
            optimizer.prepare_stale_states()  # nothing is left to apply
        for gradient in (apply, *([held] if step == 6 else [])):
            if gradient is not None:
                twin -= 0.25 * gradient
        held = None if step == 6 else held
        assert torch.allclose(w, twin, atol=1e-4), (prefix, step)


def alone_at_the_checkpoint() -> None:
    """Say who is missing where only one worker prepares a checkpoint."""
    w = nn.Parameter(torch.ones(3))
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD([w], lr=0.25), staleness=1, prefix="alone."
    )
    w.sum().backward()
    optimizer.step()
    said = ""
    if fps.rank() == 0:
        try:
            optimizer.prepare_stale_states()
        except StallError as error:
            said = str(error)
        assert "alone.prepare_stale_states" in said
    fps.barrier(timeout_s=20)


def refuses_a_scaler() -> None:
    """Say why GradScaler cannot be."""
    w = nn.Parameter(torch.ones(3))
    optimizer = fps.DistributedOptimizer(torch.optim.SGD([w], lr=1), staleness=1, prefix="s.")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    said = ""
    try:
        scaler.step(optimizer)
    except FastPSError as error:
        said = str(error)
    assert "bfloat16, which needs no GradScaler" in said


def everything() -> None:
    """Run all in one job."""
    fps.init(op_timeout_s=20)
    torch.set_num_threads(1)
    crosses("a.")
    crosses("b.", passes=2, bucket_bytes=0)
    crosses("c.", sparse=True)
    crosses("d.", compression=fps.Compression.onebit(ef="vanilla"))
    crosses("e.", compression=fps.Compression.fp16, gradient_views=True)
    steps_late("f.", 0)
    steps_late("g.", 3)
    refuses_a_scaler()
    fps.shutdown()
    fps.init(op_timeout_s=2)
    alone_at_the_checkpoint()
    fps.shutdown()
