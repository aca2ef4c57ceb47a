# SPDX-License-Identifier: Apache-2.0
"""Workers join an elastic job: they wait, counted by nobody, and come last in a new view."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from control_driver import Driver
from test_membership_views import come, failed, job_of

from fastps.control.actions import Phase
from fastps.control.protocol import (
    Absent,
    AskClock,
    Barrier,
    ClockTold,
    Done,
    Failed,
    Joined,
    Newcomers,
    PeerLost,
    Regroup,
    Regrouped,
    Started,
    ViewJoined,
    ViewLost,
)


def elastic(*, size: int = 2, most: int = 4, servers: int = 0, least: int = 1) -> Driver:
    return Driver(
        size=size, num_servers=servers, elastic_min=least, elastic_max=most, lease_s=5,
        start_watch_s=20,
    )  # fmt: skip


def hello(driver: Driver, **changes: object) -> int:
    return driver.join(**({"is_newcomer": True, "size": 0} | changes))


def ready(driver: Driver, count: int = 1) -> list[int]:
    found = [hello(driver) for _ in range(count)]
    come(driver, *found)
    return found


def regroup(driver: Driver, *peers: int, leavers: Sequence[int] = ()) -> None:
    for peer in peers:
        number, generation = driver.request(), driver.machine.generation
        driver.say(peer, Regroup(number, "boundary", generation, 60.0, peer in leavers))


def generations(driver: Driver, peer: int) -> list[int]:
    found = driver.events(peer, Regrouped)
    return [one.generation for one in found if isinstance(one, Regrouped)]


def told(driver: Driver, peer: int) -> list[int]:
    found = driver.events(peer, Newcomers)
    return [one.count for one in found if isinstance(one, Newcomers)]


class TestWaiting:
    def test_a_newcomer_is_told_the_rank_that_it_would_have(self):
        driver = elastic()
        driver.start()
        for rank in (2, 3):
            joined = driver.last(hello(driver))
            assert isinstance(joined, Joined)
            assert (joined.rank, joined.size) == (rank, rank + 1)

    def test_workers_know_of_newcomers_that_are_ready(self):
        driver = elastic()
        (a, b), _ = driver.start()
        first, second = hello(driver), hello(driver)
        assert told(driver, a) == []
        come(driver, first)
        come(driver, second)
        driver.die(first)
        assert told(driver, a) == told(driver, b) == [1, 2, 1]
        assert len(driver.machine.members()) == 2

    def test_one_that_dies_changes_nothing(self):
        driver = elastic()
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        driver.die(newcomer)
        regroup(driver, a, b)
        assert generations(driver, a) == generations(driver, b) == [0]
        assert driver.machine.generation == 1
        assert not driver.events(a, ViewJoined) + driver.events(a, ViewLost)

    def test_one_that_is_silent_is_forgotten(self):
        driver = elastic()
        (a, _), _ = driver.start()
        (newcomer,) = ready(driver)
        driver.machine.pulse(newcomer, driver.now)
        for _ in range(3):
            for peer, _, _ in driver.machine.members():
                driver.machine.pulse(peer, driver.now)
            driver.advance(3.0)
        assert newcomer in driver.closed
        assert told(driver, a) == [1, 0]

    def test_a_pause_of_the_scheduler_is_no_silence_of_it(self):
        driver = elastic()
        driver.start()
        newcomer = hello(driver)
        driver.machine.pulse(newcomer, driver.now)
        driver.now += 8.0
        driver.do(driver.machine.slept(driver.now, 8.0))
        driver.advance(4.0)
        assert newcomer not in driver.closed
        driver.advance(2.0)
        assert newcomer in driver.closed

    def test_it_joins_once(self):
        driver = elastic()
        driver.start()
        newcomer = hello(driver)
        driver._peers -= 1
        assert hello(driver, is_newcomer=False) == newcomer
        assert [kind for _, kind in failed(driver, newcomer)] == ["protocol"]
        assert newcomer not in [peer for peer, _, _ in driver.machine.members()]

    def test_one_that_leaves_is_answered(self):
        driver = elastic()
        driver.start()
        (newcomer,) = ready(driver)
        number = driver.leave(newcomer)
        assert Done(number) in driver.sent[newcomer]
        assert [kind for _, kind in failed(driver, newcomer)] == ["shutdown"]
        assert newcomer in driver.closed

    def test_it_may_ask_for_the_time_and_nothing_else(self):
        driver = elastic()
        driver.start()
        newcomer = hello(driver)
        driver.say(newcomer, AskClock(50))
        driver.say(newcomer, Barrier(51, "b", 9.0))
        assert ClockTold(50, driver.now) in driver.sent[newcomer]
        assert failed(driver, newcomer) == [(51, "protocol")]

    def test_it_waits_for_the_first_start_too(self):
        driver = elastic()
        (newcomer,) = ready(driver)
        a, b = driver.enter(), driver.enter()
        assert job_of(driver, a).n_workers == 2
        assert told(driver, a) == [1]
        regroup(driver, a, b)
        come(driver, a, b)
        assert job_of(driver, newcomer).n_workers == 3

    def test_who_waits_for_long_is_logged_with_what_is_missing(self, caplog):
        driver = elastic()
        driver.start()
        (newcomer,) = ready(driver)
        for _ in range(8):
            driver.keep_alive()
            driver.machine.pulse(newcomer, driver.now)
            driver.advance(3.0)
        assert "waiting to join for 20 s" in caplog.text
        assert "elastic.run" in caplog.text


class TestRefusals:
    def refusal(self, driver: Driver, **changes: object) -> Failed:
        found = driver.last(hello(driver, **changes))
        assert isinstance(found, Failed)
        return found

    def test_a_job_without_a_maximum_takes_nobody(self):
        driver = elastic(most=0)
        driver.start()
        assert "--max" in self.refusal(driver).message

    def test_servers_do_not_join(self):
        driver = elastic()
        driver.start()
        assert "only workers" in self.refusal(driver, role="server").message

    def test_a_process_that_does_not_say_that_it_is_new_is_refused(self):
        driver = elastic()
        (a, b), _ = driver.start()
        ready(driver)
        regroup(driver, a, b)
        come(driver, a, b)
        refused = driver.last(driver.join())
        assert isinstance(refused, Failed)
        assert "--join" in refused.message

    def test_a_job_that_all_have_left_takes_nobody(self):
        driver = elastic()
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        for peer in (a, b):
            driver.leave(peer)
        assert [kind for _, kind in failed(driver, newcomer)] == ["shutdown"]
        assert newcomer in driver.closed
        assert self.refusal(driver).kind == "shutdown"

    def test_a_job_that_breaks_lets_them_go(self):
        driver = elastic(least=2)
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        driver.die(b)
        assert driver.events(a, PeerLost)
        assert [kind for _, kind in failed(driver, newcomer)] == ["peer_lost"]


class TestAdmission:
    def test_newcomers_come_last_in_the_next_view(self):
        driver = elastic(servers=1)
        (a, b), (server,) = driver.start()
        c, d = ready(driver, 2)
        regroup(driver, a)
        assert driver.machine.phase is Phase.RUNNING
        regroup(driver, b)
        assert generations(driver, a) == generations(driver, b) == [2]
        for peer in (a, b, server):
            (joined,) = driver.events(peer, ViewJoined)
            assert isinstance(joined, ViewJoined)
            assert joined.generation == 2
            assert f"pid {100 + c}" in joined.cause
        assert not driver.events(c, ViewJoined)
        come(driver, a, b, server)
        jobs = [job_of(driver, peer) for peer in (a, b, c, d, server)]
        assert [job.me for job in jobs] == [0, 1, 2, 3, 4]
        assert {job.generation for job in jobs} == {2}
        assert driver.records[-1].workers == (0, 1)
        assert driver.records[-1].has_boundary

    def test_ranks_close_up_before_newcomers_get_theirs(self):
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        driver.die(b)
        come(driver, a, c)
        (newcomer,) = ready(driver)
        regroup(driver, a, c)
        come(driver, a, c)
        assert [job_of(driver, peer).me for peer in (a, c, newcomer)] == [0, 1, 2]

    def test_more_than_the_maximum_wait_as_spares(self):
        driver = elastic(size=3, most=4)
        (a, b, c), _ = driver.start()
        first, spare = ready(driver, 2)
        regroup(driver, a, b, c)
        come(driver, a, b, c)
        assert told(driver, a) == [1]
        assert not driver.events(spare, Started)
        driver.die(b)
        come(driver, a, c, first)
        assert told(driver, first) == [1]
        regroup(driver, a, c, first)
        come(driver, a, c, first)
        assert [job_of(driver, peer).me for peer in (a, c, first, spare)] == [0, 1, 2, 3]

    def test_a_newcomer_that_dies_in_the_change_is_a_loss(self):
        driver = elastic()
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        regroup(driver, a, b)
        come(driver, a)
        driver.die(newcomer)
        assert [kind for _, kind in failed(driver, a)] == ["view"]
        come(driver, a, b)
        job = job_of(driver, b)
        assert (job.generation, job.n_workers) == (3, 2)

    def test_a_survivor_that_dies_in_the_change_is_a_loss(self):
        driver = elastic()
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        regroup(driver, a, b)
        driver.die(b)
        assert [kind for _, kind in failed(driver, newcomer)] == ["view"]
        come(driver, a, newcomer)
        job = job_of(driver, newcomer)
        assert (job.generation, job.n_workers, job.me) == (3, 2, 1)

    def test_a_loss_before_all_are_at_the_boundary_admits_nobody(self):
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        (newcomer,) = ready(driver)
        regroup(driver, a)
        driver.die(b)
        assert [kind for _, kind in failed(driver, a)] == ["view"]
        come(driver, a, c)
        assert not driver.events(newcomer, Started)
        assert told(driver, a) == [1, 1]

    def test_a_boundary_of_an_earlier_view_is_none(self):
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        ready(driver)
        driver.die(b)
        come(driver, a, c)
        driver.say(a, Regroup(77, "boundary", 1, 60.0))
        assert failed(driver, a)[-1] == (77, "view")

    def test_the_token_of_a_rank_lets_one_process_in_at_a_time(self, caplog):
        driver = elastic(most=8)
        (a, b), _ = driver.start()
        again, same = hello(driver, rank=1), hello(driver, rank=1)
        assert "waits to join as worker 1 until" in caplog.text
        come(driver, again, same)
        regroup(driver, a, b)
        assert told(driver, a) == []
        assert generations(driver, a) == [0]
        driver.die(b)
        come(driver, a)
        assert told(driver, a) == [1]
        regroup(driver, a)
        come(driver, a)
        assert [job_of(driver, peer).n_workers for peer in (a, again)] == [2, 2]
        assert not driver.events(same, Started)
        driver.die(again)
        come(driver, a)
        regroup(driver, a)
        come(driver, a)
        assert job_of(driver, same).me == 1

    def test_who_leaves_keeps_its_rank_until_it_has_left(self):
        driver = elastic()
        (a, b), _ = driver.start()
        again = hello(driver, rank=1)
        come(driver, again)
        regroup(driver, a, b, leavers=[b])
        driver.leave(b)
        come(driver, a)
        assert not driver.events(again, Started)
        regroup(driver, a)
        come(driver, a)
        assert job_of(driver, again).me == 1

    def test_who_has_proven_no_rank_gets_a_free_one(self):
        driver = elastic(most=8)
        (a, b), _ = driver.start()
        first, other, second = hello(driver), hello(driver, rank=2), hello(driver)
        come(driver, first, other, second)
        regroup(driver, a, b)
        come(driver, a, b)
        places = {peer: place for peer, _, place in driver.machine.members()}
        assert places == {a: 0, b: 1, first: 3, other: 2, second: 4}
        assert [job_of(driver, peer).me for peer in (first, other, second)] == [2, 3, 4]

    def test_nobody_joins_where_nobody_is_ready(self):
        driver = elastic()
        (a, b), _ = driver.start()
        hello(driver)
        regroup(driver, a, b)
        assert generations(driver, a) == [0]
        assert driver.machine.phase is Phase.RUNNING


class TestLeaving:
    def test_the_next_view_begins_when_who_leaves_has_left(self):
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        regroup(driver, a, b, c, leavers=[b])
        assert [one.survives for one in driver.events(a, ViewJoined)] == [True]
        (told_b,) = driver.events(b, ViewJoined)
        assert isinstance(told_b, ViewJoined)
        assert not told_b.survives
        assert told_b.cause.endswith("left")
        come(driver, a, c)
        assert len(driver.events(a, Started)) == 1
        number = driver.leave(b)
        assert Done(number) in driver.sent[b]
        assert [job_of(driver, peer).me for peer in (a, c)] == [0, 1]
        assert driver.machine.first_cause is None
        assert [one.has_boundary for one in driver.records] == [True]

    def test_one_joins_as_another_leaves(self):
        driver = elastic(size=2, most=2)
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        assert told(driver, a) == []  # there is no room
        regroup(driver, a, b, leavers=[a])
        driver.leave(a)
        come(driver, b)
        assert [job_of(driver, peer).me for peer in (b, newcomer)] == [0, 1]

    def test_nobody_leaves_where_too_few_would_go_on(self):
        driver = elastic(size=3, least=2)
        (a, b, c), _ = driver.start()
        regroup(driver, a, b, c, leavers=[b, c])
        assert generations(driver, b) == [0]
        assert driver.machine.phase is Phase.RUNNING

    def test_all_may_leave(self):
        driver = elastic(size=2, least=2)
        (a, b), _ = driver.start()
        regroup(driver, a, b, leavers=[a, b])
        for peer in (a, b):
            driver.leave(peer)
        driver.advance(100.0)
        assert driver.finish is not None
        assert driver.finish.code == 0

    def test_nobody_joins_where_all_leave(self):
        driver = elastic()
        (a, b), _ = driver.start()
        (newcomer,) = ready(driver)
        regroup(driver, a, b, leavers=[a, b])
        for peer in (a, b):
            driver.leave(peer)
        assert not driver.events(newcomer, Started)
        assert [kind for _, kind in failed(driver, newcomer)] == ["shutdown"]

    def test_who_stays_for_the_minimum_still_lets_others_join(self):
        driver = elastic(size=3, least=3, most=4)
        (a, b, c), _ = driver.start()
        (newcomer,) = ready(driver)
        regroup(driver, a, b, c, leavers=[b, c])
        come(driver, a, b, c)
        assert [job_of(driver, peer).me for peer in (a, b, c, newcomer)] == [0, 1, 2, 3]

    def test_a_job_that_is_not_elastic_has_no_boundary(self):
        driver = Driver(size=2, num_servers=0)
        (a, b), _ = driver.start()
        regroup(driver, a, b, leavers=[a])
        assert driver.machine.phase is Phase.RUNNING
        assert not driver.events(b, ViewJoined)

    def test_a_loss_in_the_change_does_not_call_one_back(self):
        """It has ended its view; the next one begins when it has left."""
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        regroup(driver, a, b, c, leavers=[c])
        driver.die(b)
        assert len(driver.events(a, ViewLost)) == 1
        assert not driver.events(c, ViewLost)
        come(driver, a)
        assert driver.machine.phase is Phase.LOBBY
        driver.leave(c)
        assert job_of(driver, a).n_workers == 1

    def test_who_leaves_cannot_come_to_the_next_view(self):
        driver = elastic(size=2)
        (a, b), _ = driver.start()
        regroup(driver, a, b, leavers=[b])
        come(driver, a, b)
        assert failed(driver, b)[-1][1] == "protocol"
        assert driver.machine.phase is Phase.LOBBY
        driver.leave(b)
        assert job_of(driver, a).n_workers == 1

    def test_who_leaves_does_not_count_among_those_that_go_on(self):
        driver = elastic(size=3, least=2)
        (a, b, c), _ = driver.start()
        regroup(driver, a, b, c, leavers=[c])
        driver.die(b)
        assert driver.events(a, PeerLost)

    @pytest.mark.parametrize("is_late", [False, True], ids=["first", "after the connection"])
    def test_its_launcher_says_how_one_that_has_joined_ended(self, is_late):
        driver = elastic()
        (a, b), _ = driver.start()
        new = hello(driver, rank=40_000, pid=77, is_watched=True)
        come(driver, new)
        regroup(driver, a, b)
        come(driver, a, b, new)
        for rank, pid in ((40_000, 78), (40_001, 77)):
            driver.say(0, Absent("worker", rank, "node", pid, "it crashed", True))
        assert not driver.events(a, ViewLost)
        gone = Absent("worker", 40_000, "node", 77, "it was killed by SIGKILL", True)
        for end in [lambda: driver.die(new), lambda: driver.say(0, gone)][:: 1 if is_late else -1]:
            end()
        (lost,) = driver.events(a, ViewLost)
        assert isinstance(lost, ViewLost)
        assert "it was killed by SIGKILL before it had left the job" in lost.lost.cause

    def test_the_end_of_one_that_was_to_join_ends_no_start(self):
        driver = elastic()
        waiting = driver.enter(rank=0)
        driver.say(0, Absent("worker", 1, "node", 77, "it was killed by SIGKILL", True))
        driver.advance(3.0)
        assert not failed(driver, waiting)
        driver.enter(rank=1)
        assert driver.machine.phase is Phase.RUNNING

    def test_one_that_dies_before_it_has_left_is_a_loss(self):
        driver = elastic(size=3)
        (a, b, c), _ = driver.start()
        regroup(driver, a, b, c, leavers=[b])
        driver.die(b)
        come(driver, a, c)
        assert job_of(driver, a).n_workers == 2
