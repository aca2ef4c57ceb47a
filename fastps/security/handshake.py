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
connection, on one thread.

Where the options of both ends ask for it, the handshake also agrees on keys, in the shape of
Noise's NNpsk0 with the token's key as the pre-shared one. The client's proof is followed by an
X25519 public key that it covers, and the server's last proof preceded by one:

    keys = HKDF-SHA256(salt: key, secret: X25519, info: SHA-256 of all messages up to this key)

One key for each direction, and one that replaces the token's in the last proof, which so shows
that both have the same. Each connection has new private keys, so who learns the token later can
open none that was recorded. The server computes only for a client that has proven the token.
Without these options nothing that follows a handshake is encrypted or authenticated.
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
from fastps.security import ciphers
from fastps.security.ciphers import SECRET_BYTES, Kind, Sealing

Result = TypeVar("Result")
# One side of a handshake: yields bytes to send and the number of bytes to read next, and is sent
# those. The caller, blocking or not, drives it to its end. Where it yields no bytes and wants
# none, it is to be sent none a little later.
Steps: TypeAlias = Generator[tuple[bytes, int], bytes, Result]

MAGIC = b"FPSH"
PROTOCOL_VERSION = 3  # the same as in transport/frame.pxd; a test compares them
NONCE_BYTES = 16
PROOF_BYTES = 32
PUBLIC_BYTES = 32  # of an X25519 key

_HELLO = struct.Struct("<4sHBBII16s")
_CHALLENGE = struct.Struct("<4sHBB16s32s")
_ACCEPT_HEAD = struct.Struct("<4sHBx")
HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
ACCEPT_BYTES = _ACCEPT_HEAD.size + PROOF_BYTES  # and a public key before the proof

_TOKEN_ADVICE = "set the same FASTPS_TOKEN or FASTPS_TOKEN_FILE and FASTPS_JOB_ID everywhere"


class NoPlaceError(TransportError):
    """The server knows the token and refuses this connection, whatever its transport."""


class EncryptionError(ProtocolError):
    """The two ends are set to encrypt differently, or one of them cannot."""


class Purpose(enum.IntEnum):
    """What a connection is for; part of what both sides prove."""

    CONTROL = 1
    PULSE = 2
    DATA = 3
    MEMORY = 4
    PEER = 5


class Option(enum.IntFlag):
    """What a side says of a connection.

    AUTO, INTEGRITY and ON are modes of encryption, of which a side sets one, or none: off. Both
    sides have to set the same.
    """

    NONE = 0
    CHECK_PAYLOADS = 1  # frames carry a checksum of their payloads, if either side wants it
    AUTO = 2  # encrypt if either side sees the connection leave its machine
    INTEGRITY = 4  # authenticate, and encrypt nothing
    ON = 8
    LEAVES = 16  # this side sees it leave its machine
    NO_LIBRARY = 32  # this side has none to encrypt with
    NO_AES = 64  # this side's processor has no instructions for AES

    @property
    def mode(self) -> str:
        """Return the mode of encryption, as the setting has it."""
        found = [one.name.lower() for one in _MODES if one in self and one.name]
        return " and ".join(found) or "off"


_MODES = (Option.AUTO, Option.INTEGRITY, Option.ON)


