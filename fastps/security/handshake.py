# SPDX-License-Identifier: Apache-2.0
"""Prove on both ends of a new connection that the job token is known, without sending it.

Mutual challenge-response with HMAC-SHA256, four messages of fixed size:

    client -> server  hello      magic, version, purpose, options, sender, lane, client nonce
    server -> client  challenge  magic, version, status, options, server nonce, server proof
    client -> server  proof      client proof
    server -> client  accept     magic, version, status, 0, server's last proof

server proof = HMAC(key, "server" || hello || challenge without its proof)
client proof = HMAC(key, "client" || hello || whole challenge)

The last proof is HMAC(key, "accept" || hello || challenge || client proof || accept without it).
All proofs cover both nonces and all messages so far, so none can be replayed, used for another
purpose, sender or lane, or reflected. A refusal of the token has no proof, only zeros. An option
is a bit that either side may set: the union holds for the connection, and since the proofs cover
both bytes, nobody between them can clear one. Decides which connections are accepted; never
touches a socket or a clock: callers move the bytes and bound the time. An object serves one
connection, on one thread. The handshake does not encrypt or authenticate what follows.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from fastps.errors import AuthError, ProtocolError, TransportError

Result = TypeVar("Result")
# One side of a handshake: yields bytes to send and the number of bytes to read next, and is sent
# those. The caller, blocking or not, drives it to its end. Where it yields no bytes and wants
# none, it is to be sent none a little later.
Steps: TypeAlias = Generator[tuple[bytes, int], bytes, Result]

MAGIC = b"FPSH"
PROTOCOL_VERSION = 3  # the same as in transport/frame.pxd; a test compares them
NONCE_BYTES = 16
PROOF_BYTES = 32

_HELLO = struct.Struct("<4sHBBII16s")
_CHALLENGE = struct.Struct("<4sHBB16s32s")
_ACCEPT = struct.Struct("<4sHBx32s")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
ACCEPT_BYTES = _ACCEPT.size

_TOKEN_ADVICE = "set the same FASTPS_TOKEN or FASTPS_TOKEN_FILE and FASTPS_JOB_ID everywhere"


class NoPlaceError(TransportError):
    """The server knows the token and refuses this connection, whatever its transport."""


class Purpose(enum.IntEnum):
    """What a connection is for; part of what both sides prove."""

    CONTROL = 1
    PULSE = 2
    DATA = 3
    MEMORY = 4
    PEER = 5


class Option(enum.IntFlag):
    """What holds for a connection if either side wants it."""

    NONE = 0
    CHECK_PAYLOADS = 1  # frames carry a checksum of their payloads


class Status(enum.IntEnum):
    """What the server answers."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_TOKEN = 2
    WRONG_PURPOSE = 3
    NO_PLACE = 4


class Claim(NamedTuple):
    """Whom a client claims to be, and the key that proves it."""

    key: bytes
    who: str = ""

    @property
    def unproven(self) -> str:
        """Return the error text of a claim that is not proven."""
        if not self.who:
            return f"the peer does not know the job token; {_TOKEN_ADVICE}"
        return f"the peer claims to be {self.who}, and does not know that token; {_TOKEN_ADVICE}"


# Returns the claim of a hello by its purpose, sender and lane; None: not known yet. AuthError
# where there is none.
ClaimOf: TypeAlias = Callable[["Purpose", int, int], Claim | None]


def derive_key(token: bytes, purpose: str, job_id: str) -> bytes:
    """Return the key of one purpose within one job, from the job token; 32 bytes."""
    parts = [b"fastps key", purpose.encode(), job_id.encode()]
    message = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hmac.digest(token, message, "sha256")


