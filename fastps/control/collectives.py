# SPDX-License-Identifier: Apache-2.0
"""Barriers, blobs, disputes, boundaries, and names to forget: meetings of all workers, by name.

Decides when a meeting is complete, and which error each worker gets when it cannot be. Pure: time
is an argument, answers are returned as (peer, message) pairs. Knows nothing of connections.
Invariant: each entry is answered exactly once, or its worker was removed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fastps.control.blame import join_names
from fastps.control.protocol import (
    MAX_BLOB_BYTES,
    Blob,
    BlobData,
    Dispute,
    Done,
    Failed,
    Forget,
    Meeting,
    Regroup,
    ToMember,
    Waiting,
)
from fastps.control.stall_inquiry import LEAST_S, Stalls

Answers: TypeAlias = list[tuple[int, ToMember]]
Key: TypeAlias = tuple[str, str, int]  # kind, name, and the number among barriers of a name

# What one worker has in meetings at once; more is a runaway program, or a liar.
MAX_HELD_BYTES = 4 * MAX_BLOB_BYTES  # objects that wait for the others, and names to forget
MAX_MEETINGS = 4096
NAME_BYTES = 64  # that a name to forget takes beside its text
MAX_BARRIERS = 64  # of one name in which a worker waits at once


def workers_text(ranks: list[int]) -> str:
    """Return the names of workers, such as "worker 0, worker 2"."""
    return join_names([f"worker {rank}" for rank in ranks])


@dataclass(frozen=True)
class Entry:
    """A worker that waits in a meeting."""

    peer: int
    asked: Meeting
    deadline: float


Complete: TypeAlias = Callable[[Mapping[int, Entry]], Answers]


class Forgetter(Protocol):
    """What forgets tensors once all workers have asked for it."""

    def forget(self, asked: Mapping[int, Entry]) -> Answers:
        """Forget tensors, as all workers have asked."""

    def poison_of(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return kind and text of the error why some of these names can never be forgotten."""


@dataclass
class _Meeting:
    began: float
    watch_s: float  # age at which to log the missing workers next
    entries: dict[int, Entry] = field(default_factory=dict)  # by rank
    testaments: dict[int, str] = field(default_factory=dict)  # what removed workers had started

    def deadline(self) -> float:
        return min(entry.deadline for entry in self.entries.values())


