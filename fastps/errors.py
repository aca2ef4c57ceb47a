# SPDX-License-Identifier: Apache-2.0
"""Every error fastps raises, and the table from C status codes to them.

FastPSError
+- ArgumentError          an operation cannot take an argument of this kind
+- ConfigError            a setting is missing, unknown or out of bounds
+- DuplicateNameError     an operation of the same name is still in flight
+- NotInitializedError    init() was not called, or this process was forked from one that did
+- AuthError              wrong or missing job token
+- CheckpointError        a checkpoint could not be written, or is not what was written
+- ProtocolError          a peer speaks another version or sent what no peer may send
+- MismatchError          workers disagree about one tensor
+- TransportError
|  +- PeerLostError       a process of the job died or went silent
|  |  +- ViewChangedError the job goes on without it, and the operation can be called again
|  +- TransportTimeout    a connection made no progress in time
+- StallError             an operation did not finish in time though all peers live
+- ShutdownError          the operation was cut short by shutdown()
"""

from __future__ import annotations

import enum
import re


class FastPSError(RuntimeError):
    """Base of all errors of this library.

    A RuntimeError, as the errors of Horovod and torch.distributed are: code that catches those
    goes on working.
    """


class ArgumentError(FastPSError, TypeError, ValueError):
    """An operation cannot take an argument of this kind.

    A TypeError and a ValueError too: Horovod raises either for the same mistake.
    """


class ConfigError(FastPSError, ValueError):
    """A setting is missing, unknown or out of bounds."""


class DuplicateNameError(FastPSError, ValueError):
    """An operation of the same name is still in flight; a ValueError, as with Horovod."""


class NotInitializedError(FastPSError):
    """init() has not been called in this process."""


class AuthError(FastPSError):
    """The job token is wrong or missing."""


class CheckpointError(FastPSError):
    """A checkpoint could not be written, or is missing, damaged or not of this format."""


class ProtocolError(FastPSError):
    """A peer speaks another protocol version or broke the protocol."""


class MismatchError(FastPSError):
    """Workers disagree about shape, dtype, partition count or operation of one tensor."""


class TransportError(FastPSError):
    """A connection failed."""


class PeerLostError(TransportError):
    """A process of the job died, left early or went silent longer than its lease."""


class ViewChangedError(PeerLostError):
    """A process was lost, and an elastic job goes on without it; call the operation again."""


class TransportTimeout(TransportError):
    """A connection could not be made or made no progress in time."""


class StallError(FastPSError):
    """An operation did not finish in time although every peer is alive."""


class ShutdownError(FastPSError):
    """The operation was cut short by shutdown()."""


class Status(enum.IntEnum):
    """How a call into C ended, as numbered in _core.pxd; a test compares them."""

    OK = 0
    TIMEOUT = -1
    SHUTDOWN = -2
    PEER_LOST = -3
    PROTOCOL = -4
    MISMATCH = -5
    NOMEM = -6
    SYS = -7
    LINK_TIMEOUT = -8


STATUS_ERRORS: dict[int, type[FastPSError]] = {
    Status.TIMEOUT: StallError,
    Status.SHUTDOWN: ShutdownError,
    Status.PEER_LOST: PeerLostError,
    Status.PROTOCOL: ProtocolError,
    Status.MISMATCH: MismatchError,
    Status.NOMEM: FastPSError,
    Status.SYS: TransportError,
    Status.LINK_TIMEOUT: TransportTimeout,
}


GUIDE = "docs/troubleshooting.md"
_KINDS = re.compile(r"\b(FastPSError|\w+Error|TransportTimeout)\b")


def guide_of(text: str) -> str:
    """Return the place of the guide about the first error of ours that a text names, or ""."""
    names = {one.__name__ for one in every_error()}
    found = next((name for name in _KINDS.findall(text) if name in names), "")
    return f"{GUIDE}#{found.lower()}" if found else ""


def every_error() -> list[type[FastPSError]]:
    """List the classes of this module, the base first."""
    found: list[type[FastPSError]] = [FastPSError]
    for one in found:
        found += [kind for kind in one.__subclasses__() if kind.__module__ == __name__]
    return found


def error_of(status: int, message: str) -> FastPSError:
    """Make the exception of a C status code, ready to be raised."""
    return STATUS_ERRORS.get(status, FastPSError)(message)
