# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_repeated.py do: the same calls again and again, on other arrays."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.group_base import GroupBase
from fastps.errors import FastPSError, MismatchError, NotInitializedError
from fastps.session import current
from fastps.types import DType, Op

TIMES = 5
SIZES = [1, 6, 3000, 90_000]  # rows of two: told with sizes, unasked, asked for


@contextmanager
def counted() -> Iterator[list[str]]:
    """List the operations that begin by way of all checks."""
    begun: list[str] = []
    launch = GroupBase._launch

    def spy(self: GroupBase, kind: Any, channel: int, label: str, *args: Any, **how: Any) -> Any:
        begun.append(label)
        return launch(self, kind, channel, label, *args, **how)

    GroupBase._launch = spy  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        GroupBase._launch = launch  # type: ignore[method-assign]


class Case:
    """The arrays of one turn, the same on all workers but for what each has."""

    def __init__(self, rows: int, turn: int, dtype: Any) -> None:
        self.me, self.size = fastps.rank(), fastps.size()
        rng = np.random.default_rng([rows, turn])
        made = rng.integers(0, 99, (self.size, rows * self.size, 2)).astype(dtype)
        self.all, self.rows = made, rows
        self.mine = made[self.me].copy()
        self.part = made[self.me, :rows].copy()
        self.whole = np.empty((self.size * rows * self.size, 2), dtype)
        self.like = np.empty_like(self.mine)
        self.block = np.empty_like(self.part)

    def blocks(self, which: int) -> Any:
        """Give what everybody has for a member, one after the other."""
        return self.all[:, which * self.rows : (which + 1) * self.rows].reshape(-1, 2)


Call = Callable[[Case], tuple[Any, Any]]  # gives what came, and what is right; None: nothing
CALLS: dict[str, Call] = {
    "allreduce": lambda c: (fastps.allreduce(c.mine, op=fastps.Sum), c.all.sum(0, c.all.dtype)),
    "in place": lambda c: (
        fastps.allreduce(c.mine, op=fastps.Max, out=c.mine), c.all.max(0)
    ),
    "into another": lambda c: (
        fastps.allreduce(c.mine, op=fastps.Min, out=c.like), c.all.min(0)
    ),
    "reducescatter": lambda c: (
        fastps.reducescatter(c.mine, op=fastps.Sum),
        c.all.sum(0, c.all.dtype)[c.me * c.rows : (c.me + 1) * c.rows],
    ),
    "allgather": lambda c: (fastps.allgather(c.mine, out=c.whole), c.all.reshape(-1, 2)),
    "allgather anew": lambda c: (fastps.allgather(c.mine), c.all.reshape(-1, 2)),
    "alltoall": lambda c: (fastps.alltoall(c.mine, out=c.like), c.blocks(c.me)),
    "gather": lambda c: (
        fastps.gather(c.mine, 0), c.all.reshape(-1, 2) if c.me == 0 else None
    ),
    "scatter": lambda c: (fastps.scatter(c.mine, c.block, 1), c.all[1][c.me * c.rows :][: c.rows]),
    "broadcast": lambda c: (fastps.broadcast(c.mine, 1), c.all[1]),
    "reduce": lambda c: (
        fastps.reduce_to(c.mine, 1, op=fastps.Sum, out=c.like),
        c.all.sum(0, c.all.dtype) if c.me == 1 else None,
    ),
    "messages": lambda c: passed_on(c),
    "average to wait for": lambda c: (
        fastps.allreduce_async(c.mine * c.size).wait(), c.all.sum(0, c.all.dtype)
    ),
    "part to wait for": lambda c: (
        fastps.reducescatter_async(c.mine, op=fastps.Max).wait(),
        c.all.max(0)[c.me * c.rows : (c.me + 1) * c.rows],
    ),
    "broadcast to wait for": lambda c: (fastps.broadcast_async(c.mine, 1).wait(), c.all[1]),
    "scatter to wait for": lambda c: (
        fastps.scatter_async(c.mine, c.block, 1).wait(), c.all[1][c.me * c.rows :][: c.rows]
    ),
    "reduction to wait for": lambda c: (
        fastps.reduce_to_async(c.mine, 1, op=fastps.Max, out=c.like).wait(),
        c.all.max(0) if c.me == 1 else None,
    ),
    "messages at once": lambda c: all_at_once(c),
    "several at once": lambda c: several(c),
}  # fmt: skip


def all_at_once(case: Case) -> tuple[Any, Any]:
    """Begin to receive from the one before and from anybody, then send to the next twice."""
    after, before = (case.me + 1) % case.size, (case.me - 1) % case.size
    first = fastps.receive_async(case.like, before)
    second = fastps.receive_async(np.empty_like(case.like), tag=5)
    sent = [fastps.send_async(case.mine, after), fastps.send_async(case.mine, after, tag=5)]
    assert first.wait() is case.like
    assert np.array_equal(second.wait(), case.like)
    assert first.source == second.source == before
    assert [one.wait() for one in sent] == [None, None]
    return case.like, case.all[before]


