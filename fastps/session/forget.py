# SPDX-License-Identifier: Apache-2.0
"""What a session does to forget names: of tensors, and of operations among workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fastps.config import Config
from fastps.errors import ConfigError, FastPSError
from fastps.session.tensor_spec import Names, check_distinct

if TYPE_CHECKING:
    from fastps.control.client import ControlClient
    from fastps.session.connections import Connections
    from fastps.session.groups import Groups
    from fastps.session.join import JoinState
    from fastps.session.routes import RouteChecker
    from fastps.session.single_worker import Tensors
    from fastps.worker._plan import PlannedTensor


@contextlib.contextmanager
def retired(tensors: Iterable[PlannedTensor]) -> Iterator[None]:
    """Let nothing be started on tensors; where FastPSError is raised they go on as before.

    Raises that for one with an operation in flight.
    """
    done: list[PlannedTensor] = []
    try:
        for tensor in tensors:
            tensor.retire()
            done.append(tensor)
        yield
    except FastPSError:
        for tensor in done:
            tensor.reinstate()
        raise


class ForgetMixin:
    """The part of a session that forgets names."""

    config: Config
    join_state: JoinState
    check_usable: Callable[[], None]
    _check_poison: Callable[[Sequence[str]], None]
    _poison_of: Callable[[Sequence[str]], str]
    _client: ControlClient | None
    connections: Connections
    _groups: Groups | None
    _lock: threading.Lock
    _alone: Tensors
    _tensors: dict[str, PlannedTensor]
    n_forgotten: int  # calls of forget()
    routes: RouteChecker

    def forget(self, names: Names) -> None:
        """Forget declared tensors on all workers and servers; see fastps.forget(). Blocks."""
        self.check_usable()
        names = (names,) if isinstance(names, str) else tuple(names)
        check_distinct(names)
        self.n_forgotten += 1
        self.routes.forget(names)
        groups = self._groups
        is_known = groups is not None and any(groups.knows(name) for name in names)
        declared = self._tensors if self._client is not None else self._alone.layouts
        if not is_known:  # or all find out together
            self._check_poison(names)
            unknown = [name for name in names if name not in declared]
            if unknown:
                raise ConfigError(
                    f"cannot forget {unknown[0]!r}: no tensor or operation has this name"
                )
        if self._client is not None and names:
            self._forget_everywhere(self._client, names, groups if is_known else None)
            return
        if groups is not None:
            groups.forget(names, declared)
        for name in names:
            self._alone.layouts.pop(name, None)

    def _forget_everywhere(
        self, client: ControlClient, names: Sequence[str], groups: Groups | None
    ) -> None:
        """Forget tensors, and in groups what operations had their names."""
        timeout_s = self.config.op_timeout_s
        tensors = {name: self._tensors[name] for name in names if name in self._tensors}
        with retired(tensors.values()):
            if groups is not None:
                groups.forget(names, self._tensors, poison=self._poison_of(names))
            if not tensors:
                client.barrier("forget", timeout_s=timeout_s)
                return
            versions = {name: tensor.version for name, tensor in tensors.items()}
            request = client.forget(versions, timeout_s=timeout_s)
        with self._lock:  # so that nobody finds a tensor that the engine has forgotten
            for name, tensor in tensors.items():
                self._tensors.pop(name, None)  # close() may have been called
                self.connections.forget_tensor(tensor)
        self.join_state.forget(tensors)
        client.dropped(request)
