# SPDX-License-Identifier: Apache-2.0
"""A worker's side of training with validators: local steps, whose changes validators judge.

Every H steps a worker pushes its changes, and takes over the values that validators made of all
workers' changes (ZenoPS; Xie, Koyejo and Gupta, 2022). It may skip an exchange, or leave a tensor
out, by chance, and says so to the validator. A change that was left out stays in the worker's own
values, and is sent with the next change of that tensor (error reset of CSER; Xie, Zheng, Koyejo,
Gupta, Li and Lin, NeurIPS 2020) or never, as in ZenoPS's code. After each step
own <- (1 - rho) own + rho held may pull back to the values that were held. The validators choose
the rule.

Knows tensors only by _read and _write, which frameworks override. All of it runs in the thread
that steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fastps.algorithms.held_parameters import Among, HeldParameters
from fastps.algorithms.local_blocks import widened
from fastps.algorithms.local_sgd_base import Terms
from fastps.algorithms.validator import Train
from fastps.contract.compression import Choice
from fastps.session.current import current
from fastps.worker.handle import Array


class ValidatedSteps:
    """Train arrays with local steps, whose changes count as far as validators accept them."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        sync_every: int = 1,
        participation: float = 1.0,
        sparsity: float = 0.0,
        error_reset: Literal["kept", "literal"] = "kept",
        seed: int = 0,
        proximal: float = 0.0,
        asynchronous: bool = False,
        among: Among = "mean",
        compression: Choice = None,
        prefix: str = "Held.",
    ) -> None:
        """Take over validator 0's values, which servers hold; blocks until all members do.

        parameters: C-contiguous arrays of floats by name; written by step(). sync_every: H, steps
        from one exchange to the next. participation: probability with which this worker takes
        part in an exchange, sparsity: with which it leaves an array out; drawn from counters and
        seed. error_reset: "kept" sends later what was left out, "literal" never. proximal: rho,
        how strongly each step pulls back to the last values from servers, 0 to below 1; ZenoPS has
        it for asynchronous workers. asynchronous, among, compression, prefix: of HeldParameters,
        the same on all workers and validators. Raises ValueError, and what HeldParameters does.
        """
        if not 0 <= proximal < 1:
            raise ValueError(f"proximal must be >= 0 and < 1, got {proximal}")
        self._terms = Terms(sync_every=sync_every, participation=participation, sparsity=sparsity,
                            error_reset=error_reset, seed=seed)  # fmt: skip
        self.proximal, self.steps, self.exchanges = proximal, 0, 0
        self._own = list(parameters.values())
        self.held = HeldParameters(
            {name: self._read(own) for name, own in parameters.items()},
            asynchronous=asynchronous, among=among, compression=compression, prefix=prefix,
        )  # fmt: skip
        self._lost: list[Array | None] = [None] * len(self._own)  # of own values, never sent
        for place in range(len(self._own)):
            self._give_back(place, None)

    # ---- of the framework ----

    def _read(self, own: Any) -> Array:
        """Copy a tensor into an array, halves as float32, so that small changes add up."""
        return widened(own)

    def _write(self, own: Any, value: Array) -> None:
        """Write an array over a tensor."""
        own[...] = value

    def _is_narrow(self, own: Any) -> bool:
        """Return whether _write() rounds, as for halves."""
        return bool(own.dtype == np.float16)

    # ---- for simulated attacks ----

    def told(self, change: Array, place: int) -> Array:
        """Return the change of a parameter that is pushed; override it to simulate attacks."""
        return change

    # ---- steps ----

    def step(self) -> None:
        """Count a step that was done on the arrays; see advance()."""
        self.advance()

    def advance(self) -> None:
        """Count a step that was done; every sync_every-th ends with an exchange, which blocks."""
        self.steps += 1
        if self.proximal:
            for place in range(len(self._own)):
                self._draw_back(place)
        if self.steps % self._terms.sync_every == 0:
            self.exchange()

    def _draw_back(self, place: int) -> None:
        """Pull a tensor back to its held values; note the rounding, which is no change of ours."""
        own, held, lost = self._own[place], self.held.arrays[place], self._lost[place]
        now = self._read(own)
        first = held if lost is None or self._terms.error_reset == "literal" else held + lost
        value = np.asarray(now + self.proximal * (first - now))
        self._write(own, value)
        if self._is_narrow(own):
            off = self._read(own)
            off -= value
            self._lost[place] = off if lost is None else np.asarray(lost + off)

    def exchange(self, *, is_whole: bool = False) -> None:
        """Push the changes, and take over the values that validators make of them; blocks.

        Waits for the end of the round, or, asynchronously, until the push is judged. is_whole:
        leave nothing out, as at the end of training. Raises what pull() does.
        """
        held, session = self.held, current()
        self.exchanges += 1
        sent = [True] * len(self._own)
        if not is_whole:
            sent = self._terms.sent_by(session.rank, session.size, self.exchanges, len(self._own))
        ahead = self._ahead()
        changes = [
            self.told(change if lost is None else np.asarray(change - lost), place)
            if is_sent
            else None
            for place, (change, lost, is_sent) in enumerate(
                zip(ahead, self._lost, sent, strict=True)
            )
        ]
        held.push(changes)
        if held.is_asynchronous:
            held.pull(unjudged=0)
        else:
            held.pull(stamp=held.stamp + 1)
        for place, (change, is_sent) in enumerate(zip(ahead, sent, strict=True)):
            self._give_back(place, None if is_sent else change)

    def _give_back(self, place: int, change: Array | None) -> None:
        """Copy the held values to the worker, plus its change that was not sent."""
        own, value = self._own[place], self.held.arrays[place]
        self._write(own, value if change is None else np.asarray(value + change))
        self._lost[place] = change if self._terms.error_reset == "literal" else None
        if self._is_narrow(own):  # rounding is no change of ours
            kept = None if self._terms.error_reset == "literal" else change
            off = self._read(own)
            off -= value
            self._lost[place] = off if kept is None else np.asarray(off - kept)

    def _ahead(self) -> list[Array]:
        """Return the differences of own values from the last held ones."""
        found = []
        for own, old in zip(self._own, self.held.arrays, strict=True):
            change = self._read(own)
            change -= old
            found.append(change)
        return found

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs besides own values; each worker saves its own.

        A validator saves the servers' values, its `arrays`, and resumes with them.
        """
        lost = [None if one is None else one.copy() for one in self._lost]
        return {"numbers": (self.steps, self.exchanges), "ahead": self._ahead(), "lost": lost,
                "kept": self.held.codes.kept()}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict() and the servers' values. ValueError for another model."""
        ahead = state.get("ahead", ())
        if [one.shape for one in ahead] != [one.shape for one in self.held.arrays]:
            raise ValueError(
                "the state does not fit: it is not of ValidatedSteps of this model; create them "
                "with the parameters of those that were saved"
            )
        self.steps, self.exchanges = state["numbers"]
        self.held.codes.restore(state["kept"])
        self._lost = [None if one is None else np.array(one) for one in state["lost"]]
        for own, value, change in zip(self._own, self.held.arrays, ahead, strict=True):
            self._write(own, np.asarray(value + change))


def training(
    own: Sequence[Any],
    steps: Callable[[], object] | None,
    *,
    read: Callable[[Any], Array],
    write: Callable[[Any, Array], None],
) -> Train | None:
    """Return a function for fastps.Validator that runs steps on a framework's tensors."""
    if steps is None:
        return None

    def train(arrays: list[Array]) -> None:
        for tensor, array in zip(own, arrays, strict=True):
            write(tensor, array)
        steps()
        for tensor, array in zip(own, arrays, strict=True):
            array[...] = read(tensor)

    return train
