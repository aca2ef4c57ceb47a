# SPDX-License-Identifier: Apache-2.0
"""What the workers of elastic jobs do: sums that tell who took part in them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps.session import elastic

SIZES = (1, 3000, 16384, 70_000, 300_000)  # of a line, inline, staged, in partitions


def train(*, steps: int = 40, pause_s: float = 0.0) -> dict[str, Any]:
    """Sum a bit for each worker; return by step which bits each sum has, and what was told."""
    me = int(os.environ["FASTPS_RANK"])
    views: list[str] = []
    fastps.init(elastic=fastps.Elastic(min=1, on_view=lambda view: views.append(str(view))))
    mark("READY")
    kept = [fastps.empty((size,), np.int32) for size in SIZES]
    sums, slowest = [], 0.0
    for step in range(steps):
        began = time.monotonic()
        places = range(len(SIZES)) if step % 2 else reversed(range(len(SIZES)))
        handles = {}
        for place in places:
            is_in_place = bool((place + step) % 2)
            array = kept[place] if is_in_place else np.empty(SIZES[place], np.int32)
            array.fill(1 << me)
            handles[place] = (
                array,
                fastps.push_pull_async(
                    array, f"t{place}", average=False, out=array if is_in_place else None
                ),
            )
        if step % 4 == 3:
            time.sleep(pause_s)
        found = []
        for place, (array, handle) in handles.items():
            result = fastps.synchronize(handle)
            assert (result == result[0]).all(), (step, place, np.unique(result))
            assert result is array or (array == 1 << me).all(), (step, place)
            found.append(int(result[0]))
        sums.append(found)
        slowest = max(slowest, time.monotonic() - began)
        mark("STEP", step)
    fastps.barrier()
    fastps.shutdown()
    return {"sums": sums, "views": views, "slowest": slowest, "size": fastps.is_initialized()}


def wait_apart(*, steps: int = 30) -> dict[str, Any]:
    """Wait for results in another order on each worker, and poll for some."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    sums = []
    for step in range(steps):
        first = fastps.push_pull_async(np.full(5, 1 << me, np.int32), "first", average=False)
        if me % 2:
            before = int(first.wait()[0])
            second = fastps.push_pull_async(np.full(9, 1 << me, np.int32), "second", average=False)
            sums.append([before, int(second.wait()[0])])
        else:
            second = fastps.push_pull_async(np.full(9, 1 << me, np.int32), "second", average=False)
            if step % 2:
                while not second.poll():
                    time.sleep(0.001)
            after = int(second.wait()[0])
            sums.append([int(first.wait()[0]), after])
        mark("STEP", step)
    fastps.shutdown()
    return {"sums": sums}


def broadcast(*, root: int) -> dict[str, Any]:
    """Broadcast from a worker, whatever its rank has become."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    found = []
    for step in range(20):
        array = np.full(1000, me * 100 + step, np.int64)
        try:
            fastps.broadcast(array, root, name="b")
        except (fastps.PeerLostError, ValueError) as error:
            return {"found": found, "error": str(error)}
        found.append(int(array[0]))
        mark("STEP", step)
    return {"found": found}


def average() -> dict[str, Any]:
    """Average: the divisor is that of the view in which the sum was made."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    found = []
    for step in range(20):
        array = np.full(70_000, 6.0 * me, np.float32)
        found.append(float(fastps.push_pull(array, "w")[-1]))
        mark("STEP", step)
    return {"found": found, "threads": sorted(one.name for one in threading.enumerate())}


def look_on(*, steps: int, victim: int) -> dict[str, Any]:
    """Gather ranks, again where the view changes, while another thread asks for the size."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me = fastps.rank()
    seen: set[int] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.add(fastps.size())

    looking = threading.Thread(target=look)
    looking.start()
    gathered, errors = [], []
    for step in range(steps):
        if me == victim and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            try:
                gathered.append(len(fastps.allgather(np.full(1, step))))
                break
            except fastps.ViewChangedError as error:
                errors.append(str(error))
    is_over.set()
    looking.join()
    return {"seen": sorted(seen), "gathered": gathered, "errors": errors}


def wait_late(*, victim: int) -> dict[str, Any]:
    """Wait for an operation of a group long after the view in which it began."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    before, me = fastps.size(), fastps.rank()
    handle = None if me == victim else fastps.allgather_async(np.zeros(3))
    fastps.barrier()
    if handle is None:
        os.kill(os.getpid(), signal.SIGKILL)
    assert handle is not None
    while fastps.size() == before:
        time.sleep(0.01)
    fastps.push_pull(np.zeros(3), "y")
    began, text = time.monotonic(), ""
    try:
        handle.wait()
    except fastps.ViewChangedError as error:
        text = str(error)
    return {"text": text, "seconds": time.monotonic() - began}


