# SPDX-License-Identifier: Apache-2.0
"""Operations among the members of an elastic job: complete on all members, or on none.

When a member is lost, one survivor may be through with a collective operation, and another not. So
its result is handed out when it has landed on all members, as that of push_pull(); see
control/commits.py. Otherwise all of them raise ViewChangedError and can call it again in the next
view; a sum in place, or a broadcast, lands beside its array until then. Messages between two
members, operations among neighbors, and windows are not committed. Threads: any; fastps:commit
reports what lands while no thread waits for it, for another member may.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fastps.collectives.group import Group
from fastps.collectives.group_base import KINDS, SUMS, ReadyKind
from fastps.control.protocol import ResultsLanded
from fastps.errors import FastPSError, Status, ViewChangedError
from fastps.session.groups import Groups
from fastps.session.host import SessionHost
from fastps.session.view import has_news
from fastps.worker.handle import Array, OperationHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastps.collectives._exchange import Operation
    from fastps.collectives.schedule import Schedule


class ViewHost(SessionHost, Protocol):
    """An elastic session, as its groups see it."""

    changed: threading.Condition  # guards what follows, and the landings of groups
    unattended: threading.Condition  # of the same lock: notified of what nothing waits for
    view: int
    told_view: int  # the last one that the program knows of
    ended_windows: dict[str, str]  # of earlier views, by name: whose loss ended them

    @property
    def is_ours(self) -> bool:
        """Whether the session is this process's, not that of which this is a forked child."""

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""

    @property
    def has_failed(self) -> bool:
        """Whether no view comes any more."""

    def await_view_after(self, generation: int) -> None:
        """Wait until the view after that of a generation of the job has begun."""

    def view_error(self, what: str) -> ViewChangedError:
        """Return the error that tells the program of the present view."""


COMMITTED = (*SUMS, "allgather", "gather", "scatter", "alltoall", "broadcast", "barrier")


class Landing:
    """An operation until it is committed; the session's lock guards it."""

    def __init__(self, operation: Operation, members: tuple[int, ...]) -> None:
        self.operation, self.members = operation, members
        self.is_taken = False  # something holds this that will wait for it
        self.is_reported = False
        self.is_committed: bool | None = None  # False: its view has ended
        self.keeps: ElasticGroupHandle | None = None  # until then, for what lands beside its array

    def decide(self, *, is_committed: bool) -> None:
        """Note whether it is committed; a handle that nobody has kept hands its result out now."""
        self.is_committed, self.keeps = is_committed, None

    @property
    def status(self) -> int | None:
        """How it ended here; None: it has not."""
        return self.operation.wait(timeout_s=0.0) if self.operation.is_done else None


def entry_of(operation: Operation) -> str:
    """Return the entry of an operation in control/commits.py; no tensor has one like it."""
    return f"{operation.channel}#{operation.number}#"


class ElasticGroupHandle(OperationHandle):
    """The handle of an operation whose result is handed out when it has landed on all members."""

    beside: tuple[Array, Array] | None = None  # where it lands, and where it is handed out

    def __init__(self, groups: ElasticGroups, landing: Landing, result: Array | None, **how: Any):
        super().__init__((landing.operation,), (result,), groups.waiting, is_single=True, **how)
        self.operations = (landing.operation,)
        self._groups, self.landing = groups, landing

    def __del__(self) -> None:
        """Hand out what nobody waited for, not in a forked child: see ElasticHandle."""
        if self.beside is None or not self._groups.is_ours:
            return
        if self.landing.is_committed and not self.has_failed:
            with contextlib.suppress(Exception):
                self.wait(0.0)

    def _is_over(self) -> bool:
        is_decided = self.landing.is_committed is not None or self.wait_status(0.0) != Status.OK
        return super()._is_over() and is_decided

    def _collect(self, timeout_s: float | None) -> FastPSError | None:
        limit_s = self._waiting.timeout_s if timeout_s is None else timeout_s
        deadline = time.perf_counter() + limit_s
        if error := super()._collect(limit_s):
            return error
        return self._groups.settle(self.landing, max(deadline - time.perf_counter(), 0.0), limit_s)

    def _make(self, error: FastPSError | None) -> Array | list[Array]:
        if error is None and self.beside is not None:
            np.copyto(self.beside[1], self.beside[0])
        return super()._make(error)


