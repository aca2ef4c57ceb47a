# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of workers that another launcher started: choose a board, or explain what to set.

On one machine the board is a Unix socket, whose peer's user the kernel verifies. Between machines
it is a store of the launcher, or a file of mode 0600 in a directory that all machines share.
Secrets are only written where other users cannot read them. docs/launchers.md has the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from fastps.config import Config, process_environment
from fastps.config.launchers import BY_HAND, CARRIERS, Launcher, find
from fastps.control import rendezvous
from fastps.control.pmix import PmixBoard
from fastps.control.rendezvous import OWN_PLACE, Board
from fastps.errors import ConfigError, TransportTimeout
from fastps.files import open_shared
from fastps.transport import sockets

_MAX_BYTES = 65536
_STOP_S = 5.0


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """The result of meet(): the settings with which to join, the board, and how to end both."""

    settings: Mapping[str, object]
    board: Board
    close: Callable[[], None]


def meet(config: Config) -> Rendezvous:
    """Find the other workers of this run; rank 0 hosts the scheduler. Blocks to start_timeout_s.

    Raises ConfigError that says what to set if there is no private board.
    """
    launcher = find(config, process_environment())
    if launcher is None or config.rank is None:
        raise ConfigError(
            "the address of the scheduler is not set; start with fastps-run, torchrun, mpirun or "
            "srun, or set FASTPS_SCHEDULER_HOST and FASTPS_SCHEDULER_PORT"
        )
    board = _board(config, launcher)
    close: Callable[[], None] = _nothing
    program = _program(config, launcher)
    try:
        if config.rank == 0:
            at = config.scheduler_host or launcher.host or socket.gethostname()
            settings, close = rendezvous.host(
                config, board, at=at, is_one_machine=launcher.is_one_machine, program=program
            )
        else:
            settings = rendezvous.find(
                config, board, is_one_machine=launcher.is_one_machine, program=program
            )
    except TransportTimeout as error:
        raise TransportTimeout(f"{error}; {_advice(launcher)}") from error
    return Rendezvous(settings, board, functools.partial(_end, board, close))


def _end(board: Board, close: Callable[[], None]) -> None:
    close()
    if isinstance(board, UnixBoard):
        board.close()


def _program(config: Config, launcher: Launcher) -> str:
    """Return the program's name where nothing but a port tells jobs apart, else nothing."""
    is_named = bool(config.job_id) or launcher.name != BY_HAND or not launcher.is_one_machine
    return "" if is_named else os.path.basename(sys.argv[0])


def _nothing() -> None:
    """End nothing, since rank 0 hosts the scheduler."""


def _board(config: Config, launcher: Launcher) -> Board:
    """Return the nearest board that is private."""
    words = [str(os.geteuid()), launcher.name, launcher.run, config.job_id]
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
    if launcher.is_one_machine:
        return UnixBoard(f"fastps-meeting-{name}")
    if config.meeting_dir:
        return FileBoard(Path(config.meeting_dir) / f".fastps-{name}")
    carried: Board | None = CARRIERS.get(launcher.name, _by_pmix)(launcher)
    if carried is not None:
        return carried
    if launcher.folder:
        return FileBoard(Path(launcher.folder) / f".fastps-{name}")
    raise ConfigError(
        f"{launcher.name} started workers on several machines, and there is no private channel "
        f"for the job's token between them; {_advice(launcher)}"
    )


def _by_pmix(launcher: Launcher) -> Board | None:
    return PmixBoard() if launcher.has_pmix else None


def _advice(launcher: Launcher) -> str:
    """Return the settings that help."""
    also = "import fastps.torch, which uses torchrun's store; or " * (launcher.name == "torchrun")
    return (
        f"{also}set FASTPS_MEETING_DIR to a directory that all machines share, where rank 0 can "
        "leave a file of mode 0600; or start `fastps-server --role scheduler` on one machine, and "
        "set FASTPS_SCHEDULER_HOST, FASTPS_SCHEDULER_PORT and FASTPS_TOKEN_FILE everywhere"
    )


class UnixBoard:
    """A text that processes of this user on this machine read from an abstract Unix socket.

    After clear() the name stays taken until close() or the end of this process, so that no other
    job meets there; its ranks are answered that this job has begun.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="fastps:meeting", daemon=True)

    def post(self, text: str) -> None:
        """Serve the text to all connections, from a thread."""
        self._text = text.encode()
        try:
            self._listener = sockets.listen_unix_at(self._name)
        except ConfigError as error:
            raise ConfigError(
                "the meeting place of this job is taken, by another job with the same MASTER_PORT "
                f"or run, or by another user; {OWN_PLACE}"
            ) from error
        _boards.add(self)
        self._thread.start()

    def read(self, *, timeout_s: float) -> str:
        """Ask for the text, repeatedly until rank 0 serves it."""
        deadline = time.monotonic() + timeout_s
        for _ in sockets.attempts(deadline):
            with (
                contextlib.suppress(OSError),
                sockets.connect_unix(self._name, deadline=deadline) as sock,
            ):
                if not sockets.is_own_user(sock):
                    raise ConfigError(
                        f"another user has taken the meeting place of this job; {OWN_PLACE}"
                    )
                if text := _read_all(sock, deadline):
                    return text
        raise TransportTimeout(f"rank 0 has not called init() within {timeout_s:.3g} s")

    def clear(self) -> None:
        """Replace the text by an answer to ranks of other jobs; idempotent."""
        self._text = json.dumps({"begun": os.getpid()}).encode()

    def abandon(self) -> None:
        """Close the descriptor in a forked child, so that the name ends with its owner."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def close(self) -> None:
        """Free the name; idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._thread.join(_STOP_S)
            listener.close()

    def _serve(self) -> None:
        listener = self._listener
        with contextlib.suppress(OSError):
            while listener is not None:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    if sockets.is_own_user(sock):
                        sock.sendall(self._text)  # fits into the socket's buffer: never waits


_boards: weakref.WeakSet[UnixBoard] = weakref.WeakSet()  # of this process


def _abandon_boards_in_child() -> None:
    for board in list(_boards):
        board.abandon()


os.register_at_fork(after_in_child=_abandon_boards_in_child)


def _read_all(sock: socket.socket, deadline: float) -> str:
    data = b""
    while len(data) < _MAX_BYTES:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(_MAX_BYTES)
        if not part:
            break
        data += part
    return data.decode()


class FileBoard:
    """A text in a file of mode 0600, in a directory that all machines of the job share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def post(self, text: str) -> None:
        """Write the file atomically, replacing one that an earlier job left."""
        try:
            with (
                open_shared(self._path.parent) as folder,
                folder.replace(self._path.name) as file,
            ):
                file.write(text.encode())
        except OSError as error:
            raise ConfigError(
                f"cannot write the rendezvous file to {self._path.parent}: {error}; set "
                "FASTPS_MEETING_DIR to a directory that all machines share"
            ) from error

    def read(self, *, timeout_s: float) -> str:
        """Wait until the file is there."""
        for _ in sockets.attempts(time.monotonic() + timeout_s):
            try:
                with (
                    open_shared(self._path.parent) as folder,
                    folder.read(self._path.name, is_private=True) as file,
                ):
                    return file.read(_MAX_BYTES).decode()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"the rendezvous file {self._path} is not trusted ({error.strerror}); or set "
                    "FASTPS_MEETING_DIR to a directory of this user alone"
                ) from error
        raise TransportTimeout(f"rank 0 has left no file {self._path} within {timeout_s:.3g} s")

    def clear(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError), open_shared(self._path.parent) as folder:
            folder.remove(self._path.name)
