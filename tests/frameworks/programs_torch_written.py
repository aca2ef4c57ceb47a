# SPDX-License-Identifier: Apache-2.0
"""Each operation that writes a tensor tells autograd so; programs_torch_backend.py runs it.

An operation is a function that gives the tensors it writes on this rank, those it only reads, and
what starts it. Of gloo's operations it is asked that ours notice at least what they do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch_cases import case

import fastps.torch as fps
from fastps.bluefog import torch as bluefog
from fastps.frameworks.torch.distributed.process_group import Operations


class Trial(NamedTuple):
    """Tensors of an operation, and a function that starts it and returns what has wait()."""

    written: list[torch.Tensor]
    read: list[torch.Tensor]
    start: Callable[[], Any]


BACKEND: dict[str, Callable[..., Trial]] = {}
FACE: dict[str, Callable[..., Trial]] = {}


def of(table):
    """Add a function to a table, under its own name."""
    return lambda function: table.setdefault(function.__name__, function)


def some(count=4):
    return torch.ones(count)


def each(size):
    return [some() for _ in range(size)]


# ---- torch.distributed ----


@of(BACKEND)
def allreduce(rank, size, group):
    tensor = some()
    return Trial([tensor], [], lambda: dist.all_reduce(tensor, group=group, async_op=True))


@of(BACKEND)
def allreduce_of_what_is_not_contiguous(rank, size, group):
    tensor = torch.ones(4, 2).t()
    return Trial([tensor], [], lambda: dist.all_reduce(tensor, group=group, async_op=True))


@of(BACKEND)
def allreduce_coalesced(rank, size, group):
    two = each(2)
    return Trial(two, [], lambda: dist.all_reduce_coalesced(two, group=group, async_op=True))


@of(BACKEND)
def reduce(rank, size, group):
    tensor = some()
    written, read = ([tensor], []) if rank == 0 else ([], [tensor])
    return Trial(written, read, lambda: dist.reduce(tensor, 0, group=group, async_op=True))


@of(BACKEND)
def broadcast(rank, size, group):
    tensor = some()
    written, read = ([], [tensor]) if rank == 0 else ([tensor], [])
    return Trial(written, read, lambda: dist.broadcast(tensor, 0, group=group, async_op=True))


@of(BACKEND)
def allgather(rank, size, group):
    outputs, own = each(size), some()
    return Trial(outputs, [own], lambda: dist.all_gather(outputs, own, group=group, async_op=True))


@of(BACKEND)
def all_gather_into_tensor(rank, size, group):
    output, own = some(4 * size), some()
    return Trial(
        [output], [own],
        lambda: dist.all_gather_into_tensor(output, own, group=group, async_op=True),
    )  # fmt: skip


@of(BACKEND)
def allgather_coalesced(rank, size, group):
    outputs, own = [each(2) for _ in range(size)], each(2)
    return Trial(
        [one for some in outputs for one in some], own,
        lambda: dist.all_gather_coalesced(outputs, own, group=group, async_op=True),
    )  # fmt: skip


@of(BACKEND)
def allgather_into_tensor_coalesced(rank, size, group):
    outputs, own = [some(4 * size), some(4 * size)], each(2)

    def start():
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            for output, one in zip(outputs, own, strict=True):
                dist.all_gather_into_tensor(output, one, group=group)
        return manager

    return Trial(outputs, own, start)


@of(BACKEND)
def reduce_scatter(rank, size, group):
    output, own = some(), each(size)
    return Trial(
        [output], own, lambda: dist.reduce_scatter(output, own, group=group, async_op=True)
    )


@of(BACKEND)
def reduce_scatter_tensor(rank, size, group):
    output, own = some(), some(4 * size)
    return Trial(
        [output], [own],
        lambda: dist.reduce_scatter_tensor(output, own, group=group, async_op=True),
    )  # fmt: skip


@of(BACKEND)
def gather(rank, size, group):
    outputs, own = each(size) if rank == 0 else None, some()
    return Trial(
        outputs or [], [own], lambda: dist.gather(own, outputs, group=group, async_op=True)
    )


@of(BACKEND)
def scatter(rank, size, group):
    output, own = some(), each(size) if rank == 0 else None
    return Trial(
        [output], own or [], lambda: dist.scatter(output, own, group=group, async_op=True)
    )


@of(BACKEND)
def alltoall(rank, size, group):
    outputs, own = each(size), each(size)
    return Trial(outputs, own, lambda: dist.all_to_all(outputs, own, group=group, async_op=True))


@of(BACKEND)
def all_to_all_single(rank, size, group):
    output, own = some(4 * size), some(4 * size)
    return Trial(
        [output], [own], lambda: dist.all_to_all_single(output, own, group=group, async_op=True)
    )


@of(BACKEND)
def recv(rank, size, group):
    output, own = some(), some()

    def start():
        works = [
            dist.isend(own, (rank + 1) % size, group=group),
            dist.irecv(output, (rank - 1) % size, group=group),
        ]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    return Trial([output], [own], start)


@of(BACKEND)
def recv_anysource(rank, size, group):
    output, own = some(), some()

    def start():
        works = [
            dist.isend(own, (rank + 1) % size, group=group),
            dist.irecv(output, group=group),
        ]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    return Trial([output], [own], start)


# ---- fastps.torch ----


@of(FACE)
def push_pull_async_inplace(rank, size):
    tensor = some()

    def start():
        handle = fps.push_pull_async_inplace(tensor, name="written")
        return SimpleNamespace(wait=lambda: fps.synchronize(handle))

    return Trial([tensor], [], start)


@of(FACE)
def push_pull_inplace(rank, size):
    tensor = some()
    return Trial([tensor], [], lambda: done(fps.push_pull_inplace(tensor, name="written")))


@of(FACE)
def allreduce_async_(rank, size):
    tensor = some()
    return Trial([tensor], [], lambda: fps.allreduce_async_(tensor))


@of(FACE)
def allreduce_(rank, size):
    tensor = some()
    return Trial([tensor], [], lambda: done(fps.allreduce_(tensor, name="written by name")))


@of(FACE)
def grouped_allreduce_async_(rank, size):
    two = [some(), torch.ones(4, 2).t()]
    return Trial(two, [], lambda: fps.grouped_allreduce_async_(two))


@of(FACE)
def grouped_allreduce_(rank, size):
    two = [some(), some()]
    return Trial(two, [], lambda: done(fps.grouped_allreduce_(two)))


@of(FACE)
def broadcast_async_(rank, size):
    two = [some(), torch.ones(4, 2).t()]

    def start():
        handles = [fps.broadcast_async_(one, 0) for one in two]
        return SimpleNamespace(wait=lambda: [handle.wait() for handle in handles])

    return Trial([], two, start) if rank == 0 else Trial(two, [], start)


@of(FACE)
def broadcast_(rank, size):
    tensor = some()
    written, read = ([], [tensor]) if rank == 0 else ([tensor], [])
    return Trial(written, read, lambda: done(fps.broadcast_(tensor, 0, "written and copied")))


@of(FACE)
def broadcast_parameters(rank, size):
    two = [torch.nn.Parameter(some()), torch.ones(4, 2).t()]
    written, read = ([], two) if rank == 0 else (two, [])
    named = [("one", two[0]), ("other", two[1])]
    return Trial(written, read, lambda: fps.broadcast_parameters(named, prefix="Written."))


@of(FACE)
def average_parameters(rank, size):
    tensor = some()
    return Trial([tensor], [], lambda: fps.average_parameters([("one", tensor)]))


@of(FACE)
def scatter_async(rank, size):
    out, own = some(), some(4 * size) if rank == 0 else None
    read = [] if own is None else [own]
    return Trial([out], read, lambda: fps.scatter_async(own, out, 0))


@of(FACE)
def receive_async(rank, size):
    out, own = some(), some()

    def start():
        handles = [
            fps.receive_async(out, (rank - 1) % size), fps.send_async(own, (rank + 1) % size)
        ]  # fmt: skip
        return SimpleNamespace(wait=lambda: [handle.wait() for handle in handles])

    return Trial([out], [own], start)


@of(FACE)
def win_put_async(rank, size):
    own, put = window("put")
    return Trial([put], [own], lambda: fps.win_put_async(put, "put", self_weight=0.5))


@of(FACE)
def win_put_async_of_all_it_has(rank, size):
    own, put = window("whole")
    return Trial([], [own, put], lambda: fps.win_put_async(put, "whole"))


@of(FACE)
def win_accumulate_async(rank, size):
    own, put = window("add")
    return Trial([put], [own], lambda: fps.win_accumulate_async(put, "add", self_weight=0.5))


@of(FACE)
def win_update(rank, size):
    own, _ = window("update")
    return Trial([own], [], lambda: done(fps.win_update("update")))


@of(FACE)
def win_update_into_another(rank, size):
    own, _ = window("clone")
    return Trial([], [own], lambda: done(fps.win_update("clone", clone=True)))


@of(FACE)
def allreduce_nonblocking_(rank, size):
    tensor = some()
    return Trial([tensor], [], lambda: done(bluefog.allreduce_nonblocking_(tensor).wait()))


@of(FACE)
def comm_hook(rank, size):
    buffer = some()
    hook = fps.comm_hook("written")
    bucket = SimpleNamespace(buffer=lambda: buffer, index=lambda: 0)
    return Trial([buffer], [], lambda: hook(None, bucket))


@of(FACE)
def DistributedOptimizer(rank, size):
    """Gradients are on their way from backward() to step()."""
    lone, *others = [torch.nn.Parameter(some()) for _ in range(3)]
    for parameter in (lone, *others):
        parameter.sum().backward()
    optimizer = torch.optim.SGD([{"params": [lone]}, {"params": others}], lr=0.1)
    named = [(f"{number}", one) for number, one in enumerate((lone, *others))]
    optimizer = fps.DistributedOptimizer(optimizer, named, prefix="Written.")
    optimizer.step()
    optimizer.zero_grad()
    sum(one.sum() for one in (lone, *others)).backward()
    return Trial([one.grad for one in (lone, *others)], [], optimizer.synchronize)


def window(name):
    own, put = some(), some()
    fps.win_create(own, name)
    return own, put


def done(_):
    """Forget what a blocking operation gives: nothing is in flight."""


# ---- what autograd notices ----


def kept(tensor):
    """Give a loss for whose gradient autograd keeps a tensor."""
    return (tensor * torch.ones_like(tensor, requires_grad=True)).sum()


def is_refused(loss):
    """Tell whether autograd refuses to go back, as something it kept was written."""
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def noticed(trial):
    """Run an operation; tell which tensors' versions it raised, and what autograd noticed."""
    tensors = [*trial.written, *trial.read]
    versions, before = [one._version for one in tensors], [kept(one) for one in tensors]
    handle = trial.start()
    is_open = handle is not None and not isinstance(handle, torch._C.Future)
    during = [kept(one) for one in tensors] if is_open else []  # a Future ends by itself
    if handle is not None:
        handle.wait()
    raised = [one._version > old for one, old in zip(tensors, versions, strict=True)]
    return raised, [is_refused(loss) for loss in before], [is_refused(loss) for loss in during]


