# SPDX-License-Identifier: Apache-2.0
"""Values that servers hold in an elastic job: each worker keeps its last answer as a copy.

Decides, when a view begins, whose copy the servers continue with, and which pushes it has. Must
never know what a push means, or why a view has ended. Theory of operation: a value is cut into
blocks that a server changes whole. Behind its elements a block has a counter for each worker, and
a push adds 1 to that of its sender. So an answer says which pushes it has, in the same bytes. All
answers of one block are states of one sequence, so the one with the largest counters has all
pushes that were acknowledged to any survivor. In the next view the servers begin with it, and a
push that was in flight is made again if its counter lacks it. Workers keep copies: no server
needs another, and nothing more is sent while nobody is lost.

Threads: one of the program at a time pushes and waits; fastps:view renews the values meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fastps.contract.contract import ANY_STALENESS, Policy
from fastps.errors import ConfigError, DuplicateNameError, Status
from fastps.session.tensor_spec import check_arrays
from fastps.types import checked_seconds, dtype_of
from fastps.worker.handle import Array, Handle, OperationHandle

MOST_BYTES = 64 << 10  # of a block: a frame between machines, which a server adds whole
BASE = 1 << 20  # of a counter's two digits: float32 has them exact, up to 2**40 pushes
_DIGITS = 2
_LOOK_S = 0.05  # between looks whether the view has changed


class CopiesHost(Protocol):
    """What copies ask of an elastic session."""

    rank: int
    size: int
    view: int
    first_place: tuple[int, int]
    config: Any

    def begin_here(self, verb: str, *args: Any, **options: Any) -> Any:
        """Start an operation in this view that does not begin again in the next one."""

    def in_a_view(self, call: Any) -> None:
        """Call a function while no view changes, again where that raises ViewChangedError."""

    def await_view_of_loss(self, handle: OperationHandle, view: int, timeout_s: float) -> None:
        """Await the view after one that an operation has failed with; raises why none comes."""

    def keep_copies(self, copies: ServerCopies) -> None:
        """Renew these values in each view from now on; blocks until all workers have them."""


class Block:
    """What a server changes at once: some elements of a value, and a counter for each worker.

    known: the last answer that has landed whole, of which `landing` is about to take the place.
    source: what is pushed. sent: pushes that have begun.
    """

    def __init__(self, name: str, elements: Array, n_slots: int) -> None:
        """elements: a part of the user's array, contiguous."""
        self.name, self.elements = name, elements
        self.source, self.landing, self.known = (
            np.zeros(elements.size + _DIGITS * n_slots, elements.dtype) for _ in range(3)
        )
        self.sent = 0
        self.has_value = False

    def fill(self, delta: Array | None, slot: int) -> None:
        """Make the next push of a worker: these changes, or none, and 1 for its counter."""
        n = self.elements.size
        self.source[:n] = 0 if delta is None else delta
        low, high = n + _DIGITS * slot, n + _DIGITS * slot + 1
        carries = (self.sent + 1) % BASE == 0
        self.source[low], self.source[high] = (1 - BASE, 1) if carries else (1, 0)

    def pushes(self) -> list[int]:
        """Return how many pushes of each worker the copy has."""
        digits = self.known[self.elements.size :].astype(np.int64).reshape(-1, _DIGITS)
        return (digits @ np.array([1, BASE])).tolist()  # type: ignore[no-any-return]

    @property
    def age(self) -> int:
        """How many pushes the copy has; -1: there is none."""
        return sum(self.pushes()) if self.has_value else -1

    def take(self) -> None:
        """Take what has landed as the copy."""
        self.known, self.landing = self.landing, self.known

    def hand_out(self) -> None:
        """Write the copy to the user's array."""
        self.elements[...] = self.known[: self.elements.size]


def donors_of(ages: Array) -> list[int]:
    """Return the rank whose copy of each block has most pushes; the lowest of several.

    ages: int64[ranks, blocks], of Block.age.
    """
    return np.argmax(ages, axis=0).tolist()  # type: ignore[no-any-return]


