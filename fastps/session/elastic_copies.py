# SPDX-License-Identifier: Apache-2.0
"""Values that servers hold in an elastic session: its workers' copies renew them in each view.

Decides which values are renewed when a view begins: those that all workers had registered when
the last one ended. See algorithms/server_copies.py for what that does. Threads: fastps:view
renews; those of the program register, and start operations of a view.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fastps.contract.contract import Policy
from fastps.errors import (
    ConfigError,
    PeerLostError,
    StallError,
    Status,
    ViewChangedError,
)

if TYPE_CHECKING:
    from fastps.config import Config
    from fastps.control.blame import Failure, Witness
    from fastps.control.protocol import Layout, ViewJoined, ViewLost
    from fastps.session.connections import Connections
    from fastps.worker.handle import OperationHandle

LOSSES = (Status.PEER_LOST, Status.LINK_TIMEOUT, Status.SHUTDOWN)
_LOOK_S = 0.05  # between looks whether another member is lost


class Copies(Protocol):
    """What a session renews in each view: fastps.algorithms.server_copies.ServerCopies."""

    @property
    def name(self) -> str:
        """Its name, the same on all workers."""

    def renewal(self) -> Iterator[OperationHandle]:
        """Renew the values; yields operations to wait for."""


class CopiesMixin:
    """What an elastic session does for values that servers hold."""

    copies: dict[str, tuple[Copies, int]]  # by name; and its commits before it was registered

    view: int
    config: Config
    changed: threading.Condition
    connections: Connections
    _given: Config
    _cause: str
    _counts: dict[str, int]
    _layouts: dict[str, Layout]
    _news: ViewLost | ViewJoined | None
    _witness: Witness

    if TYPE_CHECKING:

        def in_a_view(self, call: Callable[[], object]) -> None: ...

        def _report(self, failure: Failure, view: int) -> None: ...

        def _is_departure(self, failure: Failure, view: int) -> bool: ...

        def _await_view(self, view: int, timeout_s: float) -> None: ...

    def begin_here(self, verb: str, *args: Any, **options: Any) -> Any:
        """Start an operation in this view alone, by a method of Session; no commit ends it."""
        return getattr(super(), verb)(*args, **options)

    def keep_copies(self, copies: Copies) -> None:
        """Renew values in each view from now on; blocks until all workers have registered them.

        A result that is committed anywhere is committed everywhere when a view ends. So all
        survivors renew the same values.
        """
        name = copies.name
        with self.changed:
            if name in self.copies:
                raise ConfigError(
                    f"{name!r} are held by servers already: give each model its own prefix"
                )
            self.copies[name] = copies, self._counts.get(name, 0)
        session: Any = self
        session.push_pull_async(np.zeros(1), name, average=False).wait()

    def await_view_of_loss(self, handle: OperationHandle, view: int, timeout_s: float) -> None:
        """Await the view after one that an operation has failed with; raises why none comes."""
        if handle.wait_status(0.0) not in LOSSES:
            handle.wait(0.0)
        name = handle._tickets[0].name
        failure = self.connections.failure(name, Status.PEER_LOST)
        self._report(failure, view)
        if self._is_departure(failure, view):
            raise self._witness.error(failure)
        self._await_view(view, timeout_s)

    # ---- a view begins ----

    def _cannot_serve(self) -> str | None:
        """Return why no view can begin: only servers can do what some tensor needs."""
        layouts = self._layouts.items()
        if self._given.num_servers and not self.config.num_servers:
            for name, layout in layouts:
                if layout.rule.has_meaning():
                    return (
                        f"tensor {name!r} cannot be reduced: {self._cause}, and was the last "
                        "server: its rule is not applied by workers, of which some may lie. "
                        "Restart the job"
                    )
        if not self.connections.owners:
            for name, layout in layouts:
                if layout.policy is not Policy.SUM:
                    return (
                        f"tensor {name!r} cannot be held: {self._cause}, and the workers that are "
                        "left share memory, without a server. Restart the job, with "
                        "FASTPS_FORCE_DISTRIBUTED=1"
                    )
        return None

    def _renew_copies(self) -> None:
        """Renew what servers hold; FastPSError if the view ends meanwhile."""
        with self.changed:
            found = [
                copies for name, (copies, before) in self.copies.items()
                if self._counts.get(name, 0) > before
            ]  # fmt: skip
        for copies in found:
            for handle in copies.renewal():
                self._await_here(handle)

    def _await_here(self, handle: OperationHandle) -> None:
        """Wait for an operation of a view that begins, or until that ends."""
        limit_s = self._given.op_timeout_s
        deadline = time.monotonic() + limit_s
        while (status := handle.wait_status(_LOOK_S)) is None:
            if self._news is not None:
                raise ViewChangedError("the view ends before it has begun: another member is lost")
            if time.monotonic() > deadline:
                raise StallError(
                    f"values that servers hold were not renewed within {limit_s:g} s: a survivor "
                    "may be stopped. Restart the job"
                )
        if status != Status.OK:
            raise PeerLostError("a member is lost while values that servers hold are renewed")
