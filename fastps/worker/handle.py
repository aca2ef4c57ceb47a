# SPDX-License-Identifier: Apache-2.0
"""Handles: what start gives and synchronize takes.

A handle keeps its arrays alive and turns the status of a finished operation into an exception
that names tensor, peer and cure. Whoever waits does so without the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from fastps.errors import FastPSError
from fastps.types import checked_seconds

Array: TypeAlias = np.ndarray[Any, Any]


class _Flight(Protocol):
    """What is in flight: the operation on one tensor, or one of a group."""

    @property
    def name(self) -> str: ...
    @property
    def is_done(self) -> bool: ...
    def wait(self, *, timeout_s: float, spin_us: int) -> int | None: ...


# of what is in flight: the operation, its status (None: not done) and the time that was waited
Explain: TypeAlias = Callable[[Any, int, int | None, float], FastPSError]


class Handle:
    """The promise of one operation on one or several tensors."""

    __slots__ = (
        "_after",
        "_explain",
        "_is_single",
        "_operation",
        "_outputs",
        "_seconds",
        "_spin_us",
        "_tensors",
        "_timeout_s",
    )

    def __init__(
        self,
        tensors: Sequence[_Flight],
        outputs: Sequence[Array],
        *,
        is_single: bool,
        operation: int,
        explain: Explain,
        timeout_s: float,
        seconds: list[float],
        spin_us: int,
    ) -> None:
        self._tensors = tensors
        self._outputs = outputs
        self._is_single = is_single
        self._operation = operation  # for `explain`
        self._explain = explain
        self._timeout_s = timeout_s
        self._spin_us = spin_us
        self._seconds = seconds  # [time spent waiting]; the session's, shared by its handles
        self._after: Callable[[Sequence[Array]], None] | None = None

    def then(self, after: Callable[[Sequence[Array]], None]) -> Self:
        """Have the outputs given to a function, whenever somebody has waited for them."""
        self._after = after
        return self

    def poll(self) -> bool:
        """Tell whether wait() would return at once. Never blocks."""
        return all(tensor.is_done for tensor in self._tensors)

    def wait(self, timeout_s: float | None = None) -> Array | list[Array]:
        """Wait for the operation and give its output, or a list of them for a sequence.

        Blocks without the GIL up to timeout_s seconds (default: op_timeout_s). Raises what made
        the operation fail: PeerLostError, MismatchError, ShutdownError; StallError in time, and
        then the operation is still in flight and its arrays must not be touched; ValueError for
        what is no time to wait. May be called again.
        """
        timeout_s = self._timeout_s if timeout_s is None else checked_seconds(timeout_s)
        began = time.perf_counter()
        try:
            self._wait_all(began + timeout_s, timeout_s)
        finally:
            self._seconds[0] += time.perf_counter() - began
        if self._after is not None:
            self._after(self._outputs)
        return self._outputs[0] if self._is_single else list(self._outputs)

    def _wait_all(self, deadline: float, timeout_s: float) -> None:
        """Wait for every tensor, also after a failure, so that all arrays are free again."""
        failed: tuple[_Flight, int, int] | None = None
        for tensor in self._tensors:
            status = tensor.wait(
                timeout_s=max(deadline - time.perf_counter(), 0.0), spin_us=self._spin_us
            )
            if status is None:
                raise self._explain(tensor, self._operation, None, timeout_s)
            if status and failed is None:
                failed = (tensor, self._operation, status)
        if failed is not None:
            raise self._explain(*failed, timeout_s)
