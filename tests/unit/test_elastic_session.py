# SPDX-License-Identifier: Apache-2.0
"""Decisions of an elastic session that need no other process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.config import load
from fastps.control.blame import Failure, Witness
from fastps.control.protocol import BoardRead, PeerLost, ResultsCommitted, ResultsLanded, ViewLost
from fastps.errors import PeerLostError, Status, ViewChangedError
from fastps.session.elastic import ElasticSession
from fastps.session.elastic_handle import ElasticHandle, Scope
from fastps.session.session import State
from fastps.session.view import Hold
from fastps.transport import shm
from fastps.transport._link import Mapping
from fastps.worker._board import Board, board_bytes


class Part:
    """The half of an operation's handle that a session asks for."""

    has_landed = False

    def __init__(self, names: Sequence[str], version: int = 1) -> None:
        tensors = [SimpleNamespace(tensor_id=ord(name) - ord("a")) for name in names]
        self._tickets = [SimpleNamespace(tensor=one, version=version) for one in tensors]

    def poll(self) -> bool:
        return self.has_landed

    def wait_status(self, timeout_s: float) -> int | None:
        return 0 if self.has_landed else None


class Client:
    """Notes what is sent to the scheduler."""

    def __init__(self) -> None:
        self.sent: list[ResultsLanded] = []

    def send(self, message: ResultsLanded) -> None:
        self.sent.append(message)


def make_session() -> Any:
    made: Any = ElasticSession.__new__(ElasticSession)
    made.view, made._generation, made._active, made._counts = 1, 7, {}, {}
    made.changed, made._client = threading.Condition(), Client()
    made._board, made._on_board, made._groups, made._fatal = None, {}, None, None
    return made


@pytest.fixture
def session() -> Any:
    return make_session()


@pytest.fixture
def sessions() -> list[Any]:
    """Return those of two workers with a board."""
    nbytes = board_bytes(2)
    descriptor = shm.create_memory(nbytes)
    found = [make_session(), make_session()]
    for rank, one in enumerate(found):
        one._board = Board(Mapping(descriptor, nbytes), 0, n=2, index=rank)
    os.close(descriptor)
    return found


def started(session: Any, *names: str, scope: Scope | None = None) -> tuple[ElasticHandle, Part]:
    part = Part(names)
    handle = ElasticHandle(
        session, names, [], [], lambda places: part, is_single=True, scope=scope  # type: ignore[arg-type, return-value]
    )  # fmt: skip
    handle.entries = [f"{name}#1" for name in names]
    handle.start(session.view)
    if scope is not None:
        scope.handles.append(handle)
    session._active.update(dict.fromkeys(names, handle))
    return handle, part


def report(session: Any) -> list[ResultsLanded]:
    session._report_landed()
    sent, session._client.sent = session._client.sent, []
    return sent


def test_a_landed_operation_is_reported_once_in_a_view(session):
    _, part = started(session, "a", "b")
    assert report(session) == []
    part.has_landed = True
    assert report(session) == [ResultsLanded(7, ("a#1", "b#1"))]
    assert report(session) == []


def test_what_has_landed_is_reported_with_what_a_program_waits_for(session):
    parts = [started(session, name)[1] for name in "abc"]
    parts[0].has_landed = parts[2].has_landed = True
    assert report(session) == [ResultsLanded(7, ("a#1", "c#1"))]
    parts[1].has_landed = True
    assert report(session) == [ResultsLanded(7, ("b#1",))]


def test_the_next_view_needs_only_what_is_not_committed(session):
    handle, part = started(session, "a", "b")
    part.has_landed = True
    report(session)
    session._on_event(ResultsCommitted(("a#1",)))  # another worker had begun them apart
    assert not handle.is_committed
    session.view, session._generation = 2, 8
    handle._parts = ()
    handle.start(2)
    assert report(session) == [ResultsLanded(8, ("b#1",))]
    session._on_event(ResultsCommitted(("b#1",)))
    assert handle.is_committed
    assert not session._active


def test_a_scope_is_reported_as_a_whole(session):
    scope = Scope()
    _, landed = started(session, "a", scope=scope)
    _, late = started(session, "b", scope=scope)
    landed.has_landed = True
    assert report(session) == []  # it is open, and half of it is late
    scope.close()
    assert report(session) == []
    late.has_landed = True
    assert report(session) == [ResultsLanded(7, ("a#1", "b#1"))]
    assert report(session) == []


def test_who_reports_landings_is_woken_for_what_can_land_and_nobody_awaits(session):
    told = []
    scope = Scope(on_close=lambda: told.append("closed"))
    started(session, "a", scope=scope)
    assert not session._is_unattended  # a step that is still being sent
    scope.close()
    assert session._is_unattended
    assert told == ["closed"]
    scope.close(is_awaited=True)
    assert not session._is_unattended
    assert told == ["closed"]


def test_what_failed_in_the_last_view_accuses_nobody_in_this_one(session):
    """A thread may learn of the failure before the view changes, and word it after that."""
    session._fatal, session._news, session._is_changing = None, None, False
    session._witness, session.state, session._threads = Witness(), State.OPEN, []
    session._cause, session._how = "worker 1 is lost", "without it"
    session.config = load(environ={"FASTPS_LEASE_S": "60"})
    session.view = 2
    began = time.monotonic()
    failure = Failure("w", Status.PEER_LOST, owner=1, is_operation=True, view=1)
    error = session._blame(failure)
    assert isinstance(error, ViewChangedError)
    assert "worker 1 is lost" in str(error)
    assert session._client.sent == []
    assert time.monotonic() - began < 10.0
    assert [session._view_of(view) for view in (0, 1, 2, 3)] == [2, 1, 2, 2]


