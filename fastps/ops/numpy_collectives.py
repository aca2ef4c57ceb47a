# SPDX-License-Identifier: Apache-2.0
"""The operations among members of a process set on NumPy arrays; fastps hands them on.

Names may be None: operations without one are told apart by their order, which is the same on all
members. Ranks are those of the job. Threads: any, but nameless operations of one set come from
one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

import numpy as np

from fastps.collectives._calls import (
    CACHE_MISS,
    Calls,
    MeanwhileError,
    cached,
    current_epoch,
)
from fastps.ops.start import (
    Average,
    Sum,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_gather,
    start_grouped,
    start_grouped_allgather,
    start_grouped_reducescatter,
    start_reduce,
    start_reducescatter,
)
from fastps.session.array_checks import check_output, check_targets, readable
from fastps.session.current import check_not_elastic, current
from fastps.session.process_sets import ProcessSet, checked_set, global_process_set
from fastps.types import Op, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle, scale

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A", bound=Array)


class AllToAll(Protocol):
    """The types of alltoall()."""

    @overload
    def __call__(
        self,
        tensor: A,
        splits: None = None,
        *,
        name: str | None = None,
        out: Array | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> A: ...

    @overload
    def __call__(
        self,
        tensor: A,
        splits: Sequence[int],
        *,
        name: str | None = None,
        out: Array | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[A, Array]: ...


class Broadcast(Protocol):
    """The types of broadcast()."""

    @overload
    def __call__(
        self,
        tensor: A,
        root_rank: int = 0,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> A: ...

    @overload
    def __call__(
        self,
        tensor: Sequence[A],
        root_rank: int = 0,
        *,
        name: Sequence[str] | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[A]: ...


def make_blocking(
    start: Callable[P, Handle[T]],
    words: str,
    begin: Callable[..., Handle[Any]] | None = None,
) -> Callable[P, T]:
    """Make the form that waits of an operation's _async form; words: its docstring.

    begin: for what may begin otherwise, as somebody waits for it. What was called before, with
    arrays of the same shapes, does not go through all this once more; see collectives/_calls.pyx.
    """
    calls, make = Calls(), begin or inspect.unwrap(start)

    @functools.wraps(start)
    def run(*args: P.args, **options: P.kwargs) -> T:
        try:
            found: T = calls.again(args, options)
        except MeanwhileError as news:
            return cast("T", _corrected(news.operation, news.result))
        if found is CACHE_MISS:
            before = current_epoch()
            later = make(*args, **options)
            found = later.wait()
            calls.remember(args, options, found, later.operations, before)
        return found

    return _described(run, start, words)


def make_waiting(start: Callable[P, Handle[T]], words: str) -> Callable[P, T]:
    """Make the form that waits of an operation's _async form, without a cache of calls."""

    @functools.wraps(start)
    def run(*args: P.args, **options: P.kwargs) -> T:
        return start(*args, **options).wait()

    return _described(run, start, words)


def _described(run: F, start: Callable[..., Any], words: str) -> F:
    """Set name, docstring and signature of a form that waits: it returns the handle's result."""
    form: Any = run  # a function, whose attributes a Callable lacks
    form.__name__ = form.__qualname__ = start.__name__.replace("_async", "").lstrip("_")
    form.__doc__ = inspect.cleandoc(words)
    signature = inspect.signature(start)
    found = str(signature.return_annotation)
    if found.startswith("Handle["):
        found = found[len("Handle[") : -1]
    form.__annotations__ = {**form.__annotations__, "return": found}
    form.__signature__ = signature.replace(return_annotation=found)
    return run


def _corrected(operation: Operation, result: Array | None) -> Array | None:
    """Correct an average that may lack somebody, as its handle does."""
    if result is not None:
        operation.group.handle_of(operation, _wire(result)).wait()
    return result


def join(device: int = -1, *, timeout_s: float | None = None) -> int:
    """Take part in what the others do, without data, until all workers have called this; blocks.

    For a worker that has run out of data: the others' allreduce (but Adasum), reduce, broadcasts,
    those of optimizers and of process sets too, and barriers go on without it. An average is over
    those who take part (n / k times that over all: the last digit may differ from a divided sum),
    or over all with FASTPS_JOIN_AVERAGE=all, as with Horovod. What else they start raises
    MismatchError; the average of integers over those who take part raises FastPSError, and so does
    join() while settings are tuned. Waits for this worker's own operations first. Gives the rank
    of the last one to come. device: accepted for Horovod's sake. timeout_s: from one operation of
    others to the next (default: op_timeout_s); then StallError says who is at work, and join()
    may be called again. PeerLostError names a worker that left the job instead.
    """
    session = current()
    check_not_elastic("join()", "let all workers take equally many steps")
    if session.size == 1:
        return session.rank
    return session.join_state.join(session.config.op_timeout_s if timeout_s is None else timeout_s)


