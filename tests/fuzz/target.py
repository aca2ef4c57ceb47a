# SPDX-License-Identifier: Apache-2.0
"""What a target of the fuzzers is: seeds, how they are changed, and what takes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from fastps.errors import FastPSError

from .mutator import change_bytes, change_items, change_tree

Format = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]  # of trees: decode, encode


class Target(ABC):
    """One parser. It is opened once in each process that runs it."""

    name: str
    per_round: int  # inputs that take about a second
    is_native = False  # it reaches code for which sanitizers are
    errors: tuple[type[Exception], ...] = ()  # besides FastPSError; exactly these, no subclasses
    tree: Format | None = None  # of an item

    def open(self) -> None:  # noqa: B027  (most have nothing to do)
        """Make what all inputs share."""

    def close(self) -> None:  # noqa: B027
        """Undo open()."""

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Return valid inputs, which run() takes without an error; needs no open()."""

    @abstractmethod
    def run(self, data: bytes) -> None:
        """Take one input. Raises its errors for an invalid one, AssertionError for a finding."""

    def split(self, data: bytes) -> list[bytes]:
        """Return the items of an input, which changes leave out, double and move."""
        return [data]

    def join(self, items: Sequence[bytes]) -> bytes:
        """Undo split()."""
        return b"".join(items)

    def make(self, seeds: Sequence[bytes], seed: int, number: int) -> bytes:
        """Return the input of a number: the seeds, then changed ones."""
        if number < len(seeds):
            return seeds[number]
        random = Random(f"{self.name} {seed} {number}")
        items, others = (self.split(random.choice(seeds)) for _ in range(2))
        for _ in range(1 + min(int(random.expovariate(0.6)), 9)):
            items = change_items(
                random, items, others, lambda item: self._change(random, item, others)
            )
        return self.join(items)

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error is one that this parser names."""
        return isinstance(error, FastPSError) or type(error) in self.errors

    def _change(self, random: Random, item: bytes, others: list[bytes]) -> bytes:
        if self.tree is not None and random.random() < 0.7:
            decode, encode = self.tree
            try:
                return encode(change_tree(random, decode(item)))
            except (ValueError, TypeError, RecursionError, OverflowError):
                pass  # what was changed before is not of this format any more
        return change_bytes(random, item, random.choice(others) if others else b"")
