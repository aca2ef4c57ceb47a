# SPDX-License-Identifier: Apache-2.0
"""The operations among members of a process set, as every face of the library has them.

The upper half starts them on C-contiguous arrays, for all faces: it knows first dimensions that
differ, and which way an operation goes. The lower half is the face for NumPy arrays; fastps hands
it on. Names may be None: operations without one are told apart by their order, which is the same
on all members. Ranks are those of the job. Threads: any, but nameless operations of one set come
from one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from fastps.adasum import adasum
from fastps.current import current
from fastps.errors import FastPSError
from fastps.sets import ProcessSet, gather_objects, global_process_set, row_counts
from fastps.types import DType, Op, dtype_of
from fastps.worker.handle import Array, Handle

if TYPE_CHECKING:
    from fastps.collectives.group import Group, Promise

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT
BAND = Op.BAND
BOR = Op.BOR
BXOR = Op.BXOR
Adasum = Op.ADASUM

T = TypeVar("T")


class Flight(Protocol):
    """What is under way: a handle of a session, a group or this file."""

    def poll(self) -> bool:
        """Tell whether wait() would return at once."""

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the end, and give the result."""


class Later(Generic[T]):
    """The promise of a result that is made of what several operations give."""

    def __init__(self, flights: Sequence[Flight], finish: Callable[[list[Any]], T]) -> None:
        self._flights = flights
        self._finish = finish
        self._result: list[T] = []

    def poll(self) -> bool:
        """Tell whether wait() would return at once. Never blocks."""
        return all(flight.poll() for flight in self._flights)

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for all, each up to timeout_s seconds, and give the result; as Handle.wait()."""
        if not self._result:
            outputs = [flight.wait(timeout_s) for flight in self._flights]
            if not self._result:  # another thread may have been here
                self._result.append(self._finish(outputs))
        return self._result[0]


class Averaging:
    """The promise of an average, and of what it lacks where members had run out of data."""

    def __init__(
        self, flight: Flight, place: str | int, number: int, ranks: Sequence[int]
    ) -> None:
        self._place = (place, number, ranks)
        self.poll, self.wait = flight.poll, flight.wait

    def correction(self, dtype: DType) -> float:
        """Give what the average is to be multiplied by, once it is there; see join()."""
        factor = current().uneven.correction(*self._place)
        if factor != 1.0 and dtype > DType.BFLOAT16:
            raise FastPSError(
                f"{self._place[0]!r}: an average of integers was divided by all "
                f"{len(self._place[2])} workers, and some have called join(): use op=Sum"
            )
        return factor


def correction_of(flight: Flight, dtype: DType) -> float:
    """Give what a result is to be multiplied by: 1, but for averages without some members."""
    return flight.correction(dtype) if isinstance(flight, Averaging) else 1.0


# ---- for all faces: array is C-contiguous, dtype as for push_pull_async() ----


def start_allreduce(
    array: Array,
    out: Array | None,
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    priority: int = 0,
) -> Flight:
    """Begin an all-reduce: by servers where push_pull() does the same, else among members.

    A name that was declared with another shape goes among members too, so that names may be used
    again for something else.
    """
    if op is Adasum:
        return _start_adasum(array, out, name, process_set, dtype)
    is_sum = op in (Sum, Average) and process_set is global_process_set
    if name is not None and is_sum:
        session = current()
        code = dtype_of(array.dtype) if dtype is None else dtype
        if session.is_free_for(name, array.shape, code):
            handle = session.push_pull_async(
                array, name, average=op is Average, priority=priority, out=out, dtype=dtype
            )
            ranks = range(session.size)
            number = session.version_of(name)
            return Averaging(handle, name, number, ranks) if op is Average else handle
    group = process_set.group()
    flight = group.allreduce(array, out, op=op, name=name, dtype=dtype, priority=priority)
    return _averaging(flight, group, name) if op is Average else flight


def _start_adasum(
    array: Array, out: Array | None, name: str | None, process_set: ProcessSet, dtype: DType | None
) -> Flight:
    """Do an Adasum: blocks, since a level needs the one before."""
    code = dtype_of(array.dtype) if dtype is None else dtype
    found = adasum([array], code, process_set.group(), name)[0]
    if out is not None:
        out[...] = found
    return Later([], lambda _: found if out is None else out)


def _averaging(flight: Promise, group: Group, name: str | None) -> Averaging:
    return Averaging(flight, group.channels.get(name or "", 0), flight.number, group.ranks)


def start_allgather(
    array: Array,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
    counts: Sequence[int] | None = None,
) -> tuple[Flight, list[int]]:
    """Begin to gather arrays of any first dimension, and give the rows of each member.

    counts: these, where they are known; else blocks until all members have told them.
    """
    group = process_set.group()
    rows = np.atleast_1d(array)
    counts = row_counts(group, len(rows), name) if counts is None else list(counts)
    out = current().groups.empty((sum(counts), *rows.shape[1:]), rows.dtype)
    width = _width(rows)
    sizes = [count * width for count in counts]
    return group.allgather(rows, out, counts=sizes, name=name, dtype=dtype), counts


def start_alltoall(
    array: Array,
    splits: Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
) -> tuple[Flight, list[int]]:
    """Begin an all-to-all of rows, and give how many come from each member.

    Blocks until all members have told how many rows they send.
    """
    group = process_set.group()
    sent = _splits(array, splits, process_set)
    label = None if name is None else f"{name} sizes"
    found = group.alltoall(np.array(sent, np.int64), name=label).wait()
    received = [int(count) for count in np.asarray(found)]
    out = current().groups.empty((sum(received), *array.shape[1:]), array.dtype)
    width = _width(array)
    flight = group.alltoall(
        array, out, name=name, dtype=dtype,
        send_counts=[count * width for count in sent],
        receive_counts=[count * width for count in received],
    )  # fmt: skip
    return flight, received


def start_reducescatter(
    array: Array,
    op: Op,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
) -> Flight:
    """Begin a reduce-scatter of rows; the first members get one more where it is uneven."""
    group = process_set.group()
    if not array.ndim:
        raise ValueError("an array without dimensions has no rows to scatter")
    each, rest = divmod(len(array), group.size)
    rows = [each + (member < rest) for member in range(group.size)]
    width = _width(array)
    out = current().groups.empty((rows[group.rank], *array.shape[1:]), array.dtype)
    return group.reducescatter(
        array, out, counts=[count * width for count in rows], op=op, name=name, dtype=dtype
    )


def start_broadcast(
    array: Array,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    dtype: DType | None = None,
) -> Flight:
    """Begin a broadcast in place: by servers where it has a name and everybody takes part."""
    if name is not None and process_set is global_process_set:
        session = current()
        code = dtype_of(array.dtype) if dtype is None else dtype
        if session.is_free_for(name, array.shape, code):
            return session.broadcast_async(array, root_rank, name, dtype=dtype)
    root = process_set.member(root_rank, "root_rank")
    return process_set.group().broadcast(array, root=root, name=name, dtype=dtype)


def allgather_object(
    obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give everybody the list of everybody's objects, as broadcast_object() carries them.

    Blocks. TypeError on all members where one holds what cannot travel.
    """
    return gather_objects(process_set.group(), obj, name)


