# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_lost_operations.py do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from run_program import mark, now

import fastps
from fastps.collectives.adasum import adasum
from fastps.collectives.group import Group
from fastps.session import current
from fastps.types import DType

Kind: TypeAlias = Callable[[Group, np.ndarray, np.ndarray], Any]

COUNT = 300_000  # elements: messages of several chunks


def _letters(group: Group, array: np.ndarray, out: np.ndarray) -> None:
    sent = group.send(array, (group.rank + 1) % group.size)
    group.receive(out[:COUNT], None).wait()
    sent.wait()


def _in_a_set(start: Callable[[Group, np.ndarray], Any]) -> Kind:
    """Do an operation of workers 0 and 1; the others wait for a message that never comes."""

    def run(world: Group, array: np.ndarray, out: np.ndarray) -> None:
        if world.rank < 2:
            start(current.current().groups.group([0, 1], "lost"), array)
        else:
            world.receive(out, 1, tag=9).wait()

    return run


def _grouped(world: Group, array: np.ndarray, out: np.ndarray) -> None:
    some = [array[:5], array, array[:9].astype(np.int32)]
    fastps.grouped_allreduce(some, op=fastps.Sum)
    fastps.grouped_reducescatter(some, op=fastps.Max)
    fastps.grouped_allgather(some)


KINDS: dict[str, Kind] = {
    "allreduce": lambda g, array, out: g.allreduce(array).wait(),
    "allgather": lambda g, array, out: g.allgather(array, out).wait(),
    "reduce": lambda g, array, out: g.reduce(array, root=0).wait(),
    "reducescatter": lambda g, array, out: g.reducescatter(out).wait(),
    "gather": lambda g, array, out: g.gather(array, root=g.size - 1).wait(),
    "scatter": lambda g, array, out: g.scatter(out, array, root=1).wait(),
    "alltoall": lambda g, array, out: g.alltoall(array).wait(),
    "broadcast": lambda g, array, out: g.broadcast(array, root=0).wait(),
    "letters": _letters,
    "barrier": lambda g, array, out: g.barrier().wait(),
    "set": _in_a_set(lambda some, array: some.allreduce(array).wait()),
    "adasum": _in_a_set(lambda some, array: adasum([array], DType.FLOAT32, some)),
    "grouped": _grouped,
}


def repeat(*, kind: str) -> dict[str, Any]:
    """Do one operation again and again, until an error; then another says the same."""
    return repeated(KINDS[kind], kind)


def repeated(what: Kind, kind: str) -> dict[str, Any]:
    """Do repeat() with what a kind means."""
    fastps.init()
    world = current.current().groups.world
    array, out = np.ones(COUNT, np.float32), np.ones(COUNT * world.size, np.float32)
    mark("READY")
    texts: list[str] = []
    at = 0.0
    for attempt in range(1_000_000):
        try:
            what(world, array, out)
            if kind in ("gather", "reduce", "scatter", "broadcast"):
                world.barrier().wait()
        except fastps.FastPSError as error:
            texts.append(f"{type(error).__name__}: {error}")
            at = now() if len(texts) == 1 else at
            if len(texts) == 2:
                return {"texts": texts, "at": at, "attempt": attempt}
    return {}


def leave_early() -> str:
    """Leave while others still want something; they hear of it."""
    fastps.init()
    world = current.current().groups.world
    world.barrier().wait()
    if world.rank == 0:
        fastps.shutdown()
        return "left"
    try:
        world.allgather(np.ones(COUNT, np.float32)).wait()
    except fastps.PeerLostError as error:
        return str(error)
    return "no error"


def roots() -> list[list[str]]:
    """Broadcast from roots on which workers do not agree; each time an operation follows."""
    fastps.init()
    world = current.current().groups.world
    found = []
    for all_roots in ((1, 0, 0), (0, 1, 1), (0, 1, 2), (2, 0, 1)):
        root = all_roots[world.rank]
        errors = [_mismatch(functools.partial(world.broadcast, np.ones(3), root=root))]
        errors.append(_mismatch(functools.partial(world.allgather, np.ones(2))))
        fastps.barrier()
        found.append([error for error in errors if error])
    assert np.all(world.allreduce(np.ones(4), op=fastps.Sum).wait(20) == world.size)
    return found


def _mismatch(operation: Callable[[], Any]) -> str:
    try:
        operation().wait(20)
    except fastps.MismatchError as error:
        return str(error)
    return ""


def nobody_left() -> str:
    """Wait for a message from anybody when all others have left."""
    fastps.init()
    world = current.current().groups.world
    world.barrier().wait()
    if world.rank != 0:
        fastps.shutdown()
        return "left"
    try:
        world.receive(np.ones(3), None).wait(20)
    except fastps.PeerLostError as error:
        return str(error)
    return "no error"


def stall() -> str:
    """Wait for an operation that another worker never begins."""
    fastps.init()
    world = current.current().groups.world
    if world.rank == 1:
        fastps.barrier()
        return "waited"
    try:
        world.allreduce(np.ones(COUNT, np.float32), name="lonely").wait(0.5)
    except fastps.StallError as error:
        fastps.barrier()
        return str(error)
    return "no error"


def coded_rounds() -> dict[str, Any]:
    """Push what is encoded, round after round, until somebody is lost; no sum is wrong before."""
    fastps.init(min_compress_bytes=0)
    size = fastps.size()
    ways = {
        "onebit": fastps.Compression.onebit(ef="vanilla"), "int8": fastps.Compression.int8(),
        "topk": fastps.Compression.topk(0.5, ef="vanilla"),
    }  # fmt: skip
    ones = np.full(COUNT, fastps.rank() + 1, np.float32)  # the mean size is each one's
    mark("READY")
    for attempt in range(1_000_000):
        try:
            flights = {name: fastps.push_pull_async(ones, name, compression=way)
                       for name, way in ways.items()}  # fmt: skip
            for name, flight in flights.items():
                out = fastps.synchronize(flight)
                assert name == "topk" or np.allclose(out, (size + 1) / 2, rtol=1e-2), (name, out)
        except fastps.FastPSError as error:
            texts = [f"{type(error).__name__}: {error}"]
            return {"texts": texts, "at": now(), "attempt": attempt}
    return {}


def hear_of_a_flood() -> list[Any]:
    """Wait for a sum while another worker floods this one, and begin another; both errors."""
    fastps.init()
    session = current.current()
    mark("ready")
    deadline = now() + 20
    while not session.connections.exchange.is_linked(1):
        assert now() < deadline
        time.sleep(0.01)
    first = session.groups.world.allreduce(np.ones(3, np.float32), name="flooded")
    mark("begun")
    errors = []
    for begin in (lambda: first, lambda: session.groups.world.allreduce(np.ones(3), name="next")):
        try:
            begin().wait(20)
        except fastps.FastPSError as error:
            errors.append([type(error).__name__, str(error)])
    return errors
