# SPDX-License-Identifier: Apache-2.0
"""A scheduler takes over from one that died: by what the members report, without sockets."""

from __future__ import annotations

from typing import Any

from control_driver import Driver
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fastps.control.actions import Phase
from fastps.control.journal import Journal, PendingMeeting
from fastps.control.membership import LAUNCHER, Membership
from fastps.control.protocol import (
    Absent,
    Barrier,
    Blob,
    BlobData,
    Done,
    Failed,
    Job,
    Join,
    PeerLeft,
    Regrouped,
    Rejoined,
    ResultsCommitted,
    Started,
    ViewJoined,
    ViewLost,
)

SETTINGS: dict[str, Any] = {"size": 3, "num_servers": 1, "elastic_min": 1, "elastic_max": 4}


class After(Driver):
    """A driver of the scheduler that takes over."""

    def __init__(self, term: int = 2, **settings: object) -> None:
        super().__init__(**(SETTINGS | settings))
        self.machine = Membership(self.config, now=self.now, takes_over=(term, 0))

    def come_back(
        self, me: int, known_job: Job, journal: Journal | None = None, **changes: Any
    ) -> int:
        """Let a member of a job come back; give its peer."""
        self._peers += 1
        member = known_job.members[me]
        join = Join(
            0, member.role, member.place, None, None, 0, 0, member.host, member.port, member.pid,
            member.hostname, member.host_id, "boot/1", member.unix, elastic_min=1,
        )  # fmt: skip
        known = Journal() if journal is None else journal
        known.told = max(known.told, known_job.generation)
        job = replace(known_job, me=me)
        report = known.rejoin(self.request(), join, job, term=1, leaves=False)
        self.say(self._peers, replace(report, **changes))
        return self._peers

    def rejoined(self, peer: int) -> Rejoined:
        """Give the answer to a member that came back."""
        return next(one for one in self.sent[peer] if isinstance(one, Rejoined))


def job_before(**settings: object) -> Job:
    """Give a job of three workers and a server, as its first member knows it."""
    driver = Driver(**(SETTINGS | settings))
    workers, _ = driver.start()
    return next(one.job for one in driver.sent[workers[0]] if isinstance(one, Started))


def test_the_view_ends_for_all_when_all_have_come_back():
    job, driver = job_before(), After()
    peers = [driver.come_back(me, job) for me in (3, 0, 1)]
    assert not driver.sent
    peers.append(driver.come_back(2, job))
    for peer in peers:
        assert isinstance(driver.sent[peer][0], Rejoined)
        lost = driver.last(peer)
        assert isinstance(lost, ViewLost)
        assert lost.survives
        assert lost.generation == job.generation + 1
        assert lost.lost.role == "scheduler"
    for peer in peers:
        driver.wait(peer)
    jobs = [driver.last(peer).job for peer in peers]
    assert [one.me for one in jobs] == [3, 0, 1, 2]  # ranks are those of before
    assert jobs[0].members == job.members
    assert {(one.generation, one.view) for one in jobs} == {(job.generation + 1, 2)}
    assert [one.workers for one in driver.records] == [(0, 1, 2)]


def test_a_member_that_ended_is_lost_at_once_and_one_that_is_late_in_time():
    job, driver = job_before(), After()
    gone = job.members[1]
    driver.say(LAUNCHER, Absent("worker", 1, gone.hostname, gone.pid, "it was killed by SIGKILL"))
    peers = [driver.come_back(me, job) for me in (0, 3)]
    assert not driver.sent
    driver.advance(driver.config.lease_s + 5)
    for peer in peers:
        found = [str(one.lost) for one in driver.events(peer, ViewLost)]
        assert "worker 1 (node, pid" in found[1]
        assert found[1].endswith("killed by SIGKILL")
        assert "worker 2 (node, pid" in found[2]
        assert "did not come back within 15 s" in found[2]
        driver.wait(peer)
    assert [len(driver.last(peer).job.members) for peer in peers] == [2, 2]
    late = driver.come_back(2, job)
    assert driver.last(late).kind == "peer_lost"
    assert late in driver.closed


