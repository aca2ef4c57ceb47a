# SPDX-License-Identifier: Apache-2.0
"""What torch.compile is to call as it is.

Torch calls the methods of a backend from C++, also while a compiled program runs; Dynamo would
then compile them, and fails on objects of torch that they belong to. torch.compiler.disable()
imports Dynamo at the first call, which takes a second or more, so code is marked directly.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

T = TypeVar("T", bound=type)

_frames = torch._C._dynamo.eval_frame


def untraced(kind: T) -> T:
    """Let Dynamo leave a class's own methods alone, with all that they call."""
    if hasattr(_frames, "set_code_exec_strategy"):  # from torch 2.7 on
        skip = _frames._FrameAction.SKIP
        strategy = _frames._FrameExecStrategy(skip, skip)
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                _frames.set_code_exec_strategy(method.__code__, strategy)
    return kind
