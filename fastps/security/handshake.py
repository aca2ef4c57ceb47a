# SPDX-License-Identifier: Apache-2.0
"""Prove on both ends of a new connection that the job token is known, without sending it.

Mutual challenge-response with HMAC-SHA256, four messages of fixed size:

    client -> server  hello      magic, version, purpose, 0, sender, lane, client nonce
    server -> client  challenge  magic, version, status, 0, server nonce, server proof
    client -> server  proof      client proof
    server -> client  accept     magic, version, status, 0

server proof = HMAC(key, "server" || hello || challenge without its proof)
client proof = HMAC(key, "client" || hello || whole challenge)

Both proofs cover both nonces and everything said so far, so none can be replayed, used for another
purpose, sender or lane, or sent back in the other direction. Decides who is let in; never
touches a socket or a clock: callers move the bytes and bound the time. An object serves one
connection, on one thread. It does not hide or protect what follows on the connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from fastps.errors import AuthError, FastPSError, ProtocolError, TransportError

Result = TypeVar("Result")
# One side's part of a handshake: gives what to send and then how many bytes to read, and is sent
# these. Whoever moves bytes, blocking or not, drives it to its end.
Steps: TypeAlias = Generator[tuple[bytes, int], bytes, Result]

MAGIC = b"FPSH"
PROTOCOL_VERSION = 2  # the same as in transport/frame.pxd; a test compares them
NONCE_BYTES = 16
PROOF_BYTES = 32

_HELLO = struct.Struct("<4sHBxII16s")
_CHALLENGE = struct.Struct("<4sHBx16s32s")
_ACCEPT = struct.Struct("<4sHBx")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
ACCEPT_BYTES = _ACCEPT.size

_TOKEN_ADVICE = "set the same FASTPS_TOKEN or FASTPS_TOKEN_FILE and FASTPS_JOB_ID everywhere"


class NoPlaceError(TransportError):
    """Who was called knows that we may call, and wants no such connection: by no other way."""


class Purpose(enum.IntEnum):
    """What a connection is for; part of what both sides prove."""

    CONTROL = 1
    PULSE = 2
    DATA = 3
    MEMORY = 4
    PEER = 5


class Status(enum.IntEnum):
    """What the server answers."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_TOKEN = 2
    WRONG_PURPOSE = 3
    NO_PLACE = 4


class Claim(NamedTuple):
    """Who somebody says to be, and the key by which that is proven."""

    key: bytes
    who: str = ""

    @property
    def unproven(self) -> str:
        """Say that it is not proven."""
        if not self.who:
            return f"the peer does not know the job token; {_TOKEN_ADVICE}"
        return f"it says to be {self.who}, and does not know that token; {_TOKEN_ADVICE}"


# What a door goes by: purpose, sender and lane of a hello make a claim. AuthError: nobody's.
ClaimOf: TypeAlias = Callable[["Purpose", int, int], Claim]


def derive_key(token: bytes, purpose: str, job_id: str) -> bytes:
    """Make the key of one purpose within one job from the job token; 32 bytes."""
    parts = [b"fastps key", purpose.encode(), job_id.encode()]
    message = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hmac.digest(token, message, "sha256")


