# SPDX-License-Identifier: Apache-2.0
"""The updates that workers have sent to this validator: complete, each once, in order of arrival.

Decides when a worker is not read: while QUEUED of its updates wait, and for good once it sends an
invalid message, is lost or has left. So a worker that floods blocks only itself. Threads:
fastps:inbox-N reads worker N, and takes the GIL only between messages; the owner calls take() and
close().
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastps.byzantine.judges import are_sound
from fastps.byzantine.update_codecs import Codes
from fastps.byzantine.updates import (
    HEADER_BYTES,
    RefusalStats,
    Update,
    UpdateAssembler,
    UpdateHeader,
    unpack,
)
from fastps.errors import FastPSError, MismatchError, StallError
from fastps.native.condition import Condition
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives.group import Group
    from fastps.session.session import Session

log = logging.getLogger(__name__)

QUEUED = 2  # updates of one worker that may wait; the next one is not read before
SLICE_S = 60.0  # how often a thread that waits for a silent worker checks for close()
LOST = "lost"


class UpdateQueue:
    """The updates of some workers, read from their links."""

    def __init__(
        self, session: Session, workers: Mapping[int, Codes], like: Sequence[Array],
        stats: RefusalStats, *, channel: int,
    ) -> None:  # fmt: skip
        """Connect to the workers, and start to read; blocks.

        workers: the codecs of each worker's blocks, by rank. like: arrays of the blocks' shapes
        and dtypes. channel: the tag of the workers' messages, by which queues share a link.
        """
        self.workers = tuple(workers)
        self.reading = set(workers)  # that may still send
        self.nbytes = 0  # of blocks that were received
        self._blocks = [(one.shape, one.dtype) for one in like]
        self._codes = dict(workers)
        self._stats = stats
        self._session = session
        self._channel = channel
        self._changed = Condition()
        self._updates: deque[Update] = deque()
        self._is_ending = False
        session.connections.reach(self.workers)
        for worker in self.workers:
            threading.Thread(
                target=self._read, args=(worker, session.groups.pair(worker)),
                name=f"fastps:inbox-{worker}", daemon=True,
            ).start()  # fmt: skip

    # ---- of the owner ----

    def take(self, timeout_s: float) -> Update | None:
        """Return the first update; None if none comes in time, or none can come any more."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._updates or not self.reading, max(deadline - time.monotonic(), 0)
            )
            return self._pop(self._updates[0]) if self._updates else None

    def take_round(
        self, number: int, timeout_s: float, *, silent: Container[int] = ()
    ) -> list[Update]:
        """Return all updates up to a round, once each worker has sent one or is gone, or in time.

        Updates of earlier rounds are late; a worker may have sent several. silent: workers that
        are not waited for, unless all are silent.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_round(number, silent), timeout_s)
            return [self._pop(one) for one in list(self._updates) if one.round <= number]

    def note(self, worker: int, reason: str = "") -> None:
        """Count the outcome of a whole update, and log what RefusalStats reports."""
        self.note_blocks(worker, [(reason, math.nan)])

    def note_blocks(self, worker: int, found: Sequence[tuple[str, float]]) -> None:
        """Count the outcomes of an update's blocks, and log what RefusalStats reports."""
        with self._changed:
            report = self._stats.note_blocks(worker, found)
        if report:
            log.warning("an update of worker %d %s", worker, report)

    def drop_late(self, number: int) -> list[Update]:
        """Remove and return the updates of later rounds."""
        with self._changed:
            return [self._pop(one) for one in list(self._updates) if one.round > number]

    def _has_round(self, number: int, silent: Container[int]) -> bool:
        there = {one.worker for one in self._updates if one.round >= number}
        awaited = {worker for worker in self.reading if worker not in silent}
        return (awaited or self.reading) <= there

    def _pop(self, update: Update) -> Update:
        self._updates.remove(update)
        self._changed.notify_all()
        return update

    def close(self) -> None:
        """Stop reading; the threads end with the session, which ends their waits."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    # ---- the threads that read ----

    def _read(self, worker: int, group: Group) -> None:
        assembly = UpdateAssembler(worker, self._codes[worker].sizes)
        try:
            while self._wait_for_room(worker) and self._read_block(assembly, group):
                pass
        except FastPSError as error:
            if worker in self._session.left:
                log.info("worker %d has left: its updates are no longer read", worker)
            elif not self._is_ending:
                log.warning("updates of worker %d are no longer read: %s", worker, error)
                self.note(worker, LOST)
        with self._changed:
            self.reading.discard(worker)
            self._changed.notify_all()

    def _wait_for_room(self, worker: int) -> bool:
        def has_room() -> bool:
            return sum(one.worker == worker for one in self._updates) < QUEUED

        with self._changed:
            self._changed.wait_for(lambda: has_room() or self._is_ending)
            return not self._is_ending

    def _read_block(self, assembly: UpdateAssembler, group: Group) -> bool:
        """Read a header and its block; return False after an invalid message."""
        header = self._read_header(group)
        step = assembly.take(header)
        if step.refused:
            self.note(assembly.worker, step.refused)
        if step.is_end or header is None:
            log.error(
                "updates of worker %d are no longer read: it has sent an invalid message",
                assembly.worker,
            )
            return False
        block = None if header.is_skipped else self._read_bytes(group, header)
        update = assembly.put(header, block) if step.is_taken else None
        if update is not None:
            update.is_sound = are_sound(update.blocks)
            with self._changed:
                self._updates.append(update)
                self._changed.notify_all()
        return True

    def _read_header(self, group: Group) -> UpdateHeader | None:
        data = np.empty(HEADER_BYTES, np.uint8)
        try:
            self._receive(group, data)
        except MismatchError:
            return None  # of another size or type
        return unpack(data.tobytes())

    def _read_bytes(self, group: Group, header: UpdateHeader) -> Array:
        shape, dtype = self._blocks[header.block]
        block, codes = np.empty(shape, dtype), self._codes[header.worker]
        if header.nbytes:
            buffer = codes.room(header.block, block)
            self._receive(group, buffer)
            codes.decode(header.block, buffer, block, header.round)
            self.nbytes += header.nbytes
        return block

    def _receive(self, group: Group, out: Array) -> None:
        """Receive a message, however long its sender is silent."""
        handle = group.receive(out, 1 - group.rank, tag=self._channel)
        while True:
            try:
                handle.wait(SLICE_S)
            except StallError:
                if self._is_ending:
                    raise
            else:
                return
