# SPDX-License-Identifier: Apache-2.0
"""TCP and Unix data connections until the C side takes them: dial, tune, choose sizes.

Decides nothing about frames. Dialling blocks the caller; listener.py is the other end. Only these
two distinguish Unix sockets, which have no TCP options; a peer of another user is refused before a
byte of it is read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastps.config import Config
from fastps.errors import AuthError, FastPSError, ProtocolError, TransportError, TransportTimeout
from fastps.security.ciphers import Sealing
from fastps.security.handshake import ClientHandshake, NoPlaceError, Option, Purpose
from fastps.transport import sockets
from fastps.transport.encryption import encryption_options
from fastps.transport.tcp._transport import TcpTransport

log = logging.getLogger(__name__)

SAME_HOST_CREDIT_BYTES = 640 << 10  # a chunk under way and the next one
LOCAL_CHUNK_BYTES = 512 << 10
REMOTE_CHUNK_BYTES = 64 << 10
REMOTE_CREDIT_BYTES = 4 * REMOTE_CHUNK_BYTES
# Of a link to a server that owns less than another one. Its bytes would take the card from those
# that arrive last.
LIGHT_CREDIT_BYTES = REMOTE_CHUNK_BYTES
# Most unsent bytes that the kernel holds of a connection to another machine. The kernel knows no
# priorities and would take 4 MiB. At 100 Gbit/s these bytes last 42 us, longer than a wake-up
# takes; slower links hold less (follow_pace() in _send.pxi).
UNSENT_BYTES = 512 << 10


class Connection(NamedTuple):
    """A data connection whose two ends know each other, ready for a transport."""

    descriptor: int  # non-blocking
    options: Option  # that hold for it
    sealing: Sealing | None = None  # the keys that both ends agreed on, for TcpTransport.adopt()

    @property
    def is_checked(self) -> bool:
        """Return whether payloads carry a checksum: TcpTransport.adopt() has to know."""
        return Option.CHECK_PAYLOADS in self.options


class _TurnedAway(TransportError):
    """The listener closed the connection unread: too many others are half open."""


def pack_lane(generation: int, lane: int) -> int:
    """Pack the job's generation with the lane, to distinguish old workers from new ones."""
    return (generation & 0xFFFFFF) << 8 | lane


def unpack_lane(packed: int) -> tuple[int, int]:
    """Return (generation modulo 2^24, lane)."""
    return packed >> 8, packed & 0xFF


def prefer_same_host(sock: socket.socket, host: str, config: Config) -> None:
    """Choose the congestion control for a same-host peer, before the connection exists.

    Over the loopback, bbr, a common default, has half the throughput of cubic (measured). Setting
    cubic later is too late: bbr's pacing timer stays on, which costs a seventh of the time
    (measured). Sockets that a listener accepts inherit the choice.
    """
    if not sockets.is_unix(sock) and sockets.is_own_address(host):
        _set_congestion(sock, config)


def _set_congestion(sock: socket.socket, config: Config) -> None:
    for name in filter(None, config.same_host_congestion.split(",")):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.strip().encode())
            return


def choose_options(sock: socket.socket, config: Config) -> Option:
    """Return the options that this end wants for a data connection, by settings and addresses.

    Goes by the socket's own addresses, not by what the peer says of its machine.
    """
    is_wanted = config.payload_check == "on"
    if config.payload_check == "auto":
        try:
            is_wanted = not sockets.is_same_host(sock)
        except OSError:  # it has ended already
            is_wanted = False
    found = Option.CHECK_PAYLOADS if is_wanted else Option.NONE
    return found | encryption_options(sock, config)