@case
def writes_of_the_backend_are_noticed(rank, size):
    warnings.simplefilter("ignore")  # of coalesced forms
    known = {*BACKEND, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"}
    known |= {"all_gather_single_coalesced", "all_gather_single", "reduce_scatter_single"}
    known |= {"alltoall_base", "allreduce_sparse", "send"}  # other names, and what only reads
    takes_tensors = {
        name
        for name, value in vars(Operations).items()
        if "Tensor" in str(getattr(value, "__annotations__", "")) and not name.startswith("_")
    }
    assert takes_tensors - {"allocate_tensor"} <= known, takes_tensors - known
    gloo = dist.new_group(backend="gloo")
    for name, make in BACKEND.items():
        trial = make(rank, size, dist.group.WORLD)
        ours, before, during = noticed(trial)
        want = [True] * len(trial.written) + [False] * len(trial.read)
        assert ours == before == want, (name, ours, before)
        assert during in ([], want), (name, during)
        theirs, _, _ = noticed(make(rank, size, gloo))
        assert not any(there and not here for there, here in zip(theirs, ours, strict=True)), name


@case
def writes_of_our_face_are_noticed(rank, size):
    waiting = {"scatter", "receive", "win_put", "win_accumulate", "win_update_then_collect"}
    in_place = {name for name in fps.__all__ if name.endswith(("_", "_inplace"))}
    assert in_place <= FACE.keys(), in_place - FACE.keys()
    assert waiting <= set(fps.__all__)  # they are their _async forms, or win_update()
    for name, make in FACE.items():
        trial = make(rank, size)
        ours, before, during = noticed(trial)
        want = [True] * len(trial.written) + [False] * len(trial.read)
        assert ours == before == want, (name, ours, before)
        assert during in ([], want), (name, during)
