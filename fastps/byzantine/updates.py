# SPDX-License-Identifier: Apache-2.0
"""Updates on their way from a worker to its validator: headers, and which updates are refused.

An update is the change of the model that a worker found in one round: blocks, one for each
tensor, in any order, some of which it may skip. A header goes before each block; of a skipped one
there is nothing else. Decides which updates are whole, in order and new; moves nothing and looks
at no number. Pure: an `UpdateAssembler` serves one worker, on one thread.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastps.byzantine.scores import Array

MAGIC = b"FPSU"
SKIPPED = 1  # the block's bytes do not follow
_HEADER = struct.Struct("<4sIQQIIQ")
HEADER_BYTES = _HEADER.size

# Reasons of refusals, besides those of rules.
LATE, REPLAYED, AHEAD, INCOMPLETE, DOUBLED = "late", "replayed", "ahead", "incomplete", "doubled"
STALE, MALFORMED, MISSING, PARTIAL = "stale", "malformed", "missing", "partial"


class UpdateHeader(NamedTuple):
    """The header of a block: its worker, round, and the change of the model it was based on.

    nbytes: bytes that follow; 0 for a skipped block.
    """

    worker: int
    round: int
    base: int
    block: int
    is_skipped: bool
    nbytes: int

    def pack(self) -> bytes:
        """Return it as it travels: HEADER_BYTES bytes, little-endian."""
        flags = SKIPPED if self.is_skipped else 0
        return _HEADER.pack(
            MAGIC, self.worker, self.round, self.base, self.block, flags, self.nbytes
        )


def unpack(data: bytes) -> UpdateHeader | None:
    """Return the header that pack() wrote; None if it is not one."""
    magic, worker, number, base, block, flags, nbytes = _HEADER.unpack(data)
    if magic != MAGIC or flags not in (0, SKIPPED) or (flags and nbytes):
        return None
    return UpdateHeader(worker, number, base, block, bool(flags), nbytes)


@dataclass
class Update:
    """One worker's update of one round, by block; None: the worker skipped it."""

    worker: int
    round: int
    base: int
    blocks: list[Array | None]
    is_sound: bool = True  # no block has NaN, infinity or a norm beyond float64

    @property
    def is_empty(self) -> bool:
        """Return whether all of it was skipped: the worker did not take part."""
        return all(block is None for block in self.blocks)


class Step(NamedTuple):
    """What follows from a header: whether put() takes the block, and why something is refused.

    is_end: nothing more of this worker can be understood.
    """

    is_taken: bool
    refused: str = ""
    is_end: bool = False


@dataclass
class UpdateAssembler:
    """What has arrived from one worker: whole updates of rising rounds, each once, never mixed.

    sizes: bytes of each block.
    """

    worker: int
    sizes: Sequence[int]
    done: int = 0  # the last round of which all has come
    _open: Update | None = None
    _seen: set[int] = field(default_factory=set)

    def take(self, header: UpdateHeader | None) -> Step:
        """Check a header before the block's bytes arrive."""
        if not self._is_understood(header):
            return Step(False, MALFORMED, is_end=True)
        assert header is not None
        if header.round <= self.done:
            return Step(False, REPLAYED)
        refused = ""
        if self._open is not None and header.round != self._open.round:
            if header.round < self._open.round:
                return Step(False, REPLAYED)
            refused = INCOMPLETE
            self._open = None
        if self._open is None:
            self._seen.clear()
            empty: list[Array | None] = [None] * len(self.sizes)
            self._open = Update(self.worker, header.round, header.base, empty)
        if header.block in self._seen or header.base != self._open.base:
            return Step(False, DOUBLED)
        self._seen.add(header.block)
        return Step(True, refused)

    def put(self, header: UpdateHeader, block: Array | None) -> Update | None:
        """Store a block, None for a skipped one; return the update if it was the last block."""
        found = self._open
        assert found is not None
        found.blocks[header.block] = block
        if len(self._seen) < len(self.sizes):
            return None
        self._open, self.done = None, found.round
        return found

    def _is_understood(self, header: UpdateHeader | None) -> bool:
        if header is None or header.worker != self.worker or header.round < 1:
            return False
        if header.block >= len(self.sizes):
            return False
        return header.is_skipped or header.nbytes == self.sizes[header.block]


