# SPDX-License-Identifier: Apache-2.0
"""Calls of Python from a tf.function: by an operation of ours, or by tf.numpy_function().

The operation is registered with the TensorFlow that is loaded, through its C interface, at the
first use; is_native() returns whether that worked. Functions see bfloat16 as uint16. Knows nothing
of the functions that are called.

A function that may wait for other workers runs in a thread of ours, one for each call in flight.
TensorFlow runs operations of a session in any order: calls that wait would fill its threads, and
the operations that other workers wait for could not begin.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

from fastps.errors import MismatchError
from fastps.frameworks.array_exchange import Arrays, Calls, wire_view
from fastps.frameworks.tensorflow import _ops
from fastps.session.array_checks import refuse_masked
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array

OPERATION = "FastpsCall"
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
LIBRARY = "libtensorflow_framework.so.2"
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """Description of one output of an operation."""

    kind: Any  # a tf.DType
    shape: tuple[int, ...] | None  # None: the function decides it
    is_slot: bool = False  # the function sets a slot for it


Run = Callable[[Arrays, _ops.Outputs], None]


def tensor_of(value: Any) -> Any:
    """Return a value as a tensor; TypeError for a masked array, whose mask would be lost."""
    refuse_masked(value, "the tensor")
    return tf.convert_to_tensor(value)


def dtype_code(tensor: Any) -> DType:
    """Return the wire code of a tensor's dtype; TypeError if it is not supported."""
    return dtype_of(np.dtype(tensor.dtype.as_numpy_dtype))


class FailedPreconditionError(MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A MismatchError outside of graphs that is TensorFlow's error too, as Horovod's is."""

    def __init__(self, message: str) -> None:
        """Take the text."""
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class _Threads:
    """Threads that run calls at once, an idle thread or a new one; they end with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait, less those for which a call is queued

    def defer(self, call: Callable[[], object]) -> None:
        """Run a call in another thread; RuntimeError if none can be started."""
        with self._lock:
            is_new = not self._idle
            if not is_new:
                self._idle -= 1
        if is_new:
            threading.Thread(target=self._run, name="fastps-tensorflow", daemon=True).start()
        self._calls.put(call)

    def _run(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                self._idle += 1


_calls = Calls()
# By number: whether the function may wait for other workers, and (TensorFlow's type, shape,
# is_slot) of each output.
_results: dict[int, tuple[bool, list[tuple[int, tuple[int, ...] | None, bool]]]] = {}
_threads = _Threads()


@functools.cache
def is_native() -> bool:
    """Return whether TensorFlow has our operation; the first call registers it."""
    try:
        path = os.path.join(tf.sysconfig.get_lib(), LIBRARY)
        library = ctypes.CDLL(path)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _ops.FUNCTIONS]
        addresses = [each.value or 0 for each in found]
        _ops.register(addresses, _calls.functions, _results, _threads.defer)
        tf.no_gradient(OPERATION)  # tf.custom_gradient() defines gradients around it
    except (OSError, AttributeError, RuntimeError) as error:
        _log.info(
            "cannot register an operation with TensorFlow; calls go through tf.numpy_function(), "
            "which is slower: %s", error,
        )  # fmt: skip
        return False
    return True


def call_native(
    key: Hashable,
    run: Run,
    tensors: Sequence[Any],
    results: Sequence[Result],
    *,
    may_wait: bool = False,
) -> list[Any]:
    """Add a call of a function to the graph that is traced, and return its results.

    run: f(inputs, outputs) writes the outputs that TensorFlow has allocated, and sets slots or
    arrays for the others. key: the same key must mean the same function and results. may_wait:
    for other workers.
    """
    number = _calls.number_of(key, lambda: run)
    described = [(one.kind.as_datatype_enum, one.shape, one.is_slot) for one in results]
    _results.setdefault(number, (may_wait, described))
    listed = op_def_library.apply_op(
        OPERATION, inputs=list(tensors), number=number, Tout=[one.kind for one in results]
    )
    for one, result in zip(listed, results, strict=True):
        one.set_shape(result.shape)
    return list(listed)


def call(
    key: Hashable,
    run: Callable[..., Any],
    tensors: Sequence[Any],
    kinds: Sequence[Any],
    shapes: Sequence[Any],
) -> list[Any]:
    """Add a call of a function on arrays to the graph, or call it now; return its results.

    run: takes C-contiguous arrays, and returns one array or a list of arrays of these kinds; it
    may wait for other workers. shapes: of the results, as far as known. key: the same key and
    kinds must mean the same function.
    """
    if tf.executing_eagerly():
        try:
            found = run(*map(_host, tensors))
        except MismatchError as error:
            raise FailedPreconditionError(str(error)) from error
        return list(map(tf.convert_to_tensor, _typed(found, kinds)))
    if is_native():
        results = [Result(kind, None) for kind in kinds]
        listed = call_native(
            (key, tuple(kinds)), partial(_run_native, run), tensors, results, may_wait=True
        )
    else:

        def run_numpy(*arrays: Array) -> list[Array]:
            return _typed(run(*[wire_view(np.asarray(one, order="C")) for one in arrays]), kinds)

        listed = _listed(tf.numpy_function(run_numpy, list(tensors), list(kinds)))
    for one, shape in zip(listed, shapes, strict=True):
        one.set_shape(shape)
    return listed


class _Held:
    """Memory of one of a call's tensors, which live as long as an array over it."""

    def __init__(self, tensors: Arrays, place: int) -> None:
        self.__array_interface__ = tensors[place].__array_interface__
        self._tensors = tensors


def _run_native(run: Callable[..., Any], inputs: Arrays, outputs: _ops.Outputs) -> None:
    """Call a function on the arrays of an operation."""
    found = run(*[np.asarray(_Held(inputs, place)) for place in range(len(inputs))])
    for place, one in enumerate(_listed(found)):
        outputs.copy_array(place, one)


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _typed(found: Any, kinds: Sequence[Any]) -> list[Array]:
    """Return the results of a function as arrays of TensorFlow's dtypes."""
    pairs = zip(_listed(found), kinds, strict=True)
    return [one.view(_BFLOAT16) if kind == tf.bfloat16 else one for one, kind in pairs]


def _host(tensor: Any) -> Array:
    """Return an eager tensor's memory; bfloat16 has no buffer in Python, and is copied."""
    is_half = tensor.dtype == tf.bfloat16
    return wire_view(np.asarray(tensor.numpy() if is_half else memoryview(tensor), order="C"))
