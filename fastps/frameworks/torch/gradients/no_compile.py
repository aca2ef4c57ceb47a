# SPDX-License-Identifier: Apache-2.0
"""Marks for functions that torch.compile must not trace.

Torch calls the methods of a backend from C++, also while a compiled program runs; Dynamo would
then compile them, and fail on the torch objects they belong to. torch.compiler.disable() imports
Dynamo at its first call, which takes a second or more, so functions are marked directly.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_frames = torch._C._dynamo.eval_frame


def untraced(kind: T) -> T:
    """Exclude a class's own methods, and all that they call, from tracing."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            _skip(method)
    return kind


def opaque(function: F) -> F:
    """Exclude a function from tracing; compiled code breaks its graph and calls it as it is.

    The attributes are for Dynamo where it meets a call. Without _skip() it would still compile the
    function when that runs.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it talks to other workers"  # type: ignore[attr-defined]
    _skip(function)
    return function


def seen_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Make Dynamo trace another function where it meets a call of this one."""

    def mark(function: F) -> F:
        function._torchdynamo_inline = other  # type: ignore[attr-defined]
        _skip(function)
        return function

    return mark


def _skip(function: Any) -> None:
    """Exclude a function's frame, and those of all that it calls, from compilation."""
    if hasattr(_frames, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = _frames._FrameAction.SKIP
        strategy = _frames._FrameExecStrategy(skip, skip)
        _frames.set_code_exec_strategy(function.__code__, strategy)
