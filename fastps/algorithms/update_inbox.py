# SPDX-License-Identifier: Apache-2.0
"""What workers have sent to this validator: whole updates, each once, in the order they came.

Decides when a worker is read no further: while as many of its updates wait as there is room for,
and for good once it sends what cannot be understood, is lost or has left. So a worker that floods
holds up itself alone. Threads: fastps:inbox-N reads worker N, and takes the GIL only between
messages; take() and close() are the owner's.
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
    NOTICE_BYTES,
    RefusalStats,
    Update,
    UpdateAssembler,
    UpdateHeader,
    unpack,
)
from fastps.errors import FastPSError, MismatchError, StallError
from fastps.worker.handle import Array

if TYPE_CHECKING:
    from fastps.collectives.group import Group
    from fastps.session.session import Session

log = logging.getLogger(__name__)

ROOM = 2  # updates of one worker that wait; the next one is not read before
SLICE_S = 60.0  # how often a thread that waits for a silent worker looks up
LOST = "lost"


class UpdateQueue:
    """The updates of some workers, read from their links."""

    def __init__(
        self, session: Session, workers: Mapping[int, Codes], like: Sequence[Array],
        ledger: RefusalStats, *, channel: int,
    ) -> None:  # fmt: skip
        """Start to read; like: arrays as blocks shall be, read once. Makes the links; blocks.

        workers: by whom, how their blocks travel.
        channel: the tag of the workers' messages, by which several inboxes share a link.
        """
        self.workers = tuple(workers)
        self.reading = set(workers)  # those that may still send
        self.nbytes = 0  # of blocks that came
        self._blocks = [(one.shape, one.dtype) for one in like]
        self._codes = dict(workers)
        self._ledger = ledger
        self._session = session
        self._channel = channel
        self._news = threading.Condition()
        self._updates: deque[Update] = deque()
        self._is_ending = False
        session.connections.reach(self.workers)
        for worker in self.workers:
            threading.Thread(
                target=self._read, args=(worker, session.groups.pair(worker)),
                name=f"fastps:inbox-{worker}", daemon=True,
            ).start()  # fmt: skip

    # ---- the owner's ----

    def take(self, timeout_s: float) -> Update | None:
        """Return the update that came first; None: none came in time, or none can come now."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            self._news.wait_for(
                lambda: self._updates or not self.reading, max(deadline - time.monotonic(), 0)
            )
            return self._pop(self._updates[0]) if self._updates else None

    def take_round(
        self, number: int, timeout_s: float, *, silent: Container[int] = ()
    ) -> list[Update]:
        """Return all updates up to a round, once each worker has sent one or is gone, or in time.

        Those of earlier rounds are late; a worker may have sent several. silent: workers that are
        not waited for, as long as there is another one.
        """
        with self._news:
            self._news.wait_for(lambda: self._has_round(number, silent), timeout_s)
            return [self._pop(one) for one in list(self._updates) if one.round <= number]

    def note(self, worker: int, reason: str = "") -> None:
        """Count what became of an update as a whole, and log what is news."""
        self.note_blocks(worker, [(reason, math.nan)])

    def note_blocks(self, worker: int, found: Sequence[tuple[str, float]]) -> None:
        """Count what became of an update's blocks, and log what is news; as RefusalStats does."""
        with self._news:
            news = self._ledger.note_blocks(worker, found)
        if news:
            log.warning("an update of worker %d %s", worker, news)

    def drop_late(self, number: int) -> list[Update]:
        """Take out what is of later rounds than any that there will be now."""
        with self._news:
            return [self._pop(one) for one in list(self._updates) if one.round > number]

    def _has_round(self, number: int, silent: Container[int]) -> bool:
        there = {one.worker for one in self._updates if one.round >= number}
        awaited = {worker for worker in self.reading if worker not in silent}
        return (awaited or self.reading) <= there

    def _pop(self, update: Update) -> Update:
        self._updates.remove(update)
        self._news.notify_all()
        return update

    def close(self) -> None:
        """Read no more; the threads end with the session, which ends what they wait for."""
        with self._news:
            self._is_ending = True
            self._news.notify_all()

    # ---- the threads that read ----

    def _read(self, worker: int, group: Group) -> None:
        assembly = UpdateAssembler(worker, self._codes[worker].sizes)
        try:
            while self._wait_for_room(worker) and self._read_block(assembly, group):
                pass
        except FastPSError as error:
            if worker in self._session.left:
                log.info("worker %d has left: it is read no more", worker)
            elif not self._is_ending:
                log.warning("worker %d is read no more: %s", worker, error)
                self.note(worker, LOST)
        with self._news:
            self.reading.discard(worker)
            self._news.notify_all()

    def _wait_for_room(self, worker: int) -> bool:
        def has_room() -> bool:
            return sum(one.worker == worker for one in self._updates) < ROOM

        with self._news:
            self._news.wait_for(lambda: has_room() or self._is_ending)
            return not self._is_ending

    def _read_block(self, assembly: UpdateAssembler, group: Group) -> bool:
        """Read a notice and what belongs to it; False: nothing more can be understood."""
        notice = self._read_notice(group)
        step = assembly.take(notice)
        if step.refused:
            self.note(assembly.worker, step.refused)
        if step.is_end or notice is None:
            log.error(
                "worker %d is read no more: it does not speak as workers do", assembly.worker
            )
            return False
        block = None if notice.is_skipped else self._read_bytes(group, notice)
        update = assembly.put(notice, block) if step.is_taken else None
        if update is not None:
            update.is_sound = are_sound(update.blocks)
            with self._news:
                self._updates.append(update)
                self._news.notify_all()
        return True

    def _read_notice(self, group: Group) -> UpdateHeader | None:
        data = np.empty(NOTICE_BYTES, np.uint8)
        try:
            self._receive(group, data)
        except MismatchError:
            return None  # of another size or type
        return unpack(data.tobytes())

    def _read_bytes(self, group: Group, notice: UpdateHeader) -> Array:
        shape, dtype = self._blocks[notice.block]
        block, codes = np.empty(shape, dtype), self._codes[notice.worker]
        if notice.nbytes:
            room = codes.room(notice.block, block)
            self._receive(group, room)
            codes.decode(notice.block, room, block, notice.round)
            self.nbytes += notice.nbytes
        return block

    def _receive(self, group: Group, out: Array) -> None:
        """Wait for a message, however long its sender is silent."""
        flight = group.receive(out, 1 - group.rank, tag=self._channel)
        while True:
            try:
                flight.wait(SLICE_S)
            except StallError:
                if self._is_ending:
                    raise
            else:
                return
