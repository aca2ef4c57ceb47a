# SPDX-License-Identifier: Apache-2.0
"""What the workers of elastic jobs train: models whose gradients tell who took part in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import Any

import torch
from run_program import mark

import fastps.torch as fps

SIZES = ((3,), (150, 200), (40, 30), (300, 250), (7, 11))  # in a bucket, alone, in partitions
UNIT = 2.0**-6


class Model(torch.nn.Module):
    """Parameters whose gradient is a number of this worker, and of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size) for size in SIZES)
        self.register_buffer("seen", torch.zeros(5000))  # in which each worker counts

    def forward(self, number: float, pause_s: float = 0.0) -> torch.Tensor:
        """Return what has the number, times 1, 2, ..., as the gradients."""
        if pause_s:
            time.sleep(pause_s)
        self.seen += number
        terms = [(place + 1) * number * one.sum() for place, one in enumerate(self.weights)]
        return torch.stack(terms).sum()


def number_of(worker: int, step: int) -> float:
    """Return what a worker contributes in a step: a sum of these tells whose it is."""
    return UNIT * ((1 << worker) + (step % 4) * (1 << worker + 8))


def hash_of(model: torch.nn.Module) -> str:
    """Return a digest of all bits of a model's parameters."""
    found = hashlib.sha256()
    for one in model.parameters():
        found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def train(
    *,
    steps: int = 24,
    kind: str = "plain",
    passes: int = 1,
    set_to_none: bool = True,
    compression: str = "none",
    views: Any = "auto",
    pause_s: float = 0.0,
) -> dict[str, Any]:
    """Train; return a hash of the weights after each step, and the gradients of each step."""
    me = int(os.environ["FASTPS_RANK"])
    told: list[str] = []
    fps.init(elastic=fps.Elastic(min=1, on_view=lambda view: told.append(str(view))))
    model = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    options: dict[str, Any] = {
        "op": fps.Sum, "compression": codec_of(compression), "gradient_views": views,
    }  # fmt: skip
    net: Any = model
    if kind == "ddp":
        net = fps.DistributedDataParallel(model, **options)
    elif kind == "pipe":
        optimizer = fps.DistributedOptimizer(
            optimizer, model.named_parameters(), staleness=1, compression=options["compression"]
        )
    elif kind == "barrier":
        optimizer = fps.CrossBarrier(model, optimizer, compression=options["compression"])
    else:
        optimizer = fps.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes,
            finish_in_backward=kind == "early", **options,
        )  # fmt: skip
    fps.broadcast_parameters(model.state_dict(), root_rank=0)
    mark("READY")
    hashes, sums, buffers, n_steps = [], [], [], 0
    for step in range(steps):
        for one in range(passes):
            is_local = kind == "ddp" and one < passes - 1
            with net.no_sync() if is_local else contextlib.nullcontext():
                net(number_of(me, step) / passes, pause_s).backward()
        optimizer.step()
        n_steps += 1
        if kind == "barrier":
            optimizer.settle()
        found = []
        for place, weight in enumerate(model.weights):
            assert weight.grad is not None
            value = float(weight.grad.reshape(-1)[0]) / (place + 1)
            if compression == "none":
                assert (weight.grad == value * (place + 1)).all(), (step, place)
            found.append(value / UNIT)
        sums.append(found)
        hashes.append(hash_of(model))
        buffers.append(float(model.seen[0]) / UNIT - number_of(me, step) / UNIT)
        assert (model.seen == model.seen[0]).all(), (step, model.seen.unique())
        optimizer.zero_grad(set_to_none=set_to_none)
        mark("STEP", step)
    fps.barrier()
    fps.shutdown()
    return {"buffers": buffers, "hashes": hashes, "sums": sums, "views": told, "steps": n_steps}


def codec_of(name: str) -> Any:
    """Return a compression by its name."""
    if name in ("none", "fp16", "bf16"):
        return getattr(fps.Compression, name)
    if name == "wdmom":
        return fps.Compression.wdmom(fps.Compression.onebit(), mu=0.5, wd=0.01, threshold=0)
    kind, _, option = name.partition(":")
    return getattr(fps.Compression, kind)(*([float(option)] if option else []))
