# SPDX-License-Identifier: Apache-2.0
"""Work and Future of an operation, for torch.

Knows handles and tensors, no operation. A Work waits for its handles in the calling thread. A
Future is completed by a thread that waits for the same handles and then runs the callbacks. Since
callbacks may wait for other operations, each Future in flight has a thread of its own, which is
kept for the next one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import distributed as dist

from fastps.errors import StallError
from fastps.frameworks.torch.gradients.no_compile import untraced
from fastps.frameworks.torch.ops.tensors import mark_written
from fastps.worker.handle import Handle

Future: TypeAlias = "torch.futures.Future[Any]"

_IDLE_S = 10.0  # a thread without work ends after this time
_DEFAULT = timedelta(0)  # passed by C++ for the group's timeout
# Before 2.7 torch's C++ keeps only the C++ part of a Work made in Python, whose wait() never
# returns. So the Python part is kept here until wait() or get_future() is called.
_MUST_KEEP = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
_KEPT: set[Work] = set()


class Operation:
    """The handles of one operation, and a function that runs once when all are complete.

    written: the tensors that the operation writes; their versions are incremented here.
    """

    def __init__(
        self,
        handles: Sequence[Handle[Any]],
        finish: Callable[[], object] | None = None,
        written: Sequence[torch.Tensor] = (),
    ) -> None:
        self.handles = handles
        self.finish = finish  # None once it has run
        self._written = written  # empty once the operation is complete
        mark_written(*written)
        self.error: Exception | None = None  # of an operation that has ended
        self._lock = threading.Lock()

    def poll(self) -> bool:
        """Return whether complete() would return at once."""
        return all(handle.poll() for handle in self.handles)

    def complete(self, timeout_s: float) -> None:
        """Wait for the handles, then run `finish`; from any thread.

        Raises the operation's error; StallError after timeout_s seconds, while it is still in
        flight.
        """
        if self.error is not None:
            raise self.error
        deadline = time.monotonic() + timeout_s
        for handle in self.handles:
            try:
                _wait(handle, max(deadline - time.monotonic(), 0.0))
            except Exception as error:
                if handle.has_failed and self.poll():
                    self.error = error
                raise
        with self._lock:
            if self.error is not None:  # another thread's finish() failed
                raise self.error
            finish, self.finish = self.finish, None
            written, self._written = self._written, ()
            try:
                if finish is not None:
                    finish()
                mark_written(*written)
            except Exception as error:
                self.error = error
                raise


def _wait(handle: Handle[Any], timeout_s: float) -> None:
    """Wait for a handle; a StallError names the process group's timeout."""
    try:
        handle.wait(timeout_s)
    except StallError as error:
        cure = "the timeout of its process group"
        raise StallError(str(error).replace("FASTPS_OP_TIMEOUT_S", cure)) from None


class Completer:
    """Threads that wait for operations, one for each operation in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], object]]] = []

    def future(self, operation: Operation, timeout_s: float, result: Callable[[], Any]) -> Future:
        """Return a Future of an operation's result; complete if the operation has ended."""

        def take(_: Future) -> Any:
            operation.complete(timeout_s)
            return result()

        start: Future = torch.futures.Future()
        # not set_exception(), which would hide an error from C++, which then crashes
        future = start.then(take)
        if operation.poll():
            start.set_result(None)
        else:
            self.run(lambda: start.set_result(None))
        return future

    def run(self, job: Callable[[], object]) -> None:
        """Run the job in a thread of its own."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="fastps:future", daemon=True
            ).start()
        inbox.put(job)

    def _work(self, inbox: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            try:
                inbox.get(timeout=_IDLE_S)()
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:  # else a job is on its way
                        self._idle.remove(inbox)
                        return
            else:
                with self._lock:
                    self._idle.append(inbox)


@untraced
class Work(dist.Work):
    """An operation for torch."""

    def __init__(
        self, operation: Operation, tensors: Any, completer: Completer, timeout_s: float
    ) -> None:
        """Wrap an operation; tensors: of its results, the value of its Future."""
        super().__init__()
        self.operation = operation
        self.tensors = tensors
        self._completer = completer
        self._timeout_s = timeout_s
        self._future: Future | None = None
        if _MUST_KEEP:
            _KEPT.add(self)

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Wait until the results are in their tensors; raises the operation's error."""
        _KEPT.discard(self)
        self.operation.complete(timeout.total_seconds() or self._timeout_s)
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Return whether the operation has ended; then the results are in their tensors."""
        if not self.operation.poll():
            return False
        _KEPT.discard(self)
        with contextlib.suppress(Exception):
            self.operation.complete(self._timeout_s)
        return True

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self.operation.error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed."""
        self.is_completed()
        return self.operation.error

    def result(self) -> Any:
        """Return the tensors with the results."""
        return self.tensors

    def source_rank(self) -> int:
        """Return the rank that a receive from any source received from."""
        return int(self.operation.handles[0].source)

    _source_rank = source_rank

    def get_future(self) -> Future:
        """Return a Future of the results; its callbacks may block and start operations."""
        _KEPT.discard(self)
        if self._future is None:
            tensors = self.tensors
            self._future = self._completer.future(self.operation, self._timeout_s, lambda: tensors)
        return self._future

    def __del__(self) -> None:
        """Write the results of an operation that nobody has waited for."""
        operation = self.operation
        if self._future is None and operation.finish is not None and operation.error is None:
            self._completer.future(operation, self._timeout_s, list)
