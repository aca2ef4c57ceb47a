# SPDX-License-Identifier: Apache-2.0
"""Whom a failed operation names: who left first, not those whose links end as a consequence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fastps.config import load
from fastps.control.protocol import Event, PeerLeft
from fastps.errors import FastPSError, PeerLostError, ShutdownError
from fastps.session import VERDICT_WAIT_S, Session


class Client:
    """A control client that hears events while a verdict is waited for."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int]] = []
        self.waits: list[bool] = []  # whether each verdict was waited for
        self.heard: list[Event] = []  # during the next wait
        self.take: Callable[[Event], None] = lambda event: None
        self.text: str | None = None
        self.close_on_report: Session | None = None

    def report_lost(self, role: str, rank: int, cause: str) -> None:
        """Note a report."""
        self.reports.append((role, rank))
        if self.close_on_report is not None:
            self.close_on_report._client = None  # as close() does first, on another thread

    def verdict(self, timeout_s: float, *, unless: Callable[[], bool]) -> str | None:
        """Answer as the scheduler would."""
        assert timeout_s == VERDICT_WAIT_S
        is_waited_for = self.text is None and not unless()
        self.waits.append(is_waited_for)
        if is_waited_for:
            for event in self.heard:
                self.take(event)
        return self.text


class Blamed:
    """A session of worker 0 of three that serve too; server K is in worker K."""

    def __init__(self, *, failed: int | None = None) -> None:
        self.client = Client()
        self.session = Session(load({"size": 1, "num_servers": 0}, {}))
        self.session._client = self.client  # type: ignore[assignment]
        self.session._connections = SimpleNamespace(  # type: ignore[assignment]
            failed_server=lambda: failed,
            worker_of_server=lambda index: index,
            why_broken=lambda index: "",
            name_of_server=lambda index: f"server {index} (in worker {index})",
            is_to_blame=False,
        )
        self.client.take = self.session._on_event

    def hear(self, *events: Event) -> None:
        """Take events before the failure."""
        for event in events:
            self.session._on_event(event)

    def blame(self, culprit: int | None = None, kind: type[FastPSError] = PeerLostError) -> str:
        """Fail an operation; give the error's text."""
        error = self.session._blame("w", kind("the operation failed"), culprit)
        assert type(error) is kind
        return str(error)


LEFT = PeerLeft("worker", 1)
TAKEN = PeerLeft("server", 1)  # with worker 1


@pytest.mark.parametrize(
    ("failed", "culprit"),
    [(None, 1), (1, None), (None, None)],
    ids=["server says", "link", "late"],
)
def test_who_left_is_named_at_once(failed, culprit):
    blamed = Blamed(failed=failed)
    blamed.hear(LEFT)
    assert "worker 1 left the job" in blamed.blame(culprit)
    assert blamed.client.waits == [False]
    assert not blamed.client.reports


@pytest.mark.parametrize("failed", [None, 1, 2])
@pytest.mark.parametrize("culprit", [None, 2])
def test_the_first_one_counts(failed, culprit):
    """Worker 2 ends its links, and then leaves, because server 1 has gone."""
    blamed = Blamed(failed=failed)
    blamed.hear(LEFT, TAKEN, PeerLeft("worker", 2), PeerLeft("server", 2))
    text = blamed.blame(culprit)
    assert "worker 1 left the job while others still had work, and server 1 with it" in text
    assert "worker 2" not in text
    assert not blamed.client.reports


def test_news_may_come_while_the_scheduler_is_asked():
    blamed = Blamed()
    blamed.client.heard = [LEFT, TAKEN]
    assert "worker 1 left the job" in blamed.blame(culprit=2)
    assert blamed.client.waits == [True]


def test_a_verdict_is_what_counts():
    blamed = Blamed(failed=2)
    blamed.client.text = "worker 2 (host, pid 5) is lost: it was killed"
    blamed.hear(LEFT)
    assert "worker 2 (host, pid 5) is lost" in blamed.blame()
    assert blamed.client.reports == [("server", 2)]


def test_a_link_that_nobody_explains_is_named():
    blamed = Blamed(failed=2)
    assert "the link to server 2 (in worker 2) broke" in blamed.blame()
    assert blamed.client.waits == [True]


def test_a_culprit_that_nobody_explains_keeps_the_error():
    blamed = Blamed()
    blamed.hear(LEFT)
    assert "the operation failed" in blamed.blame(culprit=2)
    assert blamed.client.waits == [True]


def test_the_end_of_the_job():
    blamed = Blamed()
    blamed.client.text = "the job is over: stopped"
    assert "the job is over: stopped" in blamed.blame(kind=ShutdownError)


def test_a_session_may_be_closed_meanwhile():
    blamed = Blamed(failed=2)
    blamed.client.close_on_report = blamed.session
    assert "the link to server 2 (in worker 2) broke" in blamed.blame()
    error = PeerLostError("the operation failed")
    assert blamed.session._blame("w", error) is error
