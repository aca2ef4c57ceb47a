# SPDX-License-Identifier: Apache-2.0
"""Programs of test_differing.py: workers that do not call the same, in every way that there is.

A case is an operation and what one worker does otherwise; the others call what is right. Each
worker hears of it in this operation, or, where it was through by then, in its next on the name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import fastps
from fastps.errors import DuplicateNameError, MismatchError

SHAPE = (12, 6)
WAIT_S = 60.0


class Call(NamedTuple):
    """What a worker calls."""

    operation: str
    shape: tuple[int, ...] = SHAPE
    dtype: str = "float32"
    op: fastps.Op = fastps.Sum
    root: int = 0


ROOTED = ("reduce", "gather", "scatter", "broadcast")
SUMMING = ("allreduce", "reduce", "reducescatter", "grouped_allreduce", "grouped_reducescatter")
OPERATIONS = (
    "allreduce", "reduce", "reducescatter", "allgather", "gather", "scatter", "alltoall",
    "broadcast", "grouped_allreduce", "grouped_allgather", "grouped_reducescatter",
)  # fmt: skip


def variations(call: Call) -> Iterator[tuple[str, Call]]:
    """Make the calls that differ from one in a single thing."""
    yield "shape", call._replace(shape=(12, 2, 3))
    yield "size", call._replace(shape=(12, 7))
    yield "dtype", call._replace(dtype="int32")
    yield "width", call._replace(dtype="float64")
    if call.operation in SUMMING:
        yield "op", call._replace(op=fastps.Max)
        yield "average", call._replace(op=fastps.Average)
    if call.operation in ROOTED:
        yield "root", call._replace(root=1)


def cases() -> list[tuple[str, Call, Call]]:
    """List every difference of one operation, and every pair of operations."""
    found = [
        (f"{operation}: {what}", Call(operation), other)
        for operation in OPERATIONS
        for what, other in variations(Call(operation))
    ]
    return found + [
        (f"{one} meets {other}", Call(one), Call(other))
        for one, other in itertools.permutations(OPERATIONS, 2)
    ]


def starts(face: str, call: Call, name: str | None, its_set: fastps.ProcessSet) -> dict[str, Any]:
    """Make what begins each operation of a face."""
    fps, array = of_face(face, call)
    root, n = call.root, fastps.size()
    whole = of_face(face, call._replace(shape=(n, *call.shape)))[1]
    named: dict[str, Any] = {"name": name, "process_set": its_set}
    summed = named | {"op": call.op}
    return {
        "allreduce": lambda: fps.allreduce_async(array, **summed),
        "reduce": lambda: fps.reduce_to_async(array, root, **summed),
        "reducescatter": lambda: fps.reducescatter_async(array, **summed),
        "allgather": lambda: fps.allgather_async(array, **named),
        "gather": lambda: fps.gather_async(array, root, **named),
        "scatter": lambda: fps.scatter_async(
            whole if fps.rank() == root else None, array, root, **named
        ),
        "alltoall": lambda: fps.alltoall_async(array, **named),
        "broadcast": lambda: fps.broadcast_async(array, root, **named),
        "grouped_allreduce": lambda: fps.grouped_allreduce_async([array] * 2, **summed),
        "grouped_allgather": lambda: fps.grouped_allgather_async([array] * 2, **named),
        "grouped_reducescatter": lambda: fps.grouped_reducescatter_async([array] * 2, **summed),
    }


def of_face(face: str, call: Call) -> tuple[Any, Any]:
    """Return the module of a face, and ones of a call's shape and dtype, as it takes them."""
    if face == "numpy":
        return fastps, np.ones(call.shape, call.dtype)
    import torch  # noqa: PLC0415  (jobs of the NumPy face have no need of it)

    import fastps.torch as fps  # noqa: PLC0415

    return fps, torch.ones(call.shape, dtype=getattr(torch, call.dtype))


def differ(
    face: str, odd: int, *, names: str, is_async: bool, every: int = 1
) -> list[tuple[str, list[str]]]:
    """Go through cases; give of each what this worker heard, in this operation and the next three.

    odd: the worker that calls something else. names: "none", those of a "set", or of "all"
    workers: of these some operations go by way of the servers.
    """
    fastps.init(op_timeout_s=WAIT_S)
    everybody = fastps.add_process_set(range(fastps.size()))
    its_set = everybody if names == "set" else fastps.global_process_set
    found = []
    for number, (label, right, wrong) in enumerate(cases()[::every]):
        call = wrong if fastps.rank() == odd % fastps.size() else right
        name = None if names == "none" else f"name {number}"
        start = starts(face, call, name, its_set)[call.operation]
        texts = [text_of(lambda start=start: start().wait())]
        if not is_async:
            fastps.barrier()
        after = lambda name=name: fastps.allreduce(  # noqa: E731
            np.ones(3), name, op=fastps.Max, process_set=its_set
        )
        texts += [text_of(after) for _ in range(3)]
        fastps.barrier()
        found.append((label, texts))
    fastps.shutdown()
    return found


def counted(names: str) -> list[str]:
    """Have one worker bring one array more to grouped operations, and give what is heard."""
    fastps.init(op_timeout_s=WAIT_S)
    everybody = fastps.add_process_set(range(fastps.size()))
    its_set = everybody if names == "set" else fastps.global_process_set
    found = []
    for size in (3, 60_000):
        arrays = [np.ones((2, size), np.float32)] * (3 if fastps.rank() else 2)
        calls = {
            "allreduce": lambda name, arrays=arrays: fastps.grouped_allreduce(
                arrays, name, op=fastps.Sum, process_set=its_set
            ),
            "maximum": lambda name, arrays=arrays: fastps.grouped_allreduce(
                arrays, name, op=fastps.Max, process_set=its_set
            ),
            "reducescatter": lambda name, arrays=arrays: fastps.grouped_reducescatter(
                arrays, name, op=fastps.Sum, process_set=its_set
            ),
            "allgather": lambda name, arrays=arrays: fastps.grouped_allgather(
                arrays, name, process_set=its_set
            ),
        }
        for kind, call in calls.items():
            start = functools.partial(call, f"{kind} {size}")
            found.append(text_of(start) or text_of(start))  # servers have summed the first two
            fastps.barrier()
    fastps.shutdown()
    return found


def text_of(call: Callable[[], object]) -> str:
    """Give the text of a call's MismatchError; empty: it went well."""
    try:
        call()
    except MismatchError as error:
        return str(error)
    return ""


def doubled(face: str, operations: Sequence[str], names: str) -> list[str]:
    """Begin operations twice under a name; give the errors, one for each kind."""
    fastps.init(op_timeout_s=WAIT_S)
    everybody = fastps.add_process_set(range(fastps.size()))
    its_set = everybody if names == "set" else fastps.global_process_set
    texts = []
    for operation in operations:
        start = starts(face, Call(operation), f"double {operation}", its_set)[operation]
        handle, errors = None, []
        if fastps.rank() == 0:
            handle = start()
            try:
                start()
            except DuplicateNameError as error:
                errors.append(str(error))
        fastps.barrier()
        (handle or start()).wait()
        texts += errors
    fastps.shutdown()
    return texts
