# SPDX-License-Identifier: Apache-2.0
"""Bring the ranks of one machine together: their memory, then the stages that work in it.

Decides how much is shared; the memory itself is in transport/shm.py, the work in
_local*.pxi. Called once per session, on its thread; blocks until all ranks of the machine came.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence

from fastps._core import CopyPool, HugePages, may_gather
from fastps.config import Config
from fastps.config.cpu_list import parse_cpu_list
from fastps.errors import TransportError
from fastps.transport import shm
from fastps.transport._link import Block, LinkOwner, Mapping
from fastps.transport.pipe.ptrace import choose_root, list_ancestors
from fastps.transport.traffic import Traffic, traffic
from fastps.worker._board import Board, board_bytes
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import LocalStages, control_bytes, stage_area_bytes

log = logging.getLogger(__name__)

STAGE_BYTES = 256 << 10  # of a staged chunk: it stays in a core's second-level cache
MAX_COPIERS = 4  # threads of a worker that copy or sum at once: more are hardly faster


def count_cores(config: Config, n_ranks: int) -> int:
    """Count the cores that each worker of this machine has for itself."""
    return len(parse_cpu_list(config.cpus) or os.sched_getaffinity(0)) // n_ranks


def count_copy_threads(config: Config, n_ranks: int) -> int:
    """Count the threads that help a worker with long copies."""
    threads = config.copy_threads
    if threads < 0:
        threads = min(MAX_COPIERS, count_cores(config, n_ranks))
    return max(threads - 1, 0)


def _board_at(n: int) -> int:
    """Return where the board of n ranks begins in their control memory."""
    return -(-control_bytes(n) // shm.LINE_BYTES) * shm.LINE_BYTES


class LocalGroup:
    """One rank's share in the memory of its machine.

    ranks: the workers of this machine, in order. key: a secret of this job and generation.
    engine: whose plan gets the stages. exchange: owner of links to the other ranks.
    has_board: whether all workers of the job are here, and commit results by a board.
    Raises TransportError, TransportTimeout.
    """

    def __init__(
        self,
        config: Config,
        *,
        ranks: Sequence[int],
        rank: int,
        n_workers: int,
        key: bytes,
        engine: WorkerEngine,
        exchange: LinkOwner,
        has_board: bool = False,
    ) -> None:
        """Exchange memory with the other ranks; blocks up to start_timeout_s."""
        index = list(ranks).index(rank)
        deadline = time.monotonic() + config.start_timeout_s
        try:
            self.arena = shm.Arena(config.shared_memory_bytes)
            self._stage: Block | None
            self._stage, offset = self.arena.allocate(stage_area_bytes(STAGE_BYTES))
            controls, arenas = self._exchange(ranks, rank, key, deadline, has_board=has_board)
        except (OSError, MemoryError) as error:
            raise TransportError(
                f"cannot share memory with the workers of this machine: {error}; to use "
                "sockets instead, set FASTPS_SHARED_MEMORY=0"
            ) from error
        assert offset == 0, "the stage is the first block"
        arenas[index] = self.arena.mapping
        self.arenas = dict(zip(ranks, arenas, strict=True))
        self._engine = engine
        self.board = (
            Board(controls[0], _board_at(len(ranks)), n=len(ranks), index=index)
            if has_board
            else None
        )
        stages = LocalStages(
            ranks=ranks,
            index=index,
            control=controls[0],
            arenas=arenas,
            arena=self.arena,
            stage_bytes=STAGE_BYTES,
            n_workers=n_workers,
            has_room=count_cores(config, len(ranks)) > 1,
        )
        for place, peer in enumerate(ranks):
            if peer != rank:
                stages.pipes.adopt(place, exchange, peer)
        if config.peer_memory:
            root = choose_root(config.launcher_pid, list_ancestors())
            stages.pipes.show_memory(secrets.randbits(62) | 1, root)
        ours = self.arena.mapping
        can_gather = config.peer_memory and may_gather()
        self.pages = HugePages(ours.address, ours.nbytes) if can_gather else None
        self._pipes = stages.pipes
        self._copy_pool = CopyPool(count_copy_threads(config, len(ranks)))
        engine.share(stages)

    def statistics(self) -> dict[str, int]:
        """Return bytes of shared memory and pipes, and numbers of pipes, as a dict."""
        piped = self._pipes.statistics()
        return {
            "shared_memory_bytes": self.arena.used_bytes,
            "pipes": piped["links"],
            "pipe_bytes": piped["bytes_sent"],
            "peer_memory": piped["readable"],
        }

    def traffic(self) -> Iterator[Traffic]:
        """Return each pipe that carried something."""
        return (one for one in traffic(self._pipes, "pipe") if one.sent or one.received)

    def close(self, *, timeout_s: float) -> None:
        """End the group's thread; arrays in its memory live on. Blocks to timeout_s.

        The last to end: what landed on links was still to be shared.
        """
        is_closed = self._engine.close_memory(timeout_s=timeout_s)
        if not self._copy_pool.close(timeout_s) or not is_closed:
            log.warning("the threads of shared memory did not end within %g s", timeout_s)
        else:
            self._pipes.release()  # memory is not to wait for the collector
        self._stage = None
        self.arena.close()

    def _exchange(
        self, ranks: Sequence[int], rank: int, key: bytes, deadline: float, *, has_board: bool
    ) -> tuple[list[Mapping], list[Mapping]]:
        """Return all ranks' control memories (the first counts) and arenas, mapped."""
        n = len(ranks)
        nbytes = _board_at(n) + board_bytes(n) if has_board else control_bytes(n)
        control = shm.create_memory(nbytes)
        try:
            everybodys = shm.exchange(
                (control, self.arena.descriptor), ranks=ranks, rank=rank, key=key,
                deadline=deadline,
            )  # fmt: skip
        finally:
            os.close(control)
        try:
            controls = [Mapping(everybodys[0][0], nbytes)]
            arenas = [Mapping(two[1], os.fstat(two[1]).st_size) for two in everybodys]
        finally:
            for two in everybodys:
                for descriptor in two:
                    os.close(descriptor)
        return controls, arenas
