# SPDX-License-Identifier: Apache-2.0
"""Small blocks travel with their sizes, in one exchange instead of two: MPI's eager protocol.

Where first dimensions may differ all members tell theirs first. Each block of rows goes behind
its head, if it is small; all members are told the largest of all blocks, so they agree on whether
everything has come. The bytes that this takes: docs/collectives.md. Threads: any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastps.collectives.names import part_of
from fastps.errors import MismatchError
from fastps.types import DType
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives._eager import Blocks
    from fastps.collectives.group import Group

ROOM_BYTES = 8 << 10  # of a block on one machine, where a copy costs less than an exchange,
FAR_ROOM_BYTES = 2 << 10  # between machines,
ALL_ROOM_BYTES = 64 << 10  # and of the blocks of all members


def allgather(group: Group, rows: Array, code: DType, name: str | None, call: str) -> Blocks:
    """Tell everybody the rows of an array, and what they are if they are few; blocks.

    rows: C-contiguous. call: what an error names. Raises MismatchError on all members where rows
    or dtypes differ.
    """
    return _trade(group, "allgather", rows, [len(rows)], code, name, call)


def alltoall(
    group: Group, rows: Array, splits: Sequence[int], code: DType, name: str | None
) -> Blocks:
    """Do allgather() for rows of which each member gets its own, as many as splits say; blocks."""
    return _trade(group, "alltoall", rows, list(splits), code, name, "alltoall")


def _trade(
    group: Group,
    kind: str,
    rows: Array,
    counts: list[int],
    code: DType,
    name: str | None,
    call: str,
) -> Blocks:
    from fastps.collectives._eager import Blocks, pack  # noqa: PLC0415  (few need them at once)

    most = ROOM_BYTES if group.is_on_one_machine else FAR_ROOM_BYTES
    room = min(most, ALL_ROOM_BYTES // group.size) & ~7
    width = math.prod(rows.shape[1:])
    row_bytes = width * rows.itemsize
    found = packed = pack(rows, counts, row_bytes, width, code, room)
    if group.size > 1:
        found = bytearray(len(packed) // len(counts) * group.size)
        group.trade(kind, packed, found, part_of(name, " sizes"))
    blocks = Blocks(found, group.size, row_bytes, width, code)
    if blocks.odd >= 0:
        raise _odd(blocks, call if name is None else f"{call} {name}", group, width, code)
    return blocks


def _odd(blocks: Blocks, what: str, group: Group, width: int, code: DType) -> MismatchError:
    """Say whose rows differ from ours."""
    its_width, its_dtype = blocks.its
    return MismatchError(
        f"{what}: worker {group.ranks[blocks.odd]} has rows of {its_width} elements of "
        f"{DType(its_dtype).name}, this one of {width} of {code.name}; first dimensions alone may "
        "differ, so this is not the same operation, size and type"
    )
