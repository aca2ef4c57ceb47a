# SPDX-License-Identifier: Apache-2.0
"""What is agreed on for a key when it is declared: who takes part, how bytes travel, what happens.

Decides what a contract can say. Pure: knows no thread, socket or job. A contract is fixed at
declaration; everybody who touches the key goes by it, and nobody asks anything else who is who.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fastps.coding import PLAIN, Coding
from fastps.rules import SUMMED, Rule

ANY_STALENESS = (1 << 31) - 1  # nobody waits for anybody
MAX_CAST = 4096  # members of one cast: the table of a sum's sources lives on the stack


class Policy(IntEnum):
    """What the owner of a key does when somebody pushes or pulls it."""

    SUM = 1  # all push, the sum goes to all: one round after the other
    ACCUMULATE = 2  # each push is added at once; its answer is the value by then


class Unit(IntEnum):
    """What a rule works on at once; a whole tensor is one that was declared as one partition."""

    CHUNK = 1
    PARTITION = 2


@dataclass(frozen=True)
class Cast:
    """Who takes part in a key, by sender number; a contributor's index is its place.

    A round needs contributions of at least `quorum` contributors. divisor: of averages. epoch: of
    the membership that the cast was made from.
    """

    contributors: tuple[int, ...]
    readers: tuple[int, ...]
    quorum: int
    divisor: int
    epoch: int = 0

    def __post_init__(self) -> None:
        """Refuse a cast that cannot play. Raises ValueError."""
        if len(set(self.contributors)) + len(set(self.readers)) != len(
            self.contributors + self.readers
        ):
            raise ValueError(f"somebody takes part twice in {self}")
        if not 0 < len(self.members) <= MAX_CAST or min(self.members) < 0:
            raise ValueError(f"{self} needs 1 to {MAX_CAST} members with numbers from 0 on")
        if not 0 < self.quorum <= len(self.contributors) or self.divisor < 1:
            raise ValueError(f"the quorum and the divisor of {self} cannot be")

    @property
    def members(self) -> tuple[int, ...]:
        """Everybody: the contributors, then those who only read."""
        givers = set(self.contributors)
        return self.contributors + tuple(who for who in self.readers if who not in givers)


class Compensation(NamedTuple):
    """How an asynchronous sum makes up for the delay of what is pushed; strength 0: not at all.

    strength: lambda, or lambda_0 where it adapts to a mean of squares that keeps `decay` of
    itself at each push. See server/_compensate.pxi.
    """

    strength: float = 0.0
    is_adaptive: bool = False
    decay: float = 0.95


PROMPT = Compensation()  # nothing is made up for


@dataclass(frozen=True)
class Contract:
    """All that is agreed on for one key.

    staleness: of ACCUMULATE: what a contributor gets with its n-th push holds the first n -
    staleness of all others, for which it waits; 0 is in step, ANY_STALENESS waits for nobody.
    """

    cast: Cast
    coding: Coding = PLAIN
    policy: Policy = Policy.SUM
    staleness: int = 0
    rule: Rule = SUMMED
    compensation: Compensation = PROMPT


def pusher_of(machine_ranks: Sequence[int], partition: int) -> int:
    """Choose the worker of a machine that pushes and pulls a partition for all of them."""
    return machine_ranks[partition % len(machine_ranks)]


def cast_apart(n: int, epoch: int = 0) -> Cast:
    """Cast every partition for n workers that all push and read for themselves; any may skip."""
    ranks = tuple(range(n))
    return Cast(ranks, ranks, 1, n, epoch)


def cast_of(machines: Sequence[Sequence[int]], partition: int, epoch: int = 0) -> Cast:
    """Cast a partition for workers, given by machine: one of each pushes and reads for all."""
    ranks = tuple(pusher_of(there, partition) for there in machines)
    return Cast(ranks, ranks, len(ranks), sum(map(len, machines)), epoch)
