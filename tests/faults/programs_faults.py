# SPDX-License-Identifier: Apache-2.0
"""What the workers of the fault tests do."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from run_program import mark, now

import fastps
from fastps.session import current


def join() -> tuple[int, int]:
    """Join the job and say so; give rank and size."""
    fastps.init()
    mark("READY")
    return fastps.rank(), fastps.size()


def outcome(call: Callable[[], Any]) -> list[str]:
    """Give name and message of what a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def total(array: np.ndarray, name: str, **options: Any) -> np.ndarray:
    """Sum one array."""
    result = fastps.push_pull(array, name, average=False, **options)
    assert isinstance(result, np.ndarray)
    return result


# ---- training until something happens ----


def train(*, steps: int = 1_000_000, elements: int = 30_000, every: int = 10) -> dict[str, Any]:
    """Sum and check until an error, or to the end; tell what happened and when."""
    rank, size = join()
    weights = [np.full(elements + 1 + i, rank + 1.0, np.float32) for i in range(3)]
    outputs = [np.empty_like(array) for array in weights]
    names = ["w0", "w1", "w2"]
    ranks = size * (size + 1) / 2
    for step in range(1, steps + 1):
        for array in weights:
            array[step % elements] = step
        try:
            fastps.push_pull(weights, names, average=False, out=outputs)
        except fastps.FastPSError as error:
            return {"error": type(error).__name__, "text": str(error), "at": now(), "step": step}
        for output in outputs:
            assert output[step % elements] == step * size, step
            assert output[-1] == ranks, step
        for array in weights:
            array[step % elements] = rank + 1
        if step % every == 0:
            mark("STEP", step)
    return {"step": steps}


def train_with_addresses(*, steps: int) -> dict[str, Any]:
    """Train after telling where the servers listen, until a sum says that all may stop."""
    rank, size = join()
    client = current.current()._client
    assert client is not None
    if rank == 0:
        for server in client.job.servers:
            mark("SERVER", server.host, server.port)
    array = np.full(50_000, rank + 1.0)
    step = 0
    goes_on = True
    while goes_on:
        step += 1
        result = total(array, "gradient")
        assert (result == size * (size + 1) / 2).all(), step
        goes_on = not total(np.array([is_told_to_stop()]), "stop").any()
        if step % 20 == 0:
            mark("STEP", step)
    assert step >= steps
    return {"step": step}


_stop: list[int] = []


