# SPDX-License-Identifier: Apache-2.0
"""Stream sockets for Python threads: options, listening, connecting, exact reads and writes.

Control connections use all of it, data connections until C takes over. Knows addresses and
deadlines; of messages only that a handshake has steps. All descriptors are closed on exec
(Python's default) and no function here blocks past its deadline. Times are of time.monotonic().
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastps.errors import ConfigError
from fastps.security.handshake import Result, Steps

log = logging.getLogger(__name__)

DISCARD_PORT = 9
BACKLOG = 1024  # a large job joins at once
RETRY_FIRST_S, RETRY_LAST_S = 0.01, 0.5
LOOKUP_S = 10.0  # for a name of this machine, or one that was looked up just before
KEEPALIVE_IDLE_S = 10  # then probes
KEEPALIVE_INTERVAL_S = 5
MAX_KEEPALIVE_TRIES = 127  # tcp(7)
UNIX_PREFIX = "fastps-"
_LOOPBACK = "127.0.0.1"
_STAND_IN = "fastps-loopback-"  # and the port
UNIX_NAME_BYTES = 16  # random, so that names are unique; /proc/net/unix lists them
UNIX_BUFFER_BYTES = 4 << 20  # unlike TCP, a Unix socket does not grow its buffer
SO_SNDBUFFORCE = 32  # socket(7): beyond net.core.wmem_max, for privileged processes
UCRED = struct.Struct("3i")  # pid, uid, gid
ROOT_UID = 0
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}


class Interrupt:
    """Ends, from any thread, the waits on sockets of the thread that is inside its with block.

    They raise OSError, or end as if their deadline had come.
    """

    _of_thread = threading.local()

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._waited: set[socket.socket] = set()

    def set(self) -> None:
        """End the waits, those that begin later too."""
        with self._lock:
            self.is_set = True
            for sock in self._waited:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> None:
        self._of_thread.current = self

    def __exit__(self, *error: object) -> None:
        self._of_thread.current = None

    @classmethod
    def current(cls) -> Interrupt | None:
        """Return that of this thread."""
        return getattr(cls._of_thread, "current", None)

    @contextlib.contextmanager
    def _covering(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self.is_set:
                raise InterruptedError(errno.EINTR, "a member was lost meanwhile")
            self._waited.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._waited.discard(sock)


def waiting_on(sock: socket.socket) -> contextlib.AbstractContextManager[None]:
    """Return the context of a wait on a socket, which the thread's Interrupt ends."""
    current = Interrupt.current()
    return contextlib.nullcontext() if current is None else current._covering(sock)


def is_interrupted() -> bool:
    """Return whether the waits of this thread are to end."""
    current = Interrupt.current()
    return current is not None and current.is_set


def tune(sock: socket.socket, silence_s: float) -> None:
    """Set the options of every TCP connection: no delay, and probes while it is idle.

    silence_s: how long an idle connection may get no answer to probes. Leases and the looks of
    data links end those that send: see tcp_look() for why no TCP_USER_TIMEOUT does.
    """
    idle_s = min(max(int(silence_s / 3), 1), KEEPALIVE_IDLE_S)
    interval_s = min(max(int(silence_s / 6), 1), KEEPALIVE_INTERVAL_S)
    tries = max(math.ceil((silence_s - idle_s) / interval_s), 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(tries, MAX_KEEPALIVE_TRIES))


def watch_closely(descriptor: int, timeout_s: float) -> None:
    """Make an idle TCP connection end soon after its peer's machine has failed.

    For the connection of an RDMA link: the device notices no failure while it has nothing to send.
    TCP_USER_TIMEOUT would take the place of the count, and end a connection after one probe whose
    answer this machine, paused meanwhile, has yet to read.
    """
    tries = max(math.ceil(timeout_s), 1)
    sock = socket.socket(fileno=descriptor)
    try:
        with contextlib.suppress(OSError):  # not a TCP socket
            for option, value in (
                (socket.TCP_KEEPIDLE, 1),
                (socket.TCP_KEEPINTVL, 1),
                (socket.TCP_KEEPCNT, tries),
            ):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    finally:
        sock.detach()


def listen(host: str, port: int, *, port_setting: str = "FASTPS_PORT") -> list[socket.socket]:
    """Listen on every address of a host name, all on one port; port 0 takes a free one.

    Skips address families that this machine lacks. Raises ConfigError that names port_setting,
    the setting of the port.
    """
    try:
        found = look_up(host, port, flags=socket.AI_PASSIVE, timeout_s=LOOKUP_S)
    except socket.gaierror as error:
        raise ConfigError(
            f"cannot listen on {host!r}: unknown host ({error.strerror}); set FASTPS_HOST to a "
            "name or address of this machine"
        ) from error
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                sockets.append(_listen_one(family, address[0], port, sockets))
            except OSError as error:
                failure = failure or error
                if error.errno not in _ABSENT and not (port == 0 and sockets):
                    raise
        if not sockets and failure is not None:
            raise failure
    except OSError as error:
        close_all(sockets)
        raise _listen_error(host, port, port_setting, error) from error
    return sockets