def test_too_few_are_left():
    job, driver = job_before(elastic_min=3), After(elastic_min=3)
    gone = job.members[1]
    driver.say(LAUNCHER, Absent("worker", 1, gone.hostname, gone.pid, "it was killed"))
    for me in (0, 2, 3):
        driver.come_back(me, job)
    assert driver.machine.phase is Phase.BROKEN
    assert str(driver.machine.first_cause).startswith(f"worker 1 (node, pid {gone.pid}) is lost")


def test_a_worker_that_left_is_not_awaited():
    job, driver = job_before(), After()
    journal = Journal()
    journal.take(PeerLeft(1))
    peers = [driver.come_back(me, job, journal) for me in (0, 3)]
    gone = job.members[2]
    driver.say(
        LAUNCHER,
        Absent("worker", 2, gone.hostname, gone.pid, "it ended", has_succeeded=True),
    )
    for peer in peers:
        assert [one.lost.role for one in driver.events(peer, ViewLost)] == ["scheduler"]
        driver.wait(peer)
    assert driver.last(peers[0]).job.size == 1
    assert driver.machine.first_cause is None


def test_a_worker_that_leaves_meanwhile_has_its_results_counted():
    job, driver = job_before(), After()
    journal = Journal()
    journal.take(ResultsCommitted(("w#7",)))
    leaver = driver.come_back(0, job, journal, leaves=True)
    peers = [driver.come_back(me, job) for me in (1, 2, 3)]
    assert driver.sent[leaver] == [driver.rejoined(leaver)]
    assert leaver in driver.closed
    assert driver.rejoined(peers[0]).committed == (((), ("w#7",)),)
    for peer in peers:
        driver.wait(peer)
    assert driver.last(peers[0]).job.size == 2


def test_who_is_in_no_latest_view_is_refused():
    """A worker was lost, and the next view began for one of the others at least."""
    job, driver = job_before(), After()
    members = tuple(one for one in job.members if one.place != 1 or one.role == "server")
    later = replace(job, members=members, size=2, owners=(2,), generation=2, view=2)
    stale = driver.come_back(1, job)
    behind = driver.come_back(0, job)
    peers = [driver.come_back(1, later), driver.come_back(2, later), behind]
    assert driver.last(stale).kind == "peer_lost"
    assert stale in driver.closed
    for peer in peers:
        assert driver.last(peer).generation == 3
        driver.wait(peer)
    assert {driver.last(peer).job.view for peer in peers} == {3}


def test_generations_that_were_announced_are_not_used_again():
    job, driver = job_before(), After()
    journal = Journal()
    journal.take(ViewJoined(9, "worker 3 joined"))
    peers = [driver.come_back(0, job, journal), *(driver.come_back(me, job) for me in (1, 2, 3))]
    for peer in peers:  # and all count anew, as one of them may have begun to
        assert isinstance(driver.last(peer), ViewJoined)
        assert driver.last(peer).generation == 10
    assert driver.records[0].has_boundary


def test_wrong_reports_are_refused():
    job, driver = job_before(), After()
    stale = driver.come_back(0, job, term=2)
    assert "has heard the scheduler of term 2" in driver.last(stale).message
    liar = driver.come_back(0, job, job=replace(job, me=1))
    assert "reports the job of worker 1" in driver.last(liar).message
    assert {stale, liar} <= driver.closed


def test_a_scheduler_that_took_over_from_nobody_refuses_all():
    driver = Driver(**SETTINGS)
    driver.start()
    job = job_before()
    join = driver.machine._peers[1].join
    driver.say(99, Journal().rejoin(5, join, job, term=0, leaves=False))
    assert isinstance(driver.last(99), Failed)


def test_a_stop_lets_go_of_those_that_came_back():
    job, driver = job_before(), After()
    peer = driver.come_back(0, job)
    driver.do(driver.machine.stop("a signal", driver.now))
    assert driver.last(peer).kind == "shutdown"
    assert driver.finish is not None


