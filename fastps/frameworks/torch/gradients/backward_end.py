# SPDX-License-Identifier: Apache-2.0
"""Calls at the end of a backward pass, whoever runs it.

Autograd's engine makes them by itself. Compiled autograd drops what the engine is asked to call;
but when one of its graphs has run, it asks what looks for NaN there, if there is such a thing. An
_Ending stands in that place until the pass is over. The place is found through the frames that
have led to a hook: nothing of torch is changed for passes in which nobody asks. (To count the
gradients that are to come would not do: Dynamo calls no hook where a compiled part makes none.)

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
    "compiled autograd runs this backward pass, and of this version of torch it is not known how "
    "to learn when it ends: no gradient was averaged, take no step with them. Use torch 2.8 to "
    "2.13, fastps.torch.DistributedOptimizer without finish_in_backward, or no compiled autograd "
    "(torch.compile(model) alone needs none)"
)


@opaque
def call_at_the_end(function: Callable[[], Any]) -> None:
    """Have a function called when the backward pass that runs now is done, unless it fails.

    That function may ask for another call, which comes after all that were asked for before.
    FastPSError under compiled autograd, where this torch has it otherwise.
    """
    if not _is_autograd_compiled():
        Variable._execution_engine.queue_callback(function)
        return
    graph = _graph_that_runs()
    if not hasattr(graph, "nan_checker"):
        raise FastPSError(_UNKNOWN)
    if not isinstance(graph.nan_checker, _Ending):
        graph.nan_checker = _Ending(graph)
    graph.nan_checker.functions.append(function)


class _Ending:
    """What is to be called when a graph has run, in place of what looks for NaN then."""

    def __init__(self, graph: Any) -> None:
        self.functions: list[Callable[[], Any]] = []
        self._graph, self._before = graph, graph.nan_checker

    @opaque
    def check(self, results: Any) -> None:
        """Call all, and leave; torch asks for this after the whole backward pass."""
        try:
            if self._before is not None:
                self._before.check(results)
            for function in self.functions:  # they may become more meanwhile
                function()
        finally:
            self._graph.nan_checker = self._before

    def prep_with_inputs(self, inputs: Any) -> None:
        """Leave: a new pass begins, and the one that was asked about has failed."""
        self._graph.nan_checker = self._before
        if self._before is not None:
            self._before.prep_with_inputs(inputs)


def _is_autograd_compiled() -> bool:
    """Return whether compiled autograd runs the backward pass; importing it would take long."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    switch = getattr(module, "compiled_autograd_enabled", False)  # where torch tells no more
    return bool(getattr(module, "in_compiled_autograd_region", switch))


def _graph_that_runs() -> Any:
    """Find what compiled autograd keeps of the graph that runs; None where it is not seen."""
    frame = sys._getframe()
    while frame.f_code.co_name != "runtime_wrapper":
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals.get("self")
