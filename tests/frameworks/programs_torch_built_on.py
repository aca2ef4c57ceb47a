# SPDX-License-Identifier: Apache-2.0
"""What torch builds on a backend and trains with; programs_torch_backend.py runs it."""
# ruff: noqa: PLC0415  (each case imports what it alone needs)

from __future__ import annotations

import copy
import tempfile
import threading
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from programs_torch_trained import (
    batch,
    close,
    loss_of,
    plain_net,
    same_everywhere,
    train,
    trained_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_cases import case, refused
from torch_values import check, values

import fastps.torch as fps

# ---- gradients through operations


def rows_of(tensors: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Split each rank's tensor by rows and give each rank its parts of all, as all-to-all does."""
    return [torch.cat([t.chunk(size)[r] for t in tensors]) for r in range(size)]


def differentiated(size):
    """Give each operation of one rank beside what it does to the tensors of all."""
    return {
        "all_reduce": (differentiable.all_reduce, lambda xs: [sum(xs)] * size),
        "all_gather": (
            lambda x: torch.stack(differentiable.all_gather(x)),
            lambda xs: [torch.stack(xs)] * size,
        ),
        "reduce_scatter": (
            lambda x: differentiable.reduce_scatter(torch.empty(2, 3), list(x.chunk(size))),
            lambda xs: list(sum(xs).chunk(size)),
        ),
        "all_to_all": (
            lambda x: torch.cat(
                differentiable.all_to_all(
                    [torch.empty(2, 3) for _ in range(size)], list(x.chunk(size))
                )
            ),
            lambda xs: rows_of(xs, size),
        ),
        "all_to_all_single": (
            lambda x: differentiable.all_to_all_single(torch.empty_like(x), x),
            lambda xs: rows_of(xs, size),
        ),
        "broadcast": (
            lambda x: differentiable.broadcast(x, 1),
            lambda xs: [xs[1]] * size,
        ),
        "reduce": (
            lambda x: differentiable.reduce(x, 1),
            lambda xs: [sum(xs) if r == 1 else xs[r] * 0 for r in range(size)],
        ),
        "gather": (
            lambda x: torch.stack(differentiable.gather(x, 1)),
            lambda xs: [torch.stack(xs) * (r == 1) for r in range(size)],
        ),
        "scatter": (
            lambda x: differentiable.scatter(list(x.chunk(size)), 1),
            lambda xs: list(xs[1].chunk(size)),
        ),
    }


@case
def gradients_through_operations(rank, size):
    """Check gradients of the sum of all ranks' losses, as one process computes them."""
    for name, (mine, everybody) in differentiated(size).items():
        xs = [values(r, (2 * size, 3), torch.float32).requires_grad_() for r in range(size)]
        outs = everybody(xs)
        sum((out * out * (r + 2)).sum() for r, out in enumerate(outs)).backward()
        x = values(rank, (2 * size, 3), torch.float32).requires_grad_()
        out = mine(x * 1)
        is_out = name != "reduce" or rank == 1  # elsewhere torch leaves what was given
        if is_out:
            check(out.detach(), outs[rank].detach())
        (out * out * (rank + 2 if is_out else 0)).sum().backward()
        want = torch.zeros_like(x) if xs[rank].grad is None else xs[rank].grad
        assert torch.equal(x.grad, want), (name, x.grad, want)


@case
def several_both_ways(rank, size):
    """Exchange tensors of several shapes and dtypes with each other rank, in one batch."""
    kinds = [((3,), torch.float32), ((0,), torch.float32), ((40, 50), torch.float64),
             ((), torch.int64), ((5, 2), torch.bool), ((7,), torch.complex64)]  # fmt: skip
    outs, works = {}, []
    for other in range(size):
        if other == rank:
            continue
        for turn, (shape, dtype) in enumerate(kinds):
            outs[other, turn] = torch.zeros(shape, dtype=dtype)
            sent = values(rank + 7 * other + turn, shape, dtype)
            works += [dist.P2POp(dist.isend, sent, other)]
            works += [dist.P2POp(dist.irecv, outs[other, turn], other)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    for (other, turn), got in outs.items():
        shape, dtype = kinds[turn]
        check(got, values(other + 7 * rank + turn, shape, dtype))


@case
def monitored_barrier(rank, size):
    """Check that who waits is told of all who are missing; by torch's function gloo alone can."""
    assert "gloo" in refused(dist.monitored_barrier)
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    group = dist.new_group()
    if rank == 0:
        text = refused(group.monitored_barrier, timedelta(seconds=0.2))
        missing = text.split("in it:")[0]
        assert all(f"worker {other} " in missing for other in range(1, size)), text
    dist.barrier()


# ---- training


def after_local_sgd(group, subgroup, rank, size):
    """Train with torch's post-local SGD: 2 steps of all ranks, then averages every 3 steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(plain_net(), process_group=group, bucket_cap_mb=0.002)
    model.register_comm_hook(hook.PostLocalSGDState(group, subgroup, 2), hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2, process_group=group)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    train(model, optimizer, rank, size, steps=5)
    kept = copy.deepcopy(model.module)
    train(model, optimizer, rank, size, steps=1)
    return kept, model.module


@case
def post_local_sgd(rank, size):
    gloo = dist.new_group(backend="gloo")
    alone = [dist.new_group([r]) for r in range(size)][rank]
    gloo_alone = [dist.new_group([r], backend="gloo") for r in range(size)][rank]
    apart, averaged = after_local_sgd(dist.group.WORLD, alone, rank, size)
    for got, want in zip(
        (apart, averaged), after_local_sgd(gloo, gloo_alone, rank, size), strict=True
    ):
        close(got.parameters(), [p.detach() for p in want.parameters()])
    weights = [torch.empty_like(apart[0].weight) for _ in range(size)]
    dist.all_gather(weights, apart[0].weight.detach())
    assert not torch.equal(weights[0], weights[1])  # on their own before they are averaged
    same_everywhere(averaged, size)


class Own(nn.Module):
    """A class that is not torch's: of a plain nn.Sequential in DDP torch.compile takes nothing."""

    def __init__(self):
        super().__init__()
        self.layers = plain_net()

    def forward(self, x):
        return self.layers(x)


@case
def ddp_compiled(rank, size):
    """Compile a wrapped model as a whole and in pieces, one for each of DDP's buckets."""
    if size > 2:  # takes seconds
        return
    from torch._dynamo import config, reset
    from torch._dynamo.testing import CompileCounterWithBackend

    for how, pieces in (("ddp_optimizer", 3), ("python_reducer", 1), ("no_optimization", 1)):
        if how == "python_reducer" and torch.__version__ < (2, 7):  # does not average, as gloo
            continue
        reset()
        counter = CompileCounterWithBackend("aot_eager")
        first = patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 500)  # 1 MiB: all in one piece
        with config.patch(optimize_ddp=how), first:
            model = DistributedDataParallel(Own(), bucket_cap_mb=0.002)
            compiled = torch.compile(model, backend=counter)
            train(compiled, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        close(model.parameters(), trained_alone())
        assert counter.frame_count == pieces, (how, counter.frame_count)


@case
def ddp_in_compiled_autograd(rank, size):
    """Compile steps with their backward passes; a hook that asks for buckets is refused there."""
    if size > 2 or torch.__version__ < (2, 7):  # takes seconds; does not average, as gloo
        return
    from torch._dynamo import config, reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    with config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        model = DistributedDataParallel(Own(), bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(lambda x: loss_of(model, x).backward(), backend="aot_eager")
        for at in range(3):
            optimizer.zero_grad()
            step(batch(at).chunk(size)[rank])
            optimizer.step()
        close(model.parameters(), trained_alone())
        assert counters["compiled_autograd"]["captures"] > 0
        model = DistributedDataParallel(Own())
        model.register_comm_hook(None, fps.comm_hook("reducer"))
        text = refused(lambda: loss_of(model, batch(0)).backward())
        assert "python_reducer" in text, text


@case
def pipelines(rank, size):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)))

    x, target = batch(0), batch(1)
    alone = layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(x), target).backward()
        optimizer.step()
    for schedule_of in (ScheduleGPipe, Schedule1F1B):
        mine = layers()[rank]
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        schedule = schedule_of(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            elif rank == size - 1:
                losses = []
                schedule.step(target=target, losses=losses)
                assert len(losses) == 4
            else:
                schedule.step()
            optimizer.step()
        close(mine.parameters(), [p.detach() for p in alone[rank].parameters()])


@case
def hsdp(rank, size):
    """Shard FSDP2's parameters among some ranks and replicate them over the others."""
    if torch.__version__ < (2, 7):  # as fsdp2
        return
    from torch.distributed.fsdp import fully_shard

    for replicas in (n for n in range(1, size + 1) if size % n == 0):
        shape = (replicas, size // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicated", "sharded"))
        model = plain_net()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        close([p.full_tensor() for p in model.parameters()], trained_alone())


@case
def saved_amid_training(rank, size):
    """Write only after further steps, through a group of its own; load the bits of the moment."""
    if torch.__version__ < (2, 7):  # as fsdp2
        return
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    class Held(checkpoint.FileSystemWriter):
        def write_data(self, plan, planner):
            assert is_trained.wait(60)
            return super().write_data(plan, planner)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    mesh, writers = init_device_mesh("cpu", (size,)), dist.new_group()
    model = fully_shard(plain_net(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for moment in range(2):
        train(model, optimizer, rank, size, steps=2)
        want = {name: t.full_tensor().clone() for name, t in model.state_dict().items()}
        name, is_trained = f"{folder[0]}/{moment}", threading.Event()
        saved = checkpoint.async_save(
            {"model": model.state_dict()}, storage_writer=Held(name), process_group=writers
        )
        train(model, optimizer, rank, size, steps=4)
        is_trained.set()
        saved.result(timeout=60)
        state = {"model": fully_shard(plain_net(), mesh=mesh).state_dict()}
        checkpoint.load(state, checkpoint_id=name)
        for key, tensor in state["model"].items():
            check(tensor.full_tensor(), want[key])
            assert not torch.equal(model.state_dict()[key].full_tensor(), want[key])
    dist.barrier()
