# SPDX-License-Identifier: Apache-2.0
"""What an operation of a group is: for errors, and for members that have run out of data. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from fastps.types import DType, ReduceOp

if TYPE_CHECKING:
    from fastps.collectives.channels import Channels

Brought: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # dtype and shape of each array

MANY_SHOWN = 4  # arrays of a grouped operation that an error describes
# What join() takes part in, and may be over on a member before others begin
MAY_END_FIRST = ("broadcast", "reduce")
_FORMS = 65_521  # the largest prime that 16 bits hold


class Membership(Protocol):
    """The members of a process set, as far as words and messages need them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers in the job."""

    @property
    def rank(self) -> int:
        """The place of this worker among them."""

    @property
    def key(self) -> str:
        """What tells apart sets of the same ranks."""

    @property
    def of(self) -> str:
        """What errors call the set; empty for everybody."""

    @property
    def channels(self) -> Channels:
        """The numbers of names."""


class About(NamedTuple):
    """What one operation of a group is.

    key: of group_base.py. brought: the arrays of this member, as users know them. root: a member.
    """

    group: Membership
    name: str | None
    key: tuple[object, ...]
    divisor: int
    brought: Brought = ()
    rule: ReduceOp | None = None
    root: int = -1

    def words(self) -> str:
        """Describe the operation, for errors: what it does, from or to whom, and to what."""
        return words_of(
            str(self.key[0]), self.brought, rule=self.rule, is_average=self.divisor > 1,
            root=self.group.ranks[self.root] if self.root >= 0 else -1,
        )  # fmt: skip


def words_of(
    kind: str, brought: Brought, *, rule: ReduceOp | None = None, is_average: bool = False,
    root: int = -1,
) -> str:  # fmt: skip
    """Describe an operation; root: a rank in the job."""
    words = kind
    if rule is not None and not kind.startswith("neighbor"):
        words += f" ({'average' if is_average else rule.name.lower()})"
    if root >= 0:
        words += f" {'from' if kind in ('broadcast', 'scatter') else 'to'} worker {root}"
    shown = [f"{DType(code).name.lower()} of shape {shape}" for code, shape in brought]
    more = len(shown) - MANY_SHOWN
    of = " and ".join(shown[:MANY_SHOWN]) + f" and {more} arrays more" * (more > 0)
    return f"{words} of {of}" if of else words


def form_of(brought: Brought, *others: int) -> int:
    """Return a number of 16 bits, never 0, for dtypes and shapes; others: all that is to count."""
    form = 1
    for code, shape in brought:
        for number in (code, len(shape), *shape):
            form = (form * 40_503 + number + 1) % _FORMS
    for number in others:
        form = (form * 40_503 + number + 2) % _FORMS
    return form + 1


def rows_of(brought: Brought) -> Brought:
    """Leave out first dimensions, which may differ."""
    return tuple((code, shape[1:]) for code, shape in brought)


def differing_text(
    what: str, started: Sequence[tuple[int, str | None]], *, gone: Collection[int] = (),
    is_among_neighbors: bool = False,
) -> str:  # fmt: skip
    """Word the error of an operation for which workers started different things.

    started: what each did by rank, or None where it has not come to it so far. gone: ranks that
    are lost or have left; of these it is not known whether they did.
    """
    sides: dict[str, list[int]] = {}
    for rank, words in started:
        side = "did not start it" if words is None else f"started {words}"
        side = "died or left the job" if words is None and rank in gone else side
        sides.setdefault(side, []).append(rank)
    told = "; ".join(f"{_workers(ranks)} {words}" for words, ranks in sides.items())
    cure = ", and let neighbors agree on who sends to whom" if is_among_neighbors else ""
    return (
        f"{what} is not the same operation, size and type on all workers: {told}. Make all "
        f"workers call the same in the same order{cure}"
    )


def _workers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + f" and {len(ranks) - 16} more" * (len(ranks) > 16)
    return f"worker{'s' * (len(ranks) > 1)} {shown}"


def brought_of(*arrays: Any, dtype: DType) -> Brought:
    """Describe arrays of one dtype."""
    return tuple((int(dtype), tuple(array.shape)) for array in arrays)
