# SPDX-License-Identifier: Apache-2.0
"""The process's session: made by init(), ended by shutdown().

Holds the one piece of mutable module state in the library. Imports the session, and all that it
needs, when a job is joined: importing fastps costs next to nothing over NumPy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastps.errors import ConfigError, FastPSError, NotInitializedError
from fastps.native.condition import Condition
from fastps.session import excepthook, outside_job

if TYPE_CHECKING:
    from fastps.config import Config
    from fastps.control.foreign_launch import Rendezvous
    from fastps.session.session import Session
    from fastps.session.view import View

_current: Session | None = None
_met: Rendezvous | None = None  # with workers of another launcher; as long as the process lives
_is_taken = False  # by the parent of this process: its place in the job of another launcher
_changes = Condition()  # guards the next two, and who changes the session
_starting: _Start | None = None
_closing: int | None = None  # the thread that does
_waits: list[Callable[[], object]] = []  # of frameworks that work behind the program's back


class _Start:
    """A start of the session, and what made it fail for those who wait for it as well."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.error: Exception | None = None


def init(
    settings: Mapping[str, object], on_view: Sequence[Callable[[View], object]] = ()
) -> Session:
    """Make the process's session, or return the one it has; see fastps.init().

    on_view: called with each next view of an elastic job, also if it comes at once. Of several
    threads that call it one starts, and the others wait for that and return, or raise,
    the same. Waits for a shutdown() that is under way.
    """
    global _starting, _current
    with _changes:
        while not (_current is not None and _current.is_ours) and (_starting or _closing):
            _check_reentry("init()")
            awaited = _starting
            _changes.wait()
            if awaited is not None and awaited.error is not None:
                raise awaited.error
        if _current is not None and _current.is_ours:
            for call in on_view:
                _current.call_in_views(call)
            return _current
        _starting = start = _Start()
    session = None
    try:
        session = _started(settings, on_view)
    except Exception as error:
        start.error = error
        raise
    finally:
        with _changes:
            _starting = None
            if session is not None:
                _current = session
            _changes.notify_all()
    atexit.register(shutdown)
    if session.config.banner and session.rank == 0 and hasattr(session, "connections"):
        _say_banner(session)
    return session


def _check_reentry(call: str) -> None:
    """Raise FastPSError in a thread that would wait for itself."""
    if threading.get_ident() in (_closing, _starting and _starting.thread):
        raise FastPSError(
            f"{call} was called by a signal handler or a callback while this thread is inside "
            "init() or shutdown(); call it when they have returned"
        )


def _forget_changes_in_child() -> None:
    """Let a forked child begin anew: the threads that were at it are not in it."""
    global _changes, _starting, _closing, _is_taken
    _changes, _starting, _closing = Condition(), None, None
    if _current is not None and _met is not None:
        _is_taken = True
        from fastps.security.tokens import wipe_text  # noqa: PLC0415  (imported since init())

        wipe_text(str(_met.settings.get("token", "")))


os.register_at_fork(after_in_child=_forget_changes_in_child)


def _started(
    settings: Mapping[str, object], on_view: Sequence[Callable[[View], object]]
) -> Session:
    """Check the settings and make a session."""
    from fastps.config import load  # noqa: PLC0415
    from fastps.config.token import hide_token  # noqa: PLC0415

    hide_token()
    config = load(settings)
    _show_logs(config.log_level)
    excepthook.hook(_report_failure, is_brief=config.log_level != "DEBUG")
    if config.role not in ("worker", "validator"):
        raise ConfigError(
            "init() is for workers and validators, but FASTPS_ROLE or DMLC_ROLE is "
            f"{config.role}; start `fastps-server --role {config.role}` instead, or unset the "
            "variable"
        )
    session = _join(config, settings, on_view)
    if session.expected is None:  # else it has yet to join a job that runs
        outside_job.watch(session.size)
    return session