def barriers(*, victim: int) -> dict[str, Any]:
    """Wait in a barrier with one thread, before another has started what others do first."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, ones, found = fastps.rank(), np.ones(3), []
    for step in range(20):
        if me == victim and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 0:
            waiting = threading.Thread(target=fastps.barrier)
            waiting.start()
            time.sleep(0.02)
            found.append(fastps.push_pull(ones, "x", average=False).tolist())
            waiting.join()
        else:
            found.append(fastps.push_pull(ones, "x", average=False).tolist())
            fastps.barrier()
        mark("STEP", step)
    return {"found": found}


def in_place() -> dict[str, Any]:
    """Reduce in place without a wait: what comes next begins with the result."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    polled, dropped = np.ones(3), np.ones(3)
    of_set = np.ones(3)
    every = fastps.add_process_set([0, 1])
    fastps.allreduce_async(of_set, "of a set", out=of_set, op=fastps.Sum, process_set=every)
    handle = fastps.push_pull_async(polled, "polled", average=False, out=polled)
    fastps.push_pull_async(dropped, "dropped", average=False, out=dropped)
    while not handle.poll():
        time.sleep(0.001)
    again = fastps.push_pull_async(polled, "polled", average=False, out=polled)
    while (dropped == 1).all() or (of_set == 1).all():
        time.sleep(0.001)
    fastps.barrier()  # so that all have dropped theirs
    return {
        "polled": again.wait().tolist(), "dropped": dropped.tolist(), "of_set": of_set.tolist()
    }  # fmt: skip


def leave_early(*, steps: int) -> dict[str, Any]:
    """Let worker 1 leave in order while the others go on."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, began, text = fastps.rank(), time.monotonic(), ""
    try:
        for step in range(steps):
            if me == 1 and step == 2:
                fastps.shutdown()
                return {}
            fastps.push_pull(np.ones(3), "x")
    except fastps.PeerLostError as error:
        text = str(error)
    return {"text": text, "seconds": time.monotonic() - began}


def leave_at_once() -> dict[str, Any]:
    """Leave without having waited for a result that has landed here."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    handle = fastps.push_pull_async(np.ones(3), "x", average=False)
    if fastps.rank() == 1:
        handle._parts[-1].wait()
        fastps.shutdown()
        return {}
    time.sleep(0.3)
    return {"found": handle.wait().tolist()}


def leave_a_maximum() -> dict[str, Any]:
    """Leave after a maximum has landed here, before fastps:commit looks at it again."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    if fastps.rank() == 1:
        elastic._LOOK_S = 60.0
    fastps.barrier()
    if fastps.rank() == 0:
        time.sleep(0.3)  # so that worker 1 looks at its operation before that lands
    handle = fastps.allreduce_async(np.ones(4), op=fastps.Max)
    if fastps.rank() == 1:
        handle.operations[0].wait(timeout_s=60)
        fastps.shutdown()
        return {}
    return {"found": handle.wait().tolist()}


def tell_and_communicate() -> dict[str, Any]:
    """Call an operation from on_view, which may not communicate."""
    texts = []

    def told(view: fastps.View) -> None:
        for call in (lambda: fastps.push_pull(np.ones(3), "v"), fastps.barrier):
            try:
                call()
            except fastps.FastPSError as error:
                texts.append(str(error))

    fastps.init(elastic=fastps.Elastic(min=1, on_view=told))
    mark("READY")
    for step in range(20):
        fastps.push_pull(np.ones(70_000), "x")
        mark("STEP", step)
    return {"texts": texts}


def wait_in_time() -> dict[str, Any]:
    """Wait with a time while another worker holds its interpreter lock."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, is_late = fastps.rank(), False
    fastps.push_pull(np.ones(3), "x")
    if me == 1:
        fastps.push_pull_async(np.ones(3), "y", average=False)
        ctypes.PyDLL(None).usleep(3_000_000)
        time.sleep(0.5)
        return {}
    handle = fastps.push_pull_async(np.ones(3), "y", average=False)
    time.sleep(0.2)
    try:
        handle.wait(0.2)
    except fastps.StallError:
        is_late = True
    return {"is_late": is_late, "found": handle.wait().tolist()}


STEP_BIT = 16  # of a number: below are bits of workers, above the step times their number