@cached
def allreduce_async(
    tensor: A,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: A | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]:
    """Start allreduce() and give a handle for synchronize(); the arrays must not be changed."""
    source = _scaled(readable(tensor, name), prescale_factor)
    if out is not None:
        check_output("allreduce" if name is None else f"tensor {name!r}", source, out)
    wire = _sum_wire(source, op)
    target = None if out is None else wire if out is source else _wire(out)
    handle = start_allreduce(
        wire, target, op, name, process_set, priority=priority, factor=postscale_factor
    )
    return _result(handle, source, out)


allreduce = make_blocking(
    allreduce_async,
    """Return the average, or another op, of the arrays of all members.

    op: Average, Sum, Min, Max, Product; BAND, BOR, BXOR for integers and bool; Adasum for floats
    of a power of two of members (its _async form blocks too). The array is
    multiplied by prescale_factor before and the result by postscale_factor after; integers lose
    fractions, and their average is a sum, which wraps around as theirs do, divided and rounded
    down. out: None for a new array, tensor itself for in place, or another of its shape and
    dtype. With a name, Sum and
    Average over all workers are push_pull(): declared, by way of the servers, larger priority
    first. Rank order: the same bits on all members. Blocks; raises MismatchError, PeerLostError,
    StallError, ValueError where this worker is not in process_set. Bytes: docs/collectives.md.
    """,
)


def grouped_allreduce_async(
    tensors: Sequence[A],
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[A]]:
    """Start grouped_allreduce() and give a handle for synchronize()."""
    sources = [_scaled(readable(tensor, name), prescale_factor) for tensor in tensors]
    wires = [_sum_wire(source, op) for source in sources]
    codes = [dtype_of(wire.dtype) for wire in wires]
    handle = start_grouped(wires, op, name, process_set, codes, factor=postscale_factor)
    return _results(handle, sources)


grouped_allreduce = make_blocking(
    grouped_allreduce_async,
    """Return the allreduce() of each of several arrays, all under way at once; blocks.""",
)


def allgather_async(
    tensor: A,
    name: str | None = None,
    *,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]:
    """Start allgather()."""
    return _allgather(tensor, name, out=out, process_set=process_set, is_awaited=False)


def _allgather(
    tensor: A,
    name: str | None = None,
    *,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
    is_awaited: bool = True,
) -> Handle[A]:
    source = readable(tensor, name)
    wire, to = _rows_wire(source), _out_wire(out, source, name)
    handle, _ = start_allgather(wire, name, process_set, out=to, is_awaited=is_awaited)
    return _result(handle, source, out)


allgather = make_blocking(
    allgather_async,
    """Return the arrays of all members, concatenated along the first dimension.

    First dimensions may differ, the others must not (MismatchError). out: where the result goes,
    C-contiguous; the tensor may be a part of it, at its place. Blocks.
    """,
    _allgather,
)


def grouped_allgather_async(
    tensors: Sequence[A],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[A]]:
    """Start grouped_allgather()."""
    return _grouped_allgather(tensors, name, process_set=process_set, is_awaited=False)


def _grouped_allgather(
    tensors: Sequence[A],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    is_awaited: bool = True,
) -> Handle[list[A]]:
    sources = [readable(tensor, name) for tensor in tensors]
    wires = [_rows_wire(source) for source in sources]
    handle, _ = start_grouped_allgather(
        wires, name, process_set, dtypes=[None] * len(wires), is_awaited=is_awaited
    )
    return _results(handle, sources)


grouped_allgather = make_blocking(
    grouped_allgather_async,
    """Return the allgather() of each of several arrays, small ones as one operation; blocks.""",
    _grouped_allgather,
)


@cached
def reducescatter_async(
    tensor: A,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]:
    """Start reducescatter() and give a handle for synchronize()."""
    source = _scaled(readable(tensor, name), prescale_factor)
    wire, to = _sum_wire(source, op), _out_wire(out, source, name)
    handle = start_reducescatter(wire, op, name, process_set, out=to, factor=postscale_factor)
    return _result(handle, source, out)


reducescatter = make_blocking(
    reducescatter_async,
    """Return this member's rows of the allreduce().

    Rows are divided evenly, in the order of members; the first ones get one more each where
    something is left. out: where the result goes, C-contiguous. Blocks.
    """,
)


def grouped_reducescatter_async(
    tensors: Sequence[A],
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[A]]:
    """Start grouped_reducescatter() and give a handle for synchronize()."""
    sources = [_scaled(readable(tensor, name), prescale_factor) for tensor in tensors]
    wires = [_sum_wire(source, op) for source in sources]
    plain = [None] * len(wires)
    handle = start_grouped_reducescatter(
        wires, op, name, process_set, dtypes=plain, factor=postscale_factor
    )
    return _results(handle, sources)


