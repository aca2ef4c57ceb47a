# SPDX-License-Identifier: Apache-2.0
"""Targets: frames of links, as a stream of bytes and as what owners of links are given.

An input is a byte that chooses the circumstances, then frames: a header and its payload each. The
fields magic, version and checksum matter for the stream alone, which makes a checksum of 0 right.
"""

from __future__ import annotations

import gc
import socket
import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import exchange_fleet
import numpy as np
import test_store
import test_store_coded
from test_store import CHUNK, Server
from transport_nets import IN_ORDER, OPEN, PEER_LOST, PROTOCOL, TIMEOUT_S, wait_until
from window_fleet import aligned

from aids import faces
from aids.mailbox import Mailbox
from aids.wire import (
    HEADER,
    HEADER_BYTES,
    HEADER_FIELDS,
    FrameFlag,
    FrameKind,
    Header,
    pack_header,
    unpack_header,
)
from fastps.collectives._exchange import Exchange, Program
from fastps.collectives.schedule import Kind, Place, Step
from fastps.contract.contract import ANY_STALENESS, Policy
from fastps.errors import ProtocolError, Status
from fastps.graph._windows import Window, Windows, window_bytes
from fastps.reduce import reduce_kernel
from fastps.transport.tcp._transport import TcpTransport
from fastps.types import DType, ReduceOp

from .target import Target

LENGTH_AT = 32  # in a header
POSTED = ("kind", "dtype", "flags", "key", "key_version", "sender", "priority", "offset", "status",
          "subject")  # fmt: skip
EAGER = 0x80
ENDS = {None, *((status, 1) for status in (Status.PROTOCOL, Status.PEER_LOST, Status.NOMEM))}


def frame(payload: bytes = b"", **fields: Any) -> bytes:
    """Return a frame whose checksum is 0."""
    header = Header(**{"kind": FrameKind.PUSH, "length": len(payload)} | fields)
    return pack_header(header)[:-4] + bytes(4) + payload


