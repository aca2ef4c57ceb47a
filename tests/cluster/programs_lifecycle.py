# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_lifecycle.py do: they begin and end sessions from several threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.errors import FastPSError, ShutdownError
from fastps.session import current
from fastps.telemetry import watch
from fastps.types import DType

THREADS = 8
ROUNDS = 6


def in_threads(work: Callable[[int], None]) -> None:
    """Do work in threads that begin at once; raises what one of them raised."""
    ready, errors = threading.Barrier(THREADS), []

    def run(number: int) -> None:
        ready.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]


def init_by_threads() -> str:
    """Make one session, whoever asks, and end it once."""
    for _ in range(3):
        sessions: list[Any] = []

        def begin(_: int, sessions: list[Any] = sessions) -> None:
            fastps.init()
            sessions.append(current.current())

        in_threads(begin)
        assert len(set(map(id, sessions))) == 1
        assert fastps.allreduce(np.ones(3), op=fastps.Sum).tolist() == [fastps.size()] * 3
        in_threads(lambda _: fastps.shutdown())
        assert not fastps.is_initialized()
        with pytest.raises(ShutdownError):
            sessions[0].check_usable()
    in_threads(lambda _: fastps.init())
    one = current.current()
    in_threads(lambda i: fastps.shutdown() if i % 2 else fastps.init())
    fastps.init()
    fastps.shutdown()
    with pytest.raises(ShutdownError):
        one.check_usable()
    return "done"


CALLS: dict[str, Callable[[np.ndarray, str], Any]] = {
    "in place": lambda array, name: fastps.push_pull(array, name, average=False, out=array),
    "plain": lambda array, name: fastps.push_pull(array, name, average=False),
    "async": lambda array, name: fastps.push_pull_async(array, name, average=False).wait(),
    "group": lambda array, name: fastps.allreduce(array, name, op=fastps.Max) * 3 / 2,
    "several": lambda array, name: fastps.push_pull([array], [name], average=False)[0],
    "told": lambda array, name: fastps.broadcast(np.full(64, 3.0, np.float32), name=name),
}


def shutdown_beside() -> str:
    """Add in threads while the session ends: what comes back is a sum, or an error."""
    n_sums = 0
    for turn in range(ROUNDS):
        fastps.init()
        me, has_begun, found = fastps.rank(), threading.Semaphore(0), []

        def loop(
            number: int, turn: int = turn, me: int = me, has_begun: Any = has_begun,
            found: list[Any] = found,
        ) -> None:  # fmt: skip
            kind, call = list(CALLS.items())[number % len(CALLS)]
            step = 0
            try:
                while True:
                    label = f"{kind} {step if turn % 2 else 0}"  # a new name each time, or one
                    got = call(np.full(64, me + 1.0, np.float32), label)
                    found.append((kind, set(got.tolist())))
                    has_begun.release()
                    step += 1
            except FastPSError:
                pass
            except BaseException as error:
                found.append((kind, repr(error)))
                raise

        threads = [threading.Thread(target=loop, args=(i,)) for i in range(len(CALLS))]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for _ in range(3 * len(CALLS)):
            has_begun.acquire(timeout=20)
        fastps.shutdown()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
        assert all(got == {3.0} for _, got in found), found
        n_sums += len(found)
    assert n_sums
    return "done"


def shows_status() -> bool:
    """Return whether `fastps top` finds this process."""
    found = watch.names(Path("/proc/net/unix").read_text(encoding="ascii"))
    return any(name.endswith(f"/{os.getpid()}") for name in found)


def kept_across() -> str:
    """Use a session, and what belongs to it, after shutdown()."""
    fastps.init()
    session, some = current.current(), fastps.allreduce_async(np.ones(4), "late", op=fastps.Sum)
    array = np.full(8, fastps.rank() + 1.0, np.float32)
    session.push_pull(array, "x", average=False, out=array)
    some.wait()
    empty, shares = fastps.empty(8, np.float32), session.can_share
    assert shows_status() == (fastps.size() > 1)
    fastps.shutdown()
    assert not shows_status()
    calls: list[Callable[[], Any]] = [
        lambda: session.push_pull(array, "x", average=False, out=array),
        lambda: session.push_pull(array, "x", average=False),
        lambda: session.push_pull(array, "y", average=False),
        lambda: session.push_pull_async([array], ["y"]),
        lambda: session.broadcast_async(array, 0, "z"),
        lambda: session.declare([("w", (3,), DType.FLOAT32)]),
        lambda: session.forget("x"),
        lambda: session.groups.world.allreduce(array),
        lambda: session.groups.world.barrier(),
        lambda: session.barrier(),
        lambda: session.enter_barrier(),
        lambda: session.broadcast_object(3),
        lambda: session.empty((3,), DType.FLOAT32),
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(ShutdownError, match=r"shutdown\(\) has ended this session"):
                call()
        assert not session.can_share
        session.is_shared(empty)
        session.statistics()
        session.close()
        fastps.init()  # another session changes nothing for the old one
        assert current.current().can_share == shares
    fastps.shutdown()
    empty[:] = 1
    return "done"