def is_told_to_stop() -> bool:
    """Tell whether SIGUSR1 came; looks for it from the first call on."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda *_: _stop.append(1))
    return bool(_stop)


# ---- disagreement ----

GOOD = "good"


def disagree() -> list[list[str]]:
    """Disagree in every way about tensors; work on after each."""
    rank, size = join()
    odd = rank == size - 1
    session_ = current.current()
    # what was declared in time, what is declared by the operation, what is in flight already
    found = [
        outcome(lambda: total(np.zeros(4 if odd else 3), "shape")),
        outcome(lambda: total(np.zeros((2, 3) if odd else (3, 2)), "layout")),
        outcome(lambda: total(np.zeros(3, np.int32 if odd else np.float32), "dtype")),
        outcome(lambda: fastps.push_pull(np.zeros(70_000), "operation", average=odd)),
        outcome(lambda: fastps.broadcast(np.zeros(70_000), int(odd), name="root")),
        outcome(lambda: fastps.broadcast(np.zeros(5), size - 1 if odd else 0, name="small root")),
        outcome(
            lambda: (
                fastps.broadcast(np.zeros(9), name="kind") if odd else total(np.zeros(9), "kind")
            )
        ),
        outcome(
            lambda: (
                total(np.zeros(9), "kind of the root")
                if rank == 0
                else fastps.broadcast(np.zeros(9), name="kind of the root")
            )
        ),
    ]
    found.append(outcome(lambda: change_of_mind(rank, odd=odd)))
    assert (total(np.full(5, rank + 1.0), GOOD) == size * (size + 1) / 2).all()
    # an operation that failed for its kind may be repeated when all agree
    for name in ("operation", "root", "small root", "kind", "kind of the root"):
        count = {"operation": 70_000, "root": 70_000, "small root": 5}.get(name, 9)
        for step in range(4):
            result = total(np.full(count, float(step + rank)), name)
            assert (result == step * size + size * (size - 1) / 2).all(), (name, step)
    assert session_.statistics()["operations"] > 0
    return found


def change_of_mind(rank: int, *, odd: bool) -> None:
    """Agree first; then one declares another shape while the others wait for a sum."""
    total(np.zeros(6), "changed")
    total(np.zeros(7 if odd else 6), "changed")


def disagree_about_root(roots: list[int], count: int) -> list[str]:
    """Broadcast, each from the worker it thinks it should be."""
    rank, _ = join()
    return outcome(lambda: fastps.broadcast(np.zeros(count), roots[rank], name="r"))


def declare_partitions() -> list[str]:
    """Use one tensor, with the partition size that this process was given."""
    join()
    return outcome(lambda: total(np.zeros(100_000), "partitions"))


def disagree_often(*, times: int) -> int:
    """Disagree about one name again and again; ranks get to it at very different times."""
    rank, size = join()
    found = 0
    if rank == size - 1:
        time.sleep(0.5)  # the fault: the others are some operations ahead
    for _ in range(times):
        error = outcome(lambda: fastps.push_pull(np.zeros(50_000), "w", average=rank == 0))
        assert error[:1] == ["MismatchError"], error
        found += 1
    fastps.barrier()
    for step in range(4):
        assert (total(np.full(50_000, float(step)), "w") == step * size).all()
    return found


# ---- misuse of one process ----


def misuse() -> dict[str, list[str]]:
    """Do what is not allowed while an operation of rank 0 is in flight for sure."""
    rank, size = join()
    found: dict[str, list[str]] = {}
    array = np.full(40_000, rank + 1.0)
    if rank == 0:
        handle = fastps.push_pull_async(array, "busy", average=False)
        assert not fastps.poll(handle)
        found["twice"] = outcome(lambda: fastps.push_pull_async(array, "busy"))
        found["twice in a list"] = outcome(
            lambda: fastps.push_pull_async([np.zeros(3), array], ["fine", "busy"])
        )
        found["resized"] = outcome(lambda: array.resize(80_000))
        found["stall"] = outcome(lambda: handle.wait(timeout_s=0.2))
        found.update(wrong_arrays())
        found["freed"] = freed_in_flight()
        fastps.barrier()
        assert (handle.wait()[:] == size * (size + 1) / 2).all()
    else:
        fastps.barrier()
        total(array, "busy")
        total(np.full(30_000, 2.0), "freed")
        total(np.full(30_000, 2.0), "dropped")
    return after_misuse(rank, size, found)


def after_misuse(rank: int, size: int, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Wait for what misuse() left in flight, and work on."""
    if rank == 0:
        for name in ("freed", "dropped"):
            handle = _kept.pop(name, None)
            if handle is not None:
                assert (handle.wait()[:] == 3.0).all(), name
        del handle
        gc.collect()
        assert _watched[0]() is None, "an array was kept alive after its operation"
    fastps.barrier()
    for name in ("busy", "freed", "dropped"):
        count = 40_000 if name == "busy" else 30_000
        for step in range(2):
            result = total_when_free(np.full(count, rank + 1.0 + step), name)
            assert (result == size * (size + 1) / 2 + step * size).all(), name
    return found


def total_when_free(array: np.ndarray, name: str) -> np.ndarray:
    """Sum under a name whose last operation nobody waited for."""
    deadline = now() + 30
    while True:
        try:
            return total(array, name)
        except fastps.FastPSError as error:
            if "in flight" not in str(error) or now() > deadline:
                raise
            time.sleep(0.001)


_kept: dict[str, fastps.Handle] = {}
_watched: list[weakref.ref[np.ndarray]] = []


