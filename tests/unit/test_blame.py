# SPDX-License-Identifier: Apache-2.0
"""Whom a failed operation names: who left first, not those whose links end as a consequence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.config import load
from fastps.control.blame import (
    ENDINGS,
    PATIENCE_S,
    VERDICT_WAIT_S,
    VOTES,
    Failure,
    Inquest,
    Suspicions,
    Witness,
    cause_of_link,
    confirm_s,
    patience_s,
    pulse_s,
)
from fastps.control.protocol import Event, OwnerLeft, PeerLeft, ReportLost, TensorPoisoned
from fastps.errors import (
    FastPSError,
    MismatchError,
    PeerLostError,
    ShutdownError,
    Status,
    error_of,
)
from fastps.session.session import Session


class Client:
    """A control client that hears events while a verdict is waited for."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, bool]] = []
        self.waits: list[bool] = []  # whether each verdict was waited for
        self.heard: list[Event] = []  # during the next wait
        self.take: Callable[[Event], None] = lambda event: None
        self.text: str | None = None
        self.close_on_report: Session | None = None
        self.is_silent = False
        self.address = "10.0.0.1:9"

    def begin_probe(self) -> Callable[[], bool]:
        """Answer, or not."""
        return lambda: not self.is_silent

    def report_lost(self, member: int, cause: str, *, is_owner: bool) -> None:
        """Note a report."""
        self.reports.append((member, is_owner))
        if self.close_on_report is not None:
            self.close_on_report._client = None  # as close() does first, on another thread

    def dispute(self, name: str, version: int, started: str, *, timeout_s: float) -> MismatchError:
        """Answer as the scheduler does where nobody else disputes."""
        for event in self.heard:
            self.take(event)
        return MismatchError(f"tensor {name!r}: others did not say in time")

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
        self.failed = failed
        self.client.take = self.session._on_event

    def hear(self, *events: Event) -> None:
        """Take events before the failure."""
        for event in events:
            self.session._on_event(event)

    def blame(self, culprit: int | None = None, kind: type[FastPSError] = PeerLostError) -> str:
        """Fail an operation; give the error's text."""
        status = Status.PEER_LOST if kind is PeerLostError else Status.SHUTDOWN
        name = f"server {self.failed} (in worker {self.failed})"
        said = "" if culprit is not None else "the operation failed"
        failure = Failure("w", status, said, culprit, self.failed, name)
        error = self.session._blame(failure)
        assert type(error) is kind
        return str(error)


LEFT = PeerLeft(1)
TAKEN = OwnerLeft(1)


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
    blamed.hear(LEFT, TAKEN, PeerLeft(2), OwnerLeft(2))
    text = blamed.blame(culprit)
    assert "worker 1 left the job while others still had work, and the server in it too" in text
    assert "worker 2" not in text
    assert not blamed.client.reports


def test_news_may_come_while_the_scheduler_is_asked():
    blamed = Blamed()
    blamed.client.heard = [LEFT, TAKEN]
    assert "worker 1 left the job" in blamed.blame(culprit=2)
    assert blamed.client.waits == [True]


def test_who_hears_late_of_a_poisoned_tensor_says_why_it_is_one():
    """Others heard before us, and ended what we have in flight; they dispute nothing."""
    blamed = Blamed()
    blamed.client.heard = [TensorPoisoned(3, "w", "worker 1 declared 'w' with shape (7,)")]
    layout = SimpleNamespace(dtype=1, shape=(3,))
    ticket = SimpleNamespace(
        name="w", version=2, culprit=None, tensor=SimpleNamespace(layout=layout)
    )
    blamed.session.connections = SimpleNamespace(  # type: ignore[assignment]
        failure=lambda name, status, culprit: Failure(name, status, culprit=culprit),
        fail_tensor=lambda number, status: None,
    )
    error = blamed.session._explain(ticket, -1, Status.MISMATCH, 1.0)
    assert type(error) is MismatchError
    assert "shape (7,)" in str(error)


def test_a_verdict_is_what_counts():
    blamed = Blamed(failed=2)
    blamed.client.text = "worker 2 (host, pid 5) is lost: it was killed"
    blamed.hear(LEFT)
    assert "worker 2 (host, pid 5) is lost" in blamed.blame()
    assert blamed.client.reports == [(2, True)]


def test_a_link_that_nobody_explains_is_named():
    blamed = Blamed(failed=2)
    assert "the link to server 2 (in worker 2) broke" in blamed.blame()
    assert blamed.client.waits == [True]


def test_a_culprit_that_nobody_explains_is_named():
    blamed = Blamed()
    blamed.hear(LEFT)
    assert "worker 2 left the job while others still had work" in blamed.blame(culprit=2)
    assert blamed.client.waits == [True]


@pytest.mark.parametrize(
    ("failed", "culprit", "seen"),
    [
        (None, 2, "worker 2 gave up, and"),
        (2, None, "the link to server 2 (in worker 2) broke, and"),
        (None, None, "the operation failed, and"),
    ],
)
def test_no_honest_worker_is_blamed_where_the_scheduler_is_silent(failed, culprit, seen):
    blamed = Blamed(failed=failed)
    blamed.client.is_silent = True
    text = blamed.blame(culprit)
    assert f"{seen} the scheduler at 10.0.0.1:9 does not answer" in text
    assert "left the job" not in text
    assert "join()" not in text


