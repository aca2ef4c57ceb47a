# SPDX-License-Identifier: Apache-2.0
"""What members that lie can do to honest ones, in jobs that go on after a loss.

One has no honest member lost by what it says, and one by links that it cuts. Several have as many
lost as they are, at most.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection

import pytest
from control_driver import Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastps.control.actions import Phase
from fastps.control.commits import key_of
from fastps.control.protocol import (
    Absent,
    Confirm,
    Confirmed,
    PeerLost,
    ReportLost,
    ResultsCommitted,
    ResultsLanded,
    ViewLost,
)

SIZE = 5
LEASE_S = 5.0
SOON_S = 1e-3  # between two messages
LIAR = 2  # its rank
KINDS = {"elastic": {"elastic_min": 1}, "reweight": {}}
PICK = st.integers(0, 8)
OTHERS = [rank for rank in range(SIZE) if rank != LIAR]


class Job:
    """A job of workers that answer as they should; those of a view await the next one."""

    def __init__(
        self, kind: str, *, servers: int = 0, size: int = SIZE, liars: Collection[int] = (LIAR,),
        has_datagrams: bool = True,
    ) -> None:  # fmt: skip
        self.kind, self.size, self.liars = kind, size, liars
        self.has_datagrams = has_datagrams  # else a firewall drops them between members
        self.dead: set[int] = set()  # silent
        self.cut: set[int] = set()  # silent too, but others reach them
        self.claim: int | None = None  # what liars say of all that they are asked about
        self.driver = Driver(size=size, num_servers=servers, lease_s=LEASE_S, **KINDS[kind])
        for _ in range(servers):
            self.driver.enter("server", cookie=b"c" * 32)
        goes_on = kind == "reweight"
        self.peers = [self.driver.enter(goes_on=goes_on, cookie=b"c" * 32) for _ in range(size)]
        self.answered: dict[int, int] = {}
        self.driver.keep_alive()
        self.answer()

    def lives(self, rank: int) -> bool:
        return any(peer == self.peers[rank] for peer, _, _ in self.driver.machine.members())

    @property
    def lost(self) -> list[int]:
        return [rank for rank in range(self.size) if not self.lives(rank)]

    @property
    def honest_lost(self) -> set[int]:
        return set(self.lost) - set(self.liars) - self.dead

    def number(self, rank: int) -> int | None:
        """Return the number of a worker in the view that runs."""
        return self.driver.machine._peers[self.peers[rank]].number

    def report(self, reporter: int, suspect: int, cause: str = "reset") -> None:
        if self.lives(reporter) and self.lives(suspect) and self.number(suspect) is not None:
            message = ReportLost(self.number(suspect) or 0, cause)
            self.driver.say(self.peers[reporter], message)
            self.answer()
            self.driver.advance(SOON_S)

    def answer(self, *, apart_from: int | None = None) -> None:
        """Let workers answer questions about others, and come to the next view."""
        for rank in range(self.size):
            peer = self.peers[rank]
            for message in self.driver.sent[peer][self.answered.get(peer, 0) :]:
                if isinstance(message, Confirm) and rank not in self.dead:
                    dead = [self.peers[one] for one in self.dead]
                    truth = 1 if self.has_datagrams and message.suspect not in dead else None
                    said = self.claim if rank in self.liars else truth
                    self.driver.say(peer, Confirmed(message.suspect, said))
                elif rank == apart_from or rank in self.dead:
                    continue
                elif isinstance(message, ViewLost) and message.survives:
                    self.driver.wait(peer)
            self.answered[peer] = len(self.driver.sent[peer])

    def live(self, seconds: float = 2.0) -> None:
        """Let time pass in which all that live send heartbeats."""
        for _ in range(round(seconds / 0.25)):
            for peer, _, _ in self.driver.machine.members():
                if peer not in [self.peers[rank] for rank in self.dead | self.cut]:
                    self.driver.machine.pulse(peer, self.driver.now)
            self.driver.advance(0.25)
            self.answer()


@pytest.fixture(params=KINDS)
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


class TestReports:
    def test_a_member_that_reports_all_others_is_lost_alone(self, job):
        for rank in OTHERS:
            job.report(LIAR, rank)
        job.live()
        assert job.lost == [LIAR]
        assert job.driver.machine.phase is Phase.RUNNING

    def test_the_reporter_hears_why(self, job):
        job.report(LIAR, 0, "so it says")
        job.live()
        (told,) = [one for one in job.driver.sent[job.peers[LIAR]]
                   if isinstance(one, PeerLost | ViewLost)]  # fmt: skip
        text = str(told.lost if isinstance(told, ViewLost) else told)
        assert "it lost its data connection to worker 0: so it says" in text
        assert "nobody else says so, and worker 0 still sends heartbeats" in text

    def test_two_that_say_the_same_are_believed(self, job):
        job.report(0, LIAR)
        job.report(3, LIAR)
        job.live()
        assert job.lost == [LIAR]

    def test_a_member_that_others_cannot_reach_is_lost_on_one_report(self, job):
        driver, suspect = job.driver, job.peers[LIAR]
        before = {rank: len(driver.events(job.peers[rank], Confirm)) for rank in OTHERS}
        driver.say(job.peers[0], ReportLost(job.number(LIAR), "reset"))
        asked = [
            rank for rank, n in before.items() if len(driver.events(job.peers[rank], Confirm)) > n
        ]
        assert asked == [1, 3, 4]
        for rank in asked[:2]:
            driver.say(job.peers[rank], Confirmed(suspect, None))
        for _ in range(8):
            driver.keep_alive()
            driver.advance(0.25)
        assert job.lost == [LIAR]

    def test_a_silent_member_is_lost_on_one_report(self, job):
        driver = job.driver
        driver.say(job.peers[0], ReportLost(job.number(LIAR), "retries exceeded"))
        for _ in range(8):
            for rank in OTHERS:
                driver.machine.pulse(job.peers[rank], driver.now)
            driver.advance(0.25)
        assert job.lost == [LIAR]

    def test_a_silent_cut_of_links_costs_one_honest_member_at_most(self, job):
        for rank in OTHERS:
            job.report(rank, LIAR)  # which has closed its link to it, and says nothing
            job.live()
        assert len(job.lost) == 2
        assert LIAR in job.lost

    def test_what_a_member_reports_explains_what_others_say_of_it(self):
        """Where there are views, who loses one link ends all, so that others miss it."""
        job = Job("elastic")
        for victim in OTHERS[:2]:
            for rank in OTHERS:
                if rank != victim:
                    job.report(rank, victim)
            job.report(victim, LIAR)
            job.live()
        assert len(job.lost) == 2
        assert LIAR in job.lost

    @pytest.mark.parametrize("lie", [0, 1, 2])
    def test_a_liar_makes_no_circle_of_reports_that_has_others_lost(self, lie):
        """It reports the one that misses its victim, before, between or after their reports."""
        job = Job("elastic")
        reports = [(0, LIAR), (1, 0)]
        reports.insert(lie, (LIAR, 1))
        for reporter, suspect in reports:
            job.report(reporter, suspect)
        job.live()
        assert set(job.lost) < {0, LIAR}

    def test_reports_of_one_that_died_meanwhile_count_no_more(self, job):
        job.report(LIAR, 0)
        job.driver.die(job.peers[LIAR])
        job.answer()
        job.live()
        assert job.lost == [LIAR]

    def test_a_silent_member_explains_what_others_say_of_its_victim(self):
        """Worker 0 has ended all links, since that to the silent worker 1 has ended."""
        job = Job("elastic")
        job.report(3, 0)
        job.report(0, 1, "retries exceeded")
        job.dead = {1}
        job.live()
        assert job.lost == [1]

    def test_a_member_does_not_speak_as_a_launcher(self, job):
        """It knows the others' process ids, by which a launcher's report counts at once."""
        for rank in OTHERS:
            pid = job.driver.machine._peers[job.peers[rank]].join.pid
            gone = Absent("worker", rank, "node", pid, "it was killed by SIGKILL")
            job.driver.say(job.peers[LIAR], gone)
        assert not job.lost
        assert job.peers[LIAR] in job.driver.closed

    def test_a_flood_of_reports_is_kept_once(self, job):
        for number in range(100):
            job.report(LIAR, number % 2, f"reset {number}")
        assert len(job.driver.machine._suspicions._all) == 2


@pytest.mark.parametrize("kind", KINDS)
class TestFirewall:
    """Datagrams do not pass between members, so that those who are asked reach nobody."""

    def test_a_member_that_reports_all_others_is_lost_alone(self, kind):
        job = Job(kind, has_datagrams=False)
        for rank in OTHERS:
            job.report(LIAR, rank)
            job.live()
        assert job.lost == [LIAR]
        assert job.driver.machine.phase is Phase.RUNNING

    def test_a_silent_cut_of_links_costs_one_honest_member_at_most(self, kind):
        job = Job(kind, has_datagrams=False)
        for rank in OTHERS:
            job.report(rank, LIAR)
            job.live()
        assert len(job.lost) == 2
        assert LIAR in job.lost

    def test_several_have_fewer_honest_members_lost_than_they_are(self, kind):
        job = Job(kind, size=9, liars=(1, 4, 8), has_datagrams=False)
        for rank in range(9):
            for liar in job.liars:
                if rank != liar:
                    job.report(liar, rank)
            job.live()
        assert len(job.honest_lost) < len(job.liars)

    def test_a_silent_member_is_lost_all_the_same(self, kind):
        job = Job(kind, has_datagrams=False)
        job.dead = {4}
        job.live(2 * LEASE_S)
        assert job.lost == [4]


@pytest.mark.parametrize("kind", KINDS)
class TestSilentMembers:
    """What two liars say of a member that the scheduler does not hear."""

    def test_who_is_reached_by_others_lives_whatever_they_say(self, kind):
        job = Job(kind, size=6, liars=(0, 1))
        job.cut = {5}
        job.live(4 * LEASE_S)
        assert not job.lost

    def test_a_dead_one_is_lost_though_they_say_to_reach_it(self, kind):
        job = Job(kind, size=6, liars=(0, 1))
        job.claim = 1
        job.dead = {5}
        job.live(4 * LEASE_S)
        assert job.lost == [5]

    def test_who_lives_again_is_not_held_to_what_was_said_before(self, kind):
        job = Job(kind, size=6, liars=(0, 1))
        job.claim = 1
        for _ in range(3):
            job.dead = {5}
            job.live(2 * LEASE_S)
            job.dead = set()
            job.live(LEASE_S)
        assert not job.lost


@pytest.fixture(params=[(5, (2, 4)), (9, (2, 5)), (9, (1, 4, 8))], ids=str)
def size_and_liars(request: pytest.FixtureRequest) -> tuple[int, tuple[int, ...]]:
    return request.param


class TestSeveralLiars:
    """They have fewer honest members lost than they are, or as many with links that they cut."""

    @pytest.fixture
    def job(self, kind: str, size_and_liars: tuple[int, tuple[int, ...]]) -> Job:
        size, liars = size_and_liars
        return Job(kind, size=size, liars=liars)

    @pytest.fixture(params=KINDS)
    def kind(self, request: pytest.FixtureRequest) -> str:
        return request.param

    def honest(self, job: Job) -> list[int]:
        return [rank for rank in range(job.size) if rank not in job.liars]

    def test_that_report_all_others_one_after_the_other(self, job):
        for rank in self.honest(job):
            for liar in job.liars:
                job.report(liar, rank)
            job.live()
        assert len(job.honest_lost) < len(job.liars)
        assert job.driver.machine.phase is Phase.RUNNING

    def test_that_report_all_others_at_once(self, job):
        for _ in range(job.size):
            for rank in self.honest(job):
                for liar in job.liars:
                    job.report(liar, rank)
            job.live()
        assert len(job.honest_lost) < len(job.liars)
        assert set(job.liars) <= set(job.lost)

    def test_of_which_one_reports_and_others_say_the_same_when_they_are_asked(self, job):
        for rank in self.honest(job) * 2:
            for liar in job.liars:
                job.report(liar, rank)
                job.live()
        assert len(job.honest_lost) < len(job.liars)
        assert set(job.liars) <= set(job.lost)

    def test_that_cut_links_and_say_to_reach_no_victim(self, job):
        """Where there are views, a victim ends all its links, so that others report it too."""
        for victim in self.honest(job):
            liar = next(filter(job.lives, job.liars), None)
            if liar is None:
                break
            for rank in set(self.honest(job)) - {victim} if job.kind == "elastic" else ():
                job.report(rank, victim)
            job.report(victim, liar)
            job.live()
        assert len(job.honest_lost) <= len(job.liars)

    def test_have_nobody_lost_for_a_silent_member_that_they_say_to_reach(self, kind):
        """A report of an honest member has it lost, though its lease began anew meanwhile."""
        job = Job(kind, liars=(0, 1))
        job.claim = 1
        job.dead = {4}
        job.live(LEASE_S - 1.0)
        job.report(3, 4)
        job.live(3.0)
        assert job.lost == [4]


def test_a_server_that_the_job_needs_stays():
    job = Job("reweight", servers=1)
    server = len(job.peers)  # the number after those of the workers
    job.driver.say(job.peers[LIAR], ReportLost(server, "reset"))
    job.live()
    assert job.lost == [LIAR]
    assert job.driver.machine.first_cause is None


@pytest.mark.parametrize("claim", [None, 1])
def test_a_server_that_the_job_needs_stays_though_two_of_five_report_it(claim):
    job = Job("reweight", servers=1, liars=(2, 4))
    job.claim = claim
    for liar in job.liars:
        job.driver.say(job.peers[liar], ReportLost(len(job.peers), "reset"))
        job.answer()
    job.live()
    assert job.lost == [2, 4]
    assert job.driver.machine.first_cause is None


def test_a_server_that_most_workers_report_is_lost():
    job = Job("reweight", servers=1)
    for rank in (0, 1, 3):
        job.driver.say(job.peers[rank], ReportLost(len(job.peers), "reset"))
        job.answer()
    job.live()
    cause = job.driver.machine.first_cause
    assert cause is not None
    assert cause.role == "server"


class TestLandings:
    def test_a_worker_commits_nothing_early(self):
        job = Job("elastic")
        generation = job.driver.machine.generation
        for members in [(LIAR,), (0, LIAR), ()]:
            job.driver.say(job.peers[LIAR], ResultsLanded(generation, ("7#1#",), members))
        job.driver.say(job.peers[0], ResultsLanded(generation, ("7#1#",), (0, 1, LIAR)))
        for rank in (0, 1):
            assert not job.driver.events(job.peers[rank], ResultsCommitted)
        job.driver.say(job.peers[1], ResultsLanded(generation, ("7#1#",), (0, 1, LIAR)))
        assert not job.driver.events(job.peers[1], ResultsCommitted)

    def test_a_worker_spoils_no_number_of_others_in_the_log_of_views(self):
        """A job that is made again waits for all that the log has."""
        job = Job("elastic")
        generation = job.driver.machine.generation
        for rank, number, members in [
            (LIAR, 9, (LIAR,)), (0, 1, (0, 1, LIAR)), (1, 1, (0, 1, LIAR)),
            (LIAR, 1, (0, 1, LIAR)), (LIAR, 8, (LIAR,)),
        ]:  # fmt: skip
            entries = (f"7#{number}#",)
            job.driver.say(job.peers[rank], ResultsLanded(generation, entries, members))
        job.driver.die(job.peers[4])
        (record,) = job.driver.records
        assert record.committed == {key_of("7#", frozenset({0, 1, LIAR}), SIZE): 1}

    @pytest.mark.parametrize("order", list(itertools.permutations([0, 1, LIAR])))
    def test_who_says_another_set_than_all_others_is_lost(self, order):
        job = Job("elastic")
        generation = job.driver.machine.generation
        for rank in order:
            members = (0, LIAR) if rank == LIAR else (0, 1, LIAR)
            job.driver.say(job.peers[rank], ResultsLanded(generation, ("7#1#",), members))
            job.live()
        job.live(12.0)
        assert job.lost == [LIAR]
        (told,) = job.driver.events(job.peers[LIAR], ViewLost)
        assert isinstance(told, ViewLost)
        text = "that operation '7#1#' is of workers [0, 2], and worker"
        assert text in told.lost.cause
        assert "that it is of workers [0, 1, 2]" in told.lost.cause

    @pytest.mark.parametrize("members", [(0, 1), (LIAR, 7)])
    def test_who_speaks_of_others_operations_is_lost_at_once(self, members):
        job = Job("elastic")
        message = ResultsLanded(job.driver.machine.generation, ("7#1#",), members)
        job.driver.say(job.peers[LIAR], message)
        assert job.lost == [LIAR]
        (told,) = job.driver.events(job.peers[LIAR], ViewLost)
        assert isinstance(told, ViewLost)
        assert "it broke the control protocol: it reports results of workers" in told.lost.cause


class LiarMachine(RuleBasedStateMachine):
    """One worker says anything; links that it cuts make honest ones report it."""

    kind = "elastic"

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[int] = set()  # ranks whose links the liar has cut
        self.comes = True

    @initialize(has_datagrams=st.booleans())
    def begin(self, has_datagrams: bool) -> None:
        self.job = Job(self.kind, has_datagrams=has_datagrams)

    def is_liar_there(self) -> bool:
        return self.job.lives(LIAR)

    def say(self, message: object) -> None:
        self.job.driver.advance(SOON_S)
        self.job.driver.say(self.job.peers[LIAR], message)
        self.job.answer(apart_from=None if self.comes else LIAR)

    @precondition(is_liar_there)
    @rule(number=st.integers(0, SIZE), is_owner=st.booleans())
    def report(self, number: int, is_owner: bool) -> None:
        self.say(ReportLost(number, "reset", is_owner))

    @precondition(is_liar_there)
    @rule(rank=st.sampled_from(OTHERS), reached_ms=st.sampled_from([None, 1]))
    def confirm(self, rank: int, reached_ms: int | None) -> None:
        self.say(Confirmed(self.job.peers[rank], reached_ms))

    @precondition(is_liar_there)
    @rule(
        entry=st.sampled_from(["1#1#", "2#1#", "w#1"]),
        members=st.frozensets(st.integers(0, SIZE - 1)).map(sorted).map(tuple),
    )
    def land(self, entry: str, members: tuple[int, ...]) -> None:
        self.say(ResultsLanded(self.job.driver.machine.generation, (entry,), members))

    @rule(entry=st.sampled_from(["1#1#", "2#1#"]), rank=st.sampled_from(OTHERS))
    def land_truly(self, entry: str, rank: int) -> None:
        """Each channel is of all that are not its own rank."""
        job, driver = self.job, self.job.driver
        is_out = rank == int(entry[0]) or driver.machine.phase is Phase.LOBBY
        if self.kind != "elastic" or is_out or not job.lives(rank):
            return
        members = tuple(sorted(job.number(one) or 0 for one in range(SIZE)
                               if job.lives(one) and one != int(entry[0])))  # fmt: skip
        if len(members) > 1:
            self.cut.add(rank)  # where only one says what is true, its word stands against a lie
            landed = ResultsLanded(driver.machine.generation, (entry,), members)
            driver.say(job.peers[rank], landed)
            job.answer()

    @precondition(is_liar_there)
    @rule(
        rank=st.sampled_from(OTHERS),
        others=st.lists(st.sampled_from(OTHERS), unique=True),
        is_first=st.booleans(),
    )
    def cut_a_link(self, rank: int, others: list[int], is_first: bool) -> None:
        """Where there are views, who loses a link ends all, and others report it too."""
        self.job.live(0.25 * (not is_first))  # no liar knows in which order messages arrive
        is_over = self.job.driver.machine.phase is not Phase.RUNNING
        if is_over or not (self.job.lives(rank) and self.is_liar_there()):
            return
        self.cut.add(rank)
        reports = [(rank, LIAR)]
        if self.kind == "elastic":
            reports += [(other, rank) for other in others if other != rank]
        for reporter, suspect in reports if is_first else reversed(reports):
            self.job.report(reporter, suspect)
        self.job.live(0.25 * (not is_first))

    @rule(comes=st.booleans())
    def come_or_not(self, comes: bool) -> None:
        self.comes = comes

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.live(seconds)

    @invariant()
    def honest_members_live(self) -> None:
        lost = set(self.job.lost) - {LIAR}
        assert lost <= self.cut
        assert len(lost) <= 1


class ReweightLiarMachine(LiarMachine):
    """The same with FASTPS_ON_LOSS=reweight, where ranks stay."""

    kind = "reweight"


class SeveralLiarsMachine(RuleBasedStateMachine):
    """Several workers lie together, links break only where they cut them, and workers die."""

    kind = "elastic"

    @initialize(size=st.integers(4, 9), has_datagrams=st.booleans(), data=st.data())
    def begin(self, size: int, has_datagrams: bool, data: st.DataObject) -> None:
        ranks = st.integers(0, size - 1)
        self.liars = data.draw(st.sets(ranks, min_size=1, max_size=(size - 1) // 2))
        self.job = Job(self.kind, size=size, liars=self.liars, has_datagrams=has_datagrams)
        self.missed: dict[int, float] = {}  # since when links of silent members have ended
        self.silent: list[int] = []

    def rank(self, pick: int, *, lies: bool | None = None) -> int | None:
        """Return a worker that lives, if there is one; lies: only liars, or only honest ones."""
        job = self.job
        ranks = [rank for rank in range(job.size) if job.lives(rank) and rank not in job.dead
                 and lies in (None, rank in self.liars)]  # fmt: skip
        return ranks[pick % len(ranks)] if ranks else None

    def report(self, reporter: int | None, suspect: int | None) -> None:
        if None not in (reporter, suspect) and reporter != suspect:
            self.job.report(reporter, suspect)

    @rule(pick=PICK, of=st.lists(PICK, max_size=3), together=st.booleans())
    def liars_report(self, pick: int, of: list[int], together: bool) -> None:
        one = self.rank(pick, lies=True)
        for suspect in map(self.rank, of):
            for liar in self.liars if together else [one]:
                self.report(liar, suspect)

    @rule(claim=st.sampled_from([None, 1]))
    def liars_answer(self, claim: int | None) -> None:
        self.job.claim = claim

    @rule(pick=PICK, of=PICK, claim=st.sampled_from([None, 1]))
    def a_liar_answers_unasked(self, pick: int, of: int, claim: int | None) -> None:
        liar, suspect = self.rank(pick, lies=True), self.rank(of)
        if liar is not None and suspect is not None:
            job = self.job
            job.driver.say(job.peers[liar], Confirmed(job.peers[suspect], claim))
            job.answer()

    @rule(pick=PICK, of=PICK, others=st.sets(PICK), is_first=st.booleans())
    def a_liar_cuts_a_link(self, pick: int, of: int, others: set[int], is_first: bool) -> None:
        """Where there are views, its victim ends all links, and others report that."""
        self.job.live(0.25 * (not is_first))  # no liar knows in which order messages arrive
        liar, victim = self.rank(pick, lies=True), self.rank(of, lies=False)
        if liar is None or self.job.driver.machine.phase is not Phase.RUNNING:
            return
        reports = [(victim, liar)]
        if self.kind == "elastic":
            reports += [(self.rank(other, lies=False), victim) for other in sorted(others)]
        for reporter, suspect in reports if is_first else reversed(reports):
            self.report(reporter, suspect)
        self.job.live(0.25 * (not is_first))

    @rule(entry=st.sampled_from(["1#1#", "2#1#"]), order=st.randoms(), less=st.sets(PICK))
    def a_result_lands(self, entry: str, order: random.Random, less: set[int]) -> None:
        """It is of all workers, and liars say that some of them do not need it."""
        job, machine = self.job, self.job.driver.machine
        if self.kind != "elastic" or machine.phase is not Phase.RUNNING:
            return
        ranks = [rank for rank in range(job.size) if job.lives(rank) and rank not in job.dead]
        everybody = frozenset(filter(job.lives, range(job.size)))
        order.shuffle(ranks)
        generation = machine.generation
        for rank in ranks:
            of = everybody - {one % job.size for one in less if rank in self.liars} | {rank}
            numbers = [job.number(one) for one in sorted(of) if job.lives(one)]
            if job.lives(rank) and machine.generation == generation and len(numbers) > 1:
                message = ResultsLanded(
                    generation, (entry,), tuple(n for n in numbers if n is not None)
                )
                job.driver.say(job.peers[rank], message)
                job.answer()

    @rule(pick=PICK, is_silent=st.booleans())
    def a_worker_dies(self, pick: int, is_silent: bool) -> None:
        job, rank = self.job, self.rank(pick)
        left = set(filter(job.lives, range(job.size))) - job.dead - self.liars - {rank}
        if rank is None or len(left) < 2:
            return
        job.dead.add(rank)
        if is_silent:
            self.silent.append(rank)
        else:
            job.driver.die(job.peers[rank])
            job.answer()
            assert not job.lives(rank)

    @precondition(lambda self: self.silent)
    @rule(witness=PICK)
    def its_link_ends(self, witness: int) -> None:
        rank = self.silent[-1]
        self.missed.setdefault(rank, self.job.driver.now)
        self.report(self.rank(witness, lies=False), rank)

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.job.live(seconds)
        for rank in self.missed:  # those of a new view miss it too
            self.report(self.rank(0, lies=False), rank)

    @invariant()
    def few_honest_members_are_lost(self) -> None:
        assert len(self.job.honest_lost) <= len(self.liars)

    @invariant()
    def the_dead_are_lost_in_time(self) -> None:
        now = self.job.driver.now
        late = [rank for rank, since in self.missed.items() if now > since + 2 * LEASE_S]
        assert not any(map(self.job.lives, late))


class ReweightSeveralLiarsMachine(SeveralLiarsMachine):
    """The same with FASTPS_ON_LOSS=reweight."""

    kind = "reweight"


TestElasticLiar = LiarMachine.TestCase
TestElasticLiar.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestReweightLiar = ReweightLiarMachine.TestCase
TestReweightLiar.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestElasticSeveralLiars = SeveralLiarsMachine.TestCase
TestElasticSeveralLiars.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestReweightSeveralLiars = ReweightSeveralLiarsMachine.TestCase
TestReweightSeveralLiars.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
