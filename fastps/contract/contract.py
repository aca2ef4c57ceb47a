# SPDX-License-Identifier: Apache-2.0
"""What members agree on about a key when it is declared: contributors, readers, and its policy.

Decides what a contract can say. Pure: knows no thread, socket or job. A contract is fixed at
declaration, and every member that touches the key follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple

from fastps.contract.codec import Codec, Coding

ANY_STALENESS = (1 << 31) - 1  # no member waits for another
JOIN = (1 << 31) - 1  # as the stamp of a pull: take part in a round without a contribution
MAX_DEADLINE_S = 86400.0
MAX_SETTLERS = 256  # contributors that agree on a value: their table lies on the stack
MAX_ROSTER = 4096  # members of one roster: the table of a sum's sources lies on the stack


class Policy(IntEnum):
    """What the owner of a key does when a member pushes or pulls it."""

    SUM = 1  # all push, the sum goes to all: one round after the other
    ACCUMULATE = 2  # each push is added at once; its answer is the value by then
    ACCEPTED = 3  # the mean of what all push becomes the value; readers pull and delay no member
    COMBINED = 4  # as ACCEPTED, with the median of each element in place of the mean
    DEADLINE_ROUNDS = 5  # a rule of the updates that came in time moves the value; see Gathering
    CODEC_STATE = 6  # what the codec of another key's sums keeps: read, and written by worker 0


WHOLE = (Policy.DEADLINE_ROUNDS, Policy.CODEC_STATE)  # by whole partitions
SETTLING = (Policy.ACCEPTED, Policy.COMBINED)


class Givers(IntEnum):
    """The role that contributes to a key; both roles may read it."""

    WORKERS = 1  # and only they read
    VALIDATORS = 2  # workers read


class Unit(IntEnum):
    """What a rule works on at once; a whole tensor is one that was declared as one partition."""

    CHUNK = 1
    PARTITION = 2


@dataclass(frozen=True)
class Roster:
    """The members of a key, by sender number: which contribute to it and which read it.

    A contributor's index is its place. A round needs contributions of at least `quorum`
    contributors; with 0 of none. divisor: of averages; of a median, how many values are left out
    at either end. epoch: of the membership that the roster was made from.
    """

    contributors: tuple[int, ...]
    readers: tuple[int, ...]
    quorum: int
    divisor: int
    epoch: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for members, a quorum or a divisor out of bounds."""
        if len(set(self.contributors)) + len(set(self.readers)) != len(
            self.contributors + self.readers
        ):
            raise ValueError(f"a member is listed twice in {self}; list each member once")
        if not 0 < len(self.members) <= MAX_ROSTER or min(self.members) < 0:
            raise ValueError(f"{self} must have 1 to {MAX_ROSTER} members, numbered from 0")
        if not 0 <= self.quorum <= len(self.contributors) or self.divisor < 1:
            raise ValueError(
                f"{self} must have a quorum of 0 to {len(self.contributors)} and a divisor "
                "of 1 or more"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The contributors, then the members that only read."""
        pushing = set(self.contributors)
        return self.contributors + tuple(one for one in self.readers if one not in pushing)


def check_policy(
    policy: int,
    is_whole: bool,
    staleness: int,
    rosters: Sequence[Roster],
    *,
    is_coded: bool = False,
) -> None:
    """Raise ValueError for a policy that these parameters do not allow.

    is_whole: by whole partitions. is_coded: changes of the value travel encoded.
    """
    if is_whole != (policy in WHOLE or is_coded) and policy != Policy.SUM:
        raise ValueError(
            f"policy {policy} with is_whole={is_whole}, is_coded={is_coded}: DEADLINE_ROUNDS, "
            "CODEC_STATE and encoded changes need whole partitions, ACCUMULATE and ACCEPTED chunks"
        )
    if is_coded and (
        policy not in (Policy.DEADLINE_ROUNDS, Policy.ACCUMULATE)
        or (policy == Policy.ACCUMULATE and staleness != ANY_STALENESS)
    ):
        raise ValueError(
            f"policy {policy} with staleness={staleness} does not support encoded changes; use "
            "DEADLINE_ROUNDS, or ACCUMULATE with ANY_STALENESS"
        )
    if policy not in SETTLING:
        return
    if staleness:
        raise ValueError(f"policy {policy} needs staleness=0, got {staleness}")
    most = max((len(roster.contributors) for roster in rosters), default=0)
    if most > MAX_SETTLERS:
        raise ValueError(
            f"policy {policy} supports at most {MAX_SETTLERS} contributors, got {most}"
        )


class Compensation(NamedTuple):
    """How an asynchronous sum compensates delays of pushes; strength 0: it does not.

    strength: lambda, or lambda_0 where it adapts to a mean of squares that keeps `decay` of
    itself at each push. See server/_delay_compensation.pxi.
    """

    strength: float = 0.0
    is_adaptive: bool = False
    decay: float = 0.95


PROMPT = Compensation()  # no compensation


class Step(IntEnum):
    """What an owner makes of the average change: fastps.outer has the formulas."""

    PLAIN = 0
    NESTEROV = 1
    ADAM = 2


class Gathering(NamedTuple):
    """How rounds of a DEADLINE_ROUNDS key end, and what moves its value then.

    deadline_s: seconds from the first push of a round to its end; 0: it waits for all workers.
    step, lr: the outer optimizer and its rate; first, second, eps: momentum, or betas and epsilon.
    """

    deadline_s: float = 0.0
    step: Step = Step.PLAIN
    lr: float = 1.0
    first: float = 0.0
    second: float = 0.0
    eps: float = 0.0

    def check(self) -> None:
        """Raise ValueError for parameters out of bounds."""
        if not 0 <= self.deadline_s < MAX_DEADLINE_S:
            raise ValueError(
                f"deadline_s must be 0 to below {MAX_DEADLINE_S:g}, got {self.deadline_s}"
            )
        if not (0 < self.lr < inf and 0 <= self.first < 1 and 0 <= self.second < 1):
            raise ValueError(
                f"the outer optimizer needs lr above 0 and betas of 0 to below 1, got "
                f"lr={self.lr}, {self.first} and {self.second}"
            )
        if not 0 <= self.eps < inf or (self.step is Step.ADAM and not self.eps):
            raise ValueError(f"eps must be above 0 and finite, got {self.eps}")


ALONE = Gathering()


def is_followed(policy: int, coding: Coding) -> bool:
    """Return whether members follow a value by changes that travel encoded."""
    holds = policy in (Policy.ACCUMULATE, Policy.DEADLINE_ROUNDS)
    return holds and coding.codec is not Codec.NONE


def pusher_of(machine_ranks: Sequence[int], partition: int) -> int:
    """Choose the worker of a machine that pushes and pulls a partition for all of them."""
    return machine_ranks[partition % len(machine_ranks)]


def roster_apart(n: int, epoch: int = 0) -> Roster:
    """List n workers that all push and read for themselves; any may skip."""
    ranks = tuple(range(n))
    return Roster(ranks, ranks, 0, n, epoch)


def trim_of(policy: Policy, n: int) -> int:
    """Return how many of n values are left out at either end; 0: their mean is taken."""
    return (n - 1) // 2 if policy is Policy.COMBINED else 0


def roster_kept(n: int, epoch: int = 0) -> Roster:
    """List n workers that all read, and of which the first pushes."""
    return Roster((0,), tuple(range(n)), 0, n, epoch)


def roster_judged(n_workers: int, n_validators: int, epoch: int = 0, *, trim: int = 0) -> Roster:
    """List validators, numbered after the workers, that push; all members read."""
    pushing = tuple(range(n_workers, n_workers + n_validators))
    return Roster(pushing, tuple(range(n_workers)) + pushing, 1, trim or n_validators, epoch)


def roster_of(machines: Sequence[Sequence[int]], partition: int, epoch: int = 0) -> Roster:
    """List one worker of each machine: it pushes and reads a partition for the others."""
    ranks = tuple(pusher_of(there, partition) for there in machines)
    return Roster(ranks, ranks, len(ranks), sum(map(len, machines)), epoch)
