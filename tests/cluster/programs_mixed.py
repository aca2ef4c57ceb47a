# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_mixed.py do: programs of mixed operations that they are sent.

A program is plain JSON: ranks of process sets, and for each of these, and for all workers, the
steps of a thread of its own. Every result is compared with what NumPy makes of the same arrays,
which hold small numbers, so that sums are exact whatever their order.
"""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastps

try:
    import ml_dtypes
except ImportError:  # then there are no arrays of bfloat16
    ml_dtypes = None

WAIT_S = 60.0
OUTSTANDING = 5  # operations of a thread under way at once
FLOATS = ("float32", "float64", "float16", *(["bfloat16"] if ml_dtypes else []))
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16")
OPS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (*FLOATS, *INTEGERS), (fastps.Sum, fastps.Average, fastps.Min, fastps.Max, fastps.Product)
)
OPS |= {dtype: (*OPS[dtype], fastps.BAND, fastps.BOR, fastps.BXOR) for dtype in INTEGERS}
OPS |= {"bool": (fastps.BAND, fastps.BOR, fastps.BXOR), "complex64": (fastps.Sum, fastps.Average)}
FOLDS = {
    fastps.Sum: np.add, fastps.Average: np.add, fastps.Min: np.minimum, fastps.Max: np.maximum,
    fastps.Product: np.multiply, fastps.BAND: np.bitwise_and, fastps.BOR: np.bitwise_or,
    fastps.BXOR: np.bitwise_xor,
}  # fmt: skip


def kind_of(dtype: str) -> np.dtype[Any]:
    """Give the NumPy dtype of a name."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def make(rank: int, shape: tuple[int, ...], dtype: str, salt: int) -> np.ndarray:
    """Make what a worker brings."""
    least = 0 if dtype in ("uint8", "uint16", "bool") else -3
    numbers = np.random.default_rng([rank, salt, *shape]).integers(least, 4, shape)
    return (numbers * (1 + 2j) if dtype == "complex64" else numbers).astype(kind_of(dtype))


def folded(arrays: list[np.ndarray], op: fastps.Op) -> np.ndarray:
    """Do what a reduction does."""
    total = functools.reduce(FOLDS[op], arrays)
    if op is not fastps.Average:
        return total
    if total.dtype.kind in "iu":
        return total // len(arrays)
    return (total.astype(np.result_type(total.dtype, np.float64)) / len(arrays)).astype(
        total.dtype
    )


@dataclass
class Step:
    """An operation that members start: their arrays, what to start with, and what comes of it."""

    where: fastps.ProcessSet
    name: str | None
    dtype: str
    count: int
    op: str
    salt: int

    def __post_init__(self) -> None:
        self.ranks, self.me = self.where.ranks, self.where.rank()
        self.n = len(self.ranks)
        self.how = {"name": self.name, "process_set": self.where}
        ops = OPS[self.dtype]
        self.rule = ops[int(self.op) % len(ops)]
        self.root = self.salt % self.n

    def arrays(self, *rest: int, rows: Callable[[int], int] | None = None) -> list[np.ndarray]:
        """Give everybody's array, of count rows or as many as a member has."""
        return [
            make(
                rank, (self.count if rows is None else rows(member), *rest), self.dtype, self.salt
            )
            for member, rank in enumerate(self.ranks)
        ]

    def rows(self, member: int) -> int:
        """Count the rows of a member where they differ."""
        return self.count * (member + self.salt % 3) // self.n


def allreduce(it: Step) -> tuple[Any, Any]:
    """Start it; give the flight, and what it has to give."""
    arrays = it.arrays(2)
    start = fastps.allreduce_async(arrays[it.me], op=it.rule, **it.how)
    return start, folded(arrays, it.rule)


def grouped_allreduce(it: Step) -> tuple[Any, Any]:
    """Do so for several arrays."""
    many = [it.arrays(2), it.arrays(), it.arrays(rows=lambda member: 1)]
    flight = fastps.grouped_allreduce_async([one[it.me] for one in many], op=it.rule, **it.how)
    return flight, [folded(one, it.rule) for one in many]