class Frames(Target):
    """A target that takes frames."""

    is_native = True

    @abstractmethod
    def frames(self) -> list[list[bytes]]:
        """Return valid inputs, without their first byte."""

    def seeds(self) -> Sequence[bytes]:
        return [self.join([b"\0", *frames]) for frames in self.frames()]

    def split(self, data: bytes) -> list[bytes]:
        items, at = [data[:1]], 1
        while at < len(data):
            end = at + HEADER_BYTES
            if end <= len(data):
                end += struct.unpack_from("<I", data, at + LENGTH_AT)[0]
            items.append(data[at:end])
            at = end
        return items

    def posts(self, data: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield payload and fields of each whole header, as a mailbox posts them."""
        for item in self.split(data)[1:]:
            if len(item) >= HEADER_BYTES:
                values = dict(zip(HEADER_FIELDS, HEADER.unpack(item[:HEADER_BYTES]), strict=True))
                yield item[HEADER_BYTES:], {name: values[name] for name in POSTED}


class TcpStream(Frames):
    """A stream of a socket, against the model of it in aids/wire.py.

    With bit 0 of the first byte, frames carry a checksum of their payloads.
    """

    name = "tcp"
    per_round = 1500
    most = 1 << 15  # bytes of a payload

    def open(self) -> None:
        self.transport = TcpTransport()

    def close(self) -> None:
        self.transport.close(timeout_s=TIMEOUT_S)

    def frames(self) -> list[list[bytes]]:
        some = [frame(bytes(range(n % 256)) * (n // 100), key=n, offset=n) for n in (0, 130, 255)]
        long = frame(b"long" * 5000, kind=FrameKind.MESSAGE, status=20_000, priority=-7)
        bye = frame(kind=FrameKind.BYE)
        return [some, [*some, bye], [long, *some, long, bye], [frame(b"x") for _ in range(50)]]

    def seeds(self) -> Sequence[bytes]:
        return [*super().seeds(), *(b"\1" + one[1:] for one in super().seeds())]

    def run(self, data: bytes) -> None:
        is_checked = bool(data[:1] and data[0] & 1)
        stream, wanted, is_broken = self._model(data, is_checked)
        box = Mailbox(max_frame=self.most)
        near, far = socket.socketpair()
        near.setblocking(False)
        self.transport.adopt(near.detach(), box, peer=0, is_checked=is_checked)
        with far:
            try:
                far.sendall(stream)
                far.shutdown(socket.SHUT_WR)
            except OSError:  # the link ended at what came before
                assert is_broken is not False
            status = box.wait_ended(0, timeout_s=TIMEOUT_S)
        found = []
        while box.has_letter():
            _, header, payload = box.receive(timeout_s=TIMEOUT_S)
            found.append((header["key"], header["offset"], bytes(payload)))
        assert found == wanted
        ends = {True: (PROTOCOL, PEER_LOST), False: (IN_ORDER, PEER_LOST)}
        assert status in ends.get(is_broken, (PROTOCOL, PEER_LOST, IN_ORDER))
        if status == PROTOCOL:
            raise ProtocolError("the link was ended")

    def _model(
        self, data: bytes, is_checked: bool
    ) -> tuple[bytes, list[tuple[int, int, bytes]], bool | None]:
        """Return the stream, what is delivered of it, and whether it breaks the protocol."""
        stream, wanted, is_broken = b"", [], False
        for number, item in enumerate(self.split(data)[1:]):
            head, payload = item[:HEADER_BYTES], item[HEADER_BYTES:]
            if len(head) == HEADER_BYTES and head[-4:] == bytes(4):
                head = head[:-4] + struct.pack("<I", faces.crc32c(head[:-4]))
            check = b""
            if is_checked and len(head) == HEADER_BYTES:
                checksum = struct.unpack("<I", head[-4:])[0]
                check = struct.pack("<I", faces.crc32c(payload) ^ checksum ^ number)
            stream += head + check + payload
            if is_broken or len(head) < HEADER_BYTES:
                continue
            try:
                header = unpack_header(head)
            except ProtocolError:
                is_broken = True
                continue
            is_bye = header.kind == FrameKind.BYE
            is_broken = header.length > self.most and not is_bye
            if is_bye and header.length:
                return stream, wanted, None  # its payload is taken for headers
            if not is_broken and not is_bye and len(payload) == header.length:
                wanted.append((header.key, header.offset, payload))
        return stream, wanted, is_broken


class StoreFrames(Frames):
    """Frames of worker 0 for the keys of a server; worker 1 keeps to the rules, and stays."""

    name = "store"
    per_round = 150

    def frames(self) -> list[list[bytes]]:
        whole = [frame(bytes(CHUNK), dtype=DType.FLOAT32, key_version=1, offset=at * CHUNK)
                 for at in range(3)]  # fmt: skip
        others = []
        for key in (1, 2, 3):
            one = {"dtype": DType.FLOAT32, "key": key << 16, "key_version": 1}
            others.append([frame(bytes(CHUNK), **one), frame(kind=FrameKind.PULL, **one)])
        plain = [frame(bytes(CHUNK), dtype=DType.FLOAT32, key=test_store_coded.KEY, key_version=1,
                       offset=at * CHUNK) for at in range(3)]  # fmt: skip
        pull = frame(kind=FrameKind.PULL, dtype=DType.FLOAT32, key_version=1)
        again = frame(bytes(CHUNK), dtype=DType.FLOAT32, key_version=2, flags=FrameFlag.AVERAGE)
        return [whole, [pull, again], plain, [*whole, again], *(one[:1] for one in others),
                [one[1] for one in others[:2]]]  # fmt: skip

    def run(self, data: bytes) -> None:
        server = Server(2, engine_threads=data[0] & 1 if data else 0)
        try:
            server.declare(1, CHUNK)
            server.declare(2, CHUNK, policy=Policy.ACCUMULATE, staleness=ANY_STALENESS)
            server.declare(3, CHUNK, policy=Policy.ACCEPTED)
            server.declare(4, 0)
            if data[:1] < b"\x80":
                test_store_coded.declare(server, "onebit")
            else:
                test_store_coded.follow(server)
            server.push(1, test_store.values_of(1))
            server.post(1, bytes(CHUNK), key=2 << 16)
            for payload, fields in self.posts(data):
                server.boxes[0].post(0, payload, **fields).wait(timeout_s=TIMEOUT_S)
        finally:
            status = server.boxes[1].ended(0)
            server.close()
        assert status == OPEN


class ExchangeFrames(Frames):
    """Frames of member 1 for operations of member 0, and for a window of it, stepped by hand."""

    name = "exchange"
    per_round = 400
    channel, window = 77, 7
    runs = 0
    nbytes = (64, 40_000)  # of messages that member 0 waits for

    def frames(self) -> list[list[bytes]]:
        def of(kind: FrameKind, nbytes: int, *, number: int = 1, **more: Any) -> bytes:
            payload = bytes(nbytes) if kind is FrameKind.MESSAGE else b""
            fields = {"key": self.channel, "key_version": number, "sender": 1, "status": nbytes}
            return frame(payload, kind=kind, **fields | more)

        small = of(FrameKind.MESSAGE, 64, flags=EAGER)
        large = of(FrameKind.MESSAGE, 40_000, number=2)
        unasked = of(FrameKind.MESSAGE, 100, number=9, flags=EAGER)
        ready = of(FrameKind.READY, 50_000, number=3)
        rest = [of(FrameKind.OFFER, 40_000, number=2), of(FrameKind.CREDIT, 0),
                of(FrameKind.REFUSE, 0, number=5, status=-5)]  # fmt: skip
        return [[small, large], [ready, unasked], rest, [small, *rest]]

    def run(self, data: bytes) -> None:
        box = Mailbox(adopts=bool(data[:1] and data[0] & 1))
        fleet = exchange_fleet.Fleet(2, strangers={1: box})
        exchange = fleet.exchanges[0]
        home = Windows(exchange)
        own, room = np.ones(64, np.float32), aligned(window_bytes(256, 1))
        window = Window(
            home, "w", self.window, own.view(np.uint8), room, (1,), itemsize=4,
            dtype=int(DType.FLOAT32), sum=reduce_kernel(ReduceOp.SUM, DType.FLOAT32),
            mix=reduce_kernel(ReduceOp.MIX, DType.FLOAT32), zero_init=True,
        )  # fmt: skip
        window.connect([(1, 0)], [], {}, keep=(own, room))
        try:
            kept = [self._begin(exchange, window, data[0] // 2 if data else 0), fleet]
            wait_until(lambda: fleet.settle(range(2)) or box.has_letter(), "the first frame")
            for payload, fields in self.posts(data):
                box.post(0, payload, **fields)
                fleet.settle(range(2))
            assert exchange.failure in ENDS
            assert kept
            if exchange.failure is not None:
                raise ProtocolError("the link to member 1 was ended")
        finally:
            exchange.leave()
            fleet.close()
            exchange.dismiss()
            assert home.stop(timeout_s=TIMEOUT_S)
            self.runs += 1
            if self.runs % 20 == 0:
                gc.collect()  # actions that did not end are in cycles with their window
        assert (own == 1).all(), "frames of another member changed the user's array"

    def _begin(self, exchange: Exchange, window: Window, which: int) -> Any:
        """Start what frames may be for, and return what has to live as long."""
        outs = [np.zeros(nbytes, np.uint8) for nbytes in self.nbytes]
        large = np.zeros(50_000, np.uint8)
        started = [
            exchange.start(_program(Kind.RECEIVE, len(out)), self.channel, name="in", output=out)
            for out in outs
        ]
        started.append(
            exchange.start(
                _program(Kind.SEND, large.nbytes), self.channel, name="out", input=large
            )
        )
        return outs, large, started


def _program(kind: Kind, nbytes: int) -> Program:
    place = Place.INPUT if kind is Kind.SEND else Place.OUTPUT
    return Program((Step(kind, 1, 0, place, 0, nbytes),), 0, range(2))


class WindowFrames(ExchangeFrames):
    """The same with frames of windows, while a put, a get or a lock is under way."""

    name = "windows"
    per_round = 150

    def frames(self) -> list[list[bytes]]:
        def of(what: int, payload: bytes = b"", *, number: int = 1, **more: Any) -> bytes:
            fields = {"kind": FrameKind.WINDOW, "flags": what, "key": self.window, "sender": 1,
                      "key_version": number, "dtype": DType.FLOAT32 if payload else 0}  # fmt: skip
            return frame(payload, **fields | more)

        put, add, get, got, ack, lock, grant, unlock = range(1, 9)
        halves = [of(put, bytes(128), number=3), of(put, bytes(128), number=3, offset=128)]
        of_one = of(get, number=4, status=0, subject=0x3FF00000)  # times 1.0
        return [[of(ack), of(put, bytes(256)), of(add, bytes(256), number=2)],
                [of(got, bytes(128)), of(got, bytes(128), offset=128), *halves],
                [of(grant), of_one, of(lock, number=6), of(unlock, number=6)]]  # fmt: skip

    def seeds(self) -> Sequence[bytes]:
        return [self.join([bytes([2 * which]), *some]) for which, some in enumerate(self.frames())]

    def _begin(self, exchange: Exchange, window: Window, which: int) -> Any:
        given = np.ones(64, np.float32)
        begin = (lambda: window.put(given, {1: 0.5}, is_inline=True),
                 lambda: window.get({1: 2.0}, is_inline=True),
                 lambda: window.lock([1]))[which % 3]  # fmt: skip
        return given, begin()
