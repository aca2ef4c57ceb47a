# SPDX-License-Identifier: Apache-2.0
"""Members and schedulers that fall silent, one situation at a time."""

from __future__ import annotations

import pytest
from control_driver import Driver

from fastps.control.protocol import (
    Confirm,
    Confirmed,
    Done,
    Job,
    PeerLost,
    Started,
    Unheard,
    ViewLost,
)
from fastps.control.silence import UNREACHED


def lost_of(driver: Driver, peer: int) -> PeerLost:
    (lost,) = driver.events(peer, PeerLost)
    assert isinstance(lost, PeerLost)
    return lost


def job_of(driver: Driver, peer: int) -> Job:
    last = driver.events(peer, Started)[-1]
    assert isinstance(last, Started)
    return last.job


class TestSilence:
    """A silent member is dead if others do not reach it either."""

    def started(self, n: int = 4, **hosts: str) -> tuple[Driver, list[int]]:
        driver = Driver(size=n, num_servers=0, lease_s=10)
        probes = {"cookie": b"c" * 32, "probe_host": "10.0.0.1", "probe_port": 9}
        workers = [
            driver.enter(rank=rank, hostname=hosts.get(f"w{rank}", "a"), **probes)
            for rank in range(n)
        ]
        return driver, workers

    def silence(self, driver: Driver, *silent: int) -> None:
        """Let only the others beat until they are asked, half a second before the lease ends."""
        driver.keep_alive()
        driver.advance(9)
        for peer, _, _ in driver.machine.members():
            if peer not in silent:
                driver.machine.pulse(peer, driver.now)
        driver.advance(0.5)

    def test_two_that_reach_it_keep_it_alive(self) -> None:
        driver, workers = self.started()
        self.silence(driver, workers[3])
        for peer in workers[:3]:
            (asked,) = driver.events(peer, Confirm)
            assert asked == Confirm(workers[3], "10.0.0.1", 9, b"c" * 32, 0.5)
        driver.say(workers[0], Confirmed(workers[3], 1))
        driver.say(workers[1], Confirmed(workers[3], 0))
        driver.say(workers[2], Confirmed(workers[3], None))
        driver.advance(7)
        assert driver.machine.first_cause is None
        for peer in workers[:3]:
            driver.machine.pulse(peer, driver.now)
        driver.advance(2.9)  # it is still silent: they are asked again
        assert len(driver.events(workers[0], Confirm)) == 2
        driver.machine.pulse(workers[3], driver.now)
        driver.advance(0.6)
        assert driver.machine.first_cause is None

    @pytest.mark.parametrize("answers", [2, 1, 0])
    def test_two_that_do_not_reach_it_or_the_time_make_it_dead(self, answers: int) -> None:
        driver, workers = self.started()
        self.silence(driver, workers[3])
        driver.say(workers[1], Confirmed(workers[3], 5))
        for peer in (workers[0], workers[2])[:answers]:
            driver.say(peer, Confirmed(workers[3], None))
        driver.advance(0.4)
        assert driver.machine.first_cause is None
        driver.advance(0.1)  # the lease ends
        lost = lost_of(driver, workers[0])
        assert lost.rank == 3
        assert "silent for longer than its lease of 10 s" in lost.cause
        assert ("worker 0, worker 2 cannot reach it either" in lost.cause) == (answers == 2)

    def test_a_small_job_asks_nobody(self) -> None:
        driver, workers = self.started(3)
        self.silence(driver, workers[2])
        assert driver.machine.first_cause is None
        driver.advance(0.5)
        assert lost_of(driver, workers[0]).rank == 2

    def test_a_heartbeat_ends_the_questions(self) -> None:
        driver, workers = self.started()
        self.silence(driver, workers[3])
        driver.machine.pulse(workers[3], driver.now)
        for peer in workers[:2]:
            driver.say(peer, Confirmed(workers[3], None))
        driver.advance(1)
        assert driver.machine.first_cause is None

    def test_a_machine_whose_members_are_all_silent_is_named(self) -> None:
        driver, workers = self.started(5, w3="b", w4="b")
        self.silence(driver, *workers[3:])
        driver.advance(0.6)
        lost = lost_of(driver, workers[0])
        assert lost.rank == 3
        assert "machine b does not answer: all 2 members there are silent" in lost.cause

    def test_the_silence_of_all_other_machines_is_that_of_the_schedulers(self) -> None:
        driver, workers = self.started(4, w1="b", w2="c", w3="d")
        self.silence(driver, *workers[1:])
        driver.advance(0.6)
        lost = lost_of(driver, workers[0])
        assert (lost.role, lost.host) == ("scheduler", driver.config.scheduler_host)
        assert "its machine is cut off: it hears no member on other machines" in lost.cause
        assert "(b, c, d)" in lost.cause

    def test_a_start_that_waits_names_the_machine_that_is_cut_off(self) -> None:
        driver = Driver(size=4, num_servers=0, lease_s=10)
        workers = [driver.enter(rank=rank, hostname="abc"[rank]) for rank in range(3)]
        driver.keep_alive()
        self.silence(driver, *workers[1:])
        driver.advance(1.0)
        assert lost_of(driver, workers[0]).role == "scheduler"

    def test_processes_that_end_on_two_machines_are_no_silence(self) -> None:
        driver, workers = self.started(3, w1="b", w2="c")
        self.silence(driver)
        for peer in workers[1:]:
            driver.die(peer)
        assert lost_of(driver, workers[0]).rank == 1

    def test_who_gets_no_processor_is_waited_for(self) -> None:
        driver = Driver(size=2, num_servers=0, lease_s=1)
        workers = [driver.enter(pid=11), driver.enter(pid=12)]
        driver.keep_alive()
        driver.states[12] = "R"

        def pass_time(seconds: float) -> None:
            for _ in range(round(seconds / 0.2)):
                driver.advance(0.2)
                driver.machine.pulse(workers[0], driver.now)

        pass_time(9.0)
        assert driver.machine.first_cause is None
        driver.machine.pulse(workers[1], driver.now)
        pass_time(9.0)
        assert driver.machine.first_cause is None  # the time counts anew
        pass_time(3.0)
        assert lost_of(driver, workers[0]).rank == 1  # at some time it counts as hanging

    @pytest.mark.parametrize("states", ["TT", " ", "SS", "RSS", "RTT"])
    def test_who_was_stopped_is_not_waited_for(self, states: str) -> None:
        driver = Driver(size=2, num_servers=0, lease_s=1.2)
        workers = [driver.enter(pid=11), driver.enter(pid=12)]
        driver.keep_alive()
        driver.advance(1.1)
        for state in states:
            driver.states[12] = state.strip()
            driver.machine.pulse(workers[0], driver.now)
            assert driver.machine.first_cause is None
            driver.advance(0.2)
        assert lost_of(driver, workers[0]).rank == 1

    @pytest.mark.parametrize(("state", "lease_s"), [("T", 1.2), ("", 1.7), (UNREACHED, 1.2)])
    def test_only_the_unseen_get_the_time_in_which_the_scheduler_was_late(
        self, state: str, lease_s: float
    ) -> None:
        driver = Driver(size=2, num_servers=0, lease_s=1.2)
        workers = [driver.enter(pid=11), driver.enter(pid=12)]
        driver.keep_alive()
        driver.states[12] = state
        driver.advance(0.7)
        driver.machine.delayed(0.5)
        driver.machine.pulse(workers[0], driver.now)
        driver.advance(lease_s - 0.8)
        assert driver.machine.first_cause is None
        driver.machine.pulse(workers[0], driver.now)
        driver.advance(0.2)
        assert lost_of(driver, workers[0]).rank == 1

    @pytest.mark.parametrize(("state", "more_s"), [("T", 0.2), ("", 1.2)])
    def test_others_were_stopped_with_the_scheduler(self, state: str, more_s: float) -> None:
        driver = Driver(size=2, num_servers=0, lease_s=1.2)
        workers = [driver.enter(pid=11), driver.enter(pid=12)]
        driver.keep_alive()
        driver.states[12] = state
        driver.now += 5.0
        driver.machine.pulse(workers[0], driver.now)
        driver.do(driver.machine.slept(driver.now, 4.9))
        driver.advance(more_s - 0.1)
        assert driver.machine.first_cause is None
        driver.machine.pulse(workers[0], driver.now)
        driver.advance(0.2)
        assert lost_of(driver, workers[0]).rank == 1

    def test_others_may_reach_a_machine_that_acknowledges_nothing(self) -> None:
        driver, workers = self.started()
        driver.states[100 + workers[3]] = UNREACHED
        self.silence(driver, workers[3])
        for peer in workers[:2]:
            assert driver.events(peer, Confirm)
            driver.say(peer, Confirmed(workers[3], 1))
        driver.advance(5)
        assert driver.machine.first_cause is None

    def test_nobody_is_asked_about_who_can_be_seen(self) -> None:
        driver, workers = self.started()
        driver.states[100 + workers[3]] = "T"
        self.silence(driver, workers[3])
        assert not driver.events(workers[0], Confirm)
        driver.advance(0.5)
        assert lost_of(driver, workers[0]).rank == 3

    def test_who_sleeps_and_is_not_heard_is_asked_about(self) -> None:
        driver, workers = self.started()
        driver.states[100 + workers[3]] = "S"
        self.silence(driver, workers[3])
        for peer in workers[:2]:
            assert driver.events(peer, Confirm)
            driver.say(peer, Confirmed(workers[3], 1))
        driver.advance(5)
        assert driver.machine.first_cause is None

    def test_who_gets_no_processor_is_not_said_to_be_cut_off(self, caplog) -> None:
        driver, workers = self.started()
        driver.states[100 + workers[3]] = "R"
        self.silence(driver, workers[3])
        assert not driver.events(workers[0], Confirm)
        driver.advance(1.0)
        assert driver.machine.first_cause is None
        assert not caplog.records


