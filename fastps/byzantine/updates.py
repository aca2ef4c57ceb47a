# SPDX-License-Identifier: Apache-2.0
"""Updates on their way from a worker to its validator: what says what they are, and what is wrong.

An update is what a worker's model is to change by in one round: blocks, one for each tensor, in
any order, some of which it may skip. Before each block goes a notice; a skipped one has nothing
else. Decides which updates are whole, in order and new; moves nothing, looks at no number. Pure:
an `UpdateAssembler` is of one worker, and one thread's.
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
_NOTICE = struct.Struct("<4sIQQIIQ")
NOTICE_BYTES = _NOTICE.size

# Why updates are refused, beside what rules say of them.
LATE, REPLAYED, AHEAD, INCOMPLETE, DOUBLED = "late", "replayed", "ahead", "incomplete", "doubled"
STALE, MALFORMED, MISSING, PARTIAL = "stale", "malformed", "missing", "partial"


class UpdateHeader(NamedTuple):
    """What a worker says of a block: who it is, the round, the change of the model it began from.

    nbytes: what follows; 0 of a block that is skipped.
    """

    worker: int
    round: int
    base: int
    block: int
    is_skipped: bool
    nbytes: int

    def pack(self) -> bytes:
        """Write it as it travels: NOTICE_BYTES bytes, little-endian."""
        flags = SKIPPED if self.is_skipped else 0
        return _NOTICE.pack(
            MAGIC, self.worker, self.round, self.base, self.block, flags, self.nbytes
        )


def unpack(data: bytes) -> UpdateHeader | None:
    """Read what pack() wrote; None: it is nothing of that kind."""
    magic, worker, number, base, block, flags, nbytes = _NOTICE.unpack(data)
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
    """What follows from a notice: whether put() takes the block, and what is refused, if any.

    An end means that nothing of this worker can be understood any more.
    """

    is_taken: bool
    refused: str = ""
    is_end: bool = False


@dataclass
class UpdateAssembler:
    """What has come of one worker: whole updates in rising rounds, each once, never mixed.

    sizes: bytes of each block.
    """

    worker: int
    sizes: Sequence[int]
    done: int = 0  # the last round of which all has come
    _open: Update | None = None
    _seen: set[int] = field(default_factory=set)

    def take(self, notice: UpdateHeader | None) -> Step:
        """Judge a notice, before the block's bytes come."""
        if not self._is_understood(notice):
            return Step(False, MALFORMED, is_end=True)
        assert notice is not None
        if notice.round <= self.done:
            return Step(False, REPLAYED)
        refused = ""
        if self._open is not None and notice.round != self._open.round:
            if notice.round < self._open.round:
                return Step(False, REPLAYED)
            refused = INCOMPLETE
            self._open = None
        if self._open is None:
            self._seen.clear()
            empty: list[Array | None] = [None] * len(self.sizes)
            self._open = Update(self.worker, notice.round, notice.base, empty)
        if notice.block in self._seen or notice.base != self._open.base:
            return Step(False, DOUBLED)
        self._seen.add(notice.block)
        return Step(True, refused)

    def put(self, notice: UpdateHeader, block: Array | None) -> Update | None:
        """Take a block, or None where it is skipped; give the update if it was the last."""
        found = self._open
        assert found is not None
        found.blocks[notice.block] = block
        if len(self._seen) < len(self.sizes):
            return None
        self._open, self.done = None, found.round
        return found

    def _is_understood(self, notice: UpdateHeader | None) -> bool:
        if notice is None or notice.worker != self.worker or notice.round < 1:
            return False
        if notice.block >= len(self.sizes):
            return False
        return notice.is_skipped or notice.nbytes == self.sizes[notice.block]


@dataclass
class Scores:
    """What rules found of one worker."""

    total: float = 0.0
    count: int = 0
    last: float = math.nan

    def add(self, score: float) -> None:
        """Take one more; what is no finite number is none."""
        if math.isfinite(score):
            self.total, self.count, self.last = self.total + score, self.count + 1, score

    @property
    def mean(self) -> float:
        """The mean; NaN of none."""
        return self.total / self.count if self.count else math.nan


@dataclass
class RefusalStats:
    """Who was accepted and who refused, how often and why, and what rules found."""

    counts: Counter[tuple[int, str]] = field(default_factory=Counter)
    scores: dict[int, Scores] = field(default_factory=dict)
    _last: dict[int, str] = field(default_factory=dict)
    _turns: Counter[tuple[int, str]] = field(default_factory=Counter)

    def note(self, worker: int, reason: str = "", score: float = math.nan) -> str:
        """Count an update that is judged as one; as note_blocks()."""
        return self.note_blocks(worker, [(reason, score)])

    def note_blocks(self, worker: int, found: Sequence[tuple[str, float]]) -> str:
        """Count an update's blocks by (why it is refused, or empty; score); give what is news.

        News is that a worker's updates are refused for another reason than the last one was, or
        are accepted again; of one that goes back and forth the first, tenth, hundredth time.
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
        """Return the share of a worker's that was accepted; 0 of none."""
        total = sum(count for (who, _), count in self.counts.items() if who == worker)
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
            for (who, reason), count in sorted(self.counts.items())
            if who == worker and reason
        ]
        line = f"worker {worker}: {self.rate(worker):6.1%} accepted"
        if self.scores[worker].count:
            line += f", score {self.scores[worker].mean:.3g}"
        return f"{line}; refused: {', '.join(reasons)}" if reasons else line
