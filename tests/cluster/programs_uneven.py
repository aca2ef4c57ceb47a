# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_uneven.py do: they run out of data one after the other."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from harness import slowed

import fastps
from fastps.errors import FastPSError, MismatchError, PeerLostError, StallError

SETS: list[fastps.ProcessSet] = []


def takers(step: int, rounds: list[int]) -> list[int]:
    """Give the ranks that still have data in a step."""
    return [rank for rank, steps in enumerate(rounds) if step < steps]


def one_round(steps: list[int], some: fastps.ProcessSet, *, width: int) -> None:
    """Train as many steps as this worker has data for, then join."""
    me = fastps.rank()
    for step in range(steps[me]):
        there = takers(step, steps)
        own = np.full(width, me + 1.0, np.float32)
        total = sum(rank + 1 for rank in there)
        flights = [
            fastps.allreduce_async(own, f"named {width}", priority=step),
            fastps.allreduce_async(own, op=fastps.Sum),
            fastps.allreduce_async(own.astype(np.float16)),
            fastps.allreduce_async(own.astype(np.int32), op=fastps.Min),
            fastps.allreduce_async(own.astype(np.float64), "max", op=fastps.Max),
            fastps.allreduce_async(own, f"new {step} {width}", op=fastps.Sum),
            fastps.allreduce_async(own.astype(np.uint8), op=fastps.BAND),
        ]
        found = [fastps.synchronize(flight) for flight in flights]
        bits = np.bitwise_and.reduce([rank + 1 for rank in there])
        average = total / len(there)
        for array, want in zip(
            found,
            (average, total, average, min(there) + 1, max(there) + 1, total, bits),
            strict=True,
        ):
            assert np.allclose(array, want, rtol=1e-3 if array.itemsize == 2 else 1e-6), (
                array,
                want,
            )
            assert (array == array[0]).all()
        both = [own, own.astype(np.float16)]
        pushed = fastps.push_pull_async(both, [f"a {width}", f"b {width}"])
        for found in fastps.synchronize(pushed):
            assert np.allclose(found, average, rtol=1e-3), (found, average)
        pushed = fastps.push_pull(own.copy(), f"c {width}")
        assert np.allclose(pushed, average), (pushed, average)
        for _ in range(2):
            pushed = own.copy()
            assert fastps.push_pull(pushed, f"d {width}", out=pushed) is pushed
            assert np.allclose(pushed, average), (pushed, average)
        if some.included():
            ours = [rank for rank in there if rank in some.ranks]
            inside = fastps.allreduce(own, process_set=some)
            assert np.allclose(inside, sum(rank + 1 for rank in ours) / len(ours))
        last = max(there)
        assert (fastps.broadcast(own.copy(), last) == last + 1).all()
        assert (fastps.broadcast(own.copy(), last, name=f"root {width}") == last + 1).all()
        found = fastps.reduce_to(own, last)
        assert found is None if me != last else np.allclose(found, average)
    longest = max(steps)
    last = fastps.join()
    assert steps[last] == longest, (last, steps)


def everything() -> str:
    """Have rounds in which other workers are last, with ordinary work between them."""
    fastps.init()
    size = fastps.size()
    some = fastps.add_process_set([0, size - 1])
    SETS[:] = fastps.add_process_set(range(size)), some
    for width in (3, 70_000):
        for steps in ([2, 4, 3], [0, 1, 5], [1, 1, 1], [3, 0, 0]):
            one_round(steps[:size], some, width=width)
            everyone = fastps.allreduce(np.full(2, fastps.rank(), np.float32), f"named {2}")
            assert (everyone == (size - 1) / 2).all()
            assert fastps.allgather(np.array([fastps.rank()])).tolist() == list(range(size))
    refusals()
    fastps.barrier()
    fastps.shutdown()
    return "done"