class ElasticGroup(Group):
    """A group whose collective operations are committed."""

    _host: ElasticGroups

    @staticmethod
    def repeated_of(operation: Operation, arrays: list[Array], result: Any) -> None:
        """Let each call take the whole way, on which it is committed."""

    def _launch(
        self, kind: ReadyKind, channel: int, label: str, array: Any, out: Any, **how: Any
    ) -> Operation:
        operation = super()._launch(kind, channel, label, array, out, **how)
        if KINDS[kind.code // 8] in COMMITTED:
            self._host.track(operation, self.ranks)
        return operation

    def _start(
        self, key: tuple[object, ...], make: Callable[[], Schedule], array: Array | None,
        out: Array | None, result: Array | None, **how: Any,
    ) -> OperationHandle:  # fmt: skip
        is_in_place = key[0] == "broadcast" or (key[0] in SUMS and out is array)
        if not is_in_place or out is None or self.size == 1:
            return super()._start(key, make, array, out, result, **how)
        landing = self.empty(out.shape, out.dtype)
        handle = super()._start(key, make, array, landing, result, **how)
        assert isinstance(handle, ElasticGroupHandle)
        handle.beside = landing, out
        self._host.keep_handle(handle)
        return handle

    def _handle(
        self, operations: Sequence[Operation], result: Array | None, *, is_average: bool = False
    ) -> OperationHandle:
        landing = self._host.take(operations[0]) if operations else None
        if landing is None:
            return super()._handle(operations, result, is_average=is_average)
        return ElasticGroupHandle(self._host, landing, result, is_average=is_average)

    def await_recovery(self, error: BaseException) -> None:
        """Wait until the next view has begun, if an error says that this one has ended."""
        if isinstance(error, ViewChangedError):
            self._host.await_next_view()

    def finish(self, operation: Operation) -> None:
        """Wait for an operation, and its commit; see GroupBase.finish()."""
        landing = self._host.take(operation)
        super().finish(operation)
        if landing is not None and (
            error := self._host.settle(landing, self.timeout_s, self.timeout_s)
        ):
            raise error


class ElasticGroups(Groups):
    """The groups of one view."""

    _session: ViewHost

    def __init__(self, session: ViewHost, *parts: Any) -> None:
        self._landings: dict[str, Landing] = {}  # in flight, or not taken; by entry
        self._changed = session.changed
        super().__init__(session, *parts)
        job = self._connections.job
        self._view, self._generation = job.view, job.generation

    def _make(self, ranks: Sequence[int], key: str = "", words: str = "") -> Group:
        group = ElasticGroup(self, ranks, key, words)
        self.known[group.key] = group
        return group

    def check_usable(self) -> None:
        """Raise ViewChangedError for the first operation of a view, if nothing else has yet.

        So the program knows of the loss, and of the size of now, before it communicates again, and
        all survivors hear of it at the same operation.
        """
        super().check_usable()
        self.check_present("this operation")
        if self._session.told_view < self._view and has_news():
            raise self._session.view_error("this operation")

    def check_present(self, what: str) -> None:
        """Raise ViewChangedError for what is of an earlier view."""
        if self._lost and not self._session.is_over:
            self.await_next_view()
            raise self._session.view_error(what)

    def no_window(self, name: str, others: Sequence[str]) -> Exception:
        """Word the error of a window that is not there; see Groups.no_window()."""
        if not (lost := self._session.ended_windows.get(name)):
            return super().no_window(name, others)
        self._session.told_view = self._view
        return ViewChangedError(
            f"window {name!r} has ended: {lost}; the job goes on without it: call "
            "set_topology() and win_create() again on all workers"
        )

    def track(self, operation: Operation, members: tuple[int, ...]) -> None:
        """Take an operation of some members that has begun, and is to be committed."""
        landing = Landing(operation, () if len(members) == self.world.size else members)
        with self._changed:
            if self._lost:
                landing.is_committed = False
            self._landings[entry_of(operation)] = landing
            self._session.unattended.notify_all()

    def take(self, operation: Operation) -> Landing | None:
        """Return what is known of an operation, for what waits for it; None: nothing."""
        with self._changed:
            landing = self._landings.get(entry_of(operation))
            if landing is None or landing.operation is not operation:
                return None
            landing.is_taken = True
            if landing.is_committed is not None:
                del self._landings[entry_of(operation)]
            return landing

    def keep_handle(self, handle: ElasticGroupHandle) -> None:
        """Keep a handle until it is decided whether its result is handed out."""
        with self._changed:
            if handle.landing.is_committed is None:
                handle.landing.keeps = handle

    @property
    def is_ours(self) -> bool:
        """Whether they are this process's."""
        return self._session.is_ours

    @property
    def is_tracking(self) -> bool:
        """Whether an operation may have to be reported; the caller holds the lock."""
        return any(one.is_committed is None for one in self._landings.values())

    def report_landings(self) -> None:
        """Report to the scheduler all that has landed, and was not reported yet."""
        found: dict[tuple[int, ...], list[str]] = {}  # by the members of their groups
        with self._changed:
            for entry, landing in self._landings.items():
                status = landing.status
                if landing.is_committed is not None or landing.is_reported or status is None:
                    continue
                if status == Status.OK:
                    landing.is_reported = True
                    found.setdefault(landing.members, []).append(entry)
                else:
                    landing.decide(is_committed=False)
        for members, entries in found.items():
            with contextlib.suppress(FastPSError):  # the end of the connection has its own error
                self._connections.client.send(
                    ResultsLanded(self._generation, tuple(entries), members)
                )

    def commit(self, entry: str) -> None:
        """Take a commit; the caller holds the lock."""
        landing = self._landings.get(entry)
        if landing is not None:
            landing.decide(is_committed=True)
            if landing.is_taken:
                del self._landings[entry]

    def settle(self, landing: Landing, left_s: float, limit_s: float) -> FastPSError | None:
        """Wait for left_s until an operation that has landed is committed; return why it is not.

        Raises StallError, as of limit_s, in time.
        """
        operation = landing.operation
        if not landing.is_reported:
            self.report_landings()
        with self._changed:
            if not self._changed.wait_for(
                lambda: landing.is_committed is not None or self._session.has_failed, left_s
            ):
                raise self.explain(operation, None, limit_s)
            if landing.is_committed:
                return None
        status = Status.SHUTDOWN if self._session.is_over else Status.PEER_LOST
        return self.explain(operation, status, limit_s)

    def await_next_view(self) -> None:
        """Wait until there are groups of a later view."""
        self._session.await_view_after(self._generation)

    def end_view(self, lost: str) -> None:
        """Let no operation begin or be committed any more; see Groups.end_view()."""
        if self.has_windows:
            self._session.ended_windows |= dict.fromkeys(self.windows.names, lost)
        with self._changed:
            super().end_view(lost)
            self._drop_all()

    def close(self) -> None:
        """End what has threads, and what awaits its commit; idempotent."""
        with self._changed:
            self._drop_all()
        super().close()

    def _drop_all(self) -> None:
        for landing in self._landings.values():
            landing.decide(is_committed=bool(landing.is_committed))
        self._landings = {entry: one for entry, one in self._landings.items() if not one.is_taken}
        self._changed.notify_all()