def _scattered(it: Step, arrays: list[np.ndarray]) -> np.ndarray:
    return np.array_split(folded(arrays, it.rule), it.n)[it.me]


def reducescatter(it: Step) -> tuple[Any, Any]:
    """Give each some rows of the sum."""
    arrays = it.arrays(3)
    flight = fastps.reducescatter_async(arrays[it.me], op=it.rule, **it.how)
    return flight, _scattered(it, arrays)


def grouped_reducescatter(it: Step) -> tuple[Any, Any]:
    """Do so for several arrays."""
    many = [it.arrays(2), it.arrays(), it.arrays(3)]
    flight = fastps.grouped_reducescatter_async([one[it.me] for one in many], op=it.rule, **it.how)
    return flight, [_scattered(it, one) for one in many]


def allgather(it: Step) -> tuple[Any, Any]:
    """Gather different numbers of rows."""
    arrays = it.arrays(2, rows=it.rows)
    return fastps.allgather_async(arrays[it.me], **it.how), np.concatenate(arrays)


def grouped_allgather(it: Step) -> tuple[Any, Any]:
    """Do so for several arrays."""
    many = [it.arrays(2, rows=it.rows), it.arrays(), it.arrays(3, rows=it.rows)]
    flight = fastps.grouped_allgather_async([one[it.me] for one in many], **it.how)
    return flight, [np.concatenate(one) for one in many]