@dataclass
class Scores:
    """What rules found of one worker."""

    total: float = 0.0
    count: int = 0
    last: float = math.nan

    def add(self, score: float) -> None:
        """Count a score if it is finite."""
        if math.isfinite(score):
            self.total, self.count, self.last = self.total + score, self.count + 1, score

    @property
    def mean(self) -> float:
        """The mean; NaN of none."""
        return self.total / self.count if self.count else math.nan


@dataclass
class RefusalStats:
    """How often updates of each worker were accepted or refused, why, and their scores."""

    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    scores: dict[int, Scores] = field(default_factory=dict)
    _last: dict[int, str] = field(default_factory=dict)
    _turns: Counter[tuple[int, str]] = field(default_factory=Counter)

    def note(self, worker: int, reason: str = "", score: float = math.nan) -> str:
        """Count an update that is judged as one block; see note_blocks()."""
        return self.note_blocks(worker, [(reason, score)])

    def note_blocks(self, worker: int, found: Sequence[tuple[str, float]]) -> str:
        """Count an update's blocks, each (reason of its refusal, or empty; score).

        Returns a message for the log where the reason differs from that of the worker's last
        update, else an empty text. Where it goes back and forth: only the first, tenth,
        hundredth time.
        """
        for reason, score in found:
            self.counts[worker, reason] += 1
            self.scores.setdefault(worker, Scores()).add(score)
        refused = Counter(reason for reason, _ in found if reason)
        now = refused.most_common(1)[0][0] if refused else ""
        before = self._last.get(worker, "")
        self._last[worker] = now
        if now == before:
            return ""
        self._turns[worker, now] += 1
        times = self._turns[worker, now]
        if str(times).strip("0") != "1":
            return ""
        what = f"is refused: {now}" if now else "is accepted again"
        return what if times == 1 else f"{what}; so it turned {times} times"

    def rate(self, worker: int) -> float:
        """Return the share of a worker's blocks that was accepted; 0 if there were none."""
        total = sum(count for (one, _), count in self.counts.items() if one == worker)
        return self.counts[worker, ""] / total if total else 0.0

    def statistics(self) -> dict[str, float]:
        """Return the counts by name: accepted_of_worker_1, refused_of_worker_1_late.

        accepted_share_of_worker_1, and, where a rule gave scores, score_of_worker_1, their mean,
        and last_score_of_worker_1.
        """
        found: dict[str, float] = {}
        for (worker, reason), count in sorted(self.counts.items()):
            words = reason.replace(" ", "_")
            what = (
                f"refused_of_worker_{worker}_{words}" if reason else f"accepted_of_worker_{worker}"
            )
            found[what] = count
        for worker in self._workers():
            found[f"accepted_share_of_worker_{worker}"] = self.rate(worker)
            scores = self.scores[worker]
            if scores.count:
                found[f"score_of_worker_{worker}"] = scores.mean
                found[f"last_score_of_worker_{worker}"] = scores.last
        return found

    def table(self) -> str:
        """Return the counts as text, a line for each worker."""
        return "\n".join(self._line(worker) for worker in self._workers())

    def _workers(self) -> list[int]:
        return sorted({worker for worker, _ in self.counts})

    def _line(self, worker: int) -> str:
        reasons = [
            f"{reason} {count}"
            for (one, reason), count in sorted(self.counts.items())
            if one == worker and reason
        ]
        line = f"worker {worker}: {self.rate(worker):6.1%} accepted"
        if self.scores[worker].count:
            line += f", score {self.scores[worker].mean:.3g}"
        return f"{line}; refused: {', '.join(reasons)}" if reasons else line
