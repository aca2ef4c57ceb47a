# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_sets.py do: mistakes with process sets, names that are forgotten."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from programs_forget import memory_of
from run_program import mark

import fastps
from fastps.collectives.group_base import GroupBase
from fastps.errors import FastPSError
from fastps.session import current

WAIT_S = 60.0


def caught(action: Callable[[], Any]) -> str:
    """Give kind and message of what an action raises."""
    try:
        action()
    except (FastPSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def orders() -> str:
    """Use two sets in different orders: each worker waits where the other is not."""
    fastps.init()
    me, size = fastps.rank(), fastps.size()
    two, all_ = fastps.add_process_set([0, 1]), fastps.add_process_set(range(size))
    if me == 2:
        fastps.barrier()
        text = ""
    else:
        first = two if me == 0 else all_
        flight = fastps.allreduce_async(np.ones(3), process_set=first)
        text = caught(lambda: fastps.synchronize(flight, 1.5))
        fastps.barrier()
    if me < 2:  # what is missing makes all of it complete
        second = fastps.allreduce_async(np.ones(3), process_set=all_ if me == 0 else two)
        assert (fastps.synchronize(flight, WAIT_S) == 1).all()
        assert (fastps.synchronize(second, WAIT_S) == 1).all()
    else:
        assert (fastps.allreduce(np.ones(3), process_set=all_) == 1).all()
    fastps.shutdown()
    return text


def ways() -> list[list[str]]:
    """Have one worker go another way than the others with a name; give everybody's errors."""
    fastps.init()
    me, size, found = fastps.rank(), fastps.size(), []
    own = np.ones(4, np.float32)
    calls = {
        "shape": lambda name: fastps.allreduce(own[: 2 + (me == 1)], name),
        "large": lambda name: fastps.allreduce(np.ones(100_000 + (me == 0), np.float32), name),
        "dtype": lambda name: fastps.allreduce(own.astype("f8") if me == 1 else own, name),
        "op": lambda name: fastps.allreduce(own, name, op=fastps.Max if me == 2 else fastps.Sum),
        "kind": lambda name: (fastps.allgather if me == 0 else fastps.allreduce)(own, name),
        "grouped": lambda name: fastps.grouped_allreduce([own, own[: 2 + (me == 1)]], name),
    }
    for kind, call in calls.items():
        if kind in ("shape", "large", "dtype", "grouped"):  # else none of them has declared it
            first = np.ones(100_000, np.float32) if kind == "large" else own[:2]
            first = own if kind == "dtype" else first
            if kind == "grouped":
                fastps.grouped_allreduce([own, own[:2]], kind)
            else:
                fastps.allreduce(first, kind)
        found.append([caught(lambda call=call, kind=kind: call(kind)) for _ in range(2)])
        fastps.barrier()
        assert (fastps.allreduce(own, f"after {kind}", op=fastps.Sum) == size).all()
        assert (fastps.allreduce(own, op=fastps.Sum) == size).all()
    fastps.shutdown()
    return found


def ahead_of_others() -> str:
    """Be late with an operation whose name others have used both ways: nothing is wrong."""
    fastps.init()
    me = fastps.rank()
    for step in range(3):
        if me == step:
            fastps.receive(np.empty(1), (me + 1) % 3)  # sent when the others have waited for long
        flight = fastps.allreduce_async(np.ones(2 + step), "both")
        if me == (step + 1) % 3:
            caught(lambda flight=flight: fastps.synchronize(flight, 1.8))
            fastps.send(np.ones(1), step)
        assert (fastps.synchronize(flight) == 1).all()
        assert (fastps.allreduce(np.ones(2), "both") == 1).all()
    starts = [  # names that only look like one another have no order
        lambda: fastps.allreduce_async(np.ones(2), "deep", op=fastps.Max),
        lambda: fastps.allreduce_async(np.ones(2), "deep.0"),
    ]
    flights = []
    for start in starts if me == 0 else starts[::-1]:
        flights.append(start())
        caught(lambda: fastps.synchronize(flights[0], 1.8))
    for flight in flights:
        assert (fastps.synchronize(flight) == 1).all()
    fastps.shutdown()
    return "done"


def removal() -> list[str]:
    """Remove a set while one of its members has something in flight on it; then all go on."""
    fastps.init()
    me = fastps.rank()
    some = fastps.add_process_set([0, 1])
    texts = []
    for start in (
        lambda: fastps.allreduce_async(np.ones(3), "odd", process_set=some),
        lambda: fastps.receive_async(np.empty(3), 1, process_set=some),
    ):
        flight = start() if me == 0 else None
        texts.append(caught(lambda: fastps.remove_process_set(some)))
        if me == 1 and len(texts) == 1:
            fastps.allreduce(np.ones(3), "odd", process_set=some)
        elif me == 1:
            fastps.send(np.ones(3), 0, process_set=some)
        elif flight is not None:
            assert (fastps.synchronize(flight, WAIT_S) == 1).all()
    if some.included():
        assert (fastps.allreduce(np.ones(3), process_set=some) == 1).all()
    assert fastps.remove_process_set(some)
    assert not fastps.remove_process_set(some)
    fastps.shutdown()
    return texts


def removal_beside_a_thread() -> list[str]:
    """Remove a set while a thread of worker 0 uses it: before all have come, and after the look.

    Gives what that thread is told.
    """
    fastps.init()
    me, own = fastps.rank(), np.ones(3)
    some = fastps.add_process_set([0, 1])
    comes, looked, texts, look = threading.Event(), threading.Event(), [], GroupBase.in_flight

    def look_and_dawdle(group: GroupBase, names: Any = None) -> list[str]:
        found = look(group, names)
        looked.set()
        time.sleep(0.3)
        return found

    def work() -> None:
        comes.wait(WAIT_S)
        time.sleep(0.1)
        fastps.allreduce(own, process_set=some)
        fastps.send(own, 1)
        looked.wait(WAIT_S)
        texts.append(caught(lambda: fastps.allreduce(own, process_set=some)))

    if some.included():
        fastps.allreduce(own, process_set=some)
    thread = threading.Thread(target=work)
    if me == 0:
        GroupBase.in_flight = look_and_dawdle  # type: ignore[method-assign]
        thread.start()
        comes.set()
    elif me == 1:
        fastps.allreduce(own, process_set=some)
        fastps.receive(own, 0)
    assert fastps.remove_process_set(some)
    if me == 0:
        thread.join()
    assert (fastps.allreduce(own) == 1).all()
    fastps.shutdown()
    return texts


def _use(name: str, step: int, some: fastps.ProcessSet) -> None:
    """Do what leaves something of a name behind, with another shape each time."""
    own = np.full(1 + step % 50, 1.0, np.float32)
    fastps.allreduce(own, name, op=fastps.Max)
    fastps.allgather(own, name)
    fastps.allgather(np.ones(3000), name)  # whose rows do not travel with their sizes
    fastps.alltoall(np.ones(2 * fastps.size(), np.int32), name=name)
    fastps.grouped_allreduce([own, own[:1]], name, op=fastps.Min)
    if some.included():
        assert (fastps.allreduce(own, name, process_set=some) == 1).all()


def _held() -> dict[str, int]:
    groups = list(current.current().groups.known.values())
    return {
        "entries": int(fastps.statistics().get("messages_kept", 0)),
        "channels": sum(len(group.channels) for group in groups),
        "parts": sum(len(group.channels._parts) for group in groups),
    }


def forgotten(batches: int, batch: int) -> list[dict[str, int]]:
    """Use names once, and forget them by the batch; give what is kept after the first and last."""
    fastps.init()
    some = fastps.add_process_set([0, fastps.size() - 1])
    found = []
    for number in range(batches):
        names = [f"n{number}.{step}" for step in range(batch)]
        for step, name in enumerate(names):
            _use(name, step, some)
        if number == 0:
            found.append(_held())
        fastps.forget(names)
        fastps.barrier()
        if number in (0, batches - 1):
            found.append(_held())
    for _ in range(3):  # a name that was forgotten begins anew, on all workers at once
        _use("again", 1, some)
        _use("again", 2, some)
        fastps.forget("again")
    _misuse(some)
    fastps.shutdown()
    return found


def _misuse(some: fastps.ProcessSet) -> None:
    """Forget what cannot be, or not so; everything works on."""
    me = fastps.rank()
    _use("one", 1, some)
    _use("other", 1, some)
    text = caught(lambda: fastps.forget(["one", "other"] if me else ["other", "one"]))
    assert text.startswith("MismatchError: all workers must forget the same names"), text
    assert "on any worker" in caught(lambda: fastps.forget(["one", "never"]))
    flight = fastps.allreduce_async(np.ones(2), "one", op=fastps.Max) if me == 0 else None
    if flight is not None:
        text = caught(lambda: fastps.forget("one"))
        assert "cannot forget 'allreduce one' while it is in flight" in text, text
    fastps.barrier()
    if flight is None:
        flight = fastps.allreduce_async(np.ones(2), "one", op=fastps.Max)
    assert (fastps.synchronize(flight, WAIT_S) == 1).all()
    fastps.forget(["one", "other"])
    _use("one", 3, some)


def nameless(operations: int, warm: int) -> list[int]:
    """Do many small operations without names, whose shapes change; give private bytes on the way.

    Once when warm, and once in the end.
    """
    fastps.init()
    me, size, found = fastps.rank(), fastps.size(), []
    for step in range(operations):
        count = 1 + step * 7919 % 3000
        own = np.full(count, me + 1.0, np.float32)
        kind = step % 8
        if kind == 0:
            assert fastps.grouped_allreduce([own, own[:1]], op=fastps.Sum)[1][0] == 3
        elif kind == 1:
            assert fastps.allgather(own[: count // (me + 1)]).size == count + count // 2
        elif kind == 2:
            assert fastps.broadcast(own, 1)[0] == size
        elif kind == 3:
            assert fastps.alltoall(np.ones(2 * count, np.int8)).size == 2 * count
        elif kind == 4:
            fastps.reducescatter(own)
        else:
            assert fastps.allreduce(own, op=fastps.Sum)[-1] == 3
        if step in (warm, operations - 1):
            fastps.barrier()
            gc.collect()
            found.append(memory_of("self"))
            mark("SEEN", step)
            fastps.barrier()
    fastps.shutdown()
    return found