def over_first() -> str:
    """Run out of data while a root of small broadcasts, or who is no root of sums, is ahead."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    steps = [10 if rank == 1 else 13 + (rank == 0) for rank in range(size)]
    for _ in range(3):
        for kind in ("broadcast", "reduce", "two names"):
            for step in range(steps[me]):
                if kind == "reduce":
                    total = fastps.reduce_to(np.full(6, me + 1.0), op=fastps.Sum)
                    want = sum(rank + 1.0 for rank in takers(step, steps))
                    assert total is None if me else (total == want).all(), (step, total, want)
                    continue
                for name in (None, f"z{step % 2}")[: 1 + (kind != "broadcast")]:
                    own = np.full(6, float(step) if me == 0 else -1.0)
                    assert (fastps.broadcast(own, 0, name=name) == step).all()
            fastps.join()
            assert (fastps.allreduce(np.ones(3), op=fastps.Sum) == size).all()
    some = fastps.add_process_set(range(size))
    for value in (1.0, 2.0):  # what is past of a name that is forgotten is nobody's any more
        for _ in range(2):
            own = np.full(6, value if me == 0 else -1.0)
            assert (fastps.broadcast(own, 0, name="w", process_set=some) == value).all()
        fastps.forget(["w"])
        fastps.join()
    fastps.shutdown()
    return "done"


def refusals() -> None:
    """Get an error for what cannot go on without a worker, and go on."""
    me, size = fastps.rank(), fastps.size()
    if me == 0:
        with pytest.raises(StallError, match=r"workers \[1, 2\] have neither"):
            fastps.join(timeout_s=0.3)
        for other in range(1, size):
            fastps.send(np.ones(1), other)
        assert fastps.join() >= 0
        return
    fastps.receive(np.empty(1), 0)
    assert fastps.allreduce(np.ones(1), op=fastps.Sum)[0] == size - 1  # worker 0 has joined
    for call in (
        lambda: fastps.allgather(np.ones(2)),
        lambda: fastps.broadcast(np.ones(2), 0),
        lambda: fastps.reducescatter(np.ones(4), name="scattered"),
    ):
        with pytest.raises(MismatchError, match=r"worker 0 has run out of data"):
            call()
    with pytest.raises(MismatchError):
        fastps.broadcast(np.ones(2), 0, name="from who has gone")
    if me == size - 1:
        with pytest.raises(MismatchError, match=r"^Adasum .*worker 0 has run out of data"):
            fastps.allreduce(np.ones(2), op=fastps.Adasum, process_set=SETS[1])
    for call in (
        lambda: fastps.allreduce(np.ones(2, np.int32)),
        lambda: fastps.push_pull(np.ones(2, np.int32), "whole numbers"),
    ):
        with pytest.raises(FastPSError, match="average of integers"):
            call()
    meetings()
    fastps.join()


def under_a_rule() -> str:
    """Have all forms of a name whose rule leaves out whom it likes while somebody has joined."""
    fastps.init()
    me, own = fastps.rank(), np.full(4, 1.0 + fastps.rank(), np.float32)
    assert fastps.push_pull(own, "w", rule="median")[0] == 2.0
    if me == 2:
        fastps.join()
    else:
        for average in (
            lambda: fastps.push_pull(own, "w"),
            lambda: fastps.push_pull_async(own, "w").wait(),
            lambda: fastps.allreduce(own, "w"),
            lambda: fastps.allreduce_async(own, "w").wait(),
        ):
            found = average()
            assert found[0] == 1.0, "the median of 1, 2 and nothing"
        plain = fastps.allreduce_async(own, "plain", postscale_factor=2.0).wait()
        assert plain[0] == np.float32(3.0), "the average of 1 and 2, doubled"
        fastps.join()
    fastps.shutdown()
    return "done"


def votes() -> str:
    """Average signs without a scale, on which a worker without data would vote too."""
    fastps.init()
    signs = fastps.Compression.onebit(scaling=False)
    scaled = fastps.Compression.onebit()
    mine = np.full(40_000, -2.0, np.float32)
    assert (fastps.push_pull(mine, "signs", compression=signs) == -1).all()
    assert (fastps.push_pull(mine, "scaled", compression=scaled) == -2).all()
    if fastps.rank() == 0:
        with pytest.raises(FastPSError, match=r"'signs' is compressed .*join.*scaling=True"):
            fastps.push_pull(mine, "signs")
        assert np.allclose(fastps.push_pull(mine, "scaled"), -2)
    fastps.join()
    fastps.shutdown()
    return "done"


def meetings() -> None:
    """Meet nobody who has joined: those at work hear of it at once, whoever comes first.

    Barriers are those of the workers that are left.
    """
    began = time.monotonic()
    for call in (
        lambda: fastps.broadcast_object({"a": 1}, 1),
        lambda: fastps.broadcast_object({"a": 1}, 1, process_set=everyone()),
        lambda: fastps.allgather_object("a"),
        lambda: fastps.forget("whole numbers"),
    ):
        with pytest.raises(MismatchError, match=r"worker 0 has run out of data and called join"):
            call()
    for _ in range(2):
        fastps.barrier()
        fastps.synchronize(fastps.barrier_async())
    fastps.barrier(process_set=everyone())
    assert time.monotonic() - began < slowed(5.0)


def meet_as_one_joins() -> str:
    """Wait in meetings for a worker that then joins: a barrier goes on, an object does not."""
    fastps.init()
    if fastps.rank() == 0:
        fastps.receive(np.empty(1), 1)
        assert fastps.join() >= 0
    else:
        flight = fastps.barrier_async()
        if fastps.rank() == 2:
            fastps.send(np.ones(1), 1)
        else:
            fastps.receive(np.empty(1), 2)
            fastps.send(np.ones(1), 0)
        fastps.synchronize(flight)
        with pytest.raises(MismatchError, match=r"worker 0.* has run out of data"):
            fastps.broadcast_object({}, 1)
        fastps.join()
    fastps.barrier()
    fastps.shutdown()
    return "done"


def divided_by_all() -> str:
    """Run out of data one after the other, where averages are divided by all workers."""
    fastps.init(join_average="all")
    me, size = fastps.rank(), fastps.size()
    group = fastps.add_process_set(range(size))
    for step in range(me + 1):
        there = range(step, size)
        for dtype in (np.int32, np.int64, np.float16, np.float32):
            own, want = np.full(5, 6 * me + 6, dtype), sum(6 * rank + 6 for rank in there) / size
            found = (
                fastps.allreduce(own),
                fastps.allreduce(own, f"named {dtype.__name__}"),
                fastps.allreduce(own, process_set=group),
                *fastps.grouped_allreduce([own, own]),
                fastps.push_pull(own.copy(), f"pushed {dtype.__name__}"),
                fastps.reduce_to(own, size - 1),
            )
            for array in found:
                assert array is None or array.tolist() == [want] * 5, (step, array, want)
    assert fastps.join() == size - 1
    fastps.shutdown()
    return "done"


def everyone() -> fastps.ProcessSet:
    """Give the set of all workers that everything() has added."""
    return SETS[0]


def lost() -> str:
    """Lose a worker while another one waits in join()."""
    fastps.init()
    fastps.allreduce(np.ones(1))
    fastps.barrier()  # both have the result
    if fastps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="worker 1"):
        fastps.join()
    return "told"


def left() -> list[str]:
    """Leave in order while others wait in join(), after a round in which all had joined."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    fastps.allreduce(np.ones(1))
    fastps.join()
    if me == size - 1:
        fastps.shutdown()
        return []
    errors = []
    for _ in range(2):
        with pytest.raises(PeerLostError) as error:
            fastps.join()
        errors.append(str(error.value))
    return errors


def unknown_names() -> str:
    """Start what a worker that has joined has never heard of, with all that is said of a name."""
    fastps.init()
    onebit = fastps.Compression.onebit(scaling=True)
    half = fastps.Compression.fp16
    options = {
        "onebit": {"compression": onebit},
        "topk": {"compression": fastps.Compression.topk(8)},
        "half": {"compression": half},
        "plain": {},
    }
    for turn in range(2):
        if fastps.rank() == 0:
            for name, option in options.items():
                array = np.full(40_000, 3.0, np.float32)
                if name == "topk":
                    array[8:] = 0
                found = fastps.push_pull(array, f"{name} {turn}", **option)
                np.testing.assert_array_equal(found, array, name)
        fastps.join()
    fastps.shutdown()
    return "done"
