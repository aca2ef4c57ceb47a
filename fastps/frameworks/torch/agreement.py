# SPDX-License-Identifier: Apache-2.0
"""All workers learn that one of them has built another model, or begun with other weights.

What travels together is chosen by each worker for itself, from what must be the same everywhere.
So it is compared, entry by entry, and every worker raises the same error. Called by all workers
at the same point; blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from fastps import session
from fastps.control.blame import join_names
from fastps.errors import MismatchError
from fastps.sets import ProcessSet, gather_objects, global_process_set

MAX_PRINT = (1 << 31) - 1
Entry: TypeAlias = tuple[str, tuple[int, ...], str]  # name, shape, dtype and what else counts


def check_alike(
    mine: Sequence[Entry], label: str, process_set: ProcessSet = global_process_set
) -> None:
    """Raise MismatchError on all members when one has other entries than the first, worker 0.

    label: names the comparison; one at a time.
    """
    if process_set is not global_process_set:
        _check_within(mine, label, process_set)
        return
    current = session.current()
    if current.size == 1:
        return
    theirs = current.broadcast_object(list(mine), 0, f"{label}.alike")
    found = _difference(mine, theirs, current.rank)
    differs = np.zeros(current.size, dtype=np.int32)
    differs[current.rank] = bool(found)
    current.push_pull_async(differs, f"{label}.alike", average=False, out=differs).wait()
    if differs.any():
        culprit = int(differs.argmax())
        raise MismatchError(current.broadcast_object(found, culprit, f"{label}.alike.why"))


def check_weights(
    parameters: Sequence[torch.Tensor], label: str, process_set: ProcessSet = global_process_set
) -> None:
    """Raise MismatchError on all members when their weights differ, in a single bit of any.

    One sum of 8 bytes for each worker; a worker that has joined takes no part. label: names it.
    """
    current = session.current()
    if process_set is not global_process_set:
        told = gather_objects(process_set.group(), _fingerprint(parameters), f"{label}.weights")
        _compare(dict(zip(process_set.ranks, told, strict=True)))
    elif current.size > 1:
        prints = np.zeros((current.size, 2), dtype=np.int32)
        prints[current.rank] = _fingerprint(parameters)
        current.push_pull_async(prints, f"{label}.weights", average=False, out=prints).wait()
        _compare({rank: two for rank, two in enumerate(prints.tolist()) if any(two)})


def _fingerprint(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Make two numbers of the bytes of all weights, below 2^31 and not both 0."""
    first = second = 0
    for parameter in parameters:
        if parameter.layout is torch.strided and not parameter.is_complex():
            flat = parameter.detach().contiguous().reshape(-1)
            data: Any = flat.view(torch.uint8).numpy()
            first, second = zlib.crc32(data, first), zlib.adler32(data, second)
    return [first >> 1 | 1, second % MAX_PRINT]


def _compare(prints: Mapping[int, Sequence[int]]) -> None:
    first, *others = prints
    differing = [rank for rank in others if list(prints[rank]) != list(prints[first])]
    if differing:
        raise MismatchError(
            f"the weights of {join_names([f'worker {rank}' for rank in differing])} are not those "
            f"of worker {first}, and steps with the same gradients keep them apart. Call "
            "broadcast_parameters(model.state_dict(), root_rank=0) before the first step; or set "
            "FASTPS_CHECK_WEIGHTS=0 where local models are to differ"
        )


def _check_within(mine: Sequence[Entry], label: str, process_set: ProcessSet) -> None:
    """Let all members see what all have."""
    told = gather_objects(process_set.group(), list(mine), f"{label}.alike")
    for rank, theirs in zip(process_set.ranks, told, strict=True):
        found = _difference(theirs, told[0], rank, process_set.ranks[0])
        if found:
            raise MismatchError(found)


def _difference(mine: Sequence[Any], theirs: Sequence[Any], rank: int, first: int = 0) -> str:
    """Describe the first difference; empty if there is none."""
    for place in range(max(len(mine), len(theirs))):
        ours = mine[place] if place < len(mine) else None
        root = theirs[place] if place < len(theirs) else None
        if ours != root:
            return (
                f"number {place} is {_say(ours)} on worker {rank} and {_say(root)} on worker "
                f"{first}: build model and optimizer alike, in the same order, on all workers"
            )
    return ""


def _say(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[0]!r} of shape {entry[1]}, {entry[2]}"