def _listen_one(
    family: int, address: str | int, port: int, earlier: list[socket.socket]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, earlier[0].getsockname()[1] if earlier else port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_error(host: str, port: int, port_setting: str, error: OSError) -> ConfigError:
    what = f"cannot listen on {join_address(host, port)}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{what}; another process uses the port: stop it or set {port_setting} to a free one"
        )
    if error.errno in _ABSENT:
        return ConfigError(
            f"{what}; set FASTPS_HOST to an address of this machine that the others can reach"
        )
    return ConfigError(f"{what}; set {port_setting} to a port this user may use")


def listen_unix() -> tuple[socket.socket, str]:
    """Listen on a Unix socket with a new name; return socket and name.

    The name is abstract: no file, gone with the last descriptor, and visible in this network
    namespace alone. Any process there may connect, so the listener has to check is_own_user().
    """
    name = UNIX_PREFIX + secrets.token_hex(UNIX_NAME_BYTES)
    sock = listen_unix_at(name)
    sock.setblocking(False)
    return sock, name


def listen_unix_at(name: str) -> socket.socket:
    """Listen on an abstract Unix socket of a given name; it blocks."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on a Unix socket: {error.strerror}; set FASTPS_UNIX_SOCKETS=0"
        ) from error
    return sock


def connect_unix(name: str, *, deadline: float) -> socket.socket:
    """Connect to an abstract name of listen_unix(); OSError when no process listens on it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        with waiting_on(sock):
            sock.connect("\0" + name)
    except OSError:
        sock.close()
        raise
    return sock


def tune_unix(sock: socket.socket) -> None:
    """Enlarge the buffer of a Unix socket, so that writer and reader rarely wait."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < UNIX_BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, UNIX_BUFFER_BYTES)


def stand_in_for(listeners: Sequence[socket.socket]) -> list[socket.socket]:
    """Listen on a Unix socket too if all listeners use the loopback interface, and that is down.

    As in a new network namespace. Processes that connect derive the name from the port.
    """
    bound = [sock.getsockname()[:2] for sock in listeners if not is_unix(sock)]
    if not bound or not all(is_loopback(str(host)) for host, _ in bound) or has_loopback():
        return []
    sock = listen_unix_at(f"{_STAND_IN}{bound[0][1]}")
    sock.setblocking(False)
    return [sock]


def connect_stand_in(host: str, port: int, *, deadline: float) -> socket.socket:
    """Connect to the Unix socket that replaces a loopback port; OSError when there is none."""
    if not (host == "localhost" or is_loopback(host)):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    sock = connect_unix(f"{_STAND_IN}{port}", deadline=deadline)
    if is_own_user(sock):
        return sock
    sock.close()  # any user may take the name, as with a port
    raise OSError(errno.EACCES, f"another user has the Unix socket for loopback port {port}")


def has_loopback() -> bool:
    """Return whether the loopback interface is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex((_LOOPBACK, DISCARD_PORT)) != errno.ENETUNREACH


def is_unix(sock: socket.socket) -> bool:
    """Return whether a socket is a Unix socket."""
    return sock.family == socket.AF_UNIX


def is_own_user(sock: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to our user or to root."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    _, uid, _ = UCRED.unpack(raw)
    return uid in (os.geteuid(), ROOT_UID)


def name_of_peer(sock: socket.socket) -> str:
    """Return the address of the other end, for logs."""
    try:
        return "a Unix socket" if is_unix(sock) else str(sock.getpeername()[0])
    except OSError:
        return "a closed connection"


def inherit(descriptor: int | None) -> list[socket.socket]:
    """Take over a listening socket that the parent process made; None: no socket."""
    if descriptor is None:
        return []
    try:
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
    except OSError as error:
        raise ConfigError(
            f"--listen-fd {descriptor} is not a socket that the parent passed on: {error.strerror}"
        ) from error
    return [sock]


def close_all(sockets: list[socket.socket]) -> None:
    """Close sockets."""
    for sock in sockets:
        sock.close()


def look_up(
    host: str | None,
    port: int,
    *,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    flags: int = 0,
    timeout_s: float,
) -> list[Any]:
    """Do socket.getaddrinfo() with a timeout: raise socket.gaierror after timeout_s seconds.

    A resolver without an answer may retry for minutes and cannot be stopped. So a thread waits for
    it, and is abandoned at the timeout. Numeric addresses need no resolver.
    """
    with contextlib.suppress(socket.gaierror, UnicodeError):
        return socket.getaddrinfo(host, port, type=kind, flags=flags | socket.AI_NUMERICHOST)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, type=kind, flags=flags))
        except (OSError, UnicodeError) as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="fastps:lookup", daemon=True)
    thread.start()
    thread.join(max(timeout_s, 0.0))
    answer = answers[0] if answers else _silence(timeout_s)
    if isinstance(answer, UnicodeError):
        raise socket.gaierror(socket.EAI_NONAME, f"invalid name: {answer}") from answer
    if isinstance(answer, OSError):
        raise answer
    found: list[Any] = answer
    return found


