# SPDX-License-Identifier: Apache-2.0
"""The windows of a session by name: what all workers agree on, and what may be asked of one.

Takes C-contiguous arrays; chooses memory, weights and who reaches whom by memory, and starts
actions on the engine (_windows.pyx). A window keeps the graph that it was made on. Threads: any;
creating and freeing is done by all workers, in one order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fastps.collectives._exchange import Exchange
from fastps.collectives.group import Group
from fastps.config.words import encoded_name
from fastps.errors import FastPSError, MismatchError, StallError, Status
from fastps.graph._windows import Window, WindowAction, Windows, buffer_offset, window_bytes
from fastps.graph.neighbors import Neighbors
from fastps.graph.survivor_weights import remaining
from fastps.graph.weights import Graph, Targets
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
    def gather(self, obj: Any, name: str) -> dict[int, Any]: ...
    def check_usable(self) -> None: ...
    def waiting(self, explain: Explain) -> Waiting: ...
    def explain(self, operation: Any, status: int | None, timeout_s: float) -> FastPSError: ...


class Known:
    """A window that was created: the engine's, the user's array, and weights of an update."""

    def __init__(
        self, window: Window, array: Array, dtype: DType,
        weights: tuple[float, dict[int, float]], user: Any,
    ) -> None:  # fmt: skip
        self.window, self.array, self.dtype, self.user = window, array, dtype, user
        self.self_weight, self.weights = weights


class WindowTable:
    """The windows of one worker."""

    def __init__(self, host: _Host, group: Group, neighbors: Neighbors) -> None:
        self._host, self._group, self._neighbors = host, group, neighbors
        self._waiting = host.waiting(self._explain)
        self._own: Exchange | None = None  # of a job of one, which has no other
        if group.size == 1:
            engine = WorkerEngine(me=0, n_members=1, lanes={})
            self._own = Exchange(me=0, n_members=1, engine=engine)
        self._home = Windows(self._own or host.exchange)
        self._known: dict[str, Known] = {}
        self._lives: Counter[str] = Counter()
        self.has_p = False  # whether P travels with values

    # ---- creating and freeing; all workers ----

    @property
    def names(self) -> list[str]:
        """List the names of the windows that there are."""
        return sorted(self._known)

    def create(
        self, array: Array, name: str, *, zero_init: bool, dtype: DType | None = None,
        user: Any = None,
    ) -> bool:  # fmt: skip
        """Make a window over an array, which stays its own value; False: the name is taken.

        Workers that are lost have no part in it, and what they weighed is divided anew.
        user: what a framework has over that memory.
        """
        self._host.check_usable()
        if name in self._known:
            return False
        _check_array(array, f"window {name!r}")
        code = dtype_of(array.dtype) if dtype is None else dtype
        me, graph = self._host.me, self._neighbors.graph
        left = self._host.living().ranks
        sources = [one for one in graph.topology.in_neighbors(me) if one in left]
        targets = [one for one in graph.topology.out_neighbors(me) if one in left]
        if self._own is None:
            self._host.reach([*{*sources, *targets}])
        room = self._room(window_bytes(array.nbytes, len(sources)))
        self._lives[name] += 1
        window = self._make(name, array, room, sources, code, zero_init=zero_init)
        told = self._host.gather(
            [array.nbytes, int(code), sources, targets, self._offset(room), self._offset(array)],
            f"win_create {name}",
        )
        self._agree(name, told)
        window.connect(*self._places(told, array.nbytes), keep=dict(self._host.arenas))
        weights = _receive_weights(graph, me, sources)
        self._known[name] = Known(window, array, code, weights, user)
        return True

    def _room(self, nbytes: int) -> Array:
        """Return memory for buffers, where neighbours reach it if they can."""
        if self._host.arena is not None:
            block, _ = self._host.arena.allocate(nbytes)
            return np.frombuffer(block, np.uint8, nbytes)  # type: ignore[call-overload, no-any-return]
        room = np.zeros(nbytes + LINE, np.uint8)
        start = -room.ctypes.data % LINE
        return room[start : start + nbytes]

    def _offset(self, array: Array) -> int:
        """Return where in our arena an array lies; -1: not there."""
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
        words = b"window %d " % self._lives[name] + encoded_name(name)
        number = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
        return Window(
            self._home, name, number, _bytes_of(array), room, sources, itemsize=code.itemsize,
            dtype=int(code), sum=reduce_kernel(ReduceOp.SUM, code), mix=mix, zero_init=zero_init,
        )  # fmt: skip

    def _agree(self, name: str, told: Mapping[int, Sequence[Any]]) -> None:
        """Raise MismatchError, on all workers, where they do not mean the same."""
        first = next(iter(told))
        for rank, (nbytes, code, sources, targets, *_) in told.items():
            if [nbytes, code] != list(told[first][:2]):
                raise MismatchError(
                    f"window {name!r}: worker {rank} has {nbytes} bytes of {DType(code).name}, "
                    f"and worker {first} {told[first][0]} of {DType(told[first][1]).name}"
                )
            wrong = [one for one in sources if rank not in told[one][3]]
            wrong += [one for one in targets if rank not in told[one][2]]
            if wrong:
                raise MismatchError(
                    f"window {name!r}: workers {rank} and {wrong[0]} have different graphs; call "
                    "set_topology() alike on all workers"
                )

    def _places(
        self, told: Mapping[int, Sequence[Any]], nbytes: int
    ) -> tuple[list[tuple[int, int]], list[int], dict[int, tuple[int, int]]]:
        """Return where neighbours' memory lies: of targets, who writes ours, what of sources."""
        me, arenas = self._host.me, self._host.arenas
        near = [rank for rank in arenas if rank in told and rank != me and told[rank][4] >= 0]
        targets = []
        for rank in told[me][3]:
            place = told[rank][2].index(me)
            start = arenas[rank].address + told[rank][4] if rank in near else 0
            targets.append((rank, start + buffer_offset(nbytes, place) if start else 0))
        theirs = {
            rank: (arenas[rank].address + told[rank][5], arenas[rank].address + told[rank][4])
            for rank in told[me][2]
            if rank in near and told[rank][5] >= 0
        }
        return targets, near if told[me][4] >= 0 else [], theirs

    def free(self, name: str | None) -> bool:
        """Free a window, or all, on all workers; False: there is none of this name."""
        names = self.names if name is None else [name]
        if any(one not in self._known for one in names):
            return False
        for one in names:
            known = self._known[one]
            try:
                self.flush(one).wait()
                self._host.living().barrier(name=f"win_free {one}").wait()
            finally:
                del self._known[one]
                known.window.free(timeout_s=self._host.timeout_s)
        return True

    def find(self, name: str) -> Known:
        """Return a window; ValueError: there is none."""
        if name not in self._known:
            raise ValueError(
                f"there is no window {name!r}: create it first; there are {self.names}"
            )
        return self._known[name]

    # ---- actions ----

    def put(
        self, array: Array, name: str, *, adds: bool, self_weight: float | None,
        dst_weights: Targets | None, is_locked: bool, is_waited: bool, has_p: bool | None = None,
    ) -> OperationHandle:  # fmt: skip
        """Start to put an array into neighbours' buffers, or to add it there.

        has_p: whether P travels with it; None: as it is turned on or off.
        """
        known = self.find(name)
        window = known.window
        _check_array(array, f"window {name!r}")
        if array.shape != known.array.shape or array.dtype != known.array.dtype:
            raise ValueError(
                f"window {name!r} is {known.array.dtype} {known.array.shape}, and the array "
                f"{array.dtype} {array.shape}"
            )
        weights = _weights(name, "dst_weights", dst_weights, window.targets, {})
        me, size = self._host.me, self._group.size
        turns = sorted(weights, key=lambda rank: (rank - me) % size)
        kept = 1.0 if self_weight is None else float(self_weight)
        self._check_weights(known, [*weights.values(), kept])
        self._home.pin(array)
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
        """Start to make our array, or out, of itself and of what neighbours have put."""
        known = self.find(name)
        if (self_weight is None) != (weights is None):
            raise ValueError("self_weight and neighbor_weights are given both or not at all")
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
        """Return our weight and the in-neighbours' of an update, divided anew among those left."""
        known, lost = self.find(name), self._group.gone() if self._neighbors.goes_on else ()
        is_there = [True, *(one not in lost for one in known.weights)]
        own, *others = remaining([known.self_weight, *known.weights.values()], is_there)
        left = [one for one in known.weights if one not in lost]
        return own, dict(zip(left, others, strict=True))

    def flush(self, name: str) -> OperationHandle:
        """Return the handle of all that was started on a window."""
        known = self.find(name)
        return self._handle(known.window.actions, known.array)

    @contextmanager
    def mutex(self, name: str, *, for_self: bool, ranks: Iterable[int] | None) -> Iterator[None]:
        """Hold the mutex of neighbours' windows, or our own, which may keep out only some."""
        window = self.find(name).window
        me, some = self._host.me, None if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in some or () if not 0 <= rank < self._group.size]
        if wrong:
            raise ValueError(f"window {name!r}: there is no worker {wrong[0]}")
        members = [me] if for_self else sorted(window.targets) if some is None else some
        if not for_self:
            self._host.reach([rank for rank in members if rank != me])
        action = window.lock(members, whom=some if for_self else None,
                             timeout_s=self._host.timeout_s)  # fmt: skip
        try:
            self._handle([action], np.empty(0)).wait()
            yield
        finally:
            action.unlock()

    def _check_weights(self, known: Known, weights: Collection[float]) -> None:
        if any(weight != 1.0 for weight in weights):
            ReduceOp.MIX.check(known.dtype)

    # ---- ends ----

    def _handle(self, actions: Sequence[WindowAction], output: Array) -> OperationHandle:
        return OperationHandle(actions, (output,), self._waiting, is_single=True)

    def _explain(
        self, action: WindowAction, _operation: int, status: int | None, timeout_s: float
    ) -> FastPSError:
        if status == Status.MISMATCH:
            return MismatchError(
                f"{action.name}: worker {action.culprit} has no such window any more; free "
                "windows on all workers, when nobody uses them"
            )
        if status == Status.TIMEOUT:
            return StallError(
                f"{action.name}: worker {action.culprit} has not given a buffer free within "
                f"{timeout_s:g} s; is it stopped? Else raise FASTPS_OP_TIMEOUT_S"
            )
        return self._host.explain(action, status, timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """Fail what is in flight and end the helper's thread."""
        self._home.stop(timeout_s=timeout_s)
        if self._own is not None:
            self._own.dismiss()


def _receive_weights(
    graph: Graph, me: int, sources: Sequence[int]
) -> tuple[float, dict[int, float]]:
    """Return our own weight and those of sources, which are the in-neighbours that are left."""
    if not graph.is_weighted:
        share = 1 / (len(sources) + 1)
        return share, dict.fromkeys(sources, share)
    own, weights = graph.topology.receive_weights(me)
    is_there = [True, *(one in sources for one in weights)]
    own, *others = remaining([own, *weights.values()], is_there)
    return own, dict(zip([one for one in weights if one in sources], others, strict=True))


def _check_array(array: Array, what: str) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(f"{what}: an array is not C-contiguous")


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _weights(
    name: str, what: str, given: Targets | None, known: Sequence[int], usual: Mapping[int, float]
) -> dict[int, float]:
    """Return the weight of each neighbour; a list weighs all with 1."""
    if given is None:
        return dict(usual) or dict.fromkeys(known, 1.0)
    weights = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)
    strangers = sorted(set(weights) - set(known))
    if strangers:
        raise ValueError(
            f"window {name!r}: {what} name {strangers}, and the neighbors are {list(known)}"
        )
    return {int(rank): float(weights[rank]) for rank in sorted(weights)}
