# SPDX-License-Identifier: Apache-2.0
"""The traffic of each link of a process: peer, kind of link and bytes. Pure."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

_WAYS = {int(socket.AF_UNIX): "Unix", -1: "memory"}


class Traffic(NamedTuple):
    """The links of one kind to one member, added up; bytes since they were made."""

    peer: int
    way: str  # RDMA, TCP, Unix, memory, or pipe: frames in shared memory
    sent: int
    received: int


class HasLinks(Protocol):
    """A transport."""

    def each(self) -> list[tuple[int, int, int, int, int]]:
        """List (peer, family, bytes sent, bytes received, credit) of every link."""


def traffic(transport: HasLinks | None, way: str = "") -> Iterator[Traffic]:
    """Yield the links of a transport; way: their kind, where the socket's family does not tell."""
    for peer, family, sent, received, _ in () if transport is None else transport.each():
        yield Traffic(peer, way or _WAYS.get(family, "TCP"), sent, received)


def together(found: Iterable[Traffic]) -> list[Traffic]:
    """Add up links of the same kind to the same member, in the order of members."""
    sums: dict[tuple[int, str], tuple[int, int]] = {}
    for peer, way, sent, received in found:
        before = sums.get((peer, way), (0, 0))
        sums[peer, way] = before[0] + sent, before[1] + received
    return [Traffic(peer, way, *sums[peer, way]) for peer, way in sorted(sums)]
