# SPDX-License-Identifier: Apache-2.0
"""Calls of Python from programs that XLA has compiled, with XLA's buffers as NumPy arrays.

On a CPU they go through XLA's foreign function interface, without a copy; elsewhere through
jax.io_callback(), which copies. Knows nothing of the functions that are called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from fastps.frameworks.array_exchange import Call, Calls, wire_view
from fastps.frameworks.jax import _ffi
from fastps.session import current
from fastps.worker.handle import Array

Shapes: TypeAlias = Sequence[jax.ShapeDtypeStruct]

TARGET = "fastps_call"
calls = Calls()


@functools.cache
def _register() -> None:
    """Register the target with XLA, and let shutdown() wait for programs; once."""
    jax.ffi.register_ffi_target(TARGET, _ffi.handler(calls.functions), platform="cpu")
    current.wait_before_leaving(wait_idle)


def wait_idle() -> None:
    """Wait for the programs that JAX has started, but not waited for.

    These are the programs whose results are still referenced, and all of this thread: XLA runs
    programs with calls in the order in which a thread started them. Their errors are raised where
    the results are used, not here.
    """
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()
    if is_native():
        shape = jax.ShapeDtypeStruct((), np.bool_)
        jax.block_until_ready(call("wait_idle", lambda: lambda *_: None, [], [shape]))


def is_native() -> bool:
    """Return whether XLA's buffers are memory of the host: its default device is a CPU."""
    return str(jax.default_backend()) == "cpu"


def call(
    key: Hashable,
    make: Callable[[], Call],
    operands: Sequence[Any],
    shapes: Shapes,
    *,
    is_pure: bool = False,
) -> list[Any]:
    """Add a call of a function to the program that is traced, or call it now; return the results.

    make: returns the function f(device, inputs, outputs) at the first use of its key. shapes: of
    the results. is_pure: a program may leave the call out if nothing needs its results. JAX starts
    a program with other calls from Python, which costs microseconds per array.
    """
    number = calls.number_of(key, make)
    _register()
    if not is_native():
        return _call_back(number, operands, shapes)
    run = jax.ffi.ffi_call(
        TARGET, tuple(shapes), has_side_effect=not is_pure, vmap_method="sequential"
    )
    return list(run(*operands, number=np.int64(number)))


def _call_back(number: int, operands: Sequence[Any], shapes: Shapes) -> list[Any]:
    """Do the same for buffers of another device, which are copied to the host and back."""

    def run(*inputs: Array) -> tuple[Array, ...]:
        found = [np.empty(shape.shape, shape.dtype) for shape in shapes]
        sources = [wire_view(np.ascontiguousarray(one)) for one in inputs]
        calls.functions[number](0, sources, [wire_view(one) for one in found])
        return tuple(found)

    return list(jax.experimental.io_callback(run, tuple(shapes), *operands, ordered=False))


def shapes_of(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of each array."""
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