class Collectives:
    """All barriers and blobs in progress."""

    def __init__(
        self,
        size: int,
        forgetter: Forgetter,
        *,
        regroup: Complete | None = None,
        goes_on: bool = False,
        watch_s: float = 0.0,
        peers: Mapping[int, tuple[int, str]] | None = None,
    ) -> None:
        """Serve `size` workers.

        regroup: called with the entries of all workers, which have come to a boundary of an
        elastic job. goes_on: meetings complete without lost workers. watch_s: a meeting that
        takes longer is logged; 0: none. peers: connection and full name of each worker, by rank.
        """
        self.stalls = Stalls(peers or {}, self._elsewhere)
        self._watch_s = watch_s or float("inf")
        self._size = size
        self._goes_on = goes_on
        self._forgetter = forgetter
        self._regroup = regroup
        self._meetings: dict[Key, _Meeting] = {}
        self._gone: set[int] = set()
        self._joined: set[int] = set()  # workers that have run out of data, until all have
        self._barriers: dict[str, list[Key]] = {}  # in progress, by name, the oldest first
        self._numbers = itertools.count(1)
        self._n_entered: Counter[int] = Counter()  # meetings in progress, by rank
        self._held: Counter[int] = Counter()  # bytes in them, by rank
        # ended disputes: workers that have not taken part yet, and the text for them
        self._disputes: dict[Key, tuple[set[int], str]] = {}

    def enter(self, rank: int, peer: int, asked: Meeting | Waiting, now: float) -> Answers:
        """Enter a worker into a meeting, or handle its report of a wait; return the answers."""
        if isinstance(asked, Waiting):
            return self.stalls.ask(rank, peer, asked, now)
        key = self._key(rank, asked)
        silent, text = self._disputes.get(key, (set(), ""))
        if rank in silent:
            silent.discard(rank)
            if not silent:
                del self._disputes[key]
            return [(peer, Failed(asked.request, "mismatch", text))]
        refusal = self._refuse(key, rank, asked)
        if refusal is not None:
            return [(peer, refusal)]
        if key not in self._meetings and key[0] == "barrier":
            self._barriers.setdefault(key[1], []).append(key)
        meeting = self._meetings.setdefault(key, _Meeting(now, self._watch_s))
        meeting.entries[rank] = Entry(peer, asked, now + asked.timeout_s)
        self._n_entered[rank] += 1
        self._held[rank] += _held_bytes(asked)
        if isinstance(asked, Blob):
            roots = {rank: _root(entry) for rank, entry in meeting.entries.items()}
            if len(set(roots.values())) > 1:
                return self._end(key, "mismatch", _roots_text(asked.name, roots))
        return self._decide(key)

    def _decide(self, key: Key) -> Answers:
        """End a meeting that is complete, or can never be complete."""
        meeting = self._meetings[key]
        asked = [entry.asked for entry in meeting.entries.values()]
        is_root_gone = any(isinstance(one, Blob) and one.root_rank in self._gone for one in asked)
        if self._gone and (is_root_gone or not self._goes_on):
            gone = workers_text(sorted(self._gone))
            return self._end(
                key, "peer_lost", f"{_what(key)} cannot complete: {gone} left the job"
            )
        joined = sorted(self._joined - self._gone - meeting.entries.keys())
        if joined and key[0] not in ("dispute", "barrier"):
            return self._end(key, "mismatch", _joined_text(key, joined))
        if isinstance(asked[0], Forget):
            poison = self._forgetter.poison_of(name for name, _ in asked[0].tensors)
            if poison is not None:
                return self._end(key, *poison)
        return [] if self._missing(key) else self._complete(key)

    def _missing(self, key: Key) -> list[int]:
        """List the workers that a meeting waits for."""
        away = self._gone | self._joined if key[0] == "barrier" else self._gone
        away = away | self._meetings[key].entries.keys()
        return [rank for rank in range(self._size) if rank not in away]

    def end_poisoned(self) -> Answers:
        """End the meetings to forget what has been poisoned: some workers will not come."""
        keys = [key for key in self._meetings if key[0] == "forget"]
        return [answer for key in keys for answer in self._decide(key)]

    def join(self, rank: int) -> Answers:
        """Record that a worker has run out of data; meetings that need it fail."""
        self._joined.add(rank)
        self._end_join()
        return [answer for key in list(self._meetings) for answer in self._decide(key)]

    def remove(self, rank: int) -> Answers:
        """Remove a worker that left; meetings that need it fail."""
        self._gone.add(rank)
        self._end_join()
        told = self.stalls.remove(rank)
        for key, meeting in list(self._meetings.items()):
            if rank in meeting.entries:
                entry = meeting.entries.pop(rank)
                self._release(rank, entry)
                if isinstance(entry.asked, Dispute):
                    meeting.testaments[rank] = entry.asked.started
            if not meeting.entries:
                self._close(key)
        return told + [answer for key in list(self._meetings) for answer in self._decide(key)]

    def _end_join(self) -> None:
        """Expect all again once those that are left have run out of data."""
        if len(self._joined | self._gone) == self._size:
            self._joined.clear()

    def fail_all(self, kind: str, message: str) -> Answers:
        """End every meeting with the same error."""
        keys = list(self._meetings)
        return [answer for key in keys for answer in self._end(key, kind, message)]

    def expire(self, now: float) -> Answers:
        """End the meetings whose deadline has passed; inquire about long ones."""
        late = [key for key, meeting in self._meetings.items() if meeting.deadline() <= now]
        found = [
            answer for key in late for answer in self._end(key, "stall", self._late_text(key))
        ]
        for key, meeting in self._meetings.items():
            if meeting.began + meeting.watch_s <= now:
                meeting.watch_s *= 2
                found += self.stalls.look(_what(key), meeting.entries, now - meeting.began, now)
        return found + self.stalls.expire(now)

    def look(self, now: float) -> Answers:
        """Find out, and log, why meetings older than LEAST_S are not complete."""
        return [
            answer
            for key, meeting in self._meetings.items()
            if now - meeting.began >= LEAST_S
            for answer in self.stalls.look(_what(key), meeting.entries, now - meeting.began, now)
        ]

    def next_deadline(self) -> float | None:
        """Return the time when expire() has something to do."""
        times = [
            min(meeting.deadline(), meeting.began + meeting.watch_s)
            for meeting in self._meetings.values()
        ]
        inquiry = self.stalls.next_deadline()
        return min(times if inquiry is None else [*times, inquiry], default=None)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """List (peer, request) of all waiting workers."""
        for meeting in self._meetings.values():
            for entry in meeting.entries.values():
                yield entry.peer, entry.asked.request

    def _key(self, rank: int, asked: Meeting) -> Key:
        """Return a meeting's key; a worker that enters a barrier again means the next one."""
        if isinstance(asked, Forget):  # quoted, since a name may contain any separator
            return "forget", ", ".join(repr(name) for name, _ in asked.tensors), 0
        version = f" {asked.version}" if isinstance(asked, Dispute) else ""
        kind, name = type(asked).__name__.lower(), repr(asked.name + version)
        if kind != "barrier":
            return kind, name, 0
        known = self._barriers.get(name, [])  # a worker is in the oldest ones of a name
        place = bisect_left(known, True, key=lambda one: rank not in self._meetings[one].entries)
        return known[place] if place < len(known) else (kind, name, next(self._numbers))

    def _refuse(self, key: Key, rank: int, asked: Meeting) -> Failed | None:
        meeting = self._meetings.get(key)
        what = _what(key)
        if meeting is not None and rank in meeting.entries:
            text = f"worker {rank} is already waiting in {what}; use a different name for each"
            return Failed(asked.request, "config", text)
        barriers = self._barriers.get(key[1], ()) if key[0] == "barrier" else ()
        if meeting is None and len(barriers) >= MAX_BARRIERS:
            text = f"worker {rank} is already waiting {MAX_BARRIERS} times in {what}"
            return Failed(asked.request, "error", f"{text}; wait for some before starting more")
        if self._n_entered[rank] >= MAX_MEETINGS:
            text = f"{what} refused: worker {rank} is already waiting in {MAX_MEETINGS} others"
            return Failed(asked.request, "error", f"{text}; wait for some before starting more")
        if isinstance(asked, Blob) and (asked.data is not None) != (asked.root_rank == rank):
            verb = "must pass" if asked.data is None else "must not pass"
            text = f"{what}: worker {rank} {verb} data, since the root is {asked.root_rank}"
            return Failed(asked.request, "config", text)
        if isinstance(asked, Blob) and asked.root_rank >= self._size:
            text = f"{what}: root rank {asked.root_rank} does not exist, the size is {self._size}"
            return Failed(asked.request, "config", text)
        if self._held[rank] + _held_bytes(asked) > MAX_HELD_BYTES:
            text = f"{what} refused: the scheduler already holds {self._held[rank]} bytes"
            text = f"{text} of worker {rank} that other workers have not fetched"
            return Failed(asked.request, "error", f"{text}; wait for some before sending more")
        return None

    def _end_dispute(self, key: Key, meeting: _Meeting, loss: str) -> str:
        """Return which worker started what; late workers will get the same text.

        loss: what ended the job, and the dispute before its time; empty: nothing did.
        """
        silent = {rank for rank in range(self._size) if rank not in meeting.entries} - self._gone
        gone = f"{workers_text(sorted(self._gone))} died or left the job" if self._gone else loss
        text = _dispute_text(meeting, sorted(silent), gone)
        if silent:
            self._disputes[key] = silent, text
            if len(self._disputes) > MAX_MEETINGS:
                del self._disputes[next(iter(self._disputes))]
        return text

    def _complete(self, key: Key) -> Answers:
        if key[0] == "dispute":
            return self._end(key, "", "")
        meeting = self._close(key)
        asked = next(iter(meeting.entries.values())).asked
        if isinstance(asked, Forget):
            return self._forgetter.forget(meeting.entries)
        if isinstance(asked, Regroup) and self._regroup is not None:
            return self._regroup(meeting.entries)
        data = b""
        for entry in meeting.entries.values():
            if isinstance(entry.asked, Blob) and entry.asked.data is not None:
                data = entry.asked.data
        return [(entry.peer, _success(entry.asked, data)) for entry in meeting.entries.values()]

    def _end(self, key: Key, kind: str, message: str) -> Answers:
        meeting = self._close(key)
        if key[0] == "dispute":  # the known reports help more than the reason of the end
            is_cut_short = kind == "peer_lost" and not self._gone
            text = self._end_dispute(key, meeting, message if is_cut_short else "")
            kind, message = "mismatch", text
        return [
            (entry.peer, Failed(entry.asked.request, kind, message))
            for entry in meeting.entries.values()
        ]

    def _close(self, key: Key) -> _Meeting:
        meeting = self._meetings.pop(key)
        if key[0] == "barrier":
            self._barriers[key[1]].remove(key)
            if not self._barriers[key[1]]:
                del self._barriers[key[1]]
        for rank, entry in meeting.entries.items():
            self._release(rank, entry)
        return meeting

    def _release(self, rank: int, entry: Entry) -> None:
        """Count a worker's entry no more."""
        self._n_entered[rank] -= 1
        self._held[rank] -= _held_bytes(entry.asked)

    def _late_text(self, key: Key) -> str:
        entries = self._meetings[key].entries
        missing = self._missing(key)
        first = min(entries, key=lambda rank: entries[rank].deadline)
        text = (
            f"{_what(key)} timed out after {entries[first].asked.timeout_s:g} s of worker "
            f"{first}; missing: {workers_text(missing)}"
        )
        elsewhere = self._elsewhere(missing)
        hint = "; raise FASTPS_OP_TIMEOUT_S if they are only slow"
        return text + (f" ({elsewhere})" if elsewhere else "") + hint

    def _elsewhere(self, missing: list[int]) -> str:
        """Return in which other meetings the missing workers wait."""
        return join_names(
            [
                f"worker {rank} waits in {_what(key)}"
                for key, meeting in self._meetings.items()
                for rank in missing
                if rank in meeting.entries
            ]
        )