def several(case: Case) -> tuple[Any, Any]:
    """Have several of a kind in flight, and wait for the last first."""
    some = [case.mine + turn for turn in range(4)]
    handles = [fastps.allreduce_async(one, op=fastps.Max) for one in some]
    found = [handle.wait() for handle in reversed(handles)][::-1]
    return np.stack(found), np.stack([case.all.max(0) + turn for turn in range(4)])


def passed_on(case: Case) -> tuple[Any, Any]:
    """Send to the next, receive from the one before; the last receives first."""
    after, before = (case.me + 1) % case.size, (case.me - 1) % case.size
    if case.me == case.size - 1:
        fastps.receive(case.like, before, tag=3)
    assert fastps.send(case.mine, after, tag=3) is None
    if case.me < case.size - 1:
        fastps.receive(case.like, before, tag=3)
    return case.like, case.all[before]


def everything() -> str:
    """Do every call of every size several times; from the fourth on nothing is checked anew."""
    fastps.init()
    for rows in SIZES:
        for dtype in (np.float32, np.int64):
            for name, call in CALLS.items():
                for turn in range(TIMES):
                    case = Case(rows, turn, dtype)
                    with counted() as begun:
                        came, right = call(case)
                    assert np.array_equal(came, right), (name, rows, turn)
                    assert turn < 3 or not begun, (name, rows, begun)
    fastps.barrier()
    fastps.shutdown()
    return "done"


def otherwise() -> str:
    """Give calls that are known arrays that lie otherwise, or cannot be used."""
    fastps.init()
    me, size, n = fastps.rank(), fastps.size(), 4000
    own, out = np.full(n, me + 1.0), np.empty(n)
    total = size * (size + 1) / 2
    for _ in range(3):
        assert (fastps.allreduce(own, op=fastps.Sum, out=out) == total).all()
    wide = np.full((n, 2), me + 1.0)
    assert (fastps.allreduce(wide[:, 0], op=fastps.Sum, out=out) == total).all()
    with pytest.raises(ValueError, match="C-contiguous"):
        fastps.allreduce(own, op=fastps.Sum, out=wide[:, 1])
    both = np.full(n + 8, me + 1.0)
    with pytest.raises(ValueError, match="overlap"):
        fastps.allreduce(both[:n], op=fastps.Sum, out=both[8:])
    fixed = np.empty(n)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only|writ"):
        fastps.allreduce(own, op=fastps.Sum, out=fixed)
    for factor in (1.0, 0.5, 2.0):  # a result that is multiplied is no mere operation
        found = fastps.allreduce(own, op=fastps.Sum, postscale_factor=factor, out=out)
        assert (found == factor * total).all()
    for turn in range(4):  # of complex numbers, and of one
        found = fastps.allgather(np.full(3, turn + 1j * me))
        assert np.array_equal(found, np.repeat(turn + 1j * np.arange(size), 3))
        assert np.array_equal(fastps.allgather(np.float32(turn)), np.full(size, turn))
        assert fastps.allreduce(np.array(3 * turn + me), op=fastps.Max) == 3 * turn + size - 1
    for _ in range(3):
        fastps.allreduce(own, op=fastps.Max, out=own)
    with pytest.raises(ValueError, match="overlap"):
        fastps.allreduce(own, op=fastps.Max, out=own[:])
    for _ in range(3):
        fastps.gather(own, 0, name="g")
    with pytest.raises(TypeError):
        fastps.gather(own, 0, "name", "g")
    _lie_in_each_other(me, size, n)
    fastps.shutdown()
    return "done"


def _lie_in_each_other(me: int, size: int, n: int) -> None:
    """Gather what lies where it is to land, and what does not, by the same call."""
    for turn in range(4):
        whole = np.full(size * n, -1.0)
        own = whole[me * n : (me + 1) * n] if turn != 2 else np.empty(n)
        own[:] = turn + me
        found = fastps.allgather(own, out=whole)
        assert np.array_equal(found, np.repeat(turn + np.arange(size), n))
    whole = np.zeros(size * n + 8)
    with pytest.raises(ValueError, match="overlap"):
        fastps.allgather(whole[me * n + 8 : (me + 1) * n + 8], out=whole[: size * n])


