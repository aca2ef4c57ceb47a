# SPDX-License-Identifier: Apache-2.0
"""What this end of a connection says about encryption, by settings and the socket's addresses.

The handshake compares it with what the other end says (security/handshake.py). Addresses are those
of the socket, not what a peer says of its machine. Unix sockets are never encrypted: their other
end is a process of the same user on this machine.
"""

from __future__ import annotations

import functools
import logging
import socket
from typing import TYPE_CHECKING

from fastps.config import Config
from fastps.errors import ConfigError
from fastps.security import ciphers
from fastps.security.handshake import Option
from fastps.transport import sockets

if TYPE_CHECKING:
    import ssl

log = logging.getLogger(__name__)

_MODES = {"auto": Option.AUTO, "integrity": Option.INTEGRITY, "on": Option.ON}
STRICT = ("on", "integrity")  # modes in which nothing leaves unprotected


def check_encryption(config: Config) -> None:
    """Raise ConfigError where settings ask for encryption that this process cannot provide."""
    if config.encrypt not in STRICT:
        return
    ciphers.load()
    if config.transport == "rdma":
        raise ConfigError(
            f"FASTPS_ENCRYPT={config.encrypt} cannot encrypt RDMA; set FASTPS_TRANSPORT=tcp, or "
            "FASTPS_ENCRYPT=auto, which leaves RDMA as it is"
        )


def check_carried(config: Config, *, by: str, cure: str) -> None:
    """Raise ConfigError where another program would carry the job's token in clear."""
    if config.encrypt in STRICT:
        raise ConfigError(
            f"FASTPS_ENCRYPT={config.encrypt}, but {by} would carry the job token to other "
            f"machines in clear; {cure}"
        )


def status_tls(config: Config, *, is_local: bool) -> ssl.SSLContext | None:
    """Return what the status is served with over TCP; None: in clear. Raises ConfigError.

    is_local: it is served on the loopback alone.
    """
    path = config.metrics_cert_file
    if not path:
        if config.encrypt in STRICT and not is_local:
            raise ConfigError(
                f"FASTPS_ENCRYPT={config.encrypt}, but FASTPS_METRICS_HOST={config.metrics_host} "
                "would send numbers and their token in clear; set FASTPS_METRICS_CERT_FILE to a "
                "PEM file with a certificate and its key"
            )
        return None
    import ssl  # noqa: PLC0415  (few processes have a certificate)

    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        found.load_cert_chain(path)
    except OSError as error:  # also what is no certificate
        raise ConfigError(
            f"FASTPS_METRICS_CERT_FILE={path} cannot be used: {error.strerror or error}; give a "
            "PEM file with a certificate, its chain, and its key without a password"
        ) from error
    return found


def encryption_options(sock: socket.socket, config: Config) -> Option:
    """Return what this end says of a connected socket. Raises what check_encryption() does."""
    mode = _MODES.get(config.encrypt, Option.NONE)
    if not mode or sockets.is_unix(sock):
        return Option.NONE
    check_encryption(config)
    if not _has_library():
        mode |= Option.NO_LIBRARY
    elif not ciphers.has_aes():
        mode |= Option.NO_AES
    return mode | (Option.LEAVES if _leaves(sock) else Option.NONE)


@functools.cache
def _has_library() -> bool:
    try:
        ciphers.load()
    except ConfigError as error:
        log.warning("FASTPS_ENCRYPT=auto encrypts nothing: %s", error)
        return False
    return True


def _leaves(sock: socket.socket) -> bool:
    """Return whether a connection leaves this machine, as far as its addresses show."""
    try:
        host = str(sock.getpeername()[0])
        return not (sockets.is_same_host(sock) or sockets.is_own_address(host))
    except OSError:  # it has ended already
        return True
