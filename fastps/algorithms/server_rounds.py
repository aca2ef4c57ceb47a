# SPDX-License-Identifier: Apache-2.0
"""Values that servers hold and move, in rounds that may end without the late.

Decides how such values come to the servers and back; when a round ends, and what then moves the
value, is theirs (server/_deadline_rounds.pxi). A job of one worker has no servers, and does it
here. All of it runs in the thread that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastps.algorithms import outer as optimizers
from fastps.contract.compression import Choice
from fastps.contract.contract import JOIN, Policy
from fastps.contract.rule import Choice as Rule
from fastps.session.current import current
from fastps.types import DType
from fastps.worker.handle import Array, MappedHandle, Waitable

FRESH = -1.0  # what rank 0 says with a value that nothing was done to


class ServerRounds:
    """Arrays by name that servers hold; workers push what they changed, and get what is there."""

    def __init__(self, optimizer: optimizers.Outer, deadline_s: float) -> None:
        """Take the optimizer that moves the values; 0 waits for all. TypeError, ValueError."""
        self._outer, self._terms = optimizer, optimizer.gathering(deadline_s)
        self._terms.check()
        self._values: dict[str, Array] = {}  # of a job of one worker
        self._copies: dict[str, Array] = {}  # of what changes by what comes encoded

    @property
    def n_kept(self) -> int:
        """How many arrays the optimizer keeps of each value."""
        return int(self._terms.step)

    def declare(
        self, names: Sequence[str], values: Sequence[Array], codes: Sequence[DType], *,
        rule: Rule, compression: Choice,
    ) -> None:  # fmt: skip
        """Let servers hold rank 0's values; blocks. All workers call it alike."""
        session = current()
        specs = zip(names, values, codes, strict=True)
        if session.size > 1:
            session.declare(
                [(name, value.shape, code) for name, value, code in specs],
                policy=Policy.DEADLINE_ROUNDS, rule="average" if rule is None else rule,
                gathering=self._terms, compression=compression,
            )  # fmt: skip
            for started, value in zip(session.started(names), values, strict=True):
                if started.tensor.is_followed:
                    self._copies[started.tensor.name] = value.copy()
        self.seed(names, values)

    def seed(
        self,
        names: Sequence[str],
        values: Sequence[Array],
        kept: Sequence[Sequence[Array]] = (),
        steps: int = 0,
    ) -> None:
        """Let servers hold rank 0's values and what the optimizer keeps of each; blocks.

        kept: of rank 0, as read() gave it; none begins anew. The values are written over those of
        the others. All workers call it alike, when nothing of theirs is on its way.
        """
        if current().size == 1:
            self._values.update(zip(names, [one.copy() for one in values], strict=True))
            return
        current().barrier("gathered")
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            if current().rank == 0:
                self._say(name, value, 1.0 + steps if kept else FRESH)
                for one in kept[place] if kept else ():
                    self._say(name, one, 1.0 + steps)
        current().barrier("gathered")
        if names:
            self.pull(names, values)

    def _say(self, name: str, value: Array, word: float) -> None:
        """Push what is no change, but what there is to be."""
        (tensor,) = (one.tensor for one in current().started([name]))
        tensor.follow(word)
        tensor.is_plain = True
        try:
            current().push_pull(value, name, out=value.copy())
        finally:
            tensor.follow(0.0)
            tensor.is_plain = False

    def pull(self, names: Sequence[str], values: Sequence[Array], *, stamp: int = 0) -> None:
        """Write what servers hold over values, as it is; blocks."""
        if current().size == 1:
            return
        current().start_held("start_pull", names, values, stamp=stamp).wait()
        for name, value in zip(names, values, strict=True):
            if stamp >= 0 and name in self._copies:
                self._copies[name][...] = value

    def read(self, names: Sequence[str], like: Sequence[Array]) -> tuple[list[list[Array]], int]:
        """Return what the optimizer keeps of each value, and its steps; blocks."""
        kept: list[list[Array]] = [[] for _ in names]
        if current().size == 1 or not self.n_kept:
            return kept, 0
        for number in range(self.n_kept):
            arrays = [one.copy() for one in like]
            self.pull(names, arrays, stamp=-1 - number)
            for place, one in enumerate(arrays):
                kept[place].append(one)
        return kept, current().stamp_of(names)

    def start(self, name: str, change: Array, value: Array, *, gives: bool) -> list[Waitable]:
        """Start to push a change, or to sit out a round; what is there then comes into value."""
        session, copy = current(), self._copies.get(name)
        if session.size == 1:
            self._do_alone(name, change, value, gives=gives)
            return []
        target = value if copy is None else copy
        if gives:
            handle = session.push_pull_async(change, name, out=target)
        else:
            handle = session.start_held("start_pull", [name], [target], stamp=JOIN, is_coded=True)
        if copy is None:
            return [handle]
        return [MappedHandle([handle], lambda _: np.copyto(value, target))]

    def _do_alone(self, name: str, change: Array, value: Array, *, gives: bool) -> None:
        held = self._values[name]
        if gives:
            self._outer.step(list(self._values).index(name), held, change)
        value[...] = held

    def settle(self, names: Sequence[str], values: Sequence[Array]) -> None:
        """Let what came late count too, and write what is there then over values; blocks.

        All workers call it alike, when nothing of theirs is on its way.
        """
        if current().size == 1:
            for name, value in zip(names, values, strict=True):
                value[...] = self._values[name]
            return
        current().barrier("gathered")
        self.pull(names, values)
        current().barrier("gathered")
        self.pull(names, values, stamp=JOIN)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept here, in a job of one worker."""
        return self._outer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was kept here."""
        self._outer.load_state_dict(state)
