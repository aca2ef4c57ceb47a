# SPDX-License-Identifier: Apache-2.0
"""Connect to the scheduler: resolve, connect and authenticate, with retries until a deadline.

Decides which failures are temporary (no listener yet, a name that is not known yet, too many
connections) and which are not (wrong token, another program at the port). Synchronous; called on
the thread of connect(); every step ends at the deadline.
"""

from __future__ import annotations

import errno
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from fastps.config import Config
from fastps.control.frames import ControlSocket
from fastps.errors import AuthError, ConfigError, FastPSError, ProtocolError, TransportTimeout
from fastps.native.condition import Flag
from fastps.security.handshake import ClientHandshake, Purpose
from fastps.security.tokens import CONTROL, Token, parse
from fastps.transport import sockets
from fastps.transport.encryption import check_encryption, encryption_options

log = logging.getLogger(__name__)

NOTICE_S = 1.5  # before a process says that it waits for its scheduler
ANSWER_S = 4.0  # in addition, where the port is open
_NAME_S = 1.0  # to resolve a name for the text of an error
_Shake: TypeAlias = Callable[..., ClientHandshake]  # makes the handshake of a connection


class Notice:
    """A thread that says, once, that this process waits for its scheduler, and what to check.

    For use as a context. Threads: that of dial(), and its own.
    """

    def __init__(self, config: Config, deadline: float) -> None:
        self._config, self._deadline = config, deadline
        self.trouble = "it has not answered yet"
        self._is_connected = False
        self._is_over = Flag()

    def __enter__(self) -> Notice:
        """Start to count the time."""
        threading.Thread(target=self._run, name="fastps:dial", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Say nothing any more."""
        self._is_over.set()

    def connected(self) -> None:
        """Note that the port is open: a busy machine may take longer to answer."""
        self._is_connected = True
        self.trouble = "the port is open, but no answer has come"

    def _run(self) -> None:
        if self._is_over.wait(NOTICE_S) or (self._is_connected and self._is_over.wait(ANSWER_S)):
            return
        log.warning(
            "waiting up to %.0f s more for the scheduler at %s: %s. Check that the job runs "
            "there, the address (FASTPS_SCHEDULER_HOST and FASTPS_SCHEDULER_PORT, or fastps-run "
            "--join), and that no firewall blocks the port",
            max(self._deadline - time.monotonic(), 0.0), _where(self._config), self.trouble,
        )  # fmt: skip


def dial(
    config: Config,
    key: bytes,
    *,
    purpose: Purpose,
    sender: int,
    deadline: float,
    lane: int = 0,
    notice: Notice | None = None,
) -> socket.socket:
    """Return an authenticated connection to the scheduler, for bytes that are not sealed.

    sender, lane: of a member's own token, its rank and Token.lane. notice: says what is awaited.

    Raises ConfigError (no address, unknown host), AuthError and ProtocolError at once,
    TransportTimeout when the scheduler could not be reached before the deadline.
    """
    shake = functools.partial(ClientHandshake, key, purpose=purpose, sender=sender, lane=lane)
    return _dial(config, shake, deadline, notice)[0]


def _dial(
    config: Config,
    shake: _Shake,
    deadline: float,
    notice: Notice | None,
    awaits_machine: bool = True,
) -> tuple[socket.socket, ClientHandshake]:
    """Connect and authenticate; see dial() and dial_control()."""
    if not config.scheduler_host or not config.scheduler_port:
        raise ConfigError(
            "the address of the scheduler is not set; start with fastps-run, or set "
            "FASTPS_SCHEDULER_HOST and FASTPS_SCHEDULER_PORT"
        )
    check_encryption(config)
    began = time.monotonic()
    name_deadline = min(deadline, began + config.connect_timeout_s)
    last = ""
    for _ in sockets.attempts(deadline):
        try:
            return _dial_once(config, shake, deadline, notice)
        except socket.gaierror as error:
            last = f"unknown host ({error.strerror})"
            if time.monotonic() >= name_deadline:
                raise _unknown_host(config, error) from error
        except OSError as error:
            last = error.strerror or str(error)
            if isinstance(error, _NoAnswerError) and not awaits_machine:
                break
        log.debug("the scheduler cannot be reached yet: %s", last)
        if notice is not None:
            notice.trouble = last
    raise _unreachable(config, last, time.monotonic() - began)


def dial_control(
    config: Config,
    token: Token,
    *,
    deadline: float,
    notice: Notice | None = None,
    awaits_machine: bool = True,
) -> ControlSocket:
    """Return a control connection of the member that the token identifies; see dial().

    awaits_machine: whether to try again if the scheduler's machine does not even refuse within
    connect_timeout_s. One that takes over starts on the machine where the last one died.
    """
    shake = functools.partial(
        ClientHandshake, token.key(CONTROL, config.job_id), purpose=Purpose.CONTROL,
        sender=token.rank, lane=token.lane,
    )  # fmt: skip
    sock, handshake = _dial(config, shake, deadline, notice, awaits_machine)
    return ControlSocket(sock, handshake.sealing)


def token_of(config: Config) -> Token:
    """Return this process's token. Raises ConfigError."""
    return parse(config.token_bytes(), config.role, config.rank)


def wait_for_name(config: Config) -> None:
    """Wait until the scheduler's host has an address, which may come later than its name.

    Blocks up to connect_timeout_s, then raises ConfigError.
    """
    host, port = config.scheduler_host or None, config.scheduler_port
    deadline = time.monotonic() + config.connect_timeout_s
    for _ in sockets.attempts(deadline):
        try:
            sockets.look_up(host, port, timeout_s=deadline - time.monotonic())
            return
        except socket.gaierror as error:
            failure = error
    raise _unknown_host(config, failure) from failure


def _dial_once(
    config: Config, shake: _Shake, deadline: float, notice: Notice | None
) -> tuple[socket.socket, ClientHandshake]:
    now = time.monotonic()
    sock = _connect(config, min(deadline, now + config.connect_timeout_s))
    if notice is not None:
        notice.connected()
    try:
        handshake = shake(options=encryption_options(sock, config))
        limit = min(deadline, time.monotonic() + config.handshake_timeout_s)
        sockets.shake_hands(sock, handshake.steps(), deadline=limit)
    except FastPSError as error:
        sock.close()
        raise _with_address(error, config) from error
    except BaseException:
        sock.close()
        raise
    return sock, handshake


def _connect(config: Config, deadline: float) -> socket.socket:
    host, port = config.scheduler_host, config.scheduler_port
    try:
        return sockets.connect(host, port, deadline=deadline, silence_s=config.tcp_user_timeout_s)
    except TimeoutError as error:
        raise _NoAnswerError(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENETUNREACH:
            raise
        return sockets.connect_stand_in(host, port, deadline=deadline)


class _NoAnswerError(TimeoutError):
    """The scheduler's machine does not answer: it is off or cut off; a lively one would refuse."""


def _where(config: Config) -> str:
    return sockets.join_address(config.scheduler_host, config.scheduler_port)


def _with_address(error: FastPSError, config: Config) -> FastPSError:
    kind = type(error) if isinstance(error, AuthError | ProtocolError) else FastPSError
    return kind(f"scheduler {_where(config)}: {error}")


def _loopback_hint(config: Config) -> str:
    """Return a hint if the scheduler's name resolves to this machine, as /etc/hosts may do."""
    host = config.scheduler_host
    try:
        found = sockets.look_up(host, config.scheduler_port, timeout_s=_NAME_S)
    except OSError:
        return ""
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if host == "localhost" or host in addresses or not all(map(sockets.is_loopback, addresses)):
        return ""
    return (
        f"; here {host} resolves to {', '.join(addresses)}, which is this machine: correct "
        "/etc/hosts, or use the scheduler's IP address"
    )


def _unknown_host(config: Config, error: socket.gaierror) -> ConfigError:
    return ConfigError(
        f"the scheduler's host {config.scheduler_host!r} is unknown ({error.strerror}) after "
        f"{config.connect_timeout_s:g} s of trying; set FASTPS_SCHEDULER_HOST to a name or "
        "address that this machine can resolve"
    )


def _unreachable(config: Config, last: str, waited_s: float) -> TransportTimeout:
    return TransportTimeout(
        f"no scheduler at {_where(config)} after {waited_s:.1f} s of trying: {last}"
        f"{_loopback_hint(config)}; check that it runs there and that no firewall blocks the "
        "port. Set FASTPS_SCHEDULER_HOST and FASTPS_SCHEDULER_PORT, or raise "
        "FASTPS_START_TIMEOUT_S if it starts late"
    )