class Status(enum.IntEnum):
    """What the server answers."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_TOKEN = 2
    WRONG_PURPOSE = 3
    NO_PLACE = 4
    WRONG_MODE = 5


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
    _check_kept(token)
    parts = [b"fastps key", purpose.encode(), job_id.encode()]
    message = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    return hmac.digest(token, message, "sha256")


def agree(ours: Option, theirs: Option) -> tuple[Kind, bool] | None:
    """Return the cipher of a connection and whether it hides payloads; None: do not seal it.

    Both sides return the same. Raises EncryptionError where their modes differ, or where one that
    has to encrypt cannot.
    """
    if ours.mode != theirs.mode:
        raise EncryptionError(
            f"FASTPS_ENCRYPT is {ours.mode} here and {theirs.mode} at the peer; set the same on "
            "all machines"
        )
    union = ours | theirs
    if ours.mode == "off":
        return None
    if Option.AUTO in ours and (Option.LEAVES not in union or Option.NO_LIBRARY in union):
        return None
    if Option.NO_LIBRARY in union:
        where = "this machine" if Option.NO_LIBRARY in ours else "the peer's machine"
        raise EncryptionError(
            f"FASTPS_ENCRYPT={ours.mode} needs libcrypto, and {where} has none; install OpenSSL "
            "there (`fastps doctor` shows what it finds)"
        )
    kind = Kind.CHACHA20_POLY1305 if Option.NO_AES in union else Kind.AES_128_GCM
    return kind, Option.INTEGRITY not in ours


class _Exchange:
    """One side's part in agreeing on the keys of a connection."""

    def __init__(self, suite: tuple[Kind, bool], random_bytes: Callable[[int], bytes]) -> None:
        self._suite = suite
        ciphers.load()
        self._private = random_bytes(PUBLIC_BYTES)
        self.public = ciphers.public_key(self._private)

    def keys(self, key: bytes, theirs: bytes, messages: bytes) -> tuple[bytes, bytes, bytes]:
        """Return the secrets of client and server and the key of the last proof. Called once."""
        secret = ciphers.shared_secret(self._private, theirs)
        kind, hides = self._suite
        info = b"fastps sealing" + bytes([kind, hides]) + hashlib.sha256(messages).digest()
        found = ciphers.derive(key, secret, info, 2 * SECRET_BYTES + PROOF_BYTES)
        for used in (self._private, secret):
            ciphers.wipe_bytes(used)
        rest = found[2 * SECRET_BYTES :]
        return found[:SECRET_BYTES], found[SECRET_BYTES : 2 * SECRET_BYTES], rest


class ClientHandshake:
    """Lead the connecting side through one handshake: `hello`, `answer`, `finish`, or `steps`.

    options: those that this side wants; after `answer`, those that hold. sealing: the keys of the
    connection after `finish`, if it is sealed.
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
        self.options = self._own = options
        self._random_bytes = random_bytes
        self._suite: tuple[Kind, bool] | None = None
        self._exchange: _Exchange | None = None
        self.sealing: Sealing | None = None
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
        another version or another protocol, EncryptionError when it encrypts otherwise. The caller
        then closes the connection.
        """
        self._step = _advance(self._step, "answer", "finish")
        _check_length(challenge, CHALLENGE_BYTES, "challenge")
        magic, version, status, options, _, proof = _CHALLENGE.unpack(challenge)
        _check_head(magic, version)
        if status == Status.WRONG_MODE:
            agree(self._own, Option(options))
        _check_status(status)
        expected = _prove(self._key, b"server", self._hello, challenge[:-PROOF_BYTES])
        if not hmac.compare_digest(proof, expected):
            raise AuthError(f"the peer does not know the job token; {_TOKEN_ADVICE}")
        self.options |= Option(options)
        self._suite = agree(self._own, Option(options))
        public = b""
        if self._suite is not None:
            self._exchange = _Exchange(self._suite, self._random_bytes)
            public = self._exchange.public
        proof = _prove(self._key, b"client", self._hello, challenge + public)
        self._answered = challenge + proof + public
        return proof + public

    @property
    def accept_nbytes(self) -> int:
        """How many bytes the server's last message has, after `answer`."""
        return ACCEPT_BYTES + (0 if self._suite is None else PUBLIC_BYTES)

    def finish(self, accept: bytes) -> None:
        """Check the server's last message. Raises AuthError for a refusal, or without proof."""
        self._step = _advance(self._step, "finish", "done")
        _check_length(accept, self.accept_nbytes, "accept")
        head, proof = accept[:-PROOF_BYTES], accept[-PROOF_BYTES:]
        magic, version, status = _ACCEPT_HEAD.unpack_from(head)
        _check_head(magic, version)
        if status in (Status.OK, Status.NO_PLACE):
            key = self._key if self._exchange is None else self._take_keys(head)
            rest = self._answered + head
            if not hmac.compare_digest(proof, _prove(key, b"accept", self._hello, rest)):
                self.sealing = None
                raise AuthError(f"the peer's last message is not proven; {_TOKEN_ADVICE}")
        _check_status(status)

    def _take_keys(self, head: bytes) -> bytes:
        """Compute the keys of the connection; return that of the last proof."""
        assert self._exchange is not None
        assert self._suite is not None
        theirs = head[_ACCEPT_HEAD.size :]
        messages = self._hello + self._answered + theirs
        own, other, last = self._exchange.keys(self._key, theirs, messages)
        self.sealing = Sealing(*self._suite, own, other)
        return last

    def steps(self) -> Steps[None]:
        """Take all steps in their order."""
        challenge = yield self.hello(), CHALLENGE_BYTES
        accept = yield self.answer(challenge), self.accept_nbytes
        self.finish(accept)