def cut(name: str, array: Array, n_slots: int, most_bytes: int) -> list[Block]:
    """Cut an array into blocks of at most so many bytes, their counters among them."""
    flat = array.reshape(-1)
    each = most_bytes // array.itemsize - _DIGITS * n_slots
    if each < 1:
        raise ConfigError(
            f"tensor {name!r} cannot be held by the servers of an elastic job of {n_slots} "
            f"workers in frames of {most_bytes} bytes: raise FASTPS_CHUNK_BYTES and "
            "FASTPS_PARTITION_BYTES"
        )
    return [
        Block(f"{name} [{begin}]", flat[begin : begin + each], n_slots)
        for begin in range(0, max(flat.size, 1), each)
    ]


class ServerCopies:
    """This worker's copies of the values that servers hold; see the head of this file."""

    def __init__(
        self, host: CopiesHost, names: Sequence[str], arrays: Sequence[Array], prefix: str
    ) -> None:
        """Make servers hold rank 0's arrays, and take them over here; blocks."""
        self._host, self._names, self._arrays, self._prefix = host, names, arrays, prefix
        self._slot, n_slots = host.first_place
        config = host.config
        most = min(config.partition_bytes, config.chunk_bytes or MOST_BYTES, MOST_BYTES)
        self._blocks: list[list[Block]] = [
            cut(name, array, n_slots, most) for name, array in zip(names, arrays, strict=True)
        ]
        self._all = [block for some in self._blocks for block in some]
        self._lock = threading.Lock()
        self._flight: Flight | None = None
        self._is_seeded = False
        for block in self._all:  # those of rank 0 are the values, unless it is lost by then
            block.known[: block.elements.size] = block.elements
            block.has_value = host.rank == 0
        specs = [(one.name, one.known.shape, dtype_of(one.known.dtype)) for one in self._all]
        host.in_a_view(lambda: host.begin_here(
            "declare", specs, policy=Policy.ACCUMULATE, staleness=ANY_STALENESS
        ))  # fmt: skip
        host.keep_copies(self)
        self._seed()
        self.hand_out()

    @property
    def name(self) -> str:
        """What they are called in errors and in names of operations."""
        return f"{self._prefix}copies"

    # ---- a view begins ----

    def _seed(self) -> None:
        """Let the servers begin with the values, unless a view has begun meanwhile that did."""
        donors = [0] * len(self._all)
        begun: list[OperationHandle] = []
        view = 0

        def start() -> None:
            nonlocal view
            view = self._host.view
            begun[:] = [] if self._is_seeded else self._broadcast(donors)

        def finish() -> None:
            if not self._is_seeded:
                self._take_seed(donors)

        while not self._is_seeded:
            self._host.in_a_view(start)
            if all(self._has_landed(one, view) for one in begun):
                self._host.in_a_view(finish)

    def _has_landed(self, handle: OperationHandle, view: int) -> bool:
        """Wait for an operation of a view; False: the view has ended, and the next has begun."""
        deadline = time.perf_counter() + self._host.config.op_timeout_s
        while (status := handle.wait_status(_LOOK_S)) is None:
            if self._host.view != view:
                return False
            if time.perf_counter() > deadline:
                raise handle.late(self._host.config.op_timeout_s)
        if status != Status.OK:
            self._host.await_view_of_loss(handle, view, self._host.config.start_timeout_s)
        return status == Status.OK

    def renewal(self) -> Iterator[OperationHandle]:
        """Renew the values in a view that begins, and make again what is in flight.

        Yields operations to wait for; where one fails, the next view renews the values again.
        """
        host = self._host
        with self._lock:
            if self._flight is not None:
                self._flight.take_landed()
        ages = np.zeros((host.size, len(self._all)), np.int64)
        ages[host.rank] = [block.age for block in self._all]
        yield host.begin_here(
            "push_pull_async", ages, f"{self.name} of {host.size}", average=False, out=ages
        )
        donors = donors_of(ages)
        yield from self._broadcast(donors)
        with self._lock:
            self._take_seed(donors)
            if self._flight is not None:
                self._flight.start_again()

    def _broadcast(self, donors: Sequence[int]) -> list[OperationHandle]:
        """Start to bring the donors' copies to the servers, and to where answers land here."""
        mine = self._host.rank
        return [
            self._host.begin_here(
                "broadcast_async",
                [
                    block.known if root == mine else block.landing
                    for block, donor in zip(self._all, donors, strict=True)
                    if donor == root
                ],
                root,
                [b.name for b, donor in zip(self._all, donors, strict=True) if donor == root],
            )
            for root in sorted(set(donors))
        ]

    def _take_seed(self, donors: Sequence[int]) -> None:
        for block, donor in zip(self._all, donors, strict=True):
            if donor != self._host.rank:
                block.take()
            block.has_value = True
        self._is_seeded = True

    # ---- operations ----

    def push_async(self, deltas: Sequence[Array | None]) -> Flight:
        """Start to add changes; see ServerParameters.push_async()."""
        for name, array, delta in zip(self._names, self._arrays, deltas, strict=True):
            if delta is not None:
                check_arrays(name, delta, array, None, average=False)
        self._check_free()
        for some, delta in zip(self._blocks, deltas, strict=True):
            flat, begin = None if delta is None else delta.reshape(-1), 0
            for block in some:
                end = begin + block.elements.size
                block.fill(None if flat is None else flat[begin:end], self._slot)
                begin = end
        return self._started(Flight(self, is_push=True))

    def read(self) -> list[Array]:
        """Return the servers' values as new arrays of one dimension; blocks."""
        self._check_free()
        self._started(Flight(self, is_push=False)).wait()
        with self._lock:
            return [
                np.concatenate([one.known[: one.elements.size] for one in some])
                for some in self._blocks
            ]

    def _check_free(self) -> None:
        if self._flight is not None:
            raise DuplicateNameError(
                f"{self._prefix!r}: a push is in flight already; wait for its handle first"
            )

    def _started(self, flight: Flight) -> Flight:
        def start() -> None:
            flight.start(self._all)
            if flight.is_push:
                for block in self._all:
                    block.sent += 1
            self._flight = flight

        self._host.in_a_view(start)
        return flight

    def hand_out(self) -> None:
        """Write the copies to the user's arrays, while no view replaces them."""
        with self._lock:
            for block in self._all:
                block.hand_out()


