# SPDX-License-Identifier: Apache-2.0
"""Which results are committed, by the scheduler or by a board, and their log.

A part of the Membership. The scheduler commits what workers report, by control/commits.py, and
tells them. Where the workers of a view have a board in shared memory, they commit results by
themselves (worker/_board), and the scheduler hears of them when a view ends: each survivor says
what the board committed before it awaits the next view. Pure, as the Membership is.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fastps.config import Config
from fastps.control.actions import Action, Note, Phase, Send
from fastps.control.admission import Peer
from fastps.control.blame import broke_text
from fastps.control.commits import MAX_HELD_BYTES, Commits, Difference, charge, parts_of
from fastps.control.protocol import BoardRead, ResultsCommitted, ResultsLanded
from fastps.control.view_log import Replay, ViewRecord

REPLAYED = "it was lost here in the job that this one makes again (FASTPS_REPLAY)"


class BoardLog:
    """What the workers of one view say that their board has committed."""

    def __init__(self, generation: int) -> None:
        """Begin with the view of this generation of the job."""
        self.generation = generation
        self._last: dict[str, int] = {}
        self._told_by: set[int] = set()  # each worker says it once, when the view ends for it
        self._record: ViewRecord | None = None  # of the view, once it has ended

    def end(self, record: ViewRecord) -> ViewRecord:
        """Return the record of a view that ends, with what is known if it is this one."""
        if self._record is not None:
            return record  # of one in which nothing could begin
        self._record = self._with_last(record)
        return self._record

    def take(self, peer: int, entries: Sequence[str]) -> ViewRecord | None:
        """Take what a worker says; return the record of the view if it has ended and changes."""
        if peer not in self._told_by:
            self._told_by.add(peer)
            for name, number in map(parts_of, entries):
                self._last[name] = max(number, self._last.get(name, 0))
        before = self._record
        if before is None or self._with_last(before) == before:
            return None
        self._record = self._with_last(before)
        return self._record

    def _with_last(self, record: ViewRecord) -> ViewRecord:
        return replace(record, committed=record.committed | self._last)


class LandingMixin:
    """Results and their commits, for the Membership."""

    phase: Phase
    generation: int
    _config: Config
    _view: Config
    _out: list[Action]
    _commits: Commits
    _replay: Replay
    _n_views: int
    _in_view: tuple[int, ...]
    _board: BoardLog | None = None  # of the last view that has begun, if it has one

    def _drop(self, peer: int, cause: str, now: float) -> None:
        raise NotImplementedError

    def _programs(self) -> list[Peer]:
        raise NotImplementedError

    def _note_difference(self, member: Peer, found: Difference, now: float) -> None:
        raise NotImplementedError

    def _land(self, member: Peer, message: ResultsLanded, now: float) -> None:
        """Commit what has now landed on all workers that need it."""
        number, n_workers = member.number, self._view.n_programs
        if self.phase is not Phase.RUNNING or message.generation != self.generation:
            return  # of a view that has ended: it is made again
        if number is None or not (member.is_worker and member.is_working):
            return
        if not self._config.is_elastic:
            return  # nothing is committed
        members = frozenset(message.members or range(n_workers))
        why = self._commits.refusal(message.entries, members, me=number, n=n_workers)
        if why:
            self._drop(member.peer, broke_text(why), now)
            return
        done, differences = self._commits.land(number, message.entries, members, n=n_workers)
        for one in differences:
            self._note_difference(member, one, now)
        if done:
            committed = ResultsCommitted(tuple(done), message.members)
            self._out += [
                Send(item.peer, committed) for item in self._programs() if item.number in members
            ]
            self._replay_loss(now)

    def _replay_loss(self, now: float) -> None:
        """Lose the worker that the job which is made again has lost here."""
        rank = self._replay.next_loss
        found = next((item for item in self._programs() if item.place == rank), None)
        if rank is not None and found is not None:
            self._drop(found.peer, REPLAYED, now)

    def _end_view(self, cause: str, *, has_boundary: bool = False) -> None:
        """Note what was committed in a view that has ended, and by whom."""
        self._n_views += 1
        last = self._commits.last
        record = ViewRecord(self._n_views, self._in_view, last, cause, has_boundary)
        if self._board is not None:
            record = self._board.end(record)
        self._out.append(Note(record))
        self._commits.end_view()

    def _take_board(self, member: Peer, message: BoardRead, now: float) -> None:
        """Note what a board has committed, also in the record of its view if that has ended."""
        board = self._board
        if board is None or message.generation != board.generation or not member.is_worker:
            return
        if sum(map(charge, message.entries)) > MAX_HELD_BYTES:
            text = f"it reports a board with results of more than {MAX_HELD_BYTES >> 20} MiB"
            self._drop(member.peer, broke_text(f"{text} of names"), now)
            return
        if (record := board.take(member.peer, message.entries)) is not None:
            self._out.append(Note(record))
