# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_operations.py do: the operations as users call them."""

from __future__ import annotations

from functools import reduce as fold

import numpy as np
import pytest
from programs_collectives import OPS, array_of, shared

import fastps
from fastps.errors import MismatchError


def rows_of(rank: int, rows: int, dtype: str = "float32") -> np.ndarray:
    """Make rows of three that a worker brings."""
    return array_of(rank, rows * 3, dtype).reshape(rows, 3)


def sums(members: list[int], **options) -> None:
    """Compare all-reduce, its factors and its forms with NumPy."""
    me, size = fastps.rank(), len(members)
    for dtype, op in (("float32", fastps.Sum), ("int32", fastps.BXOR), ("float64", fastps.Max)):
        arrays = [array_of(rank, 1000, dtype).reshape(10, 100) for rank in members]
        total = fold(OPS[op], arrays)
        own = arrays[members.index(me)]
        assert np.array_equal(fastps.allreduce(own, op=op, **options), total)
        lent = shared(own)
        assert fastps.allreduce(lent, f"in place {op}", op=op, out=lent, **options) is lent
        assert np.array_equal(lent, total)
        root = members[-1]
        found = fastps.reduce_to(own, root, op=op, **options)
        assert found is None if me != root else np.array_equal(found, total)
    ours = np.full((2, 2), me + 1, np.int64)
    total = sum(rank + 1 for rank in members)
    scaled = {"prescale_factor": 2.5, "postscale_factor": 0.5}
    found = fastps.allreduce(ours, op=fastps.Sum, **scaled, **options)
    assert (found == int(sum(int((rank + 1) * 2.5) for rank in members) * 0.5)).all()
    half = fastps.allreduce(ours.astype(np.float16), **scaled, **options)
    assert np.allclose(half, total / size * 1.25, rtol=1e-3)
    whirl = fastps.allreduce((ours * (1 + 2j)).astype(np.complex64), op=fastps.Sum, **options)
    assert (whirl == total * (1 + 2j)).all()
    fused = [np.full(rows, me, np.float32) for rows in range(1, 30)]
    before = [fastps.statistics().get("messages", 0)]
    for arrays in (fused[:1], fused):
        found = fastps.grouped_allreduce(arrays, op=fastps.Sum, **options)
        assert all((one == sum(members)).all() for one in found)
        assert [one.shape for one in found] == [one.shape for one in arrays]
        before.append(fastps.statistics().get("messages", 0))
    assert before[2] - before[1] == before[1] - before[0], before  # all of them went as one
    large = [np.full(70_000, me, np.float32), np.full(3, me, np.float32)]
    found = fastps.grouped_allreduce(large, "large", op=fastps.Max, **options)
    assert [int(one[0]) for one in found] == [max(members)] * 2
    several = [ours, ours.astype(np.float32), np.float64(me)]
    for name in (None, "several"):
        found = fastps.grouped_allreduce(several, name, op=fastps.Sum, **options)
        assert [one.dtype for one in found] == [np.int64, np.float32, np.float64]
        assert (found[0] == total).all()
        assert found[2] == sum(members)


def rows(members: list[int], **options) -> None:
    """Compare what has rows of different number with NumPy."""
    me, size = fastps.rank(), len(members)
    everything = np.concatenate([rows_of(rank, rank + 2) for rank in members])
    own = rows_of(me, me + 2)
    for name in (None, "rows"):
        handle = fastps.allgather_async(own, name, **options)
        assert np.array_equal(fastps.synchronize(handle), everything)
        assert fastps.poll(handle)
        both = fastps.grouped_allgather([own, own[:0]], name, **options)
        assert np.array_equal(both[0], everything)
        assert both[1].shape == (0, 3)
    found = fastps.gather(own, members[0], **options)
    assert found is None if me != members[0] else np.array_equal(found, everything)
    scalars = fastps.allgather(np.complex128(me + 1j), **options)
    assert np.array_equal(scalars, np.array(members) + 1j)
    splits = [place + me % 2 for place in range(size)]
    block, received = fastps.alltoall(rows_of(me, sum(splits)), splits, **options)
    place = members.index(me)
    starts = [sum(other + rank % 2 for other in range(place)) for rank in members]
    counts = [place + rank % 2 for rank in members]
    assert received.tolist() == counts
    wanted = [
        rows_of(rank, sum(other + rank % 2 for other in range(size)))[start : start + count]
        for rank, start, count in zip(members, starts, counts, strict=True)
    ]
    assert np.array_equal(block, np.concatenate(wanted))
    even = fastps.alltoall(np.arange(size) + 10 * me, name="even", **options)
    assert even.tolist() == [place + 10 * rank for rank in members]
    arrays = [rows_of(rank, 2 * size + 1) for rank in members]
    total = sum(arrays)
    cut = np.array_split(total, size)  # the first get one more
    part = fastps.reducescatter(arrays[place], op=fastps.Sum, **options)
    assert np.array_equal(part, cut[place])
    pair = fastps.grouped_reducescatter([arrays[place]] * 2, "pair", op=fastps.Sum, **options)
    assert all(np.array_equal(one, part) for one in pair)


