# SPDX-License-Identifier: Apache-2.0
"""Ciphers: which there are, where the library with them is, and the keys of one connection.

Decides which cipher suits this machine; _cipher.pyx computes with the machine's libcrypto.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import hmac
import os
import sys
from pathlib import Path
from typing import NamedTuple

from fastps.errors import AuthError
from fastps.security import _cipher
from fastps.security._cipher import (
    SEAL_BYTES,
    SECRET_BYTES,
    Opener,
    Sealer,
    public_key,
    shared_secret,
)

CPU_TABLE = Path("/proc/cpuinfo")
TAG_BYTES = SEAL_BYTES  # what sealing adds to a message
_FILES = ("libcrypto.so.4", "libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so")


class Kind(enum.IntEnum):
    """A cipher; part of what both sides prove."""

    AES_128_GCM = 0
    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2

    @property
    def label(self) -> str:
        """Return the usual name."""
        return self.name.replace("_", "-").replace("CHACHA", "ChaCha").replace("POLY", "Poly")


class Sealing(NamedTuple):
    """The keys of one connection: what its two directions are sealed with."""

    kind: Kind
    hides: bool  # else payloads stay readable, and are only authenticated
    to_send: bytes
    to_receive: bytes

    def check_unused(self) -> None:
        """Raise AuthError after wipe(): two connections would have the same keys."""
        if not (any(self.to_send) and any(self.to_receive)):
            raise AuthError("the keys of this connection were used already; shake hands again")

    def wipe(self) -> None:
        """Overwrite the keys, once both ciphers are made."""
        wipe_bytes(self.to_send)
        wipe_bytes(self.to_receive)

    def sealer(self) -> Sealer:
        """Return what seals the messages that this end sends; to be made once."""
        self.check_unused()
        return Sealer(self.kind, self.to_send, hides=self.hides)

    def opener(self) -> Opener:
        """Return what opens the messages that this end receives; to be made once."""
        self.check_unused()
        return Opener(self.kind, self.to_receive, hides=self.hides)


def load() -> str:
    """Open libcrypto, once; return its version. Raises ConfigError where there is none."""
    folders = dict.fromkeys((sys.prefix, sys.base_prefix))
    beside = [os.path.join(one, "lib", name) for one in folders for name in _FILES]
    return _cipher.load([name.encode() for name in (*_FILES, *beside)])


@functools.cache
def has_aes(table: Path = CPU_TABLE) -> bool:
    """Return whether the processor has instructions for AES and for GCM's multiplication."""
    try:
        words = set(table.read_text().split())
    except OSError:
        return False
    return "aes" in words and bool(words & {"pclmulqdq", "pmull"})


def best_kind() -> Kind:
    """Return the cipher that suits this processor."""
    return Kind.AES_128_GCM if has_aes() else Kind.CHACHA20_POLY1305


def rate(kind: Kind) -> float:
    """Return how many bytes a second one thread seals, in records of 64 KiB."""
    return _cipher.measure(kind)


def wipe_bytes(secret: bytes) -> None:
    """Overwrite a secret of more than one byte; shorter ones the interpreter shares."""
    if len(secret) > 1:
        ctypes.memset(id(secret) + bytes.__basicsize__ - 1, 0, len(secret))


def derive(salt: bytes, secret: bytes, info: bytes, nbytes: int) -> bytes:
    """Return key material by HKDF with SHA-256 (RFC 5869); nbytes: at most 8160."""
    prk = hmac.digest(salt, secret, hashlib.sha256)
    found = block = b""
    for number in range(1, -(-nbytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(prk, block + info + bytes([number]), hashlib.sha256)
        found += block
    return found[:nbytes]


__all__ = [
    "SECRET_BYTES",
    "TAG_BYTES",
    "Kind",
    "Opener",
    "Sealer",
    "Sealing",
    "best_kind",
    "derive",
    "has_aes",
    "load",
    "public_key",
    "rate",
    "shared_secret",
    "wipe_bytes",
]