def _silence(timeout_s: float) -> socket.gaierror:
    text = (
        f"the name service (DNS) did not answer within {timeout_s:.3g} s: repair "
        "/etc/resolv.conf, or use a numeric address"
    )
    return socket.gaierror(socket.EAI_AGAIN, text)


def connect(
    host: str,
    port: int,
    *,
    deadline: float,
    silence_s: float,
    prepare: Callable[[socket.socket, str], object] | None = None,
) -> socket.socket:
    """Connect to the first address of a host that answers before the deadline.

    prepare gets the socket and the address before it connects. Raises socket.gaierror or OSError
    of the last address tried, TimeoutError in the end.
    """
    failure: OSError = TimeoutError("timed out")
    found = look_up(host, port, timeout_s=deadline - time.monotonic())
    for index, (family, _, _, _, address) in enumerate(found):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # an address that does not answer leaves time for the others
            share_s = (deadline - time.monotonic()) / (len(found) - index)
            sock.settimeout(max(share_s, 0.001))
            if prepare is not None:
                prepare(sock, str(address[0]))
            with waiting_on(sock):
                sock.connect(address)
            _refuse_self(sock)
            tune(sock, silence_s)
        except OSError as error:
            failure = error
            sock.close()
            continue
        return sock
    raise failure


def _refuse_self(sock: socket.socket) -> None:
    """Refuse a connection to itself: TCP makes one when the local port equals the target port."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nothing listens on the port")


def shake_hands(sock: socket.socket, steps: Steps[Result], *, deadline: float) -> Result:
    """Run one side of a handshake; raises errors of write_all, read_exactly and the steps."""
    data, nbytes = next(steps)
    while True:
        write_all(sock, data, deadline=deadline)
        try:
            data, nbytes = steps.send(read_exactly(sock, nbytes, deadline=deadline))
        except StopIteration as end:
            result: Result = end.value
            return result


def read_exactly(sock: socket.socket, nbytes: int, *, deadline: float) -> bytes:
    """Read from a socket before a deadline; ConnectionError at its end, TimeoutError."""
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        with waiting_on(sock):
            piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed the connection")
        data += piece
    return bytes(data)


def read_blocking(sock: socket.socket, nbytes: int) -> bytes | bytearray:
    """Read from a blocking socket; empty at its end. shutdown() of the socket ends the wait."""
    data = bytearray(nbytes)
    view = memoryview(data)
    filled = 0
    while filled < nbytes:
        count = sock.recv_into(view[filled:])
        if count == 0:
            return b""
        filled += count
    return data


def write_all(sock: socket.socket, data: bytes | bytearray, *, deadline: float) -> None:
    """Write to a blocking socket without waiting past the deadline; OSError, TimeoutError.

    After an error the connection is unusable: part of the data may have been sent.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            _wait_writable(sock, deadline)


def _wait_writable(sock: socket.socket, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        raise TimeoutError("the other side does not read: its buffer is full")


def own_end(sock: socket.socket) -> str:
    """Return the local address of a connected socket; for a Unix socket, the loopback's."""
    return _LOOPBACK if is_unix(sock) else str(sock.getsockname()[0])


def is_same_host(sock: socket.socket) -> bool:
    """Return whether a connected socket leads back to this machine."""
    if is_unix(sock):
        return True
    return bool(sock.getsockname()[0] == sock.getpeername()[0])


def is_own_address(host: str) -> bool:
    """Return whether a numeric address belongs to this machine, by its routes."""
    if is_loopback(host):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((host, DISCARD_PORT))  # looks up the route, sends nothing
        except OSError:
            return False
        return bool(sock.getsockname()[0] == host)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether an address means "all addresses"."""
    return host in ("", "0.0.0.0", "::")


def join_address(host: str, port: int) -> str:
    """Write host and port in the usual way."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def attempts(deadline: float, *, longest_s: float = RETRY_LAST_S) -> Iterator[None]:
    """Yield once, and again until a deadline; the pauses after it double up to longest_s.

    Ends early where the waits of this thread are interrupted.
    """
    pause_s = RETRY_FIRST_S
    yield
    while (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        if is_interrupted():
            return
        if pause_s < left_s:
            yield
        pause_s = min(2 * pause_s, longest_s)