class Flight(Handle[None]):
    """A push or a pull in flight, which is made again in each view that its answer is not of."""

    def __init__(self, copies: ServerCopies, *, is_push: bool) -> None:
        self._lock = threading.Lock()
        self._copies, self.is_push = copies, is_push
        self._left: Sequence[Block] = ()
        self._part: OperationHandle

    def start(self, blocks: Sequence[Block]) -> None:
        """Start it in this view, for some blocks."""
        arrays, names = [one.landing for one in blocks], [one.name for one in blocks]
        begin = self._copies._host.begin_here
        if self.is_push:
            sources = [one.source for one in blocks]
            self._part = begin("push_pull_async", sources, names, average=False, out=arrays)
        else:
            self._part = begin("start_held", "start_pull", names, arrays)
        self._left = blocks

    def start_again(self) -> None:
        """Start what the copies of a view that begins do not have; the copies' lock is held."""
        slot = self._copies._slot
        left = [one for one in self._left if not self.is_push or one.pushes()[slot] < one.sent]
        if left:
            self.start(left)
        else:
            self._copies._flight = None

    def take_landed(self) -> bool:
        """Take the answer if it has landed; the copies' lock is held."""
        if not self._part.poll() or self._part.wait_status(0.0) != Status.OK:
            return False
        for block in self._left:
            block.take()
        self._copies._flight = None
        return True

    def _is_over(self) -> bool:
        with self._copies._lock:
            return self._copies._flight is not self or self.take_landed()

    def _collect(self, timeout_s: float | None) -> None:
        host = self._copies._host
        limit_s = host.config.op_timeout_s if timeout_s is None else checked_seconds(timeout_s)
        deadline = time.perf_counter() + limit_s
        while True:
            view, part = host.view, self._part  # in this order: see ElasticHandle.start()
            left_s = max(deadline - time.perf_counter(), 0.0)
            status = part.wait_status(left_s)
            if self._is_over():
                return
            if part is not self._part:
                continue
            if status is None:
                raise part.late(limit_s)
            if status != Status.OK:
                host.await_view_of_loss(part, view, left_s)

    def _make(self, found: None) -> None:
        if self.is_push:
            self._copies.hand_out()