class ClientHandshake:
    """Lead the connecting side through one handshake: `hello`, `answer`, `finish`, or `steps`."""

    def __init__(
        self,
        key: bytes,
        *,
        purpose: Purpose | int,
        sender: int,
        lane: int = 0,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._key = key
        self._hello = _HELLO.pack(
            MAGIC, PROTOCOL_VERSION, Purpose(purpose), sender, lane, random_bytes(NONCE_BYTES)
        )
        self._step = "hello"

    def hello(self) -> bytes:
        """Return the first message to send."""
        self._step = _advance(self._step, "hello", "answer")
        return self._hello

    def answer(self, challenge: bytes) -> bytes:
        """Check the server's challenge and give the proof to send.

        Raises AuthError when the server does not know the key, ProtocolError when it speaks
        another version or something else entirely; the connection is then to be closed.
        """
        self._step = _advance(self._step, "answer", "finish")
        _check_length(challenge, CHALLENGE_BYTES, "challenge")
        magic, version, status, _, proof = _CHALLENGE.unpack(challenge)
        _check_head(magic, version)
        _check_status(status)
        expected = _prove(self._key, b"server", self._hello, challenge[:-PROOF_BYTES])
        if not hmac.compare_digest(proof, expected):
            raise AuthError(f"the peer does not know the job token; {_TOKEN_ADVICE}")
        return _prove(self._key, b"client", self._hello, challenge)

    def finish(self, accept: bytes) -> None:
        """Check the server's last word; AuthError when it refused."""
        self._step = _advance(self._step, "finish", "done")
        _check_length(accept, ACCEPT_BYTES, "accept")
        magic, version, status = _ACCEPT.unpack(accept)
        _check_head(magic, version)
        _check_status(status)

    def steps(self) -> Steps[None]:
        """Take all steps in their order."""
        challenge = yield self.hello(), CHALLENGE_BYTES
        accept = yield self.answer(challenge), ACCEPT_BYTES
        self.finish(accept)


class ServerHandshake:
    """Lead the accepting side through one handshake: `challenge`, `accept`, or `steps`.

    `key` is that of all who come, or says whose a newcomer must know. `purposes` are those that
    this port serves. After an error `refusal` holds what to send before closing; it is empty where
    the other side does not look like one of ours, so that a port scanner learns nothing.
    `purpose`, `sender` and `lane` are true only after `accept`; from then on `refusal` says that
    there is no place for one who knows the token.
    """

    def __init__(
        self,
        key: bytes | ClaimOf,
        *,
        purposes: Collection[Purpose] = tuple(Purpose),
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._key = key
        self._claim = Claim(b"")
        self._purposes = purposes
        self._random_bytes = random_bytes
        self._step = "challenge"
        self._expected = b""
        self.refusal = b""
        self.purpose = Purpose.CONTROL
        self.sender = 0
        self.lane = 0

    def challenge(self, hello: bytes) -> bytes:
        """Check a hello and give the challenge to send.

        Raises ProtocolError for another version, another purpose or garbage.
        """
        self._step = _advance(self._step, "challenge", "accept")
        _check_length(hello, HELLO_BYTES, "hello")
        magic, version, purpose, sender, lane, _ = _HELLO.unpack(hello)
        if magic == MAGIC and version != PROTOCOL_VERSION:
            self.refusal = _challenge_refusal(Status.WRONG_VERSION)
        _check_head(magic, version)
        if purpose not in self._purposes or hello[7] != 0:
            self.refusal = _challenge_refusal(Status.WRONG_PURPOSE)
            raise ProtocolError(f"purpose {purpose} is not served on this port")
        self.purpose, self.sender, self.lane = Purpose(purpose), sender, lane
        self.refusal = _challenge_refusal(Status.WRONG_TOKEN)
        self._claim = self._claimed()
        self.refusal = b""
        return self._make_challenge(hello)

    def _claimed(self) -> Claim:
        if isinstance(self._key, bytes):
            return Claim(self._key)
        return self._key(self.purpose, self.sender, self.lane)

    def _make_challenge(self, hello: bytes) -> bytes:
        nonce = self._random_bytes(NONCE_BYTES)
        head = _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, Status.OK, nonce, b"")[:-PROOF_BYTES]
        challenge = head + _prove(self._claim.key, b"server", hello, head)
        self._expected = _prove(self._claim.key, b"client", hello, challenge)
        return challenge

    def accept(self, proof: bytes) -> bytes:
        """Check the client's proof and give the last message; AuthError when it is wrong.

        May be called once: a second guess needs a new connection.
        """
        self._step = _advance(self._step, "accept", "done")
        if not hmac.compare_digest(proof, self._expected):
            self.refusal = _ACCEPT.pack(MAGIC, PROTOCOL_VERSION, Status.WRONG_TOKEN)
            raise AuthError(self._claim.unproven)
        self.refusal = _ACCEPT.pack(MAGIC, PROTOCOL_VERSION, Status.NO_PLACE)
        return _ACCEPT.pack(MAGIC, PROTOCOL_VERSION, Status.OK)

    def steps(self) -> Steps[bytes]:
        """Take all steps in their order; give the last message, still to be sent."""
        hello = yield b"", HELLO_BYTES
        proof = yield self.challenge(hello), PROOF_BYTES
        return self.accept(proof)


def _prove(key: bytes, direction: bytes, hello: bytes, rest: bytes) -> bytes:
    """Sign one direction of the talk; all parts have fixed sizes, so joining is unambiguous."""
    return hmac.digest(key, direction + hello + rest, hashlib.sha256)


def _challenge_refusal(status: Status) -> bytes:
    return _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, status, b"", b"")


def _advance(step: str, expected: str, following: str) -> str:
    """Keep the order of messages; a step that raised is not repeated."""
    if step != expected:
        raise ProtocolError(f"handshake step {expected} came when {step} was due")
    return following


def _check_length(message: bytes, nbytes: int, name: str) -> None:
    if len(message) != nbytes:
        raise ProtocolError(f"{name} of {len(message)} bytes, expected {nbytes}")


def _check_head(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the peer is not a fastps process of this kind; check host and port")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this process {PROTOCOL_VERSION}; "
            "install one fastps version everywhere"
        )


def _check_status(status: int) -> None:
    """Raise what a refusal of the server means."""
    if status == Status.OK:
        return
    if status == Status.WRONG_TOKEN:
        raise AuthError(f"refused: wrong job token; {_TOKEN_ADVICE}")
    if status == Status.NO_PLACE:
        raise NoPlaceError("the peer has no place for this connection; its log says why")
    raise _refused(status)


def _refused(status: int) -> FastPSError:
    name = Status(status).name.lower() if status in tuple(Status) else f"status {status}"
    return ProtocolError(f"the peer refused the connection: {name}; check host and port")
