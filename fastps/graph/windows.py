# SPDX-License-Identifier: Apache-2.0
"""The windows of a session by name: what all workers agree on, and operations on a window.

Takes C-contiguous arrays; chooses memory, weights and which neighbours are reached by memory, and
starts actions on the engine (_windows.pyx). A window keeps the graph on which it was created.
Threads: any; all workers create and free windows, in one order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fastps.collectives._exchange import Exchange
from fastps.collectives.group import Group
from fastps.collectives.staged import Resumable
from fastps.config.words import encoded_name
from fastps.errors import FastPSError, MismatchError, StallError, Status
from fastps.graph._windows import Window, WindowAction, Windows, buffer_offset, window_bytes
from fastps.graph.neighbors import Neighbors
from fastps.graph.survivor_weights import remaining
from fastps.graph.weights import Targets
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker._engine import WorkerEngine
from fastps.worker.handle import Array, Explain, OperationHandle, Waiting

if TYPE_CHECKING:
    from fastps.transport._link import Mapping as Memory
    from fastps.transport.shm import Arena

LINE = 64  # window memory begins at a multiple of it


class _Host(Protocol):
    """What windows need of their session."""

    @property
    def me(self) -> int: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def arena(self) -> Arena | None: ...
    @property
    def arenas(self) -> Mapping[int, Memory]: ...
    @property
    def timeout_s(self) -> float: ...
    def reach(self, members: Sequence[int]) -> None: ...
    def living(self) -> Group: ...
    def start_gather(self, obj: Any, name: str) -> Resumable[dict[int, Any]]: ...
    def meet(self, name: str) -> None: ...
    def check_usable(self) -> None: ...
    def waiting_by(self, explain: Explain) -> Waiting: ...
    def explain(self, operation: Any, status: int | None, timeout_s: float) -> FastPSError: ...
    def no_window(self, name: str, others: Sequence[str]) -> Exception: ...


@dataclass(frozen=True)
class CreatedWindow:
    """The engine's window, the user's array, and the weights of an update by default.

    user: the framework's object over that array.
    """

    window: Window
    array: Array
    dtype: DType
    self_weight: float
    weights: dict[int, float]
    user: Any


class NewWindow(NamedTuple):
    """A window that other workers may count already, whether or not this one does."""

    window: Window
    array: Array
    gathering: Resumable[dict[int, Any]]

    def is_over(self, array: Array) -> bool:
        """Return whether it is over an array."""
        known = self.array
        return (array.ctypes.data, array.shape, array.dtype) == (
            known.ctypes.data,
            known.shape,
            known.dtype,
        )


class WindowTable:
    """The windows of one worker."""

    def __init__(self, host: _Host, group: Group, neighbors: Neighbors) -> None:
        self._host, self._group, self._neighbors = host, group, neighbors
        self._own_exchange: Exchange | None = None  # of a job of one worker, which has no other
        if group.size == 1:
            engine = WorkerEngine(me=0, n_members=1, lanes={})
            self._own_exchange = Exchange(me=0, n_members=1, engine=engine)
        self._engine = Windows(self._own_exchange or host.exchange)
        self._created: dict[str, CreatedWindow] = {}
        self._late: dict[str, NewWindow] = {}  # whose creation has timed out
        self._generations: Counter[str] = Counter()
        self.has_p = False  # whether P travels with values

    # ---- creating and freeing; all workers ----

    @property
    def names(self) -> list[str]:
        """List the names of the windows that there are."""
        return sorted(self._created)

    def create(
        self, array: Array, name: str, *, zero_init: bool, dtype: DType | None = None,
        user: Any = None,
    ) -> bool:  # fmt: skip
        """Create a window over an array; False where the name is taken.

        Workers that are lost have no part in it, and their weights are divided among the others.
        After a StallError or Ctrl-C, the next call still waits for the same window. user: see
        CreatedWindow.
        """
        self._host.check_usable()
        if name in self._created:
            return False
        _check_array(array, name)
        code = dtype_of(array.dtype) if dtype is None else dtype
        new = self._late.pop(name, None) or self._begin(array, name, code, zero_init=zero_init)
        if not new.is_over(array):
            self._late[name] = new
            raise ValueError(
                f"window {name!r}: its creation over another array has timed out, and other "
                "workers may count that one; call win_create() with the same array again"
            )
        window, graph = new.window, self._neighbors.graph
        try:
            shapes = new.gathering.wait()
        except (StallError, KeyboardInterrupt):
            self._late[name] = new
            raise
        self._agree(name, shapes)
        window.connect(*self._places(shapes, array.nbytes), keep=dict(self._host.arenas))
        sources = [one for one in window.sources if one in shapes]  # some may be lost by now
        if graph.is_weighted:
            own, weights = _divided(*graph.topology.receive_weights(self._host.me), sources)
        else:
            own = 1 / (len(sources) + 1)
            weights = dict.fromkeys(sources, own)
        self._created[name] = CreatedWindow(window, array, code, own, weights, user)
        return True

    def _begin(self, array: Array, name: str, code: DType, *, zero_init: bool) -> NewWindow:
        """Make this worker's part of a window, and start to tell others of it.

        It is counted once that has begun: so all workers count the same windows of a name.
        """
        me, topology = self._host.me, self._neighbors.graph.topology
        left = self._host.living().ranks
        sources = [one for one in topology.in_neighbors(me) if one in left]
        targets = [one for one in topology.out_neighbors(me) if one in left]
        if self._own_exchange is None:
            self._host.reach([*{*sources, *targets}])
        room = self._room(window_bytes(array.nbytes, len(sources)))
        window = self._make(name, array, room, sources, code, zero_init=zero_init)
        gathering = self._host.start_gather(
            [array.nbytes, int(code), sources, targets, self._offset(room), self._offset(array)],
            f"win_create {name}",
        )
        self._generations[name] += 1
        return NewWindow(window, array, gathering)

    def _room(self, nbytes: int) -> Array:
        """Return memory for buffers: shared with the neighbours of this machine, if any is."""
        if self._host.arena is not None:
            block, _ = self._host.arena.allocate(nbytes)
            return np.frombuffer(block, np.uint8, nbytes)  # type: ignore[call-overload, no-any-return]
        room = np.zeros(nbytes + LINE, np.uint8)
        start = -room.ctypes.data % LINE
        return room[start : start + nbytes]

    def _offset(self, array: Array) -> int:
        """Return the offset of an array in our arena, or -1 if it is elsewhere."""
        if self._host.arena is None or not array.nbytes:
            return -1
        mapping = self._host.arena.mapping
        offset = int(array.ctypes.data) - mapping.address
        return offset if 0 <= offset <= mapping.nbytes - array.nbytes else -1

    def _make(
        self, name: str, array: Array, room: Array, sources: Sequence[int], code: DType, *,
        zero_init: bool,
    ) -> Window:  # fmt: skip
        from fastps.reduce import reduce_kernel  # noqa: PLC0415  (few need kernels)

        mix = reduce_kernel(ReduceOp.MIX, code) if ReduceOp.MIX.has_meaning(code) else 0
        text = b"window %d " % (self._generations[name] + 1) + encoded_name(name)
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return Window(
            self._engine, name, number, _bytes_of(array), room, sources, itemsize=code.itemsize,
            dtype=int(code), sum=reduce_kernel(ReduceOp.SUM, code), mix=mix, zero_init=zero_init,
        )  # fmt: skip

    def _agree(self, name: str, shapes: Mapping[int, Sequence[Any]]) -> None:
        """Raise MismatchError, on all workers, where windows differ in size, type or edges.

        shapes: by worker [bytes, dtype, sources, targets, offsets of window and array], without
        those that were lost since some workers listed their neighbours.
        """
        first = next(iter(shapes))
        for rank, (nbytes, code, sources, targets, *_) in shapes.items():
            if [nbytes, code] != list(shapes[first][:2]):
                raise MismatchError(
                    f"window {name!r}: worker {rank} has {nbytes} bytes of {DType(code).name}, "
                    f"and worker {first} {shapes[first][0]} of {DType(shapes[first][1]).name}; "
                    "create it over arrays of one shape and dtype"
                )
            wrong = [one for one in sources if one in shapes and rank not in shapes[one][3]]
            wrong += [one for one in targets if one in shapes and rank not in shapes[one][2]]
            if wrong:
                raise MismatchError(
                    f"window {name!r}: workers {rank} and {wrong[0]} have different graphs; call "
                    "set_topology() alike on all workers"
                )

    def _places(
        self, shapes: Mapping[int, Sequence[Any]], nbytes: int
    ) -> tuple[list[tuple[int, int]], list[int], dict[int, tuple[int, int]]]:
        """Return the arguments of Window.connect(): where the memory of neighbours lies."""
        me, arenas = self._host.me, self._host.arenas
        near = [rank for rank in arenas if rank in shapes and rank != me and shapes[rank][4] >= 0]
        targets = []
        for rank in shapes[me][3]:
            if rank not in shapes:
                continue
            place = shapes[rank][2].index(me)
            start = arenas[rank].address + shapes[rank][4] if rank in near else 0
            targets.append((rank, start + buffer_offset(nbytes, place) if start else 0))
        theirs = {
            rank: (arenas[rank].address + shapes[rank][5], arenas[rank].address + shapes[rank][4])
            for rank in shapes[me][2]
            if rank in near and shapes[rank][5] >= 0
        }
        return targets, near if shapes[me][4] >= 0 else [], theirs

    def free(self, name: str | None) -> bool:
        """Free a window, or all, on all workers; False where there is no window of this name."""
        names = self.names if name is None else [name]
        if any(one not in self._created for one in names):
            return False
        for one in names:
            known = self._created[one]
            try:
                self._flush_with_all(one)
            finally:
                del self._created[one]
                known.window.free(timeout_s=self._host.timeout_s)
        return True

    def _flush_with_all(self, name: str) -> None:
        """Wait until all that are left have done their operations on a window, or failed."""
        try:
            self.flush(name).wait()
        except FastPSError:
            self._host.meet(f"win_free {name}")
            raise
        self._host.meet(f"win_free {name}")

    def find(self, name: str) -> CreatedWindow:
        """Return a window by its name. Raises ValueError, or ViewChangedError if it has ended."""
        if name not in self._created:
            raise self._host.no_window(name, self.names)
        return self._created[name]

    # ---- actions ----

    def put(
        self, array: Array, name: str, *, adds: bool, self_weight: float | None,
        dst_weights: Targets | None, is_locked: bool, is_waited: bool, has_p: bool | None = None,
    ) -> OperationHandle:  # fmt: skip
        """Start to put an array into neighbours' buffers, or to add it there.

        has_p: whether P travels with it; None: as turn_on_win_ops_with_associated_p() says.
        """
        known = self.find(name)
        window = known.window
        _check_array(array, name)
        if array.shape != known.array.shape or array.dtype != known.array.dtype:
            raise ValueError(
                f"window {name!r}: the array is {array.dtype} {array.shape}; give one as the "
                f"window's, {known.array.dtype} {known.array.shape}"
            )
        weights = _weights(name, "dst_weights", dst_weights, window.targets, {})
        me, size = self._host.me, self._group.size
        turns = sorted(weights, key=lambda rank: (rank - me) % size)
        kept = 1.0 if self_weight is None else float(self_weight)
        self._check_weights(known, [*weights.values(), kept])
        self._engine.pin(array)
        action = window.put(
            _bytes_of(array), {rank: weights[rank] for rank in turns}, adds=adds,
            self_weight=kept, is_locked=is_locked,
            has_p=self.has_p if has_p is None else has_p, is_inline=is_waited,
            timeout_s=self._host.timeout_s,
        )  # fmt: skip
        return self._handle([action], array)

    def get(
        self, name: str, src_weights: Targets | None, *, is_locked: bool, is_waited: bool
    ) -> OperationHandle:
        """Start to replace our buffers of neighbours by their own arrays."""
        known = self.find(name)
        window = known.window
        weights = _weights(name, "src_weights", src_weights, window.sources, {})
        self._check_weights(known, weights.values())
        action = window.get(weights, is_locked=is_locked, is_inline=is_waited,
                            timeout_s=self._host.timeout_s)  # fmt: skip
        return self._handle([action], known.array)

    def update(
        self, name: str, self_weight: float | None, weights: Mapping[int, float] | None,
        out: Array | None, *, resets: bool, is_locked: bool, has_p: bool | None = None,
    ) -> OperationHandle:  # fmt: skip
        """Start to mix our array with what neighbours have put, into itself or out."""
        known = self.find(name)
        if (self_weight is None) != (weights is None):
            raise ValueError(
                f"window {name!r}: self_weight={self_weight} and neighbor_weights={weights}: give "
                "both or neither"
            )
        own = known.self_weight if self_weight is None else float(self_weight)
        sources = known.window.sources
        chosen = _weights(name, "neighbor_weights", weights, sources, known.weights)
        share = 1 / (len(chosen) + 1)
        is_mean = {own, *chosen.values()} in ({share}, {1.0})
        if not is_mean:
            self._check_weights(known, [own, *chosen.values()])
        action = known.window.update(
            own, chosen, out=None if out is None else _bytes_of(out),
            resets=list(chosen) if resets else (), is_mean=is_mean, is_locked=is_locked,
            has_p=self.has_p if has_p is None else has_p, timeout_s=self._host.timeout_s,
        )  # fmt: skip
        return self._handle([action], known.array if out is None else out)

    def weights_of_those_left(self, name: str) -> tuple[float, dict[int, float]]:
        """Return the weights of an update, divided anew among the in-neighbours that are left."""
        known, lost = self.find(name), self._group.gone() if self._neighbors.goes_on else ()
        left = [one for one in known.weights if one not in lost]
        return _divided(known.self_weight, known.weights, left)

    def flush(self, name: str) -> OperationHandle:
        """Return a handle that is done when all that was started on a window has taken effect."""
        known = self.find(name)
        return self._handle(known.window.actions, known.array)

    @contextmanager
    def mutex(self, name: str, *, for_self: bool, ranks: Iterable[int] | None) -> Iterator[None]:
        """Hold the mutex of neighbours' windows, or our own, which may exclude only some."""
        window = self.find(name).window
        me, some = self._host.me, None if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in some or () if not 0 <= rank < self._group.size]
        if wrong:
            raise ValueError(
                f"window {name!r}: ranks name worker {wrong[0]}; workers are 0 to "
                f"{self._group.size - 1}"
            )
        members = [me] if for_self else sorted(window.targets) if some is None else some
        if not for_self:
            self._host.reach([rank for rank in members if rank != me])
        action = window.lock(members, excluded=some if for_self else None,
                             timeout_s=self._host.timeout_s)  # fmt: skip
        try:
            self._handle([action], np.empty(0)).wait()
            yield
        finally:
            action.unlock()

    def _check_weights(self, known: CreatedWindow, weights: Collection[float]) -> None:
        if any(weight != 1.0 for weight in weights):
            ReduceOp.MIX.check(known.dtype)

    # ---- ends ----

    def _handle(self, actions: Sequence[WindowAction], output: Array) -> OperationHandle:
        return OperationHandle(
            actions, (output,), self._host.waiting_by(self._explain), is_single=True
        )

    def _explain(
        self, action: WindowAction, _operation: int, status: int | None, timeout_s: float
    ) -> FastPSError:
        if status == Status.MISMATCH:
            return MismatchError(
                f"{action.name}: worker {action.culprit} has freed this window; free windows on "
                "all workers, after the last operation on them"
            )
        if status == Status.TIMEOUT:
            return StallError(
                f"{action.name}: worker {action.culprit} still holds the lock of a buffer, or its "
                f"mutex, after {timeout_s:g} s; see whether it is stopped, or raise "
                "FASTPS_OP_TIMEOUT_S"
            )
        return self._host.explain(action, status, timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """Fail what is in flight and end the engine's helper thread."""
        self._engine.stop(timeout_s=timeout_s)
        if self._own_exchange is not None:
            self._own_exchange.dismiss()


def _divided(
    own: float, weights: Mapping[int, float], left: Collection[int]
) -> tuple[float, dict[int, float]]:
    """Return a worker's own weight and those of the sources that are left, with the same sum."""
    is_there = [True, *(one in left for one in weights)]
    own, *others = remaining([own, *weights.values()], is_there, 0)
    return own, dict(zip([one for one in weights if one in left], others, strict=True))


def _check_array(array: Array, name: str) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"window {name!r}: the array is not C-contiguous; give numpy.ascontiguousarray() of it"
        )


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _weights(
    name: str, what: str, given: Targets | None, known: Sequence[int],
    default: Mapping[int, float],
) -> dict[int, float]:  # fmt: skip
    """Return the weight of each neighbour; ranks without weights have 1."""
    if given is None:
        return dict(default) or dict.fromkeys(known, 1.0)
    weights = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)
    wrong = sorted(set(weights) - set(known))
    if wrong:
        raise ValueError(
            f"window {name!r}: {what} name {wrong}; name some of its neighbors {list(known)}"
        )
    return {int(rank): float(weights[rank]) for rank in sorted(weights)}
