# SPDX-License-Identifier: Apache-2.0
"""Handles: what an _async form returns and synchronize() takes.

There is one kind, `Handle`, of operations (`OperationHandle`), or of other handles, by a function
of their results (`MappedHandle`). It keeps its arrays alive and turns the status of a finished
operation into an exception that names tensor, peer and cure. It is PENDING until a thread that
waits sees that all operations are over; that thread makes the result once (FINISHING), and keeps
it (READY) or its error (FAILED), which every wait() from then on returns or raises. A wait that
times out, or is interrupted, leaves it PENDING; poll() only looks. Results are multiplied here,
once: by the caller's factor, and an average by what it lacks where workers had run out of data
(session/join.py knows that). Threads: any; they wait without the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np

from fastps.errors import FastPSError
from fastps.native._floats import DefaultFloats
from fastps.types import DType, checked_seconds

Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

PENDING: Final = 0
FINISHING: Final = 1
READY: Final = 2
FAILED: Final = 3

_make_lock = threading.Lock


class Ticket(Protocol):
    """One operation in flight, or over: on a tensor, or one of a group."""

    @property
    def name(self) -> str:
        """Name of the tensor, or of the operation."""

    @property
    def is_done(self) -> bool:
        """Return whether it is over; never waits."""

    def wait(self, *, timeout_s: float, spin_us: int) -> int | None:
        """Wait for its end; return its status, or None in time."""


class Waitable(Protocol):
    """What is under way: a handle, whatever made it."""

    def poll(self) -> bool:
        """Return whether wait() would return at once."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end, and return the result."""


# Words the error of a ticket: which operation it is of, its status (None: it has not ended) and
# the seconds that were waited
Explain: TypeAlias = Callable[[Any, int, int | None, float], FastPSError]

# Of a ticket that is over: what its result lacks, as a factor, and its dtype if it lacks anything
Lack: TypeAlias = Callable[[Any], tuple[float, DType | None]]


