# SPDX-License-Identifier: Apache-2.0
"""Machines, who is appointed as a server beside a worker, and how such workers leave."""

from __future__ import annotations

import pytest
from control_driver import Driver, make_spec
from hypothesis import given
from hypothesis import strategies as st

from fastps.control.actions import Phase
from fastps.control.protocol import (
    Declared,
    DeclareKeys,
    Done,
    Failed,
    Job,
    JobOver,
    KeysReady,
    NewGeneration,
    NewJob,
    OwnerLeft,
    PeerLeft,
    PeerLost,
    ReportLost,
    Started,
)


def start(driver: Driver, machines: list[str], servers: list[str]) -> tuple[list[int], list[int]]:
    """Start a job of workers and servers on these machines; give their peers by rank."""
    apart = [driver.enter("server", machine=machine) for machine in servers]
    workers = [driver.enter("worker", machine=machine) for machine in machines]
    return workers, apart


def job_of(driver: Driver, peer: int) -> Job:
    started = driver.events(peer, Started)[-1]
    assert isinstance(started, Started)
    return started.job


def started_job(machines: list[str], servers: list[str], **settings: object) -> Job:
    driver = Driver(size=len(machines), num_servers=len(servers), **settings)
    workers, _ = start(driver, machines, servers)
    return job_of(driver, workers[0])


