# SPDX-License-Identifier: Apache-2.0
"""A queue pair with a router beside it, for tests of rdma_cm; as a program: the other process."""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import json
import mmap
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

from fastps.transport.rdma_cm import Route, Router, Way, index_of, name_of
from fastps.transport.rdma_pyverbs import OPCODE_SEND, Device, Port

DEVICE = "rxe0"
FIRST, SECOND = "10.9.0.1", "10.9.0.2"
WAIT_S = 60.0  # the guest is slow
BYTES = 64  # of a message
RECEIVES = 8

Found = tuple[Route | None, str]


def gid_of(address: str) -> bytes:
    """Give the GID of an IPv4 address."""
    return ipaddress.IPv6Address(f"::ffff:{address}").packed


def open_router(address: str, *, timeout_s: float = WAIT_S, **options: Any) -> Router:
    """Open a router at an address of the guest's device."""
    gid = ipaddress.IPv6Address(gid_of(address)).exploded
    return Router(gid, device=DEVICE, timeout_s=timeout_s, **options)


class Seeker:
    """Somebody who looks for a route to a queue pair, which need not exist; known by a secret."""

    numbers = itertools.count(0x1000)

    def __init__(self, address: str) -> None:
        self.gid = gid_of(address)
        self.queue_pair = next(self.numbers)
        self.secret = os.urandom(8)
        self.found: queue.Queue[Found] = queue.Queue()

    def tell(self, router: Router) -> dict[str, Any]:
        """Give what the peer has to know."""
        return {
            "peer_queue_pair": self.queue_pair,
            "peer_secret": self.secret,
            "peer_gid": self.gid,
            "peer_port": router.port,
        }

    def find(self, router: Router, *, is_active: bool, **peer: Any) -> Way:
        """Look for the way to a peer; take_route() tells what came of it."""
        return router.find(
            lambda route, why: self.found.put((route, why)),
            is_active=is_active,
            own_queue_pair=self.queue_pair,
            own_secret=self.secret,
            **peer,
        )

    def take_route(self) -> Found:
        """Wait until the search is over."""
        found = self.found.get(timeout=WAIT_S + 5)
        assert self.found.empty()
        return found

    def close(self) -> None:
        """Close what there is."""


class End(Seeker):
    """One queue pair that can receive."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.device = Device(DEVICE, port=1, gid_index=index_of(self.gid, DEVICE))
        self.port = Port(self.device, RECEIVES, RECEIVES)
        self.memory = mmap.mmap(-1, 4096)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.region = self.device.pin(self.address, 4096, 1)
        for number in range(1, RECEIVES):
            place = self.address + number * BYTES
            self.port.post_receive(number, place, BYTES, self.region.lkey)
        self.queue_pair = self.port.describe()[2]

    def join(self) -> Route:
        """Join the queue pair as the router says."""
        route, why = self.take_route()
        assert route is not None, why
        assert why == ""
        self.port.connect(**route._asdict())
        return route

    def send(self, data: bytes) -> None:
        """Send a message to the peer."""
        self.memory[: len(data)] = data
        self.port.post_send(99, OPCODE_SEND, self.address, len(data), self.region.lkey, 0, 0, 0)

    def receive(self) -> bytes:
        """Wait for a message of the peer."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for work, status, is_receive, _, length, _ in self.port.poll(1):
                assert status == 0, status
                if is_receive:
                    return self.memory[work * BYTES : work * BYTES + length]
        raise AssertionError("no message came")

    def close(self) -> None:
        """Close everything in order."""
        self.port.close()
        self.region.close()
        self.device.close()


def pack(peer: dict[str, Any]) -> str:
    """Write what a peer has to know as a line."""
    return json.dumps({k: v.hex() if isinstance(v, bytes) else v for k, v in peer.items()})


def unpack(line: str) -> dict[str, Any]:
    """Read what pack() wrote."""
    return {k: bytes.fromhex(v) if isinstance(v, str) else v for k, v in json.loads(line).items()}


def main() -> None:
    """Be called by the process that started this one, and answer each message."""
    end, router = End(SECOND), open_router(SECOND)
    print(pack(end.tell(router)), flush=True)
    way = end.find(router, is_active=False, **unpack(sys.stdin.readline()))
    route = end.join()
    print("joined with", name_of(route.gid), flush=True)
    end.send(b"you said " + end.receive())
    sys.stdin.readline()  # until the other end has read it
    end.close()
    router.forget(way)
    router.close(timeout_s=WAIT_S)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