def moves(members: list[int], **options) -> None:
    """Compare broadcasts, scatter, messages and objects."""
    me, size = fastps.rank(), len(members)
    place = members.index(me)
    for name in (None, "moved"):
        own = np.full(3, me)
        assert fastps.broadcast(own, members[-1], name=name, **options) is own
        assert (own == members[-1]).all()
    several = [np.full(2, me), np.full(1, me + 0.5)]
    fastps.broadcast(several, members[0], **options)
    assert several[1] == members[0] + 0.5
    table = np.arange(size * 4).reshape(size, 4)
    part = fastps.scatter(table if place == 0 else None, np.empty(4, int), members[0], **options)
    assert np.array_equal(part, table[place])
    after, before = members[(place + 1) % size], members[place - 1]
    if size > 1:
        handle = fastps.send_async(np.full(5, me), after, tag=7, **options)
        assert (fastps.receive(np.empty(5, int), before, tag=7, **options) == before).all()
        fastps.synchronize(handle)
    objects = fastps.allgather_object({"me": (me, "x" * me)}, **options)
    assert objects == [{"me": (rank, "x" * rank)} for rank in members]
    with pytest.raises(TypeError, match=f"worker {members[0]} could not send"):
        fastps.allgather_object(object() if place == 0 else 1, **options)
    assert fastps.broadcast_object(me, members[-1], **options) == members[-1]
    fastps.barrier(**options)


def names_again() -> None:
    """Use a name again with another shape, and with another dtype."""
    for count in (3, 5, 3):
        for dtype in (np.float32, np.int64):
            own = np.full(count, fastps.rank(), dtype)
            found = fastps.allreduce(own, "again", op=fastps.Sum)
            assert (found == sum(range(fastps.size()))).all()
            assert found.shape == (count,)


def misuse() -> None:
    """Get errors that name set and rank, on all workers, and go on."""
    me, size = fastps.rank(), fastps.size()
    with pytest.raises(ValueError, match=r"ranks \[0, 99\] must be different"):
        fastps.add_process_set([0, 99])
    with pytest.raises(MismatchError, match=r"worker 1 add_process_set\(ProcessSet\(\[1\]\)\)"):
        fastps.add_process_set([me])
    with pytest.raises(ValueError, match="not registered"):
        fastps.allreduce(np.ones(1), process_set=fastps.ProcessSet([0]))
    last = fastps.add_process_set([size - 1])
    assert last.included() == (me == size - 1)
    if not last.included():
        with pytest.raises(ValueError, match=rf"worker {me} is not in process set \[{size - 1}\]"):
            fastps.allreduce(np.ones(1), process_set=last)
        with pytest.raises(ValueError, match="is not in process set"):
            last.rank()
    else:
        with pytest.raises(ValueError, match=r"root_rank 0 is not in process set"):
            fastps.broadcast(np.ones(1), 0, process_set=last)
    with pytest.raises(ValueError, match="exists already"):
        fastps.add_process_set(last)
    assert fastps.remove_process_set(last)
    assert not fastps.remove_process_set(last)
    assert not fastps.remove_process_set(fastps.global_process_set)
    with pytest.raises(TypeError, match="complex"):
        fastps.allreduce(np.ones(1, np.complex64), op=fastps.Max)
    with pytest.raises(ValueError, match="splits"):
        fastps.alltoall(np.ones(size + 1), [1] * size)
    with pytest.raises(TypeError, match=r"splits must be integers, .*1\.5"):
        fastps.alltoall(np.ones(size), [1.5] * size)
    own = np.ones((2, 2 + (me == 0)))
    with pytest.raises(MismatchError):
        fastps.allgather(own)


def everything() -> str:
    """Run all of it, on all workers and on some."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    for check in (sums, rows, moves):
        check(list(range(size)))
    assert fastps.global_process_set.ranks == list(range(size))
    assert fastps.global_process_set.rank() == me
    if size > 2:
        ends = fastps.add_process_set([size - 1, 0])
        rest = fastps.add_process_set(fastps.ProcessSet(range(1, size)))
        assert (ends.ranks, ends.size()) == ([0, size - 1], 2)
        for some in (ends, rest):
            if some.included():
                assert some.ranks[some.rank()] == me
                for check in (sums, rows, moves):
                    check(some.ranks, process_set=some)
        names_again()
        misuse()
        assert fastps.remove_process_set(ends)
        assert fastps.remove_process_set(rest)
    fastps.barrier()
    fastps.shutdown()
    return "done"


def adasum_of(vectors: list[np.ndarray]) -> np.ndarray:
    """Compute Adasum from its definition."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum_of(vectors[:half]), adasum_of(vectors[half:])
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


def adasum() -> str:
    """Compare Adasum of four workers, and of a set of two, with its definition."""
    fastps.init()
    me = fastps.rank()
    vectors = [np.random.default_rng(rank).standard_normal(1000) for rank in range(4)]
    ends = fastps.add_process_set([1, 3])
    for _ in range(2):
        found = fastps.allreduce(vectors[me], op=fastps.Adasum)
        assert np.allclose(found, adasum_of(vectors), rtol=1e-12)
        several = [vectors[me], 2 * vectors[me].astype(np.float32), np.zeros((2, 1))]
        found = fastps.grouped_allreduce(several, "several", op=fastps.Adasum)
        assert np.allclose(found[0], adasum_of(vectors), rtol=1e-12)
        assert np.allclose(found[1], 2 * adasum_of(vectors), rtol=1e-4, atol=1e-4)
        assert (found[2].shape, found[2].any()) == ((2, 1), False)
        if ends.included():
            found = fastps.allreduce(vectors[me], op=fastps.Adasum, process_set=ends)
            assert np.allclose(found, adasum_of(vectors[1::2]), rtol=1e-12)
    fastps.shutdown()
    return "done"
