# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers of NumPy: what makes the next agreed values of an average change.

Pure: arrays by place, written; a gradient is agreed minus own, averaged. State is kept by place.
"""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import numpy as np

from fastps.contract.contract import Gathering, Step
from fastps.native._floats import DefaultFloats

Array: TypeAlias = np.ndarray[Any, Any]


class Outer:
    """Average the models: x <- x - lr g. The base of the others."""

    def __init__(self, lr: float = 1.0) -> None:
        """Raise ValueError for a rate that is not above 0."""
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr={lr} is not above 0")
        self.lr = lr
        self._kept: dict[int, dict[str, Any]] = {}

    def step(self, place: int, agreed: Array, gradient: Array) -> None:
        """Make the next values of the array at a place, in place."""
        with DefaultFloats():
            agreed -= np.asarray(self.lr * self.direction(place, gradient), agreed.dtype)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return what the rate is multiplied by."""
        return gradient

    def kept(self, place: int, **first: Any) -> dict[str, Any]:
        """Return what is kept of the array at a place, at first so."""
        return self._kept.setdefault(place, first)

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the same for servers; TypeError for an optimizer that they do not have."""
        if type(self) is Outer:
            return Gathering(deadline_s, Step.PLAIN, self.lr)
        raise TypeError(
            f"servers have no {type(self).__name__}: give Outer, Nesterov or Adam of "
            "fastps.outer, or keep the outer optimizer on the workers"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that is kept, and the rate."""
        return {"lr": self.lr, "kept": copy.deepcopy(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state_dict()."""
        self.lr, self._kept = state["lr"], copy.deepcopy(state["kept"])


class Nesterov(Outer):
    """Look ahead with momentum, as DiLoCo: b <- mu b + g; x <- x - lr (g + mu b), as torch's."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """Raise ValueError for what is not above 0, or a momentum of 1 or more."""
        super().__init__(lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is not 0 to below 1")
        self.momentum = momentum

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the same for servers."""
        return Gathering(deadline_s, Step.NESTEROV, self.lr, self.momentum)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return the gradient with momentum, looked ahead."""
        kept = self.kept(place, momentum=np.zeros_like(gradient))
        kept["momentum"] = self.momentum * kept["momentum"] + gradient
        return np.asarray(gradient + self.momentum * kept["momentum"])


class Adam(Outer):
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1) on the average change."""

    def __init__(
        self, lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Raise ValueError for betas that are not 0 to below 1, or eps that is not above 0."""
        super().__init__(lr)
        if not (0 <= min(betas) <= max(betas) < 1 and eps > 0):
            raise ValueError(f"betas={betas} are 0 to below 1, and eps={eps} above 0")
        self.betas, self.eps = betas, eps

    def gathering(self, deadline_s: float = 0.0) -> Gathering:
        """Return the same for servers."""
        return Gathering(deadline_s, Step.ADAM, self.lr, *self.betas, self.eps)

    def direction(self, place: int, gradient: Array) -> Array:
        """Return the mean of gradients over the root of that of their squares, without bias."""
        zeros = np.zeros_like(gradient)
        kept = self.kept(place, steps=0, mean=zeros, square=zeros)
        first, second = self.betas
        kept["steps"] += 1
        kept["mean"] = first * kept["mean"] + (1 - first) * gradient
        kept["square"] = second * kept["square"] + (1 - second) * gradient * gradient
        mean = kept["mean"] / (1 - first ** kept["steps"])
        square = kept["square"] / (1 - second ** kept["steps"])
        return np.asarray(mean / (np.sqrt(square) + self.eps))
