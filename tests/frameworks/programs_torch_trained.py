# SPDX-License-Identifier: Apache-2.0
"""What trains over torch.distributed's backend "fastps"; programs_torch_backend.py runs it."""
# ruff: noqa: PLC0415  (each case imports what it alone needs)

from __future__ import annotations

import copy
import gc
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_cases import case
from torch_values import check

import fastps.torch as fps


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def plain_net() -> nn.Module:
    """Make a model without batch normalisation: one process over the whole batch is equal."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))


def train(model, optimizer, rank, size, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step).chunk(size)[rank]).backward()
        optimizer.step()


def trained_alone(steps=3, make=torch.optim.SGD, **options) -> list[torch.Tensor]:
    model = plain_net()
    options = options or {"lr": 0.1}
    train(model, make(model.parameters(), **options), 0, 1, steps)
    return [p.detach() for p in model.parameters()]


def close(got, want, tolerance=1e-6):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=tolerance * 10, atol=tolerance)


@case
def ddp(rank, size):
    want = trained_alone()
    ways = (
        {}, {"static_graph": True}, {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.002},
    )  # fmt: skip
    for options in ways:
        model = DistributedDataParallel(plain_net(), **options)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        close(model.parameters(), want)
    model = DistributedDataParallel(net())
    train(model, torch.optim.Adam(model.parameters()), rank, size)
    same_everywhere(model, size)


def same_everywhere(model, size) -> None:
    """Check that all ranks have the same bits."""
    got = [None] * size
    dist.all_gather_object(got, [p.detach().numpy().tobytes() for p in model.parameters()])
    assert all(each == got[0] for each in got)


@case
def ddp_no_sync_and_join(rank, size):
    model = DistributedDataParallel(plain_net(), bucket_cap_mb=0.002)
    with model.no_sync():
        loss_of(model, batch(0).chunk(size)[rank]).backward()
    loss_of(model, batch(1).chunk(size)[rank]).backward()
    alone = plain_net()
    (loss_of(alone, batch(0)) + loss_of(alone, batch(1))).backward()
    close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        train(model, optimizer, rank, size, steps=2 + rank)
    dist.barrier()


@case
def ddp_divides_by_those_who_have_not_joined(rank, size):
    model, alone = DistributedDataParallel(plain_net()), plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], divide_by_initial_world_size=False):
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step).chunk(size)[rank])
            gc.collect()  # what nobody holds
            loss.backward()
            optimizer.step()
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(1 + size):
        other.zero_grad()
        left = range(max(step - 1, 0), size)  # rank r makes 2 + r steps
        sum(loss_of(alone, batch(step).chunk(size)[r]) / len(left) for r in left).backward()
        other.step()
    close(model.parameters(), [p.detach() for p in alone.parameters()])
    model.zero_grad()
    loss_of(model, batch(9).chunk(size)[rank]).backward()  # all count again
    alone.zero_grad()
    loss_of(alone, batch(9)).backward()
    close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


@case
def ddp_hooks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    want = trained_alone()
    hooks = (
        (None, default_hooks.allreduce_hook, 1e-6),
        (None, default_hooks.fp16_compress_hook, 1e-3),
        (None, fps.comm_hook(), 1e-6),
        (None, fps.comm_hook("half", compression=fps.Compression.fp16), 1e-3),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=4),
         powerSGD_hook.powerSGD_hook, 1.0),
    )  # fmt: skip
    for state, hook, tolerance in hooks:
        cap = {"bucket_cap_mb": 0.002} if tolerance < 1 else {}
        model = DistributedDataParallel(plain_net(), **cap)
        model.register_comm_hook(state, hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size, 3)
        close(model.parameters(), want, tolerance)
    for kind, tolerance in (("ALLREDUCE", 1e-6), ("FP16_COMPRESS", 1e-3)):  # torch's, in C++
        model = DistributedDataParallel(plain_net(), bucket_cap_mb=0.002)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size, 3)
        close(model.parameters(), want, tolerance)
    gloo = dist.new_group(backend="gloo")
    model = DistributedDataParallel(plain_net(), process_group=gloo)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size, 3)
    close(model.parameters(), want, 1e-3)


@case
def zero(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(plain_net())
    train(
        model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01), rank, size
    )
    close(model.parameters(), trained_alone(make=torch.optim.Adam, lr=0.01), 1e-4)


@case
def fsdp1(rank, size):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(plain_net(), device_id=torch.device("cpu"))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    with FullyShardedDataParallel.summon_full_params(model):
        close(model.parameters(), trained_alone())


@case
def fsdp2(rank, size):
    if torch.__version__ < (2, 7):  # FSDP2 asks there for what torch's streams of a CPU lack
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = plain_net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    close([p.full_tensor() for p in model.parameters()], trained_alone())
    model = plain_net()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    close([p.full_tensor() for p in model.parameters()], trained_alone(), 0.02)


@case
def fsdp2_in_shared_memory(rank, size):
    if torch.__version__ < (2, 7):  # as fsdp2
        return
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(plain_net(), mesh=init_device_mesh("cpu", (size,)))
    if not hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        return
    model.set_allocate_memory_from_process_group_for_comm(True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    close([p.full_tensor() for p in model.parameters()], trained_alone())


@case
def tensor_parallel(rank, size):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(12.0 * size).reshape(4 * size, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    check(sharded.full_tensor(), whole)
    check(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = batch(0)
    torch.testing.assert_close(model(x), alone(x))
    model(x).sum().backward()
    alone(x).sum().backward()
    got = model[0].weight.grad.full_tensor()
    torch.testing.assert_close(got, alone[0].weight.grad)


@case
def checkpoints(rank, size):
    from torch.distributed import checkpoint

    if torch.__version__ < (2, 6):
        from torch.distributed._composable.fsdp import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    mesh = init_device_mesh("cpu", (size,))
    model = plain_net()
    fully_shard(model, mesh=mesh)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    other = plain_net()
    fully_shard(other, mesh=mesh)
    state = {"model": other.state_dict()}
    for tensor in state["model"].values():
        tensor.zero_()
    checkpoint.load(state, checkpoint_id=folder[0])
    close([t.full_tensor() for t in state["model"].values()],
          [p.detach() for p in plain_net().parameters()])  # fmt: skip
    dist.barrier()


@case
def begun_again(rank, size):
    dist.destroy_process_group()
    dist.init_process_group("fastps", timeout=timedelta(seconds=60))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    check(tensor, torch.full((2,), float(size)))
