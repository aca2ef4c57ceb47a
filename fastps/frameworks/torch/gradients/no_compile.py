# SPDX-License-Identifier: Apache-2.0
"""What torch.compile is to call as it is.

Torch calls the methods of a backend from C++, also while a compiled program runs; Dynamo would
then compile them, and fails on objects of torch that they belong to. torch.compiler.disable()
imports Dynamo at the first call, which takes a second or more, so code is marked directly.
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
    """Let Dynamo leave a class's own methods alone, with all that they call."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            _skip(method)
    return kind


def opaque(function: F) -> F:
    """Let what Dynamo compiles call a function as it is, which then sees all done that is before.

    The mark is for Dynamo where it meets a call; without the rest it would compile the function
    when it is called.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it talks to other workers"  # type: ignore[attr-defined]
    _skip(function)
    return function


def seen_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Let Dynamo compile another function where it meets a call of this one."""

    def mark(function: F) -> F:
        function._torchdynamo_inline = other  # type: ignore[attr-defined]
        _skip(function)
        return function

    return mark


def _skip(function: Any) -> None:
    """Let Dynamo leave a function alone when it is called, with all that it calls."""
    if hasattr(_frames, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = _frames._FrameAction.SKIP
        strategy = _frames._FrameExecStrategy(skip, skip)
        _frames.set_code_exec_strategy(function.__code__, strategy)
