# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of an operation lie: what can be, and what one member alone does with them."""

from __future__ import annotations

import numpy as np

from fastps.collectives.schedule import Schedule
from fastps.worker.handle import Array


def is_apart(array: Array, out: Array, place: int | None = None) -> bool:
    """Return whether arrays share no memory, or the first lies at element `place` of the other."""
    if not np.may_share_memory(array, out):
        return True
    return place is not None and array.ctypes.data == out.ctypes.data + place * out.itemsize


def check_arrays(label: str, array: Array | None, out: Array | None) -> None:
    """Raise ValueError for arrays that an operation cannot read or write."""
    for one in (array, out):
        if one is not None and not one.flags.c_contiguous:
            raise ValueError(
                f"{label}: an array is not C-contiguous; pass np.ascontiguousarray(array)"
            )
    if array is not None and out is not None and array.dtype != out.dtype:
        raise ValueError(
            f"{label}: out is {out.dtype}, but the input is {array.dtype}; both must be alike"
        )


def copy_alone(steps: Schedule, array: Array | None, out: Array | None) -> None:
    """Do the operation of a group of one."""
    flat = [None if one is None else one.reshape(-1).view(np.uint8) for one in (array, out)]
    for step in steps.steps:
        if step.sources and flat[1] is not None and flat[0] is not None:
            source = step.sources[0]
            end = step.offset + step.nbytes
            flat[1][step.offset : end] = flat[0][source.offset : source.offset + step.nbytes]