def tune(sock: socket.socket, config: Config) -> None:
    """Set the options of a data connection; remote peers keep the system's congestion control."""
    if sockets.is_unix(sock):
        sockets.tune_unix(sock)
        return
    sockets.tune(sock, config.tcp_user_timeout_s)
    if sockets.is_same_host(sock):
        _set_congestion(sock, config)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def dial(
    address: tuple[str, int],
    config: Config,
    *,
    key: bytes,
    sender: int,
    lane: int,
    what: str,
    unix: str = "",
    purpose: Purpose = Purpose.DATA,
) -> Connection:
    """Connect and authenticate to a listener; return the connection.

    Blocks up to connect_timeout_s and handshake_timeout_s. what: the member dialled, for errors.
    unix: name of its Unix socket on this machine; without an answer there, the address is tried,
    again and again while the listener has too many half-open connections. Raises
    TransportTimeout, TransportError, AuthError or ProtocolError.
    """
    shake = functools.partial(ClientHandshake, key, purpose=purpose, sender=sender, lane=lane)
    where = f"{what} at {sockets.join_address(*address)}"
    if unix:
        try:
            sock = sockets.connect_unix(unix, deadline=time.monotonic() + config.connect_timeout_s)
            return _introduce(sock, config, shake, f"{what} at the Unix socket {unix}")
        except (TransportTimeout, AuthError, ProtocolError, NoPlaceError):
            raise
        except (TransportError, OSError) as error:
            log.warning("%s: Unix socket failed (%s); TCP takes its place", where, error)
    deadline = time.monotonic() + config.connect_timeout_s
    failure: TransportError | None = None
    for _ in sockets.attempts(deadline):
        try:
            sock = _connect(address, config, where, deadline)
            return _introduce(sock, config, shake, where)
        except _TurnedAway as error:
            failure = error
    assert failure is not None
    raise failure


def _connect(
    address: tuple[str, int], config: Config, where: str, deadline: float
) -> socket.socket:
    try:
        return sockets.connect(
            *address,
            deadline=deadline,
            silence_s=config.tcp_user_timeout_s,
            prepare=lambda sock, host: prefer_same_host(sock, host, config),
        )
    except TimeoutError as error:
        raise TransportTimeout(
            f"{where} did not answer within {config.connect_timeout_s:g} s; does a firewall block "
            "the port? Else set FASTPS_HOST or FASTPS_INTERFACE on its machine"
        ) from error
    except OSError as error:
        raise TransportError(f"cannot connect to {where}: {error.strerror or error}") from error


def _introduce(
    sock: socket.socket, config: Config, shake: Callable[..., ClientHandshake], where: str
) -> Connection:
    """Tune and authenticate a connection; return it, or close it and raise."""
    try:
        tune(sock, config)
        handshake = shake(options=choose_options(sock, config))
        deadline = time.monotonic() + config.handshake_timeout_s
        sockets.shake_hands(sock, handshake.steps(), deadline=deadline)
        sock.setblocking(False)
    except FastPSError as error:
        sock.close()
        raise type(error)(f"{where}: {error}") from error
    except TimeoutError as error:
        sock.close()
        raise TransportTimeout(
            f"{where} did not finish the handshake within {config.handshake_timeout_s:g} s; raise "
            "FASTPS_HANDSHAKE_TIMEOUT_S if its machine is overloaded"
        ) from error
    except OSError as error:
        sock.close()
        raise _TurnedAway(f"{where} closed the connection: {error}") from error
    return Connection(sock.detach(), handshake.options, handshake.sealing)


def open_transport(config: Config) -> TcpTransport:
    """Return a transport with the I/O threads of the settings."""
    return TcpTransport(
        io_threads=config.io_threads,
        spin_us=config.spin_us,
        silence_s=config.tcp_user_timeout_s,
    )


def choose_credit(descriptor: int, config: Config, *, is_light: bool = False) -> int:
    """Return the credit of a link in bytes: as configured, else by where the link leads.

    On one machine, the bytes that are pushed and have no result yet should fit the caches. Between
    machines, little credit keeps the workers in step, so that results travel back while the rest
    is still pushed. It shares a card as well: links of one card move bytes in proportion to their
    credit. is_light: another server owns more than this one.
    """
    if config.credit_bytes:
        return config.credit_bytes
    sock = socket.socket(fileno=descriptor)
    try:
        if sockets.is_same_host(sock):
            return SAME_HOST_CREDIT_BYTES
        return LIGHT_CREDIT_BYTES if is_light else REMOTE_CREDIT_BYTES
    finally:
        sock.detach()


def choose_chunk(hosts: Sequence[str], *, host_ids: Sequence[str] = ()) -> int:
    """Return the default bytes of a frame; the same on all workers.

    hosts: addresses of the servers. host_ids: of all workers and servers, if known. Between
    machines, frames are small, so that results come back soon and the workers that share a
    server's link stay in step. Where all traffic stays on one host, frames suit the caches.
    """
    is_one_host = len(set(host_ids)) == 1 and bool(host_ids[0])
    is_local = is_one_host or all(map(sockets.is_loopback, hosts))
    return LOCAL_CHUNK_BYTES if is_local else REMOTE_CHUNK_BYTES
