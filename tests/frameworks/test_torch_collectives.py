# SPDX-License-Identifier: Apache-2.0
"""The operations on torch tensors in real jobs, compared with torch in one process."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "cluster"))

from job import run_workers  # noqa: E402

from aids import device  # noqa: E402

CHECKS = """
import argparse
from collections import OrderedDict, namedtuple
from pathlib import Path

import torch
import fastps.torch as hvd

if PLACE != "cpu":
    from aids import device
    device.load()
    torch.set_default_device(PLACE)
namedtuple_of = namedtuple("namedtuple_of", "x y")
torch.set_num_threads(1)

def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return
    raise SystemExit(f"no {kind.__name__}: {words}")

def of(rank, *shape):
    generator = torch.Generator("cpu").manual_seed(rank + 100 * len(shape))
    return torch.randint(-9, 9, shape, generator=generator, device="cpu").float().to(PLACE)

def sums(members, **how):
    me, size = hvd.rank(), len(members)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex64):
        for shape in [(), (0,), (3, 5), (20_000,)]:
            total = sum(of(rank, *shape) for rank in members).to(dtype)
            x = of(me, *shape).to(dtype)
            assert torch.equal(hvd.allreduce(x, op=hvd.Sum, **how), total), (dtype, shape)
            assert hvd.allreduce_(x, op=hvd.Sum, **how) is x
            assert torch.equal(x, total), (dtype, shape)
    largest = torch.stack([of(rank, 7) for rank in members]).amax(0)
    for name in (None, "largest"):
        assert torch.equal(hvd.allreduce(of(me, 7), name=name, op=hvd.Max, **how), largest)
    total = sum(of(rank, 4, 6) for rank in members)
    scaled = dict(prescale_factor=2.0, postscale_factor=0.5)
    handle = hvd.allreduce_async(of(me, 4, 6), False, "scaled", **scaled, **how)
    assert torch.equal(hvd.synchronize(handle), total) and hvd.poll(handle)
    x = of(me, 4, 6).t()
    assert torch.equal(hvd.allreduce_(x, name="turned", op=hvd.Sum, **scaled, **how), total.t())
    x = of(me, 4, 6)
    assert torch.equal(hvd.allreduce_(x, op=hvd.Sum, **scaled, **how), total)
    for name in (None, "two"):
        pair = hvd.grouped_allreduce([of(me, 4, 6), of(me, 7)], False, name, **how)
        assert torch.equal(pair[0], total)
        pair = [of(me, 4, 6), of(me, 7)]
        found = hvd.grouped_allreduce_(pair, False, name, **how)
        assert found[0] is pair[0] and torch.equal(pair[0], total)
    half = hvd.allreduce(of(me, 8), compression=hvd.Compression.fp16, op=hvd.Sum, **how)
    assert half.dtype is torch.float32
    for count in (2, 3):
        again = hvd.allreduce(torch.ones(count), name="again", op=hvd.Sum, **how)
        assert again.tolist() == [size] * count

def rows(members, **how):
    me, size, place = hvd.rank(), len(members), members.index(hvd.rank())
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
        whole = torch.cat([of(rank, rank + 1, 3) for rank in members]).to(dtype)
        assert torch.equal(hvd.allgather(of(me, me + 1, 3).to(dtype), **how), whole)
    words = torch.full((2, 1), 0xFF00 + me, dtype=torch.int32).to(torch.uint16)
    found = hvd.allgather(words, **how), hvd.broadcast(words, members[-1], **how)
    assert [one.dtype for one in found] == [torch.uint16] * 2
    assert found[0].cpu().numpy()[::2, 0].tolist() == [0xFF00 + rank for rank in members]
    assert found[1].cpu().numpy()[:, 0].tolist() == [0xFF00 + members[-1]] * 2
    assert hvd.allgather(torch.tensor(me), **how).tolist() == members
    both = hvd.grouped_allgather([torch.ones(me), torch.zeros(1, 2)], "both", **how)
    assert both[0].shape == (sum(members),) and both[1].shape == (size, 2)
    total = sum(of(rank, 2 * size + 1, 2) for rank in members)
    mine = torch.tensor_split(total, size)[place]
    assert torch.equal(hvd.reducescatter(of(me, 2 * size + 1, 2), op=hvd.Sum, **how), mine)
    pair = hvd.grouped_reducescatter([of(me, 2 * size + 1, 2)] * 2, op=hvd.Sum, **how)
    assert torch.equal(pair[1], mine)
    leaves = [of(me, 2 * size + 1, 2).requires_grad_(), torch.ones(size, requires_grad=True)]
    gathered = hvd.grouped_allgather(leaves, "leaves", **how)
    (gathered[0].sum() * (1 + place) + gathered[1].sum()).backward()
    assert torch.equal(leaves[0].grad, torch.full((2 * size + 1, 2), (1 + size) / 2))
    assert torch.equal(leaves[1].grad, torch.ones(size))
    parts = hvd.grouped_reducescatter(leaves, op=hvd.Sum, **how)
    (parts[0].sum() * (1 + place)).backward()
    weights = torch.cat([torch.full(part.shape, 1.0 + i) for i, part in
                         enumerate(torch.tensor_split(total, size))])
    assert torch.equal(leaves[0].grad - (1 + size) / 2, size * weights)
    whole = torch.cat([of(rank, rank + 1, 3) for rank in members])
    for dtype in (torch.bfloat16, torch.complex64):
        found = hvd.gather(of(me, me + 1, 3).to(dtype), members[-1], **how)
        assert found is None if place != size - 1 else torch.equal(found, whole.to(dtype))
        found = hvd.reduce_to(of(me, 4).to(dtype), members[0], op=hvd.Sum, **how)
        summed = sum(of(rank, 4) for rank in members).to(dtype)
        assert found is None if place else torch.equal(found, summed)
        table = torch.arange(size * 4).reshape(size, 2, 2).to(dtype)
        own = torch.empty(2, 2, dtype=dtype).t()
        assert hvd.scatter(table if place == 0 else None, own, members[0], **how) is own
        assert torch.equal(own, table[place])
    splits = torch.arange(size)
    x = torch.full((int(splits.sum()), 2), me, dtype=torch.int16)
    found, received = hvd.alltoall(x, splits, **how)
    assert received.tolist() == [place] * size
    assert found[:, 0].tolist() == [rank for rank in members for _ in range(place)]
    raises(TypeError, "must be integers",
           lambda: hvd.alltoall(torch.arange(size), torch.full((size,), 0.5), **how))
    even = hvd.synchronize(hvd.alltoall_async(torch.arange(size) + 10 * me, **how))
    assert even.tolist() == [place + 10 * rank for rank in members]

