# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one process, over pipes that are stepped by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as Owners

from fastps.collectives._exchange import Exchange
from fastps.transport import shm
from fastps.transport._link import LinkOwner, Mapping
from fastps.transport.pipe._transport import PipeTransport, pipe_memory_bytes
from fastps.worker._engine import WorkerEngine

OFFSET = 4096


class Fleet:
    """n members, all linked; frames move when somebody steps.

    strangers: owners of links that stand in the place of the exchanges of members.
    """

    def __init__(
        self, n: int, *, goes_on: bool = False, strangers: Owners[int, LinkOwner] | None = None
    ) -> None:
        descriptor = shm.create_memory(OFFSET + pipe_memory_bytes(n))
        memory = Mapping(descriptor, OFFSET + pipe_memory_bytes(n))
        os.close(descriptor)
        self.arenas = [shm.Arena(1 << 20) for _ in range(n)]
        mappings = [arena.mapping for arena in self.arenas]
        self.pipes = [PipeTransport(memory, OFFSET, mappings, index) for index in range(n)]
        self.exchanges = [
            Exchange(me=me, n_members=n, engine=WorkerEngine(me=me, n_members=n), goes_on=goes_on)
            for me in range(n)
        ]
        for me, pipes in enumerate(self.pipes):
            owner = (strangers or {}).get(me, self.exchanges[me])
            for other in set(range(n)) - {me}:
                pipes.adopt(other, owner, other)

    def settle(self, members: Iterable[int]) -> None:
        """Step until nobody has anything to do."""
        some = list(members)
        while sum(self.pipes[member].step() for member in some):
            pass

    def close(self) -> None:
        """End all links, and free their memory."""
        for pipes in self.pipes:
            pipes.abort()
        self.settle(range(len(self.pipes)))
        for arena in self.arenas:
            arena.close()
