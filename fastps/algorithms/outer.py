# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers for NumPy arrays: they make the next agreed values of an average change.

The gradient is the average of agreed minus own values. Arrays are written; state is kept by their
places. Pure.
"""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import numpy as np

from fastps.contract.contract import Gathering, Step
from fastps.native._floats import DefaultFloats

Array: TypeAlias = np.ndarray[Any, Any]


class Outer:
    """Average the models: x <- x - lr g. The base class of the others."""

    def __init__(self, lr: float = 1.0) -> None:
        """Raise ValueError for a rate that is not finite and above 0."""
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr must be finite and > 0, got {lr}")
        self.lr = lr
        self._kept: dict[int, dict[str, Any]] = {}

    def step(self, place: int, agreed: Array, gradient: Array) -> None:
        """Make the next values of the array at a place, in place."""
        with DefaultFloats():
            agreed -= np.asarray(self.lr * self.direction(place, gradient), agreed.dtype)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return the direction of the step, which is multiplied by the rate."""
        return gradient

    def kept(self, place: int, **first: Any) -> dict[str, Any]:
        """Return the state of the array at a place; `first` is its initial state."""
        return self._kept.setdefault(place, first)

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the servers' form of the optimizer; TypeError if they do not support it."""
        if type(self) is Outer:
            return Gathering(deadline_s, Step.PLAIN, self.lr)
        raise TypeError(
            f"servers do not support {type(self).__name__} as outer optimizer: use Outer, "
            "Nesterov or Adam of fastps.outer, or outer_on='workers' without deadline_s"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all arrays, and the rate."""
        return {"lr": self.lr, "kept": copy.deepcopy(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state_dict()."""
        self.lr, self._kept = state["lr"], copy.deepcopy(state["kept"])


class Nesterov(Outer):
    """Nesterov momentum, as in DiLoCo and torch: b <- mu b + g; x <- x - lr (g + mu b)."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """Raise ValueError for a rate not above 0, or a momentum outside [0, 1)."""
        super().__init__(lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be >= 0 and < 1, got {momentum}")
        self.momentum = momentum

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the servers' form of the optimizer."""
        return Gathering(deadline_s, Step.NESTEROV, self.lr, self.momentum)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return the gradient plus the momentum of the next step."""
        kept = self.kept(place, momentum=np.zeros_like(gradient))
        kept["momentum"] = self.momentum * kept["momentum"] + gradient
        return np.asarray(gradient + self.momentum * kept["momentum"])


class Adam(Outer):
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1) on the average change."""

    def __init__(
        self, lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Raise ValueError for betas outside [0, 1), or eps not above 0."""
        super().__init__(lr)
        if not (0 <= min(betas) <= max(betas) < 1 and eps > 0):
            raise ValueError(f"betas must be >= 0 and < 1, and eps > 0, got {betas=} and {eps=}")
        self.betas, self.eps = betas, eps

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the servers' form of the optimizer."""
        return Gathering(deadline_s, Step.ADAM, self.lr, *self.betas, self.eps)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return the mean of gradients over the root mean square, both corrected for bias."""
        zeros = np.zeros_like(gradient)
        kept = self.kept(place, steps=0, mean=zeros, square=zeros)
        first, second = self.betas
        kept["steps"] += 1
        kept["mean"] = first * kept["mean"] + (1 - first) * gradient
        kept["square"] = second * kept["square"] + (1 - second) * gradient * gradient
        mean = kept["mean"] / (1 - first ** kept["steps"])
        square = kept["square"] / (1 - second ** kept["steps"])
        return np.asarray(mean / (np.sqrt(square) + self.eps))
