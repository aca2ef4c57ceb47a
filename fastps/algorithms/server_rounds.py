# SPDX-License-Identifier: Apache-2.0
"""Values that servers hold and update, in rounds that may end before late workers.

Moves such values to the servers and back; the servers end a round and update the values
(server/_deadline_rounds.pxi). A job of one worker has no servers, and updates them here. All of it
runs in the thread that trains.
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

FRESH = -1.0  # the command that rank 0 sends with an initial value


class ServerRounds:
    """Arrays by name that servers hold; workers push changes and get the new values."""

    def __init__(self, optimizer: optimizers.Outer, deadline_s: float) -> None:
        """Take the optimizer of the values; deadline_s=0 waits for all. TypeError, ValueError."""
        self._outer, self._terms = optimizer, optimizer.gathering(deadline_s)
        self._terms.check()
        self._values: dict[str, Array] = {}  # of a job of one worker
        self._copies: dict[str, Array] = {}  # of values that encoded answers update

    def declare(
        self, names: Sequence[str], values: Sequence[Array], codes: Sequence[DType], *,
        rule: Rule, compression: Choice,
    ) -> None:  # fmt: skip
        """Make servers hold rank 0's values; blocks. All workers call it."""
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
        """Make servers hold rank 0's values and the optimizer's state of each; blocks.

        kept: of rank 0, by read(); empty for a fresh optimizer. The values overwrite those of the
        other workers. All workers call it, with no operation of theirs in flight.
        """
        if current().size == 1:
            self._values.update(zip(names, [one.copy() for one in values], strict=True))
            return
        current().barrier("gathered")
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            if current().rank == 0:
                self._set(name, value, 1.0 + steps if kept else FRESH)
                for one in kept[place] if kept else ():
                    self._set(name, one, 1.0 + steps)
        current().barrier("gathered")
        if names:
            self.pull(names, values)

    def _set(self, name: str, value: Array, command: float) -> None:
        """Push a new value, or state of the optimizer, instead of a change."""
        (tensor,) = (one.tensor for one in current().started([name]))
        tensor.follow(command)
        tensor.is_plain = True
        try:
            current().push_pull(value, name, out=value.copy())
        finally:
            tensor.follow(0.0)
            tensor.is_plain = False

    def pull(self, names: Sequence[str], values: Sequence[Array], *, stamp: int = 0) -> None:
        """Overwrite values with the servers', not encoded; blocks."""
        if current().size == 1:
            return
        current().start_held("start_pull", names, values, stamp=stamp).wait()
        for name, value in zip(names, values, strict=True):
            if stamp >= 0 and name in self._copies:
                self._copies[name][...] = value

    def read(self, names: Sequence[str], like: Sequence[Array]) -> tuple[list[list[Array]], int]:
        """Return the optimizer's arrays for each value, and its number of steps; blocks."""
        kept: list[list[Array]] = [[] for _ in names]
        n_kept = int(self._terms.step)  # arrays that the optimizer keeps of each value
        if current().size == 1 or not n_kept:
            return kept, 0
        for number in range(n_kept):
            arrays = [one.copy() for one in like]
            self.pull(names, arrays, stamp=-1 - number)
            for place, one in enumerate(arrays):
                kept[place].append(one)
        return kept, current().stamp_of(names)

    def start(self, name: str, change: Array, value: Array, *, sends: bool) -> list[Waitable]:
        """Start to push a change, or to skip a round; the new value comes into `value`."""
        session, copy = current(), self._copies.get(name)
        if session.size == 1:
            held = self._values[name]
            if sends:
                self._outer.step(list(self._values).index(name), held, change)
            value[...] = held
            return []
        target = value if copy is None else copy
        if sends:
            handle = session.push_pull_async(change, name, out=target)
        else:
            handle = session.start_held("start_pull", [name], [target], stamp=JOIN, is_coded=True)
        if copy is None:
            return [handle]
        return [MappedHandle([handle], lambda _: np.copyto(value, target))]

    def settle(self, names: Sequence[str], values: Sequence[Array]) -> None:
        """Make servers count late changes, and overwrite values with the result; blocks.

        All workers call it, with no operation of theirs in flight.
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
        """Return the optimizer's state here, which a job of one worker uses."""
        return self._outer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of state_dict()."""
        self._outer.load_state_dict(state)
