# SPDX-License-Identifier: Apache-2.0
"""The groups of one session: all workers, and process sets among them.

Gives collectives/group.py what it needs of a session: the engine, links to members made at their
first use, arrays, and the words of a failure. Threads: any.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.channels import BARRIER, rest_of
from fastps.collectives.descriptions import Membership
from fastps.collectives.group import Group
from fastps.collectives.group_base import explain as explain_operation
from fastps.collectives.row_counts import gather_objects, object_stages
from fastps.collectives.staged import Lines, Resumable
from fastps.errors import (
    ConfigError,
    FastPSError,
    MismatchError,
    ProtocolError,
    StallError,
    Status,
    TransportError,
    ViewChangedError,
)
from fastps.graph.neighbors import Neighbors
from fastps.session.stall_watch import pending_operation
from fastps.types import DType
from fastps.worker.handle import Array, Explain, Handle, Waitable, Waiting

if TYPE_CHECKING:
    from fastps.collectives._exchange import Exchange, Operation
    from fastps.graph.survivor_rounds import Agreed
    from fastps.graph.windows import WindowTable
    from fastps.session.connections import Connections
    from fastps.session.differences import Differences
    from fastps.session.host import SessionHost
    from fastps.session.join import JoinState
    from fastps.session.routes import RouteChecker
    from fastps.session.stall_watch import StallWatch
    from fastps.transport._link import Mapping
    from fastps.transport.shm import Arena


class Groups:
    """What groups need of a session; makes them."""

    def __init__(
        self, session: SessionHost, join_state: JoinState, routes: RouteChecker,
        stalls: StallWatch, differences: Differences,
    ) -> None:  # fmt: skip
        self._session, self._join_state, self._routes = session, join_state, routes
        self._me = session.rank
        # Of this view: in the next one, ranks and links are others. A single worker has none.
        self._connections: Connections = getattr(session, "connections", None)  # type: ignore[assignment]
        self._stalls, self._differences = stalls, differences
        self.known: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self._world = self._make(self._everybody())
        # who was through with an operation of all when others failed has begun one more, so what
        # goes on without the lost is numbered apart
        goes_on = session.config.goes_on
        group = self._make(self._everybody(), "neighbors") if goes_on else self._world
        self._neighbor_group = group
        self.neighbors = Neighbors(group, self.pair, living=self.living, goes_on=goes_on)
        self._n_sets, self._lost = 0, ""
        self._pairs: dict[int, Group] = {}
        self._windows: WindowTable | None = None
        self._agreed: dict[str, Agreed] = {}
        self._late_barrier: Handle[Any] | None = None
        self._lines: Lines | None = None

    def _everybody(self) -> Sequence[int]:
        """List the workers; a validator is not among them, and has none."""
        size, me = self._session.size, self._session.rank
        return range(size) if me < size else (me,)

    @property
    def world(self) -> Group:
        """The group of all workers; ConfigError where this is none."""
        if self.me >= self._session.size:
            raise ConfigError(
                f"this process is validator {self.me - self._session.size}, and only workers may "
                "call collective operations; use fastps.HeldParameters"
            )
        return self._world

    def group(self, ranks: Sequence[int], key: str = "") -> Group:
        """Make the group of some workers, this one among them; the same on all of them.

        key: tells apart groups of the same ranks. Does not communicate. Raises ValueError.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= r < self._session.size for r in ranks):
            raise ValueError(
                f"ranks {list(ranks)} must be different numbers from 0 to {self._session.size - 1}"
            )
        if self.me not in ranks:
            raise ValueError(
                f"worker {self.me} is not among ranks {list(ranks)}; only members may call this"
            )
        return self._make(ranks, key or "group", "process set")

    def _make(self, ranks: Sequence[int], key: str = "", words: str = "") -> Group:
        group = Group(self, ranks, key, words)
        self.known[group.key] = group
        return group

    def of_key(self, key: str, ranks: Sequence[int]) -> Group:
        """Return the group that others know by a whole key, though this worker has not used it."""
        return self.known.get(key) or self._make(ranks, key.removesuffix(f"/{tuple(ranks)}"))

    def pair(self, rank: int) -> Group:
        """Return the group of this worker, or validator, and another; the same each time."""
        if rank not in self._pairs:
            self._pairs[rank] = self._make(sorted((self.me, rank)), "pair")
        return self._pairs[rank]

    def living(self) -> Group:
        """Return the group of all workers, without those that the job goes on without."""
        if not self._session.config.goes_on:
            return self.world
        gone = self.world.gone()
        ranks = [rank for rank in self.world.ranks if rank not in gone]
        return self.known.get(f"living/{tuple(ranks)}") or self._make(ranks, "living")

    def agreed(self, name: str) -> Agreed:
        """Return rounds of operations of all who are left; the same for a name each time."""
        if name not in self._agreed:
            from fastps.graph.survivor_rounds import Agreed  # noqa: PLC0415  (most jobs need none)

            self._agreed[name] = Agreed(self.world, self.living, gather_objects, name)
        return self._agreed[name]

    def start_barrier(self, timeout_s: float | None = None) -> Waitable:
        """Start to wait for all workers: in shared memory by its pipes, else by the scheduler.

        Which knows of validators and of who is left, and opens no links for it.
        """
        config, is_here = self._session.config, self.arena and self.world.is_on_one_machine
        if is_here and not (config.goes_on or config.num_validators or config.is_elastic):
            return self.world.barrier(name=BARRIER)
        return self._session.enter_barrier(timeout_s=timeout_s) or self.world.barrier()

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all workers; who comes again after a StallError still waits for the same.

        After Ctrl-C, and a time that is none, too: the others count this worker as having come.
        """
        if self._session.config.is_elastic:
            self._session.barrier(timeout_s=timeout_s)
            return
        barrier, self._late_barrier = self._late_barrier or self.start_barrier(timeout_s), None
        try:
            barrier.wait(timeout_s)
        except (StallError, ValueError, KeyboardInterrupt):
            if isinstance(barrier, Handle):
                self._late_barrier = barrier
            raise

    def broadcast_to_those_left(
        self, arrays: Sequence[Array], codes: Sequence[DType], root_rank: int
    ) -> None:
        """Overwrite arrays of all who are left with the root's; blocks.

        C-contiguous. All get all of them, or all raise PeerLostError, as the root is lost.
        """
        from fastps.graph.survivor_rounds import broadcasting  # noqa: PLC0415  (most jobs need none)

        agreed = self.agreed("broadcast")
        for place, (array, code) in enumerate(zip(arrays, codes, strict=True)):
            agreed.start(broadcasting(array, code, root_rank, f"broadcast {place}"))
        agreed.finish()

    @property
    def windows(self) -> WindowTable:
        """The windows of this session, made at their first use."""
        if self._windows is None:
            from fastps.graph.windows import WindowTable  # noqa: PLC0415  (most jobs need none)

            self._windows = WindowTable(self, self.world, self.neighbors)
        return self._windows

    @property
    def has_windows(self) -> bool:
        """Whether windows() has made any."""
        return self._windows is not None

    def close(self) -> None:
        """End what has threads, and forget operations; idempotent."""
        self._join_state.past.clear()
        if self._lines is not None:
            self._lines.close(self._session.config.shutdown_timeout_s)
        if self._windows is not None:
            self._windows.close(timeout_s=self._session.config.shutdown_timeout_s)

    def next_key(self) -> str:
        """Return a key for the next process set: the same on all workers, which add them alike."""
        self._n_sets += 1
        return f"set {self._n_sets}"

    # ---- names ----

    def knows(self, name: str) -> bool:
        """Return whether operations were started under a name; sets without us may know.

        The answer is the same on all workers.
        """
        return bool(self._n_sets or self._world.channels.names_of(name))

    def forget(self, names: Sequence[str], declared: Container[str], *, poison: str = "") -> None:
        """Let all workers count operations under names anew; blocks until they want to.

        Who returns early must not use a name before all have returned. Raises FastPSError for
        what is in flight, MismatchError where workers forget different names or one of them
        cannot, ConfigError for a name that no worker knows. declared: the names of tensors;
        poison: why this worker can use one of those no more.
        """
        used = [(one, name) for one in self.known.values() for name in names]
        for group, name in used:
            for label in group.in_flight(group.channels.names_of(name)):
                raise FastPSError(
                    f"cannot forget {label!r} while it is in flight; call synchronize() first"
                )
        stuck = {
            label
            for group, name in used if group.size > 1
            for label in group.stuck(group.channels.names_of(name))
        }  # fmt: skip
        here = {name for group, name in used if group.channels.names_of(name)}
        unknown = [name for name in names if name not in here and name not in declared]
        tensors = [name for name in names if name in declared]
        mine = (list(names), sorted(stuck), unknown, tensors, poison)
        told = self.gather(mine, "forget").items()
        if any(said != list(names) for _, (said, *_) in told):
            listed = ", ".join(f"worker {rank} {said}"[:200] for rank, (said, *_) in told)
            raise MismatchError(f"all workers must forget the same names in one order: {listed}")
        for why in [text for _, (*_, text) in told if text]:  # some hear of it before others
            raise MismatchError(why)
        if any(theirs != tensors for _, (*_, theirs, _) in told):
            listed = ", ".join(f"worker {rank} {theirs}"[:200] for rank, (*_, theirs, _) in told)
            raise MismatchError(f"only tensors that all workers declared are forgotten: {listed}")
        for name in unknown:
            if all(name in nowhere for _, (_, _, nowhere, *_) in told):
                raise ConfigError(
                    f"cannot forget {name!r}: no tensor or operation has this name on any worker"
                )
        invalidate_call_cache()
        kept = set().union(*(some for _, (_, some, *_) in told))
        for group, name in used:
            self._join_state.forget(group.forget(name, kept))

    # ---- what a group asks for ----

    @property
    def me(self) -> int:
        """Rank of this worker."""
        return self._me

    @property
    def exchange(self) -> Exchange:
        """The engine."""
        return self._connections.exchange

    def reach(self, members: Sequence[int]) -> None:
        """Make the links to members that there are not yet; blocks."""
        self._connections.reach(members)

    @property
    def arena(self) -> Arena | None:
        """Memory that others of this machine reach; None: there is none."""
        return self._connections.arena if self._session.size > 1 else None

    @property
    def arenas(self) -> dict[int, Mapping]:
        """That of each worker of this machine, by rank."""
        return self._connections.arenas if self._session.size > 1 else {}

    @property
    def timeout_s(self) -> float:
        """How long an operation may take."""
        return self._session.config.op_timeout_s

    def gather(self, obj: Any, name: str) -> dict[int, Any]:
        """Return the objects of all that are left, by rank; blocks."""
        return self.start_gather(obj, name).wait()

    def start_gather(self, obj: Any, name: str) -> Resumable[dict[int, Any]]:
        """Start to exchange objects; wait() returns those of all that are left, by rank.

        Where the job goes on without lost workers, the loss of one makes it fail on nobody.
        """
        if self._session.config.goes_on and self.world.size > 1:
            return Resumable(self._neighbor_group, self._exchange_with_those_left(obj, name))
        return Resumable(self.world, self._exchange_with_all(obj, name))

    def _exchange_with_all(
        self, obj: Any, name: str
    ) -> Generator[Operation, None, dict[int, Any]]:
        found = yield from object_stages(self.world, obj, name)
        return dict(zip(self.world.ranks, found, strict=True))

    def _exchange_with_those_left(
        self, obj: Any, name: str
    ) -> Generator[Operation, None, dict[int, Any]]:
        """Exchange objects as neighbors do: no message depends on another of the same exchange.

        So all survivors complete it under one number, whenever they hear of a loss.
        """
        from fastps.collectives.objects import decode_of, encode_for_all  # noqa: PLC0415

        own = np.frombuffer(encode_for_all(obj), np.uint8)
        others = [rank for rank in self.world.ranks if rank != self.me]
        edges: dict[str, Any] = {"sources": others, "targets": others, "is_checked": False}
        sizes = np.zeros(len(others), np.int64)
        first = self.neighbors.allgather(
            np.array([own.size], np.int64), sizes, counts=[1] * len(others), name=name, **edges
        )
        yield from first.operations
        counts = [0 if one in first.missed else int(size)
                  for one, size in zip(others, sizes, strict=True)]  # fmt: skip
        whole = np.empty(sum(counts), np.uint8)
        rest = self.neighbors.allgather(own, whole, counts=counts, name=rest_of(name), **edges)
        yield from rest.operations
        lost = {*first.missed, *rest.missed}
        ends = np.cumsum(counts)
        found = {self.me: decode_of(self.me, own.tobytes())} | {
            one: decode_of(one, whole[end - count : end].tobytes())
            for one, count, end in zip(others, counts, ends, strict=True) if one not in lost
        }  # fmt: skip
        return dict(sorted(found.items()))

    def meet(self, name: str) -> None:
        """Wait until all that are left have come here."""
        if self._session.config.goes_on:
            self.gather(None, name)
        else:
            self.world.barrier(name=name).wait()

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that a worker is on."""
        return self._connections.machine_of(rank) if self._session.size > 1 else 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Make an array for a result; see Session.result()."""
        return self._session.result(shape, dtype)

    def check_usable(self) -> None:
        """Raise NotInitializedError in a forked child."""
        self._session.check_usable()

    def check_present(self, what: str) -> None:
        """Raise ViewChangedError for what is of an earlier view, which elastic jobs have."""

    def is_world(self, group: Membership) -> bool:
        """Return whether a group is that of all workers whose names servers know too."""
        return group is self._world

    def check_name(self, group: Membership, name: str) -> None:
        """Raise MismatchError for a name that has failed for all workers."""
        if group is self._world:
            self._routes.check(name)

    @functools.cached_property
    def waiting(self) -> Waiting:
        """What handles need to wait for operations of groups."""
        return self.waiting_by(explain_operation)

    def waiting_by(self, explain: Explain) -> Waiting:
        """Return the same with another function that words errors."""
        config = self._session.config
        return Waiting(
            explain, config.op_timeout_s, config.spin_us, self._session.wait_seconds,
            self._join_state.lack,
        )  # fmt: skip

    @property
    def lines(self) -> Lines:
        """What lets operations of several exchanges go on, made at its first use."""
        if self._lines is None:
            self._lines = Lines(self.exchange)
        return self._lines

    def finish_lines(self, timeout_s: float) -> None:
        """Wait until the last exchange of all operations has begun; raises StallError."""
        if self._lines is not None:
            self._lines.finish(timeout_s)

    @property
    def has_joined_peers(self) -> bool:
        """Whether somebody has run out of data."""
        return self._join_state.is_on

    def keep(self, operation: Operation) -> None:
        """Keep what may be over here before those know of it who have run out of data."""
        self._join_state.keep(operation)

    def tell(self, operation: Operation) -> None:
        """Let those take part who have run out of data."""
        self._join_state.tell_group(operation)

    def refusal(self, operation: Operation) -> str:
        """Return why others made an operation fail, where that is known; else empty."""
        if why := self._routes.why(operation):
            return why
        refusal = self._join_state.refusal(operation)
        return refusal and f"{operation.name}: {refusal}"

    def differing(self, group: Membership, name: str | None, channel: int, number: int) -> str:
        """Word the error of an operation that members do not mean alike; asks all of them."""
        return self._differences.explain(group, name, channel, number)

    def end_view(self, lost: str) -> None:
        """Let no operation begin any more: some member is lost, and ranks become others."""
        self._lost = lost
        for group in list(self.known.values()):
            group.is_removed = True

    def no_window(self, name: str, others: Sequence[str]) -> Exception:
        """Word the error of a window that is not there; others: the names of those that are."""
        return ValueError(f"there is no window {name!r}, only {others}: call win_create() first")

    def removed(self, name: str) -> Exception:
        """Word the error of an operation of members that are none any more."""
        if not self._lost:
            return ValueError(
                f"{name}: its process set was removed; call add_process_set() again on all workers"
            )
        return ViewChangedError(
            f"{name}: {self._lost}; the job goes on without it in other groups: call "
            "add_process_set() again on all workers, and with torch.distributed "
            "destroy_process_group() and init_process_group()"
        )

    def ended(self, name: str, error: FastPSError) -> FastPSError:
        """Word the error of an operation that could not begin, since the job has ended."""
        status = Status.PEER_LOST if isinstance(error, TransportError) else Status.SHUTDOWN
        if isinstance(error, ProtocolError):
            status = Status.PROTOCOL
        return self._session.blame(name, status, said=str(error), connections=self._connections)

    def explain(self, operation: Operation, status: int | None, timeout_s: float) -> FastPSError:
        """Word the error of an operation that failed, or, if status is None, did not end."""
        if status is None:
            return self._stalls.error(pending_operation(operation), timeout_s)
        return self._session.blame(
            operation.name, status, culprit=operation.culprit, connections=self._connections
        )