class TestTogether:
    """Members that fall silent together are lost together."""

    def started(self, size: int, hosts: str, **settings: object) -> tuple[Driver, list[int]]:
        driver = Driver(size=size, num_servers=0, lease_s=1.2, **settings)
        driver.is_apart = True
        return driver, [driver.enter(rank=rank, hostname=hosts[rank]) for rank in range(size)]

    def beat(self, driver: Driver, peers: list[int], seconds: float) -> None:
        """Let some members beat every 0.2 s, in turn."""
        for n in range(round(seconds / 0.05)):
            for place, peer in enumerate(peers):
                if (n + place) % 4 == 0:
                    driver.machine.pulse(peer, driver.now)
            driver.advance(0.05)

    def test_a_dark_machine_changes_the_view_at_one_time(self) -> None:
        driver, workers = self.started(5, "abbbb", elastic_min=1)
        self.beat(driver, workers, 2.0)
        began = driver.now
        while not driver.events(workers[0], ViewLost):
            self.beat(driver, workers[:1], 0.05)
        assert driver.now - began < 1.3
        told = driver.events(workers[0], ViewLost)
        assert sorted(one.lost.rank for one in told) == [1, 2, 3, 4]
        assert "machine b does not answer: all 4 members there" in told[-1].lost.cause
        driver.wait(workers[0])
        assert job_of(driver, workers[0]).n_workers == 1

    def test_who_comes_back_meanwhile_is_not_lost(self) -> None:
        driver, workers = self.started(3, "abb", elastic_min=1)
        driver.keep_alive()
        self.beat(driver, workers[:1], 0.3)
        driver.machine.pulse(workers[1], driver.now)
        self.beat(driver, workers[:1], 1.15)
        assert not driver.events(workers[0], ViewLost)  # worker 2 has been silent for 1.45 s
        driver.machine.pulse(workers[1], driver.now)
        self.beat(driver, workers[:1], 0.2)
        (told,) = driver.events(workers[0], ViewLost)
        assert told.lost.rank == 2

    def test_one_that_only_starves_is_not_waited_for(self) -> None:
        driver, workers = self.started(3, "aaa", elastic_min=1)
        self.beat(driver, workers, 2.0)
        driver.states[100 + workers[1]], driver.states[100 + workers[2]] = "T", "R"
        began = driver.now
        while not driver.events(workers[0], ViewLost):
            self.beat(driver, workers[:1], 0.05)
        assert driver.now - began < 1.21
        assert workers[2] not in driver.closed


