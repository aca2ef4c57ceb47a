# SPDX-License-Identifier: Apache-2.0
"""A session that joins a running elastic job: first it waits, then it is as all others.

While it waits, its program builds model, optimizer and loader as at any start, and nobody waits
for it. It is the only worker then: what copies values from rank 0 keeps its own, and what would
sum over workers raises an error. rank() and size() are those that it would have now. elastic.run
calls enter(), which returns when the job has admitted this worker, and lets it take over the
values of the others. Threads: those of an elastic session; fastps:view awaits the job.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastps.config import Config
from fastps.contract.contract import Policy
from fastps.control.protocol import ViewJoined
from fastps.errors import FastPSError, ShutdownError
from fastps.session.elastic import ElasticSession
from fastps.session.elastic_handle import ElasticHandle
from fastps.session.session import Session

if TYPE_CHECKING:
    from fastps.control.client import ControlClient
    from fastps.control.protocol import TensorSpec
    from fastps.session.connections import Connections
    from fastps.session.groups import Groups
    from fastps.session.tensor_spec import Arrays, Names
    from fastps.session.view import View
    from fastps.types import DType
    from fastps.worker.handle import OperationHandle

log = logging.getLogger(__name__)

_TOO_EARLY = (
    "this worker waits to join a running job, and has yet to enter the function of elastic.run "
    "(fastps.elastic, fastps.torch.elastic), which is where it joins; communicate within that"
)


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """End the process with code 0 if the job is over: there is nothing left to do for it."""
    try:
        yield
    except ShutdownError as error:
        log.warning("this worker has not joined the job: %s", error)
        raise SystemExit(0) from error


class Newcomer(ElasticSession):
    """Membership of this process in an elastic job that runs."""

    is_waiting = True  # and has yet to join
    has_newcomers = is_new = True
    joins = 1

    def __init__(self, config: Config, on_view: Sequence[Callable[[View], object]] = ()) -> None:
        """Say hello to the job; see ElasticSession."""
        self._hello: ControlClient | None = None
        # the job's own numbers count from the first view on
        super().__init__(
            replace(config, size=max(config.size, 2), elastic_min=max(config.elastic_min, 1)),
            on_view,
        )
        self.view = self.told_view = 0

    def _connect(self, config: Config) -> None:
        from fastps.session.connections import say_hello  # noqa: PLC0415  (as in Session)

        with ends_in_order():
            self._hello = say_hello(config, self._on_event)
        self.expected = self._hello.expected

    def enter(self) -> None:
        """Join the job: blocks until its workers are at a boundary, which may take long.

        Raises SystemExit if the job ends in order before.
        """
        if not self.is_waiting:
            return
        self.check_usable()
        with ends_in_order(), self.changed:
            self._news = ViewJoined(0, "this worker joins")
            self.view_ends.notify_all()
            self.changed.wait_for(lambda: not self.is_waiting or self._fatal is not None)
            if self.is_waiting and self._fatal is not None:
                raise type(self._fatal)(str(self._fatal))

    # ---- while it waits ----

    def declare(self, specs: Any, *, policy: Policy = Policy.SUM, **terms: Any) -> None:
        """Declare nothing while it waits: the others have, and tell it when it joins."""
        if self.is_waiting:
            self.check_usable()
            return
        super().declare(specs, policy=policy, **terms)

    def _spec(self, name: str, shape: tuple[int, ...], dtype: DType, **terms: Any) -> TensorSpec:
        """Describe a tensor; the others, who know the job's least size, check its rule."""
        return Session._spec(self, name, shape, dtype, **terms)

    def push_pull_async(self, tensor: Arrays, name: Names, **options: Any) -> ElasticHandle:  # type: ignore[override]
        """Sum over all workers; FastPSError while it waits."""
        self._check_joined()
        return super().push_pull_async(tensor, name, **options)

    def broadcast_async(  # type: ignore[override]
        self, tensor: Arrays, root_rank: int, name: Names, *, dtype: DType | None = None
    ) -> ElasticHandle | OperationHandle:
        """Take over the root's values; keep those of now while it waits."""
        if self.is_waiting:
            return Session.broadcast_async(self, tensor, 0, name, dtype=dtype)
        return super().broadcast_async(tensor, root_rank, name, dtype=dtype)

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: str = "object") -> Any:
        """Return the root's object; the present one while it waits."""
        if self.is_waiting:
            return Session.broadcast_object(self, obj, 0, name)
        return super().broadcast_object(obj, root_rank, name)

    def root_of(self, root_rank: Any) -> Any:
        """Return which process a root is; this one while it waits."""
        return Session.root_of(self, 0) if self.is_waiting else super().root_of(root_rank)

    def is_root(self, root: Any) -> bool:
        """Return whether this worker is a root by root_of()."""
        return Session.is_root(self, root) if self.is_waiting else super().is_root(root)

    def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Wait for all workers; FastPSError while it waits to join them."""
        self._check_joined()
        super().barrier(name, timeout_s=timeout_s)

    @property
    def groups(self) -> Groups:
        """The groups of the present view; FastPSError while it waits."""
        self._check_joined()
        return super().groups

    def _check_joined(self) -> None:
        if self.is_waiting:
            self.check_usable()
            raise FastPSError(_TOO_EARLY)

    # ---- its first view ----

    def _meet_again(self) -> Connections:
        if self._client is not None:
            return super()._meet_again()
        self._client = self._hello
        try:
            return super()._meet_again()
        finally:
            if not hasattr(self, "connections"):
                self._client = None

    def _note_place(self) -> None:
        client = self._hello
        if not self._noted and client is not None and (job := client.known_job) is not None:
            self._noted, self.first_place = job.generation, (job.me, job.n_workers)
            self.view = job.view - 1
        super()._note_place()

    def _begin_view(self, began: float) -> None:
        super()._begin_view(began)
        with self.changed:
            if self.is_waiting and self._fatal is None:
                self.is_waiting, self.expected, self.told_view = False, None, self.view
            self.changed.notify_all()

    # ---- the end ----

    def close(self) -> None:
        """Leave the job in order, or stop to wait for it."""
        if self.is_waiting and self._hello is not None and not hasattr(self, "connections"):
            with contextlib.suppress(FastPSError):
                self._hello.leave(timeout_s=self.config.shutdown_timeout_s)
            self._fail(ShutdownError("this process does not wait any more"))
        super().close()