def alltoall(it: Step) -> tuple[Any, Any]:
    """Send different numbers of rows to each."""

    def splits(member: int) -> list[int]:
        return [(member + 2 * other + it.salt) % 3 * (it.count // 4) for other in range(it.n)]

    arrays = it.arrays(2, rows=lambda member: sum(splits(member)))
    flight = fastps.alltoall_async(arrays[it.me], splits(it.me), **it.how)
    parts = [
        np.split(array, np.cumsum(splits(member))[:-1])[it.me]
        for member, array in enumerate(arrays)
    ]
    return flight, [np.concatenate(parts), np.array([len(part) for part in parts])]


class _Found:
    """What is there already."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def wait(self, timeout_s: float) -> Any:
        """Give it."""
        return self._found


def again(it: Step) -> tuple[Any, Any]:
    """Gather or exchange rows again and again, of the sizes of before, but for one time."""
    found, wanted = [], []
    for turn in range(6):
        more = (turn == it.salt) * (it.root + 1)  # so many rows, of this member or that

        def part(member: int, other: int, more: int = more) -> int:
            return it.count // 4 + member + (member == it.root and other == 0) * more

        arrays = it.arrays(2, rows=lambda member: sum(part(member, i) for i in range(it.n)))
        if int(it.op) % 3 == 2:
            whole = fastps.gather(arrays[it.me], it.ranks[it.root], **it.how)
            found.append(np.zeros(0) if whole is None else whole)
            wanted.append(np.concatenate(arrays) if it.me == it.root else None)
        elif int(it.op) % 3:
            is_late = turn == 3 and it.me == 0  # somebody does not take sizes for granted
            how = fastps.allgather_async(arrays[it.me], **it.how).wait if is_late else None
            found.append(how() if how else fastps.allgather(arrays[it.me], **it.how))
            wanted.append(np.concatenate(arrays))
        else:
            parts = [part(it.me, other) for other in range(it.n)]
            found.append(fastps.alltoall(arrays[it.me], parts, **it.how)[0])
            starts = [sum(part(m, i) for i in range(it.me)) for m in range(it.n)]
            wanted.append(np.concatenate([
                array[start : start + part(member, it.me)]
                for member, (array, start) in enumerate(zip(arrays, starts, strict=True))
            ]))  # fmt: skip
    return _Found(found), wanted


def broadcast(it: Step) -> tuple[Any, Any]:
    """Copy the root's array."""
    arrays = it.arrays(2)
    return fastps.broadcast_async(arrays[it.me].copy(), it.ranks[it.root], **it.how), arrays[
        it.root
    ]


def reduce_to(it: Step) -> tuple[Any, Any]:
    """Give the root the sum."""
    arrays = it.arrays(2)
    flight = fastps.reduce_to_async(arrays[it.me], it.ranks[it.root], op=it.rule, **it.how)
    return flight, folded(arrays, it.rule) if it.me == it.root else None


def gather(it: Step) -> tuple[Any, Any]:
    """Give the root everybody's rows."""
    arrays = it.arrays(2, rows=it.rows)
    flight = fastps.gather_async(arrays[it.me], it.ranks[it.root], **it.how)
    return flight, np.concatenate(arrays) if it.me == it.root else None


def scatter(it: Step) -> tuple[Any, Any]:
    """Give each its part of the root's array."""
    arrays = it.arrays(2)
    whole = np.concatenate(arrays) if it.me == it.root else None
    out = np.empty_like(arrays[it.me])
    return fastps.scatter_async(whole, out, it.ranks[it.root], **it.how), arrays[it.me]


def barrier(it: Step) -> tuple[Any, Any]:
    """Wait for everybody."""
    return fastps.barrier_async(process_set=it.where), None


class _Both:
    """A letter that was sent, and one that is to come."""

    def __init__(self, sent: Any, got: Any) -> None:
        self._sent, self._got = sent, got

    def wait(self, timeout_s: float) -> Any:
        """Wait for both, and give what came."""
        self._sent.wait(timeout_s)
        return self._got.wait(timeout_s)


def letters(it: Step) -> tuple[Any, Any]:
    """Send to the next, receive from the one before, or from whoever sends."""
    if it.n == 1:
        return barrier(it)
    arrays, before, how = it.arrays(), (it.me - 1) % it.n, {"process_set": it.where}
    out, source = np.empty_like(arrays[before]), it.ranks[before]
    got = fastps.receive_async(out, source if it.salt % 2 else None, tag=it.salt, **how)
    sent = fastps.send_async(arrays[it.me], it.ranks[(it.me + 1) % it.n], tag=it.salt, **how)
    return _Both(sent, got), arrays[before]


def push_pull(it: Step) -> tuple[Any, Any]:
    """Sum by way of servers or shared memory, which all workers do."""
    if it.name is None or it.where is not fastps.global_process_set or it.dtype in ("complex64",):
        return allreduce(it)
    arrays = it.arrays(2)
    flight = fastps.push_pull_async(arrays[it.me], f"{it.name} pushed", average=False)
    return flight, folded(arrays, fastps.Sum) if it.dtype != "bool" else np.any(arrays, axis=0)


KINDS: dict[str, Callable[[Step], tuple[Any, Any]]] = {
    start.__name__: start
    for start in (
        allreduce, grouped_allreduce, reducescatter, grouped_reducescatter, allgather,
        grouped_allgather, alltoall, again, broadcast, reduce_to, gather, scatter, barrier,
        letters, push_pull,
    )
}  # fmt: skip


def check(found: Any, wanted: Any) -> None:
    """Compare a result, or several, with what it has to be."""
    if wanted is None:
        assert found is None or not np.size(found), found
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            check(one, other)
    else:
        assert found.shape == wanted.shape, (found.shape, wanted.shape)
        assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
        wide = np.result_type(wanted.dtype, np.float64) if wanted.dtype.kind != "b" else bool
        rough = 1e-2 if wanted.dtype.itemsize == 2 else 1e-6
        assert np.allclose(found.astype(wide), wanted.astype(wide), rtol=rough), (found, wanted)


def _run_steps(steps: list[dict[str, Any]], where: fastps.ProcessSet, names: str) -> None:
    """Do the steps of one set, in order, several under way at once."""
    under_way: list[tuple[str, Any, Any]] = []
    for number, told in enumerate(steps):
        time.sleep(told["delays"][fastps.rank()] / 1000)  # ranks of different speeds
        label = f"{names}.{number}" if told["named"] else None
        it = Step(where, label, told["dtype"], told["count"], told["op"], number + told["salt"])
        flight, wanted = KINDS[told["kind"]](it)
        under_way.append((f"{told} as number {number}", flight, wanted))
        is_bound = told["kind"] in ("barrier",)  # of all workers one at a time
        while under_way and (is_bound or not told["later"] or len(under_way) > OUTSTANDING):
            _finish(*under_way.pop(0))
    for one in under_way:
        _finish(*one)


def _finish(what: str, flight: Any, wanted: Any) -> None:
    try:
        check(flight.wait(WAIT_S), wanted)
    except Exception as error:
        error.add_note(what)
        raise


def run(program: dict[str, Any]) -> str:
    """Run a program; give what went wrong, or nothing."""
    sets = [fastps.add_process_set(ranks) for ranks in program["sets"]]
    failures: list[str] = []

    def use(place: int, where: fastps.ProcessSet) -> None:
        try:
            _run_steps(program["steps"][place], where, f"{program['number']}.{place}")
        except BaseException:
            failures.append(traceback.format_exc())

    places = [(0, fastps.global_process_set), *enumerate(sets, 1)]
    threads = [
        threading.Thread(target=use, args=(place, where))
        for place, where in places
        if where.included()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        return "\n".join(failures)
    fastps.barrier()
    for where in sets:
        assert fastps.remove_process_set(where)
    return ""


REDUCING = (allreduce, grouped_allreduce, reducescatter, grouped_reducescatter, reduce_to)


def dtypes() -> list[str]:
    """Do every operation with every dtype, and every reduction that it has; give the dtypes."""
    fastps.init()
    some = fastps.add_process_set([0, fastps.size() - 1])
    for dtype, ops in OPS.items():
        for where in filter(fastps.ProcessSet.included, (fastps.global_process_set, some)):
            for kind, start in KINDS.items():
                for op in range(len(ops) if start in REDUCING else 1):
                    flight, wanted = start(Step(where, None, dtype, 500, str(op), op))
                    _finish(f"{kind} of {dtype}, {ops[op]}", flight, wanted)
        flight, wanted = broadcast(Step(fastps.global_process_set, dtype, dtype, 500, "0", 1))
        _finish(f"broadcast of {dtype} by name", flight, wanted)
    integer_averages()
    fastps.shutdown()
    return sorted(OPS)


def integer_averages() -> None:
    """Divide a sum that wraps around, and round down, by every way, as the docs say."""
    me, size = fastps.rank(), fastps.size()
    own = np.array([250 + me, 1, me], np.uint8)
    wrapped = np.array([sum(range(250, 250 + size)) % 256, size, sum(range(size))]) // size
    assert np.array_equal(fastps.allreduce(own), wrapped)
    assert np.array_equal(fastps.allreduce(own, "by name"), wrapped)
    assert np.array_equal(fastps.push_pull(own, "pushed"), wrapped)
    assert np.array_equal(fastps.grouped_allreduce([own])[0], wrapped)
    low = np.array([-3, -2 - me], np.int32)
    total = sum(np.array([-3, -2 - rank]) for rank in range(size))
    assert np.array_equal(fastps.allreduce(low), np.floor_divide(total, size))
    assert np.array_equal(fastps.allreduce(low, "low"), np.floor_divide(total, size))


def serve(address: str) -> str:
    """Run the programs that come, line by line, until there are none."""
    fastps.init()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + address)
        with sock.makefile("rw", encoding="utf-8") as lines:
            lines.write(f"{fastps.rank()}\n")
            lines.flush()
            for line in lines:
                lines.write(json.dumps(run(json.loads(line))) + "\n")
                lines.flush()
    fastps.shutdown()
    return "done"
