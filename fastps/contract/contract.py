# SPDX-License-Identifier: Apache-2.0
"""What is agreed on for a key when it is declared: who takes part, how bytes travel, what happens.

Decides what a contract can say. Pure: knows no thread, socket or job. A contract is fixed at
declaration; everybody who touches the key goes by it, and nobody asks anything else who is who.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple

from fastps.contract.codec import PLAIN, Codec, Coding
from fastps.contract.rule import SUMMED, Rule

ANY_STALENESS = (1 << 31) - 1  # nobody waits for anybody
JOIN = (1 << 31) - 1  # as the stamp of a pull: take part in a round without giving anything
MAX_DEADLINE_S = 86400.0
MAX_SETTLERS = 256  # who agree on a value: the table of their sources lies on the stack
MAX_CAST = 4096  # members of one cast: the table of a sum's sources lives on the stack


class Policy(IntEnum):
    """What the owner of a key does when somebody pushes or pulls it."""

    SUM = 1  # all push, the sum goes to all: one round after the other
    ACCUMULATE = 2  # each push is added at once; its answer is the value by then
    ACCEPTED = 3  # the mean of what all push becomes the value; readers pull, and hold nobody up
    COMBINED = 4  # so does their median, element by element
    DEADLINE_ROUNDS = 5  # a rule of those that came in time moves the value; see Gathering
    CODEC_STATE = 6  # what the codec of another key's sums keeps: read, and written by worker 0


WHOLE = (Policy.DEADLINE_ROUNDS, Policy.CODEC_STATE)  # by whole partitions
SETTLING = (Policy.ACCEPTED, Policy.COMBINED)


class Givers(IntEnum):
    """Who contributes to a key; everybody may read, whose business it is."""

    WORKERS = 1  # who are all that read, too
    VALIDATORS = 2  # workers read


class Unit(IntEnum):
    """What a rule works on at once; a whole tensor is one that was declared as one partition."""

    CHUNK = 1
    PARTITION = 2


@dataclass(frozen=True)
class Cast:
    """Who takes part in a key, by sender number; a contributor's index is its place.

    A round needs contributions of at least `quorum` contributors, of none with 0. divisor: of
    averages; of a median, how many are left out at either end. epoch: of the membership that the
    cast was made from.
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
        if not 0 <= self.quorum <= len(self.contributors) or self.divisor < 1:
            raise ValueError(f"the quorum and the divisor of {self} cannot be")

    @property
    def members(self) -> tuple[int, ...]:
        """Everybody: the contributors, then those who only read."""
        givers = set(self.contributors)
        return self.contributors + tuple(who for who in self.readers if who not in givers)


def check_policy(
    policy: int, is_whole: bool, staleness: int, casts: Sequence[Cast], *, is_coded: bool = False
) -> None:
    """Raise ValueError where a policy cannot be had: is_whole, by whole partitions.

    is_coded: a value of which changes travel encoded.
    """
    if is_whole != (policy in WHOLE or is_coded) and policy != Policy.SUM:
        raise ValueError("only sums go by whole partitions, and what is gathered or coded has to")
    if is_coded and (
        policy not in (Policy.DEADLINE_ROUNDS, Policy.ACCUMULATE)
        or (policy == Policy.ACCUMULATE and staleness != ANY_STALENESS)
    ):
        raise ValueError("changes travel encoded where they are gathered, or nobody waits")
    if policy not in SETTLING:
        return
    if staleness:
        raise ValueError("who agrees on a value goes in step: its staleness is 0")
    if any(len(cast.contributors) > MAX_SETTLERS for cast in casts):
        raise ValueError(f"more than {MAX_SETTLERS} cannot agree on a value")


class Compensation(NamedTuple):
    """How an asynchronous sum makes up for the delay of what is pushed; strength 0: not at all.

    strength: lambda, or lambda_0 where it adapts to a mean of squares that keeps `decay` of
    itself at each push. See server/_delay_compensation.pxi.
    """

    strength: float = 0.0
    is_adaptive: bool = False
    decay: float = 0.95


PROMPT = Compensation()  # nothing is made up for


class Step(IntEnum):
    """What an owner makes of the average change: fastps.outer has the formulas."""

    PLAIN = 0
    NESTEROV = 1
    ADAM = 2


class Gathering(NamedTuple):
    """How the rounds of a GATHERED key end, and what moves its value then.

    deadline_s: seconds from the first of a round to its end without the late; 0: it waits for all.
    step, lr: the outer optimizer and its rate; first, second, eps: momentum, or betas and epsilon.
    """

    deadline_s: float = 0.0
    step: Step = Step.PLAIN
    lr: float = 1.0
    first: float = 0.0
    second: float = 0.0
    eps: float = 0.0

    def check(self) -> None:
        """Raise ValueError for what cannot be."""
        if not 0 <= self.deadline_s < MAX_DEADLINE_S:
            raise ValueError(f"deadline_s={self.deadline_s} is not 0 to {MAX_DEADLINE_S:g}")
        if not (0 < self.lr < inf and 0 <= self.first < 1 and 0 <= self.second < 1):
            raise ValueError(f"lr={self.lr}, {self.first} and {self.second} make no optimizer")
        if not 0 <= self.eps < inf or (self.step is Step.ADAM and not self.eps):
            raise ValueError(f"eps={self.eps} is not above 0")


ALONE = Gathering()


def is_followed(policy: int, coding: Coding) -> bool:
    """Return whether members follow a value by changes that travel encoded."""
    holds = policy in (Policy.ACCUMULATE, Policy.DEADLINE_ROUNDS)
    return holds and coding.codec is not Codec.NONE


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
    givers: Givers = Givers.WORKERS
    gathering: Gathering = ALONE


def pusher_of(machine_ranks: Sequence[int], partition: int) -> int:
    """Choose the worker of a machine that pushes and pulls a partition for all of them."""
    return machine_ranks[partition % len(machine_ranks)]


def cast_apart(n: int, epoch: int = 0) -> Cast:
    """Cast every partition for n workers that all push and read for themselves; any may skip."""
    ranks = tuple(range(n))
    return Cast(ranks, ranks, 0, n, epoch)


def trim_of(policy: Policy, n: int) -> int:
    """Return how many of n values are left out at either end; 0: their mean is taken."""
    return (n - 1) // 2 if policy is Policy.COMBINED else 0


def cast_kept(n: int, epoch: int = 0) -> Cast:
    """Cast every partition for n workers that all read, and the first writes."""
    return Cast((0,), tuple(range(n)), 0, n, epoch)


def cast_judged(n_workers: int, n_validators: int, epoch: int = 0, *, trim: int = 0) -> Cast:
    """Cast every partition for validators, numbered after the workers, who push; all read."""
    givers = tuple(range(n_workers, n_workers + n_validators))
    return Cast(givers, tuple(range(n_workers)) + givers, 1, trim or n_validators, epoch)


def cast_of(machines: Sequence[Sequence[int]], partition: int, epoch: int = 0) -> Cast:
    """Cast a partition for workers, given by machine: one of each pushes and reads for all."""
    ranks = tuple(pusher_of(there, partition) for there in machines)
    return Cast(ranks, ranks, len(ranks), sum(map(len, machines)), epoch)