class ServerHandshake:
    """Lead the accepting side through one handshake: `challenge`, `accept`, or `steps`.

    `key` is the key of all clients, or a function that returns the claim of each. `purposes` are
    those that this port serves. After an error `refusal` holds the bytes to send before closing;
    it is empty where the client does not look like fastps, so that a port scanner learns nothing.
    `purpose`, `sender`, `lane` and `options`, which are those of both sides then, are proven only
    after `accept`; from then on `refusal` tells a client that knows the token that there is no
    place for its connection, and `sealing` has the keys of the connection, if it is sealed.
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
        self._suite: tuple[Kind, bool] | None = None
        self.sealing: Sealing | None = None
        self._last_key = self._public = b""  # of the last proof, and what stands before that
        self._claim = Claim(b"")
        self._purposes = purposes
        self._random_bytes = random_bytes
        self._step = "challenge"
        self._hello = self._challenge = b""
        self.refusal = b""
        self.purpose = Purpose.CONTROL
        self.sender = 0
        self.lane = 0

    def challenge(self, hello: bytes) -> bytes:
        """Check a hello and return the challenge to send; empty: call again, a little later.

        Raises ProtocolError for another version, another purpose or garbage, EncryptionError for
        another way to encrypt.
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
        self.refusal = _challenge_refusal(Status.WRONG_MODE, self.options)
        self._suite = agree(self.options, Option(options))
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
        self._hello, self._challenge = hello, challenge
        return challenge

    @property
    def answer_nbytes(self) -> int:
        """How many bytes the client's proof has, after `challenge`."""
        return PROOF_BYTES + (0 if self._suite is None else PUBLIC_BYTES)

    def accept(self, answer: bytes) -> bytes:
        """Check the client's proof and return the last message. Raises AuthError.

        May be called once: a second guess needs a new connection.
        """
        self._step = _advance(self._step, "accept", "done")
        proof, public = answer[:PROOF_BYTES], answer[PROOF_BYTES:]
        expected = _prove(self._claim.key, b"client", self._hello, self._challenge + public)
        is_whole = len(answer) == self.answer_nbytes
        if not hmac.compare_digest(proof, expected) or not is_whole:
            head = _ACCEPT_HEAD.pack(MAGIC, PROTOCOL_VERSION, Status.WRONG_TOKEN)
            self.refusal = head + bytes(self.answer_nbytes)
            raise AuthError(self._claim.unproven)
        self._last_key = self._claim.key
        if self._suite is not None:
            self._make_keys(self._suite, answer)
        self.refusal = self._last(Status.NO_PLACE, answer)
        return self._last(Status.OK, answer)

    def _make_keys(self, suite: tuple[Kind, bool], answer: bytes) -> None:
        exchange = _Exchange(suite, self._random_bytes)
        self._public = exchange.public
        messages = self._hello + self._challenge + answer + self._public
        other, own, self._last_key = exchange.keys(self._claim.key, answer[PROOF_BYTES:], messages)
        self.sealing = Sealing(*suite, own, other)

    def _last(self, status: Status, answer: bytes) -> bytes:
        head = _ACCEPT_HEAD.pack(MAGIC, PROTOCOL_VERSION, status) + self._public
        rest = self._challenge + answer + head
        return head + _prove(self._last_key, b"accept", self._hello, rest)

    def steps(self) -> Steps[bytes]:
        """Take all steps in their order; return the last message, still to be sent."""
        hello = yield b"", HELLO_BYTES
        while not (challenge := self.challenge(hello)):
            yield b"", 0
        answer = yield challenge, self.answer_nbytes
        return self.accept(answer)


def _prove(key: bytes, direction: bytes, hello: bytes, rest: bytes) -> bytes:
    """Return the proof of one direction.

    Sizes of all parts are fixed, or follow from earlier parts: joining them is unambiguous.
    """
    _check_kept(key)
    return hmac.digest(key, direction + hello + rest, hashlib.sha256)


def _check_kept(secret: bytes) -> None:
    """Raise AuthError for a secret that was overwritten: all know what it is now."""
    if secret and not any(secret):
        raise AuthError(
            "this secret was overwritten when its process was forked; connect in the process "
            "that called fastps.init()"
        )


def _challenge_refusal(status: Status, options: Option = Option.NONE) -> bytes:
    return _CHALLENGE.pack(MAGIC, PROTOCOL_VERSION, status, options, b"", b"")


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
