# SPDX-License-Identifier: Apache-2.0
"""What a session is in a forked child: nobody's, and its links end there."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

import fastps
from fastps.config import launchers, load
from fastps.control.scheduler_thread import HostedScheduler
from fastps.errors import NotInitializedError
from fastps.security.tokens import Token
from fastps.session import current
from fastps.session.session import Session

SECRET = "9f3a61c07be2d584"


def made() -> Session:
    """Join a job of one worker."""
    return Session(load({"size": 1, "num_servers": 0}, {}))


def in_child(look: Any) -> int:
    """Run look() in a forked child; give what it returns, a number below 100."""
    child = os.fork()
    if not child:
        try:
            os._exit(look())
        finally:
            os._exit(100)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_use_it():
    session = made()

    def look() -> int:
        try:
            session.check_usable()
        except NotInitializedError:
            return 1
        return 0

    assert in_child(look) == 1
    session.check_usable()
    assert session.is_ours


def test_a_forked_child_knows_its_number():
    fastps.init(size=1, num_servers=0)
    try:
        assert in_child(lambda: 10 * fastps.rank() + fastps.size() + fastps.local_size()) == 2
        assert in_child(lambda: fastps.is_initialized()) == 0
    finally:
        fastps.shutdown()


def test_links_end_in_a_child_that_is_forked_while_close_ends_them():
    session = made()
    ended: list[int] = []
    abandon = SimpleNamespace(abandon=lambda: ended.append(1))
    session.connections = abandon  # type: ignore[assignment]
    assert session._client is None  # as in the middle of close()
    assert in_child(lambda: len(ended)) == 1
    assert not ended


def test_a_child_forgets_the_token_that_its_parent_was_told(monkeypatch: pytest.MonkeyPatch):
    told = SECRET.encode().decode()
    fastps.init(size=1, num_servers=0)
    monkeypatch.setattr(current, "_met", SimpleNamespace(settings={"token": told}))
    monkeypatch.setattr(launchers, "is_left_alone", lambda config: True)

    def look() -> int:
        with pytest.raises(NotInitializedError, match="its place in that job is taken"):
            fastps.init(size=1, num_servers=0)
        fastps.shutdown()  # which takes no place in any job
        with pytest.raises(NotInitializedError, match="its place in that job is taken"):
            fastps.init(size=1, num_servers=0)
        return int(told.strip("0") != "")

    try:
        assert in_child(look) == 0
        assert told == SECRET
    finally:
        fastps.shutdown()


def test_a_child_forgets_the_tokens_of_the_scheduler_in_its_parent():
    hosted = HostedScheduler(load({"token": SECRET, "scheduler_host": "127.0.0.1"}, {}))
    scheduler = hosted._scheduler
    scheduler._tokens[1] = own = Token(SECRET.encode()).own("worker", 0)
    assert in_child(lambda: len((scheduler._token.secret + own.secret).strip(b"\0"))) == 0
    assert scheduler._token.secret == SECRET.encode()
    for listener in scheduler._listeners:
        listener.close()