def _join(
    config: Config, settings: Mapping[str, object], on_view: Sequence[Callable[[View], object]]
) -> Session:
    """Make the session, in the job of a launcher of ours or of another."""
    from fastps.config import launchers, load  # noqa: PLC0415

    if not launchers.is_left_alone(config):
        return _made(config, on_view)
    from fastps.control import foreign_launch  # noqa: PLC0415

    global _met
    if _is_taken:
        raise NotInitializedError(
            "this process was forked from one that called fastps.init(), and its place in that "
            "job is taken; call init() in the process that trains"
        )
    met = _met or foreign_launch.meet(config)
    try:
        session = _made(load({**settings, **met.settings}), on_view)
    except BaseException:
        _met = None
        met.close()
        raise
    finally:
        met.board.clear()  # all are in, or none will be
    _met = met
    return session


def _made(config: Config, on_view: Sequence[Callable[[View], object]]) -> Session:
    if config.elastic_join:
        from fastps.session.newcomer import Newcomer  # noqa: PLC0415  (most jobs have none)

        return Newcomer(config, on_view)
    if config.is_elastic and config.size > 1:
        from fastps.session.elastic import ElasticSession  # noqa: PLC0415  (most jobs are not)

        return ElasticSession(config, on_view)
    from fastps.session.session import Session  # noqa: PLC0415

    return Session(config)


def wait_before_leaving(wait: Callable[[], object]) -> None:
    """Have wait() called before every end of a session: others need what it has still to do."""
    _waits.append(wait)


def shutdown() -> None:
    """End the process's session; does nothing if there is none.

    Where another thread does it already, waits until that has ended it.
    """
    global _closing, _current
    with _changes:
        if _closing == threading.get_ident():  # a signal handler, or what is waited for
            return
        if _closing is not None:
            while _closing is not None:
                _changes.wait()
            return
        session = _current
        if session is None:
            return
        _closing = threading.get_ident()
    try:
        if session.is_ours:
            for wait in _waits:
                wait()
        _current = None
        atexit.unregister(shutdown)
        session.close()
    finally:
        with _changes:
            _closing = None
            _changes.notify_all()


def _report_failure(text: str) -> None:
    """Let the others know why this program ends, before it leaves as if all were well."""
    session = _current
    if session is not None and session.is_ours and hasattr(session, "connections"):
        with contextlib.suppress(FastPSError):
            session.connections.client.report_lost(session.rank, f"its program ended with {text}")


def _say_banner(session: Session) -> None:
    """Print on stderr what the job is; a program without stderr goes without."""
    from fastps.session.banner import describe  # noqa: PLC0415  (rank 0 alone needs it)

    lines = describe(session.config, session.connections).splitlines()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("".join(f"[fastps] {line}\n" for line in lines))


def _show_logs(level: str) -> None:
    """Let FASTPS_LOG_LEVEL count in programs that set up no logging of their own."""
    logger = logging.getLogger("fastps")
    if logger.level == logging.NOTSET and level != "WARNING":  # which is shown anyway
        logger.setLevel(level)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)


def is_initialized() -> bool:
    """Return whether init() was called, in this process, and shutdown() was not."""
    return _current is not None and _current.is_ours


def current() -> Session:
    """Return the process's session; NotInitializedError when init() was not called."""
    session = known()
    session.check_usable()
    return session


def check_not_elastic(what: str, cure: str) -> None:
    """Raise ConfigError in an elastic job, for what cannot go on without a lost worker."""
    if current().is_elastic:
        raise ConfigError(
            f"an elastic job (FASTPS_ELASTIC_MIN, fastps-run --min) does not support {what}, "
            f"which cannot go on when a worker is lost: {cure}, or start the job without --min"
        )


@contextlib.contextmanager
def in_one_scope(session: Session) -> Iterator[dict[str, Any]]:
    """Yield what push_pull_async() takes within, so that its results are handed out together.

    All of them or none after a loss, of the same workers; a job that is not elastic needs nothing.
    """
    if not session.is_elastic:
        yield {}
        return
    elastic: Any = session
    scope = elastic.scope()
    yield {"scope": scope}
    scope.close()


def known() -> Session:
    """Return the process's session, or the one it was forked from, for what never changes."""
    if _current is None:
        raise NotInitializedError("fastps is not initialized; call fastps.init() first")
    return _current
