# SPDX-License-Identifier: Apache-2.0
"""Joins, ranks, leases, losses, leaving and generations, one situation at a time."""

from __future__ import annotations

import pytest
from control_driver import Driver

from fastps.control.actions import Finish, Phase
from fastps.control.blame import PATIENCE_S
from fastps.control.protocol import (
    Absent,
    AskClock,
    Barrier,
    ClockTold,
    Done,
    Failed,
    Job,
    JobOver,
    Joined,
    NewGeneration,
    PeerLeft,
    PeerLost,
    ReportLost,
    Started,
    Tell,
    Told,
)
from fastps.launch.scheduler import ENDED_BY


def job_of(driver: Driver, peer: int) -> Job:
    started = driver.events(peer, Started)
    assert started, driver.sent[peer]
    last = started[-1]
    assert isinstance(last, Started)
    return last.job


def failure_of(driver: Driver, peer: int) -> Failed:
    last = driver.last(peer)
    assert isinstance(last, Failed), last
    return last


def lost_of(driver: Driver, peer: int) -> PeerLost:
    (lost,) = driver.events(peer, PeerLost)
    assert isinstance(lost, PeerLost)
    return lost


class TestJoining:
    def test_ranks_follow_arrival(self) -> None:
        driver = Driver(size=3)
        workers, servers = driver.start()
        assert [job_of(driver, peer).me for peer in workers] == [0, 1, 2]
        assert [job_of(driver, peer).me for peer in servers] == [3, 4]

    def test_everybody_is_told_the_same_addresses(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        jobs = [job_of(driver, peer) for peer in workers + servers]
        assert len({(job.members, job.owners, job.size, job.job_id) for job in jobs}) == 1
        assert [jobs[0].members[owner].port for owner in jobs[0].owners] == [
            7000 + peer for peer in servers
        ]
        assert [member.rank for member in jobs[0].workers] == [0, 1]

    def test_configured_ranks_are_kept_and_the_rest_is_filled(self) -> None:
        driver = Driver(size=4, num_servers=0)
        peers = [driver.enter(rank=rank) for rank in (None, 0, None, 2)]
        assert [job_of(driver, peer).me for peer in peers] == [1, 0, 3, 2]

    def test_local_ranks_follow_machines(self) -> None:
        driver = Driver(size=4, num_servers=0)
        machines = ["1/5", "2/5", "1/5", "1/6"]
        peers = [driver.enter(machine=machine) for machine in machines]
        places = [(job_of(driver, p).local_rank, job_of(driver, p).local_size) for p in peers]
        assert places == [(0, 2), (0, 1), (1, 2), (0, 1)]

    def test_configured_local_ranks_are_kept(self) -> None:
        driver = Driver(size=2, num_servers=0)
        peers = [driver.enter(local_rank=rank, local_size=5) for rank in (4, 3)]
        assert [job_of(driver, peer).local_rank for peer in peers] == [4, 3]
        assert job_of(driver, peers[0]).local_size == 5

    def test_job_does_not_start_before_everybody_waits(self) -> None:
        driver = Driver(size=1, num_servers=1)
        worker, server = driver.enter(), driver.join("server")
        assert not driver.events(worker, Started)
        driver.wait(server)
        assert driver.events(worker, Started)
        assert driver.events(server, Started)

    def test_same_rank_twice_names_both(self) -> None:
        driver = Driver()
        driver.enter(rank=1, hostname="one", pid=11)
        second = driver.join(rank=1, hostname="two", pid=22)
        failed = failure_of(driver, second)
        assert failed.kind == "config"
        for part in ("worker 1", "one, pid 11", "two, pid 22", "FASTPS_RANK"):
            assert part in failed.message
        assert second in driver.closed

    def test_rank_out_of_bounds(self) -> None:
        driver = Driver()
        failed = failure_of(driver, driver.join(rank=2))
        assert "must be 0 to 1" in failed.message
        assert "FASTPS_SIZE" in failed.message

    @pytest.mark.parametrize("role", ["worker", "server"])
    def test_role_started_too_often(self, role: str) -> None:
        driver = Driver(size=2, num_servers=2)
        for _ in range(2):
            driver.enter(role)
        failed = failure_of(driver, driver.join(role, hostname="third", pid=33))
        assert f"role {role} is started too often" in failed.message
        assert "third, pid 33" in failed.message

    def test_worker_too_many_in_a_running_job(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        failed = failure_of(driver, driver.join())
        assert "too often" in failed.message
        assert driver.machine.phase is Phase.RUNNING
        assert not driver.events(workers[0], PeerLost)

    @pytest.mark.parametrize(
        ("change", "variable"),
        [({"size": 3}, "FASTPS_SIZE"), ({"num_servers": 1}, "FASTPS_NUM_SERVERS")],
    )
    def test_other_job_sizes_are_refused(self, change: dict[str, int], variable: str) -> None:
        driver = Driver()
        failed = failure_of(driver, driver.join(**change))
        assert failed.kind == "config"
        assert variable in failed.message

    def test_start_timeout_names_the_missing(self) -> None:
        driver = Driver(size=3, num_servers=1)
        peer = driver.join(rank=1)
        driver.machine.pulse(peer, driver.now)
        gone = driver.join(rank=0, hostname="brief")
        driver.die(gone)
        driver.wait(peer, timeout_s=5.0)
        driver.advance(5.0)
        failed = failure_of(driver, peer)
        assert failed.kind == "stall"
        for part in ("1 of 3 workers", "worker 0, worker 2", "0 of 1 servers", "brief, pid 102"):
            assert part in failed.message
        assert peer in driver.closed

    def test_who_gives_up_soon_after_another_misses_the_same(self) -> None:
        driver = Driver(size=3, num_servers=0)
        first, second = driver.join(rank=0), driver.join(rank=2)
        driver.wait(first, timeout_s=5.0)
        driver.wait(second, timeout_s=7.0)
        driver.advance(5.0)
        told = [failure_of(driver, peer).message for peer in (first, second)]
        assert told[0] == told[1]
        assert "2 of 3 workers joined; missing: worker 1; here" in told[0]
        assert "server" not in told[0]

    def test_place_of_a_process_that_died_early_is_free(self) -> None:
        driver = Driver(size=1, num_servers=0)
        first = driver.join(rank=0)
        driver.die(first)
        second = driver.enter(rank=0)
        assert job_of(driver, second).me == 0

    @pytest.mark.parametrize("goes_on", [False, True])
    @pytest.mark.parametrize("comes_first", [False, True])
    def test_who_ends_before_the_start_ends_it_for_those_who_wait(
        self, goes_on: bool, comes_first: bool
    ) -> None:
        driver = Driver(size=3, num_servers=0)
        gone = Absent("worker", 1, "node", 77, "it ended with exit code 0")
        if not comes_first:
            driver.say(0, gone)  # nobody waits yet: a program that joins no job may end
            assert driver.finish is None
        waiting = driver.enter(rank=0, goes_on=goes_on)
        if comes_first:
            driver.say(0, gone)
        failed = failure_of(driver, waiting)
        assert failed.kind == "peer_lost"
        assert "worker 1 (node, pid 77) is lost: it ended with exit code 0" in failed.message
        late = failure_of(driver, driver.join(rank=2, goes_on=goes_on))
        assert "exit code 0" in late.message

    def test_who_joined_and_was_killed_ends_the_start_when_its_launcher_says_so(self) -> None:
        driver = Driver(size=2, num_servers=0)
        waiting = driver.enter(rank=0)
        killed = driver.join(rank=1)
        driver.say(0, Absent("worker", 1, "node", 78, "it was killed by SIGKILL"))
        assert not driver.events(waiting, Failed)  # its connection is still there
        driver.die(killed)
        assert "SIGKILL" in failure_of(driver, waiting).message

    @pytest.mark.parametrize("rank", [1, None])
    @pytest.mark.parametrize("role", ["worker", "server"])
    def test_who_joined_and_died_ends_the_start_for_those_who_wait(self, role, rank) -> None:
        driver = Driver(size=3, num_servers=2)
        waiting, giving_up = driver.enter(), driver.enter()
        if role == "server":
            driver.enter("server")
        driver.die(driver.enter(role, rank=rank, hostname="b", pid=77))
        driver.advance(0.9)  # a launcher may say more
        assert not driver.events(waiting, Failed)
        driver.advance(0.2)
        number = 1 if role == "server" or rank else 2
        for peer in (waiting, giving_up):
            text = failure_of(driver, peer).message
            assert f"{role} {number} (b, pid 77) is lost: it was killed, before the job" in text
        assert driver.machine.next_deadline() is not None

    def test_who_falls_silent_before_the_start_ends_it_with_its_lease(self) -> None:
        driver = Driver(size=3, num_servers=0, lease_s=1.2)
        waiting, silent = driver.enter(rank=0), driver.enter(rank=1)
        driver.keep_alive()
        driver.states[100 + silent] = "T"
        driver.advance(1.1)
        driver.machine.pulse(waiting, driver.now)
        driver.advance(0.11)
        text = failure_of(driver, waiting).message
        assert "worker 1" in text
        assert "silent for longer than its lease" in text

    def test_the_place_of_one_who_died_is_free_for_a_moment(self) -> None:
        driver = Driver(size=3, num_servers=0)
        waiting = driver.enter(rank=0)
        driver.die(driver.enter(rank=1))
        driver.enter(rank=1)
        driver.advance(2.0)
        driver.enter(rank=2)
        assert job_of(driver, waiting).me == 0

    def test_who_gives_up_waiting_ends_no_start(self) -> None:
        driver = Driver(size=3, num_servers=0, start_timeout_s=500, lease_s=500)
        driver.wait(driver.join(rank=0), timeout_s=5.0)
        patient = driver.join(rank=1)
        driver.wait(patient, timeout_s=100.0)
        driver.advance(50.0)
        assert not driver.events(patient, Failed)

    def test_a_death_while_others_wait_for_a_later_start_is_told(self) -> None:
        driver = Driver(size=2, num_servers=0)
        for peer in driver.start()[0]:
            driver.leave(peer)
        waiting = driver.enter(rank=0)
        driver.die(driver.join(rank=1))
        driver.advance(1.1)
        assert "worker 1 (node, pid 104) is lost" in failure_of(driver, waiting).message

    def test_the_end_of_one_who_has_started_is_no_news(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = driver.start()
        driver.say(0, Absent("worker", 1, "node", 79, "it ended with exit code 0"))
        for peer in workers:
            driver.leave(peer)
        again = [driver.enter() for _ in range(2)]
        assert all(driver.events(peer, Started) for peer in again)

    def test_the_start_watch_says_who_is_missing_and_where(self, caplog) -> None:
        driver = Driver(
            {("worker", 2): "machine 1"}, size=3, num_servers=0, start_watch_s=5.0, lease_s=500
        )
        driver.advance(50.0)
        assert not caplog.messages  # nobody waits yet: all may be importing their frameworks
        driver.wait(driver.join(rank=1), 1000.0)
        driver.advance(4.9)
        assert not caplog.messages
        driver.advance(0.2)
        (line,) = caplog.messages
        for part in ("no start after 5 s", "1 of 3 workers joined", "worker 2 (machine 1)",
                     "missing: worker 0, ", "here: worker 1 (node, pid 101)"):  # fmt: skip
            assert part in line
        driver.advance(30.0)
        assert [line.split(":")[0] for line in caplog.messages[1:]] == [
            "no start after 10 s", "no start after 20 s",
        ]  # fmt: skip
        for rank in (0, 2):
            driver.enter(rank=rank)
        driver.advance(400.0)
        assert len(caplog.messages) == 3

    def test_join_twice_on_one_connection(self) -> None:
        driver = Driver()
        peer = driver.join()
        again = driver.events(peer, Joined)
        assert len(again) == 1
        driver._peers -= 1
        driver.join()
        assert failure_of(driver, peer).kind == "protocol"

    def test_nobody_comes(self) -> None:
        driver = Driver(start_timeout_s=30)
        driver.advance(31)
        assert driver.finish is not None
        assert driver.finish.code == 1


class TestLosing:
    def test_who_is_ended_by_a_launcher_is_not_said_to_be_lost(self, caplog) -> None:
        driver = Driver(size=3, num_servers=0)
        first, second, third = driver.start()[0]
        driver.machine.expect_ends([("worker", 0)], f"{ENDED_BY}: worker 2 was killed")
        driver.die(first)
        assert not caplog.messages
        assert lost_of(driver, second).cause == f"{ENDED_BY}: worker 2 was killed"
        driver.die(third)

    def test_death_is_told_to_all_and_ends_waits(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        number = driver.barrier(workers[0])
        driver.die(workers[1], "its connection broke")
        for peer in [workers[0], *servers]:
            lost = lost_of(driver, peer)
            assert (lost.role, lost.rank, lost.pid) == ("worker", 1, 100 + workers[1])
            assert lost.cause == "its connection broke"
        failed = failure_of(driver, workers[0])
        assert (failed.request, failed.kind) == (number, "peer_lost")
        assert "worker 1" in failed.message

    def test_first_cause_stays(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.die(servers[1])
        driver.die(workers[0])
        driver.die(servers[0])
        assert driver.machine.first_cause is not None
        assert driver.machine.first_cause.role == "server"
        assert len(driver.events(workers[1], PeerLost)) == 1

    def test_requests_after_a_loss_fail_with_the_cause(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.die(workers[1])
        driver.barrier(workers[0])
        assert failure_of(driver, workers[0]).kind == "peer_lost"
        late = driver.join()
        assert failure_of(driver, late).kind == "peer_lost"

    def test_what_a_worker_tells_goes_to_those_it_names(self) -> None:
        driver = Driver(size=3)
        workers, servers = driver.start()
        before = {peer: len(driver.sent[peer]) for peer in workers + servers}
        driver.say(workers[2], Tell((0, 2, 7), b"news"))
        driver.say(workers[0], Tell((0, 2), b"more"))
        heard = {peer: driver.sent[peer][count:] for peer, count in before.items()}
        both = [Told(2, b"news"), Told(0, b"more")]
        assert heard == {workers[0]: both, workers[1]: [], workers[2]: both} | {
            peer: [] for peer in servers
        }

    def test_who_has_run_out_of_data_is_in_barriers_alone_until_all_have(self) -> None:
        driver = Driver(size=3)
        workers, _ = driver.start()
        barriers = [driver.barrier(workers[1])]
        driver.blob(workers[2], 2, b"data")
        driver.say(workers[0], Tell((), b"", has_joined=True))
        failure = failure_of(driver, workers[2])  # who was there, and who comes
        assert failure.kind == "mismatch"
        assert "worker 0 has run out of data and called join()" in failure.message
        driver.blob(workers[1], 2, None)
        assert failure_of(driver, workers[1]).kind == "mismatch"
        barriers.append(driver.barrier(workers[2]))
        assert [driver.last(peer) for peer in workers[1:]] == [Done(one) for one in barriers]
        for peer in workers[1:]:
            driver.say(peer, Tell((), b"", has_joined=True))
        requests = [driver.barrier(peer) for peer in workers]
        assert [driver.last(peer) for peer in workers] == [Done(one) for one in requests]

    def test_a_member_is_told_the_time_of_the_scheduler(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.say(workers[0], AskClock(7))
        assert driver.last(workers[0]) == ClockTold(7, driver.now)

    def test_silence_longer_than_the_lease(self) -> None:
        driver = Driver(lease_s=10)
        workers, servers = driver.start()
        driver.keep_alive()
        driver.advance(9)
        for peer in [workers[0], *servers]:
            assert driver.machine.pulse(peer, driver.now)
        driver.advance(1.5)
        lost = lost_of(driver, servers[0])
        assert (lost.role, lost.rank) == ("worker", 1)
        assert "lease" in lost.cause
        assert "FASTPS_LEASE_S" in lost.cause
        assert lost_of(driver, workers[1]) == lost  # a stopped process learns it when it wakes
        assert workers[1] in driver.closed
        assert not driver.machine.pulse(workers[1], driver.now)

    def test_scheduler_that_slept_blames_nobody(self) -> None:
        driver = Driver(lease_s=10)
        workers, _ = driver.start()
        driver.now += 100
        driver.do(driver.machine.slept(driver.now, 20.0))
        driver.do(driver.machine.tick(driver.now))
        assert not driver.events(workers[0], PeerLost)
        driver.advance(10)
        assert driver.events(workers[0], PeerLost)

    def test_server_that_leaves_is_lost_while_workers_need_it(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.leave(servers[0])
        assert lost_of(driver, workers[0]).role == "server"
        assert driver.events(servers[0], Done)

    def test_broken_job_ends_with_an_error(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.die(workers[0])
        driver.leave(workers[1])
        assert isinstance(driver.last(servers[0]), JobOver)
        for peer in servers:
            driver.leave(peer)
        assert driver.finish == Finish(1, driver.finish.reason if driver.finish else "")
        assert "worker 0" in driver.finish.reason

    def test_members_that_do_not_leave_are_cut_off(self) -> None:
        driver = Driver(shutdown_timeout_s=10)
        workers, _ = driver.start()
        driver.die(workers[0])
        driver.die(workers[1])
        driver.keep_alive()
        driver.advance(9)
        driver.keep_alive()
        assert driver.finish is None
        driver.advance(2)
        assert driver.finish is not None


class TestLaunchers:
    """Launchers report how their processes end."""

    def started(self) -> tuple[Driver, list[int]]:
        driver = Driver(size=3, num_servers=0)
        return driver, [driver.enter(rank=rank, is_watched=True, pid=rank) for rank in range(3)]

    def test_the_report_is_the_cause_although_the_connection_ended_before(self) -> None:
        driver, workers = self.started()
        driver.die(workers[1])
        assert driver.machine.first_cause is None
        driver.say(0, Absent("worker", 1, "node", 1, "it was killed by SIGKILL"))
        lost = lost_of(driver, workers[0])
        assert (lost.rank, lost.cause) == (
            1,
            "it was killed by SIGKILL before it had left the job",
        )

    def test_the_report_comes_first(self) -> None:
        driver, workers = self.started()
        driver.say(0, Absent("worker", 1, "node", 1, "it ended with exit code 0"))
        assert "exit code 0" in lost_of(driver, workers[0]).cause
        driver.die(workers[1])
        assert workers[1] in driver.closed

    def test_a_launcher_that_says_nothing_is_not_waited_for_long(self) -> None:
        driver, workers = self.started()
        driver.die(workers[1])
        driver.advance(PATIENCE_S)
        assert lost_of(driver, workers[0]).cause == "it was killed"

    @pytest.mark.parametrize("is_in_time", [True, False])
    def test_who_ended_first_is_the_cause_whoever_is_reported_first(
        self, is_in_time: bool
    ) -> None:
        driver, workers = self.started()
        driver.die(workers[1])
        driver.advance(0.1)
        driver.die(workers[2])
        driver.say(0, Absent("worker", 2, "node", 2, "it ended with exit code 1"))
        assert driver.machine.first_cause is None
        if is_in_time:
            driver.say(0, Absent("worker", 1, "node", 1, "it was killed by SIGKILL"))
        driver.advance(PATIENCE_S)
        lost = lost_of(driver, workers[0])
        assert lost.rank == 1
        assert ("SIGKILL" in lost.cause) == is_in_time

    def test_the_end_of_another_process_of_that_place_is_no_news(self) -> None:
        driver, workers = self.started()
        driver.say(0, Absent("worker", 1, "node", 99, "it ended with exit code 0"))
        driver.advance(5)
        assert not driver.events(workers[0], PeerLost)

    def test_other_evidence_does_not_come_before_an_end(self) -> None:
        driver, workers = self.started()
        driver.die(workers[1])
        driver.say(workers[2], ReportLost(2, "its own links broke"))
        assert lost_of(driver, workers[0]).rank == 1


class TestBlame:
    def test_reported_member_that_dies_is_the_cause(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.say(workers[0], ReportLost(2, "connection reset", is_owner=True))
        assert not driver.events(workers[1], PeerLost)
        driver.advance(0.1)
        driver.die(servers[0], "it was killed")
        lost = lost_of(driver, workers[1])
        assert (lost.role, lost.rank) == ("server", 0)
        assert lost.cause.startswith("it was killed")
        assert "worker 0 lost its data connection to it: connection reset" in lost.cause

    def test_the_one_to_blame_has_told_of_others(self) -> None:
        """One link broke; then worker 1 ended the other one, and the server there spoke first."""
        driver = Driver()
        workers, servers = driver.start()
        driver.say(servers[0], ReportLost(1, "its link to server 0 broke"))
        driver.say(workers[1], ReportLost(3, "its link to a worker broke", is_owner=True))
        driver.advance(1.5)
        lost = lost_of(driver, workers[0])
        assert (lost.role, lost.rank) == ("worker", 1)
        assert "server 0 lost its data connection to it: its link to server 0" in lost.cause
        assert "it lost its data connection to server 1: its link to a worker" in lost.cause

    def test_end_of_the_pulse_is_proof(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.do(driver.machine.pulse_closed(servers[0], driver.now))
        assert not driver.events(workers[1], PeerLost)
        driver.say(workers[0], ReportLost(2, "reset", is_owner=True))
        driver.do(driver.machine.pulse_closed(servers[0], driver.now))
        assert lost_of(driver, workers[1]).role == "server"

    def test_reported_member_that_lives_is_blamed_in_the_end(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.say(workers[0], ReportLost(3, "connection reset", is_owner=True))
        driver.keep_alive()
        driver.advance(PATIENCE_S)
        lost = lost_of(driver, workers[1])
        assert (lost.role, lost.rank) == ("server", 1)
        assert "connection reset" in lost.cause
        assert "still sends heartbeats" in lost.cause

    def test_who_reports_itself_is_believed_at_once(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.say(workers[1], ReportLost(1, "its own links broke"))
        lost = lost_of(driver, workers[0])
        assert (lost.role, lost.rank, lost.cause) == ("worker", 1, "its own links broke")
        driver = Driver()
        workers, servers = driver.start()
        driver.say(servers[0], ReportLost(2, "its port is down"))
        assert lost_of(driver, workers[0]).role == "server"

    def test_silence_of_a_reported_member_is_told(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.keep_alive()
        driver.advance(3)
        driver.say(workers[0], ReportLost(3, "retries exceeded", is_owner=True))
        driver.advance(PATIENCE_S)
        assert "no sign of life for 4.0 s" in lost_of(driver, workers[1]).cause

    def test_reporter_that_dies_is_the_cause(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.say(servers[0], ReportLost(0, "connection reset"))
        driver.die(servers[0])
        assert lost_of(driver, workers[1]).role == "server"
        driver.advance(5)
        assert driver.machine.first_cause is not None
        assert driver.machine.first_cause.role == "server"

    def test_report_about_one_that_left_is_ignored(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        driver.leave(workers[0])
        driver.say(servers[0], ReportLost(0, "closed"))
        driver.say(servers[0], ReportLost(1, "closed"))
        driver.leave(workers[1])
        driver.keep_alive()
        driver.advance(2)
        assert driver.machine.first_cause is None


class TestLeaving:
    def test_others_are_told(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        number = driver.leave(workers[1])
        assert driver.last(workers[1]) == Done(number)
        assert workers[1] in driver.closed
        for peer in [workers[0], *servers]:
            assert driver.last(peer) == PeerLeft(1)

    def test_barrier_with_one_that_left_fails_at_once(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.barrier(workers[0])
        driver.leave(workers[1])
        assert "worker 1 left" in failure_of(driver, workers[0]).message
        driver.barrier(workers[0], "other")
        assert "worker 1 left" in failure_of(driver, workers[0]).message

    def test_new_generation(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        for peer in workers:
            driver.leave(peer)
        assert driver.machine.generation == 2
        assert driver.last(servers[0]) == NewGeneration(2)
        again = [driver.enter() for _ in range(2)]
        assert [job_of(driver, peer).generation for peer in again] == [2, 2]
        assert job_of(driver, again[0]).members[2:] == job_of(driver, workers[0]).members[2:]

    def test_early_rejoin_waits_for_the_others_to_leave(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.leave(workers[0])
        early = driver.enter(rank=0)
        assert not driver.events(early, Started)
        driver.leave(workers[1])
        late = driver.enter(rank=1)
        assert job_of(driver, early).generation == job_of(driver, late).generation == 2

    def test_early_rejoin_learns_of_a_loss(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.leave(workers[0])
        early = driver.enter()
        driver.die(workers[1])
        assert failure_of(driver, early).kind == "peer_lost"

    def test_early_rejoin_that_waits_in_vain_says_for_whom(self) -> None:
        driver = Driver()
        workers, _ = driver.start()
        driver.leave(workers[0])
        early = driver.enter()
        driver.now += 55
        driver.keep_alive()
        driver.advance(6)
        assert "worker 1 (node, pid" in failure_of(driver, early).message

    def test_job_is_over_after_the_linger(self) -> None:
        driver = Driver(linger_s=5)
        workers, servers = driver.start()
        driver.advance(3)
        driver.keep_alive()
        for peer in workers:
            driver.leave(peer)
        driver.advance(4.9)
        assert not driver.events(servers[0], JobOver)
        driver.advance(0.2)
        assert driver.events(servers[0], JobOver)
        assert driver.finish is None
        for peer in servers:
            driver.leave(peer)
        assert driver.finish == Finish(0, "all workers left")

    def test_linger_ends_with_the_first_worker_that_returns(self) -> None:
        driver = Driver(linger_s=5)
        workers, servers = driver.start()
        for peer in workers:
            driver.leave(peer)
        driver.enter()
        driver.keep_alive()
        driver.advance(6)
        assert not driver.events(servers[0], JobOver)

    def test_stop_tells_everybody(self) -> None:
        driver = Driver()
        workers, servers = driver.start()
        number = driver.barrier(workers[0])
        driver.do(driver.machine.stop("the scheduler got SIGTERM", driver.now))
        failed = driver.events(workers[0], Failed)[0]
        assert isinstance(failed, Failed)
        assert (failed.request, failed.kind) == (number, "shutdown")
        for peer in workers + servers:
            assert isinstance(driver.last(peer), JobOver)
            driver.leave(peer)
        assert driver.finish == Finish(0, "the scheduler got SIGTERM")

    def test_message_of_a_stranger_closes_it(self) -> None:
        driver = Driver()
        driver.say(77, Barrier(1, "b", 1.0))
        assert 77 in driver.closed


def test_members_that_make_other_numbers_of_links_are_refused() -> None:
    driver = Driver(size=2)
    driver.join("server", links_per_peer=2)
    failure = failure_of(driver, driver.join(links_per_peer=1))
    assert failure.kind == "config"
    assert "this worker makes 1 link(s) per peer, server" in failure.message
    assert " 2; set FASTPS_LINKS_PER_PEER to the same" in failure.message
    assert isinstance(driver.last(driver.join(links_per_peer=2)), Joined)
    assert isinstance(driver.last(driver.join("server", links_per_peer=0)), Joined)


def test_a_job_that_all_have_given_up_says_who_was_missing():
    driver = Driver(size=2, num_servers=1, start_timeout_s=15.0, lease_s=5)
    for rank in range(2):
        driver.wait(driver.join(rank=rank), timeout_s=15.0)
    for _ in range(12):
        driver.keep_alive()
        driver.advance(3.0)
    assert driver.finish is not None
    assert driver.finish.code == 1
    assert "all that had joined gave up: the job did not start within 15 s" in driver.finish.reason
    assert "2 of 2 workers joined; 0 of 1 servers joined" in driver.finish.reason
