# SPDX-License-Identifier: Apache-2.0
"""The process's session: made by init(), ended by shutdown().

Holds the one piece of mutable module state in the library. Imports the session, and all that it
needs, when a job is joined: importing fastps costs next to nothing over NumPy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastps.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from fastps.session import Session

_current: Session | None = None


def init(settings: Mapping[str, object]) -> Session:
    """Make the process's session, or give the one it has; see fastps.init()."""
    global _current
    if _current is not None and _current.is_ours:
        return _current
    from fastps.config import load  # noqa: PLC0415
    from fastps.config.token import hide_token  # noqa: PLC0415
    from fastps.session import Session  # noqa: PLC0415

    hide_token()
    config = load(settings)
    _show_logs(config.log_level)
    if config.role != "worker":
        raise ConfigError(
            f"init() makes a worker, and FASTPS_ROLE or DMLC_ROLE says that this is a "
            f"{config.role}: start `fastps-server --role {config.role}`, or unset them"
        )
    _current = Session(config)
    atexit.register(shutdown)
    if config.banner and _current.rank == 0 and hasattr(_current, "connections"):
        _say_banner(_current)
    return _current


def shutdown() -> None:
    """End the process's session; does nothing if there is none."""
    global _current
    session, _current = _current, None
    atexit.unregister(shutdown)
    if session is not None:
        session.close()


def _say_banner(session: Session) -> None:
    """Say on stderr what the job is; a program without stderr goes without."""
    from fastps.banner import describe  # noqa: PLC0415  (rank 0 alone needs it)

    lines = describe(session).splitlines()
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
    """Tell whether init() was called, in this process, and shutdown() was not."""
    return _current is not None and _current.is_ours


def current() -> Session:
    """Give the process's session; NotInitializedError when init() was not called."""
    session = known()
    session.check_usable()
    return session


def known() -> Session:
    """Give the process's session, or the one it was forked from, for what never changes."""
    if _current is None:
        raise NotInitializedError("call fastps.init() first")
    return _current