class ClientHandshake:
    """Lead the connecting side through one handshake: `hello`, `answer`, `finish`, or `steps`.

    options: those that this side wants; after `answer`, those that hold.
    """

    def __init__(
        self,
        key: bytes,
        *,
        purpose: Purpose | int,
        sender: int,
        lane: int = 0,
        options: Option = Option.NONE,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._key = key
        self.options = options
        nonce = random_bytes(NONCE_BYTES)
        self._hello = _HELLO.pack(
            MAGIC, PROTOCOL_VERSION, Purpose(purpose), options, sender, lane, nonce
        )
        self._answered = b""  # the challenge, and our proof
        self._step = "hello"

    def hello(self) -> bytes:
        """Return the first message to send."""
        self._step = _advance(self._step, "hello", "answer")
        return self._hello

    def answer(self, challenge: bytes) -> bytes:
        """Check the server's challenge and return the proof to send.

        Raises AuthError when the server does not know the key, ProtocolError when it speaks
        another version or another protocol. The caller then closes the connection.
        """
        self._step = _advance(self._step, "answer", "finish")
        _check_length(challenge, CHALLENGE_BYTES, "challenge")
        magic, version, status, options, _, proof = _CHALLENGE.unpack(challenge)
        _check_head(magic, version)
        _check_status(status)
        expected = _prove(self._key, b"server", self._hello, challenge[:-PROOF_BYTES])
        if not hmac.compare_digest(proof, expected):
            raise AuthError(f"the peer does not know the job token; {_TOKEN_ADVICE}")
        self.options |= Option(options)
        proof = _prove(self._key, b"client", self._hello, challenge)
        self._answered = challenge + proof
        return proof

    def finish(self, accept: bytes) -> None:
        """Check the server's last message. Raises AuthError for a refusal, or without proof."""
        self._step = _advance(self._step, "finish", "done")
        _check_length(accept, ACCEPT_BYTES, "accept")
        magic, version, status, proof = _ACCEPT.unpack(accept)
        _check_head(magic, version)
        if status in (Status.OK, Status.NO_PLACE):
            rest = self._answered + accept[:-PROOF_BYTES]
            if not hmac.compare_digest(proof, _prove(self._key, b"accept", self._hello, rest)):
                raise AuthError(f"the peer's last message is not proven; {_TOKEN_ADVICE}")
        _check_status(status)

    def steps(self) -> Steps[None]:
        """Take all steps in their order."""
        challenge = yield self.hello(), CHALLENGE_BYTES
        accept = yield self.answer(challenge), ACCEPT_BYTES
        self.finish(accept)


class ServerHandshake:
    """Lead the accepting side through one handshake: `challenge`, `accept`, or `steps`.

    `key` is the key of all clients, or a function that returns the claim of each. `purposes` are
    those that this port serves. After an error `refusal` holds the bytes to send before closing;
    it is empty where the client does not look like fastps, so that a port scanner learns nothing.
    `purpose`, `sender`, `lane` and `options`, which are those of both sides then, are proven only
    after `accept`; from then on `refusal` tells a client that knows the token that there is no
    place for its connection.
    """

    def __init__(
        self,
        key: bytes | ClaimOf,
        *,
        purposes: Collection[Purpose] = tuple(Purpose),
        options: Option = Option.NONE,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._key = key
        self.options = options
        self._claim = Claim(b"")
        self._purposes = purposes
        self._random_bytes = random_bytes
        self._step = "challenge"
        self._expected = b""
        self._hello = self._challenge = b""
        self.refusal = b""
        self.purpose = Purpose.CONTROL
        self.sender = 0
        self.lane = 0

    def challenge(self, hello: bytes) -> bytes:
        """Check a hello and return the challenge to send; empty: call again, a little later.

        Raises ProtocolError for another version, another purpose or garbage.
        """
        self._step = _advance(self._step, "challenge", "accept")
        _check_length(hello, HELLO_BYTES, "hello")
        magic, version, purpose, options, sender, lane, _ = _HELLO.unpack(hello)
        if magic == MAGIC and version != PROTOCOL_VERSION:
            self.refusal = _challenge_refusal(Status.WRONG_VERSION)
        _check_head(magic, version)
        if purpose not in self._purposes:
            self.refusal = _challenge_refusal(Status.WRONG_PURPOSE)
            raise ProtocolError(
                f"a connection for purpose {purpose} is not served on this port; check its host "
                "and port"
            )
        self.purpose, self.sender, self.lane = Purpose(purpose), sender, lane
        self.refusal = _challenge_refusal(Status.WRONG_TOKEN)
        if isinstance(self._key, bytes):
            self._claim = Claim(self._key)
        else:
            claim = self._key(self.purpose, self.sender, self.lane)
            if claim is None:
                self._step, self.refusal = "challenge", b""
                return b""
            self._claim = claim
        self.refusal = b""
        nonce = self._random_bytes(NONCE_BYTES)
        own = _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, Status.OK, self.options, nonce, b"")
        head = own[:-PROOF_BYTES]
        self.options |= Option(options)
        challenge = head + _prove(self._claim.key, b"server", hello, head)
        self._expected = _prove(self._claim.key, b"client", hello, challenge)
        self._hello, self._challenge = hello, challenge
        return challenge

    def accept(self, proof: bytes) -> bytes:
        """Check the client's proof and return the last message. Raises AuthError.

        May be called once: a second guess needs a new connection.
        """
        self._step = _advance(self._step, "accept", "done")
        if not hmac.compare_digest(proof, self._expected):
            self.refusal = _ACCEPT.pack(MAGIC, PROTOCOL_VERSION, Status.WRONG_TOKEN, b"")
            raise AuthError(self._claim.unproven)
        self.refusal = self._last(Status.NO_PLACE, proof)
        return self._last(Status.OK, proof)

    def _last(self, status: Status, proof: bytes) -> bytes:
        head = _ACCEPT.pack(MAGIC, PROTOCOL_VERSION, status, b"")[:-PROOF_BYTES]
        rest = self._challenge + proof + head
        return head + _prove(self._claim.key, b"accept", self._hello, rest)

    def steps(self) -> Steps[bytes]:
        """Take all steps in their order; return the last message, still to be sent."""
        hello = yield b"", HELLO_BYTES
        while not (challenge := self.challenge(hello)):
            yield b"", 0
        proof = yield challenge, PROOF_BYTES
        return self.accept(proof)


def _prove(key: bytes, direction: bytes, hello: bytes, rest: bytes) -> bytes:
    """Return the proof of one direction; all parts have fixed sizes, so joining is unambiguous."""
    return hmac.digest(key, direction + hello + rest, hashlib.sha256)


def _challenge_refusal(status: Status) -> bytes:
    return _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, status, 0, b"", b"")


def _advance(step: str, expected: str, following: str) -> str:
    """Return the following step. Raises ProtocolError where another step was due."""
    if step != expected:
        raise ProtocolError(f"handshake step {expected} came when {step} was due")
    return following


def _check_length(message: bytes, nbytes: int, name: str) -> None:
    if len(message) != nbytes:
        raise ProtocolError(f"the {name} of the handshake has {len(message)} bytes, not {nbytes}")


def _check_head(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the peer is not a fastps process of this kind; check host and port")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this process {PROTOCOL_VERSION}; "
            "install the same version of fastps on all machines"
        )


def _check_status(status: int) -> None:
    """Raise the error of a refusal by the server."""
    if status == Status.OK:
        return
    if status == Status.WRONG_TOKEN:
        raise AuthError(f"refused: wrong job token; {_TOKEN_ADVICE}")
    if status == Status.NO_PLACE:
        raise NoPlaceError("the peer has no place for this connection; its log says why")
    name = Status(status).name.lower() if status in tuple(Status) else f"status {status}"
    raise ProtocolError(f"the peer refused the connection: {name}; check host and port")