def moves(members, **how):
    me, size, place = hvd.rank(), len(members), members.index(hvd.rank())
    root = members[-1]
    for name in (None, "moved"):
        x = of(me, 3, 4).t()
        y = hvd.broadcast(x, root, name, **how)
        assert torch.equal(y, of(root, 3, 4).t()) and torch.equal(x, of(me, 3, 4).t())
        assert hvd.broadcast_(x, root, name, **how) is x and torch.equal(x, y)
    bits = torch.tensor([1 + 2j, me]).conj()
    assert hvd.synchronize(hvd.broadcast_async_(bits, root, **how)).tolist() == [1 - 2j, root]
    if size > 1:
        after, before = members[(place + 1) % size], members[place - 1]
        handle = hvd.send_async(torch.full((5,), me, dtype=torch.bfloat16), after, 3, **how)
        x = torch.empty(5, dtype=torch.bfloat16)
        assert (hvd.receive(x, before, 3, **how) == before).all()
        hvd.synchronize(handle)
    assert hvd.allgather_object({"rank": me}, **how) == [{"rank": rank} for rank in members]
    assert hvd.broadcast_object([me], root, **how) == [root]
    if not how:
        value = OrderedDict(shape=torch.Size([me, 2]), kind=torch.float16, where=Path(f"/{me}"),
                            both=namedtuple_of(torch.full((2,), me), argparse.Namespace(lr=me)))
        got = hvd.broadcast_object(value, root)
        assert type(got) is OrderedDict and type(got["both"]) is namedtuple_of
        assert type(got["shape"]) is torch.Size and got["shape"] == (root, 2)
        assert (got["kind"], got["where"]) == (torch.float16, Path(f"/{root}"))
        assert got["both"].x.tolist() == [root] * 2 and got["both"].y.lr == root
    hvd.barrier(**how)

def gradients(members, **how):
    me, size, place = hvd.rank(), len(members), members.index(hvd.rank())
    weights = torch.arange(6.0).reshape(3, 2)
    def gradient_of(x, make):
        x = x.clone().requires_grad_()
        output = make(x)
        (output * torch.arange(1.0, output.numel() + 1).reshape(output.shape)).sum().backward()
        return x.grad
    ones = torch.arange(1.0, 7).reshape(3, 2)
    x = of(me, 3, 2)
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        found = gradient_of(x, lambda x: hvd.allreduce(x, op=op, **how))
        assert torch.equal(found, ones * factor)
    found = gradient_of(x, lambda x: hvd.grouped_allreduce([x, x * 2], False, **how)[1])
    assert torch.equal(found, ones * 2 * size)
    counted = torch.arange(1.0, 2 * sum(r + 1 for r in members) + 1).reshape(-1, 2)
    start = sum(r + 1 for r in members[:place])
    found = gradient_of(of(me, me + 1, 2), lambda x: hvd.allgather(x, **how))
    assert torch.equal(found, counted[start : start + me + 1])
    found = gradient_of(x, lambda x: hvd.broadcast(x, members[0], **how))
    assert torch.equal(found, ones if place == 0 else ones * 0)
    found = gradient_of(of(me, size, 2), lambda x: hvd.reducescatter(x, **how))
    assert torch.equal(found, torch.tensor([[1.0, 2.0]] * size))
    found = gradient_of(of(me, size), lambda x: hvd.alltoall(x, [1] * size, **how)[0])
    assert torch.equal(found, torch.full((size,), place + 1.0))

