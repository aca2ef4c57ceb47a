# SPDX-License-Identifier: Apache-2.0
"""What the workers of elastic jobs train: models whose gradients tell who took part in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
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


def refuse() -> dict[str, str]:
    """Use what an elastic job does not support; return what each said."""
    fps.init(elastic=fps.Elastic(min=1))
    model = torch.nn.Linear(3, 2)
    embedding = torch.nn.Embedding(5, 2, sparse=True)

    def plain() -> Any:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def sparse() -> None:
        found = fps.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), prefix="sparse."
        )
        embedding(torch.tensor([1, 2])).sum().backward()
        found.step()

    some = fps.ProcessSet([0, 1])
    calls: dict[str, Callable[[], object]] = {
        "Adasum": lambda: fps.DistributedOptimizer(plain(), op=fps.Adasum),
        "process_set": lambda: fps.DistributedOptimizer(plain(), process_set=some),
        "ddp": lambda: fps.DistributedDataParallel(model, process_set=some),
        "batchnorm": lambda: fps.SyncBatchNorm(3),
        "join": fps.join,
        "neighbors": lambda: fps.DistributedAdaptWithCombineOptimizer(plain(), model),
        "comm_hook": fps.comm_hook,
        "asynchronous": lambda: fps.DistributedOptimizer(plain(), asynchronous=True, staleness=1),
        "participation": lambda: fps.LocalSGD(model, plain(), sync_every=2, participation=0.5),
        "servers": lambda: fps.LocalSGD(model, plain(), sync_every=2, deadline_s=1.0),
        "sparse": sparse,
    }
    said = {}
    for what, call in calls.items():
        try:
            call()
        except (fps.ConfigError, TypeError, ValueError) as error:
            said[what] = f"{type(error).__name__}: {error}"
    fps.shutdown()
    return said


def local_steps(*, steps: int = 40) -> dict[str, Any]:
    """Train with local steps; return a hash of the agreed model after each exchange."""
    me = int(os.environ["FASTPS_RANK"])
    told: list[str] = []
    fps.init(elastic=fps.Elastic(min=1, on_view=lambda view: told.append(str(view))))
    torch.manual_seed(me)
    model = Model()
    local = fps.LocalSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.5), sync_every=2, average_buffers=False
    )
    mark("READY")
    hashes = []
    for step in range(steps):
        local.inner.zero_grad()
        model(number_of(me, step)).backward()
        local.step()
        if step % 2:
            hashes.append(hash_of(model))
        mark("STEP", step)
    fps.shutdown()
    return {"hashes": hashes, "views": told, "steps": steps // 2}


def broadcasts(*, root: int) -> dict[str, Any]:
    """Broadcast parameters and the state of an optimizer, again from another where one is lost."""
    me = int(os.environ["FASTPS_RANK"])
    told: list[str] = []
    fps.init(elastic=fps.Elastic(min=1, on_view=lambda view: told.append(str(view))))
    mark("READY")
    found, errors = [], []
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for step in range(12):
        with torch.no_grad():
            for weight in model.weights:
                weight.fill_(100 * me + step)
                optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, float(me))
        calls: list[Callable[[], object]] = [
            lambda: fps.broadcast_parameters(model.state_dict(), root_rank=root),
            lambda: fps.broadcast_optimizer_state(optimizer, root_rank=root),
        ]
        while calls:
            try:
                calls[0]()
                calls.pop(0)
            except fps.PeerLostError as error:
                errors.append(str(error))
        kept = [optimizer.state[weight]["momentum_buffer"] for weight in model.weights]
        assert all(len(one.unique()) == 1 for one in (*model.weights, *kept))
        found.append([model.weights[-1].detach()[0, 0].item(), kept[-1][0, 0].item()])
    fps.shutdown()
    return {"found": found, "errors": errors}


def c10d(*, steps: int = 60) -> dict[str, Any]:
    """Reduce by torch.distributed; after a loss make the group anew, and go on."""
    from torch import distributed as dist  # noqa: PLC0415

    me = int(os.environ["FASTPS_RANK"])
    fps.init(elastic=fps.Elastic(min=1))
    dist.init_process_group("fastps")
    mark("READY")
    sums, errors = [], []
    while len(sums) < steps:
        try:
            tensor = torch.full((2000,), float(1 << me))
            dist.all_reduce(tensor)
            count = torch.tensor([float(len(sums) + 1)])
            dist.all_reduce(count, op=dist.ReduceOp.MIN)  # who may be one step behind
        except fps.PeerLostError as error:
            errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)  # until the view has ended: the group is of no use any more
            try:
                dist.all_reduce(torch.ones(3))
            except fps.ViewChangedError as later:
                errors.append(str(later))
            dist.destroy_process_group()
            dist.init_process_group("fastps")
            continue
        assert len(tensor.unique()) == 1
        sums = [*sums[: int(count) - 1], float(tensor[0])]
        mark("STEP", len(sums))
    dist.destroy_process_group()
    fps.shutdown()
    return {"sums": sums, "errors": errors}
