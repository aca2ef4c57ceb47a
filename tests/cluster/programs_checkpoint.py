# SPDX-License-Identifier: Apache-2.0
"""What the workers of jobs with checkpoints do."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
from run_program import mark

import fastps
from fastps import checkpoint
from fastps.errors import CheckpointError, ViewChangedError


def state_of(step: int) -> dict[str, Any]:
    """Make the state of a step, the same on all workers."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((31, 7)).astype(np.float32),
        "layers": [rng.integers(0, 9, 5000), {"b": rng.random(3), "n": step}],
        "s": np.array(step),
    }


def is_state(found: Any, step: int) -> bool:
    """Return whether a restored state is that of a step."""
    wanted = state_of(step)
    return bool(
        np.array_equal(found["w"], wanted["w"])
        and np.array_equal(found["layers"][0], wanted["layers"][0])
        and np.array_equal(found["layers"][1]["b"], wanted["layers"][1]["b"])
        and found["layers"][1]["n"] == step
        and found["s"] == step
    )


def save_and_restore(*, folder: str) -> dict[str, Any]:
    """Restore what a job of another size has saved, train, and save."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    found = checkpoint.restore(folder)
    first = 0
    old: list[Any] = []
    if found is not None:
        first, old = found.step + 1, found.own
        assert is_state(found.state["common"], found.step)
        assert np.array_equal(found.state["part"], np.arange(60).reshape(12, 5) + found.step)
        rows = slice(12 * rank // size, 12 * (rank + 1) // size)
        mine = checkpoint.restore(folder, parts={"part": (rows,)})
        assert np.array_equal(mine.state["part"], found.state["part"][rows])
    for step in range(first, first + 3):
        low, high = 12 * rank // size, 12 * (rank + 1) // size
        part = (np.arange(60).reshape(12, 5) + step)[low:high]
        state = {"common": state_of(step), "part": checkpoint.Shard(part, (12, 5), (low, 0))}
        checkpoint.save_async(
            state, folder, step=step, own={"rng": np.full(2, rank), "rank": rank}, keep=2
        )
        for number in range(3):  # training goes on meanwhile
            total = fastps.push_pull(np.ones(100), f"g{number}", average=False)
            assert (total == size).all()
    fastps.shutdown()  # which waits for the last one
    assert all((one["rng"] == one["rank"]).all() for one in old)
    return {"first": first, "old": [one["rank"] for one in old]}


def fail_on_one(*, folder: str) -> list[str]:
    """Save where one worker's disk is full, another's state is wrong, or steps differ."""
    fastps.init()
    rank, errors = fastps.rank(), []
    write = os.write

    def attempt(state: Any, step: int) -> None:
        try:
            checkpoint.save(state, folder, step=step)
            errors.append("")
        except (CheckpointError, TypeError) as error:
            errors.append(str(error))

    attempt(state_of(1), 1)
    if rank == 1:

        def fill(descriptor: int, data: Any) -> int:
            if ".safetensors" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(28, "No space left on device")
            return write(descriptor, data)

        os.write = fill  # type: ignore[assignment]
    attempt(state_of(2), 2)
    os.write = write
    attempt({"w": object()} if rank == 1 else state_of(3), 3)
    attempt(state_of(4), 4 + rank // 2)
    attempt(state_of(5), 5)
    found = checkpoint.restore(folder)
    assert is_state(found.state, 5)
    fastps.shutdown()
    return errors


def lose_one(*, folder: str, victim: int, call: str, place: str, count: int) -> dict[str, Any]:
    """Save in an elastic job; the victim dies before a call on a path that has some text in it."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    checkpoint.save(state_of(1), folder, step=1)
    if me == victim:
        left = [count]
        kept = getattr(os, call)

        def die(target: Any, *rest: Any, **more: Any) -> Any:
            name = target if isinstance(target, str) else os.readlink(f"/proc/self/fd/{target}")
            is_there = place in name and threading.current_thread().name.startswith("fastps-")
            left[0] -= is_there
            if is_there and left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return kept(target, *rest, **more)

        setattr(os, call, die)
    handle = checkpoint.save_async(state_of(2), folder, step=2)
    for _ in range(20):
        fastps.push_pull(np.full(9, 1 << me), "g", average=False)
    try:
        handle.wait()
        outcome = "complete"
    except ViewChangedError as error:
        outcome = "abandoned" if "step 2 was not saved" in str(error) else str(error)
    mark("OUTCOME", outcome)
    news = ""
    try:
        fastps.allgather_object(me)
    except ViewChangedError as error:  # the save has not heard it in the place of the program
        news = str(error)
    there = checkpoint.restore(folder)
    assert is_state(there.state, there.step), there.step
    assert not checkpoint.verify(folder)
    checkpoint.save(state_of(3), folder, step=3, keep=1)
    found = checkpoint.restore(folder)
    assert is_state(found.state, 3)
    last = int(fastps.push_pull(np.full(9, 1 << me), "g", average=False)[0])
    fastps.barrier()  # rank 0 has removed the others by now
    names = sorted(os.listdir(folder))
    fastps.shutdown()
    return {
        "outcome": outcome, "there": there.step, "news": news, "names": names,
        "size": len(found.own), "last": last,
    }  # fmt: skip
