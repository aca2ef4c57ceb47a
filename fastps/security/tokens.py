# SPDX-License-Identifier: Apache-2.0
"""Tokens of single members, made from the job's, and the keys made from both.

A process that has only its own token proves its role and rank, and no other. A holder of the job's
token can make them all: the scheduler, and launchers, which give each process its own. Two members
prove themselves to each other by a key of that pair, so a server needs no more either: the
scheduler makes the keys of a member and sends them sealed with the member's token. Pure: no
socket, no clock.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fastps.errors import AuthError, ConfigError, ProtocolError
from fastps.security.ciphers import wipe_bytes
from fastps.security.handshake import PROOF_BYTES, derive_key

ROLES = ("worker", "server", "validator")  # from 1 on in a handshake's lane; 0: the job's token
CONTROL, DATA, MEMORY = "control", "data", "memory"  # what keys are for
KEY_BYTES = PROOF_BYTES
_MARK = "fastps-own"


class Token(NamedTuple):
    """The job's token, or, with a role, that of one member alone."""

    secret: bytes
    role: str = ""
    rank: int = 0

    @property
    def is_own(self) -> bool:
        """Return whether it is one member's."""
        return bool(self.role)

    @property
    def lane(self) -> int:
        """Return the lane of a handshake with the scheduler, which encodes the role."""
        return ROLES.index(self.role) + 1 if self.role else 0

    @property
    def who(self) -> str:
        """Return the name of the process that it proves."""
        return f"{self.role} {self.rank}" if self.role else "a process of the job"

    def own(self, role: str, rank: int) -> Token:
        """Return a member's token, made from the job's; an own token stays as it is."""
        if self.is_own:
            return self
        return Token(derive_key(self.secret, "own", f"{role} {rank}"), role, rank)

    def key(self, purpose: str, job_id: str) -> bytes:
        """Return the key of one purpose in one job."""
        return derive_key(self.secret, purpose, job_id)

    def text(self) -> str:
        """Return an own token as files and variables hold it."""
        return f"{_MARK}:{self.role}:{self.rank}:{self.secret.hex()}"


def parse(secret: bytes, role: str = "", rank: int | None = None) -> Token:
    """Return a token; of several own ones, a line each, that of this member, else the first.

    Raises ConfigError for an own token that is not valid.
    """
    if not secret.startswith(_MARK.encode()):
        return Token(secret)
    found = [_parse_own(line) for line in secret.decode(errors="replace").split()]
    return next((one for one in found if (one.role, one.rank) == (role, rank)), found[0])


def _parse_own(line: str) -> Token:
    try:
        mark, role, rank, secret = line.split(":")
        token = Token(bytes.fromhex(secret), role, int(rank))
    except ValueError:
        token = Token(b"")
        mark = ""
    if mark != _MARK or token.role not in ROLES or len(token.secret) != KEY_BYTES:
        raise ConfigError(
            "FASTPS_TOKEN or FASTPS_TOKEN_FILE holds a member's own token that is cut or changed; "
            "make it again where the job's token is: python -m fastps.launch.secrets"
        )
    return token


def whose(token: Token, lane: int, rank: int) -> Token:
    """Return the token that a client of the scheduler claims to have; token: the job's."""
    if lane > len(ROLES):
        raise AuthError(f"there is no role {lane}; roles are 0 to {len(ROLES)}")
    return token.own(ROLES[lane - 1], rank) if lane else token


class Keys(NamedTuple):
    """A member's keys: of its links to another member, by number, and of its machine."""

    of: Callable[[int], bytes]
    memory: bytes
    held: Sequence[bytes] = ()  # those that of() returns, where it does not make them


def wipe(token: Token, keys: Keys | None) -> None:
    """Overwrite secrets where they lie, in a forked child that has no further use for them.

    Whoever still has these objects finds zeros. Copies that the interpreter has made stay.
    """
    for secret in (token.secret, *(() if keys is None else (keys.memory, *keys.held))):
        wipe_bytes(secret)


def wipe_text(secret: str) -> None:
    """Overwrite a secret text of ASCII; other texts are kept in more forms."""
    if len(secret) > 1 and secret.isascii():
        ctypes.memset(id(secret) + sys.getsizeof("") - 1, ord("0"), len(secret))


def make_keys(token: Token, job_id: str, me: int, machine: int) -> Keys:
    """Return a member's keys, made from the job's token."""

    def of(peer: int) -> bytes:
        low, high = sorted((me, peer))
        return token.key(f"{DATA} {low} {high}", job_id)

    return Keys(of, token.key(f"{MEMORY} {machine}", job_id))


def seal(own: Token, job_id: str, keys: Sequence[bytes]) -> bytes:
    """Encrypt keys for one member: each is XORed with a pad of its place alone."""
    pads = [own.key(f"seal {place}", job_id) for place in range(len(keys))]
    return _mix(b"".join(keys), b"".join(pads))


def sealed_keys(token: Token, own: Token, job_id: str, *, me: int, machine: int, n: int) -> bytes:
    """Return the sealed keys of a member of n, for unseal_keys()."""
    keys = make_keys(token, job_id, me, machine)
    return seal(own, job_id, [*map(keys.of, range(n)), keys.memory])


def unseal_keys(own: Token, job_id: str, sealed: bytes) -> Keys:
    """Return the keys of sealed_keys(). Raises ProtocolError for what is too short for any."""
    count = len(sealed) // KEY_BYTES
    if count < 1 or len(sealed) % KEY_BYTES:
        raise ProtocolError(
            f"the scheduler sent {len(sealed)} bytes of keys, which is no multiple of {KEY_BYTES}"
        )
    plain = seal(own, job_id, [sealed[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count)])
    keys = [plain[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count)]

    def of(peer: int) -> bytes:
        if not 0 <= peer < count - 1:
            raise AuthError(f"there is no member {peer}; members are 0 to {count - 2}")
        return keys[peer]

    return Keys(of, keys[-1], keys)


def _mix(one: bytes, other: bytes) -> bytes:
    mixed = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return mixed.to_bytes(len(one), "little")