def sparse(members, **how):
    me, size = hvd.rank(), len(members)
    dense = 0
    for op in (hvd.Sum, hvd.Average):
        tables = []
        for rank in members:
            table = torch.nn.Embedding(10, 2, sparse=True)
            torch.nn.init.ones_(table.weight)
            table(torch.tensor([rank, 5, 5])).sum().mul(rank + 1).backward()
            tables.append(table.weight.grad)
        own = tables[members.index(me)]
        total = sum(table.to_dense() for table in tables) / (size if op is hvd.Average else 1)
        for found in (hvd.allreduce(own, op=op, **how),
                      hvd.synchronize(hvd.sparse_allreduce_async(own, "table", op, **how)),
                      hvd.sparse_allreduce_async(own, None, op, **how)()):
            assert found.is_sparse and found.is_coalesced()
            assert torch.equal(found.to_dense(), total)
            assert found._nnz() == len({*members, 5})
    empty = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.long), torch.empty(0), (4,))
    assert hvd.allreduce(empty, **how)._nnz() == 0

def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 200), torch.nn.Tanh())

def training(members, **how):
    me, size = hvd.rank(), len(members)
    for op in (hvd.Average, hvd.Sum):
        model, alone = model_of(me), model_of(members[0])
        hvd.broadcast_parameters(model.state_dict(), members[0], prefix=f"{op} {how}", **how)
        one = torch.optim.SGD(alone.parameters(), lr=0.1)
        all_of_us = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op,
            prefix=f"{op} {members}.", **how)
        for step in range(3):
            one.zero_grad()
            for rank in members:
                (alone(of(rank + step, 5, 4)).square().mean()
                 / (size if op is hvd.Average else 1)).backward()
            one.step()
            all_of_us.zero_grad()
            model(of(me + step, 5, 4)).square().mean().backward()
            all_of_us.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)

def tables(members, **how):
    me, size = hvd.rank(), len(members)
    for rows in (10, 40_000):  # in a bucket, and by itself
        table, alone = (torch.nn.Embedding(rows, 2, sparse=kind) for kind in (True, False))
        for one in (table, alone):
            torch.nn.init.ones_(one.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1), prefix=f"{rows} {members}.",
            sparse_as_dense=True, gradient_predivide_factor=2.0, num_groups=1, **how)
        for step in range(2):
            for rank in members:
                (alone(torch.tensor([rank + step, 5, 5])).square().sum() / size).backward()
            torch.optim.SGD(alone.parameters(), lr=1).step()
            alone.zero_grad()
            table(torch.tensor([me + step, 5, 5])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(table.weight, alone.weight)

hvd.init()
size = hvd.size()
checks = (sums, rows, moves, gradients, training)
if PLACE == "cpu":  # the test device has no gradients of sparse tables
    checks += (sparse, tables)
for check in checks:
    check(list(range(size)))
some = hvd.add_process_set([0, size - 1])
if some.included():
    for check in checks:
        check(some.ranks, process_set=some)
else:
    raises(ValueError, "worker 1 is not in process set [0, 2]",
           lambda: hvd.allreduce(torch.ones(1), process_set=some))
    optimizer = torch.optim.SGD(model_of(0).parameters(), lr=1)
    assert hvd.DistributedOptimizer(optimizer, process_set=some) is optimizer  # it is its own
one = torch.ones(1)
for call in (
    hvd.allreduce, hvd.gather, lambda *a, **how: hvd.send(one, 0, **how),
    lambda *a, **how: hvd.receive(one, **how), lambda *a, **how: hvd.scatter(one, one, **how),
    lambda *a, **how: hvd.DistributedOptimizer(
        torch.optim.SGD(model_of(0).parameters(), lr=1), **how),
):
    raises(TypeError, "must be a ProcessSet", lambda: call(one, process_set=None))
raises(RuntimeError, "cannot forget", lambda: hvd.forget("nothing"))
raises(ValueError, "op=Average", lambda: hvd.DistributedOptimizer(
    torch.optim.SGD(model_of(0).parameters(), lr=1), op=hvd.Sum, gradient_predivide_factor=2.0))
raises(ValueError, "not both", lambda: hvd.allreduce(torch.ones(1), True, op=hvd.Sum))
raises(ValueError, "op must be one of", lambda: hvd.allreduce(torch.ones(1), op="sum"))
raises(TypeError, "complex", lambda: hvd.allreduce(torch.ones(1) * 1j, op=hvd.Max))
raises(TypeError, "for integers", lambda: hvd.allreduce(torch.ones(1), op=hvd.BAND))
raises(ValueError, "result of autograd",
       lambda: hvd.allreduce_(torch.ones(1, requires_grad=True) * 2))
hvd.barrier()
hvd.shutdown()
"""


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("place", ["cpu", "testdev:1"])
def test_operations_equal_one_process(servers, place, tmp_path):
    if place != "cpu":
        device.build_or_skip()
    program = f"import sys; sys.path.insert(0, {str(TESTS)!r})\nPLACE = {place!r}\n{CHECKS}"
    result = run_workers(textwrap.dedent(program), tmp_path, workers=3, servers=servers)
    assert result.returncode == 0, result
