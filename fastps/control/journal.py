# SPDX-License-Identifier: Apache-2.0
"""What a member of an elastic job knows of its view, for a scheduler that takes over.

A scheduler that dies may have answered some members and not others. So each member keeps what it
was told in this view: which results are committed, and which meetings (barriers, objects,
boundaries) have ended. The next scheduler tells all members what any of them knows
(control/recovery.py). Operations and meetings of which some members have yet to hear are the last
ones, so only those are kept. Used by the control thread; pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence

from msgspec.structs import replace

from fastps.control.commits import entry_of, is_operation, parts_of
from fastps.control.protocol import (
    Answer,
    Blob,
    BlobData,
    Committed,
    Done,
    Event,
    Forget,
    Job,
    Join,
    Meeting,
    Met,
    PeerLeft,
    Rejoin,
    ResultsCommitted,
    Success,
    ViewJoined,
    ViewLost,
)

MAX_OPERATIONS = 1 << 15  # entries of operations among members; those of 5 s and more
MAX_MET = 64  # answers of meetings, each of which all workers take part in
MAX_MET_BYTES = 32 << 20  # of their objects


class PendingMeeting:
    """A request of this member to a meeting, until it is answered."""

    def __init__(self, message: Meeting) -> None:
        """Keep the object of a root, which the answer lacks."""
        if isinstance(message, Forget):
            words = hashlib.blake2b(repr(message.tensors).encode(), digest_size=16).hexdigest()
        else:
            words = message.name
        self.key = f"{type(message).__name__} {words}"
        self.request = message.request
        self.data = message.data if isinstance(message, Blob) else None
        self.has_data = isinstance(message, Blob) and message.data is None  # in its answer

    def known_as(self, answer: Success) -> Success:
        """Return what others may have to be told of an answer."""
        return answer if self.data is None else BlobData(answer.request, self.data)

    def answer(self, known: Success) -> Success:
        """Return the answer to this request."""
        if isinstance(known, BlobData) and not self.has_data:
            return Done(self.request)
        return replace(known, request=self.request)


class Journal:
    """What one member was told in its view."""

    def __init__(self) -> None:
        """Begin with a job that has not started."""
        self.told = 0  # generation of the last view that was announced
        self.boundary = 0  # the same of the last one for newcomers, or without leavers
        self._forget()

    def begin(self, generation: int) -> None:
        """Forget all but these two when a view starts."""
        self.told = max(self.told, generation)
        self._forget()

    def _forget(self) -> None:
        self._left: list[int] = []
        self._last: dict[str, int] = {}  # result that is committed, by name
        self._operations: deque[tuple[tuple[int, ...], str]] = deque(maxlen=MAX_OPERATIONS)
        self._n_met: Counter[str] = Counter()  # by key of PendingMeeting
        self._met: deque[tuple[str, int, Success]] = deque()
        self._nbytes = 0  # of objects in _met

    def take(self, event: Event) -> None:
        """Take an event of the scheduler."""
        if isinstance(event, ResultsCommitted):
            for entry in event.entries:
                if is_operation(entry):
                    self._operations.append((event.members, entry))
                else:
                    name, self._last[name] = parts_of(entry)
        elif isinstance(event, ViewLost | ViewJoined):
            self.told = max(self.told, event.generation)
            if isinstance(event, ViewJoined):
                self.boundary = event.generation
        elif isinstance(event, PeerLeft):
            self._left.append(event.member)

    def note(self, asked: PendingMeeting, answer: Answer) -> None:
        """Take the answer of a meeting; a failure is none."""
        if not isinstance(answer, Success):
            return
        self._n_met[asked.key] += 1
        found = asked.known_as(answer)
        self._met.append((asked.key, self._n_met[asked.key], found))
        self._nbytes += _nbytes(found)
        while len(self._met) > MAX_MET or self._nbytes > MAX_MET_BYTES:
            self._nbytes -= _nbytes(self._met.popleft()[2])

    def answered(
        self, asked: Sequence[PendingMeeting], met: Met
    ) -> list[tuple[PendingMeeting, Success]]:
        """Return the answers to requests, in their order, that other members know."""
        known = {(key, number): answer for key, number, answer in met}
        found: list[tuple[PendingMeeting, Success]] = []
        waiting: Counter[str] = Counter()
        for one in asked:
            waiting[one.key] += 1
            answer = known.get((one.key, self._n_met[one.key] + waiting[one.key]))
            if answer is not None:
                found.append((one, one.answer(answer)))
        return found

    @property
    def committed(self) -> Committed:
        """The results that are committed: the last of each name, and operations by members."""
        by_members: dict[tuple[int, ...], list[str]] = {}
        for name, number in self._last.items():
            by_members.setdefault((), []).append(entry_of(name, number))
        for members, entry in self._operations:
            by_members.setdefault(members, []).append(entry)
        return tuple((members, tuple(entries)) for members, entries in by_members.items())

    def rejoin(self, request: int, join: Join, job: Job, *, term: int, leaves: bool) -> Rejoin:
        """Return the message to the next scheduler; term: of the last one."""
        return Rejoin(
            request, join, job, term, self.told, self.boundary, tuple(self._left),
            self.committed, tuple(self._met), leaves,
        )  # fmt: skip


def _nbytes(answer: Success) -> int:
    return len(answer.data) if isinstance(answer, BlobData) else 0