class TestMachines:
    def test_numbers_follow_the_lowest_rank_and_servers_come_last(self) -> None:
        job = started_job(["b", "a", "b", "c"], ["z", "a", "z"])
        assert [member.machine for member in job.workers] == [0, 1, 0, 2]
        assert job.machines == ((0, 2), (1,), (3,))
        assert [job.members[owner].machine for owner in job.owners] == [3, 1, 3]

    @given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
    def test_machines_share_out_all_workers(self, names: list[str]) -> None:
        job = started_job(names, ["s", "s"], colocate="off")
        assert sorted(rank for ranks in job.machines for rank in ranks) == list(range(len(names)))
        assert [min(ranks) for ranks in job.machines] == sorted(min(r) for r in job.machines)
        for ranks in job.machines:
            assert list(ranks) == sorted(ranks)
            assert len({names[rank] for rank in ranks}) == 1
        assert len(job.machines) == len(set(names))
        assert job.is_local == (len(set(names)) == 1)

    def test_workers_that_cannot_share_memory_still_share_devices(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = start(driver, ["a#1-x", "a#2-y", "b"], [])
        jobs = [job_of(driver, peer) for peer in workers]
        assert jobs[0].machines == ((0,), (1,), (2,))
        places = [(job.local_rank, job.local_size) for job in jobs]
        assert places == [(0, 2), (1, 2), (0, 1)]

    def test_unix_names_are_told(self) -> None:
        driver = Driver(size=1, num_servers=1)
        worker = driver.enter(unix="mine", host_id="h1")
        driver.enter("server", unix="yours", host_id="h2")
        job = job_of(driver, worker)
        assert [(m.unix, m.host_id) for m in job.members] == [
            ("mine", "h1"),
            ("yours", "h2"),
        ]


class TestAppointment:
    @pytest.mark.parametrize(
        ("machines", "servers", "settings", "joint"),
        [
            (["a", "b", "a"], [], {}, {0: 0, 1: 1}),
            (["a", "b", "c"], ["s"], {}, {0: 1, 1: 2, 2: 3}),
            (["a", "b"], ["a", "b"], {}, {}),
            (["a", "b"], ["s", "t"], {"colocate": "on"}, {0: 2, 1: 3}),
            (["a", "b"], ["s"], {"colocate": "off"}, {}),
            (["a", "a"], [], {}, {}),
            (["a", "a"], [], {"colocate": "on"}, {}),
            (["a", "a"], [], {"force_distributed": True}, {0: 0}),
            (["a#1", "a#2"], ["a"], {}, {}),
            (["a#1", "a#2"], [], {}, {0: 0, 1: 1}),
            (["a#1", "b", "a#2"], ["s"], {}, {0: 1, 1: 2, 2: 3}),
        ],
    )
    def test_who_serves(
        self,
        machines: list[str],
        servers: list[str],
        settings: dict[str, object],
        joint: dict[int, int],
    ) -> None:
        job = started_job(machines, servers, **settings)
        apart = range(len(machines), len(machines) + len(servers))
        assert job.owners == (*apart, *joint)
        assert [member.role for member in job.members[job.size :]] == ["server"] * len(servers)
        names = {rank: job.owner_name(rank) for rank in joint}
        assert names == {rank: f"server {joint[rank]} (in worker {rank})" for rank in joint}
        assert [job.owner_name(number) for number in apart] == [
            f"server {index}" for index in range(len(servers))
        ]
        for rank in set(range(len(machines))) - set(joint):  # its link may break too
            assert job.owner_name(rank) == f"worker {rank}"

    @pytest.mark.parametrize(
        ("servers", "colocate", "owners"),
        [(0, "auto", (2,)), (1, "auto", (3,)), (1, "on", (3, 2)), (0, "on", (2,)),
         (1, "off", (3,)), (0, "off", None)],
    )  # fmt: skip
    def test_servers_apart_or_validators_serve_and_never_workers(
        self, servers: int, colocate: str, owners: tuple[int, ...] | None
    ) -> None:
        driver = Driver(size=2, num_servers=servers, num_validators=1, colocate=colocate)
        peers = [driver.enter(machine=machine, num_validators=1) for machine in "ab"]
        peers += [driver.enter("server", machine="c") for _ in range(servers)]
        peers.append(driver.enter("validator", machine="a", size=2, num_validators=1))
        if owners is None:
            assert driver.events(peers[0], Failed)
            return
        job = job_of(driver, peers[0])
        assert (job.owners, job.is_local) == (owners, False)

    def test_nobody_can_serve(self) -> None:
        driver = Driver(size=2, num_servers=0, colocate="off")
        workers, _ = start(driver, ["a", "b"], [])
        for peer in workers:
            (failed,) = driver.events(peer, Failed)
            assert isinstance(failed, Failed)
            assert failed.kind == "config"
            assert "2 machine(s)" in failed.message
            assert "FASTPS_COLOCATE=auto" in failed.message
            assert driver.events(peer, JobOver)
            driver.die(peer)
        assert driver.finish is not None
        assert driver.finish.code == 1

    def test_worker_that_does_not_listen_is_named(self) -> None:
        driver = Driver(size=2, num_servers=0)
        driver.enter(machine="a")
        peer = driver.enter(machine="b", port=0, pid=77)
        (failed,) = driver.events(peer, Failed)
        assert isinstance(failed, Failed)
        assert "worker 1 (node, pid 77) must serve too" in failed.message
        assert "FASTPS_COLOCATE" in failed.message

    def test_worker_that_need_not_serve_need_not_listen(self) -> None:
        driver = Driver(size=3, num_servers=0)
        peers = [
            driver.enter(machine=name, port=port) for name, port in (("a", 5), ("b", 6), ("a", 0))
        ]
        assert job_of(driver, peers[2]).owners == (0, 1)


class TestKeys:
    def test_joint_servers_are_asked_and_answer(self) -> None:
        driver = Driver(size=2, num_servers=1)
        workers, servers = start(driver, ["a", "b"], ["s"])
        driver.declare(workers[0], make_spec("w", (1 << 20,), partition_bytes=1 << 20))
        for peer in (*servers, *workers):
            assert not driver.events(workers[0], Declared)
            (keys,) = driver.events(peer, DeclareKeys)
            assert isinstance(keys, DeclareKeys)
            driver.say(peer, KeysReady(keys.request_id))
        (answer,) = driver.events(workers[0], Declared)
        assert isinstance(answer, Declared)
        sums = [0, 0, 0]
        for nbytes, owner in answer.tensors[0].pieces:
            assert nbytes <= 1 << 20
            sums[owner] += nbytes
        assert sums == [1 << 20, 1 << 20, 2 << 20]  # 2(n - 1) to n - k, for n = 2 and k = 1


class TestLeaving:
    def test_first_one_serves_until_the_last_one_leaves(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = start(driver, ["a", "b", "b"], [])
        first = driver.leave(workers[0])
        assert not driver.events(workers[0], Done)
        assert driver.last(workers[1]) == PeerLeft(0)
        assert (workers[0], first) in driver.machine.pending()
        third = driver.leave(workers[2])  # serves nobody
        assert driver.last(workers[2]) == Done(third)
        second = driver.leave(workers[1])
        assert driver.last(workers[1]) == Done(second)
        assert Done(first) in driver.sent[workers[0]]
        assert set(workers) <= driver.closed
        assert driver.machine.generation == 2

    def test_patience_ends(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = start(driver, ["a", "b"], [])
        number = driver.leave(workers[0], timeout_s=3.0)
        driver.advance(2.9)
        assert not driver.events(workers[0], Done)
        driver.advance(0.2)
        assert driver.last(workers[0]) == Done(number)
        assert driver.machine.phase is Phase.RUNNING
        driver.leave(workers[1])
        assert driver.machine.generation == 2

    def test_a_server_that_goes_with_its_worker_is_told_and_nobody_else_is_suspected(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = start(driver, ["a", "b", "c"], [])
        waiting = driver.declare(workers[2], make_spec("w"))
        driver.leave(workers[1], timeout_s=0.3)
        driver.say(workers[0], ReportLost(2, "its link to server 0 broke"))
        driver.advance(0.3)
        number = driver.declare(workers[0], make_spec("v"))
        for peer, request in ((workers[0], number), (workers[2], waiting)):
            assert OwnerLeft(1) in driver.sent[peer]
            failed = driver.last(peer)
            assert isinstance(failed, Failed)
            assert (failed.request, failed.kind) == (request, "peer_lost")
            assert "worker 1" in failed.message
            assert "and the server in it too" in failed.message
        driver.say(workers[0], ReportLost(2, "its link to server 0 broke"))
        driver.advance(2.0)
        assert driver.machine.phase is Phase.RUNNING
        for peer in (workers[0], workers[2]):
            driver.leave(peer)
            assert not driver.events(peer, PeerLost)
        again, _ = start(driver, ["a", "b", "c"], [])
        driver.say(again[0], ReportLost(2, "its link to server 0 broke"))
        driver.advance(2.0)
        assert driver.machine.phase is Phase.BROKEN

    def test_what_needs_the_one_that_left_fails(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = start(driver, ["a", "b"], [])
        driver.leave(workers[0])
        driver.barrier(workers[1])
        failed = driver.last(workers[1])
        assert isinstance(failed, Failed)
        assert "worker 0 left" in failed.message

    def test_what_the_one_that_leaves_waits_for_itself_ends(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = start(driver, ["a", "b"], [])
        numbers = [driver.barrier(workers[0]), driver.declare(workers[0], make_spec())]
        number = driver.leave(workers[0])
        failed = driver.events(workers[0], Failed)
        assert [(f.request, f.kind) for f in failed] == [(n, "shutdown") for n in numbers]  # type: ignore[attr-defined]
        assert driver.machine.pending() == {(workers[0], number)}

    def test_death_of_one_that_still_serves_is_a_loss(self) -> None:
        driver = Driver(size=2, num_servers=0)
        workers, _ = start(driver, ["a", "b"], [])
        driver.leave(workers[0])
        driver.die(workers[0])
        (lost,) = driver.events(workers[1], PeerLost)
        assert isinstance(lost, PeerLost)
        assert (lost.role, lost.rank) == ("worker", 0)

    def test_loss_lets_all_go(self) -> None:
        driver = Driver(size=3, num_servers=0)
        workers, _ = start(driver, ["a", "b", "c"], [])
        number = driver.leave(workers[0])
        driver.die(workers[1])
        assert driver.last(workers[0]) == Done(number)
        assert driver.events(workers[2], PeerLost)

    def test_lost_link_to_a_joint_server_is_blamed_on_its_worker(self) -> None:
        driver = Driver(size=2, num_servers=1)
        workers, _ = start(driver, ["a", "b"], ["s"])
        driver.say(workers[0], ReportLost(1, "connection reset", is_owner=True))
        driver.die(workers[1], "it was killed")
        (lost,) = driver.events(workers[0], PeerLost)
        assert isinstance(lost, PeerLost)
        assert (lost.role, lost.rank) == ("worker", 1)
        assert "connection reset" in lost.cause

    def test_new_generation_on_other_machines(self) -> None:
        driver = Driver(size=2, num_servers=1)
        workers, servers = start(driver, ["a", "b"], ["s"])
        for peer in workers:
            driver.leave(peer)
        assert driver.last(servers[0]) == NewGeneration(2)
        again, _ = start(driver, ["c", "c"], [])
        event = driver.last(servers[0])
        assert isinstance(event, NewJob)
        assert event.job.workers == job_of(driver, again[0]).workers
        assert event.job.machines == ((0, 1),)
        assert (event.job.me, event.job.generation, event.job.owners) == (2, 2, (2,))