grouped_reducescatter = make_blocking(
    grouped_reducescatter_async,
    """Return the reducescatter() of several arrays, small ones as one operation; blocks.""",
)


@overload
def alltoall_async(
    tensor: A,
    splits: None = None,
    *,
    name: str | None = None,
    out: Array | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]: ...


@overload
def alltoall_async(
    tensor: A,
    splits: Sequence[int],
    *,
    name: str | None = None,
    out: Array | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[A, Array]]: ...


def alltoall_async(
    tensor: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    out: Array | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start alltoall()."""
    return _alltoall(tensor, splits, name=name, out=out, process_set=process_set, is_awaited=False)


def _alltoall(
    tensor: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    out: Array | None = None,
    process_set: ProcessSet = global_process_set,
    is_awaited: bool = True,
) -> Handle[Any]:
    source = readable(tensor, name)
    wire, to = _rows_wire(source), _out_wire(out, source, name)
    handle, received = start_alltoall(
        wire, splits, name, process_set, out=to, is_awaited=is_awaited
    )
    result = _result(handle, source, out)
    if splits is None:
        return result
    return MappedHandle([result], lambda found: (found[0], np.array(received)))


alltoall: AllToAll = make_blocking(  # type: ignore[assignment]
    alltoall_async,
    """Send rows to each member, and give what came from each, in the order of members.

    splits: how many rows go to each; None: the same number, and an array comes back; otherwise
    the array and how many rows came from each. out: where the array goes, C-contiguous, another
    than tensor. Blocks.
    """,
    _alltoall,
)


@overload
def broadcast_async(
    tensor: A,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]: ...


@overload
def broadcast_async(
    tensor: Sequence[A],
    root_rank: int = 0,
    *,
    name: Sequence[str] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[A]]: ...


@cached
def broadcast_async(
    tensor: Array | Sequence[Array],
    root_rank: int = 0,
    *,
    name: str | Sequence[str] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Start broadcast() and give a handle for synchronize(); does not block."""
    handle: Handle[Any]
    check_targets(tensor)
    if name is not None and process_set is global_process_set:
        if isinstance(tensor, np.ndarray):
            handle = current().broadcast_async(_wire(tensor), root_rank, name)
            return _result(handle, tensor, tensor)
        wires = [_wire(one) for one in tensor]
        handle = current().broadcast_async(wires, root_rank, name)
        return MappedHandle([handle], lambda _: list(tensor))
    if isinstance(tensor, np.ndarray) and (name is None or isinstance(name, str)):
        handle = start_broadcast(_wire(tensor), root_rank, name, process_set)
        return _result(handle, tensor, tensor)
    labels = [None] * len(tensor) if name is None else name
    places = [np.array(one) for one in tensor] if current().is_elastic else tensor
    handles = [
        broadcast_async(one, root_rank, name=label, process_set=process_set)
        for one, label in zip(places, labels, strict=True)
    ]

    def finish(found: list[Array]) -> list[Array]:
        """Overwrite all, where a loss could have left some of them."""
        for one, place in zip(tensor, places, strict=True):
            if one is not place:
                np.copyto(one, place)
        return list(tensor)

    return MappedHandle(handles, finish)


broadcast: Broadcast = make_blocking(  # type: ignore[assignment]
    broadcast_async,
    """Copy the root's tensor into everybody's, in place, bit by bit; blocks.""",
)


@cached
def reduce_to_async(
    tensor: A,
    root_rank: int = 0,
    *,
    op: Op = Average,
    name: str | None = None,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A | None]:
    """Start reduce_to() and give a handle for synchronize()."""
    source = readable(tensor, name)
    if out is not None:
        check_output("reduce_to" if name is None else f"tensor {name!r}", source, out)
    wire = _sum_wire(source, op)
    to = None if out is None else wire if out is source else _wire(out)
    handle = start_reduce(wire, root_rank, op, name, process_set, out=to)
    is_root = current().rank == root_rank
    return _result(handle, source, out) if is_root else _without_result(handle)


reduce_to = make_blocking(
    reduce_to_async,
    """Return the allreduce() on the root, and None elsewhere; blocks.

    out: where the root wants it, as for allreduce(). Called reduce elsewhere; fastps.reduce is the
    room of kernels.
    """,
)


def gather_async(
    tensor: A,
    root_rank: int = 0,
    *,
    name: str | None = None,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A | None]:
    """Start gather()."""
    return _gather(
        tensor, root_rank, name=name, out=out, process_set=process_set, is_awaited=False
    )


def _gather(
    tensor: A,
    root_rank: int = 0,
    *,
    name: str | None = None,
    out: A | None = None,
    process_set: ProcessSet = global_process_set,
    is_awaited: bool = True,
) -> Handle[A | None]:
    source = readable(tensor, name)
    wire, to = _rows_wire(source), _out_wire(out, source, name)
    handle = start_gather(wire, root_rank, name, process_set, out=to, is_awaited=is_awaited)
    is_root = current().rank == root_rank
    return _result(handle, source, out) if is_root else _without_result(handle)


gather = make_blocking(
    gather_async,
    """Return the allgather() on the root, and None elsewhere; blocks.

    out: where the root wants it, C-contiguous, another than tensor.
    """,
    _gather,
)


@cached
def scatter_async(
    tensor: Array | None,
    out: A,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]:
    """Start scatter() and give a handle for synchronize()."""
    root = checked_set(process_set).member(root_rank, "root_rank")
    wire = None if tensor is None else _wire(readable(tensor, name))
    check_targets(out)
    handle = process_set.group().scatter(wire, _wire(out), root=root, name=name)
    return _result(handle, out, out)


scatter = make_blocking(
    scatter_async,
    """Scatter the root's array: each member has its part, in their order, in out; blocks.

    out: C-contiguous, as large on all members. tensor: of the root, as large as all together,
    of out's dtype.
    """,
)


def barrier_async(*, process_set: ProcessSet = global_process_set) -> Handle[None]:
    """Start barrier() and give a handle for synchronize()."""
    if process_set is not global_process_set:
        return MappedHandle([checked_set(process_set).group().barrier()], lambda _: None)
    return MappedHandle([current().groups.start_barrier()], lambda _: None)


@cached
def send_async(
    tensor: Array, target: int, *, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Handle[None]:
    """Start send() and give a handle for synchronize()."""
    group, member = checked_set(process_set).group(), process_set.member(target, "target")
    handle = group.send(_wire(readable(tensor)), member, tag=tag)
    return _without_result(handle)


send = make_blocking(
    send_async,
    """Send an array to a worker that calls receive(); blocks until it has been read.

    Messages with one tag arrive in the order in which they were sent.
    """,
)


@cached
def receive_async(
    out: A,
    source: int | None = None,
    *,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle[A]:
    """Start receive(); the done handle's `source` is the sender's place in the set."""
    check_targets(out)
    group = checked_set(process_set).group()
    member = None if source is None else process_set.member(source, "source")
    return _result(group.receive(_wire(out), member, tag=tag), out, out)


receive = make_blocking(
    receive_async,
    """Receive what a worker sends, or whoever sends first, into an array of just that size.""",
)


def _scaled(array: Array, factor: float) -> Array:
    """Return an array times a factor, as Horovod multiplies."""
    if factor == 1.0:
        return array
    product = array.copy()
    wire = _wire(product)
    scale(wire, dtype_of(wire.dtype), factor)
    return product


def _wire(array: Array) -> Array:
    """Return the array as it travels: a complex number is two floats, along a last dimension."""
    if array.dtype.kind != "c":
        return array
    parts: Array = array[..., None].view(array.real.dtype)
    return parts


def _rows_wire(array: Array) -> Array:
    """Return an array of rows as it travels: a complex scalar is one row, not two."""
    return _wire(array if array.ndim else array.reshape(1))


def _unwire(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.view(dtype)[..., 0] if dtype.kind == "c" else array


def _sum_wire(array: Array, op: Op) -> Array:
    if array.dtype.kind == "c" and op not in (Sum, Average):
        raise TypeError(f"op {op.value} does not support complex numbers; use Sum or Average")
    return _wire(array)


def _out_wire(out: Array | None, source: Array, name: str | None) -> Array | None:
    """Return the output of an operation as it travels; ValueError where its dtype is another."""
    if out is None:
        return None
    check_targets(out)
    if out.dtype != source.dtype:
        what = "the tensor" if name is None else f"tensor {name!r}"
        raise ValueError(
            f"{what}: out is {out.dtype}, but the input is {source.dtype}; both must be alike: "
            f"pass an out of {source.dtype}, or leave out= away"
        )
    return _wire(out)


def _result(handle: Handle[Any], source: Array, out: Array | None = None) -> Handle[Any]:
    """Return the handle of an operation's array, of the source's dtype; out: where it goes."""
    if source.dtype.kind != "c":
        return handle

    def finish(found: list[Any]) -> Array:
        return _unwire(found[0], source.dtype) if out is None else out

    return MappedHandle([handle], finish, operations=handle.operations)


def _without_result(handle: Handle[Any]) -> Handle[Any]:
    return MappedHandle([handle], lambda _: None, operations=handle.operations)


def _results(handle: Handle[Any], sources: Sequence[Array]) -> Handle[list[Any]]:
    """Return the handle of the arrays of a grouped operation."""
    return MappedHandle(
        [handle],
        lambda found: [
            _unwire(one, source.dtype) for one, source in zip(found[0], sources, strict=True)
        ],
    )