def _held_bytes(asked: Meeting) -> int:
    """Return the bytes of a worker that are held until the others come."""
    if isinstance(asked, Blob):
        return len(asked.data or b"")
    if isinstance(asked, Forget):
        return sum(len(name) + NAME_BYTES for name, _ in asked.tensors)
    return 0


def _what(key: Key) -> str:
    """Return a meeting's name; the name of one that forgets tensors may be long."""
    return f"{key[0]} {key[1][:200]}"


def _joined_text(key: Key, ranks: list[int]) -> str:
    return (
        f"{_what(key)} cannot complete: {workers_text(ranks)} has run out of data and called "
        "join(), which only takes part in allreduce, reduce, barriers and broadcasts; call this "
        "before any worker joins, or after all have"
    )


def _dispute_text(meeting: _Meeting, silent: list[int], loss: str) -> str:
    """Return which workers started which operation, beginning with the lowest rank.

    loss: which workers are gone, for one of these may have been the only one that differs.
    """
    started = dict(meeting.testaments)
    name = ""
    for rank, entry in meeting.entries.items():
        if isinstance(entry.asked, Dispute):
            name = entry.asked.name
            started[rank] = entry.asked.started
    sides: dict[str, list[int]] = {}
    for rank, what in sorted(started.items()):
        sides.setdefault(what, []).append(rank)
    lines = [f"{workers_text(ranks)} started {what}" for what, ranks in sides.items()]
    lines += [f"{workers_text(silent)} did not say in time"] * bool(silent)
    lines += [loss] * bool(loss and len(sides) < 2)
    return (
        f"tensor {name!r}: the workers started different operations: {'; '.join(lines)}. Make all "
        "workers call the same operation"
    )


def _root(entry: Entry) -> int:
    return entry.asked.root_rank if isinstance(entry.asked, Blob) else -1


def _roots_text(name: str, roots: dict[int, int]) -> str:
    sides = [f"worker {rank} gave root {root}" for rank, root in sorted(roots.items())]
    return f"blob {name!r}: workers gave different roots: {join_names(sides)}"


def _success(asked: Meeting, data: bytes) -> ToMember:
    if isinstance(asked, Blob) and asked.data is None:
        return BlobData(asked.request, data)
    return Done(asked.request)
