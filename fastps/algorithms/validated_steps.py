# SPDX-License-Identifier: Apache-2.0
"""A worker's side of training with validators: steps of its own, of which some are accepted.

Every H steps a worker pushes what it has changed, and goes on from what validators have made of
everybody's changes (ZenoPS; Xie, Koyejo and Gupta, 2022). With a probability it sits an exchange
out, or leaves a tensor out of it, and says so; what was left out stays in its own values, and goes
with the next change of that tensor (error reset of CSER; Xie, Zheng, Koyejo, Gupta, Li and Lin,
NeurIPS 2020) or never, as ZenoPS's code has it. After each step own <- (1 - rho) own + rho held
may draw it back to what was held at first. Which rule decides is the validators' affair.

Knows tensors only by _read and _write, which a framework overrides. Threads: all of it runs in the
thread that steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fastps.algorithms.held_parameters import Among, HeldParameters
from fastps.algorithms.local_sgd_base import Terms
from fastps.algorithms.validator import Train
from fastps.contract.compression import Choice
from fastps.session.current import current
from fastps.worker.handle import Array


class ValidatedSteps:
    """Train arrays with steps of one's own, which count as far as validators accept them."""

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
        """Take over what servers hold, validator 0's values; blocks until all members do.

        parameters: C-contiguous arrays of floats by name; written by step(). sync_every: H, steps
        from one exchange to the next. participation: probability with which this worker takes
        part in an exchange, sparsity: with which it leaves an array out of one; drawn by counters
        from seed. error_reset: "kept" sends later what was left out, "literal" never. proximal:
        rho, by how much each step draws back to what was pulled last, 0 to below 1; in ZenoPS of
        asynchronous workers. asynchronous, among, compression, prefix: of HeldParameters, the
        same on all workers and validators. Raises ValueError, and what HeldParameters does.
        """
        if not 0 <= proximal < 1:
            raise ValueError(f"proximal={proximal} is not 0 to below 1")
        self._terms = Terms(sync_every, participation=participation, sparsity=sparsity,
                            error_reset=error_reset, seed=seed)  # fmt: skip
        self.proximal, self.steps, self.exchanges = proximal, 0, 0
        self._own = list(parameters.values())
        self.held = HeldParameters(
            {name: self._read(own) for name, own in parameters.items()},
            asynchronous=asynchronous, among=among, compression=compression, prefix=prefix,
        )  # fmt: skip
        self._lost: list[Array | None] = [None] * len(self._own)  # in own, and never to be sent
        for place in range(len(self._own)):
            self._give_back(place, None)

    # ---- what is a framework's ----

    def _read(self, own: Any) -> Array:
        """Copy a tensor into an array, so wide that small changes of it add up."""
        return np.array(own, np.float32 if own.dtype == np.float16 else own.dtype, order="C")

    def _write(self, own: Any, value: Array) -> None:
        """Write an array over a tensor."""
        own[...] = value

    def _is_narrow(self, own: Any) -> bool:
        """Return whether what is written over a tensor is rounded."""
        return bool(own.dtype == np.float16)

    # ---- for those who try what liars do ----

    def told(self, change: Array, place: int) -> Array:
        """Return what is pushed of a parameter, by its place; override it to try attacks."""
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
        """Draw a tensor back to what was held; what rounding does to it is no step of ours."""
        own, held, lost = self._own[place], self.held.arrays[place], self._lost[place]
        now = self._read(own)
        begun = held if lost is None or self._terms.error_reset == "literal" else held + lost
        value = np.asarray(now + self.proximal * (begun - now))
        self._write(own, value)
        if self._is_narrow(own):
            off = self._read(own)
            off -= value
            self._lost[place] = off if lost is None else np.asarray(lost + off)

    def exchange(self, *, is_whole: bool = False) -> None:
        """Push what has changed, and go on from what validators make of it; blocks.

        Waits for the end of the round, or, asynchronously, until what was pushed is judged.
        is_whole: leave nothing out, as at the end of training. Raises what pull() does.
        """
        held, gives = self.held, self._draw(is_whole=is_whole)
        ahead = self._ahead()
        told = [
            self.told(change if lost is None else np.asarray(change - lost), place)
            if is_given
            else None
            for place, (change, lost, is_given) in enumerate(
                zip(ahead, self._lost, gives, strict=True)
            )
        ]
        held.push(told)
        if held.is_asynchronous:
            held.pull(unjudged=0)
        else:
            held.pull(stamp=held.stamp + 1)
        for place, (change, is_given) in enumerate(zip(ahead, gives, strict=True)):
            self._give_back(place, None if is_given else change)

    def _give_back(self, place: int, change: Array | None) -> None:
        """Copy to the worker what is held, and on top what it has changed and not sent."""
        own, value = self._own[place], self.held.arrays[place]
        self._write(own, value if change is None else np.asarray(value + change))
        self._lost[place] = change if self._terms.error_reset == "literal" else None
        if self._is_narrow(own):  # what rounding did is no step of ours
            kept = None if self._terms.error_reset == "literal" else change
            off = self._read(own)
            off -= value
            self._lost[place] = off if kept is None else np.asarray(off - kept)

    def _ahead(self) -> list[Array]:
        """Return by how much our own values are not those that were held last."""
        found = []
        for own, old in zip(self._own, self.held.arrays, strict=True):
            change = self._read(own)
            change -= old
            found.append(change)
        return found

    def _draw(self, *, is_whole: bool) -> list[bool]:
        """Draw what this worker sends of an exchange."""
        self.exchanges += 1
        n, session = len(self._own), current()
        if is_whole or not self._terms.skips:
            return [True] * n
        lots = self._terms.draw(session.size, 0, self.exchanges, n)
        return [bool(one) for one in lots[session.rank]]

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return what goes with this worker's own values into a checkpoint; each saves its own.

        What servers hold is a validator's to save, its `arrays`: who goes on seeds them with it.
        """
        lost = [None if one is None else one.copy() for one in self._lost]
        return {"numbers": (self.steps, self.exchanges), "ahead": self._ahead(), "lost": lost,
                "kept": self.held.codes.kept()}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(), on top of what servers hold now. ValueError else."""
        ahead = state.get("ahead", ())
        if [one.shape for one in ahead] != [one.shape for one in self.held.arrays]:
            raise ValueError("this is no state of steps that are validated, of this model")
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
    """Make what fastps.Validator calls of steps on a framework's tensors."""
    if steps is None:
        return None

    def train(arrays: list[Array]) -> None:
        for tensor, array in zip(own, arrays, strict=True):
            write(tensor, array)
        steps()
        for tensor, array in zip(own, arrays, strict=True):
            array[...] = read(tensor)

    return train
