# SPDX-License-Identifier: Apache-2.0
"""Compare the models of all workers: parameters, options and weights.

Each worker chooses its buckets by itself, from a description that must be the same everywhere. So
the descriptions are compared, entry by entry, and every worker raises the same error. Called by
all workers at the same point; blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from fastps.collectives.row_counts import gather_objects
from fastps.control.blame import join_names
from fastps.errors import MismatchError
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op

if TYPE_CHECKING:
    from fastps.session.session import Session

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
    """Raise MismatchError on all members if one has other entries than the first member.

    label: the name of the comparison, used once at a time. cure: how to mend it, for the error.
    """
    if process_set is not global_process_set:
        _check_within(mine, label, process_set, cure)
        return
    session = current.current()
    if session.size == 1:
        return
    theirs = session.broadcast_object(list(mine), 0, f"{label}.alike")
    found = _difference(mine, theirs, session.rank, 0, cure)
    rank, size = _place_of(session)
    label = _label_of(session, label)
    differs = np.zeros(size, dtype=np.int32)
    differs[rank] = bool(found)
    session.push_pull_async(differs, f"{label}.alike", average=False, out=differs).wait()
    if differs.any():
        culprit = int(differs.argmax())
        raise MismatchError(session.broadcast_object(found, culprit, f"{label}.alike.why"))


def check_weights(
    parameters: Sequence[torch.Tensor], label: str, process_set: ProcessSet = global_process_set
) -> None:
    """Raise MismatchError on all members if their weights differ in any bit.

    Sums 8 bytes per worker. A worker in join() takes no part. label: the name of the comparison.
    """
    if current.current().size > 1:
        _compare(exchange_prints(fingerprint(parameters), f"{label}.weights", process_set))


def exchange_prints(
    mine: Prints, label: str, process_set: ProcessSet = global_process_set
) -> dict[int, Prints]:
    """Return the prints of all members by rank, without those in join(); blocks.

    Sums 8 bytes per worker. label: the name of the exchange.
    """
    session, is_of_all = current.current(), process_set is global_process_set
    rank, size = _place_of(session)
    ranks = range(size) if is_of_all else process_set.ranks
    prints = np.zeros((len(ranks), 2), dtype=np.int32)
    prints[ranks.index(rank)] = mine
    label = _label_of(session, label)
    if is_of_all:
        session.push_pull_async(prints, label, average=False, out=prints).wait()
    else:
        process_set.group().allreduce(prints, prints, op=Op.SUM, name=label).wait()
    return {rank: two for rank, two in zip(ranks, prints.tolist(), strict=True) if any(two)}


def _label_of(session: Session, label: str) -> str:
    """Return the name of a comparison; where workers have joined, another for each number."""
    return f"{label}, {_place_of(session)[1]} workers" if session.joins else label


def _place_of(session: Session) -> tuple[int, int]:
    """Return rank and size, in an elastic job those of the last view that workers have joined."""
    found: tuple[int, int] = getattr(session, "first_place", (session.rank, session.size))
    return found


def print_of(entries: Sequence[Entry]) -> Prints:
    """Return two numbers that stand for entries, as exchange_prints() takes them."""
    text = repr(entries).encode()
    return [zlib.crc32(text) >> 1 | 1, zlib.adler32(text) % MAX_PRINT]


def fingerprint(parameters: Sequence[torch.Tensor]) -> Prints:
    """Return two numbers of the bytes of all weights, below 2^31 and not both 0."""
    first = second = 0
    for parameter in parameters:
        if parameter.layout is torch.strided and not parameter.is_complex():
            flat = parameter.detach().contiguous().reshape(-1).cpu()
            data: Any = flat.view(torch.uint8).numpy()
            first, second = zlib.crc32(data, first), zlib.adler32(data, second)
    return [first >> 1 | 1, second % MAX_PRINT]


def _compare(prints: Mapping[int, Prints]) -> None:
    first, *others = prints
    differing = [rank for rank in others if list(prints[rank]) != list(prints[first])]
    if differing:
        raise MismatchError(
            f"the weights of {join_names([f'worker {rank}' for rank in differing])} are not those "
            f"of worker {first}, and averaged gradients never make them equal. Call "
            "broadcast_parameters(model.state_dict(), root_rank=0) before the first step; or set "
            "FASTPS_CHECK_WEIGHTS=0 if the models are meant to differ"
        )


def _check_within(mine: Sequence[Entry], label: str, process_set: ProcessSet, cure: str) -> None:
    """Compare the entries of all members with those of the first."""
    entries = gather_objects(process_set.group(), list(mine), f"{label}.alike")
    for rank, theirs in zip(process_set.ranks, entries, strict=True):
        found = _difference(theirs, entries[0], rank, process_set.ranks[0], cure)
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
                f"number {place} is {_text_of(ours)} on worker {rank} and {_text_of(root)} on "
                f"worker {first}: {cure}"
            )
    return ""


def _text_of(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry[0]!r} of shape {entry[1]}, {entry[2]}"
