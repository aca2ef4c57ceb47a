# SPDX-License-Identifier: Apache-2.0
"""How a tf.function calls Python: by an operation of ours, or by tf.numpy_function().

The operation is registered with the TensorFlow that is loaded, through its C interface, at the
first use; where that fails, is_native() says so. Knows nothing of what is called. A function that
may wait for other workers is called in a thread of ours, as many as there are calls at once:
TensorFlow runs operations of a session in any order, and waiting ones would fill its threads
before those have begun that other workers wait for.
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
from fastps.worker.handle import Array

OPERATION = "FastpsCall"
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
LIBRARY = "libtensorflow_framework.so.2"
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """What one output of an operation is."""

    kind: Any  # a tf.DType
    shape: tuple[int, ...] | None  # None: the function makes it
    is_slot: bool = False  # the function gives a slot for it


Run = Callable[[Arrays, _ops.Outputs], None]


def tensor_of(given: Any) -> Any:
    """Return what was given as a tensor; TypeError for a masked array: its mask would go."""
    refuse_masked(given, "the tensor")
    return tf.convert_to_tensor(given)


class FailedPreconditionError(MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """A MismatchError outside of graphs, which is TensorFlow's error too, as Horovod's is."""

    def __init__(self, message: str) -> None:
        """Take the text."""
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class _Table:
    """Functions by number, what each gives, and whether it may wait."""

    def __init__(self) -> None:
        self.calls = Calls()
        self._results: dict[int, tuple[bool, Sequence[Result]]] = {}

    def number_of(
        self, key: Hashable, run: Run, results: Sequence[Result], *, may_wait: bool
    ) -> int:
        """Return the number of a function, the same for the same key."""

        def call(device: int, inputs: Arrays, outputs: Any) -> None:
            run(inputs, outputs)

        number = self.calls.number_of(key, lambda: call)
        self._results.setdefault(number, (may_wait, results))
        return number

    def run(self, number: int, inputs: _ops.Tensors, outputs: _ops.Outputs) -> None:
        """Call a function."""
        self.calls.run(number, 0, inputs, outputs)

    def describe(self, number: int) -> tuple[bool, list[tuple[int, tuple[int, ...] | None, bool]]]:
        """Return whether a function may wait, and what it gives."""
        may_wait, results = self._results[number]
        return may_wait, [(one.kind.as_datatype_enum, one.shape, one.is_slot) for one in results]


class _Threads:
    """Threads that run calls at once: an idle one, or a new one; they end with the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # less those for whom there is a call already

    def defer(self, call: Callable[[], object]) -> None:
        """Have a thread run a call; RuntimeError where none can be started."""
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


_table = _Table()
_threads = _Threads()


@functools.cache
def is_native() -> bool:
    """Return whether TensorFlow has our operation; registers it at the first call."""
    try:
        path = os.path.join(tf.sysconfig.get_lib(), LIBRARY)
        library = ctypes.CDLL(path)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _ops.FUNCTIONS]
        addresses = [each.value or 0 for each in found]
        _ops.register(addresses, _table.run, _table.describe, _threads.defer)
        tf.no_gradient(OPERATION)  # tf.custom_gradient() has those that there are
    except (OSError, AttributeError, RuntimeError) as error:
        _log.info("TensorFlow takes no operation of ours, so functions are called by its "
                  "numpy_function(), which is slower: %s", error)  # fmt: skip
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
    """Add a call of a function to the graph that is traced; gives its results.

    run: f(inputs, outputs) fills in the outputs that TensorFlow has allocated, and gives slots
    for the others, or makes them. key: the function's; the same one gives the same results.
    may_wait: for other workers.
    """
    number = _table.number_of(key, run, results, may_wait=may_wait)
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
    """Add a call of a function on arrays to the graph, or do it now; gives its results.

    run: takes arrays, gives a list of arrays of the kinds, whose shapes are as far as known; it
    may wait for other workers. key: the function's; the same one and kinds mean the same.
    """
    if tf.executing_eagerly():
        try:
            made = run(*map(_host, tensors))
        except MismatchError as error:
            raise FailedPreconditionError(str(error)) from error
        return [tf.convert_to_tensor(one) for one in _listed(made)]
    if is_native():
        halves = tuple(one.dtype == tf.bfloat16 for one in tensors)
        results = [Result(kind, None) for kind in kinds]
        made = partial(_make, run, halves)
        whole = (key, halves, tuple(kinds))
        listed = call_native(whole, made, tensors, results, may_wait=True)
    else:
        listed = _listed(tf.numpy_function(run, list(tensors), list(kinds)))
    for one, shape in zip(listed, shapes, strict=True):
        one.set_shape(shape)
    return listed


class _Held:
    """Memory of one of a call's tensors, which live while an array is over it."""

    def __init__(self, tensors: Arrays, place: int) -> None:
        self.__array_interface__ = tensors[place].__array_interface__
        self._tensors = tensors


def _make(
    run: Callable[..., Any], halves: Sequence[bool], inputs: Arrays, outputs: _ops.Outputs
) -> None:
    """Call a function on arrays; halves: which of them are bfloat16."""
    held = [np.asarray(_Held(inputs, place)) for place in range(len(halves))]
    arrays = [
        one.view(_BFLOAT16) if is_half else one for one, is_half in zip(held, halves, strict=True)
    ]
    for place, one in enumerate(_listed(run(*arrays))):
        outputs.copy_array(place, wire_view(np.asarray(one)))


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _host(tensor: Any) -> Array:
    """Return an eager tensor's memory; bfloat16 has no buffer that Python knows, and is copied."""
    is_half = tensor.dtype == tf.bfloat16
    return np.asarray(tensor.numpy() if is_half else memoryview(tensor))
