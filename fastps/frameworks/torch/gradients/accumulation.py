# SPDX-License-Identifier: Apache-2.0
"""Sums of earlier rounds, kept apart while workers add to the gradients that hold them.

With op=Sum a gradient may hold a sum over all workers when the next backward pass adds to it. If
it were sent so, that sum would count once per worker. (Averages need no such care: the average of
equal numbers is the number.) A gradient that a user assigns counts as this worker's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fastps.errors import FastPSError
from fastps.frameworks.torch.gradients.no_compile import opaque


class EarlierSums:
    """The earlier sums of a list of parameters, and the autograd nodes that add to them."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}  # as the last round left them
        self._earlier: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()  # gradients that a backward pass is about to add to

    def watch(self, index: int) -> None:
        """Call prepare() before each backward pass that adds to a gradient.

        A hook on the parameter would also run for torch.autograd.grad(), which adds nothing.
        """
        node: Any = torch.autograd.graph.get_gradient_edge(self._parameters[index]).node
        node.register_prehook(partial(_call, weakref.ref(self), index))
        self._nodes[index] = node

    def prepare(self, index: int) -> None:
        """Set a gradient's sum apart, before a backward pass adds to it."""
        self._seen.add(index)
        self.set_apart(index)

    def check(self, index: int, name: str) -> None:
        """Check that prepare() ran before a backward pass added to a gradient; else FastPSError.

        It did not run if the module was converted, which gives its parameters new nodes.
        """
        if index in self._seen:
            self._seen.remove(index)
            return
        self.watch(index)
        result = self._results.pop(index, None)
        if result is not None and result() is self._parameters[index].grad:
            raise FastPSError(
                f"parameter {name!r} was converted while its gradient held a sum over all "
                "workers, which cannot be separated now: call zero_grad() after module.to() and "
                "the like"
            )

    def set_apart(self, index: int) -> None:
        """Move a sum out of a gradient, so that this adds up only this worker's part."""
        gradient, result = self._parameters[index].grad, self._results.pop(index, None)
        if gradient is None:
            self._earlier.pop(index, None)
        elif result is not None and result() is gradient:
            self._earlier[index] = gradient.detach().clone()
            _plain(gradient).zero_()

    def forget(self) -> None:
        """Forget all sums: the gradients are zeroed."""
        self._earlier.clear()
        self._results.clear()

    def add_back(self) -> None:
        """Add the earlier sums to the gradients of a round."""
        for index, earlier in self._earlier.items():
            gradient = self._parameters[index].grad
            if gradient is not None:
                _plain(gradient).add_(earlier)
        self._earlier.clear()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and parameter.grad is not None:
                self._results[index] = weakref.ref(parameter.grad)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient to write to; changes of a detached sparse tensor would be lost."""
    if not gradient.is_sparse:
        return gradient.detach()
    return gradient.detach_() if gradient.requires_grad else gradient


@opaque
def _call(sums: weakref.ref[EarlierSums], index: int, _: Any) -> None:
    alive = sums()
    if alive is not None:
        alive.prepare(index)
