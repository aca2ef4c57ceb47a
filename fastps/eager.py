# SPDX-License-Identifier: Apache-2.0
"""How members learn of first dimensions that may differ: in an exchange, or from the last one.

They tell theirs first. Each block of rows goes behind its head, if it is small: MPI's eager
protocol; all members are told the largest of all blocks, so they agree on whether everything has
come. Sizes that stayed the same are not told again (collectives/steady.py). The bytes that this
takes: docs/collectives.md. Threads: any.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from fastps.collectives.names import SIZES, part_of
from fastps.collectives.promise import SizesDifferError
from fastps.errors import MismatchError
from fastps.types import DType
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives._eager import Blocks
    from fastps.collectives.group import Group

ROOM_BYTES = 8 << 10  # of a block on one machine, where a copy costs less than an exchange,
FAR_ROOM_BYTES = 2 << 10  # between machines,
ALL_ROOM_BYTES = 64 << 10  # and of the blocks of all members
ROOT_SHIFT, DTYPE_MASK = 8, 0xFF  # of the number of dtype and root in a head


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
    def part(self) -> str | None:
        """Name of an exchange that may be one of sizes, or of the rows."""
        return part_of(self.name, SIZES)


def tell(rows: Rows) -> Blocks:
    """Tell everybody how many rows there are, and what they are if they are few; blocks.

    Raises MismatchError on all members where widths or dtypes differ.
    """
    from fastps.collectives._eager import Blocks, pack  # noqa: PLC0415  (few need them at once)

    group, counts, code, width = rows.group, rows.counts, _code(rows.code, rows.root), rows.width
    most = ROOM_BYTES if group.is_on_one_machine else FAR_ROOM_BYTES
    room = min(most, ALL_ROOM_BYTES // group.size) & ~7
    row_bytes = width * rows.array.itemsize
    found = packed = pack(rows.array, counts, row_bytes, width, code, room)
    is_asked = group.size > 1 and rows.call == rows.kind
    if group.size > 1:
        found = bytearray(len(packed) // len(counts) * group.size)
        _trade(rows, packed, found, may_differ=is_asked and not group.steady.was_missed(rows.key))
    blocks = Blocks(found, group.size, row_bytes, width, code)
    if blocks.odd >= 0:
        raise _odd(blocks, rows)
    if is_asked and blocks.is_full:
        group.steady.told(rows.key, counts, blocks.counts)
    return blocks


def _code(dtype: int, root: int) -> int:
    """Put the dtype of rows and their root, -1 for none, into one number of a head."""
    return int(dtype) | (root + 1) << ROOT_SHIFT


def _trade(rows: Rows, packed: bytearray, found: bytearray, *, may_differ: bool) -> None:
    """Send heads and what is behind them; once more, if others take sizes for granted."""
    group = rows.group
    try:
        group.trade(rows.kind, packed, found, rows.part, rows.key, may_differ=may_differ)
    except SizesDifferError:
        group.steady.was_missed(rows.key)
        _trade(rows, packed, found, may_differ=False)


def _odd(blocks: Blocks, rows: Rows) -> MismatchError:
    """Say whose rows differ from ours."""
    ranks, (its_width, its_code) = rows.group.ranks, blocks.its
    its_dtype, its_root = DType(its_code & DTYPE_MASK), (its_code >> ROOT_SHIFT) - 1
    what = rows.call if rows.name is None else f"{rows.call} {rows.name}"
    who = f"{what}: worker {ranks[blocks.odd]}"
    if its_root != rows.root:
        its, ours = (f"worker {ranks[root]}" for root in (its_root, rows.root))
        return MismatchError(f"{who} has {its} for a root, this one {ours}")
    return MismatchError(
        f"{who} has rows of {its_width} elements of {its_dtype.name}, this one of {rows.width} of "
        f"{rows.code.name}; first dimensions alone may differ, so this is not the same operation, "
        "size and type"
    )
