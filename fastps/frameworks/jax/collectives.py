# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on JAX arrays, under jit and grad too.

Under jit the shapes of results must be known when the program is traced; so first dimensions may
differ between workers only outside of jit. Gradients travel under '<name>.gradient'. A compiled
program leaves out operations whose results it does not need. docs/collectives.md explains names,
and which bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastps.collectives.objects import Unsendable
from fastps.frameworks.array_exchange import wire_view
from fastps.frameworks.gradient_round import Average, Sum, check_name, of_gradient
from fastps.frameworks.jax.calls import call
from fastps.ops.start import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from fastps.session.current import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType, Op, dtype_of
from fastps.worker.handle import Array


def allreduce(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return the average, or another op, of all workers' arrays; blocks the program there.

    op: as for fastps.allreduce(). The gradient of a sum or an average is the same operation on the
    results' gradients; other ops have none.
    """
    label = check_name(name, "allreduce")

    def back(gradient: jax.Array) -> jax.Array:
        return allreduce(gradient, of_gradient(label), op=op, process_set=process_set)

    def reduce(one: jax.Array) -> jax.Array:
        return _reduced(one, label, op, process_set)

    return _differentiable(reduce, back if op in (Average, Sum) else None, jnp.asarray(tensor))


def _reduced(
    array: jax.Array, label: str, op: Op, process_set: ProcessSet, *, is_wanted: bool = True
) -> jax.Array:
    """Reduce an array; return zeros where the result is not wanted."""
    code = dtype_of(array.dtype)

    def run(source: Array, out: Array) -> None:
        found = start_allreduce(source, None, op, label, process_set, dtype=code).wait()
        np.copyto(out, found.reshape(out.shape) if is_wanted else 0)

    key = ("allreduce", label, op, id(process_set), is_wanted)
    return _once(key, run, array, array.shape)


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Return the root's array on all workers, bit by bit; blocks the program there.

    Its gradient is the average of gradients at the root, and zero elsewhere.
    """
    array = jnp.asarray(tensor)
    label, code = check_name(name, "broadcast"), dtype_of(array.dtype)

    def run(source: Array, out: Array) -> None:
        np.copyto(out, source)
        start_broadcast(out, root_rank, label, process_set, dtype=code).wait()

    def send(one: jax.Array) -> jax.Array:
        return _once(("broadcast", label, root_rank, id(process_set)), run, one, one.shape)

    def back(gradient: jax.Array) -> jax.Array:
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        name = of_gradient(label)
        return _reduced(gradient, name, Average, process_set, is_wanted=is_root)

    return _differentiable(send, back, array)


def allgather(
    tensor: Any, name: str, *, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return the arrays of all members, concatenated along the first dimension.

    First dimensions may differ only outside of jit. Blocks the program there. Its gradient is this
    member's part of the averaged gradients.
    """
    array = jnp.atleast_1d(jnp.asarray(tensor))
    label, code = check_name(name, "allgather"), dtype_of(array.dtype)
    counts = [len(array)] * process_set.size()

    def run(source: Array, out: Array) -> None:
        handle, _ = start_allgather(source, label, process_set, dtype=code, counts=counts)
        np.copyto(out, handle.wait())

    def gather(one: jax.Array) -> jax.Array:
        if _is_traced(one):
            shape = (sum(counts), *one.shape[1:])
            return _once(("allgather", label, id(process_set)), run, one, shape)
        handle, counts[:] = start_allgather(
            _host(one), label, process_set, dtype=code, is_awaited=True
        )
        return _device(handle.wait(), code)

    def back(gradient: jax.Array) -> jax.Array:
        whole = allreduce(gradient, of_gradient(label), process_set=process_set)
        first = sum(counts[: process_set.rank()])
        return whole[first : first + len(array)]

    return _differentiable(gather, back, array)


def reducescatter(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return this member's rows of the allreduce(); ValueError under jit if they divide unevenly.

    Its gradient is the allgather() of all gradients, times the number of members if op is a sum.
    """
    array = jnp.asarray(tensor)
    label, code = check_name(name, "reducescatter"), dtype_of(array.dtype)

    def reduce(source: Array) -> Array:
        found: Array = start_reducescatter(source, op, label, process_set, dtype=code).wait()
        return found

    def scatter(one: jax.Array) -> jax.Array:
        if not _is_traced(one):
            return _device(reduce(_host(one)), code)
        shape = (_share(one, process_set), *one.shape[1:])
        key = ("reducescatter", label, op, id(process_set))
        return _once(key, lambda source, out: np.copyto(out, reduce(source)), one, shape)

    def back(gradient: jax.Array) -> jax.Array:
        whole = allgather(gradient, of_gradient(label), process_set=process_set)
        return whole * process_set.size() if op is Sum else whole

    return _differentiable(scatter, back if op in (Average, Sum) else None, array)


def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and return the rows from each, in the order of members.

    splits: the number of rows for each, only outside of jit (ValueError); the result is then the
    array and the number of rows from each. None: the same number for all. Its gradient sends rows
    back to where they came from.
    """
    array = jnp.asarray(tensor)
    label, code = check_name(name, "alltoall"), dtype_of(array.dtype)
    received: list[int] = []

    def exchange(source: Array) -> Array:
        handle, received[:] = start_alltoall(
            source, splits, label, process_set, dtype=code, is_awaited=True
        )
        found: Array = handle.wait()
        return found

    def send(one: jax.Array) -> jax.Array:
        if not _is_traced(one):
            return _device(exchange(_host(one)), code)
        if splits is not None:
            raise ValueError(
                f"alltoall {label!r} with splits has no fixed shape: call it outside of jit"
            )
        _share(one, process_set)
        key = ("alltoall", label, id(process_set))
        return _once(key, lambda source, out: np.copyto(out, exchange(source)), one, one.shape)

    def back(gradient: jax.Array) -> jax.Array:
        parts = None if splits is None else received
        found = alltoall(gradient, parts, name=of_gradient(label), process_set=process_set)
        sent_back: jax.Array = found if splits is None else found[0]
        return sent_back

    found = _differentiable(send, back, array)
    return found if splits is None else (found, np.array(received))


def broadcast_object(obj: Any, root_rank: int = 0, name: str = "object") -> Any:
    """Return the root's object, of plain values and arrays, which become NumPy's; blocks.

    Objects of other workers are ignored. TypeError on all workers if the root's cannot be sent.
    """
    session = current()
    root = session.root_of(root_rank)
    return session.broadcast_object(_plain(obj) if session.is_root(root) else None, root, name)


def _plain(obj: Any) -> Any:
    """Return an object with NumPy's arrays for JAX's, or the reason for the others why not."""
    try:
        return jax.tree.map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, obj
        )
    except Exception as error:
        return Unsendable(error)


def _differentiable(
    run: Callable[[jax.Array], jax.Array],
    back: Callable[[jax.Array], jax.Array] | None,
    array: jax.Array,
) -> jax.Array:
    """Return run(array); back(), if any, returns the array's gradient from the result's."""
    if back is None or not jnp.issubdtype(array.dtype, jnp.inexact):
        return run(array)
    whole = jax.custom_vjp(run)
    whole.defvjp(lambda one: (run(one), None), lambda _, gradient: (back(gradient),))
    return whole(array)


def _once(
    key: Any, run: Callable[[Array, Array], None], array: jax.Array, shape: Sequence[int]
) -> jax.Array:
    """Call run(source, out) on an array; return out, of the same dtype and of this shape."""

    def run_on_lists(_: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        run(inputs[0], outputs[0])

    wanted = jax.ShapeDtypeStruct(tuple(shape), array.dtype)
    whole = (key, array.shape, str(array.dtype), tuple(shape))
    found: jax.Array = call(whole, lambda: run_on_lists, [array], [wanted], is_pure=True)[0]
    return found


def _share(array: jax.Array, process_set: ProcessSet) -> int:
    """Return the number of rows of each member; ValueError if they do not divide evenly."""
    size = process_set.size()
    if not array.ndim or len(array) % size:
        raise ValueError(
            f"rows of an array of shape {array.shape} do not divide among {size} workers, as they "
            "must under jit: pad them, or call it outside of jit"
        )
    return len(array) // size


def _host(array: jax.Array) -> Array:
    """Return an array's memory, on a CPU without a copy."""
    return wire_view(np.asarray(array))


def _device(found: Array, code: DType) -> jax.Array:
    is_half = code is DType.BFLOAT16
    return jnp.asarray(found.view(jnp.bfloat16.dtype) if is_half else found)


def _is_traced(array: object) -> bool:
    return isinstance(array, jax.core.Tracer)
