# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on values: numbers, arrays, tensors of any back end; results are arrays.

For use between two batches, not within a compiled step. Names are optional: operations without a
name meet in the order of calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import fastps
from fastps.frameworks.gradient_round import Average, op_of_words
from fastps.frameworks.keras.variables import host_of
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op
from fastps.worker.handle import Array


def allreduce(
    value: Any,
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the average of all workers' values, or another op of fastps.allreduce(); blocks.

    average: the older word for op. The factors multiply before and after.
    """
    return fastps.allreduce(
        _host(value), name=name, op=op_of_words(op, average), prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def allgather(
    value: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Array:
    """Return the rows of all workers, concatenated; blocks."""
    return fastps.allgather(_host(value), name=name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the root's value; blocks."""
    copy = np.array(_host(value))
    found: Array = fastps.broadcast(copy, root_rank, name=name, process_set=process_set)
    return found


def reducescatter(
    value: Any,
    name: str | None = None,
    *,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return this member's rows of the allreduce(); blocks."""
    return fastps.reducescatter(_host(value), name=name, op=op, process_set=process_set)


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Raise RuntimeError: Keras 3 has no global variables."""
    raise RuntimeError(
        "Keras 3 has no global variables: use "
        f"callbacks.BroadcastGlobalVariablesCallback({root_rank}), or "
        f"broadcast_variables(model.variables, {root_rank})"
    )


def _host(value: Any) -> Array:
    """Return a value as an array; Python's numbers become float64 and int64."""
    return np.asarray(host_of(value))