def join(device: int = -1, *, timeout_s: float | None = None) -> int:
    """Take part in what the others do, without data, until all workers have called this; blocks.

    For a worker that has run out of data: the others' allreduce, reduce and broadcasts, those of
    optimizers and of process sets too, go on without it. An average is over those who take part
    (n / k times the average over all: the last digit may differ from a sum that is divided). What
    else they start raises MismatchError, as the average of integers raises FastPSError. Waits for
    this worker's own operations first. Gives the rank of the last one to come. device: accepted
    for Horovod's sake. timeout_s: from one operation of others to the next (default:
    op_timeout_s); then StallError says who is at work, and join() may be called again.
    """
    session = current()
    if session.size == 1:
        return session.rank
    return session.uneven.join(session.config.op_timeout_s if timeout_s is None else timeout_s)


def labels_of(name: str | None, count: int) -> list[str | None]:
    """Name the parts of a grouped operation."""
    return [None if name is None else f"{name}.{place}" for place in range(count)]


def _width(array: Array) -> int:
    """Count the elements of a row."""
    return math.prod(array.shape[1:])


def _splits(array: Array, splits: Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Give how many rows go to each member, or raise ValueError."""
    size, rows = process_set.size(), len(array) if array.ndim else 0
    if splits is None:
        if rows % size or not array.ndim:
            raise ValueError(f"{rows} rows do not divide among {size} workers: give splits")
        return [rows // size] * size
    found = [int(count) for count in splits]
    if len(found) != size or min(found) < 0 or sum(found) != rows:
        raise ValueError(f"splits {found} are not {rows} rows for {size} workers")
    return found


# ---- for NumPy arrays ----


def allreduce_async(
    tensor: Array,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Array | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Later[Array]:
    """Begin allreduce() and give a handle for synchronize(); the arrays must not be changed."""
    source = _scaled(_array(tensor), prescale_factor)
    wire = _sum_wire(source, op)
    target = None if out is None else wire if out is source else _wire(out)
    flight = start_allreduce(wire, target, op, name, process_set, priority=priority)
    return _result(flight, source, postscale_factor)


def allreduce(
    tensor: Array,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    out: Array | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Give the average, or another op, of everybody's array to everybody.

    op: Average, Sum, Min, Max, Product; BAND, BOR, BXOR for integers and bool; Adasum for floats
    of a power of two of members (its _async form blocks too). The array is
    multiplied by prescale_factor before and the result by postscale_factor after; integers lose
    fractions. out: None for a new array, tensor itself for in place. With a name, Sum and
    Average over all workers are push_pull(): declared, by way of the servers, larger priority
    first. Rank order: the same bits on all members. Blocks; raises MismatchError, PeerLostError,
    StallError, ValueError where this worker is not in process_set. Bytes: docs/collectives.md.
    """
    return allreduce_async(
        tensor, name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        out=out, priority=priority, process_set=process_set,
    ).wait()  # fmt: skip


def grouped_allreduce_async(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Later[list[Array]]:
    """Begin grouped_allreduce() and give a handle for synchronize()."""
    return _grouped(
        allreduce_async, tensors, name, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def grouped_allreduce(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Give the allreduce() of each of several arrays, all under way at once; blocks."""
    return grouped_allreduce_async(
        tensors, name, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    ).wait()  # fmt: skip


def allgather_async(
    tensor: Array, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Later[Array]:
    """Begin allgather(); blocks until all members have told their first dimensions."""
    source = _array(tensor)
    flight, _ = start_allgather(_rows_wire(source), name, process_set)
    return _result(flight, source)


def allgather(
    tensor: Array, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Array:
    """Give everybody's array, one after the other along the first dimension.

    First dimensions may differ, the others must not (MismatchError). Blocks.
    """
    return allgather_async(tensor, name, process_set=process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> Later[list[Array]]:
    """Begin grouped_allgather(); blocks as allgather_async() does."""
    return _grouped(allgather_async, tensors, name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Give the allgather() of each of several arrays; blocks."""
    return grouped_allgather_async(tensors, name, process_set=process_set).wait()


def reducescatter_async(
    tensor: Array,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Later[Array]:
    """Begin reducescatter() and give a handle for synchronize()."""
    source = _scaled(_array(tensor), prescale_factor)
    flight = start_reducescatter(_sum_wire(source, op), op, name, process_set)
    return _result(flight, source, postscale_factor)


def reducescatter(
    tensor: Array,
    name: str | None = None,
    *,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Give each member its rows of the allreduce().

    Rows are divided evenly, in the order of members; the first ones get one more each where
    something is left. Blocks.
    """
    return reducescatter_async(
        tensor, name, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    ).wait()  # fmt: skip


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> Later[list[Array]]:
    """Begin grouped_reducescatter() and give a handle for synchronize()."""
    return _grouped(reducescatter_async, tensors, name, op=op, process_set=process_set)


def grouped_reducescatter(
    tensors: Sequence[Array],
    name: str | None = None,
    *,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Give the reducescatter() of each of several arrays; blocks."""
    return grouped_reducescatter_async(tensors, name, op=op, process_set=process_set).wait()


def alltoall_async(
    tensor: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Later[Any]:
    """Begin alltoall(); blocks until all members have told how many rows they send."""
    source = _array(tensor)
    flight, received = start_alltoall(_rows_wire(source), splits, name, process_set)
    if splits is None:
        return _result(flight, source)
    return Later([_result(flight, source)], lambda found: (found[0], np.array(received)))


def alltoall(
    tensor: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each member, and give what came from each, in the order of members.

    splits: how many rows go to each; None: the same number, and an array comes back; otherwise
    the array and how many rows came from each. Blocks.
    """
    return alltoall_async(tensor, splits, name=name, process_set=process_set).wait()


def broadcast_async(
    tensor: Array | Sequence[Array],
    root_rank: int = 0,
    *,
    name: str | Sequence[str] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Flight:
    """Begin broadcast() and give a handle for synchronize(); does not block."""
    if name is not None and process_set is global_process_set:
        return current().broadcast_async(tensor, root_rank, name)
    if isinstance(tensor, np.ndarray) and (name is None or isinstance(name, str)):
        flight = start_broadcast(_wire(tensor), root_rank, name, process_set)
        return Later([flight], lambda _: tensor)
    labels = [None] * len(tensor) if name is None else name
    flights = [
        broadcast_async(one, root_rank, name=label, process_set=process_set)
        for one, label in zip(tensor, labels, strict=True)
    ]
    return Later(flights, lambda found: found)


def broadcast(
    tensor: Array | Sequence[Array],
    root_rank: int = 0,
    *,
    name: str | Sequence[str] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copy the root's tensor into everybody's, in place, bit by bit; blocks."""
    return broadcast_async(tensor, root_rank, name=name, process_set=process_set).wait()


def reduce_to(
    tensor: Array,
    root_rank: int = 0,
    *,
    op: Op = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | None:
    """Give the root the allreduce(), and the others None; blocks.

    Called reduce elsewhere; fastps.reduce is the room of kernels.
    """
    source = _array(tensor)
    root = process_set.member(root_rank, "root_rank")
    group = process_set.group()
    promise = group.reduce(_sum_wire(source, op), root=root, op=op, name=name)
    flight = _averaging(promise, group, name) if op is Average else promise
    result = _result(flight, source).wait()
    return result if current().rank == root_rank else None


def gather(
    tensor: Array,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | None:
    """Give the root the allgather(), and the others None; blocks."""
    source = _array(tensor)
    rows = np.atleast_1d(_rows_wire(source))
    root, group = process_set.member(root_rank, "root_rank"), process_set.group()
    counts = row_counts(group, len(rows), name)
    is_root = current().rank == root_rank
    out = np.empty((sum(counts), *rows.shape[1:]), rows.dtype) if is_root else None
    sizes = [count * _width(rows) for count in counts]
    flight = group.gather(rows, out, root=root, counts=sizes, name=name)
    flight.wait()
    return None if out is None else _unwire(out, source.dtype)


def scatter(
    tensor: Array | None,
    out: Array,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Give each member its part of the root's array, in the order of members, in out; blocks.

    out: C-contiguous, as large on all members. tensor: of the root, as large as all together.
    """
    root = process_set.member(root_rank, "root_rank")
    wire = None if tensor is None else _wire(_array(tensor))
    process_set.group().scatter(wire, _wire(out), root=root, name=name).wait()
    return out


def send_async(
    tensor: Array, target: int, *, tag: int = 0, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin send() and give a handle for synchronize()."""
    member = process_set.member(target, "target")
    return process_set.group().send(_wire(_array(tensor)), member, tag=tag)


def send(
    tensor: Array, target: int, *, tag: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Send an array to a worker that calls receive(); blocks until it has been read.

    Messages with one tag arrive in the order in which they were sent.
    """
    send_async(tensor, target, tag=tag, process_set=process_set).wait()


def receive_async(
    out: Array,
    source: int | None = None,
    *,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin receive(); the done handle's `source` is the sender's place in the set."""
    member = None if source is None else process_set.member(source, "source")
    return process_set.group().receive(_wire(out), member, tag=tag)


def receive(
    out: Array,
    source: int | None = None,
    *,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Receive what a worker sends, or whoever sends first, into an array of just that size."""
    receive_async(out, source, tag=tag, process_set=process_set).wait()
    return out


def _array(tensor: Array) -> Array:
    """Give an array that can be read at one go."""
    if not isinstance(tensor, np.ndarray | np.generic):
        raise TypeError(f"a NumPy array is needed, not {type(tensor).__name__}")
    return np.asarray(tensor, order="C")


def _scaled(array: Array, factor: float) -> Array:
    """Multiply as Horovod does: half types in float32, integers in float64, cut to integers."""
    if factor == 1.0:
        return array
    wide = array.astype(np.result_type(array.dtype, np.float32))
    product: Array = (wide * factor).astype(array.dtype)
    return product


def _wire(array: Array) -> Array:
    """Give the array as it travels: a complex number is two floats, along a last dimension."""
    if array.dtype.kind != "c":
        return array
    parts: Array = array[..., None].view(array.real.dtype)
    return parts


def _rows_wire(array: Array) -> Array:
    """Give an array of rows as it travels: a complex scalar is one row, not two."""
    return _wire(np.atleast_1d(array))


def _unwire(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.view(dtype)[..., 0] if dtype.kind == "c" else array


def _sum_wire(array: Array, op: Op) -> Array:
    if array.dtype.kind == "c" and op not in (Sum, Average):
        raise TypeError(f"complex numbers have no {op.value}")
    return _wire(array)


def _result(flight: Flight, source: Array, factor: float = 1.0) -> Later[Array]:
    """Give the promise of an operation's array, of the source's dtype."""

    def finish(found: list[Any]) -> Array:
        array = _unwire(found[0], source.dtype)
        whole = factor * correction_of(flight, dtype_of(found[0].dtype))
        if whole != 1.0:
            array[...] = _scaled(array, whole)
        return array

    return Later([flight], finish)


def _grouped(
    start: Callable[..., Later[Array]],
    tensors: Iterable[Array],
    name: str | None,
    **options: Any,
) -> Later[list[Array]]:
    """Begin one operation for each array."""
    arrays = list(tensors)
    labels = labels_of(name, len(arrays))
    flights = [start(array, label, **options) for array, label in zip(arrays, labels, strict=True)]
    return Later(flights, lambda found: found)