def freed_in_flight() -> list[str]:
    """Drop the last reference to an input; and drop a handle without waiting."""
    array = np.full(30_000, 1.0)
    _watched.append(weakref.ref(array))
    _kept["freed"] = fastps.push_pull_async(array, "freed", average=False, out=array)
    del array
    gc.collect()
    assert _watched[0]() is not None, "an array in flight was freed"
    fastps.push_pull_async(np.full(30_000, 1.0), "dropped", average=False)
    gc.collect()
    return []


def wrong_arrays() -> dict[str, list[str]]:
    """Try what cannot be reduced."""
    grid = np.zeros((8, 8))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    base = np.zeros(10)
    calls: dict[str, Callable[[], Any]] = {
        "not contiguous": lambda: total(grid[:, ::2], "n1"),
        "fortran": lambda: total(np.asfortranarray(grid + np.arange(8)), "n2"),
        "output not contiguous": lambda: total(np.zeros(4), "n3", out=base[::2][:4]),
        "complex": lambda: total(np.zeros(3, np.complex64), "n4"),
        "big endian": lambda: total(np.zeros(3, ">f4"), "n5"),
        "object": lambda: total(np.array([None]), "n6"),
        "unsigned": lambda: total(np.zeros(3, np.uint32), "n7"),
        "list": lambda: fastps.push_pull([1.0, 2.0], "n8"),
        "read-only output": lambda: total(np.zeros(3), "n9", out=frozen),
        "read-only in place": lambda: total(frozen, "n10", out=frozen),
        "read-only broadcast": lambda: fastps.broadcast(frozen, 1, name="n11"),
        "other shape": lambda: total(np.zeros(3), "n12", out=np.zeros(4)),
        "other dtype": lambda: total(np.zeros(3), "n13", out=np.zeros(3, np.int64)),
        "overlap": lambda: total(base[:6], "n14", out=base[2:8]),
        "mean of booleans": lambda: fastps.push_pull(np.zeros(3, bool), "n15"),
        "no name": lambda: total(np.zeros(3), ""),
        "name twice": lambda: fastps.push_pull([base, grid], ["n16", "n16"]),
        "long name": lambda: total(np.zeros(3), "x" * 2000),
        "name that is no text": lambda: total(np.zeros(3), "\ud800"),
        "too few priorities": lambda: fastps.push_pull([base], ["n18"], priority=[]),
        "large priority": lambda: fastps.push_pull([base], ["n18"], priority=1 << 40),
        "large priority of one": lambda: total(base, "n18", priority=-(1 << 40)),
        "broken priority": lambda: fastps.push_pull(
            [base, grid], ["n18", "n19"], priority=[1, "2"]
        ),
        "too few names": lambda: fastps.push_pull([base, grid], ["n17"]),
    }
    return {label: outcome(call) for label, call in calls.items()}


# ---- slow, forked, interrupted, idle ----


