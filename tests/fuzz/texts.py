# SPDX-License-Identifier: Apache-2.0
"""Targets: handshakes, tokens, requests for the status, host files, settings, meetings."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence

from fastps.config import SETTINGS, load
from fastps.control.rendezvous import find
from fastps.launch.hosts import parse_hostfile, parse_hosts, place
from fastps.security.handshake import (
    CHALLENGE_BYTES,
    ClientHandshake,
    Purpose,
    ServerHandshake,
)
from fastps.security.handshake import HELLO_BYTES as HELLO
from fastps.security.tokens import Token, parse, sealed_keys, unseal_keys, whose
from fastps.telemetry.http_request import read_request
from fastps.telemetry.status import StatusService

from .target import Target

KEY = b"k" * 32
TOKEN = Token(b"a token of this job")


def zeros(nbytes: int) -> bytes:
    """Return what stands for random bytes: handshakes are then the same each time."""
    return bytes(nbytes)


def split_lines(data: bytes) -> list[bytes]:
    """Return lines and words, each with the separators behind it."""
    return re.findall(rb"[^\n, ]*[\n, ]*", data)[:-1]


class Handshake(Target):
    """Both sides: 0, hello and proof for a server, or 1, challenge and accept for a client."""

    name = "handshake"
    per_round = 15_000

    def seeds(self) -> Sequence[bytes]:
        client, server = self._client(), self._server()
        hello = client.hello()
        challenge = server.challenge(hello)
        proof = client.answer(challenge)
        return [b"\0" + hello + proof, b"\1" + challenge + server.accept(proof)]

    def run(self, data: bytes) -> None:
        if data[:1] == b"\0":
            server = self._server()
            server.challenge(data[1 : 1 + HELLO])
            try:
                server.accept(data[1 + HELLO :])
            finally:
                assert len(server.refusal) < HELLO + len(KEY)
            assert data[1:5] == b"FPSH"
            return
        client = self._client()
        client.hello()
        client.answer(data[1 : 1 + CHALLENGE_BYTES])
        client.finish(data[1 + CHALLENGE_BYTES :])
        assert data[1:] == self.seeds()[1][1:], "a server was believed that does not know the key"

    def split(self, data: bytes) -> list[bytes]:
        at = 1 + (HELLO if data[:1] == b"\0" else CHALLENGE_BYTES)
        return [data[:1], data[1:at], data[at:]]

    def _client(self) -> ClientHandshake:
        return ClientHandshake(KEY, purpose=Purpose.DATA, sender=1, lane=2, random_bytes=zeros)

    def _server(self) -> ServerHandshake:
        return ServerHandshake(KEY, random_bytes=zeros)


class Tokens(Target):
    """Tokens of files and variables, roles that a client claims, keys sealed for a member."""

    name = "tokens"
    per_round = 15_000

    def seeds(self) -> Sequence[bytes]:
        own = [TOKEN.own(role, rank).text().encode() for role in ("worker", "server")
               for rank in (0, 3)]  # fmt: skip
        sealed = sealed_keys(TOKEN, TOKEN.own("worker", 3), "job", me=3, machine=0, n=4)
        return [one + b"\0" + sealed for one in (TOKEN.secret, own[0], b"\n".join(own))]

    def run(self, data: bytes) -> None:
        secret, _, sealed = data.partition(b"\0")
        token = parse(secret, "worker", 3)
        whose(TOKEN, len(data) % 5 % 4, len(data))
        unseal_keys(token, "job", sealed).of(0)

    def split(self, data: bytes) -> list[bytes]:
        return re.findall(rb"[^:\n\0]*[:\n\0]?", data)[:-1]


class Http(Target):
    """A request as it comes over a socket, and its answer."""

    name = "http"
    per_round = 5000
    errors = (ValueError, ConnectionError)  # which http_request.py names

    def open(self) -> None:
        config = load({"status": False, "metrics_port": 0}, {})
        self.service = StatusService(
            config, role="worker", rank=0, slot=0, tell=lambda: {"steps": 1.0}, links=list
        )

    def close(self) -> None:
        self.service.close()

    def seeds(self) -> Sequence[bytes]:
        return [
            b"GET /status.json HTTP/1.1\r\nHost: localhost:1\r\n\r\n",
            b"GET /metrics HTTP/1.0\r\nHost: [::1]\r\nAuthorization: Bearer secret\r\n\r\n",
            b"POST / HTTP/1.1\r\nAccept: */*\r\nHost: 127.0.0.1\r\n\r\n",
        ]

    def run(self, data: bytes) -> None:
        near, far = socket.socketpair()
        with near, far:
            far.sendall(data)
            far.shutdown(socket.SHUT_WR)
            request = read_request(near, time.monotonic() + 10)
        status, _, body = self.service.answer(request, is_known=bool(len(data) % 2))
        assert status in (200, 401, 404, 421, 501)
        assert body

    def split(self, data: bytes) -> list[bytes]:
        return re.findall(rb"[^\n: ]*[\n: ]*", data)[:-1]


class Hosts(Target):
    """A list of hosts, or, behind a line end, a hostfile; then the layout of both."""

    name = "hosts"
    per_round = 20_000
    errors = (ValueError,)

    def seeds(self) -> Sequence[bytes]:
        lists = ["a:4,b:4,c:0+1", "a, b", "me@a.example:2+1+1,b:1", "[::1]:2,you@[fd00::1]:3",
                 "a,b,a"]  # fmt: skip
        files = ["a slots=4\nb slots=4 max_slots=8 # two\n", "a:4+1\nb:2\n", "a\na\nb\n"]
        return [*map(str.encode, lists), *("\n".join(["", one]).encode() for one in files)]

    def run(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")  # as from a command line
        hosts = parse_hostfile(text[1:], "f") if text[:1] == "\n" else parse_hosts(text)
        layout = place(hosts, None, None, None, total=None)
        assert len(layout.workers) <= len(hosts)

    def split(self, data: bytes) -> list[bytes]:
        return split_lines(data)


class Settings(Target):
    """Variables of the environment, NAME=VALUE and a zero byte each."""

    name = "settings"
    per_round = 1500

    def seeds(self) -> Sequence[bytes]:
        named = [f"{one.name}={one.default}" for one in SETTINGS
                 if isinstance(one.default, int | float | str) and one.default != ""]  # fmt: skip
        other = ["FASTPS_HOST=127.0.0.1", "FASTPS_RANK=1", "FASTPS_SIZE=2", "BYTEPS_LOCAL_RANK=0",
                 "DMLC_NUM_WORKER=4", "RANK=0", "WORLD_SIZE=2"]  # fmt: skip
        sets = [named[at : at + 12] for at in range(0, len(named), 12)]
        return [self.join([f"{one}\0".encode() for one in some]) for some in (*sets, other)]

    def run(self, data: bytes) -> None:
        pairs = (one.decode("utf-8", "surrogateescape").split("=", 1) for one in data.split(b"\0"))
        load({}, {one[0]: one[1] for one in pairs if len(one) == 2})

    def split(self, data: bytes) -> list[bytes]:
        return re.findall(rb"[^=\0]*[=\0]?", data)[:-1]


class Meeting(Target):
    """What rank 0 posts for the others, in a file or a store."""

    name = "meeting"
    per_round = 20_000
    tree = (json.loads, lambda value: json.dumps(value).encode())

    def open(self) -> None:
        self._config = load({}, environ={})

    def seeds(self) -> Sequence[bytes]:
        job = {"scheduler_host": "127.0.0.1", "scheduler_port": 7000, "token": "t", "program": "p"}
        return [json.dumps(job).encode()]

    def run(self, data: bytes) -> None:
        board = _Board(data.decode(errors="replace"))
        find(self._config, board, is_one_machine=False, program="p")


class _Board:
    def __init__(self, text: str) -> None:
        self._text = text

    def post(self, text: str) -> None:
        raise NotImplementedError

    def read(self, *, timeout_s: float) -> str:
        return self._text

    def clear(self) -> None:
        raise NotImplementedError
