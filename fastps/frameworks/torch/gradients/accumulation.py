# SPDX-License-Identifier: Apache-2.0
"""Sums of earlier rounds, kept apart while workers add to the gradients that hold them.

With op=Sum a gradient may hold a sum over all workers when the next backward pass adds to it, and
would be added once per worker if it were sent so. (The average of equal numbers is the number.)
Whatever a user puts in its place counts as this worker's own.
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
    """For the gradients of a list of parameters; holds the autograd nodes that add to them."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}  # as the last round left them
        self._earlier: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()  # gradients that a backward pass is about to add to

    def watch(self, index: int) -> None:
        """Be called before a backward pass adds to a gradient.

        A hook on the parameter would also run for torch.autograd.grad(), which adds nothing.
        """
        node: Any = torch.autograd.graph.get_gradient_edge(self._parameters[index]).node
        node.register_prehook(partial(_call, weakref.ref(self), index))
        self._nodes[index] = node

    def prepare(self, index: int) -> None:
        """Make room for what a backward pass adds to a gradient now."""
        self._seen.add(index)
        self.set_apart(index)

    def check(self, index: int, name: str) -> None:
        """Note that a backward pass has added to a gradient; FastPSError if that was not seen.

        Converting a module, even back and forth, gives its parameters new nodes.
        """
        if index in self._seen:
            self._seen.remove(index)
            return
        self.watch(index)
        result = self._results.pop(index, None)
        if result is not None and result() is self._parameters[index].grad:
            raise FastPSError(
                f"{name!r} was converted, and a sum over all workers cannot be told from what was "
                "added to it since: call zero_grad() after module.to() and its like"
            )

    def set_apart(self, index: int) -> None:
        """Leave in a gradient only what this worker adds, unless it was set apart already."""
        gradient, result = self._parameters[index].grad, self._results.pop(index, None)
        if gradient is None:
            self._earlier.pop(index, None)
        elif result is not None and result() is gradient:
            self._earlier[index] = gradient.detach().clone()
            _plain(gradient).zero_()

    def forget(self) -> None:
        """Let nothing of earlier rounds count any more: the gradients are zeroed."""
        self._earlier.clear()
        self._results.clear()

    def add_back(self) -> None:
        """Complete the gradients of a round, which hold its own sums."""
        for index, earlier in self._earlier.items():
            gradient = self._parameters[index].grad
            if gradient is not None:
                _plain(gradient).add_(earlier)
        self._earlier.clear()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and parameter.grad is not None:
                self._results[index] = weakref.ref(parameter.grad)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return what to write to; a change of a detached sparse tensor stays with that one."""
    if not gradient.is_sparse:
        return gradient.detach()
    return gradient.detach_() if gradient.requires_grad else gradient


@opaque
def _call(sums: weakref.ref[EarlierSums], index: int, _: Any) -> None:
    alive = sums()
    if alive is not None:
        alive.prepare(index)
