# SPDX-License-Identifier: Apache-2.0
"""The handles of an elastic session: operations that are started again when members are lost.

Threads: those of the session, which see to it that one at a time starts, commits or settles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from fastps._core import copy_array
from fastps.errors import FastPSError, Status
from fastps.types import DType
from fastps.worker.handle import READY, Array, Handle, OperationHandle

_LONG_BYTES = 8 << 20  # from here on memory is the limit, and np.copyto() takes more of it


def _copy(to: Array, source: Array) -> None:
    """Copy an array into another of the same shape and type."""
    if to.nbytes < _LONG_BYTES or not (to.flags.c_contiguous and source.flags.c_contiguous):
        np.copyto(to, source)
    else:
        copy_array(to.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8))


class HandleHost(Protocol):
    """What a handle asks of its session."""

    @property
    def is_ours(self) -> bool:
        """Whether the session is this process's, not that of which this is a forked child."""

    def settle(self, handles: Sequence[ElasticHandle], timeout_s: float | None) -> None:
        """Wait until the results of operations may be handed out, or their errors raised."""


class Scope:
    """Operations whose results are handed out together: all of them, or none.

    push_pull_async(scope=) puts one in, until close(), which all workers call after they have put
    in the same operations. None may be awaited before. on_close: called then, if no thread is
    about to wait for them.
    """

    def __init__(self, on_close: Callable[[], None] | None = None) -> None:
        self._on_close = on_close
        self.handles: list[ElasticHandle] = []
        self.is_closed = False
        self.reported = 0  # as of ElasticHandle
        self.is_awaited = False  # as of ElasticHandle

    def close(self, *, is_awaited: bool = False) -> None:
        """Say that all operations are in. is_awaited: the calling thread waits for them next."""
        self.is_closed, self.is_awaited = True, is_awaited
        if self._on_close is not None and not is_awaited:
            self._on_close()

    def has_landed(self, view: int) -> bool:
        """Return whether all operations are in, and have landed in a view."""
        return self.is_closed and all(one.has_landed(view) for one in self.handles)


class ElasticHandle(Handle[Array | list[Array]]):
    """The handle of an operation that is started again when members are lost.

    begin: starts it on the tensors at some places, and returns the handle. landings: where
    results land; outputs: where they are handed out. copies: memory for those sources that results
    land on, by place.
    """

    _factor: tuple[float, DType] | None = None
    is_closed = True  # as of Scope

    def __init__(
        self,
        session: HandleHost,
        names: Sequence[str],
        landings: Sequence[Array],
        outputs: Sequence[Array],
        begin: Callable[[Sequence[int]], OperationHandle],
        *,
        is_single: bool,
        scope: Scope | None = None,
        copies: Mapping[int, Array] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._session = session
        self.scope = scope
        self._landings, self._outputs = landings, outputs
        self._copies, self._has_begun = copies or {}, False
        self._is_single = is_single
        self._begin = begin
        self.names = names
        self.entries: Sequence[str] = ()  # of the results, see control/commits.py
        self.reported = 0  # the view in which it was reported that it has landed
        self.is_awaited = False  # a thread waits for it, or is about to, and reports its landing
        self.is_committed = False
        self.error: FastPSError | None = None  # why it cannot be started again
        # what brings results, replaced as a whole; all but the last: of entries committed in
        # earlier views
        self._parts: Sequence[OperationHandle] = ()
        self._begun: Sequence[int] = ()  # places of the last part
        self._left = list(range(len(names)))  # places that are not committed
        self.view = 0

    def start(self, view: int) -> None:
        """Start it in a view, or what is left of it.

        A thread that waits reads the view first, and so never takes the end of what was started
        in the last view for that of this one.
        """
        self.restore_sources()
        self._has_begun = True
        left, parts = list(self._left), self._parts
        if parts:  # of the last one counts what was committed
            kept = [at for at, place in enumerate(self._begun) if place not in left]
            parts = [*parts[:-1], *([parts[-1].of_some(kept)] if kept else [])]
        self._parts, self._begun = [*parts, self._begin(left)], left
        self.view = view

    def copy_sources(self) -> None:
        """Keep what results land on, before it is started for the first time."""
        for place, copy in self._copies.items():
            _copy(copy, self._landings[place])

    def restore_sources(self) -> None:
        """Undo what has landed and is not committed, where nothing lands any more."""
        if self._has_begun:
            for place in self._left:
                if place in self._copies:
                    _copy(self._landings[place], self._copies[place])

    def status(self) -> int | None:
        """Return how it ended: None: it has not, 0: it has landed."""
        last = self._parts[-1]
        return last.wait_status(0.0) if last.poll() else None

    def has_landed(self, view: int) -> bool:
        """Return whether it has landed in a view."""
        return self.view == view and self.status() == Status.OK

    @property
    def unit(self) -> Scope | ElasticHandle:
        """What is committed together: its scope, or itself."""
        return self if self.scope is None else self.scope

    @property
    def mates(self) -> Sequence[ElasticHandle]:
        """The operations of its scope, or itself."""
        return (self,) if self.scope is None else self.scope.handles

    def wait_landed(self, timeout_s: float) -> int | None:
        """Wait until it has ended; return its status, or None in time."""
        return self._parts[-1].wait_status(timeout_s)

    def commit(self, entry: str) -> bool:
        """Take what was committed; return whether that is all of it."""
        self._left = [place for place in self._left if self.entries[place] != entry]
        self.is_committed = not self._left
        return self.is_committed

    @property
    def left_entries(self) -> list[str]:
        """The entries of its results that are not committed."""
        return [self.entries[place] for place in self._left]

    @property
    def left_marks(self) -> list[tuple[int, int]]:
        """The marks on a board of its results that are not committed, as of left_entries."""
        left, tickets = set(self._left), self._parts[-1]._tickets
        return [
            (ticket.tensor.tensor_id, ticket.version)
            for place, ticket in zip(self._begun, tickets, strict=True)
            if place in left
        ]

    def late(self, timeout_s: float) -> FastPSError:
        """Return the error of what has not ended in time."""
        return self._parts[-1].late(timeout_s)

    def explain(self) -> FastPSError:
        """Return the error of what has failed."""
        try:
            self._parts[-1].wait(0.0)
        except FastPSError as error:
            return error
        raise AssertionError("the operation has not failed")

    def scale(self, factor: float, code: DType) -> ElasticHandle:
        """Have results, of a dtype, multiplied by a factor when they are handed out."""
        self._factor = factor, code
        return self

    def hand_out(self) -> None:
        """Let a committed result land where the program has asked for it, if it has not yet."""
        if self.is_committed and not self.has_ended:
            self.wait(0.0)

    def __del__(self) -> None:
        """Hand out what nobody waited for: a later operation may begin with it.

        Not in a forked child, where nobody may ever release the locks.
        """
        with contextlib.suppress(Exception):
            if self._session.is_ours:
                self.hand_out()

    @property
    def has_ended(self) -> bool:
        """Whether its result or error was handed out."""
        return self._state >= READY

    def _is_over(self) -> bool:
        return self.is_committed or self.error is not None

    def _collect(self, timeout_s: float | None) -> None:
        self._session.settle([self], timeout_s)

    def _make(self, found: None) -> Array | list[Array]:
        if self.error is not None:
            raise self.error
        for part in self._parts:
            if self._factor is not None:
                part.scale(*self._factor)
            part.wait(0.0)
        for landing, output in zip(self._landings, self._outputs, strict=True):
            if landing is not output:
                _copy(output, landing)
        return self._outputs[0] if self._is_single else list(self._outputs)
