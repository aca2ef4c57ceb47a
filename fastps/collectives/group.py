# SPDX-License-Identifier: Apache-2.0
"""Groups: the operations among the members of one process set, on NumPy arrays.

Checks arrays and chooses the schedule (schedule.py); group_base.py starts it on the engine, and
keeps it for the next of the same sizes. Members are numbered within the group. Threads: any;
operations without a name have to be started in one order, the same on all members.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives import schedule as plans
from fastps.collectives._calls import cached, tell_apart
from fastps.collectives.descriptions import Brought, brought_of
from fastps.collectives.group_base import MANY_KINDS, GroupBase, ReadyKind
from fastps.collectives.overlap import check_arrays, is_apart
from fastps.collectives.schedule import Kind, Place, Schedule, Step
from fastps.errors import ArgumentError
from fastps.types import DType, Op, ReduceOp
from fastps.worker.handle import Array, OperationHandle

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation, Repeated

ANYBODY = -1

_NEIGHBOR_RULES = {
    "neighbor_allgather": None, "neighbor_coded": None,
    "neighbor_trimmed_mean": ReduceOp.TRIMMED_MEAN,
}  # fmt: skip


class Group(GroupBase):
    """What the members of a process set do; made by Session.group() or add_process_set().

    Every operation begins at once and gives a Handle.
    """

    @staticmethod
    def repeated_of(operation: Operation, arrays: list[Array], result: Any) -> Repeated | None:
        """Return what starts an operation once more, for the cache of calls; see _repeated.pxi."""
        from fastps.collectives._exchange import repeated_of  # noqa: PLC0415  (few need it at once)

        return repeated_of(operation, arrays, result)

    # ---- operations of all members ----

    @cached
    def allreduce(
        self,
        array: Array,
        out: Array | None = None,
        *,
        op: Op = Op.AVERAGE,
        name: str | None = None,
        dtype: DType | None = None,
        divisor: int | None = None,
        priority: int = 0,
        brought: Brought = (),
    ) -> OperationHandle:
        """Start to reduce the arrays of all members, by a sum or another op, on all.

        out: None for a new array, array itself for in place. divisor: what a sum is divided by,
        for an average the size. brought: the arrays that it consists of, if they are several. Rank
        order: the same bits on all members and in every run.
        """
        out = self._like(array) if out is None else out
        self._check_size("out", out, array.size)
        key = ("allreduce", array.nbytes, array.itemsize)
        return self._fold(
            key, array, out, out,
            lambda: plans.allreduce(
                self.rank, self.size, array.nbytes, array.itemsize, self.machines
            ),
            op=op, name=name, dtype=dtype, divisor=divisor, priority=priority, brought=brought,
        )  # fmt: skip

    @cached
    def reduce(
        self,
        array: Array,
        out: Array | None = None,
        *,
        root: int,
        op: Op = Op.AVERAGE,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to reduce the arrays of all members on the root; others' out is not written."""
        root = self._member(root, "root")
        if self.rank != root:
            out = None
        elif out is None:
            out = self._like(array)
        else:
            self._check_size("out", out, array.size)
        key = ("reduce", array.nbytes, array.itemsize, root)
        return self._fold(
            key, array, out, array if out is None else out,
            lambda: plans.reduce(
                self.rank, self.size, array.nbytes, array.itemsize, root, self.machines
            ),
            op=op, name=name, dtype=dtype, root=root,
        )  # fmt: skip

    @cached
    def reducescatter(
        self,
        array: Array,
        out: Array | None = None,
        *,
        counts: Sequence[int] | None = None,
        op: Op = Op.AVERAGE,
        name: str | None = None,
        dtype: DType | None = None,
        brought: Brought = (),
    ) -> OperationHandle:
        """Start to reduce the arrays of all members, each member's block on that member.

        counts: elements of each member's block; None: even, and the array's size is divisible.
        brought: the arrays that it consists of, if they are several.
        """
        sizes = self._counts(counts, array.size)
        if out is None:
            out = self._host.empty((sizes[self.rank],), array.dtype)
        self._check_size("out", out, sizes[self.rank])
        blocks = self._bytes(sizes, array)
        return self._fold(
            ("reducescatter", *blocks, array.itemsize), array, out, out,
            lambda: plans.reducescatter(self.rank, blocks, array.itemsize, self.machines),
            op=op, name=name, dtype=dtype, brought=brought,
        )  # fmt: skip

    @cached
    def allgather(
        self,
        array: Array,
        out: Array | None = None,
        *,
        counts: Sequence[int] | None = None,
        name: str | None = None,
        dtype: DType | None = None,
        brought: Brought = (),
    ) -> OperationHandle:
        """Start to gather the arrays of all members, concatenated, on all.

        counts: elements of each member's array; None: all as many as ours. An array that lies in
        out, where it is to land, is not copied. brought: what the array tells of, for errors.
        """
        sizes = [array.size] * self.size if counts is None else list(counts)
        self._check_size("array", array, self._counts(sizes, sum(sizes))[self.rank])
        if out is None:
            out = self._host.empty((sum(sizes),), array.dtype)
        self._check_size("out", out, sum(sizes))
        blocks = self._bytes(sizes, array)
        return self._move(
            ("allgather", *blocks), array, out,
            lambda: plans.allgather(self.rank, blocks, self.machines),
            name=name, dtype=dtype, place=sum(sizes[: self.rank]), brought=brought,
        )  # fmt: skip

    @cached
    def gather(
        self,
        array: Array,
        out: Array | None = None,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to gather the arrays of all members on the root; counts as allgather()."""
        root = self._member(root, "root")
        sizes = [array.size] * self.size if counts is None else list(counts)
        self._check_size("array", array, self._counts(sizes, sum(sizes))[self.rank])
        if self.rank != root:
            out = None
        elif out is None:
            out = self._host.empty((sum(sizes),), array.dtype)
        if out is not None:
            self._check_size("out", out, sum(sizes))
        blocks = self._bytes(sizes, array)
        return self._move(
            ("gather", *blocks, root), array, out,
            lambda: plans.gather(self.rank, blocks, root),
            name=name, dtype=dtype, root=root,
        )  # fmt: skip

    @cached
    def scatter(
        self,
        array: Array | None,
        out: Array,
        *,
        root: int,
        counts: Sequence[int] | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to scatter the root's array, a block to each member; counts: elements of each."""
        root = self._member(root, "root")
        sizes = [out.size] * self.size if counts is None else list(counts)
        self._check_size("out", out, self._counts(sizes, sum(sizes))[self.rank])
        if self.rank != root:
            array = None
        elif array is None:
            raise ValueError("scatter() needs the array on the root, got None")
        else:
            self._check_size("array", array, sum(sizes))
        blocks = self._bytes(sizes, out)
        return self._move(
            ("scatter", *blocks, root), array, out,
            lambda: plans.scatter(self.rank, blocks, root),
            name=name, dtype=dtype, root=root, like=out,
        )  # fmt: skip

    @cached
    def alltoall(
        self,
        array: Array,
        out: Array | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        name: str | None = None,
        dtype: DType | None = None,
    ) -> OperationHandle:
        """Start to send each member its block, and receive those of all in their order.

        send_counts: elements of our array for each member; receive_counts: those that each has
        for us; None: even, and the array's size is divisible.
        """
        sends = self._counts(send_counts, array.size)
        receives = self._counts(receive_counts, array.size if out is None else out.size)
        if out is None:
            out = self._host.empty((sum(receives),), array.dtype)
        self._check_size("out", out, sum(receives))
        here, there = self._bytes(sends, array), self._bytes(receives, array)
        return self._move(
            ("alltoall", *here, *there), array, out,
            lambda: plans.alltoall(self.rank, here, there, self.machines),
            name=name, dtype=dtype,
        )  # fmt: skip

    @cached
    def broadcast(
        self, array: Array, *, root: int, name: str | None = None, dtype: DType | None = None
    ) -> OperationHandle:
        """Start to copy the root's array into everybody's, in place."""
        root = self._member(root, "root")
        is_root = self.rank == root
        return self._move(
            ("broadcast", array.nbytes, root),
            array if is_root else None,
            None if is_root else array,
            lambda: plans.broadcast(self.rank, self.size, array.nbytes, root, self.machines),
            name=name, dtype=dtype, result=array, root=root,
        )  # fmt: skip

    @cached
    def barrier(self, *, name: str | None = None) -> OperationHandle:
        """Start to wait until every member has begun."""
        return self._move(
            ("barrier",), None, None, lambda: plans.barrier(self.rank, self.size),
            name=name, dtype=None, result=None,
        )  # fmt: skip

    # ---- operations among some of them, whose steps others make ----

    def among_neighbors(
        self,
        key: tuple[object, ...],
        make: Callable[[], Schedule],
        array: Array,
        out: Array,
        *,
        name: str | None = None,
        dtype: DType | None = None,
        divisor: int = 1,
        weights: Sequence[float] = (),
        goes_on: bool = False,
    ) -> OperationHandle:
        """Start what a schedule says; every member does, though it may have nothing to do.

        key: one of KINDS, and all that the schedule follows from. divisor: of folds without
        weights; how many a trimmed mean leaves out at each end. goes_on: messages of members
        that are lost are left out, and the handle names them.
        """
        if np.may_share_memory(array, out):
            raise ValueError("array and out overlap; pass two that are apart")
        code = self._dtype(array, dtype)
        rule = _NEIGHBOR_RULES.get(str(key[0]), ReduceOp.SUM)
        return self._start(
            key, make, array, out, out,
            channel=self.channels.of(name), label=self._label(key, name), name=name, dtype=code,
            rule=rule, divisor=divisor, weights=weights, goes_on=goes_on,
            brought=brought_of(array, dtype=code),
        )  # fmt: skip

    # ---- operations of two ----

    @cached
    def send(
        self, array: Array, target: int, *, tag: int = 0, dtype: DType | None = None,
        priority: int = 0,
    ) -> OperationHandle:  # fmt: skip
        """Start to send an array to a member; done when it may be changed again.

        Messages of two members with one tag arrive in the order in which they were sent; of
        several tags, and of all else on a link, what has a larger priority goes first.
        """
        peer = self._member(target, "target")
        return self._message(Kind.SEND, array, peer, tag, dtype, priority)

    @cached
    def receive(
        self, out: Array, source: int | None = None, *, tag: int = 0, dtype: DType | None = None
    ) -> OperationHandle:
        """Start to receive an array of just this size; None: from whoever sends first.

        The handle's `source` tells who that was, when it is done.
        """
        peer = ANYBODY if source is None else self._member(source, "source")
        return self._message(Kind.RECEIVE, out, peer, tag, dtype)

    def _message(
        self, kind: Kind, array: Array, peer: int, tag: int, dtype: DType | None,
        priority: int = 0,
    ) -> OperationHandle:  # fmt: skip
        if array.nbytes > plans.MAX_MESSAGE_BYTES:
            return self._messages(kind, array, peer, tag, dtype, priority)
        key = kind, array.nbytes, peer, operator.index(tag), array.dtype, dtype
        ready, channel, label = self._routes.get(key) or self._route(*key)
        check_arrays(label, array, None)
        self._host.check_usable()
        source, out = (array, None) if kind is Kind.SEND else (None, array)
        operation = self._launch(
            ready, channel, label, source, out, priority=priority, is_numbered=True
        )
        return self._handle((operation,), array)

    def _route(
        self, kind: Kind, nbytes: int, peer: int, tag: int, kept: np.dtype[Any],
        dtype: DType | None,
    ) -> tuple[ReadyKind, int, str]:  # fmt: skip
        """Make what all messages of one size to or from a member have in common."""
        if peer == self.rank:
            raise ValueError("cannot send to, or receive from, oneself")
        place = Place.INPUT if kind is Kind.SEND else Place.OUTPUT
        steps = Schedule((Step(kind, peer, 0, place, 0, nbytes),), 0)
        code = self._dtype(np.empty(0, kept), dtype)
        key = ("send", int(kind), nbytes, peer, None, code)
        ready = self._kind(key, lambda: steps, None, code)
        words = "send" if kind is Kind.SEND else "receive"
        if len(self._routes) >= MANY_KINDS:
            self._routes.clear()
        route = ready, self.channels.of(f"messages {tag}"), f"{words} with tag {tag}{self.of}"
        self._routes[kind, nbytes, peer, tag, kept, dtype] = route
        return route

    def _messages(
        self, kind: Kind, array: Array, peer: int, tag: int, dtype: DType | None, priority: int
    ) -> OperationHandle:
        """Send or receive what is too long for one message, in several."""
        if peer == ANYBODY:
            raise ValueError(
                f"receiving {array.nbytes} bytes needs a source, for they come in several "
                "messages; pass source="
            )
        flat, step = array.reshape(-1), plans.MAX_MESSAGE_BYTES // array.itemsize
        parts = [
            self._message(kind, flat[start : start + step], peer, tag, dtype, priority)
            for start in range(0, flat.size, step)
        ]
        operations = [operation for part in parts for operation in part.operations]
        return self._handle(operations, array)

    # ---- starting ----

    def _fold(
        self,
        key: tuple[object, ...],
        array: Array,
        out: Array | None,
        result: Array,
        make: Callable[[], Schedule],
        *,
        op: Op,
        name: str | None,
        dtype: DType | None,
        divisor: int | None = None,
        priority: int = 0,
        brought: Brought = (),
        root: int = -1,
    ) -> OperationHandle:
        """Start an operation that sums."""
        code = self._dtype(array, dtype)
        if not isinstance(op, Op):
            raise TypeError(
                f"op must be fastps.Average, Sum, Min, Max or another fastps.Op, got {op!r}"
            )
        if op is Op.ADASUM:
            raise ArgumentError(
                "op=Adasum is supported by allreduce() and DistributedOptimizer() only"
            )
        rule = op.reduction
        rule.check(code)
        if divisor is None:
            divisor = self.size if op is Op.AVERAGE else 1
        if op is Op.AVERAGE and code is DType.BOOL:
            raise TypeError("booleans have no average")
        if out is not None and out is not array and np.may_share_memory(array, out):
            raise ValueError("array and out overlap; pass the same array, or two that are apart")
        return self._start(
            key, make, array, out, result,
            channel=self.channels.of(name), label=self._label(key, name),
            name=name, dtype=code, rule=rule, divisor=divisor, priority=priority, root=root,
            brought=brought or brought_of(array, dtype=code),
        )  # fmt: skip

    def _move(
        self,
        key: tuple[object, ...],
        array: Array | None,
        out: Array | None,
        make: Callable[[], Schedule],
        *,
        name: str | None,
        dtype: DType | None,
        result: Array | None = None,
        place: int | None = None,
        root: int = -1,
        like: Array | None = None,
        brought: Brought = (),
    ) -> OperationHandle:
        """Start an operation that moves bytes; place: element of out where ours may lie.

        like: what others bring the like of, if it is not the array.
        """
        if array is not None and out is not None and not is_apart(array, out, place):
            raise ValueError("array and out overlap; pass two that are apart")
        some = array if array is not None else out
        code = None if some is None else self._dtype(some, dtype)
        if code is not None and not brought:
            brought = brought_of(some if like is None else like, dtype=code)
        if result is None:
            result = out if out is not None else array
        return self._start(
            key, make, array, out, result,
            channel=self.channels.of(name), label=self._label(key, name), name=name, dtype=code,
            brought=brought, root=root,
        )  # fmt: skip

    # ---- checks ----

    def _like(self, array: Array) -> Array:
        return self._host.empty(array.shape, array.dtype)

    def _member(self, index: int, what: str) -> int:
        if not 0 <= operator.index(index) < self.size:
            raise ValueError(f"{what} must be from 0 to {self.size - 1}, got {index}")
        return operator.index(index)

    def _counts(self, counts: Sequence[int] | None, total: int) -> list[int]:
        if counts is None:
            if total % self.size:
                raise ValueError(
                    f"{total} elements do not divide evenly among {self.size} members; pass "
                    "counts="
                )
            return [total // self.size] * self.size
        found = [operator.index(count) for count in counts]
        if len(found) != self.size or min(found) < 0 or sum(found) != total:
            raise ValueError(
                f"counts must be {self.size} numbers of elements, {total} in all, got {found}"
            )
        return found

    def _check_size(self, what: str, array: Array, size: int) -> None:
        if array.size != size:
            raise ValueError(f"{what} must have {size} elements, got {array.size}")

    def _bytes(self, counts: Sequence[int], array: Array) -> list[int]:
        return [count * array.itemsize for count in counts]


tell_apart(Op, DType, Group)
