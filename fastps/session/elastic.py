# SPDX-License-Identifier: Apache-2.0
"""A session that goes on when members are lost: in a new view, without them.

A view is what a session has with the other members: links, shared memory, declared tensors,
process sets. When the scheduler says that a member is lost, the thread fastps:view ends all of
that, awaits the next view with the other survivors, and starts again what was in flight. Three
rules make the results right:

1. Sources stay intact, or what an operation in place overwrites is kept as a copy, until the
   result is committed. So until then it can be started again. A broadcast lands beside its arrays.
2. A result is handed out when it has landed on all workers. In a view whose workers share the
   memory of one machine, a board in it decides that (worker/_board), else the scheduler does
   (control/commits.py), as it does everywhere for operations among members. All survivors know of
   the same commits when a view ends. Nobody has handed out the rest, and all start it again, as a
   sum or average over the survivors.
3. No survivor awaits the next view before its threads and links of the last one have ended, and
   the lost process, if it is on this machine, has ended too. So nothing of the last view is
   written once operations of the next one have begun.

Threads: any that start and wait; fastps:view changes the view; fastps:commit reports what has
landed while no thread of the program waits, and takes what the board has committed; the control
thread takes commits of the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.staged import is_looking
from fastps.config import Config
from fastps.contract.contract import Policy
from fastps.control.commits import entry_of, parts_of
from fastps.control.declared import relaid
from fastps.control.fence import Fence
from fastps.control.protocol import (
    BoardRead,
    Event,
    JobOver,
    Layout,
    Newcomers,
    PeerLost,
    ResultsCommitted,
    ResultsLanded,
    TensorSpec,
    ViewJoined,
    ViewLost,
)
from fastps.errors import (
    ConfigError,
    DuplicateNameError,
    FastPSError,
    PeerLostError,
    ShutdownError,
    Status,
    ViewChangedError,
)
from fastps.native.condition import Condition, Flag
from fastps.session.elastic_copies import LOSSES, CopiesMixin
from fastps.session.elastic_groups import ElasticGroups
from fastps.session.elastic_handle import ElasticHandle, Scope
from fastps.session.regroup import RegroupMixin
from fastps.session.session import Session, State
from fastps.session.stall_watch import join_threads
from fastps.session.tensor_spec import Arrays, Names, check_arrays, outputs_of, pair
from fastps.session.view import View, has_news, tell
from fastps.types import DType, checked_seconds
from fastps.worker.handle import Array, OperationHandle

if TYPE_CHECKING:
    from fastps.control.blame import Failure
    from fastps.session.connections import Connections
    from fastps.session.groups import Groups
    from fastps.worker._board import Board

log = logging.getLogger(__name__)

_NEWS_S = 15.0  # beyond a lease, for the scheduler to say which member is lost
_LOOK_S = 0.005  # between looks whether something has landed that no thread waits for
_SLOW_LOOK_S = 0.05  # the same while threads wait for all that is active, and report it themselves


def _is_waited_for() -> bool:
    """Return whether the next view may wait for this thread, which must not wait for it then."""
    return threading.current_thread().name.startswith("fastps:") or is_looking()


class RootLostError(PeerLostError):
    """The root of a broadcast is lost; the same operation may begin from another worker."""


class ElasticSession(CopiesMixin, RegroupMixin, Session):
    """Membership of this process in an elastic job, over all its views."""

    is_elastic = True

    def __init__(self, config: Config, on_view: Sequence[Callable[[View], object]] = ()) -> None:
        """Join the job, as a Session does; on_view: as for call_in_views(), from the first on."""
        self.view = 1  # its number, as in View
        self._fence = Fence()
        self._given = config
        self._view_lock = threading.RLock()  # held while operations start, and the view changes
        self.changed = Condition(lock := threading.RLock())  # guards what follows
        # of the same lock, each for one thread that would wake for nothing at most changes
        self.view_ends, self.unattended = Condition(lock), Condition(lock)
        self._generation = 0  # of the job, in this view
        self.generations, self.copies = {}, {}
        self.ended_windows: dict[str, str] = {}  # of earlier views, by name: whose loss ended them
        self.told_view = 1  # the last one that the program knows of
        self._told_ended = 0  # and the scheduler, of links that ended
        self._counts: dict[str, int] = {}  # of commits, by name
        self._board: Board | None = None  # of this view; None: the scheduler commits
        self._on_board: dict[str, int] = {}  # the last results that it has committed, by name
        # the last view that was counted, and the statistics of all views up to it
        self._counted: tuple[Connections | None, dict[str, float]] = None, {}
        self._news: ViewLost | ViewJoined | None = None  # what the view is about to end for
        self._changes: list[ViewLost | ViewJoined] = []  # that have led to no view yet
        self._untold: list[ViewLost | ViewJoined] = []  # to views that were cut short
        self._cause = ""  # of the last end of a view
        self._how = ""  # the job goes on since
        self._is_changing = False
        self._fatal: FastPSError | None = None  # why no view comes any more
        self._active: dict[str, ElasticHandle] = {}  # in the order of their starts, by name
        self._layouts: dict[str, Layout] = {}  # of what was declared in earlier views
        self._landings: dict[str, Array] = {}  # of results that overlap their arrays, by name
        self._copies: dict[str, Array] = {}  # of what operations in place overwrite, by name
        # started last on each name; until it is handed out, its result may be unscaled or beside
        self._latest: weakref.WeakValueDictionary[str, ElasticHandle] = (
            weakref.WeakValueDictionary()
        )
        self._on_view = list(on_view)  # called with each new view
        self._threads: list[threading.Thread] = []
        super().__init__(config)
        self._ending = Flag()
        work = {"fastps:view": self._change_views, "fastps:commit": self._report_landings}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in work.items()
        ]
        for thread in self._threads:
            thread.start()

    def _join(self, connections: Connections) -> None:
        super()._join(connections)
        if not self._threads:  # the first view
            self.first_place = self.rank, self.size
            assert super().groups is not None  # there from now on, except while a view begins
            self._generation = self.generations[1] = connections.job.generation
            self._board = connections.board
            self._fence.watch(connections.job)

    def call_in_views(self, call: Callable[[View], object]) -> None:
        """Have a function called with each next view, before operations in it end."""
        self._on_view.append(call)

    @property
    def groups(self) -> Groups:
        """The groups of the present view; blocks while the next one begins."""
        view = self.view
        if self._has_news(view) and not _is_waited_for() and self._fatal is None:
            with contextlib.suppress(FastPSError):  # which the operation raises
                self._await_view(view, self.config.start_timeout_s)
        if (known := self._groups) is not None:
            return known
        with self._view_lock:
            return super().groups

    def _groups_kind(self) -> type[Groups]:
        return ElasticGroups

    def is_free_for(self, *args: Any, **options: Any) -> bool:
        """Return whether servers can take a name; see Session.is_free_for()."""
        with self._view_lock:  # names are declared anew while a view begins
            return super().is_free_for(*args, **options)

    def check_usable(self) -> None:
        """Raise as Session.check_usable(), but let a view begin while operations are suspended."""
        if self.state is not State.SUSPENDED or not self._is_in_view_thread():
            super().check_usable()

    # ---- operations ----

    def declare(self, specs: Any, *, policy: Policy = Policy.SUM, **terms: Any) -> None:
        """Declare tensors, as Session.declare(); ConfigError for what servers hold."""
        if policy != Policy.SUM:
            raise ConfigError(
                f"{policy.name} needs servers that keep values, which an elastic job would lose "
                "with a server; unset FASTPS_ELASTIC_MIN, or use push_pull() or ServerParameters"
            )
        self.in_a_view(functools.partial(super().declare, specs, policy=policy, **terms))

    def _spec(self, name: str, shape: tuple[int, ...], dtype: DType, **terms: Any) -> TensorSpec:
        """Describe a tensor; ConfigError for a rule that too few workers may be left for."""
        spec = super()._spec(name, shape, dtype, **terms)
        rule, least = spec.layout.rule, self._given.elastic_min
        if rule.has_meaning() and (needed := max(rule.full, rule.keep)) > least:
            raise ConfigError(
                f"tensor {name!r} is {rule}, which needs {needed} workers or more, but this job "
                f"goes on with {least}: start it with fastps-run --min {needed} (Elastic(min=), "
                "FASTPS_ELASTIC_MIN), or take another rule"
            )
        return spec

    def scope(self) -> Scope:
        """Open a scope for operations whose results are handed out together."""
        return Scope(on_close=self._tell_unattended)

    def _tell_unattended(self) -> None:
        with self.changed:
            self.unattended.notify_all()

    def push_pull(self, tensor: Arrays, name: Names, **options: Any) -> Array | list[Array]:
        """Sum tensor over all workers of the view; see Session.push_pull(). Blocks."""
        return self.push_pull_async(tensor, name, is_awaited=True, **options).wait()

    def push_pull_async(  # type: ignore[override]
        self,
        tensor: Arrays,
        name: Names,
        *,
        out: Arrays | None = None,
        scope: Scope | None = None,
        is_awaited: bool = False,
        **options: Any,
    ) -> ElasticHandle:
        """Start to sum tensor over all workers of the view; see Session.push_pull_async().

        scope: of operations whose results are handed out together. is_awaited: of ElasticHandle.
        """
        self.check_usable()
        names, arrays = pair(name, tensor)
        is_single = isinstance(name, str)
        outputs = outputs_of(tensor, arrays, out, self.result_like, is_single=is_single)
        landings = [self._landing(*three) for three in zip(names, arrays, outputs, strict=True)]
        start = super().push_pull_async
        priority = options.pop("priority", 0)
        priorities = [priority] * len(names) if isinstance(priority, int) else list(priority)

        def begin(places: Sequence[int]) -> OperationHandle:
            return start(
                [arrays[i] for i in places], [names[i] for i in places],
                out=[landings[i] for i in places], priority=[priorities[i] for i in places],
                **options,
            )  # fmt: skip

        copies = {
            place: self._copy_for(name, array)
            for place, (name, array) in enumerate(zip(names, arrays, strict=True))
            if landings[place] is array
        }
        handle = ElasticHandle(
            self, names, landings, outputs, begin, is_single=is_single, scope=scope, copies=copies
        )
        handle.is_awaited = is_awaited
        return self._started(handle)

    def broadcast_async(  # type: ignore[override]
        self, tensor: Arrays, root_rank: int, name: Names, *, dtype: DType | None = None
    ) -> ElasticHandle:
        """Start to copy the root's tensor into everybody's; see Session.broadcast_async()."""
        self.check_usable()
        root = self.root_of(root_rank)
        names, arrays = pair(name, tensor)
        for label, array in zip(names, arrays, strict=True):
            check_arrays(label, array, array, dtype, average=False)
        # a lost root leaves arrays half written, from which the next may be the root
        landings = arrays if self.is_root(root) else list(map(self.result_like, arrays))
        start = super().broadcast_async

        def begin(places: Sequence[int]) -> OperationHandle:
            rank = self._root_now(root, f"tensor {names[0]!r}")
            some = [landings[i] for i in places], [names[i] for i in places]
            return start(some[0], rank, some[1], dtype=dtype)

        return self._started(
            ElasticHandle(self, names, landings, arrays, begin, is_single=isinstance(name, str))
        )

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: str = "object") -> Any:
        """Return the root's object on all workers; see Session.broadcast_object(). Blocks."""
        root = self.root_of(root_rank)
        found: list[Any] = []
        start = super().broadcast_object

        def meet() -> None:
            found.append(start(obj, self._root_now(root, f"object {name!r}"), name))

        self.in_a_view(meet)
        return found[0]

    def root_of(self, root_rank: Any) -> tuple[str, int]:
        """Return which process a root is, in words that hold in all views; see Session."""
        if isinstance(root_rank, tuple):
            return root_rank
        workers, rank = self._identities(), operator.index(root_rank)
        if not 0 <= rank < len(workers):
            raise ValueError(f"root_rank must be from 0 to {len(workers) - 1}, got {root_rank}")
        return workers[rank]

    def is_root(self, root: Any) -> bool:
        """Return whether this worker is a root by root_of()."""
        job = self.connections.job
        return bool(root == (job.workers[job.me].hostname, job.workers[job.me].pid))

    def _root_now(self, root: tuple[str, int], what: str) -> int:
        """Return the rank in this view of a root; RootLostError if it is lost."""
        rank = self._rank_of(root)
        if rank is None:
            raise RootLostError(
                f"{what} cannot be broadcast: its root, pid {root[1]} on {root[0]}, is lost; "
                "broadcast from another worker"
            )
        return rank

    def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Wait until every worker of the view has come here; see Session.barrier()."""
        self._check_thread()
        while True:  # without the lock: other threads may start what others do before they come
            view = self.view
            try:
                super().barrier(name, timeout_s=timeout_s)
            except ViewChangedError:
                self._await_view(view, self.config.start_timeout_s)
            else:
                return

    def _landing(self, name: str, array: Array, output: Array) -> Array:
        """Return where a result lands: beside its array where the two overlap in part."""
        if output is array or not np.may_share_memory(array, output):
            return output
        known = self._landings.get(name)
        if known is None or known.shape != output.shape or known.dtype != output.dtype:
            known = self._landings[name] = self.result_like(output)
        return known

    def _copy_for(self, name: str, array: Array) -> Array:
        """Return memory for a copy of the array of an operation in place."""
        known = self._copies.get(name)
        if known is None or known.shape != array.shape or known.dtype != array.dtype:
            known = self._copies[name] = np.empty_like(array)
        return known

    def _started(self, handle: ElasticHandle) -> ElasticHandle:
        """Start an operation in the view of now, or in the next one if that ends meanwhile."""
        for name in handle.names:
            before = self._active.get(name)
            if before is not None:
                is_open = before.scope is not None and not before.scope.is_closed
                if is_open or before.status() is None:
                    raise DuplicateNameError(
                        f"tensor {name!r} is in flight already; wait for its handle first"
                    )
                before.wait()
            if (latest := self._latest.get(name)) is not None:
                latest.hand_out()
        handle.copy_sources()

        def start() -> None:
            with self.changed:  # in this view: newcomers begin to count from 1 on
                handle.entries = [
                    entry_of(name, self._counts.get(name, 0) + 1) for name in handle.names
                ]
            handle.start(self.view)
            with self.changed:
                if handle.scope is not None:
                    handle.scope.handles.append(handle)
                self._active.update(dict.fromkeys(handle.names, handle))
                self._latest.update(dict.fromkeys(handle.names, handle))
                if handle.scope is None and not handle.is_awaited:  # Scope.close() tells of others
                    self.unattended.notify_all()

        self.in_a_view(start)
        return handle

    def in_a_view(self, call: Callable[[], object]) -> None:
        """Do something that needs the other members, again where the view ends meanwhile."""
        self._check_thread()
        while True:
            with self._view_lock:
                view = self.view
                try:
                    call()
                except ViewChangedError:
                    pass
                else:
                    return
            self._await_view(view, self.config.start_timeout_s)

    def _is_in_view_thread(self) -> bool:
        return threading.current_thread() in self._threads[:1]

    def _check_thread(self) -> None:
        if self._is_in_view_thread():
            raise FastPSError(
                "on_view must not communicate: the view begins when it returns; note what it is "
                "told, and communicate on the program's threads"
            )

    # ---- waiting, and commits ----

    def settle(self, handles: Sequence[ElasticHandle], timeout_s: float | None) -> None:
        """Wait until the results of operations may be handed out, or their errors raised.

        Raises StallError in time, and what made an operation fail if not a loss.
        """
        limit_s = self.config.op_timeout_s if timeout_s is None else checked_seconds(timeout_s)
        for one in handles:
            if one.scope is not None and not one.scope.is_closed:
                raise FastPSError(f"close the scope of {one.names[0]!r} before you wait for it")
        if any(not one._is_over() for one in handles):
            self._check_thread()
        began = time.perf_counter()
        deadline = began + limit_s
        try:
            while left := [one for one in handles if not one._is_over()]:
                self._attend(left[0], deadline, limit_s)
        finally:
            self.wait_seconds[0] += time.perf_counter() - began

    def _attend(self, handle: ElasticHandle, deadline: float, limit_s: float) -> None:
        """Do _settle_one(), and let fastps:commit report what this thread stops waiting for."""
        unit = handle.unit
        unit.is_awaited = True
        try:
            self._settle_one(handle, deadline, limit_s)
        except BaseException:
            unit.is_awaited = False
            self._tell_unattended()
            raise

    def _settle_one(self, handle: ElasticHandle, deadline: float, limit_s: float) -> None:
        """Wait until a handle is committed, has failed, or its view has changed."""
        view = handle.view
        for one in handle.mates:
            left_s = max(deadline - time.perf_counter(), 0.0)
            status = one.wait_landed(left_s)
            if status != Status.OK:
                break
        if one._is_over() or one.view != view:
            with self.changed:  # what is left of its scope is about to be started again
                self.changed.wait(_LOOK_S)
        elif status is None:
            raise one.late(limit_s)
        elif status != Status.OK:
            self._settle_failed(one, view, status, left_s)
        else:
            if handle.unit.reported != view:
                self._report_landed()
            self._await_commit(handle, view, deadline, limit_s)

    def _await_commit(
        self, handle: ElasticHandle, view: int, deadline: float, limit_s: float
    ) -> None:
        """Wait until a landed result is committed, or the view has changed."""
        with self.changed:
            board = self._board if handle.view == self.view == view else None
            marks = handle.left_marks if board is not None else []
        if board is not None:
            for mark in marks:
                left_s = max(deadline - time.perf_counter(), 0.0)
                if not board.wait(*mark, left_s, self.config.spin_us):
                    break  # in time, or its view ends
            self._take_landed([handle])
        with self.changed:
            if not self.changed.wait_for(
                lambda: handle._is_over() or self.view != view or self._fatal is not None,
                max(deadline - time.perf_counter(), 0.0),
            ):
                raise handle.late(limit_s)
            if not handle._is_over() and self.view == view and self._fatal is not None:
                raise type(self._fatal)(str(self._fatal))

    def _settle_failed(self, handle: ElasticHandle, view: int, status: int, left_s: float) -> None:
        """Await the view in which an operation is started again, or keep its error."""
        if status not in LOSSES:
            self._keep_error(handle, handle.explain())
            return
        failure = self.connections.failure(handle.names[0], Status.PEER_LOST)
        self._report(failure, view)
        if self._is_departure(failure, view):  # nobody is lost
            self._keep_error(handle, self._witness.error(failure))
        else:
            self._await_view(view, left_s)

    def _keep_error(self, handle: ElasticHandle, error: FastPSError) -> None:
        """Let an operation fail, and those of its scope, which cannot be handed out without it."""
        with self.changed:
            for one in handle.mates:
                one.restore_sources()
                one.error = error
                self._forget(one)

    def _report_landed(self) -> None:
        """Report all that has landed and was not reported yet, on the board or by one message.

        What a program waits for later is committed with what it waits for now.
        """
        with self.changed:
            landed: list[ElasticHandle] = []
            seen: set[int] = set()
            for handle in self._active.values():
                unit = handle.unit
                if id(unit) in seen:
                    continue
                seen.add(id(unit))
                if unit.reported != self.view and unit.has_landed(self.view):
                    unit.reported = self.view
                    landed += handle.mates
            if not landed:
                return
            if (board := self._board) is not None:
                board.report([mark for one in landed for mark in one.left_marks])
                return
            entries = tuple(entry for one in landed for entry in one.left_entries)
            generation = self._generation
        self._send(ResultsLanded(generation, entries))

    def _send(self, message: ResultsLanded | BoardRead) -> None:
        if (client := self._client) is not None:
            with contextlib.suppress(FastPSError):  # the end of the connection has its own error
                client.send(message)

    def _take_landed(self, handles: Iterable[ElasticHandle]) -> None:
        """Commit what has landed on all workers, by the board of this view."""
        with self.changed:
            board, view = self._board, self.view
            if board is None:
                return
            landed = [
                entry
                for one in handles
                if one.view == view == one.unit.reported and not one._is_over()
                for entry, mark in zip(one.left_entries, one.left_marks, strict=True)
                if board.has(*mark)
            ]
            if landed:
                self._on_board.update(map(parts_of, landed))
                self._commit(landed)

    def _read_board(self) -> None:
        """Commit what the board of a view that ends has committed; all survivors read the same."""
        with self.changed:
            if self._board is not None:
                self._board.seal()
                self._take_landed(dict.fromkeys(self._active.values()))
        self._tell_board()

    def _tell_board(self) -> None:
        """Tell the scheduler what the board has committed, for the log of views."""
        with self.changed:
            entries = tuple(entry_of(*last) for last in self._on_board.items())
            read = BoardRead(self._generation, entries)
        if entries:
            self._send(read)

    def _commit(self, entries: Sequence[str]) -> None:
        """Take commits: of the scheduler, on the control thread, or of the board."""
        with self.changed:
            for entry in entries:
                if entry.endswith("#"):
                    self._commit_operation(entry)
                    continue
                name, self._counts[name] = parts_of(entry)
                handle = self._active.get(name)
                if handle is not None and handle.commit(entry):
                    self._forget(handle)
            self.changed.notify_all()

    def _commit_operation(self, entry: str) -> None:
        groups = self._groups
        if isinstance(groups, ElasticGroups):
            groups.commit(entry)

    def _forget(self, handle: ElasticHandle) -> None:
        """Let an operation be active no more; the caller holds the lock."""
        for name in handle.names:
            if self._active.get(name) is handle:
                del self._active[name]
        self.changed.notify_all()

    def _report_landings(self) -> None:
        """Report what lands while no thread waits for it, until the end."""
        while not self._ending.is_set():
            with self.changed:
                self.unattended.wait_for(
                    lambda: self._is_unattended or self._ending.is_set(), _SLOW_LOOK_S
                )
                is_busy = bool(self._active) or self._is_tracking
            if is_busy:
                self._report_landed()
                self._take_landed(list(dict.fromkeys(self._active.values())))
                if isinstance(groups := self._groups, ElasticGroups):
                    groups.report_landings()
                self._report_ended_links()
                self._ending.wait(_LOOK_S)

    def _report_ended_links(self) -> None:
        """Report at once, once in a view, which link ended first: it explains those that follow.

        A thread of the program that waits would report it too, but perhaps late.
        """
        view = self.view
        if self._told_ended == view or self._has_news(view):  # or a newcomer waits
            return
        if (now := self.connections).engine.failure is None and now.exchange.failure is None:
            return
        self._told_ended = view
        self._report(now.failure("", Status.PEER_LOST), view)

    @property
    def _is_unattended(self) -> bool:
        """Whether something may land that no thread waits for; the caller holds the lock."""
        units = (one.unit for one in self._active.values())
        return self._is_tracking or any(one.is_closed and not one.is_awaited for one in units)

    @property
    def _is_tracking(self) -> bool:
        groups = self._groups
        return isinstance(groups, ElasticGroups) and groups.is_tracking

    @property
    def has_failed(self) -> bool:
        """Whether no view comes any more."""
        return self._fatal is not None

    def _is_landed(self, handle: ElasticHandle) -> bool:
        """Return whether an operation can be committed: its scope has landed in this view."""
        return not handle._is_over() and handle.unit.has_landed(self.view)

    def _landed(self) -> list[str]:
        """List the operations that have landed and are not committed."""
        return [name for name, one in list(self._active.items()) if self._is_landed(one)]

    # ---- statistics ----

    def statistics(self) -> dict[str, float]:
        """Count as Session.statistics(), over all views of this worker."""
        while True:
            counted, now = self._counted, getattr(self, "connections", None)
            numbers = super().statistics()
            if counted is self._counted and now is getattr(self, "connections", None):
                break
        ended, counts = counted
        if self.is_over or now is None:
            return numbers
        if ended is now:  # whose numbers are among the counts
            return numbers | counts
        return numbers | {name: numbers.get(name, 0) + n for name, n in counts.items()}

    def _count_view(self) -> None:
        """Add the numbers of a view that ends to those of the ones before."""
        from fastps.telemetry.statistics import is_counter  # noqa: PLC0415  (where a view ends)

        before, found = self._counted[1], self.connections.statistics()
        if self._counted[0] is not self.connections:  # else it was counted, and cut short
            names = filter(is_counter, {*before, *found})
            counts = {name: before.get(name, 0) + found.get(name, 0) for name in names}
            self._counted = self.connections, counts

    # ---- losses ----

    def await_view_after(self, generation: int) -> None:
        """Wait until the view after that of a generation of the job has begun."""
        with self.changed:
            view, is_over = self.view, self._generation != generation
        if _is_waited_for():
            return
        if not is_over:
            self._await_view(view, self.config.start_timeout_s)
        self.acknowledge_view()

    def acknowledge_view(self) -> None:
        """Note that the program knows of the present view: its operations need not say so."""
        if has_news():
            self.told_view = self.view

    def view_error(self, what: str) -> ViewChangedError:
        """Return the error that tells the program of the present view."""
        self.acknowledge_view()
        return self._changed_error(what)

    def _has_news(self, view: int) -> bool:
        """Return whether a view has ended, or is about to."""
        return self.view != view or self._news is not None or self._is_changing

    def _await_view(self, view: int, timeout_s: float) -> None:
        """Wait until the view after this one has begun; raises why none comes."""
        news_s = self.config.lease_s + _NEWS_S
        timeout_s = max(timeout_s, news_s)
        with self.changed:
            if not self.changed.wait_for(
                lambda: self._has_news(view) or self._fatal is not None, news_s
            ):
                raise PeerLostError(
                    f"links of view {view} ended, and the scheduler did not say within {news_s:g} "
                    "s which process is lost. Restart the job"
                )
            if not self.changed.wait_for(
                lambda: self.view != view or self._fatal is not None, timeout_s
            ):
                raise PeerLostError(
                    f"the view after view {view} did not begin within {timeout_s:g} s; a survivor "
                    "may be stopped. Restart the job"
                )
            if self.view == view and self._fatal is not None:
                raise type(self._fatal)(str(self._fatal))

    def _view_of(self, view: int) -> int:
        """Return the view in which something failed: this one, or one before that it names.

        The view may change after the failure, and before the next line reads its number. Then
        numbers of members mean others, and no news comes that explains the failure.
        """
        return min(view or self.view, self.view)

    def _report(self, failure: Failure, view: int) -> None:
        """Let the scheduler know that links ended, if it has not said so itself."""
        client, report = self._client, self._witness.report(failure)
        is_known = self._has_news(view) and not self._is_in_view_thread()
        if client is None or report is None or is_known or self.is_over:
            return
        with contextlib.suppress(FastPSError):
            client.report_lost(
                report.member, report.cause, is_owner=report.is_owner,
                generation=client.job.generation,
            )  # fmt: skip

    def _blame(self, failure: Failure) -> FastPSError:
        """Return the error of an operation that is not started again."""
        if not failure.is_loss or self._fatal is not None or self.is_over:
            return super()._blame(failure)
        view = self._view_of(failure.view)
        self._report(failure, view)
        if self._is_departure(failure, view) or not self._has_news(view):
            return super()._blame(failure)
        what = failure.tensor if failure.is_operation else f"tensor {failure.tensor!r}"
        return self._changed_error(what)

    def _is_departure(self, failure: Failure, view: int) -> bool:
        """Wait for news of what ended links; return whether a worker left in order."""
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self._has_news(view)
                    or self._fatal is not None
                    or bool(self._witness.departure(failure.owner, failure.culprit))
                ),
                self.config.lease_s + _NEWS_S,
            )
            is_known = self._has_news(view) or self._fatal is not None
        return not is_known and bool(self._witness.departure(failure.owner, failure.culprit))

    def _changed_error(self, what: str) -> ViewChangedError:
        return ViewChangedError(
            f"{what}: {self._cause}; the job goes on {self._how}: call the operation again on all "
            "workers. Make process sets anew before, and the groups of torch.distributed by "
            "destroy_process_group() and init_process_group()"
        )

    def blame(
        self, name: str, status: int, *, connections: Connections | None = None, **how: Any
    ) -> FastPSError:
        """Word the error of a group's operation; see Session.blame().

        If its view has ended, once the next one has begun, so that it can be called again.
        """
        is_over = connections is not None and connections is not self.connections
        if is_over and status in LOSSES and not self.is_over:  # with its view
            return self.view_error(name)
        view = self._view_of((connections or self.connections).job.view)
        error = super().blame(name, status, connections=connections, **how)
        if isinstance(error, ViewChangedError) and not _is_waited_for():
            try:
                self._await_view(view, self.config.start_timeout_s)
            except FastPSError as other:
                return other
            self.acknowledge_view()
        return error

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ResultsCommitted):
            self._commit(event.entries)
            return
        if isinstance(event, Newcomers):
            self.n_newcomers = event.count
            return
        if isinstance(event, ViewJoined) or (isinstance(event, ViewLost) and event.survives):
            self._note_change(event)
            return
        if isinstance(event, ViewLost):
            self._fail(PeerLostError(f"this process was taken for lost: {event.lost.cause}"))
        elif isinstance(event, PeerLost):
            self._fail(PeerLostError(str(event)))
        elif isinstance(event, JobOver):
            self._fail(ShutdownError(f"the job is over: {event.reason}"))
        super()._on_event(event)
        with self.changed:
            self.changed.notify_all()

    def _fail(self, error: FastPSError) -> None:
        with self.changed:
            self._fatal = self._fatal or error
            if self._board is not None:
                self._board.end()
            self.changed.notify_all()

    # ---- the next view ----

    def _change_views(self) -> None:
        while True:
            with self.changed:
                self.view_ends.wait_for(lambda: self._news is not None or self._ending.is_set())
                if self._ending.is_set():
                    return
                self._is_changing = True
            with self._view_lock:
                while not self._has_changed_view():
                    pass  # another member was lost meanwhile
            with self.changed:
                self._is_changing = False
                self.changed.notify_all()
            if self._fatal is not None:
                return

    def _has_changed_view(self) -> bool:
        """Change the view; False: another member was lost meanwhile. Keeps why it cannot."""
        try:
            self._change_view()
        except FastPSError as error:
            log.info("the view cannot begin: %s", error)
            if self._is_told():
                return False
            self._fail(error)
        except BaseException as error:
            log.exception("the view cannot be changed")
            self._fail(FastPSError(f"the view cannot be changed: {error!r}"))
        return True

    def _is_told(self) -> bool:
        """Wait until the scheduler says that a member is lost; False: it does not."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._news is not None or self._fatal is not None or self._ending.is_set(),
                self.config.lease_s + _NEWS_S,
            )
            return self._news is not None and self._fatal is None and not self._ending.is_set()

    def _change_view(self) -> None:
        """End the view, await the next one, and start again what was in flight."""
        began = time.monotonic()
        invalidate_call_cache()
        if self._groups is not None:
            lost = "" if self._news is None else self._news.cause
            self._groups.end_view(lost or "a member is lost")
            with contextlib.suppress(FastPSError):
                self._groups.close()
        if hasattr(self, "connections"):  # else this is a newcomer's first view
            self._count_view()
            self.connections.end_view()
        self._fence.wait()
        self._read_board()
        if self.has_left:
            self._leave_at_boundary()
        else:
            self._begin_view(began)

    def _begin_view(self, began: float) -> None:
        with self.changed:
            self._news = None
        for name, tensor in self._tensors.items():
            self._layouts[name] = tensor.layout
        self._begin(self._given)
        self._landings.clear()
        connections = self._meet_again()
        invalidate_call_cache()  # of calls that ended since the view has
        changes = self._take_changes(connections.job.generation)
        self._fence.wait()
        self._fence.watch(self.connections.job)
        if (why := self._cannot_serve()) is not None:
            self._fail(PeerLostError(why))
            return
        self._declare_specs([
            relaid(TensorSpec(name, layout), self._chunk_bytes)
            for name, layout in self._layouts.items()
        ])  # fmt: skip
        self._renew_copies()
        with self.changed:
            handles = list(dict.fromkeys(self._active.values()))
        for handle in handles:
            self._start_again(handle)
        cause = "; ".join(one.cause for one in changes)
        view = View(
            connections.job.view, self.rank, self.size, cause, len(handles),
            time.monotonic() - began,
        )  # fmt: skip
        if self.rank == 0:
            log.warning("%s", view)
        if not self._has_told(view):
            return
        with self.changed:
            self.view, self._untold = view.number, []
            self._generation = self.generations[self.view] = connections.job.generation
            self._board, self._on_board = connections.board, {}
            self.changed.notify_all()

    def _has_told(self, view: View) -> bool:
        """Call on_view with a view; False: it has raised, which ends this worker as a death does.

        The others know it as the cause, and go on without this worker.
        """
        if what := tell(self._on_view, view):
            self._fail(FastPSError(f"{what}; so this worker leaves the job"))
            with contextlib.suppress(FastPSError):
                self.connections.client.report_lost(self.rank, f"its {what}")
        return not what

    def _meet_again(self) -> Connections:
        """Await the next view, and connect to its members."""
        from fastps.session.connections import Connections  # noqa: PLC0415  (as in Session)

        try:
            connections = Connections(self._given, self._on_event, self._client)
        finally:
            self._note_place()
        job = connections.job
        self.config = replace(
            self._given, size=job.n_workers, num_servers=len(job.members) - job.n_workers
        )
        self._join(connections)
        return connections

    def _start_again(self, handle: ElasticHandle) -> None:
        """Start an operation in the view that begins."""
        try:
            handle.start(self.connections.job.view)
        except PeerLostError as error:
            if isinstance(error, ViewChangedError) or self._news is not None:
                raise
            with self.changed:
                handle.error = error
                self._forget(handle)

    def _identities(self) -> list[tuple[str, int]]:
        return [(one.hostname, one.pid) for one in self.connections.job.workers]

    def _rank_of(self, identity: tuple[str, int]) -> int | None:
        """Return the rank of a process in this view; None: it is lost."""
        known = self._identities()
        return known.index(identity) if identity in known else None

    # ---- the end ----

    def close(self) -> None:
        """Leave the job in order, as Session.close()."""
        if isinstance(groups := self._groups, ElasticGroups):
            groups.report_landings()  # which others wait for
        with self.changed:  # others may need us to commit what has landed
            if not self.changed.wait_for(
                lambda: (
                    self._fatal is not None
                    or bool(self.left)  # who has left commits nothing more
                    or not self._landed()
                ),
                self.config.shutdown_timeout_s,
            ):
                log.warning(
                    "%s landed here, but not on all workers within %g s of shutdown()",
                    ", ".join(self._landed()), self.config.shutdown_timeout_s,
                )  # fmt: skip
        self._tell_board()
        self._ending.set()
        with self.changed:
            for waiting in (self.changed, self.view_ends, self.unattended):
                waiting.notify_all()
        join_threads(self._threads, self.config.shutdown_timeout_s)
        super().close()
        self._fence.close()