def test_the_end_of_the_job():
    blamed = Blamed()
    blamed.client.text = "the job is over: stopped"
    assert "the job is over: stopped. Restart the job" in blamed.blame(kind=ShutdownError)


def test_a_session_may_be_closed_meanwhile():
    blamed = Blamed(failed=2)
    blamed.client.close_on_report = blamed.session
    assert "the link to server 2 (in worker 2) broke" in blamed.blame()
    error = blamed.session._blame(Failure("w", Status.PEER_LOST, "the operation failed"))
    assert str(error) == "tensor 'w' cannot be reduced: the operation failed. Restart the job"


@pytest.mark.parametrize("status", [item for item in Status if item])
def test_no_bare_number_reaches_the_user(status):
    error = Witness().error(Failure("w", status))
    assert type(error) is type(error_of(status, "")) or status is Status.LINK_TIMEOUT
    assert "'w'" in str(error)
    assert str(int(status)) not in str(error)
    assert "status" not in str(error)
    assert ENDINGS.get(status, status.name) in str(error)


@pytest.mark.parametrize("news", [(), (LEFT,)], ids=["alone", "others left too"])
def test_shutdown_is_named_and_needs_no_restart(news):
    witness = Witness()
    for event in news:
        witness.on_event(event)
    error = witness.error(Failure("A", Status.SHUTDOWN))
    assert str(error) == (
        "tensor 'A' cannot be reduced: shutdown() was called before it was complete"
    )


def test_a_tensor_declared_differently_says_so_whatever_its_operation_did():
    witness = Witness()
    witness.on_event(TensorPoisoned(3, "w", "worker 1 declared another shape"))
    for status in (Status.MISMATCH, Status.SHUTDOWN, Status.PEER_LOST):
        error = witness.error(Failure("w", status), "worker 2 is lost")
        assert type(error) is MismatchError
        assert str(error) == "worker 1 declared another shape"


def test_what_a_worker_reports():
    witness = Witness(me=5)
    broken = Failure("w", Status.PEER_LOST, owner=1, why=" (retries)")
    assert witness.report(broken) == ReportLost(
        1, "its link to a worker broke (retries)", is_owner=True
    )
    ours = Failure("w", Status.PEER_LOST, owner=1, why=" (retries)", is_ours=True)
    assert witness.report(ours) == ReportLost(5, "its own links broke (retries)")
    assert witness.report(Failure("w", Status.SHUTDOWN, owner=1)) is None
    assert witness.report(Failure("w", Status.PEER_LOST)) is None
    witness.on_event(PeerLeft(1))
    assert witness.report(broken) is None
    assert witness.report(ours) is not None


def test_a_server_says_why_a_link_ended():
    assert cause_of_link("server 2", Status.SYS, "") == "its link to server 2 broke (status SYS)"
    assert "FASTPS_POOL_BYTES" in cause_of_link("server 2", Status.NOMEM, "")
    assert cause_of_link("server 2", Status.SYS, "RDMA: no").endswith("; RDMA: no")


def test_suspicions_say_what_both_sides_said():
    suspicions = Suspicions()
    suspicions.add((7, "server 1"), (3, "worker 0"), "it closed", 10.0)
    assert suspicions.of(7) == "worker 0 lost its data connection to it: it closed"
    assert suspicions.of(3) is None
    assert suspicions.cause(3, "killed") == (
        "killed; it lost its data connection to server 1: it closed"
    )
    assert not suspicions.due(10.9)
    assert [item.suspect for item in suspicions.due(11.0)] == [7]
    suspicions.drop(7)
    assert suspicions.deadlines() == []


def test_heartbeats_follow_the_lease() -> None:
    assert pulse_s(load({"lease_s": 0.9}, {})) == pytest.approx(0.15)
    assert pulse_s(load({"lease_s": 60}, {})) == 0.5
    assert pulse_s(load({"lease_s": 60, "heartbeat_s": 20}, {})) == 20


def test_patience_is_short_where_the_lease_is() -> None:
    assert patience_s(0.9) == pytest.approx(0.3)
    assert patience_s(10) == PATIENCE_S


@given(
    asked=st.sets(st.integers(0, 9), min_size=VOTES, max_size=5),
    said=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=20),
    is_late=st.booleans(),
)
def test_two_that_reach_a_silent_member_decide_and_no_two_that_do_not(
    asked, said, is_late
) -> None:
    inquest = Inquest(asked, until=5.0)
    heard: dict[int, bool] = {}
    for peer, is_reached in said:
        assert inquest.add(peer, is_reached=is_reached) == (peer in asked)
        if peer in asked:
            heard.setdefault(peer, is_reached)
    n_reach = sum(heard.values())
    decided = False if is_late or len(heard) == len(asked) else None
    if n_reach >= VOTES:
        decided = True
    assert inquest.is_denied_by_most == (len(heard) - n_reach > n_reach)
    assert inquest.is_alive(5.0 if is_late else 4.9) == decided
    assert inquest.denied_by() == [peer for peer, is_reached in heard.items() if not is_reached]


def test_a_silent_member_is_asked_for_within_its_lease() -> None:
    assert confirm_s(0.9) == pytest.approx(0.3)
    assert confirm_s(10.0) == 0.5
