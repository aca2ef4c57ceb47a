# SPDX-License-Identifier: Apache-2.0
"""How members learn of first dimensions that may differ: in an exchange, or from the last one.

They tell theirs first. Each block of rows goes behind its head, if it is small: MPI's eager
protocol; all members are told the largest of all blocks, so they agree on whether everything has
come. Sizes that stayed the same are not told again (size_cache.py). The bytes that this
takes: docs/collectives.md. Threads: any.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastps.collectives.channels import rest_of
from fastps.collectives.descriptions import Brought, brought_of, form_of, rows_of
from fastps.collectives.size_cache import SizesDifferError
from fastps.collectives.staged import Stages
from fastps.types import DType
from fastps.worker.handle import Array, completed

if TYPE_CHECKING:
    from fastps.collectives._exchange import Blocks, Operation
    from fastps.collectives.group import Group

ROOM_BYTES = 8 << 10  # of a block on one machine, where a copy costs less than an exchange,
FAR_ROOM_BYTES = 2 << 10  # between machines,
ALL_ROOM_BYTES = 64 << 10  # and of the blocks of all members
ROOT_SHIFT = 16  # of the number of dtype and shape of a row, and root, in a head


class Rows(NamedTuple):
    """What a member brings to an operation in which others may have another number of rows.

    array: C-contiguous, with counts rows for each member, or one number, for all of them. call:
    what errors name; who waits for rows, and not for sizes first, does what is called its kind.
    """

    group: Group
    kind: str  # allgather, alltoall or gather
    array: Array
    counts: list[int]
    code: DType
    name: str | None
    call: str
    root: int = -1  # of a gather

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.array.shape[1:])

    @property
    def key(self) -> tuple[object, ...]:
        """What all members know of the operation."""
        return self.kind, self.name, self.width, self.code

    @property
    def brought(self) -> Brought:
        """What this member brings, for others."""
        return brought_of(self.array, dtype=self.code)


def tell(rows: Rows) -> Generator[Operation, None, Blocks]:
    """Exchange how many rows there are, and the rows themselves if they are few: in stages.

    Raises MismatchError on all members where shapes of rows, dtypes or roots differ.
    """
    from fastps.collectives._exchange import Blocks, pack  # noqa: PLC0415  (few need them at once)

    group, counts, width = rows.group, rows.counts, rows.width
    code = form_of(rows_of(rows.brought)) | (rows.root + 1) << ROOT_SHIFT
    most = ROOM_BYTES if group.is_on_one_machine else FAR_ROOM_BYTES
    room = min(most, ALL_ROOM_BYTES // group.size) & ~7
    row_bytes = width * rows.array.itemsize
    operation = None
    found = packed = pack(rows.array, counts, row_bytes, width, code, room)
    is_asked = group.size > 1 and rows.call == rows.kind
    if group.size > 1:
        found = bytearray(len(packed) // len(counts) * group.size)
        operation = yield from _exchange_counts(rows, packed, found, may_differ=is_asked)
    blocks = Blocks(found, group.size, row_bytes, width, code)
    if blocks.odd >= 0 and operation is not None:
        raise group.differing(operation)
    if is_asked and blocks.is_full:
        group.steady.told(rows.key, counts, blocks.counts)
    return blocks


def _exchange_counts(
    rows: Rows, packed: bytearray, found: bytearray, *, may_differ: bool
) -> Generator[Operation, None, Operation]:
    """Send heads and what is behind them; once more, if others take sizes for granted."""
    group = rows.group

    def begin(name: str | None, *, may_differ: bool) -> Operation:
        return group.exchange_sizes(
            rows.kind, packed, found, name, rows.key, may_differ=may_differ,
            brought=rows.brought, root=rows.root,
        )  # fmt: skip

    if not (may_differ and group.steady.was_missed(rows.key)):
        try:
            operation = begin(rows.name, may_differ=may_differ)
            yield operation
        except SizesDifferError:
            group.steady.was_missed(rows.key)
        else:
            return operation
    operation = begin(rest_of(rows.name), may_differ=False)
    yield operation
    return operation


def row_counts_of_each(
    group: Group, brought: Brought, name: str | None
) -> Generator[Operation, None, list[list[int]]]:
    """Exchange how many rows arrays have, and return those of all members by array; in stages.

    MismatchError on all members where they do not tell of as many arrays, or of other rows.
    """
    counts = [shape[0] for _, shape in brought]
    handle = group.allgather(
        np.array([*counts, form_of(rows_of(brought))], np.int64),
        name=name, brought=brought,
    )  # fmt: skip
    yield from handle.operations
    told = np.asarray(handle.wait()).reshape(group.size, len(counts) + 1)
    if len(set(told[:, -1].tolist())) > 1:
        raise group.differing(handle.operations[0])
    by_array: list[list[int]] = told[:, :-1].T.tolist()
    return by_array


def gather_objects(group: Group, obj: Any, name: str | None) -> list[Any]:
    """Return the objects of all members; TypeError on all if one cannot travel. Blocks."""

    def exchange() -> Stages:
        return completed((yield from object_stages(group, obj, name)))

    found: list[Any] = group.run(name, exchange()).wait()
    return found


def object_stages(
    group: Group, obj: Any, name: str | None
) -> Generator[Operation, None, list[Any]]:
    """Return the objects of all members, as gather_objects(); in stages."""
    from fastps.collectives.objects import decode_of, encode_for_all  # noqa: PLC0415

    own = np.frombuffer(encode_for_all(obj), np.uint8)
    told = yield from tell(Rows(group, "allgather", own, [len(own)], DType.UINT8, name, "objects"))
    whole: Array = np.empty(sum(told.counts), np.uint8)
    if told.is_whole:
        told.land(whole)
    else:
        handle = group.allgather(own, whole, counts=told.counts, name=rest_of(name))
        yield from handle.operations
        handle.wait()
    everything, start, found = whole.tobytes(), 0, []
    for rank, count in zip(group.ranks, told.counts, strict=True):
        found.append(decode_of(rank, everything[start : start + count]))
        start += count
    return found
