# SPDX-License-Identifier: Apache-2.0
"""Callbacks at the end of a backward pass, under autograd's engine and compiled autograd.

Autograd's engine has such callbacks. Compiled autograd drops them; but after each of its graphs it
calls the graph's nan_checker, if there is one. An _EndCallback replaces that until the pass is
over. The graph is found through the stack frames that led to a hook, so torch is unchanged in
passes without callbacks. (Counting the expected gradients would not do: Dynamo calls no hook for
gradients that a compiled part does not compute.)

Used by the thread that runs the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd import Variable

from fastps.errors import FastPSError
from fastps.frameworks.torch.gradients.no_compile import opaque

_UNKNOWN = (
    "compiled autograd runs this backward pass, whose end cannot be detected with this version of "
    "torch: no gradient was averaged, so do not step with them. Use torch 2.8 to 2.13, "
    "fastps.torch.DistributedOptimizer without finish_in_backward, or no compiled autograd "
    "(torch.compile(model) alone needs none)"
)


@opaque
def call_at_the_end(function: Callable[[], Any]) -> None:
    """Call a function when the running backward pass is done, unless it fails.

    The function may add another one, which is called after all that were added before.
    FastPSError under compiled autograd of an unknown version of torch.
    """
    if not _is_autograd_compiled():
        Variable._execution_engine.queue_callback(function)
        return
    graph = _graph_that_runs()
    if not hasattr(graph, "nan_checker"):
        raise FastPSError(_UNKNOWN)
    if not isinstance(graph.nan_checker, _EndCallback):
        graph.nan_checker = _EndCallback(graph)
    graph.nan_checker.functions.append(function)


class _EndCallback:
    """Functions to call when a graph has run; replaces its nan_checker."""

    def __init__(self, graph: Any) -> None:
        self.functions: list[Callable[[], Any]] = []
        self._graph, self._before = graph, graph.nan_checker

    @opaque
    def check(self, results: Any) -> None:
        """Call all functions; torch calls this after the whole backward pass."""
        try:
            if self._before is not None:
                self._before.check(results)
            for function in self.functions:  # which may add more
                function()
        finally:
            self._graph.nan_checker = self._before

    def prep_with_inputs(self, inputs: Any) -> None:
        """Restore the nan_checker: a new pass begins, as the one before has failed."""
        self._graph.nan_checker = self._before
        if self._before is not None:
            self._before.prep_with_inputs(inputs)


def _is_autograd_compiled() -> bool:
    """Return whether compiled autograd runs the backward pass; importing it would take long."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    switch = getattr(module, "compiled_autograd_enabled", False)  # of versions without the other
    return bool(getattr(module, "in_compiled_autograd_region", switch))


def _graph_that_runs() -> Any:
    """Find compiled autograd's object of the graph that runs; None if it is not found."""
    frame = sys._getframe()
    while frame.f_code.co_name != "runtime_wrapper":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get("self")
