# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed's backend "fastps" does by itself, and the program that runs all cases.

torchrun --standalone --nproc-per-node 2 programs_torch_backend.py FOLDER [NAME ...]
"""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_cases import IS_GROUP, case, refused, run
from torch_values import (
    MOVED,
    SHAPES,
    Op,
    check,
    reduced,
    tables,
    values,
)

# ---- operations


@case
def all_reduce(rank, size):
    for op, dtype in tables():
        tensor = values(rank, (3, 5), dtype)
        dist.all_reduce(tensor, op)
        check(tensor, reduced(op, (3, 5), dtype, size))
    for shape in SHAPES:
        tensor = values(rank, shape, torch.float32)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        if IS_GROUP:
            assert work.is_completed()
            assert work.is_success()
        check(tensor, reduced(Op.SUM, shape, torch.float32, size))


@case
def all_reduce_of_what_is_not_contiguous(rank, size):
    whole = values(rank, (4, 6), torch.float32)
    part = whole.t()[::2]
    dist.all_reduce(part)
    want = values(rank, (4, 6), torch.float32)
    want.t()[::2] = reduced(Op.SUM, (4, 6), torch.float32, size).t()[::2]
    check(whole, want)
    last = values(rank, (2, 3, 4, 4), torch.float32).to(memory_format=torch.channels_last)
    dist.all_reduce(last)
    check(last, reduced(Op.SUM, (2, 3, 4, 4), torch.float32, size))


@case
def elements_that_share_memory(rank, size):
    leaf = torch.ones(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(leaf.sum() * (rank + 1), leaf)
    assert grad.stride() == (0, 0)
    dist.all_reduce(grad)
    check(grad, torch.full((2, 3), size * (size + 1) / 2))
    rows = values(rank, (3, 1), torch.float32).expand(3, 4)
    dist.all_reduce(rows)
    want = reduced(Op.SUM, (3, 1), torch.float32, size).expand(3, 4)
    check(rows, want)
    rows = torch.full((3, 1), rank + 1.0).expand(3, 4)
    dist.broadcast(rows, 1)
    check(rows, torch.full((3, 4), 2.0))
    place = torch.zeros(1).expand(3)
    for name, call in {
        "recv": lambda: dist.recv(place, 1 - min(rank, 1)),
        "all_gather": lambda: dist.all_gather([place] * size, torch.ones(3)),
        "all_to_all": lambda: dist.all_to_all([place] * size, [torch.ones(3)] * size),
    }.items():
        told = refused(call)
        assert f"{name}: the tensor of shape (3,) has elements that share memory" in told, told


@case
def all_reduce_of_parameters_and_complex_numbers(rank, size):
    parameter = nn.Parameter(values(rank, (3,), torch.float32))
    dist.all_reduce(parameter)
    check(parameter.detach(), reduced(Op.SUM, (3,), torch.float32, size))
    tensor = torch.complex(values(rank, (3,), torch.float32), values(rank, (3,), torch.float32))
    dist.all_reduce(tensor)
    check(tensor.imag.contiguous(), reduced(Op.SUM, (3,), torch.float32, size))


@case
def all_reduce_multiplied_before(rank, size):
    tensor = values(rank, (5,), torch.float32)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    check(tensor, 0.5 * reduced(Op.SUM, (5,), torch.float32, size))
    out = torch.empty(2)
    each = values(rank, (2 * size,), torch.float32)
    dist.reduce_scatter_tensor(out, each, dist._make_nccl_premul_sum(0.5))
    check(each, values(rank, (2 * size,), torch.float32))
    check(out, 0.5 * reduced(Op.SUM, (2 * size,), torch.float32, size)[2 * rank :][:2])
    half, third = torch.tensor([0.5]), torch.ones(4, dtype=torch.float16)
    dist.all_reduce(third, dist._make_nccl_premul_sum(half))  # which makes float32 of the product
    check(third, torch.full((4,), 0.5 * size, dtype=torch.float16))
    for dtype in (torch.int64, torch.int8, torch.bool):
        whole = torch.ones(4, dtype=dtype)
        told = refused(dist.all_reduce, whole, dist._make_nccl_premul_sum(0.5))
        assert "premul_sum" in told, told
        assert str(dtype) in told, told
        check(whole, torch.ones(4, dtype=dtype))


@case
def coalesced(rank, size):
    shapes = ((3,), (2, 2), (0,))
    tensors = [values(rank, shape, torch.float32) for shape in shapes]
    dist.all_reduce_coalesced(tensors)
    for tensor, shape in zip(tensors, shapes, strict=True):
        check(tensor, reduced(Op.SUM, shape, torch.float32, size))
    for device in (None, torch.device("cpu")):
        tensors = [values(rank, shape, torch.float32) for shape in shapes]
        with dist._coalescing_manager(device=device, async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()
        for tensor, shape in zip(tensors, shapes, strict=True):
            check(tensor, reduced(Op.SUM, shape, torch.float32, size))
    outs = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, values(rank, (len(out) // size,), torch.float32))
    for out in outs:
        count = len(out) // size
        check(out, torch.cat([values(r, (count,), torch.float32) for r in range(size)]))


@case
def reduce(rank, size):
    for root in range(size):
        for op, dtype in tables():
            tensor = values(rank, (3, 5), dtype)
            dist.reduce(tensor, root, op)
            if rank == root:
                check(tensor, reduced(op, (3, 5), dtype, size))


@case
def broadcast(rank, size):
    for root in range(size):
        for dtype in MOVED:
            tensor = values(rank, (3, 5), dtype)
            dist.broadcast(tensor, root)
            check(tensor, values(root, (3, 5), dtype))
        for shape in SHAPES:
            tensor = values(rank, shape, torch.float32)
            dist.broadcast(tensor, root)
            check(tensor, values(root, shape, torch.float32))


@case
def all_gather(rank, size):
    for dtype in MOVED:
        for shape in ((3, 5), (0,), ()):
            outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, values(rank, shape, dtype))
            for other in range(size):
                check(outs[other], values(other, shape, dtype))
    together = torch.zeros(size, 4)
    dist.all_gather(list(together), values(rank, (4,), torch.float32))
    check(together, torch.stack([values(r, (4,), torch.float32) for r in range(size)]))
    uneven = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(uneven, values(rank, (rank + 1,), torch.float32))
    for other in range(size):
        check(uneven[other], values(other, (other + 1,), torch.float32))


@case
def all_gather_into_one(rank, size):
    for dtype in MOVED:
        out = torch.empty(size * 3, 2, dtype=dtype)
        dist.all_gather_into_tensor(out, values(rank, (3, 2), dtype))
        check(out, torch.cat([values(r, (3, 2), dtype) for r in range(size)]))
    whole = torch.zeros(size, 4)
    whole[rank] = values(rank, (4,), torch.float32)
    dist.all_gather_into_tensor(whole.view(-1), whole[rank])  # in place
    check(whole, torch.stack([values(r, (4,), torch.float32) for r in range(size)]))
    whole = torch.zeros(size * 3, 2).t()
    dist.all_gather_into_tensor(whole, values(rank, (6,), torch.float32))
    want = torch.cat([values(r, (6,), torch.float32) for r in range(size)]).view(2, size * 3)
    check(whole, want)


@case
def reduce_scatter(rank, size):
    for op, dtype in tables():
        out = torch.empty(4, dtype=dtype)
        each = [values(rank + 7 * to, (4,), dtype) for to in range(size)]
        dist.reduce_scatter(out, each, op)
        whole = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(whole, torch.cat(each), op)
        check(out, whole)
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, [values(rank, (to + 1,), torch.float32) for to in range(size)])
    check(out, reduced(Op.SUM, (rank + 1,), torch.float32, size))
    out = torch.empty(3, 2)
    dist.reduce_scatter_tensor(out, values(rank, (3 * size, 2), torch.float32))
    check(out, reduced(Op.SUM, (3 * size, 2), torch.float32, size)[3 * rank :][:3])


@case
def gather_and_scatter(rank, size):
    for root in range(size):
        for dtype in MOVED:
            outs = [torch.empty(3, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(values(rank, (3,), dtype), outs, dst=root)
            for other in range(size if rank == root else 0):
                check(outs[other], values(other, (3,), dtype))
            out = torch.empty(3, dtype=dtype)
            each = [values(to, (3,), dtype) for to in range(size)] if rank == root else None
            dist.scatter(out, each, src=root)
            check(out, values(rank, (3,), dtype))


@case
def all_to_all(rank, size):
    for dtype in MOVED:
        outs = [torch.empty(3, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outs, [values(rank + 7 * to, (3,), dtype) for to in range(size)])
        for other in range(size):
            check(outs[other], values(other + 7 * rank, (3,), dtype))
    out = torch.empty(2 * size, 3)
    each = torch.cat([values(rank + 7 * to, (2, 3), torch.float32) for to in range(size)])
    dist.all_to_all_single(out, each)
    want = torch.cat([values(r + 7 * rank, (2, 3), torch.float32) for r in range(size)])
    check(out, want)
    # rank r sends r + to rows to `to`
    sent = [rank + to for to in range(size)]
    got = [other + rank for other in range(size)]
    for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn):
        out = torch.empty(sum(got), 3, dtype=dtype)
        each = torch.cat([values(rank + 7 * to, (rank + to, 3), dtype) for to in range(size)])
        dist.all_to_all_single(out, each, got, sent)
        want = [values(r + 7 * rank, (r + rank, 3), dtype) for r in range(size)]
        check(out, torch.cat(want))


@case
def point_to_point(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in MOVED:
        first, second = (torch.empty(4, dtype=dtype) for _ in range(2))
        works = [
            dist.isend(values(rank, (4,), dtype), after, tag=1),
            dist.isend(values(rank + 5, (4,), dtype), after, tag=2),
            dist.irecv(second, before, tag=2),  # not in the order of sending
            dist.irecv(first, before, tag=1),
        ]
        for work in works:
            work.wait()
        check(first, values(before, (4,), dtype))
        check(second, values(before + 5, (4,), dtype))
    if rank == 0 and IS_GROUP:
        seen = set()
        for _ in range(size - 1):
            tensor = torch.empty(3)
            sender = dist.recv(tensor)
            seen.add(sender)
            check(tensor, values(sender, (3,), torch.float32))
        assert seen == set(range(1, size)), seen
    elif IS_GROUP:
        dist.send(values(rank, (3,), torch.float32), 0)
    dist.barrier()  # what comes next may overtake what others sent to anybody


@case
def objects(rank, size):
    got = [None] * size
    dist.all_gather_object(got, {"rank": rank, "more": [1, "x"] * rank})
    assert got == [{"rank": r, "more": [1, "x"] * r} for r in range(size)], got
    some = [rank, "root"] if rank == 1 else [None, None]
    dist.broadcast_object_list(some, src=1)
    assert some == [1, "root"]
    one = [None]
    dist.scatter_object_list(one, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert one == [f"for {rank}"]
    got = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, got, dst=0)
    assert rank or got == [r * 10 for r in range(size)]
    if rank == 0:
        dist.send_object_list([1, "a"], dst=1)
    elif rank == 1:
        got = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == [1, "a"]


# ---- works and futures


@case
def futures(rank, size):
    tensor = values(rank, (3,), torch.float32)
    want = reduced(Op.SUM, (3,), torch.float32, size)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    check(future.wait()[0], want)
    if IS_GROUP:
        assert work.result()[0] is tensor
        assert work.exception() is None

    def again(done):
        """Wait, in a callback, for another operation, its future too."""
        other = done.value()[0].clone()
        return dist.all_reduce(other, async_op=True).get_future().wait()[0]

    work = dist.all_reduce(values(rank, (3,), torch.float32), async_op=True)
    check(work.get_future().then(again).wait(), size * want)
    outs = [torch.empty(2) for _ in range(size)]  # nobody waits for it or keeps it
    dist.all_gather(outs, values(rank, (2,), torch.float32), async_op=True)
    dist.barrier()
    late = dist.all_gather([torch.empty(2)] * size, torch.ones(2), async_op=True)
    late.wait(timedelta(seconds=20))


@case
def refusals(rank, size):
    wrong = {"sparse": torch.eye(3).to_sparse()}
    if IS_GROUP:  # else torch takes it for an operation without values
        wrong["meta"] = torch.empty(3, device="meta")
    for text, tensor in wrong.items():
        for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0)):
            assert text in refused(call, tensor)
    assert "float8" in refused(dist.all_reduce, torch.zeros(3, dtype=torch.float8_e4m3fn))
    model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    assert "sparse=false" in refused(lambda: model(torch.tensor([1, 2])).sum().backward())
    dist.barrier()


# ---- groups


@case
def groups(rank, size):
    pairs = [dist.new_group([r, (r + 1) % size]) for r in range(size)]
    for first, group in enumerate(pairs):
        members = sorted({first, (first + 1) % size})
        if rank in members:
            tensor = values(rank, (3,), torch.float32)
            dist.all_reduce(tensor, group=group)
            check(tensor, sum(values(r, (3,), torch.float32) for r in members))
            assert dist.get_rank(group) == members.index(rank)
    same = [dist.new_group() for _ in range(2)]
    works = []
    for turn in (0, 1) if rank else (1, 0):  # two groups of the same ranks keep apart
        tensor = torch.full((2,), float(turn + 1))
        works.append((turn, tensor, dist.all_reduce(tensor, group=same[turn], async_op=True)))
    for turn, tensor, work in works:
        work.wait()
        check(tensor, torch.full((2,), float(size * (turn + 1))))
    for group in pairs:
        if (
            rank in dist.get_process_group_ranks(group)
            if group != dist.GroupMember.NON_GROUP_MEMBER
            else False
        ):
            dist.destroy_process_group(group)
    gloo = dist.new_group(backend="gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=gloo)
    assert tensor.item() == size
    dist.barrier()


@case
def mesh(rank, size):
    flat = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=flat.get_group("tp"))
    check(tensor, torch.full((3,), float(size)))
    dist.all_reduce(tensor, group=flat.get_group("dp"))
    check(tensor, torch.full((3,), float(size)))


@case
def functional(rank, size):
    world = dist.group.WORLD
    tensor = values(rank, (4, 3), torch.float32)
    want = reduced(Op.SUM, (4, 3), torch.float32, size)
    check(funcol.wait_tensor(funcol.all_reduce(tensor, "sum", world)), want)
    check(tensor, values(rank, (4, 3), torch.float32))
    everything = torch.cat([values(r, (4, 3), torch.float32) for r in range(size)])
    check(funcol.wait_tensor(funcol.all_gather_tensor(tensor, 0, world)), everything)
    mine = funcol.reduce_scatter_tensor(everything, "avg", 0, world)
    check(funcol.wait_tensor(mine), tensor)
    check(funcol.wait_tensor(funcol.broadcast(tensor, 1, world)), values(1, (4, 3), torch.float32))
    both = funcol.all_reduce_coalesced([tensor, tensor + 1], "sum", world)
    check(funcol.wait_tensor(both[1]), want + size)
    moved = funcol.all_to_all_single(everything, None, None, world)
    check(funcol.wait_tensor(moved), torch.cat([tensor] * size))


@case
def compiled(rank, size):
    def program(x):
        y = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        return funcol.all_gather_tensor(y + 1, 0, dist.group.WORLD)

    tensor = values(rank, (4,), torch.float32)
    got = torch.compile(program, fullgraph=True, backend="aot_eager")(tensor)
    want = 2 * reduced(Op.SUM, (4,), torch.float32, size) + 1
    check(got, torch.cat([want] * size))


@case
def gathered_in_place(rank, size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for make in (
        torch.empty,
        lambda count: backend.allocate_tensor(
            count, dtype=torch.float32, device=torch.device("cpu")
        ),
    ):
        every = make(5 * size)
        mine = every[5 * rank : 5 * rank + 5]
        mine.fill_(rank + 1)
        dist.all_gather_into_tensor(every, mine)
        check(every, torch.arange(1.0, size + 1).repeat_interleave(5))
        shifted = every[1:6]  # not where it is to land: as it was
        others = [torch.empty(5) for _ in range(size)]
        dist.all_gather(others, shifted)
        want = every[1:6].clone()
        dist.all_gather_into_tensor(every, shifted)
        check(every, want.repeat(size))


if __name__ == "__main__":
    for name in (
        "programs_torch_trained", "programs_torch_built_on", "programs_torch_written"
    ):  # fmt: skip
        importlib.import_module(name)  # the cases there come after these
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