def mistakes() -> str:
    """Have two members mean other things by as many bytes, which both take for granted."""
    fastps.init()
    me = fastps.rank()
    for scale in (1, 5000):
        narrow, wide = np.ones(4 * scale), np.ones((2 * scale, 2))
        for _ in range(4):
            fastps.allgather(narrow)
            fastps.allgather(wide)
            fastps.gather(narrow, 0)
            fastps.gather(narrow, 1)
        with pytest.raises(MismatchError, match=rf"worker 1 started .* shape \({2 * scale}, 2\)"):
            fastps.allgather(wide if me else narrow)
        with pytest.raises(MismatchError, match="worker 1 started gather to worker 1"):
            fastps.gather(narrow, me)
        fastps.barrier()
    fastps.shutdown()
    return "done"


def of_groups() -> str:
    """Begin what the faces of frameworks begin: of two groups of the same members at once."""
    fastps.init()
    me, groups = fastps.rank(), current.current().groups
    size = fastps.size()
    some = [groups.group(range(size), "one"), groups.group(range(size), "other")]
    for turn in range(5):
        with counted() as begun:
            for number, group in enumerate(some):
                own = np.full(5000, 10.0 * turn + number + me)
                out, mine = np.empty(5000), own.copy()
                handle = group.allreduce(own, out, op=Op.MAX, dtype=DType.FLOAT64)
                assert group.broadcast(mine, root=number).wait() is mine
                assert handle.wait() is out
                assert (out == own - me + size - 1).all()
                assert (mine == own - me + number).all()
                assert (
                    group.allgather(own).wait().reshape(size, -1)[:, 9] - own[9]
                    == (np.arange(size) - me)
                ).all()
                group.barrier().wait()
        assert turn < 2 or not begun, (turn, begun)
    with pytest.raises(TypeError, match="does not fit an array"):
        some[0].allreduce(np.ones(5000), np.empty(5000), op=Op.MAX, dtype=DType.FLOAT32)
    with pytest.raises(ValueError, match="root must be from 0 to"):
        some[0].broadcast(np.ones(5000), root=size)
    fastps.shutdown()
    return "done"


def suspended() -> str:
    """Suspend while the first call of its kind is under way: it is not known afterwards."""
    fastps.init()
    own, errors = np.ones(5000), list[str]()

    def work() -> None:
        fastps.allreduce(own, op=fastps.Max)
        with pytest.raises(FastPSError, match="suspended"):
            fastps.allreduce(own, op=fastps.Max)
        errors.append("suspended")

    if fastps.rank() == 0:
        session, thread = current.current(), threading.Thread(target=work)
        thread.start()
        while not session.connections.exchange.operations:
            time.sleep(0.001)
        session.suspend()
        thread.join()
        session.resume()
        assert errors
    else:
        time.sleep(0.5)
        fastps.allreduce(own, op=fastps.Max)
    fastps.shutdown()
    return "done"


def changes() -> str:
    """Change what calls that are known mean: sizes of others, sets, the session itself."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    for rows in (2, 3000):
        _change_sizes(me, size, rows)
    _set_that_comes_and_goes(me)
    _two_threads(me)
    _disturbed()
    _in_a_child()
    session, own = weakref.ref(current.current()), np.ones(5000)
    for _ in range(3):
        fastps.allgather(own)
        fastps.allreduce_async(own).wait()
        fastps.barrier()
    fastps.shutdown()
    for call in (fastps.allgather, fastps.allreduce_async, fastps.barrier):
        with pytest.raises(NotInitializedError):
            call(*[own][: call is not fastps.barrier])
    gc.collect()
    assert session() is None, "what is known of calls keeps nothing of a session that is over"
    return "done"


def in_flight() -> str:
    """Have several operations under way at once while sizes stay, change, and stay again."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    rng, own = np.random.default_rng(7), np.random.default_rng(me)
    rows, waiting = [3] * size, deque[tuple[Any, Any]]()
    for turn in range(400):
        if rng.random() < 0.02:
            rows[rng.integers(size)] = int(rng.choice([1, 3, 3000]))
        swaps = bool(rng.random() < 0.4)
        parts = [np.full(k, 10.0 * turn + i) for i, k in enumerate(rows)]
        if swaps:
            sent = np.repeat(parts[me], size)
            handle = fastps.alltoall_async(sent, [rows[me]] * size)
        else:
            handle = fastps.allgather_async(parts[me])
        waiting.append((handle, np.concatenate(parts)))
        if own.random() < 0.1:
            time.sleep(0.003)
        while len(waiting) > turn // 100:  # none, 1, 2, 3 under way while the next begins
            handle, right = waiting.popleft()
            found = handle.wait()
            assert np.array_equal(found[0] if isinstance(found, tuple) else found, right), turn
    for handle, _ in waiting:
        handle.wait()
    fastps.shutdown()
    return "done"