def collectives(*, steps: int, pause_s: float = 0.0) -> dict[str, Any]:
    """Do an operation of each kind in turn, again where the view changes; return all results.

    A number of a step that holds one of another, or results that differ, tell that an operation
    was complete for one worker and not for another.
    """
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    found: list[Any] = []
    errors: list[tuple[int, str]] = []
    every: list[Any] = []
    for step in range(steps):
        mine = (1 << me) | step << STEP_BIT
        while True:
            try:
                found.append(_collective(step, mine, every))
                break
            except fastps.ViewChangedError as error:
                errors.append((step, str(error)))
                every.clear()
        time.sleep(pause_s)
        mark("STEP", step)
    fastps.barrier()
    fastps.shutdown()
    return {"found": found, "errors": errors}


def _collective(step: int, mine: int, every: list[Any]) -> list[int]:
    """Do the operation of a step, and return what it brought, of each worker or in sum."""
    size, kind = fastps.size(), step % 9
    array = np.full(500, mine)
    if kind == 0:
        fastps.allreduce(array, out=array, op=fastps.Sum)  # in place
        return [int(array[0])]
    if kind == 1:
        return [int(one) for one in fastps.allgather(array[:1])]
    if kind == 2:
        return [int(one) for one in np.unique(fastps.allgather(array[: 1 + fastps.rank() % 2]))]
    if kind == 3:
        handle = fastps.allgather_async(array[: 1 + fastps.rank()], name="later")
        time.sleep(0.002)
        return [int(one) for one in np.unique(fastps.synchronize(handle))]
    if kind == 4:
        return [int(one) for one in fastps.alltoall(array[:size])]
    if kind == 5:
        return [int(fastps.reducescatter(np.full(size * 50, mine), op=fastps.Sum)[0])]
    if kind == 6:
        return [int(fastps.broadcast(array, size - 1)[0]) >> STEP_BIT]
    if kind == 7:
        if not every:
            every.append(fastps.add_process_set(list(range(size))))
        fastps.allreduce(array, "set", out=array, op=fastps.Sum, process_set=every[0])
        return [int(array[0])]
    return fastps.allgather_object(mine)


def learn(*, steps: int, deaths: dict[str, int]) -> str:
    """Add averages of noise, by name and without; return a digest of all. A worker may die."""
    me = os.environ["FASTPS_RANK"]
    fastps.init()
    rng, digest = np.random.default_rng(int(me)), hashlib.sha256()
    weights = np.zeros(5000, np.float32)
    for step in range(steps):
        noise = rng.standard_normal(weights.shape).astype(np.float32)
        weights += fastps.push_pull(noise, f"noise {step % 3}")
        while True:
            try:
                measured = fastps.allreduce(noise[:9])
                break
            except fastps.ViewChangedError:
                pass
        digest.update(weights.tobytes() + measured.tobytes())
        if deaths.get(me) == step:
            os.kill(os.getpid(), signal.SIGKILL)
    return digest.hexdigest()


def use_windows(*, victim: int) -> dict[str, Any]:
    """Use a window of a view that has ended, then make it again."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, before, array = fastps.rank(), fastps.size(), np.ones(3)
    fastps.win_create(array, "w")
    if me == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while fastps.size() == before:
        time.sleep(0.01)
    try:
        fastps.win_put(array, "w")
    except fastps.ViewChangedError as error:
        text = str(error)
    fastps.win_create(array, "w")
    fastps.win_put(array, "w")
    fastps.barrier()
    return {"text": text, "found": fastps.win_update("w").tolist()}


def start_differently() -> str:
    """Start different things under a name; worker 0, which would pass that on, dies meanwhile."""
    fastps.init()
    me, x = fastps.rank(), np.ones(9, np.float32)
    fastps.push_pull(x, "warm")
    fastps.barrier()
    if me == 0:
        time.sleep(1.1)  # the others have waited for long enough to say so
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        try:
            if me == 1:
                fastps.push_pull(x, "x")
            else:
                fastps.allreduce(x, op=fastps.Max, name="x")
        except fastps.ViewChangedError:
            continue
        except fastps.MismatchError as error:
            fastps.shutdown()
            return str(error)
        return "no error"


def count(*, steps: int, victim: int) -> dict[str, Any]:
    """Sum in steps, of which one kills a worker; return what is counted after each."""
    fastps.init()
    me, x, found = fastps.rank(), np.ones(9, np.float32), []
    for step in range(steps):
        if me == victim and step == steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        fastps.push_pull(x, "x")
        fastps.mark_step()
        numbers = fastps.statistics()
        found.append((numbers.get("steps", 0), numbers["operations"]))
        assert 0 <= numbers.get("exposed_share", 0) <= 1
    fastps.shutdown()
    return {"counts": found}