class Handle(Generic[T]):
    """The result of what is in flight: made once, when all that it is made of is over.

    operations: those among members of a process set that it consists of, if of nothing else.
    """

    # what few handles change is the class's, for making one is a part of every operation
    _state = PENDING
    _outcome: Any = None
    _after: tuple[Callable[[T], object], ...] = ()
    _lock: threading.Lock  # held while the result is made; each subclass makes it
    operations: Sequence[Any] = ()

    def then(self, after: Callable[[T], object]) -> Self:
        """Have a function called with the result, once, by the thread that makes it."""
        self._after = (*self._after, after)
        return self

    def poll(self) -> bool:
        """Return whether wait() would return at once. Never blocks."""
        return self._state != PENDING or self._is_over()

    @property
    def has_failed(self) -> bool:
        """Whether every wait() raises the same error from now on; a timeout does not count."""
        return self._state == FAILED

    @property
    def source(self) -> int:
        """Place in its set of the member that a receive got its message from, once it is done."""
        if not self.operations:
            raise AttributeError("only the handle of a receive has a source", name="source")
        operation = self.operations[0]
        return int(operation.group.ranks.index(operation.met))

    @property
    def missed(self) -> list[int]:
        """Places of lost members whose messages were left out, once it is done."""
        return [
            operation.group.ranks.index(rank)
            for operation in self.operations
            for rank in operation.missed
        ]

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the operations and return their result: an array, or a list for a sequence.

        Blocks without the GIL up to timeout_s seconds (default: op_timeout_s), for each of the
        operations that it is made of. Raises what made one fail: PeerLostError, MismatchError,
        ShutdownError; StallError in time, and then the operation is still in flight and its
        arrays must not be touched; ValueError for a timeout that is not 0 or more seconds. May be
        called again, and by several threads at once.
        """
        if timeout_s is not None:
            checked_seconds(timeout_s)
        if self._state < READY:
            found = self._collect(timeout_s)
            with self._lock:
                if self._state == PENDING:  # else another thread was here
                    self._settle(found)
        if self._state == READY:
            return self._outcome  # type: ignore[no-any-return]
        try:
            raise self._outcome
        finally:
            del self  # whose error's traceback it would be in

    def _settle(self, found: Any) -> None:
        self._state = FINISHING
        try:
            self._outcome = self._make(found)
            for after in self._after:
                after(self._outcome)
            self._state = READY
        except BaseException as error:  # half of it may be made: never again
            self._outcome = error
            self._state = FAILED
        self._after = ()

    def _is_over(self) -> bool:
        """Return whether all operations are over."""
        raise NotImplementedError

    def _collect(self, timeout_s: float | None) -> Any:
        """Wait for the operations, and return what the result is made of; raises in time."""
        raise NotImplementedError

    def _make(self, found: Any) -> T:
        """Make the result; raises what made the operations fail. Does not wait."""
        raise NotImplementedError


class MappedHandle(Handle[T]):
    """The handle of a result that a function makes of those of several handles."""

    def __init__(
        self,
        handles: Sequence[Waitable],
        finish: Callable[[list[Any]], T],
        *,
        operations: Sequence[Any] = (),
    ) -> None:
        self._lock = _make_lock()
        self._handles = handles
        self._finish = finish
        if operations:
            self.operations = operations

    def _is_over(self) -> bool:
        return all(handle.poll() for handle in self._handles)

    def _collect(self, timeout_s: float | None) -> list[Any]:
        return [handle.wait(timeout_s) for handle in self._handles]

    def _make(self, found: list[Any]) -> T:
        return self._finish(found)


def completed(result: T, *operations: Any) -> MappedHandle[T]:
    """Return the handle of a result that is there; operations: that brought it."""
    return MappedHandle((), lambda _: result, operations=operations)


class Waiting(NamedTuple):
    """What the handles of a session have in common, or those of its groups."""

    explain: Explain
    timeout_s: float
    spin_us: int
    seconds: list[float]  # [time spent waiting], of the session
    lack: Lack | None  # of averages: they are over those who took part

    def wait(self, ticket: Ticket, seconds: float) -> int | None:
        """Wait for a ticket, and count the time; return its status, None after these seconds."""
        began = time.perf_counter()
        status = ticket.wait(timeout_s=seconds, spin_us=self.spin_us)
        self.seconds[0] += time.perf_counter() - began
        return status


class OperationHandle(Handle[Array | list[Array]]):
    """The handle of one operation on one or several tensors.

    tickets: of each tensor. outputs: where the results land; is_single: the first is the result,
    else a list of them. operation: which one, for waiting.explain.
    """

    _factor = 1.0
    _code: DType | None = None

    def __init__(
        self,
        tickets: Sequence[Any],
        outputs: Sequence[Any],
        waiting: Waiting,
        *,
        is_single: bool,
        is_average: bool = False,
        operation: int = 0,
    ) -> None:
        self._lock = _make_lock()
        self._tickets = tickets
        self._outputs = outputs
        self._waiting = waiting
        self._is_single = is_single
        self._lack = waiting.lack if is_average else None
        self._operation = operation

    def scale(self, factor: float, code: DType) -> Self:
        """Have results, of a dtype, multiplied by a factor when they are there."""
        if factor != 1.0:
            self._factor, self._code = factor, code
            self.operations = ()  # which are not all of it
        return self

    def _multiply(self) -> None:
        """Multiply each result once: half types round, and integers are cut."""
        for place, array in enumerate(self._outputs):
            factor, code = self._factor, self._code
            if self._lack is not None and self._tickets:  # a group of one has none
                lack, known = self._lack(self._tickets[place])
                factor, code = factor * lack, known if code is None else code
            if factor != 1.0 and code is not None:
                scale(array, code, factor)

    def of_some(self, places: Sequence[int]) -> OperationHandle:
        """Return the handle of some of its tensors, by place."""
        part = OperationHandle(
            [self._tickets[place] for place in places], [self._outputs[place] for place in places],
            self._waiting, is_single=False, operation=self._operation,
        )  # fmt: skip
        part._lack = self._lack
        return part

    def wait_status(self, timeout_s: float) -> int | None:
        """Wait for the end; return the first status that is none of success, 0, or None in time.

        Makes no result and no error.
        """
        deadline = time.perf_counter() + timeout_s
        first = 0
        for ticket in self._tickets:
            left_s = max(deadline - time.perf_counter(), 0.0)
            status = ticket.wait(timeout_s=left_s, spin_us=self._waiting.spin_us)
            if status is None:
                return None
            first = first or status
        return first

    def late(self, timeout_s: float) -> FastPSError:
        """Return the error of what has not ended in time."""
        late = next((one for one in self._tickets if not one.is_done), self._tickets[-1])
        return self._waiting.explain(late, self._operation, None, timeout_s)

    def _is_over(self) -> bool:
        return all(ticket.is_done for ticket in self._tickets)

    def _collect(self, timeout_s: float | None) -> FastPSError | None:
        """Wait for every tensor, also after a failure, so that all arrays are free again.

        Returns what made the first one fail.
        """
        waiting = self._waiting
        limit_s = waiting.timeout_s if timeout_s is None else timeout_s
        began = time.perf_counter()
        deadline = began + limit_s
        failed = None
        try:
            for ticket in self._tickets:
                status = ticket.wait(
                    timeout_s=max(deadline - time.perf_counter(), 0.0), spin_us=waiting.spin_us
                )
                if status is None:
                    raise waiting.explain(ticket, self._operation, None, limit_s)
                if status and failed is None:
                    failed = ticket, status
        finally:
            waiting.seconds[0] += time.perf_counter() - began
        if failed is None:
            return None
        ticket, status = failed
        return waiting.explain(ticket, self._operation, status, limit_s)

    def _make(self, error: FastPSError | None) -> Array | list[Array]:
        if error is not None:
            raise error
        if self._lack is not None or self._code is not None:
            self._multiply()
        return self._outputs[0] if self._is_single else list(self._outputs)


def scale(array: Array, code: DType, factor: float) -> None:
    """Multiply an array in place: half types in float32, integers in float64 and cut.

    bfloat16 as uint16, or as ml_dtypes has it. On this thread, in the floating-point state of the
    kernels: frameworks have threads that flush subnormal numbers to zero, and not on all workers
    alike.
    """
    with DefaultFloats():
        if code is DType.BFLOAT16 and array.dtype == np.uint16:
            _scale_bfloat16(array, factor)
        elif code in (DType.FLOAT16, DType.BFLOAT16):
            array[...] = array.astype(np.float32) * np.float32(factor)
        elif array.dtype.kind in "fc":
            np.multiply(array, factor, out=array)
        else:
            array[...] = (array * np.float64(factor)).astype(array.dtype)


def _scale_bfloat16(array: Array, factor: float) -> None:
    wide = (array.astype(np.uint32) << np.uint32(16)).view(np.float32) * np.float32(factor)
    bits = wide.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)  # ties go to even
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    array[...] = np.where(np.isnan(wide), np.uint32(0x7FC0), rounded)