class TestUnheard:
    def test_a_member_gives_up_the_scheduler_before_the_start(self) -> None:
        driver = Driver(lease_s=10)
        waiting, gone = driver.enter(), driver.enter()
        driver.do(driver.machine.slept(driver.now, 9.0))
        driver.say(gone, Unheard(10.1))
        lost = lost_of(driver, waiting)
        assert lost.role == "scheduler"
        assert "its process was stopped for 9.0 s, or got no processor, and worker" in lost.cause

    def test_the_only_one_gives_up_a_scheduler_that_was_stopped(self, caplog) -> None:
        driver = Driver(lease_s=10)
        gone = driver.enter()
        driver.do(driver.machine.slept(driver.now, 9.0))
        driver.say(gone, Unheard(10.1))
        assert "whose process was stopped for 9.0 s" in caplog.text
        assert "which runs" not in caplog.text

    @pytest.mark.parametrize(("slept_s", "role"), [(9.0, "scheduler"), (1.0, "worker")])
    def test_a_member_gives_up_the_scheduler(self, slept_s: float, role: str) -> None:
        driver = Driver(lease_s=10)
        workers, _ = driver.start()
        driver.do(driver.machine.slept(driver.now, slept_s))
        driver.say(workers[1], Unheard(10.1))
        driver.say(workers[0], Unheard(10.1))
        lost = driver.machine.first_cause
        assert lost is not None
        assert (lost.role, lost.rank) == (role, 1 if role == "worker" else 0)
        words = "its process was stopped for 9.0 s, or got no processor, and worker 1"
        if role == "worker":
            words = "not heard the scheduler for 10.1 s"
        assert words in lost.cause

    def test_a_worker_that_leaves_is_answered_when_the_scheduler_was_stopped(self) -> None:
        driver = Driver(size=2, num_servers=0, lease_s=10)
        driver.is_apart = True
        workers = [driver.enter(), driver.enter()]
        asked = driver.leave(workers[0])
        assert driver.last(workers[0]) != Done(asked)  # it serves until worker 1 leaves too
        driver.do(driver.machine.slept(driver.now, 9.0))
        driver.say(workers[1], Unheard(10.1))
        assert driver.last(workers[0]) == Done(asked)