def test_meetings_that_ended_for_some_end_for_all():
    """Also an object, of which the root has no answer with data."""
    journals = [Journal() for _ in range(2)]
    for journal in journals:
        journal.note(PendingMeeting(Barrier(1, "b", 1.0)), Done(1))
    journals[0].note(PendingMeeting(Barrier(2, "b", 1.0)), Done(2))
    journals[0].note(PendingMeeting(Blob(3, "o", 0, b"data", 1.0)), Done(3))
    journals[0].note(PendingMeeting(Barrier(4, "c", 1.0)), Failed(4, "stall", "late"))
    job, driver = job_before(size=2), After(size=2)
    peers = [driver.come_back(me, job, journal) for me, journal in enumerate(journals)]
    driver.come_back(2, job)
    assert driver.rejoined(peers[0]).met == ()
    asked = [PendingMeeting(one) for one in (
        Blob(7, "o", 0, None, 1.0), Barrier(8, "b", 1.0), Barrier(9, "b", 1.0),
        Barrier(10, "c", 1.0),
    )]  # fmt: skip
    found = journals[1].answered(asked, driver.rejoined(peers[1]).met)
    assert [answer for _, answer in found] == [BlobData(7, b"data"), Done(8)]


def test_a_journal_keeps_the_last_objects_only(monkeypatch):
    monkeypatch.setattr("fastps.control.journal.MAX_MET_BYTES", 10)
    journal = Journal()
    for request in range(4):
        journal.note(PendingMeeting(Blob(request, "o", 0, None, 1.0)), BlobData(request, b"12345"))
    journal.note(PendingMeeting(Barrier(5, "b", 1.0)), Regrouped(5, 2))
    join = Join(0, "worker", 0, 0, 0, 0, 0, "", 0, 1, "", "", "", "")
    report = journal.rejoin(1, join, job_before(), term=1, leaves=False)
    assert [number for _, number, _ in report.met] == [3, 4, 1]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=12), st.data())
def test_all_members_know_of_the_same_commits(commits, data):
    """Whatever part of the last ones each of them was told, in order."""
    job = job_before()
    entries: list[tuple[tuple[int, ...], str]] = []
    numbers = [0] * 5
    for name, kind in commits:
        numbers[name] += 1
        ending = "#" * (kind > 0)
        members = ((), (), (0, 2))[kind]
        entries.append((members, f"{name}{'ab'[kind > 0]}#{numbers[name]}{ending}"))
    known: list[set[str]] = []
    driver = After()
    peers = []
    for me in range(3):
        mine = [one for one in entries if not one[0] or me in one[0]]
        told = mine[: data.draw(st.integers(max(len(mine) - 2, 0), len(mine)), label=f"told {me}")]
        journal = Journal()
        for members, entry in told:
            journal.take(ResultsCommitted((entry,), members))
        known.append({entry for _, entry in told})
        peers.append(driver.come_back(me, job, journal))
    driver.come_back(3, job)
    for me, peer in enumerate(peers):
        known[me] |= {one for _, some in driver.rejoined(peer).committed for one in some}
    for members, entry in entries:
        knows = [entry in known[me] for me in (members or range(3))]
        assert all(knows) or not any(knows) or not entry.endswith("#")
    for name in {entry.partition("#")[0] for _, entry in entries if not entry.endswith("#")}:
        last = [max((int(one.split("#")[1]) for one in some if one.startswith(f"{name}#")
                     and not one.endswith("#")), default=0) for some in known]  # fmt: skip
        assert len(set(last)) == 1, (name, last)


# ---- a member that lies about the view ----


def come_all(driver: After, job: Job, others: tuple[int, ...]) -> list[int]:
    """Let the other members come back, and see that they go on together."""
    peers = [driver.come_back(me, job) for me in others]
    for peer in peers:
        assert isinstance(driver.sent[peer][0], Rejoined)
        assert isinstance(driver.last(peer), ViewLost)
        assert driver.last(peer).survives
        driver.wait(peer)
    return peers


def test_who_comes_back_first_does_not_begin_alone():
    """A worker says that all others have left."""
    job, driver = job_before(), After()
    liar = driver.come_back(0, job, left=(1, 2, 3))
    assert not driver.sent
    peers = come_all(driver, job, (1, 2, 3))
    driver.wait(liar)
    assert [len(driver.last(peer).job.members) for peer in [liar, *peers]] == [4] * 4


