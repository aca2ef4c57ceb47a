# SPDX-License-Identifier: Apache-2.0
"""Both ends of links for the tests in a guest: boards, mailboxes, peers that speak verbs."""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import time
from typing import Any, NamedTuple

from transport_nets import IN_ORDER, TIMEOUT_S, outcome, tcp_pair

from aids.boards import EchoBoard, PushBoard
from aids.faces import Buffer
from aids.mailbox import Mailbox
from aids.wire import FrameKind, Header, crc32c, pack_header
from fastps._core import BufferPool
from fastps.transport import rdma
from fastps.transport.rdma._transport import RdmaTransport
from fastps.transport.rdma.pyverbs import Completion, Device, Port

MIB = 1 << 20
GREETING = struct.Struct("<IHBBIIIII16s")  # Greeting of rdma/_transport.pxd, without its checksum
FRAME, ANNOUNCE, GRANT, CREDIT, WITHDRAW, HELLO, WITHDRAWN = range(1, 8)
IMM_ANNOUNCED = 1 << 31


def join(transport: RdmaTransport, a: Any, b: Any, *, other: RdmaTransport | None = None) -> None:
    """Link two owners, the second one over another transport if that is given."""
    near, far = tcp_pair()
    with near, far:
        openings = [
            transport.adopt(near.detach(), a, peer=0),
            (other or transport).adopt(far.detach(), b, peer=0, greets_first=False),
        ]
    for opening in openings:
        opening.wait(timeout_s=TIMEOUT_S)


def fill(array: memoryview, seed: int) -> bytes:
    """Write bytes of a seed into an array."""
    data = random.Random(seed).randbytes(len(array))
    array[:] = data
    return data


class Boards:
    """A push board and an echo board over one link, all memory pinned."""

    def __init__(self, transport: RdmaTransport, count: int, nbytes: int) -> None:
        self.transport, self.count = transport, count
        self.pool = BufferPool(on_slab=transport.register)
        self.memory = Buffer(self.pool, 2 * count * nbytes)
        self.echo = EchoBoard(count, nbytes, self.memory)
        self.push = PushBoard(count, nbytes)
        join(transport, self.push, self.echo)
        self.inputs = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(count)]
        self.outputs = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(count)]
        for array in (*self.inputs, *self.outputs):
            transport.hold(array)

    def round(self, seed: int) -> None:
        """Push every key once and check what came back."""
        given = [fill(array, seed * 100 + key) for key, array in enumerate(self.inputs)]
        for key in range(self.count):
            self.push.push(key, self.inputs[key], self.outputs[key])
        for key in range(self.count):
            self.push.wait(key, timeout_s=TIMEOUT_S)
            assert bytes(self.outputs[key]) == given[key]

    def close(self) -> None:
        """End the link in order and give the memory back."""
        self.push.end(IN_ORDER)
        assert self.push.wait_ended(timeout_s=TIMEOUT_S) == IN_ORDER
        assert self.echo.wait_ended(timeout_s=TIMEOUT_S) == IN_ORDER
        del self.echo
        self.transport.close(timeout_s=TIMEOUT_S)
        self.memory.give_back()
        self.pool.close()


def other_link(transport: RdmaTransport) -> tuple[Mailbox, Mailbox]:
    """Make a second link, which has to outlive the first."""
    a, b = Mailbox(), Mailbox()
    join(transport, a, b)
    return a, b


def still_works(a: Mailbox, b: Mailbox) -> None:
    """Send something over a link."""
    parcel = a.post(0, bytes(100000))
    assert len(b.receive(timeout_s=TIMEOUT_S)[2]) == 100000
    assert outcome(parcel) == "OK"


# ---- a peer that speaks verbs by itself ----


def frame_header(length: int, kind: FrameKind = FrameKind.PUSH, *, version: int = 0) -> bytes:
    """Make the header of one frame."""
    return pack_header(Header(kind=kind, key=0, key_version=version, length=length))


def open_handler(kind: type[Device] = Device) -> Device:
    """Open the guest's device by pyverbs."""
    found = rdma.probe()
    return kind(found.device, port=found.port, gid_index=found.gid_index)


