# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_collectives.py do."""

from __future__ import annotations

import itertools
import threading
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

import fastps
from fastps.collectives import schedule
from fastps.collectives.group import Group
from fastps.errors import MismatchError
from fastps.session import current
from fastps.types import DType, Op

WAIT_S = 60.0
COUNTS = (0, 1, 3, 1000, 33_000, 400_007)  # small, unasked, asked for, in several chunks
OPS = {
    Op.SUM: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}
FLOATS = (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)
CASES = [
    *itertools.product(("float32", "float64"), FLOATS),
    *itertools.product(("int32", "uint8"), OPS),
    ("int64", Op.MAX), ("uint16", Op.MAX), ("int16", Op.SUM), ("int8", Op.BXOR), ("bool", Op.BOR),
]  # fmt: skip


def array_of(rank: int, count: int, dtype: str = "float32", salt: int = 0) -> np.ndarray:
    """Make what a worker brings."""
    numbers = np.random.default_rng([rank, count, salt]).integers(-9, 9, count)
    return (numbers * 1.25 if dtype.startswith("float") else numbers).astype(dtype)


def shared(array: np.ndarray) -> np.ndarray:
    """Give an array in memory that other ranks reach."""
    copy = fastps.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def cuts(count: int, size: int) -> list[int]:
    """Cut unevenly, so that some have nothing."""
    counts = [count // size * (member % 3) // 2 for member in range(size)]
    counts[-1] += count - sum(counts)
    return counts


def reductions(group: Group, where, count: int, dtype: str, op: Op) -> None:
    """Compare what sums with NumPy, also in place."""
    arrays = [array_of(rank, count, dtype) for rank in range(group.size)]
    total = reduce(OPS[op], arrays).astype(dtype)
    own = where(arrays[group.rank])
    assert np.array_equal(group.allreduce(own, op=op).wait(WAIT_S), total)
    blocks = cuts(count, group.size)
    start = sum(blocks[: group.rank])
    part = group.reducescatter(own, counts=blocks, op=op).wait(WAIT_S)
    assert np.array_equal(part, total[start : start + blocks[group.rank]])
    root = group.size - 1
    found = group.reduce(own, root=root, op=op).wait(WAIT_S)
    assert np.array_equal(found, total if group.rank == root else arrays[group.rank])
    group.allreduce(own, own, op=op).wait(WAIT_S)
    assert np.array_equal(own, total)


def averages(group: Group, where) -> None:
    """Divide as a sum does: floats by multiplication, integers rounded down; half types too."""
    size = group.size
    own = where(np.full(5, 3 * group.rank + 1, np.int64))
    total = sum(3 * rank + 1 for rank in range(size))
    assert (group.allreduce(own).wait(WAIT_S) == total // size).all()
    half = where(np.full(70_000, 0x3F80, np.uint16))  # 1.0
    out = group.allreduce(half, op=Op.SUM, dtype=DType.BFLOAT16).wait(WAIT_S)
    assert ((out.astype(np.uint32) << 16).view(np.float32) == size).all()


def moves(group: Group, where, count: int) -> None:
    """Compare what moves bytes with NumPy."""
    size, me = group.size, group.rank
    arrays = [array_of(rank, count, "int32") for rank in range(size)]
    own, everything = where(arrays[me]), np.concatenate(arrays)
    assert np.array_equal(group.allgather(own).wait(WAIT_S), everything)
    found = group.gather(own, root=size - 1).wait(WAIT_S)
    assert me != size - 1 or np.array_equal(found, everything)
    out = where(np.zeros(count, np.int32))
    group.scatter(where(everything) if me == 1 % size else None, out, root=1 % size).wait(WAIT_S)
    assert np.array_equal(out, arrays[me])
    lent = where(arrays[me])
    group.broadcast(lent, root=size // 2).wait(WAIT_S)
    assert np.array_equal(lent, arrays[size // 2])
    blocks = [where(array_of(me, count, "int32", salt=other)) for other in range(size)]
    found = group.alltoall(where(np.concatenate(blocks))).wait(WAIT_S)
    mine = [array_of(other, count, "int32", salt=me) for other in range(size)]
    assert np.array_equal(found, np.concatenate(mine))


def uneven(group: Group, where, count: int) -> None:
    """Let members have blocks of different sizes."""
    size, me = group.size, group.rank
    counts = cuts(count, size)
    arrays = [array_of(rank, counts[rank]) for rank in range(size)]
    own = where(arrays[me])
    found = group.allgather(own, counts=counts).wait(WAIT_S)
    assert np.array_equal(found, np.concatenate(arrays))
    out = where(
        np.concatenate([own if i == me else np.zeros_like(a) for i, a in enumerate(arrays)])
    )
    there = out[sum(counts[:me]) :][: counts[me]]  # where it is to land
    group.allgather(there, out, counts=counts).wait(WAIT_S)
    assert np.array_equal(out, np.concatenate(arrays))
    sends = [[(i + 2 * j) % 3 * (count // 7) for j in range(size)] for i in range(size)]
    receives = [sends[other][me] for other in range(size)]
    brought = [array_of(i, sum(sends[i]), "int64") for i in range(size)]
    out = where(np.empty(sum(receives), np.int64))
    handle = group.alltoall(
        where(brought[me]), out, send_counts=sends[me], receive_counts=receives
    )
    starts = [sum(sends[i][:me]) for i in range(size)]
    wanted = [brought[i][starts[i] : starts[i] + sends[i][me]] for i in range(size)]
    assert np.array_equal(handle.wait(WAIT_S), np.concatenate(wanted))


def letters(group: Group, where, count: int) -> None:
    """Send to both neighbours, under several tags, in another order than received."""
    size, me = group.size, group.rank
    after, before = (me + 1) % size, (me - 1) % size
    sent = [group.send(where(array_of(me, count, salt=tag)), after, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        out = where(np.empty(count, np.float32))
        handle = group.receive(out, None if tag == 1 else before, tag=tag)
        assert np.array_equal(handle.wait(WAIT_S), array_of(before, count, salt=tag))
        assert handle.source == before
    for handle in sent:
        handle.wait(WAIT_S)


def everything(counts: tuple[int, ...] = COUNTS) -> list[int]:
    """Run every operation, with private and shared arrays, on all workers and on some."""
    fastps.init()
    world = current.current().groups.world
    for where in (np.copy, shared):
        for count in counts:
            for dtype, op in CASES if count == 1000 else CASES[:1]:
                reductions(world, where, count, dtype, op)
            moves(world, where, count)
            uneven(world, where, count)
            letters(world, where, count) if world.size > 1 else None
        averages(world, where)
    world.barrier().wait(WAIT_S)
    statistics = fastps.statistics()
    fastps.shutdown()
    return [int(statistics.get("messages", 0)), int(statistics.get("message_bytes", 0))]


def _sequence(group: Group, seed: int, steps: int, delays: threading.Event) -> None:
    """Start operations of random kinds and sizes, several in flight; the same on all members."""
    order = np.random.default_rng(seed)
    own = np.random.default_rng([seed, group.rank])
    in_flight = []
    for step in range(steps):
        kind, count = order.integers(0, 4), int(order.choice(COUNTS))
        arrays = [array_of(rank, count, salt=step) for rank in group.ranks]
        mine = arrays[group.rank]
        name = f"{seed} {step}" if order.integers(0, 2) else None
        if kind == 0:
            in_flight.append((group.allreduce(mine, op=Op.SUM, name=name), sum(arrays)))
        elif kind == 1:
            in_flight.append((group.allgather(mine, name=name), np.concatenate(arrays)))
        elif kind == 2:
            root = int(order.integers(0, group.size))
            in_flight.append((group.broadcast(mine, root=root, name=name), arrays[root]))
        else:
            in_flight.append((group.barrier(name=name), None))
        while in_flight and own.integers(0, 3) == 0:
            handle, wanted = in_flight.pop(0)
            assert np.array_equal(handle.wait(WAIT_S), wanted)
        if own.integers(0, 10) == 0:
            delays.wait(0.01)  # never set: ranks of different speeds
    for handle, wanted in in_flight:
        assert np.array_equal(handle.wait(WAIT_S), wanted)


def sets_at_once(steps: int = 60) -> str:
    """Use several process sets at once, each from a thread of its own."""
    fastps.init()
    groups, rank, size = current.current().groups, fastps.rank(), fastps.size()
    sets = [range(size), range(size - 1, -1, -1), [0, size - 1], range(1, size)]
    failures: list[BaseException] = []
    delays = threading.Event()

    def run(number: int, group: Group) -> None:
        try:
            _sequence(group, number, steps, delays)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(number, groups.group(list(ranks), f"set {number}")))
        for number, ranks in enumerate(sets)
        if rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    groups.world.barrier().wait(WAIT_S)
    fastps.shutdown()
    return "done"


def mistakes() -> list[str]:
    """Call different things on different workers; all are told, and the job goes on."""
    fastps.init()
    world, rank = current.current().groups.world, fastps.rank()
    texts = []
    for count in (10, 100_000):
        array = np.ones(count + (rank == 1), np.float32)
        texts.append(_text_of(lambda array=array: world.allreduce(array, op=Op.SUM)))
        same = np.ones(count, np.float32)
        start = world.allreduce if rank else world.allgather
        texts.append(_text_of(lambda start=start, same=same: start(same)))
        kind = np.float32 if rank else np.int32
        texts.append(_text_of(lambda kind=kind, n=count: world.allgather(np.ones(n, kind))))
        root = 0 if rank else 1
        if count > 10:  # of small ones all would wait, and nobody say a word
            texts.append(_text_of(lambda root=root, same=same: world.broadcast(same, root=root)))
        op = Op.MAX if rank == fastps.size() - 1 else Op.SUM
        texts.append(_text_of(lambda op=op, same=same: world.allreduce(same, op=op)))
        assert world.allreduce(same, op=Op.SUM).wait(WAIT_S)[0] == fastps.size()
    fastps.shutdown()
    return texts


def mistakes_without_a_message() -> str:
    """Differ where no bytes would tell: nobody waits for long, and each has one error or two."""
    fastps.init(op_timeout_s=20.0)
    me, last = fastps.rank(), fastps.size() - 1
    odd = me == last
    small, large = np.ones(4), np.ones(100_000)
    calls = [
        lambda: fastps.allreduce(small, op=fastps.Average if odd else fastps.Sum),
        lambda: fastps.allreduce(large, op=fastps.Average if odd else fastps.Sum),
        lambda: fastps.gather(small, 1 if odd else 0),
        lambda: fastps.gather(large, me),
        lambda: fastps.broadcast(large, me),  # all have something to send, and nobody wants it
        lambda: fastps.broadcast(small if odd else small[:0], 0),  # the root was through at once
        lambda: fastps.reduce_to(large[: len(large) * (not odd)], 0),
        lambda: fastps.reducescatter(np.ones(0 if odd else last + 1)),
        lambda: fastps.scatter(None if me else np.ones((last + 1, 4)), np.ones(4), me // 2),
    ]
    for number, call in enumerate(calls):
        errors = 0
        for attempt in (call, *[lambda: fastps.allreduce(small, op=fastps.Max)] * 3):
            try:
                attempt()
            except MismatchError:
                errors += 1
        assert 1 <= errors <= 2, (number, errors)
        fastps.barrier()
    fastps.shutdown()
    return "done"


def mistakes_of_one() -> list[str]:
    """Take what is no operator for one, and a name for another shape."""
    fastps.init()
    texts = []
    with pytest.raises(TypeError) as caught:
        fastps.allreduce(np.ones(3), op="max")
    texts.append(str(caught.value))
    fastps.push_pull(np.ones(3), "again")
    fastps.barrier()  # a name that is refused fails for who still waits for its first sum
    with pytest.raises(MismatchError) as found:
        fastps.push_pull(np.ones(4), "again")
    texts.append(str(found.value))
    fastps.shutdown()
    return texts


def letters_of_wrong_size() -> str:
    """Receive what is longer than thought; messages of others with the same number are well."""
    fastps.init()
    world, rank = current.current().groups.world, fastps.rank()
    for count in (10, 100_000):
        if rank == 1:
            sent = world.send(np.ones(count, np.float32), 0)
            assert count == 10 or "not the same operation" in _text_of(lambda sent=sent: sent)
        elif rank == 0:
            short = np.empty(count - 1, np.float32)
            assert "not the same operation" in _text_of(lambda short=short: world.receive(short))
        world.barrier().wait(WAIT_S)
        if rank == 0:
            world.send(np.full(count, 7, np.float32), 2).wait(WAIT_S)
        elif rank == 2:
            assert world.receive(np.empty(count, np.float32)).wait(WAIT_S)[0] == 7
        world.barrier().wait(WAIT_S)
    _long_letters(world)
    fastps.shutdown()
    return "done"


def _long_letters(world: Group) -> None:
    """Send what is too long for one message; so that it need not have gigabytes, shorter ones."""
    schedule.MAX_MESSAGE_BYTES = 100_000
    want = np.arange(60_000, dtype=np.float32)
    if world.rank == 0:
        world.send(want, 2).wait(WAIT_S)
        world.send(want[::-1].copy(), 2).wait(WAIT_S)
    elif world.rank == 2:
        got = np.empty((2, 30_000), np.float32)
        assert np.array_equal(world.receive(got, 0).wait(WAIT_S), want.reshape(2, -1))
        assert np.array_equal(world.receive(got, 0).wait(WAIT_S).reshape(-1), want[::-1])
        with pytest.raises(ValueError, match="needs a source"):
            world.receive(got)


def _text_of(start) -> str:
    try:
        start().wait(WAIT_S)
    except MismatchError as error:
        return str(error)
    return "no error"


def nothing_kept(steps: int = 3000) -> list[int]:
    """Begin many operations without names, with changing shapes; count what is kept."""
    fastps.init()
    world = current.current().groups.world
    kept = []
    for step in range(2 * steps):
        count = 1 + step * 7919 % 20_000
        world.allgather(np.ones(count, np.uint8)).wait(WAIT_S)
        if world.rank == 0:
            world.send(np.ones(count, np.uint8), 1, tag=step % 3).wait(WAIT_S)
        elif world.rank == 1:
            world.receive(np.ones(count, np.uint8), tag=step % 3).wait(WAIT_S)
        if step % steps == steps - 1:
            world.barrier().wait(WAIT_S)
            kept.append(int(fastps.statistics()["messages_kept"]))
    fastps.shutdown()
    return kept


def ring(rounds: int = 20) -> list[int]:
    """Exchange 64 KiB with both neighbours; give threads, private bytes and links."""
    fastps.init()
    world = current.current().groups.world
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    array = np.full(16384, world.rank, np.float32)
    left, right = np.empty_like(array), np.empty_like(array)
    for _ in range(rounds):
        handles = [
            world.receive(left, before, tag=1),
            world.receive(right, after, tag=2),
            world.send(array, after, tag=1),
            world.send(array, before, tag=2),
        ]
        for handle in handles:
            handle.wait(WAIT_S)
        assert (left[0], right[-1]) == (before, after)
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    linked = current.current().connections.peer_links.statistics().get("links", 0)
    links = int(linked + fastps.statistics().get("pipes", 0))
    fastps.barrier()
    fastps.shutdown()
    return [int(found["Threads"]), int(found["RssAnon"].split()[0]) << 10, links]


def leave_at_once(rounds: int = 10) -> str:
    """Leave right after an operation, while others may still be in it; join again."""
    for _ in range(rounds):
        fastps.init()
        world = current.current().groups.world
        array = np.ones(2, np.float32)
        assert world.allreduce(array, op=Op.SUM).wait(WAIT_S)[0] == world.size
        fastps.shutdown()
    return "done"


def past_caches() -> int:
    """Move arrays of more than 8 MiB, whose copies go past the caches; ends at odd places."""
    fastps.init()
    world, count = current.current().groups.world, 2_200_003
    for where in (np.copy, shared):
        moves(world, where, count)
        reductions(world, where, count, "float32", Op.SUM)
        whole = np.arange(4 * count + 5, dtype=np.uint8)
        mine = where(whole)[fastps.rank() + 1 :][: 4 * count]
        found = fastps.allgather(mine)
        wanted = [whole[rank + 1 :][: 4 * count] for rank in range(fastps.size())]
        assert np.array_equal(found, np.concatenate(wanted))
    total = sum(array_of(rank, count) for rank in range(fastps.size()))
    for turn in range(2):
        found = fastps.push_pull(array_of(fastps.rank(), count), "large", average=False)
        assert np.array_equal(found, total), turn
    for where in (np.copy, shared):
        own = where(array_of(fastps.rank(), count))
        assert np.array_equal(fastps.push_pull(own, "in place", out=own, average=False), total)
        own, out = where(array_of(fastps.rank(), count)), where(np.zeros(count, np.float32))
        peers = [other for other in range(world.size) if other != world.rank]
        weights = {"src_weights": dict.fromkeys(peers, 1.0), "dst_weights": peers}
        neighbors = current.current().groups.neighbors
        neighbors.allreduce(own, out, self_weight=1.0, **weights).wait(WAIT_S)
        assert np.array_equal(out, total)
    peers = int(fastps.statistics().get("peer_memory", 0))
    fastps.shutdown()
    return peers