def slow_rounds(*, rounds: int, nbytes: int) -> str:
    """Sum large tensors of another content every round and look at every element."""
    rank, size = join()
    base = np.arange(nbytes // 4, dtype=np.float32) % 1000
    mine, output = np.empty_like(base), np.empty_like(base)
    for step in range(rounds):
        np.add(base, rank + step, out=mine)
        handle = fastps.push_pull_async(mine, "large", average=False, out=output)
        mark("ROUND", step)
        handle.wait()
        mine *= -1  # free to write again: nothing of it may still travel
        want = base * size + (size * (size - 1) / 2 + step * size)
        assert np.array_equal(output, want), f"round {step}"
    return "right"


def fork_and_train() -> dict[str, Any]:
    """Fork a child that outlives us, as a data loader does; go on training."""
    rank, size = join()
    total(np.full(1000, 1.0), "before")
    if rank == 0:
        child = os.fork()
        if child == 0:
            be_a_child()
        mark("FORKED", child)
        quick = os.fork()
        if quick == 0:
            raise SystemExit(7)  # the usual end, with everything that runs at exit
        assert os.waitstatus_to_exitcode(os.waitpid(quick, 0)[1]) == 7
    result = total(np.full(1000, 1.0), "before")
    assert (result == size).all()
    return train(every=5)


def be_a_child() -> None:
    """Find that this process has no part in the job; then stay."""
    calls = [
        lambda: total(np.zeros(3), "child"),
        fastps.barrier,
        lambda: fastps.broadcast_object(1),
        fastps.statistics,
    ]
    found = [outcome(call) for call in calls]
    names = {error[0] for error in found if error}
    is_clean = not fastps.is_initialized() and len([error for error in found if error]) == 4
    is_clean = is_clean and fastps.rank() == 0  # loaders share data by it
    fastps.shutdown()  # of nothing
    gc.collect()
    sockets = [
        entry for entry in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{entry}")
        and os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
    ]  # fmt: skip
    mark("CHILD SAW", *names, is_clean, len(sockets))
    signal.pause()
    os._exit(0)


def interrupted() -> str:
    """Be interrupted in a wait, and finish it then."""
    rank, _ = join()
    mine = np.full(20_000, rank + 1.0)
    if rank == 1:
        fastps.barrier()
        total(mine, "late")
        return "late"
    handle = fastps.push_pull_async(mine, "late", average=False)
    try:
        mark("WAITING")
        handle.wait()
    except KeyboardInterrupt:
        mark("INTERRUPTED", now())
    fastps.barrier()
    assert (handle.wait()[:] == 3.0).all()
    return "finished"


def leave_early() -> dict[str, Any]:
    """Rank 1 leaves after five steps in good order, the others go on."""
    rank, _ = join()
    for _ in range(5):
        total(np.full(30_000, 1.0), "w")
    if rank == 1:
        mark("LEAVING", now())
        return {}
    try:
        for _ in range(5):
            total(np.full(30_000, 1.0), "w")
    except fastps.FastPSError as error:
        return {"error": type(error).__name__, "text": str(error), "at": now()}
    return {"error": "none"}


def hold_the_interpreter(*, seconds: float) -> str:
    """Let one worker's interpreter stand still, as a long call of a foreign library may do."""
    rank, size = join()
    total(np.full(20_000, 1.0), "w")
    if rank == 0:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a PyDLL keeps the GIL
    result = total(np.full(20_000, rank + 1.0), "w")
    assert (result == size * (size + 1) / 2).all()
    return "right"


def idle() -> str:
    """Do a little, then nothing: rank 0 waits for a sum, rank 1 for a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before there are threads
    rank, _ = join()
    total(np.full(20_000, 1.0), "w")
    if rank == 0:
        handle = fastps.push_pull_async(np.zeros(5), "later", average=False)
        mark("IDLE")
        handle.wait()
        return "over"
    mark("IDLE")
    signal.sigwait([signal.SIGUSR1])
    total(np.zeros(5), "later")
    return "over"


def shut_down_under_a_wait() -> list[str]:
    """Shut down while another thread waits; give what the wait raised."""
    handle = fastps.push_pull_async(np.zeros(100_000), "never")
    found: list[list[str]] = []
    waiting = threading.Thread(target=lambda: found.append(outcome(handle.wait)))
    waiting.start()
    fastps.barrier()
    fastps.shutdown()
    waiting.join()
    return found[0]


def shut_down_in_flight() -> list[list[str]]:
    """Shut down while a thread of rank 0 waits, begin anew, and do it again."""
    found = []
    for _ in range(3):
        rank, _ = join()
        total(np.full(5, 1.0), "w")
        if rank == 0:
            found.append(shut_down_under_a_wait())
            found.append(outcome(lambda: total(np.zeros(3), "w")))
        else:
            fastps.barrier()
            fastps.shutdown()
        assert not fastps.is_initialized()
        fastps.shutdown()
    return found


def join_only() -> dict[str, Any]:
    """Try to join and tell how that went and how long it took."""
    start = time.monotonic()
    error = outcome(fastps.init)
    return {"error": error, "seconds": time.monotonic() - start}


def join_and_wait() -> str:
    """Join, and be there until the test says that all may go."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    _, size = join()
    fastps.barrier()
    mark("WAITING")
    signal.sigwait([signal.SIGUSR1])
    assert (total(np.full(7, 1.0), "last") == size).all()
    return "over"