def test_the_view_that_ends_is_awaited_though_the_next_one_begins_meanwhile(session, monkeypatch):
    session._fatal, session._groups = None, object()
    awaited: list[int] = []

    def has_news(view: int) -> bool:
        session.view = 2  # at once after the look
        return view == 1

    monkeypatch.setattr(session, "_has_news", has_news)
    monkeypatch.setattr(session, "_await_view", lambda view, timeout_s: awaited.append(view))
    session.config = load(environ={})
    assert session.groups is session._groups
    assert awaited == [1]


def test_the_next_view_tells_of_the_loss_that_led_to_one_that_was_cut_short(session):
    lost = [ViewLost(g, PeerLost("worker", g, "h", 9, "it was killed"), True) for g in (2, 3)]
    session._changes, session._untold, session._news = [lost[0]], [], lost[0]
    assert session._take_changes(2) == lost[:1]
    session._changes.append(lost[1])
    assert session._take_changes(3) == lost


def test_a_commit_counts_for_a_worker_that_does_not_know_the_name(session):
    session._on_event(ResultsCommitted(("w#2#1",)))
    assert session._counts == {"w#2": 1}


def test_what_holds_keeps_others_from_joining(session):
    session._groups, session._latest, session.copies = None, {}, {}
    assert session.is_at_boundary
    hold = Hold()
    assert not session.is_at_boundary
    hold.end()
    assert session.is_at_boundary
    _, part = started(session, "a")
    part.has_landed = True
    assert not session.is_at_boundary  # until it is committed


def land(session: Any, *parts: Part) -> None:
    for part in parts:
        part.has_landed = True
    session._report_landed()


def take(session: Any) -> None:
    session._take_landed(list(session._active.values()))


def test_a_result_is_committed_when_all_have_reported_it_on_the_board(sessions):
    (first, ours), (second, theirs) = (started(one, "a", "b") for one in sessions)
    land(sessions[0], ours)
    assert not sessions[0]._client.sent  # the scheduler has no part in it
    take(sessions[0])
    take(sessions[1])  # which has it not
    assert not first.is_committed
    assert not second.is_committed
    land(sessions[1], theirs)
    take(sessions[0])
    assert first.is_committed
    assert sessions[0]._counts == {"a": 1, "b": 1}
    sessions[1]._read_board()  # it has not looked, and knows it nevertheless
    assert second.is_committed
    assert not sessions[1]._active


def test_what_others_have_not_reported_is_not_committed_when_a_view_ends(sessions):
    handles = [started(one, "a") for one in sessions]
    land(sessions[0], handles[0][1])
    sessions[0]._read_board()
    land(sessions[1], handles[1][1])  # too late
    sessions[1]._read_board()
    assert not any(handle.is_committed for handle, _ in handles)
    assert all(one._active for one in sessions)


def test_a_scope_is_on_the_board_as_a_whole(sessions):
    scopes = [Scope(), Scope()]
    both = [
        [started(one, name, scope=scope) for name in "ab"]
        for one, scope in zip(sessions, scopes, strict=True)
    ]
    for scope in scopes:
        scope.close()
    land(sessions[0], *(part for _, part in both[0]))
    land(sessions[1], both[1][0][1])  # half of it
    for one in sessions:
        one._read_board()
    assert not any(handle.is_committed for half in both for handle, _ in half)


def test_nothing_of_an_earlier_view_is_reported_while_the_next_one_begins(sessions):
    (handle, part), _ = (started(one, "a") for one in sessions)
    sessions[0]._read_board()
    land(sessions[0], part)
    assert not sessions[0]._client.sent
    assert not handle.is_committed


def test_the_scheduler_hears_what_the_board_has_committed(sessions):
    parts = [started(one, "a", "b")[1] for one in sessions]
    for one, part in zip(sessions, parts, strict=True):
        land(one, part)
    sessions[0]._read_board()
    sessions[0]._read_board()  # another member was lost meanwhile
    sessions[1]._take_landed(list(sessions[1]._active.values()))
    sessions[1]._tell_board()  # it leaves in order
    told = BoardRead(7, ("a#1", "b#1"))
    assert [one._client.sent for one in sessions] == [
        [told] * 2,
        [told],
    ]  # again: to any scheduler


def test_what_an_operation_in_place_has_overwritten_is_there_when_it_begins_again(session):
    arrays = [np.arange(3.0), np.arange(3.0)]
    handle = ElasticHandle(
        session, "ab", arrays, arrays, lambda places: Part("ab"), is_single=False,  # type: ignore[arg-type, return-value]
        copies={0: np.empty(3), 1: np.empty(3)},
    )  # fmt: skip
    handle.entries = ["a#1", "b#1"]
    handle.copy_sources()
    handle.start(1)
    for array in arrays:
        array += 10  # one result, and half of another
    handle.commit("a#1")
    handle._parts = ()
    handle.start(2)
    assert [array.tolist() for array in arrays] == [[10, 11, 12], [0, 1, 2]]
    arrays[1][0] = 7
    session._keep_error(handle, PeerLostError("x"))
    assert [array.tolist() for array in arrays] == [[10, 11, 12], [0, 1, 2]]
