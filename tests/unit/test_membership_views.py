# SPDX-License-Identifier: Apache-2.0
"""An elastic job goes on in a new view when it loses a member."""

from __future__ import annotations

import pytest
from control_driver import Driver, make_spec

from fastps.control.actions import Phase
from fastps.control.protocol import (
    AwaitStart,
    Done,
    Failed,
    Job,
    PeerLost,
    ReportLost,
    Started,
    ViewLost,
)


def elastic(least: int = 1, *, servers: int = 1, size: int = 3) -> Driver:
    return Driver(size=size, num_servers=servers, elastic_min=least, lease_s=5)


def job_of(driver: Driver, peer: int) -> Job:
    started = driver.events(peer, Started)[-1]
    assert isinstance(started, Started)
    return started.job


def come(driver: Driver, *peers: int) -> None:
    for peer in peers:
        driver.wait(peer)


def failed(driver: Driver, peer: int) -> list[tuple[int, str]]:
    found = driver.events(peer, Failed)
    return [(one.request, one.kind) for one in found if isinstance(one, Failed)]


class TestLoss:
    def test_the_others_begin_a_view_with_ranks_that_close_up(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        assert job_of(driver, c).generation == 1
        driver.die(b)
        for peer in (a, c, server):
            (lost,) = driver.events(peer, ViewLost)
            assert isinstance(lost, ViewLost)
            assert (lost.generation, lost.survives) == (2, True)
            assert (lost.lost.role, lost.lost.rank) == ("worker", 1)
        assert driver.machine.phase is Phase.LOBBY
        come(driver, a, server)
        assert len(driver.events(a, Started)) == 1
        come(driver, c)
        jobs = [job_of(driver, peer) for peer in (a, c, server)]
        assert {job.generation for job in jobs} == {2}
        assert [job.me for job in jobs] == [0, 1, 2]
        assert [job.n_workers for job in jobs] == [2, 2, 2]
        assert driver.machine.phase is Phase.RUNNING

    def test_what_was_asked_in_the_old_view_fails(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        barrier, declared = driver.barrier(a), driver.declare(c, make_spec("w"))
        driver.die(b)
        assert failed(driver, a) == [(barrier, "view")]
        assert failed(driver, c) == [(declared, "view")]
        late = driver.barrier(c)
        assert failed(driver, c)[-1] == (late, "view")
        come(driver, a, c, server)
        again = [driver.barrier(peer) for peer in (a, c)]
        for peer, number in zip((a, c), again, strict=True):
            assert Done(number) in driver.sent[peer]

    def test_another_loss_before_all_have_come_begins_again(self):
        driver = elastic(size=4)
        (a, b, c, d), (server,) = driver.start()
        driver.die(b)
        come(driver, a, server)
        driver.die(c)
        assert [kind for _, kind in failed(driver, a)] == ["view"]
        come(driver, a, d, server)
        job = job_of(driver, d)
        assert (job.generation, job.n_workers, job.me) == (3, 2, 1)

    def test_a_server_is_lost_as_a_worker_is(self):
        driver = elastic(servers=2)
        workers, (first, second) = driver.start()
        driver.die(first)
        come(driver, *workers, second)
        job = job_of(driver, workers[0])
        assert len(job.members) == 4
        assert len(job.owners) == 1

    def test_a_server_that_leaves_in_order_is_lost_too(self):
        driver = elastic(servers=2)
        workers, (first, second) = driver.start()
        number = driver.leave(first)
        assert Done(number) in driver.sent[first]
        come(driver, *workers, second)
        assert job_of(driver, workers[0]).generation == 2
        assert len(job_of(driver, workers[0]).owners) == 1

    def test_a_worker_may_be_lost_while_it_leaves(self):
        driver = elastic(servers=0)
        driver.is_apart = True  # so it waits for the others, which need the server in it
        (a, b, c), _ = driver.start()
        driver.leave(b)
        driver.die(b)
        come(driver, a, c)
        assert job_of(driver, a).n_workers == 2

    @pytest.mark.parametrize("is_leaving", [False, True])
    @pytest.mark.parametrize("is_apart", [False, True])
    def test_the_job_ends_in_order_when_the_last_is_lost(self, is_leaving, is_apart):
        driver = elastic(2, servers=int(not is_apart))
        driver.is_apart = is_apart  # then who has left waits until no server is needed
        workers, _ = driver.start()
        asked = [driver.leave(peer) for peer in workers[: 2 + is_leaving]]
        driver.die(workers[2])
        for peer, number in zip(workers[:2], asked, strict=False):
            assert Done(number) in driver.sent[peer]
            assert not driver.events(peer, PeerLost)
        for _ in range(4):
            driver.keep_alive()
            driver.advance(100.0)
        assert driver.finish is not None
        assert driver.finish.code == 0

    def test_the_last_is_missed_where_too_few_left_in_order(self):
        driver = elastic(3)
        workers, _ = driver.start()
        for peer in workers[:2]:
            driver.leave(peer)
        driver.die(workers[2])
        assert driver.machine.first_cause is not None

    def test_below_the_least_number_the_job_ends(self):
        driver = elastic(3)
        (a, b, c), _ = driver.start()
        driver.die(b)
        assert driver.machine.phase is Phase.BROKEN
        for peer in (a, c):
            assert driver.events(peer, PeerLost)
            assert not driver.events(peer, ViewLost)

    def test_too_few_are_left_while_a_view_changes(self):
        driver = elastic(2)
        (a, b, c), (server,) = driver.start()
        driver.die(b)
        come(driver, a, server)
        driver.die(c)
        assert driver.machine.phase is Phase.BROKEN
        assert [kind for _, kind in failed(driver, a)] == ["peer_lost"]
        (lost,) = driver.events(a, PeerLost)
        assert isinstance(lost, PeerLost)
        assert lost.rank == 2
        assert "; before, worker 1 (" in lost.cause  # of which c's end may be a consequence

    def test_who_was_silent_is_told_that_it_is_out(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        for _ in range(10):
            for peer in (a, c, server):
                driver.machine.pulse(peer, driver.now)
            driver.advance(2.0)
        (told,) = driver.events(b, ViewLost)
        assert isinstance(told, ViewLost)
        assert not told.survives
        assert b in driver.closed


class TestEvidence:
    def test_the_two_ends_of_a_broken_link_are_not_both_lost(self):
        driver = elastic(size=4)
        (a, b, c, d), (server,) = driver.start()
        driver.say(b, ReportLost(2, "its link broke"))
        driver.say(c, ReportLost(1, "its link broke"))
        driver.keep_alive()
        driver.advance(3.0)
        come(driver, a, b, d, server)
        assert c in driver.closed
        assert job_of(driver, b).n_workers == 3
        assert driver.machine.generation == 2

    def test_a_death_explains_the_links_that_broke_after_it(self):
        """The launcher of the dead one is dead too, and does not say how it ended."""
        driver = elastic(size=3)
        server = driver.enter("server", is_watched=True)
        a, b, c = (driver.enter() for _ in range(3))
        driver.say(a, ReportLost(1, "its link broke"))
        driver.advance(0.01)
        driver.die(server)
        driver.keep_alive()
        driver.advance(3.0)
        come(driver, a, b, c)
        assert not {a, b, c} & driver.closed
        assert job_of(driver, b).n_workers == 3

    def test_a_broken_link_of_an_earlier_view_accuses_nobody(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        driver.die(b)
        come(driver, a, c, server)
        driver.say(a, ReportLost(1, "its link broke", generation=1))
        driver.keep_alive()
        driver.advance(3.0)
        assert driver.machine.generation == 2
        driver.say(a, ReportLost(1, "its link broke", generation=2))
        driver.keep_alive()
        driver.advance(3.0)
        assert driver.machine.generation == 3


class TestComing:
    def test_a_survivor_that_does_not_come_is_lost(self):
        driver = Driver(size=3, num_servers=0, elastic_min=1, lease_s=5, start_timeout_s=20)
        (a, b, c), _ = driver.start()
        driver.die(b)
        driver.say(a, AwaitStart(driver.request(), 60.0))
        for _ in range(7):
            driver.keep_alive()
            driver.advance(3.0)
        told = driver.events(c, ViewLost)[-1]
        assert isinstance(told, ViewLost)
        assert not told.survives
        assert "did not come to the next view" in told.lost.cause
        come(driver, a)
        assert job_of(driver, a).n_workers == 1

    def test_a_survivor_that_does_not_wait_ends_no_wait_of_another(self):
        driver = elastic(size=4, servers=0)
        (a, b, c, d), _ = driver.start()
        driver.die(b)
        driver.say(a, AwaitStart(driver.request(), 8.0))
        driver.say(c, AwaitStart(driver.request(), 0.0))
        driver.keep_alive()
        driver.advance(1.0)
        assert driver.events(c, ViewLost)[-1].survives is False
        come(driver, a, d)
        assert [job_of(driver, peer).n_workers for peer in (a, d)] == [2, 2]

    def test_a_survivor_tells_where_it_listens_now(self):
        driver = elastic(servers=0)
        driver.is_apart = True
        (a, b, c), _ = driver.start()
        driver.die(b)
        driver.say(a, AwaitStart(driver.request(), 60.0, 4242, "name"))
        come(driver, c)
        first, second = job_of(driver, c).workers
        assert (first.port, first.unix) == (4242, "name")
        assert second.port == 7000 + c

    def test_a_survivor_may_leave_instead(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        driver.die(b)
        come(driver, a, server)
        number = driver.leave(c)
        assert Done(number) in driver.sent[c]
        assert job_of(driver, a).n_workers == 1

    @pytest.mark.parametrize("most", [0, 4])
    def test_who_came_too_late_is_refused_and_is_no_survivor(self, most):
        """It waits for the next job, which a worker that has left may begin with it."""
        driver = Driver(size=2, num_servers=1, elastic_min=1, elastic_max=most, lease_s=5)
        (a, b), (server,) = driver.start()
        driver.leave(a)
        late = driver.enter()
        assert not failed(driver, late)
        driver.die(server)
        assert [kind for _, kind in failed(driver, late)] == ["config"]
        assert late in driver.closed
        assert not driver.events(late, ViewLost)
        come(driver, b)
        assert job_of(driver, b).n_workers == 1

    def test_who_came_too_late_does_not_count_among_those_that_go_on(self):
        driver = elastic(2, servers=0)
        (a, b, c), _ = driver.start()
        driver.leave(a)
        driver.enter()
        driver.die(b)
        assert driver.machine.phase is Phase.BROKEN
        assert driver.events(c, PeerLost)

    def test_all_survivors_may_leave_instead(self):
        driver = elastic()
        (a, b, c), _ = driver.start()
        driver.die(b)
        for peer in (a, c):
            driver.leave(peer)
        driver.advance(100.0)
        assert driver.finish is not None
        assert driver.finish.code == 0

    def test_newcomers_are_refused(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        driver.die(b)
        for phase in (Phase.LOBBY, Phase.RUNNING):
            assert driver.machine.phase is phase
            refused = driver.last(driver.join())
            assert isinstance(refused, Failed)
            assert "takes no process instead of the lost one" in refused.message
            come(driver, *(() if phase is Phase.RUNNING else (a, c, server)))

    def test_the_survivors_may_begin_another_generation(self):
        driver = elastic()
        (a, b, c), (server,) = driver.start()
        driver.die(b)
        come(driver, a, c, server)
        for peer in (a, c):
            driver.leave(peer)
        again = [driver.enter(rank=rank) for rank in (0, 2)]
        assert [job_of(driver, peer).me for peer in again] == [0, 1]

    def test_all_agree_on_the_least_number(self):
        driver = elastic()
        refused = driver.last(driver.join(elastic_min=2))
        assert isinstance(refused, Failed)
        assert "fastps-run --min" in refused.message
