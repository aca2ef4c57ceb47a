# SPDX-License-Identifier: Apache-2.0
"""Tensors on which nothing is to be started any more, unless it turns out that they stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fastps.errors import FastPSError

if TYPE_CHECKING:
    from fastps.worker._tensor import PlannedTensor


@contextlib.contextmanager
def retired(tensors: Iterable[PlannedTensor]) -> Iterator[None]:
    """Let nothing be started on tensors; where FastPSError is raised they go on as before.

    Raises that for one with an operation in flight.
    """
    done: list[PlannedTensor] = []
    try:
        for tensor in tensors:
            tensor.retire()
            done.append(tensor)
        yield
    except FastPSError:
        for tensor in done:
            tensor.reinstate()
        raise
