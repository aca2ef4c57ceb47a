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

from fastps.config import Config
from fastps.errors import ConfigError
from fastps.security import ciphers
from fastps.security.handshake import Option
from fastps.transport import sockets

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
