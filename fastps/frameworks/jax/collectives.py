# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on JAX arrays, under jit and grad too.

Results under jit have shapes that are known when the program is traced: first dimensions are the
same on all workers there, and only outside of it may they differ. Gradients travel under
'<name>.gradient'. A compiled program leaves out what no result needs. What a name is for, and
which bytes travel: docs/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fastps
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
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import DType, Op, dtype_of
from fastps.worker.handle import Array


def allreduce(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return the average, or another op, of everybody's array; blocks the program there.

    op: as for fastps.allreduce(). Its gradient is the same of the results' gradients, where op is
    a sum or an average; others have none.
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
    """Reduce an array; zeros where the result is not wanted."""
    code = dtype_of(array.dtype)

    def run(_: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        flight = start_allreduce(inputs[0], None, op, label, process_set, dtype=code)
        found = flight.wait()
        np.copyto(outputs[0], found.reshape(outputs[0].shape) if is_wanted else 0)

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

    def run(_: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        np.copyto(outputs[0], inputs[0])
        start_broadcast(outputs[0], root_rank, label, process_set, dtype=code).wait()

    def give(one: jax.Array) -> jax.Array:
        return _once(("broadcast", label, root_rank, id(process_set)), run, one, one.shape)

    def back(gradient: jax.Array) -> jax.Array:
        is_root = process_set.rank() == process_set.member(root_rank, "root_rank")
        name = of_gradient(label)
        return _reduced(gradient, name, Average, process_set, is_wanted=is_root)

    return _differentiable(give, back, array)


def allgather(
    tensor: Any, name: str, *, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return the arrays of all members, concatenated along the first dimension.

    First dimensions may differ outside of jit, and there alone. Blocks the program there. Its
    gradient is this member's part of the averaged gradients.
    """
    array = jnp.atleast_1d(jnp.asarray(tensor))
    label, code = check_name(name, "allgather"), dtype_of(array.dtype)
    counts = [len(array)] * process_set.size()

    def run(_: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        flight = start_allgather(inputs[0], label, process_set, dtype=code, counts=counts)[0]
        np.copyto(outputs[0], flight.wait())

    def gather(one: jax.Array) -> jax.Array:
        if _is_traced(one):
            shape = (sum(counts), *one.shape[1:])
            return _once(("allgather", label, id(process_set)), run, one, shape)
        flight, counts[:] = start_allgather(
            _host(one), label, process_set, dtype=code, is_awaited=True
        )
        return _device(flight.wait(), code)

    def back(gradient: jax.Array) -> jax.Array:
        whole = allreduce(gradient, of_gradient(label), process_set=process_set)
        first = sum(counts[: process_set.rank()])
        return whole[first : first + len(array)]

    return _differentiable(gather, back, array)


def reducescatter(
    tensor: Any, name: str, *, op: Op = Average, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """Return this member's rows of the allreduce(); under jit they divide evenly (ValueError).

    Its gradient is everybody's, gathered: times the number of members where op is a sum.
    """
    array = jnp.asarray(tensor)
    label, code = check_name(name, "reducescatter"), dtype_of(array.dtype)

    def start(source: Array) -> Array:
        flight = start_reducescatter(source, op, label, process_set, dtype=code)
        found: Array = flight.wait()
        return found

    def scatter(one: jax.Array) -> jax.Array:
        if not _is_traced(one):
            return _device(start(_host(one)), code)
        shape = (_share(one, process_set), *one.shape[1:])
        return _once(("reducescatter", label, op, id(process_set)), _copying(start), one, shape)

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
    """Send rows to each member, and give what came from each, in the order of members.

    splits: how many rows go to each, outside of jit (ValueError under it); then the array and how
    many rows came from each come back. None: the same number for all. Its gradient goes the way
    back.
    """
    array = jnp.asarray(tensor)
    label, code = check_name(name, "alltoall"), dtype_of(array.dtype)
    received: list[int] = []

    def exchange(source: Array) -> Array:
        flight, received[:] = start_alltoall(
            source, splits, label, process_set, dtype=code, is_awaited=True
        )
        found: Array = flight.wait()
        return found

    def give(one: jax.Array) -> jax.Array:
        if not _is_traced(one):
            return _device(exchange(_host(one)), code)
        if splits is not None:
            raise ValueError("alltoall with splits has no fixed shape: call it outside of jit")
        _share(one, process_set)
        return _once(("alltoall", label, id(process_set)), _copying(exchange), one, one.shape)

    def back(gradient: jax.Array) -> jax.Array:
        parts = None if splits is None else received
        found = alltoall(gradient, parts, name=of_gradient(label), process_set=process_set)
        given: jax.Array = found if splits is None else found[0]
        return given

    found = _differentiable(give, back, array)
    return found if splits is None else (found, np.array(received))


def broadcast_object(obj: Any, root_rank: int = 0, name: str = "object") -> Any:
    """Return the root's object, made of plain values and arrays, which come as NumPy's.

    Blocks. What the others pass is ignored. TypeError on all workers where the root's cannot
    travel.
    """
    plain = _plain(obj) if fastps.rank() == root_rank else None
    return fastps.broadcast_object(plain, root_rank, name=name)


def _plain(obj: Any) -> Any:
    """Return an object with NumPy's arrays for JAX's; the others wait to hear why it has none."""
    try:
        return jax.tree.map(lambda leaf: np.asarray(leaf) if _is_array(leaf) else leaf, obj)
    except Exception as error:
        return Unsendable(error)


def _differentiable(
    run: Callable[[jax.Array], jax.Array],
    back: Callable[[jax.Array], jax.Array] | None,
    array: jax.Array,
) -> jax.Array:
    """Call run(array); back() makes the array's gradient of the result's, where there are any."""
    if back is None or not jnp.issubdtype(array.dtype, jnp.inexact):
        return run(array)
    whole = jax.custom_vjp(run)
    whole.defvjp(lambda one: (run(one), None), lambda _, gradient: (back(gradient),))
    return whole(array)


def _once(key: Any, run: Any, array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Call a function of one array that gives one of the same dtype and this shape."""
    wanted = jax.ShapeDtypeStruct(tuple(shape), array.dtype)
    whole = (key, array.shape, str(array.dtype), tuple(shape))
    found: jax.Array = call(whole, lambda: run, [array], [wanted], is_pure=True)[0]
    return found


def _copying(start: Callable[[Array], Array]) -> Any:
    def run(_: int, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        np.copyto(outputs[0], start(inputs[0]))

    return run


def _share(array: jax.Array, process_set: ProcessSet) -> int:
    """Return how many rows each member gets, where they divide evenly."""
    size = process_set.size()
    if not array.ndim or len(array) % size:
        raise ValueError(f"{array.shape} has no rows that divide among {size} workers under jit")
    return len(array) // size


def _host(array: jax.Array) -> Array:
    """Return an array's memory, on a CPU without a copy."""
    return wire_view(np.asarray(array))


def _device(found: Array, code: DType) -> jax.Array:
    is_half = code is DType.BFLOAT16
    return jnp.asarray(found.view(jnp.bfloat16.dtype) if is_half else found)


def _is_traced(array: object) -> bool:
    return isinstance(array, jax.core.Tracer)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array)