def test_who_reports_a_later_view_alone_is_lost_alone():
    """A worker comes back first, and reports a view without the others."""
    for generation in (2, 7, 1 << 40):
        job, driver = job_before(), After()
        alone = replace(
            job, generation=generation, members=job.members[:1], size=1, owners=(), view=2
        )
        liar = driver.come_back(0, alone)
        assert not driver.sent
        peers = come_all(driver, job, (1, 2, 3))
        assert "know of no such view" in driver.last(liar).message
        assert liar in driver.closed
        jobs = [driver.last(peer).job for peer in peers]
        assert [[one.place for one in job.members] for job in jobs] == [[1, 2, 0]] * 3
        assert "know of no such view" in str(driver.events(peers[0], ViewLost)[1].lost)


def check_that_worker_2_is_lost(driver: After, peers: list[int]) -> None:
    """See that those who came back go on without it, once it is late."""
    driver.advance(driver.config.lease_s + 5)
    for peer in peers:
        assert isinstance(driver.sent[peer][0], Rejoined)
        driver.wait(peer)
    assert [one.place for one in driver.last(peers[0]).job.members] == [0, 1, 0]


def test_nobody_comes_back_as_another():
    """A worker gives host name and process of others, with its own rank; and says they ended."""
    job, driver = job_before(), After()
    peers = [driver.come_back(0, job)]
    for victim in (job.members[0], job.members[1]):
        driver.say(
            LAUNCHER,
            Absent("worker", 2, victim.hostname, victim.pid, "it ended", has_succeeded=True),
        )
        others = list(job.members)
        others[2] = replace(victim, place=2, rank=2)
        driver.come_back(2, replace(job, members=tuple(others)))
    assert peers[0] not in driver.sent
    peers += [driver.come_back(me, job) for me in (1, 3)]
    check_that_worker_2_is_lost(driver, peers)


def test_one_member_has_one_voice():
    """It comes back on five connections, as five processes of one view."""
    job, driver = job_before(), After()
    crowd = tuple(replace(job.members[2], pid=pid) for pid in range(5))
    for me in range(5):
        driver.come_back(me, replace(job, generation=2, view=2, members=crowd, owners=()))
    peers = [driver.come_back(me, job) for me in (0, 1, 3)]
    check_that_worker_2_is_lost(driver, peers)


def test_a_rank_that_another_process_has_now_is_refused_to_the_one_before():
    job, driver = job_before(), After()
    again = [*job.members]
    again[2] = replace(again[2], pid=7)
    later = replace(job, generation=2, view=2, members=tuple(again))
    early = driver.come_back(2, job)
    peers = [driver.come_back(2, later)]
    late = driver.come_back(2, job)
    for stale in (early, late):
        assert "taken for lost" in driver.last(stale).message
    peers += [driver.come_back(me, later) for me in (0, 1, 3)]
    assert {driver.last(peer).generation for peer in peers} == {3}


def test_a_view_of_which_one_member_alone_has_heard_goes_on():
    """The scheduler died when it had told one of three that the view has begun."""
    job, driver = job_before(), After()
    later = replace(job, members=job.members[1:], size=2, owners=(2,), generation=2, view=2)
    journal = Journal()
    journal.told = 2
    peers = [driver.come_back(2, job, journal), driver.come_back(0, later)]
    assert not driver.sent
    peers.append(driver.come_back(3, job, journal))
    driver.say(
        LAUNCHER, Absent("worker", 0, job.members[0].hostname, job.members[0].pid, "it ended")
    )
    for peer in peers:
        assert driver.last(peer).generation == 3
        driver.wait(peer)
    assert {driver.last(peer).job.view for peer in peers} == {3}


def test_what_a_member_reports_is_bounded():
    for committed in (
        (((), ("w#1",)),) * (1 << 19) + (((), ()),),
        (((0,) * (1 << 23), ()),),
    ):
        job, driver = job_before(), After()
        liar = driver.come_back(0, job, committed=committed)
        assert "it reports 1048577 results" in driver.last(liar).message
        assert liar in driver.closed


def test_no_number_of_a_view_is_beyond_what_can_be():
    job, driver = job_before(), After()
    liar = driver.come_back(0, job, told=1 << 61)
    assert f"reports that {1 << 61} was announced" in driver.last(liar).message
