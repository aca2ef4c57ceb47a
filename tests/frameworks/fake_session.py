# SPDX-License-Identifier: Apache-2.0
"""A job without processes: ranks are threads, sums are made by whoever arrives last.

Has the face of fastps.session.session.Session that plugins use, adds in rank order with NumPy, and
can be told to fail. It checks what the real session checks of its callers: contiguous arrays, a
name in flight once, equal shapes and dtypes. Threads: one per rank, all state under one condition.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fastps.collectives.objects import decode_of, encode_for_all
from fastps.errors import DuplicateNameError, MismatchError, NotInitializedError, StallError
from fastps.types import DType, dtype_of

TIMEOUT_S = 20.0


@dataclass
class Operation:
    """One collective of one name: what came in and what goes out."""

    name: str
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    outs: dict[int, np.ndarray] = field(default_factory=dict)
    fingerprint: tuple[Any, ...] = ()
    error: Exception | None = None
    is_done: bool = False


@dataclass(frozen=True)
class Event:
    """What a rank asked for, in order; tests read these."""

    kind: str
    rank: int
    name: str
    priority: int = 0
    submit: int = 0


class FakeCluster:
    """The shared half: N ranks, one table of operations."""

    can_share = False  # whether its sessions give shared memory

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.operations: dict[tuple[str, int], Operation] = {}
        self.rounds: dict[tuple[int, str], int] = {}
        self.declared: dict[str, tuple[Any, ...]] = {}
        self.events: list[Event] = []
        self.failures: list[tuple[re.Pattern[str], Exception]] = []
        self.submits = 0
        self.is_held = False
        self.shared: list[np.ndarray] = []
        self.sent: list[np.ndarray] = []
        self._local = threading.local()

    def fail(self, pattern: str, error: Exception) -> None:
        """Let operations whose name matches end with an error."""
        self.failures.append((re.compile(pattern), error))

    def hold(self) -> None:
        """Keep all operations in flight until release()."""
        with self.changed:
            self.is_held = True

    def release(self) -> None:
        """Let operations end again."""
        with self.changed:
            self.is_held = False
            for operation in list(self.operations.values()):
                self._finish_if_complete(operation)
            self.changed.notify_all()

    def current(self) -> FakeSession:
        """Stand in for fastps.session.current.current()."""
        session = getattr(self._local, "session", None)
        if session is None:
            raise NotInitializedError("init() has not been called in this process")
        return session

    def enter(self, rank: int) -> FakeSession:
        """Make the calling thread a rank."""
        self._local.session = FakeSession(self, rank)
        return self._local.session

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Run body(rank) as all ranks at once; give the results, raise the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            self.enter(rank)
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results

    def names(self, rank: int = 0, kind: str = "push_pull") -> list[str]:
        """List the names a rank sent, in order."""
        return [e.name for e in list(self.events) if e.rank == rank and e.kind == kind]

    def submit(
        self, kind: str, rank: int, array: np.ndarray, name: str, priority: int, **how: Any
    ) -> Operation:
        out, dtype, scale, root = how["out"], how["dtype"], how["average"], how["root"]
        code = dtype if dtype is not None else dtype_of(array.dtype)
        if not (array.flags.c_contiguous and out.flags.c_contiguous):
            raise ValueError(f"array of {name!r} is not contiguous")
        fingerprint = (kind, int(code), array.shape, scale, root)
        with self.changed:
            known = self.declared.setdefault(name, (array.shape, int(code)))
            if known != (array.shape, int(code)):
                raise MismatchError(f"{name!r} declared as {known}, got {fingerprint}")
            place = self.rounds.get((rank, name), 0)
            before = self.operations.get((name, place - 1))
            if before is not None and not before.is_done:
                raise DuplicateNameError(f"{name!r} is in flight already")
            self.rounds[rank, name] = place + 1
            operation = self.operations.setdefault((name, place), Operation(name))
            operation.fingerprint = operation.fingerprint or fingerprint
            if operation.fingerprint != fingerprint:
                operation.error = MismatchError(f"{name!r}: {fingerprint}")
                operation.is_done = True
            operation.arrays[rank], operation.outs[rank] = array, out
            kind = "control" if name == "barrier" or ".alike" in name else kind
            if kind == "push_pull":
                self.sent.append(array)
            self.events.append(Event(kind, rank, name, priority, how["number"]))
            self._finish_if_complete(operation)
            self.changed.notify_all()
        return operation

    def _finish_if_complete(self, operation: Operation) -> None:
        if self.is_held or operation.is_done or len(operation.arrays) < self.size:
            return
        for pattern, error in self.failures:
            if pattern.search(operation.name):
                operation.error = error
        if operation.error is None:
            _reduce(operation)
        operation.is_done = True
        del self.operations[operation.name, self._place_of(operation)]

    def _place_of(self, operation: Operation) -> int:
        return next(p for (n, p), o in self.operations.items() if o is operation)


def _reduce(operation: Operation) -> None:
    kind, code, _, average, root = operation.fingerprint
    ranks = sorted(operation.arrays)
    views = [_typed(operation.arrays[rank], code) for rank in ranks]
    result = views[root].copy() if kind == "broadcast" else _sum(views, average)
    for rank in ranks:
        _typed(operation.outs[rank], code)[...] = result


def _typed(array: np.ndarray, code: int) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if code == DType.BFLOAT16 else array


def _sum(views: list[np.ndarray], average: bool) -> np.ndarray:
    dtype = views[0].dtype
    if dtype == np.bool_:
        return np.logical_or.reduce(views)
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    total = views[0].astype(wide)
    for view in views[1:]:
        total = total + view.astype(wide)
    if average and np.dtype(wide).kind == "f":
        total = total * np.asarray(1 / len(views), dtype=wide)
    elif average:
        total = total // len(views)
    return np.asarray(total).astype(dtype)


class FakeHandle:
    """Ends when all its operations have."""

    tickets = ()  # averages are corrected by them after a join(), which is not here

    def __init__(self, cluster: FakeCluster, operations: list[Operation], many: bool) -> None:
        self._cluster = cluster
        self._operations = operations
        self._rank = cluster.current().rank
        self._many = many
        self.waits = 0
        self._after: list[Any] = []

    def then(self, after: Any) -> FakeHandle:
        self._after.append(after)
        return self

    def poll(self) -> bool:
        with self._cluster.changed:
            return all(operation.is_done for operation in self._operations)

    def wait(self, timeout_s: float | None = None) -> Any:
        limit = TIMEOUT_S if timeout_s is None else timeout_s
        with self._cluster.changed:
            self.waits += 1
            done = self._cluster.changed.wait_for(
                lambda: all(operation.is_done for operation in self._operations), limit
            )
        if not done:
            raise StallError(f"waited {limit} s")
        for operation in self._operations:
            if operation.error is not None:
                raise operation.error
        outs = [operation.outs[self._rank] for operation in self._operations]
        found = outs if self._many else outs[0]
        while self._after:
            self._after.pop(0)(found)
        return found


class FakeSession:
    """One rank's half."""

    is_elastic = False
    expected, joins = None, 0

    def __init__(self, cluster: FakeCluster, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank
        self.size = cluster.size
        self.local_rank = rank
        self.local_size = cluster.size

    uneven = SimpleNamespace(has_rounds=False)
    steps = SimpleNamespace(mark=lambda: None, offer=lambda exchange: None)
    config = SimpleNamespace(
        enable_async=False, check_weights=False, goes_on=False, min_compress_bytes=65536
    )

    @property
    def can_share(self) -> bool:
        return self._cluster.can_share

    def root_of(self, root_rank: int) -> int:
        return root_rank

    def is_root(self, root: int) -> bool:
        return root == self.rank

    def empty(self, shape: tuple[int, ...], code: DType) -> np.ndarray:
        kind = np.uint16 if code == DType.BFLOAT16 else np.dtype(DType(code).name.lower())
        array = np.empty(shape, kind)
        array.view(np.uint8).fill(0xFF)  # what nobody has written is NaN
        self._cluster.shared.append(array)
        return array

    def result_like(self, array: np.ndarray) -> np.ndarray:
        return np.empty_like(array)

    def declare(self, specs: Sequence[tuple[str, tuple[int, ...], DType]]) -> None:
        with self._cluster.changed:
            for name, shape, code in specs:
                known = self._cluster.declared.setdefault(name, (shape, int(code)))
                if known != (shape, int(code)):
                    raise MismatchError(f"{name!r} declared as {known}, got {shape, code}")
                self._cluster.events.append(Event("declare", self.rank, name))

    def is_free_for(self, name: str, shape: Any, code: DType, parts: Any = None) -> bool:
        return self._cluster.declared.get(name, (shape, int(code))) == (shape, int(code))

    def push_pull_async(
        self, tensor: Any, name: Any, *, average=True, priority=0, out=None, dtype=None
    ) -> FakeHandle:
        return self._submit("push_pull", tensor, name, average, priority, out, dtype, None)

    def broadcast_async(self, tensor: Any, root_rank: int, name: Any, *, dtype=None):
        return self._submit("broadcast", tensor, name, False, 0, tensor, dtype, root_rank)

    def _submit(self, kind, tensor, name, average, priority, out, dtype, root) -> FakeHandle:
        many = not isinstance(tensor, np.ndarray)
        arrays = list(tensor) if many else [tensor]
        names = list(name) if many else [name]
        priorities = list(priority) if isinstance(priority, Sequence) else [priority] * len(names)
        outs = list(out) if many else [np.empty_like(tensor) if out is None else out]
        with self._cluster.changed:
            self._cluster.submits += 1
            number = self._cluster.submits
        operations = [
            self._cluster.submit(
                kind,
                self.rank,
                array,
                label,
                urgency,
                out=into,
                dtype=dtype,
                average=average,
                root=root,
                number=number,
            )
            for array, label, urgency, into in zip(arrays, names, priorities, outs, strict=True)
        ]
        return FakeHandle(self._cluster, operations, many)

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: str = "object") -> Any:
        blob = encode_for_all(obj) if self.rank == root_rank else b""
        size = np.array(len(blob), dtype=np.int64)
        self.broadcast_async(size, root_rank, f"{name}/size").wait()
        data = np.zeros(int(size), dtype=np.uint8)
        if self.rank == root_rank:
            data[:] = np.frombuffer(blob, dtype=np.uint8)
        with self._cluster.changed:
            self._cluster.declared.pop(f"{name}/data", None)
        self.barrier()
        self.broadcast_async(data, root_rank, f"{name}/data").wait()
        return decode_of(root_rank, data.tobytes())

    def version_of(self, name: str) -> int:
        return 0

    def barrier(self) -> None:
        self.push_pull_async(np.zeros(1), "barrier").wait()