def async_forms() -> str:
    """Begin _async forms of operations that came before, which need no second look."""
    fastps.init()
    ones, many = np.ones(7, np.float32), [np.ones(3, np.float32), np.ones(2, np.float32)]
    forms: list[Callable[[], Any]] = [
        lambda: fastps.allgather_async(ones),
        lambda: fastps.alltoall_async(ones[:2].copy(), [1, 1]),
        lambda: fastps.grouped_allreduce_async(many),
        lambda: fastps.allreduce_async(ones, postscale_factor=0.5),
    ]
    for form in forms:
        for _ in range(4):
            form().wait()
        with counted() as begun:
            form().wait()
        assert not begun
    fastps.shutdown()
    return "done"


def closed_meanwhile() -> str:
    """End the session just when a call that was known is over: its average is there."""
    fastps.init()
    ones = np.ones(9)
    for _ in range(3):
        fastps.allreduce(ones)
    finish = GroupBase.finish

    def finish_and_close(self: GroupBase, operation: Any) -> None:
        finish(self, operation)
        fastps.shutdown()

    GroupBase.finish = finish_and_close  # type: ignore[method-assign]
    try:
        assert np.array_equal(fastps.allreduce(ones), ones)
    finally:
        GroupBase.finish = finish  # type: ignore[method-assign]
    assert not fastps.is_initialized()
    return "done"


def _set_that_comes_and_goes(me: int) -> None:
    pair = fastps.add_process_set([0, 1])
    for turn in range(4):
        if me < 2:
            assert fastps.allreduce(np.full(9, me + turn), process_set=pair, op=fastps.Max)[0] == (
                turn + 1
            )
    fastps.remove_process_set(pair)
    with pytest.raises(ValueError, match="not registered"):
        fastps.allreduce(np.full(9, 1), process_set=pair, op=fastps.Max)
    fastps.add_process_set(pair)
    for turn in range(2):
        if me < 2:
            found = fastps.allreduce(np.full(9, me + turn), process_set=pair, op=fastps.Max)
            assert found[0] == turn + 1


def _change_sizes(me: int, size: int, rows: int) -> None:
    """Have one member, or all, bring other rows after sizes stayed the same for a while."""
    for turn in range(24):
        sizes = [rows] * size
        if turn % 8 == 5:
            sizes[turn % size] += 1
        if turn > 18:
            sizes = [rows + 2] * size
        right = np.concatenate([np.full(k, 10.0 * turn + i) for i, k in enumerate(sizes)])
        assert np.array_equal(fastps.allgather(np.full(sizes[me], 10.0 * turn + me)), right)
        gathered = fastps.gather(np.full(sizes[me], 10.0 * turn + me), 1)
        assert gathered is None if me != 1 else np.array_equal(gathered, right)


def _two_threads(me: int) -> None:
    """Repeat calls on two sets in two threads."""
    sets = [fastps.add_process_set(range(fastps.size())) for _ in range(2)]
    wrong: list[int] = []

    def work(which: int) -> None:
        for turn in range(200):
            own = np.full(700, turn + which + me)
            found = fastps.allreduce(own, op=fastps.Max, process_set=sets[which])
            if found[0] != turn + which + fastps.size() - 1:
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _disturbed() -> None:
    """Do every call while another thread says all the time that something has changed."""
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(20e-6):
            invalidate_call_cache()

    thread = threading.Thread(target=disturb)
    thread.start()
    for turn in range(80):
        for name, call in [one for one in CALLS.items() for _ in range(3)]:
            came, right = call(Case(300, turn, np.float32))
            assert np.array_equal(came, right), (name, turn)
        complex_ = np.full((400, 2), turn + 1j)
        assert fastps.allreduce(complex_, op=fastps.Sum, out=complex_) is complex_
        assert complex_[3, 1] == fastps.size() * (turn + 1j)
    is_over.set()
    thread.join()


def _in_a_child() -> None:
    """Make a call that is known in a forked child: it may not."""
    for _ in range(3):
        fastps.allgather(np.ones(3000))
    child = os.fork()
    if child == 0:
        try:
            fastps.allgather(np.ones(3000))
        except NotInitializedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def uneven() -> list[float]:
    """Repeat an average until this worker runs out of data; gives what came since."""
    fastps.init()
    me, found = fastps.rank(), []
    for turn in range(6 + 3 * me):
        own = np.full(3000, float(10 * turn + me))
        average = fastps.allreduce(own) if turn % 2 else fastps.allreduce_async(own).wait()
        assert (average == average[0]).all()
        found.append(float(average[0]))
    assert fastps.join() == fastps.size() - 1
    for turn in range(3):  # and all of them once more
        found.append(float(fastps.allreduce(np.full(3000, float(turn + me)))[0]))
    fastps.shutdown()
    return found
