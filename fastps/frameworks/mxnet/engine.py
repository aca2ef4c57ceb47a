# SPDX-License-Identifier: Apache-2.0
"""Operations of fastps in MXNet's own engine: they never block it, and keep its order.

MXNet calls `start` in one of its threads when all operations pushed earlier on the arrays are
done. Operations pushed later on them wait until `finish` has returned in a thread of ours: MXNet
has few threads, so none of them waits. An exception of either function becomes an error of MXNet,
raised where the program waits for one of the arrays. Invariant: every operation is completed
exactly once.

MXNet passes the C++ objects of version 1.9 (include/mxnet/engine.h): a completion is three
pointers, to be copied, and an error is a std::runtime_error. Threads: push() in any.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.ndarray.ndarray import DLManagedTensor

from fastps.session import current
from fastps.worker.handle import Array

_log = logging.getLogger(__name__)

_PRIORITIZED = 3  # FnProperty::kCPUPrioritized: threads beside those that compute
_CPU = 1  # Context: type and number of the device
_CPUS = ("cpu", "cpu_pinned", "cpu_shared")
_LABEL = b"fastps"  # of our operations in MXNet's profiler
_ERROR_BYTES = 64  # more than a std::runtime_error has

_failing = threading.Lock()  # MXNet appends errors to a vector without a lock

_Start = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_Complete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _Completion(ctypes.Structure):
    """MXNet's CallbackOnComplete."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("engine", ctypes.c_void_p),
        ("operation", ctypes.c_void_p),
    )

    def complete(self, error: BaseException | None = None) -> None:
        """Report to MXNet that the operation is done, or its error."""
        done = _Complete(self.call)
        if error is None:
            done(self.engine, self.operation, None)
            return
        library = ctypes.CDLL("libstdc++.so.6")
        made = ctypes.create_string_buffer(_ERROR_BYTES)
        text = f"{type(error).__name__}: {error}".encode()
        library._ZNSt13runtime_errorC1EPKc(made, text)
        with _failing:
            done(self.engine, self.operation, made)  # MXNet copies it
        library._ZNSt13runtime_errorD1Ev(made)


class _Operation(NamedTuple):
    """Functions that were pushed, and the arrays that live until they are done."""

    start: Callable[[], object]
    finish: Callable[[], object]
    arrays: Sequence[Any]


class Engine:
    """Our access to MXNet's engine, and the thread that waits for the operations started there."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pushed: dict[int, _Operation] = {}
        self._started: queue.SimpleQueue[tuple[_Operation, _Completion]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiter: threading.Thread | None = None
        self._is_naive = mx.util.getenv("MXNET_ENGINE_TYPE") == "NaiveEngine"
        self._entry = _Start(self._enter)

    def push(
        self,
        start: Callable[[], object],
        finish: Callable[[], object],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any],
        priority: int = 0,
    ) -> None:
        """Let start() and then finish() be called when the arrays are free; return at once.

        reads, writes: NDArrays, none of them twice. finish() may block; it is called in the order
        of starts, unless start() has failed. After an error of an earlier operation on an array
        MXNet calls neither.
        """
        with self._lock:
            if self._waiter is None:
                self._waiter = threading.Thread(
                    target=self._wait_always, name="fastps-mxnet", daemon=True
                )
                self._waiter.start()
                current.wait_before_leaving(self.wait_idle)
        number = next(self._numbers)
        self._pushed[number] = _Operation(start, finish, (reads, writes))
        device, kind = (ctypes.c_int * 2)(_CPU, 0), ctypes.c_int(_PRIORITIZED)
        check_call(
            _LIB.MXEnginePushAsyncND(
                self._entry, ctypes.c_void_p(number), None, device,
                _handles(reads), len(reads), _handles(writes), len(writes),
                ctypes.byref(kind), priority, _LABEL, False,
            )
        )  # fmt: skip

    def wait_idle(self) -> None:
        """Wait for all operations that were pushed; their errors are raised elsewhere."""
        if self._waiter is None:
            return
        try:
            mx.nd.waitall()
        except MXNetError as error:
            _log.debug("an operation pushed to MXNet failed earlier: %s", error)

    def _enter(self, _: int, completion: int, number: int) -> None:
        """Start an operation, in a thread of MXNet's; no exception may leave this function."""
        operation = self._pushed.pop(number)
        done = _Completion.from_buffer_copy(_Completion.from_address(completion))
        try:
            operation.start()
        except BaseException as error:
            done.complete(error)
            return
        if self._is_naive:  # the operation must be done when this returns
            _finish(operation, done)
        else:
            self._started.put((operation, done))

    def _wait_always(self) -> None:
        while True:
            _finish(*self._started.get())


def _finish(operation: _Operation, done: _Completion) -> None:
    """Wait for an operation, and report its end to MXNet."""
    try:
        operation.finish()
    except BaseException as error:
        done.complete(error)
    else:
        done.complete()


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[array.handle for array in arrays])


def check_array(array: Any) -> None:
    """Raise TypeError unless an array is a dense NDArray in the memory of a CPU."""
    if not hasattr(array, "stype"):
        raise TypeError(
            f"fastps.mxnet takes NDArrays, not {type(array).__name__}: convert it by mx.nd.array()"
        )
    if array.stype != "default" or array.context.device_type not in _CPUS:
        raise TypeError(
            f"fastps.mxnet takes dense arrays on a CPU, not {array.stype} ones on "
            f"{array.context}: use tostype('default') or as_in_context(mx.cpu())"
        )


def memory_of(array: Any) -> Array:
    """Return an array over an NDArray's memory, which it keeps alive.

    Call it when all operations pushed on the NDArray are done: until then MXNet may allocate the
    memory in another thread. DLPack raises an error of MXNet's for a layout of MKLDNN's, for which
    MXNDArrayGetData() would wait, forever if start() calls it.
    """
    kind, shape, count = np.dtype(array.dtype), array.shape, array.size
    if not count:
        return np.empty(shape, kind)
    exported = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayToDLPack(array.handle, ctypes.byref(exported)))
    address = DLManagedTensor.from_address(exported.value).dl_tensor.data
    check_call(_LIB.MXNDArrayCallDLPackDeleter(exported))
    memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    memory.holds = array  # as long as an array is over it
    return np.frombuffer(memory, kind, count).reshape(shape)


def array_over(memory: Array) -> Any:
    """Return an NDArray over an array's memory, which it keeps alive."""
    return mx.nd.from_numpy(memory.view())


engine = Engine()
