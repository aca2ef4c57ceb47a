# SPDX-License-Identifier: Apache-2.0
"""What workers of elastic jobs do when one of them dies between two parts of one operation."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from run_program import mark

import fastps
import fastps.torch
from fastps.collectives.channels import grouped_of
from fastps.collectives.descriptions import brought_of
from fastps.frameworks.array_exchange import ArrayExchange, Terms, spec_of
from fastps.session import current
from fastps.session.session import Session
from fastps.types import DType

ALONE_S = 0.5  # how long the first part of an operation may land without the others


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def grouped(*, victim: int) -> dict[str, Any]:
    """Sum arrays of several dtypes in one call; the victim starts only the first of them."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, dtypes = fastps.rank(), (np.int32, np.int64, np.float32)
    sizes = (9, 70_000, 300)
    arrays = [np.full(size, 1 << me, kind) for size, kind in zip(sizes, dtypes, strict=True)]
    fastps.barrier()
    if me == victim:
        with contextlib.suppress(fastps.StallError):
            fastps.push_pull_async(arrays[0], "g.0", average=False).wait(ALONE_S)
        die()
    found = fastps.grouped_allreduce(arrays, "g", op=fastps.Sum)
    return {"found": [sorted(set(one.tolist())) for one in found]}


def exchange(*, victim: int) -> dict[str, Any]:
    """Do a step of the arrays of a framework; the victim starts only the first bucket."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, kinds = fastps.rank(), (np.float32, np.float32, np.int32, np.float32)
    sizes = (30_000, 5, 7, 40_000)
    sources = [np.full(size, 1 << me, kind) for size, kind in zip(sizes, kinds, strict=True)]
    specs = [spec_of(f"e{i}", one.shape, one.dtype) for i, one in enumerate(sources)]
    step = ArrayExchange(specs, Terms(fastps.Sum))
    step.bind()
    fastps.barrier()
    outs = [np.empty_like(one) for one in sources]
    if me == victim:
        step.start(0, [sources[i] for i in step.plan[0]], [outs[i] for i in step.plan[0]])
        with contextlib.suppress(fastps.FastPSError):
            step._started[0].handle.wait(ALONE_S)
        time.sleep(ALONE_S)
        die()
    found = []
    for _ in range(3):
        step.add(sources, outs)
        found.append([sorted(set(one.tolist())) for one in outs])
    return {"found": found, "sources": [sorted(set(one.tolist())) for one in sources]}


def in_place(*, victim: int) -> dict[str, Any]:
    """Sum tensors of a process set in place; the victim takes part in the first of them only."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, every = fastps.rank(), fastps.add_process_set([0, 1, 2])
    tensors = [torch.full((9000 + place,), float(1 << me)) for place in range(2)]
    if me == victim:
        arrays = [one.numpy() for one in tensors]
        brought = brought_of(*arrays, dtype=DType.FLOAT32)
        name = grouped_of("g")
        every.group().allreduce(arrays[0], op=fastps.Sum, name=name, brought=brought).wait()
        die()
    text = ""
    try:
        fastps.torch.grouped_allreduce_(tensors, name="g", op=fastps.Sum, process_set=every)
    except fastps.ViewChangedError as error:
        text = str(error)
    return {"text": text, "found": [one.unique().tolist() for one in tensors]}


def broadcasts(*, kind: str) -> dict[str, Any]:
    """Broadcast arrays in a process set; the root sends only the first of them."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, every = fastps.rank(), fastps.add_process_set([0, 1, 2])
    arrays = [np.full(size, float(me)) for size in (9, 70_000)]
    if me == 0:
        every.group().broadcast(arrays[0], root=0).wait()
        die()
    text = ""
    try:
        if kind == "numpy":
            fastps.broadcast(arrays, 0, process_set=every)
        else:
            fastps.torch.broadcast_parameters(
                list(map(torch.from_numpy, arrays)), 0, process_set=every
            )
    except fastps.ViewChangedError as error:
        text = str(error)
    return {"text": text, "found": [np.unique(one).tolist() for one in arrays]}


def broadcast() -> dict[str, Any]:
    """Broadcast a named array, whose root dies while it is sent."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    array, text = np.full(300_000, float(fastps.rank())), ""
    try:
        fastps.broadcast(array, 0, name="b")
    except fastps.PeerLostError as error:
        text = str(error)
    return {"text": text, "found": np.unique(array).tolist()}


def raise_in_on_view(*, victim: int, culprit: int) -> dict[str, Any]:
    """Raise an error in on_view of one worker, after another has died."""
    me, views = int(os.environ["FASTPS_RANK"]), list[str]()

    def told(view: fastps.View) -> None:
        views.append(str(view))
        if me == culprit:
            raise ValueError(f"no schedule for {view.size} workers")

    fastps.init(elastic=fastps.Elastic(min=1, on_view=told))
    mark("READY")
    for step in range(20):
        if me == victim and step == 5:
            die()
        fastps.push_pull(np.ones(3), "x")
    fastps.shutdown()
    return {"views": views}


def know_all_views(*, victim: int) -> dict[str, Any]:
    """Change the view before init() returns; return the views that the program was told of."""
    me, views = int(os.environ["FASTPS_RANK"]), list[int]()
    register = atexit.register

    def wait_for_view(call: Any) -> None:
        """Wait, at the end of init(), until the first view is over."""
        session: Any = current._current
        deadline = time.monotonic() + 20
        while me != victim and session.view == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        register(call)

    with mock.patch.object(current.atexit, "register", wait_for_view):
        fastps.init(elastic=fastps.Elastic(min=1, on_view=lambda view: views.append(view.number)))
    mark("READY")
    if me == victim:
        die()
    return {"views": views}


def leave_beside() -> dict[str, Any]:
    """Leave when what has landed here will never be committed: who left did not wait for it."""
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    me, array = fastps.rank(), np.ones(3)
    fastps.push_pull(array, "x")
    session: Any = current.current()
    if me == 1:
        Session.push_pull_async(session, array, "x").wait()  # as if Ctrl-C came in between
        fastps.shutdown()
        return {}
    handle = fastps.push_pull_async(array, "x")
    handle._parts[-1].wait()
    began = time.monotonic()
    fastps.shutdown()
    return {"seconds": time.monotonic() - began}
