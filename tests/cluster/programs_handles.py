# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_handles.py do: they wait for handles late, twice, and from threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from harness import slowed
from programs_lifecycle import in_threads

import fastps
from fastps.errors import FastPSError, MismatchError, StallError

COUNT = 30_000  # of a large array: making its result takes longer than a thread's turn
SOON_S = 5.0
# These ask validators, which are another job's.
HELD = {"push_async", "pull_async"}
# The others have to begin, before these return.
AWAITING = {
    "allgather_async", "alltoall_async", "gather_async", "grouped_allgather_async",
    "neighbor_allgather_async",
}  # fmt: skip
# These may be over before others begin.
EARLY = {"send_async", "scatter_async", "win_put_async", "win_accumulate_async", "win_get_async"}


def own(turn: int, count: int = COUNT) -> np.ndarray:
    """Make this worker's array of a turn."""
    return np.full(count, 10.0 * turn + fastps.rank() + 1, np.float32)


def total(turn: int) -> float:
    return 20.0 * turn + 3


def everybody(turn: int) -> list[float]:
    return [10.0 * turn + 1] * COUNT + [10.0 * turn + 2] * COUNT


class Cases:
    """Starts each public operation, and says what it has to give; two workers."""

    def __init__(self) -> None:
        self.me, self.other = fastps.rank(), 1 - fastps.rank()
        self.window = own(0)
        assert fastps.win_create(self.window, "window", zero_init=True)

    def push_pull_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.push_pull_async(own(turn), "pushed"), total(turn) / 2

    def allreduce_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.allreduce_async(own(turn), "reduced", op=fastps.Max, postscale_factor=2.0)
        return handle, 2 * (10.0 * turn + 2)

    def scaled_sum(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.allreduce_async(own(turn), "sum", op=fastps.Sum, postscale_factor=2.0)
        return handle, 2 * total(turn)

    def scaled_nameless(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.allreduce_async(own(turn), op=fastps.Sum, postscale_factor=2.0)
        return handle, 2 * total(turn)

    def grouped_allreduce_async(self, turn: int) -> tuple[Any, Any]:
        both = [own(turn), own(turn, 9)]
        handle = fastps.grouped_allreduce_async(both, "group", postscale_factor=2.0)
        return handle, [total(turn), total(turn)]

    def allgather_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.allgather_async(own(turn), "gathered"), everybody(turn)

    def grouped_allgather_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.grouped_allgather_async([own(turn)], "gathering"), [everybody(turn)]

    def reducescatter_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.reducescatter_async(
            own(turn), "scattered", op=fastps.Sum, postscale_factor=2.0
        )
        return handle, 2 * total(turn)

    def grouped_reducescatter_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.grouped_reducescatter_async(
            [own(turn)], "scattering", op=fastps.Sum, postscale_factor=2.0
        )
        return handle, [2 * total(turn)]

    def alltoall_async(self, turn: int) -> tuple[Any, Any]:
        half = [10.0 * turn + 1] * (COUNT // 2) + [10.0 * turn + 2] * (COUNT // 2)
        return fastps.alltoall_async(own(turn), name="exchanged"), half

    def broadcast_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.broadcast_async(own(turn), 1, name="told"), 10.0 * turn + 2

    def reduce_to_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.reduce_to_async(own(turn), 0, op=fastps.Sum, name="reduced to 0")
        return handle, None if self.me else total(turn)

    def gather_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.gather_async(own(turn), name="to 0"), None if self.me else everybody(turn)

    def scatter_async(self, turn: int) -> tuple[Any, Any]:
        whole = np.arange(2 * COUNT, dtype=np.float32).reshape(2, COUNT) if self.me else None
        handle = fastps.scatter_async(whole, np.empty(COUNT, np.float32), 1, name="from 1")
        return handle, np.arange(COUNT) + COUNT * self.me

    def barrier_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.barrier_async(), None

    def send_async(self, turn: int) -> tuple[Any, Any]:
        fastps.receive_async(np.empty(COUNT, np.float32), self.other, tag=5)
        return fastps.send_async(own(turn), self.other, tag=5), None

    def receive_async(self, turn: int) -> tuple[Any, Any]:
        fastps.send_async(own(turn), self.other, tag=6)
        handle = fastps.receive_async(np.empty(COUNT, np.float32), self.other, tag=6)
        return handle, 10.0 * turn + self.other + 1

    def neighbor_allreduce_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.neighbor_allreduce_async(own(turn), name="mixed"), total(turn) / 2

    def neighbor_allgather_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.neighbor_allgather_async(own(turn), name="neighbor's")
        return handle, 10.0 * turn + self.other + 1

    def hierarchical_neighbor_allreduce_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.hierarchical_neighbor_allreduce_async(own(turn), name="machines")
        return handle, total(turn) / 2

    def pair_gossip_async(self, turn: int) -> tuple[Any, Any]:
        handle = fastps.pair_gossip_async(own(turn), self.other, name="pair")
        return handle, total(turn) / 2

    def win_put_async(self, turn: int) -> tuple[Any, Any]:
        array = own(turn)
        return fastps.win_put_async(array, "window", self_weight=0.5), own(turn) / 2

    def win_accumulate_async(self, turn: int) -> tuple[Any, Any]:
        array = own(turn)
        return fastps.win_accumulate_async(array, "window", self_weight=0.5), own(turn) / 2

    def win_get_async(self, turn: int) -> tuple[Any, Any]:
        return fastps.win_get_async("window"), self.window


def cases() -> dict[str, Callable[[int], tuple[Any, Any]]]:
    """Name what starts an operation; every public _async form is there."""
    made = Cases()
    found = {name: getattr(made, name) for name in dir(made) if callable(getattr(made, name))}
    found = {name: start for name, start in found.items() if not name.startswith("__")}
    public = {name for name in fastps.__all__ if name.endswith("_async")}
    assert public - HELD <= set(found), public - HELD - set(found)
    return found


def check(name: str, found: Any, want: Any) -> None:
    if want is None:
        assert found is None, name
    elif isinstance(found, list):
        for one, its in zip(found, want, strict=True):
            check(name, one, its)
    else:
        np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape), name)


def until_done(handle: Any) -> None:
    deadline = time.monotonic() + slowed(20.0)
    while not handle.poll():
        assert time.monotonic() < deadline
        time.sleep(0)


@contextmanager
def at_once(name: str) -> Any:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < slowed(SOON_S), name


def from_threads(handle: Any) -> list[Any]:
    """Wait for a handle in several threads at once; give what each got, or its error."""
    found: list[Any] = []

    def wait(_: int) -> None:
        try:
            found.append(handle.wait())
        except FastPSError as error:
            found.append(error)

    in_threads(wait)
    return found


def second_round() -> str:
    """Begin the second operation of a name before the first one's handle is waited for."""
    fastps.init()
    me = fastps.rank()
    for name, start in cases().items():
        first, want = start(1)
        until_done(first)
        if me == 0 or name in AWAITING:
            second, its = start(2)
        if me == 0:
            assert first.poll(), name
            with at_once(name):
                check(name, first.wait(), want)
            assert first.poll(), name
        fastps.broadcast_object(0, name=f"{name} was waited for")
        if me == 1:
            if name not in AWAITING:
                second, its = start(2)
            with at_once(name):
                check(name, first.wait(), want)
        check(name, second.wait(), its)
        with at_once(name):
            check(name, first.wait(), want)
            check(name, second.wait(), its)
    fastps.shutdown()
    return "done"


def threads_and_twice() -> str:
    """Wait from eight threads, and again; the result is made once."""
    fastps.init()
    for name, start in cases().items():
        for turn in range(4):
            handle, want = start(turn)
            found = from_threads(handle)
            check(name, found[0], want)
            assert all(one is found[0] for one in found), name
            assert handle.wait() is found[0], name
            check(name, handle.wait(), want)
            fastps.barrier()
    fastps.shutdown()
    return "done"


def in_time() -> str:
    """Wait in vain, then wait until it is there."""
    fastps.init()
    me = fastps.rank()
    for name, start in cases().items():
        if name in AWAITING | EARLY:
            continue
        if me == 0:
            handle, want = start(1)
            assert not handle.poll(), name
            with pytest.raises(ValueError, match="must be 0 to"):
                handle.wait(-1.0)
            for _ in range(2):
                with pytest.raises(StallError):
                    handle.wait(0.0)
            assert not handle.poll(), name
        fastps.broadcast_object(0, name="go")
        if me == 1:
            handle, want = start(1)
        check(name, handle.wait(), want)
        check(name, handle.wait(0.0), want)
        fastps.broadcast_object(0, name="next")
    fastps.shutdown()
    return "done"


calls = 0


def first_fails(rows: np.ndarray) -> np.ndarray:
    """Be a rule whose first round fails."""
    global calls
    calls += 1
    if calls == 1:
        raise RuntimeError("the first round fails")
    return np.asarray(rows.mean(axis=0))


def first_round_fails() -> str:
    """Begin a round after one that failed, before anybody waited for that."""
    fastps.init()
    out = np.full(COUNT, -7.0, np.float32)
    first = fastps.push_pull_async(own(1), "ruled", out=out, rule="programs_handles:first_fails")
    until_done(first)
    fastps.barrier()
    second = fastps.push_pull_async(own(2), "ruled", rule="programs_handles:first_fails")
    check("ruled", second.wait(), total(2) / 2)
    assert first.poll()
    errors = [*from_threads(first), *from_threads(first)]
    assert all(isinstance(error, FastPSError) for error in errors), errors
    assert len(set(map(str, errors))) == 1, errors
    check("ruled", second.wait(), total(2) / 2)
    fastps.shutdown()
    return "done"


def group_fails() -> str:
    """Wait for an operation of a group that failed, after another of its name went well."""
    fastps.init()
    for name in ("wrong", None):
        first = fastps.allreduce_async(own(1, 50 + fastps.rank()), name, op=fastps.Max)
        until_done(first)
        fastps.barrier()
        second = fastps.allreduce_async(own(2), name, op=fastps.Max)
        check("group", second.wait(), 22.0)
        errors = [*from_threads(first), *from_threads(first)]
        assert all(isinstance(error, MismatchError) for error in errors), errors
        assert len(set(map(str, errors))) == 1, errors
    fastps.shutdown()
    return "done"


def join_beside() -> str:
    """Wait from eight threads for averages without a worker that has run out of data."""
    fastps.init()
    if fastps.rank() == 0:
        for turn in range(5):
            begun = [
                fastps.allreduce_async(own(turn), "named", postscale_factor=2.0),
                fastps.allreduce_async(own(turn), postscale_factor=2.0),
                fastps.grouped_allreduce_async([own(turn)], "group", postscale_factor=2.0),
                fastps.push_pull_async(own(turn), "pushed"),
            ]
            for handle, factor in zip(begun, (2, 2, 2, 1), strict=True):
                found = from_threads(handle)
                assert all(one is found[0] for one in found), found
                want = own(turn) * factor
                check(f"{turn}", found[0], [want] if isinstance(found[0], list) else want)
    fastps.join()
    fastps.shutdown()
    return "done"


def several_barriers() -> str:
    """Begin barriers before those before them are waited for; each is a barrier of its own."""
    fastps.init()
    handles = [fastps.barrier_async() for _ in range(2 + fastps.rank())]
    if fastps.rank() == 0:
        fastps.barrier()
    assert all(fastps.synchronize(handle) is None for handle in handles)
    handles = [fastps.barrier_async() for _ in range(3)]
    fastps.barrier()
    for handle in reversed(handles):
        handle.wait(SOON_S)
    fastps.shutdown()
    return "done"
