# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_colocated.py do: some of them are servers too."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from run_program import mark, now

import fastps
from fastps.session import current

COUNTS = (0, 1, 1000, 100_003)
LARGE = 1 << 20  # elements of float32: 4 MiB


def _place() -> dict[str, Any]:
    """Tell how the job looks from here."""
    connections = current.current().connections
    job = connections.job
    return {
        "machines": [list(ranks) for ranks in job.machines],
        "joint": {str(n): i for i, n in enumerate(job.owners) if n < job.size},
        "apart": len(job.members) - job.size,
        "local": [fastps.local_rank(), fastps.local_size()],
        "unix": [bool(server.unix) for server in job.servers],
    }


def _values(rank: int, count: int, round_: int) -> np.ndarray:
    rng = np.random.default_rng([rank, count, round_])
    return rng.standard_normal(count).astype(np.float32)


def _reduce(size: int, rank: int, round_: int) -> None:
    """Sum tensors of several sizes and compare with NumPy, in rank order, bit for bit."""
    arrays = [_values(rank, count, round_) for count in COUNTS]
    names = [f"sum {count}" for count in COUNTS]
    for count, got in zip(COUNTS, fastps.push_pull(arrays, names, average=False), strict=True):
        want = _values(0, count, round_)
        for other in range(1, size):
            want = want + _values(other, count, round_)
        assert np.array_equal(got, want), (count, round_)
    ints = fastps.push_pull(np.arange(5000) * (rank + 1) + round_, "mean", average=True)
    total = np.arange(5000) * (size * (size + 1) // 2) + round_ * size
    assert np.array_equal(ints, total // size)


def _share(size: int, rank: int, round_: int) -> None:
    for root in range(size):
        array = np.full(40_000, float(rank if rank != root else 100 * root + round_))
        fastps.broadcast(array, root, name=f"from {root}")
        assert (array == 100 * root + round_).all()
    assert fastps.broadcast_object({"round": round_} if rank == 1 else None, 1) == {
        "round": round_
    }
    fastps.barrier()


def work(*, memberships: int = 1, rounds: int = 3) -> dict[str, Any]:
    """Do everything a few times, in one membership after the other."""
    place: dict[str, Any] = {}
    for _ in range(memberships):
        fastps.init()
        rank, size = fastps.rank(), fastps.size()
        place = _place()
        for round_ in range(rounds):
            _reduce(size, rank, round_)
            _share(size, rank, round_)
        fastps.shutdown()
    names = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    assert not names, names
    return place


def shares() -> dict[str, Any]:
    """Sum large tensors, then tell how many bytes each server owns of them."""
    fastps.init()
    owned: dict[int, int] = {}
    client = current.current()._client
    assert client is not None
    declare = client.declare

    def note(*args: Any, **options: Any) -> Any:
        answers = declare(*args, **options)
        for answer in answers:
            for nbytes, owner in answer.pieces:
                owned[owner] = owned.get(owner, 0) + nbytes
        return answers

    client.declare = note  # type: ignore[method-assign]
    arrays = [np.full(LARGE + 1000 * index, 1.0, np.float32) for index in range(3)]
    names = [f"large {index}" for index in range(3)]
    before = current.current().statistics()
    fastps.barrier()  # then the others may begin
    sums = fastps.push_pull(arrays, names, average=False)
    fastps.barrier()
    after = current.current().statistics()
    assert all((array == fastps.size()).all() for array in sums)
    counts = {name: after[name] - before[name] for name in after}
    place = _place() | {
        "rank": fastps.rank(),
        "owned": {str(client.job.owners.index(n)): nbytes for n, nbytes in owned.items()},
        "nbytes": sum(array.nbytes for array in arrays),
        "sent": counts["bytes_sent"],
        "served": counts.get("server_bytes_received", 0),
    }
    fastps.shutdown()
    return place


def train(*, leaver: int = -1, steps: int = 100_000) -> dict[str, Any]:
    """Sum until it fails, and tell how; the leaver ends in order after 20 steps."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    array = np.full(60_000, rank + 1.0)
    for step in range(steps):
        if rank == leaver and step == 20:
            mark("LEAVING", now())
            fastps.shutdown()
            return {"left": now()}
        try:
            result = fastps.push_pull(array, "w", average=False)
        except fastps.FastPSError as error:
            return {"error": type(error).__name__, "text": str(error), "at": now()}
        assert (result == size * (size + 1) / 2).all()
        if step % 10 == 0:
            mark("STEP", step)
    return {"steps": steps}


def leave_while_idle(*, pause_s: float) -> dict[str, Any]:
    """Sum once; worker 1 leaves at once, the others need nothing any more and leave later."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    result = fastps.push_pull(np.full(60_000, rank + 1.0), "w", average=False)
    assert (result == size * (size + 1) / 2).all()
    if rank != 1:
        threading.Event().wait(pause_s)
    fastps.shutdown()
    return {"rank": rank}


def leave_one_by_one(*, pause_s: float) -> dict[str, Any]:
    """Leave with pauses between; what was summed before is right everywhere."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    began = now()
    handle = fastps.push_pull_async(np.full(LARGE, rank + 1.0), "last", average=False)
    if rank:
        threading.Event().wait(rank * pause_s)  # late on purpose: others leave before
    assert (handle.wait() == size * (size + 1) / 2).all()
    fastps.shutdown()
    return {"took": now() - began}


def busy() -> dict[str, Any]:
    """Let one joint worker hold the GIL while the others sum what it has pushed already."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    array = np.full(LARGE, rank + 1.0, np.float32)
    fastps.push_pull(array, "w", average=False)
    fastps.barrier()
    began = now()
    handle = fastps.push_pull_async(array, "w", average=False)
    held = 0.0
    if rank == 0:
        held = hold_gil(1.0)
    assert (handle.wait() == size * (size + 1) / 2).all()
    took = now() - began
    fastps.barrier()
    fastps.shutdown()
    return {"took": took, "held": held}


def hold_gil(seconds: float) -> float:
    """Keep the interpreter in one call that never lets go of the GIL; give how long it took."""
    import ctypes  # noqa: PLC0415

    began = time.monotonic()
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return time.monotonic() - began