def address_of(memory: Any) -> int:
    """Give the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def connect(
    port: Port,
    mtu: int,
    lid: int,
    queue_pair: int,
    gid: bytes,
    *,
    receive_from: int,
    send_from: int,
) -> None:
    """Take a queue pair to its peer, by what the peer told."""
    port.connect(
        mtu=mtu,
        lid=lid,
        gid=gid,
        queue_pair=queue_pair,
        receive_from=receive_from,
        send_from=send_from,
    )


class Grant(NamedTuple):
    """What GrantNote of rdma/_transport.pyx says."""

    place: int
    rkey: int
    is_standing: int
    places: tuple[int, int]
    rkeys: tuple[int, int]
    index: int


class RawPeer:
    """A mailbox, or another owner, behind the transport, and a queue pair that plays its peer."""

    def __init__(self, transport: RdmaTransport, owner: Any = None, peer: int = 0) -> None:
        self.box = owner or Mailbox(max_frame=MIB)
        near, self.sock = tcp_pair()
        self.sock.setblocking(True)
        self.sock.settimeout(TIMEOUT_S)
        with near:
            self.opening = transport.adopt(near.detach(), self.box, peer=peer)
        self.device = open_handler()
        self.device.has_windows = False  # what the link writes to us it writes by the region's key
        self.port = Port(self.device, 64, 64)
        self.memory = mmap.mmap(-1, 2 * MIB)
        self.view = memoryview(self.memory)
        address = address_of(self.memory)
        self.address = address
        self.region = self.device.pin(address, 2 * MIB, 3)
        for number in range(32):
            self.port.post_receive(number, address + number * 4096, 4096, self.region.lkey)
        self.work = 0

    def read(self, nbytes: int) -> bytes:
        """Read from the connection."""
        data = b""
        while len(data) < nbytes:
            piece = self.sock.recv(nbytes - len(data))
            assert piece, "the link ended early"
            data += piece
        return data

    def greet(self, *, join: bool = True, **wrong: int) -> None:
        """Exchange greetings, connect the queue pairs and, unless told not to, prove the link."""
        mtu, lid, number, gid = self.port.describe()
        number = wrong.get("queue_pair", number)
        mine = {"magic": 0x52535046, "version": 3, "receives": 32, "message_bytes": 4096} | wrong
        body = GREETING.pack(
            mine["magic"],
            mine["version"],
            mtu,
            0,
            lid,
            number,
            7,
            mine["receives"],
            mine["message_bytes"],
            gid,
        )
        self.sock.sendall(body + struct.pack("<I", crc32c(body)))
        theirs = self.read(GREETING.size + 4)
        _, _, mtu, _, lid, number, first, _, _, gid = GREETING.unpack(theirs[:-4])
        connect(self.port, mtu, lid, number, gid, receive_from=first, send_from=7)
        if wrong or not join:
            return
        self.sock.sendall(b"R")
        assert self.read(1) == b"R"
        self.send(HELLO, bytes(4080))
        assert self.receive()[0] == HELLO
        self.opening.wait(timeout_s=TIMEOUT_S)

    def send(
        self, kind: int, body: bytes = b"", *, credits: int = 0, index: int = 0, key: int = 0
    ) -> None:
        """Send one message."""
        message = struct.pack("<BBHIQ", kind, 0, credits, index, key) + body
        start = MIB + (self.work % 16) * 8192
        self.view[start : start + len(message)] = message
        self.port.post_send(
            self.work, 0, self.address + start, len(message), self.region.lkey, 0, 0, 0
        )
        self.work += 1

    def write(self, place: int, rkey: int, length: int, imm: int = -1) -> None:
        """Write, with an immediate number unless it is negative."""
        opcode = 1 if imm < 0 else 2
        start = self.address + MIB
        self.port.post_send(
            self.work, opcode, start, length, self.region.lkey, place, rkey, max(imm, 0)
        )
        self.work += 1

    def poll(self) -> Completion:
        """Wait for the next completion."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for done in self.port.poll(1):
                return done
        raise AssertionError("nothing is complete")

    def receive(self) -> bytes:
        """Wait for the next message of the link; empty for an immediate number."""
        while True:
            work, status, is_receive, has_imm, length, _ = self.poll()
            assert status == 0
            if is_receive:
                length = 0 if has_imm else length
                return bytes(self.view[work * 4096 : work * 4096 + length])

    def outcome(self) -> int:
        """Wait for the status of the request that was posted last."""
        while True:
            work, status, is_receive, *_ = self.poll()
            if status or (not is_receive and work == self.work - 1):
                return status

    def announce(self, nbytes: int) -> tuple[int, int]:
        """Announce a frame; give the place and the key that were granted."""
        grant = self.ask(frame_header(nbytes))
        return grant.place, grant.rkey

    def ask(self, header: bytes) -> Grant:
        """Announce a frame; give all that was granted, of which other messages may come first."""
        self.send(ANNOUNCE, header)
        message = self.receive()
        while message[:1] != bytes([GRANT]):
            message = self.receive()
        (index,) = struct.unpack_from("<I", message, 4)
        place, rkey, standing, *rest = struct.unpack_from("<QIIQQII", message, 16)
        return Grant(place, rkey, standing, (rest[0], rest[1]), (rest[2], rest[3]), index)

    def close(self) -> None:
        """Close everything in order."""
        self.sock.close()
        self.port.close()
        self.region.close()
        self.device.close()
