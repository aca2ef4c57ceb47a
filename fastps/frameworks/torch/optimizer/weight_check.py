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

from fastps.collectives.row_counts import gather_objects
from fastps.control.blame import join_names
from fastps.errors import MismatchError
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op

MAX_PRINT = (1 << 31) - 1
Entry: TypeAlias = tuple[str, tuple[int, ...], str]  # name, shape, dtype and what else counts
Prints: TypeAlias = Sequence[int]  # two numbers that stand for what is compared

BUILD_ALIKE = "build model and optimizer alike, in the same order, on all workers"


def check_alike(
    mine: Sequence[Entry],
    label: str,
    process_set: ProcessSet = global_process_set,
    *,
    cure: str = BUILD_ALIKE,
) -> None:
    """Raise MismatchError on all members when one has other entries than the first, worker 0.

    label: names the comparison; one at a time. cure: what the error says is to be done.
    """
    if process_set is not global_process_set:
        _check_within(mine, label, process_set, cure)
        return
    session = current.current()
    if session.size == 1:
        return
    theirs = session.broadcast_object(list(mine), 0, f"{label}.alike")
    found = _difference(mine, theirs, session.rank, 0, cure)
    differs = np.zeros(session.size, dtype=np.int32)
    differs[session.rank] = bool(found)
    session.push_pull_async(differs, f"{label}.alike", average=False, out=differs).wait()
    if differs.any():
        culprit = int(differs.argmax())
        raise MismatchError(session.broadcast_object(found, culprit, f"{label}.alike.why"))


def check_weights(
    parameters: Sequence[torch.Tensor], label: str, process_set: ProcessSet = global_process_set
) -> None:
    """Raise MismatchError on all members when their weights differ, in a single bit of any.

    One sum of 8 bytes for each worker; a worker that has joined takes no part. label: names it.
    """
    if current.current().size > 1:
        _compare(exchange_prints(fingerprint(parameters), f"{label}.weights", process_set))


def exchange_prints(
    mine: Prints, label: str, process_set: ProcessSet = global_process_set
) -> dict[int, Prints]:
    """Return the prints of all members by rank; one sum of 8 bytes for each, which blocks.

    A worker that has joined is left out. label: names the exchange.
    """
    session, is_of_all = current.current(), process_set is global_process_set
    ranks = range(session.size) if is_of_all else process_set.ranks
    prints = np.zeros((len(ranks), 2), dtype=np.int32)
    prints[ranks.index(session.rank)] = mine
    if is_of_all:
        session.push_pull_async(prints, label, average=False, out=prints).wait()
    else:
        process_set.group().allreduce(prints, prints, op=Op.SUM, name=label).wait()
    return {rank: two for rank, two in zip(ranks, prints.tolist(), strict=True) if any(two)}


def print_of(entries: Sequence[Entry]) -> Prints:
    """Return two numbers that stand for entries, as exchange_prints() takes them."""
    text = repr(entries).encode()
    return [zlib.crc32(text) >> 1 | 1, zlib.adler32(text) % MAX_PRINT]


def fingerprint(parameters: Sequence[torch.Tensor]) -> Prints:
    """Return two numbers of the bytes of all weights, below 2^31 and not both 0."""
    first = second = 0
    for parameter in parameters:
        if parameter.layout is torch.strided and not parameter.is_complex():
            flat = parameter.detach().contiguous().reshape(-1)
            data: Any = flat.view(torch.uint8).numpy()
            first, second = zlib.crc32(data, first), zlib.adler32(data, second)
    return [first >> 1 | 1, second % MAX_PRINT]


def _compare(prints: Mapping[int, Prints]) -> None:
    first, *others = prints
    differing = [rank for rank in others if list(prints[rank]) != list(prints[first])]
    if differing:
        raise MismatchError(
            f"the weights of {join_names([f'worker {rank}' for rank in differing])} are not those "
            f"of worker {first}, and steps with the same gradients keep them apart. Call "
            "broadcast_parameters(model.state_dict(), root_rank=0) before the first step; or set "
            "FASTPS_CHECK_WEIGHTS=0 where local models are to differ"
        )


def _check_within(mine: Sequence[Entry], label: str, process_set: ProcessSet, cure: str) -> None:
    """Let all members see what all have."""
    told = gather_objects(process_set.group(), list(mine), f"{label}.alike")
    for rank, theirs in zip(process_set.ranks, told, strict=True):
        found = _difference(theirs, told[0], rank, process_set.ranks[0], cure)
        if found:
            raise MismatchError(found)


def _difference(
    mine: Sequence[Any], theirs: Sequence[Any], rank: int, first: int, cure: str
) -> str:
    """Describe the first difference; empty if there is none."""
    for place in range(max(len(mine), len(theirs))):
        ours = mine[place] if place < len(mine) else None
        root = theirs[place] if place < len(theirs) else None
        if ours != root:
            return (
                f"number {place} is {_say(ours)} on worker {rank} and {_say(root)} on worker "
                f"{first}: {cure}"
            )
    return ""


def _say(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[0]!r} of shape {entry[1]}, {entry[2]}"
