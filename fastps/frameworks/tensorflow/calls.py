# SPDX-License-Identifier: Apache-2.0
"""How a tf.function calls Python: by an operation of ours, or by tf.numpy_function().

The operation is registered with the TensorFlow that is loaded, through its C interface, at the
first use; where that fails, is_native() says so. Knows nothing of what is called.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

from fastps.frameworks._arrays import Arrays, Calls
from fastps.frameworks.tensorflow import _ops
from fastps.given import refuse_masked
from fastps.worker.handle import Array

OPERATION = "FastpsCall"
LIBRARY = "libtensorflow_framework.so.2"
_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """What one output of an operation is."""

    kind: Any  # a tf.DType
    shape: tuple[int, ...]
    is_slot: bool = False  # the function gives a slot for it


Run = Callable[[Arrays, _ops.Outputs], None]


def tensor_of(given: Any) -> Any:
    """Return what was given as a tensor; TypeError for a masked array: its mask would go."""
    refuse_masked(given, "the tensor")
    return tf.convert_to_tensor(given)


class _Table:
    """Functions by number, and what each gives."""

    def __init__(self) -> None:
        self.calls = Calls()
        self._results: dict[int, Sequence[Result]] = {}

    def number_of(self, key: Hashable, run: Run, results: Sequence[Result]) -> int:
        """Give the number of a function, the same for the same key."""

        def call(device: int, inputs: Arrays, outputs: Any) -> None:
            run(inputs, outputs)

        number = self.calls.number_of(key, lambda: call)
        self._results.setdefault(number, results)
        return number

    def run(self, number: int, inputs: _ops.Tensors, outputs: _ops.Outputs) -> None:
        """Call a function."""
        self.calls.run(number, 0, inputs, outputs)

    def outputs_of(self, number: int) -> list[tuple[int, tuple[int, ...], bool]]:
        """Describe what a function gives."""
        return [
            (one.kind.as_datatype_enum, one.shape, one.is_slot) for one in self._results[number]
        ]


_table = _Table()


@functools.cache
def is_native() -> bool:
    """Tell whether TensorFlow has our operation; registers it at the first call."""
    try:
        path = os.path.join(tf.sysconfig.get_lib(), LIBRARY)
        library = ctypes.CDLL(path)
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _ops.FUNCTIONS]
        _ops.register([each.value or 0 for each in found], _table.run, _table.outputs_of)
    except (OSError, AttributeError, RuntimeError) as error:
        _log.info("TensorFlow takes no operation of ours, so functions are called by its "
                  "numpy_function(), which is slower: %s", error)  # fmt: skip
        return False
    return True


def call_native(
    key: Hashable, run: Run, tensors: Sequence[Any], results: Sequence[Result]
) -> list[Any]:
    """Add a call of a function to the graph that is traced; gives its results.

    run: f(inputs, outputs) fills in the outputs that TensorFlow has allocated, and gives slots
    for the others. key: the function's; the same one gives the same results.
    """
    number = _table.number_of(key, run, results)
    listed = op_def_library.apply_op(
        OPERATION, inputs=list(tensors), number=number, Tout=[one.kind for one in results]
    )
    for one, result in zip(listed, results, strict=True):
        one.set_shape(result.shape)
    return list(listed)


def call(
    run: Callable[..., Any], tensors: Sequence[Any], kinds: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """Add a call of a function on arrays to the graph, or do it now; gives its results.

    run: takes arrays, gives a list of arrays of the kinds, whose shapes are as far as known.
    """
    if tf.executing_eagerly():
        made = run(*map(_host, tensors))
        return [tf.convert_to_tensor(one) for one in _listed(made)]
    listed = _listed(tf.numpy_function(run, list(tensors), list(kinds)))
    for one, shape in zip(listed, shapes, strict=True):
        one.set_shape(shape)
    return listed


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _host(tensor: Any) -> Array:
    """Give an eager tensor's memory; bfloat16 has no buffer that Python knows, and is copied."""
    is_half = tensor.dtype == tf.bfloat16
    return np.asarray(tensor.numpy() if is_half else memoryview(tensor))
