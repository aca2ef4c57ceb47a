# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs lose members: no step is lost, and all survivors have the same sums."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import programs_elastic
import pytest
from job import Job

from fastps.control.view_log import read_records

STALL_S = 5.0  # a step in which a member dies, on a loaded machine
SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "16384"}
ELASTIC = {"FASTPS_ELASTIC_MIN": "1"}
SHARED = {**ELASTIC, "FASTPS_SHARED_MEMORY": "1"}
SOCKETS = {**ELASTIC, **SMALL, "FASTPS_SHARED_MEMORY": "0"}
MIXED = {**SHARED, **SMALL, "FASTPS_FORCE_DISTRIBUTED": "1"}  # memory, then servers apart
LAYOUTS = {
    "shared": (SHARED, 0),
    "sockets": (SOCKETS, 0),
    "apart": (SOCKETS, 2),
    "mixed": (MIXED, 2),
}


def check(results: Mapping[int, Mapping[str, Any]], *, steps: int = 40) -> None:
    """Check that survivors have all steps, with the same sums, and took part in all of them."""
    sums = [result["sums"] for result in results.values()]
    assert all(len(one) == steps for one in sums)
    assert all(one == sums[0] for one in sums)
    least = sum(1 << rank for rank in results)
    for found in sums[0]:
        assert all(one & least == least for one in found), found
    assert sums[0][-1] == [least] * len(sums[0][-1])
    assert all(result["views"] for result in results.values())


def results_of(job: Job, *victims: int) -> dict[int, Any]:
    for rank in victims:
        assert job.workers[rank].wait() == -signal.SIGKILL, job.workers[rank].report()
    return {
        rank: worker.result() for rank, worker in enumerate(job.workers) if rank not in victims
    }


def run(
    program: Callable[..., Any], layout: str, *victims: int, workers: int = 3, fault: str = "",
    **arguments: Any,
) -> dict[int, Any]:  # fmt: skip
    """Run a job whose victims kill themselves, by fault or in their program; give the results."""
    environment, servers = LAYOUTS[layout]
    each = {("worker", rank): {"FASTPS_FAULT": f"{fault}:kill"} for rank in victims if fault}
    with Job(
        program, workers=workers, servers=servers, environment=environment, each=each,
        arguments=arguments,
    ) as job:  # fmt: skip
        return results_of(job, *victims)


SHARED_KILLS = [
    "local_arrive@40", "local_chunk@60", "local_stage@30", "worker_start@60", "board_mark@40",
    "board_mark@41", "board_report@20", "board_report@21",
]  # fmt: skip
LINK_KILLS = ["worker_start@60", "worker_result@150", "link_send@60", "link_recv@70"]
SERVER_KILLS = ["server_landing@200", "server_sum@60", "server_result@90", "link_recv@80"]


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("shared", one) for one in SHARED_KILLS]
    + [(layout, one) for layout in ("sockets", "apart") for one in LINK_KILLS]
    + [("sockets", one) for one in SERVER_KILLS],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_dies_at_an_exact_moment(layout, fault, victim):
    results = run(programs_elastic.train, layout, victim, fault=fault)
    check(results)
    assert max(result["slowest"] for result in results.values()) < STALL_S


@pytest.mark.parametrize("fault", SERVER_KILLS)
def test_a_server_dies_at_an_exact_moment(fault):
    each = {("server", 1): {"FASTPS_FAULT": f"{fault}:kill"}}
    with Job(programs_elastic.train, workers=3, servers=2, environment=SOCKETS, each=each) as job:
        results = results_of(job)
        assert job.processes["server", 1].wait() == -signal.SIGKILL
    check(results)


def test_workers_serve_themselves_when_all_servers_have_died():
    """Though there were servers enough for all of them at the start."""
    with Job(
        programs_elastic.train, workers=2, servers=2, environment=SOCKETS,
        arguments={"pause_s": 0.02},
    ) as job:  # fmt: skip
        for step, rank in ((5, 1), (15, 0)):
            job.workers[0].wait_line(f"STEP {step}")
            job.processes["server", rank].send(signal.SIGKILL)
        check(results_of(job))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_but_one_die_together(layout):
    environment, servers = LAYOUTS[layout]
    with Job(
        programs_elastic.train, workers=4, servers=servers, environment=environment,
        arguments={"pause_s": 0.02},
    ) as job:  # fmt: skip
        job.workers[3].wait_line("STEP 10")
        for rank in (0, 1, 2):
            job.workers[rank].send(signal.SIGKILL)
        results = results_of(job, 0, 1, 2)
    check(results)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_die_one_after_the_other(layout, seed):
    """Often while survivors of the last loss are about to begin the next view."""
    environment, servers = LAYOUTS[layout]
    rng = random.Random(f"{layout} {seed}")
    victims = rng.sample(range(5), 3)
    with Job(
        programs_elastic.train, workers=5, servers=servers, environment=environment,
        arguments={"steps": 80},
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.wait_line("STEP 2")
        for rank in victims:
            job.workers[rank].send(signal.SIGKILL)
            time.sleep(rng.choice([0.0, 0.005, 0.02, 0.05, 0.2]))
        results = results_of(job, *victims)
    check(results, steps=80)


def test_a_stopped_worker_is_killed_before_the_others_go_on():
    environment = {**SHARED, "FASTPS_LEASE_S": "1", "FASTPS_HEARTBEAT_S": "0.2"}
    with Job(
        programs_elastic.train, workers=3, servers=0, environment=environment,
        arguments={"pause_s": 0.02},
    ) as job:  # fmt: skip
        job.workers[1].wait_line("STEP 5")
        job.workers[1].send(signal.SIGSTOP)
        results = results_of(job, 1)
    check(results)


def test_results_may_be_awaited_in_any_order():
    results = run(programs_elastic.wait_apart, "shared")
    assert [result["sums"] for result in results.values()] == [[[7, 7]] * 30] * 3


def test_a_broadcast_keeps_its_root_when_ranks_close_up():
    results = run(programs_elastic.broadcast, "shared", 0, fault="local_arrive@12", root=2)
    assert results[1]["found"] == results[2]["found"]
    for result in results.values():
        # the rank 2 is nobody's after the loss, which the next call says
        assert result["found"] == [200 + step for step in range(len(result["found"]))]


def test_an_average_is_over_those_who_took_part():
    results = run(programs_elastic.average, "shared", 1, fault="local_arrive@12")
    found = results[0]["found"]
    assert found == results[2]["found"]
    assert set(found) == {6.0}  # (0 + 6 + 12) / 3 and (0 + 12) / 2


def test_below_the_least_number_all_end_with_the_cause():
    environment = {**SHARED, "FASTPS_ELASTIC_MIN": "2"}
    with Job(
        programs_elastic.broadcast, workers=2, servers=0, environment=environment,
        arguments={"root": 0}, each={("worker", 1): {"FASTPS_FAULT": "local_arrive@9:kill"}},
    ) as job:  # fmt: skip
        survivor = job.workers[0]
        assert survivor.wait() != 0
        assert "FASTPS_ELASTIC_MIN" in survivor.stderr()


@pytest.mark.parametrize("layout", ["shared", "sockets"])
def test_nobody_works_alone_while_a_view_begins(layout):
    results = run(programs_elastic.look_on, layout, 1, steps=400, victim=1)
    for result in results.values():
        assert result["seen"] == [2, 3]
        assert set(result["gathered"]) == {2, 3}
        assert len(result["errors"]) <= 1


def check_collectives(results: Mapping[int, Mapping[str, Any]], *, steps: int) -> None:
    """Check that survivors have the same results, and none is of two steps at once."""
    found = [result["found"] for result in results.values()]
    assert all(one == found[0] for one in found)
    assert len(found[0]) == steps
    for step, numbers in enumerate(found[0]):
        if step % 9 == 6:
            assert numbers == [step]
        for number in numbers if step % 9 != 6 else ():
            bits, steps_of = number % (1 << programs_elastic.STEP_BIT), number >> 16
            assert steps_of == step * bits.bit_count(), (step, numbers)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["shared", "sockets", "mixed"])
def test_an_operation_is_complete_on_all_survivors_or_none(layout, seed):
    environment, servers = LAYOUTS[layout]
    rng, steps = random.Random(f"{layout} {seed}"), 180
    victims = rng.sample(range(4), 2)
    with Job(
        programs_elastic.collectives, workers=4, servers=servers, environment=environment,
        arguments={"steps": steps},
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.wait_line("STEP 9")
        for rank in victims:
            time.sleep(rng.uniform(0.0, 0.03))
            job.workers[rank].send(signal.SIGKILL)
            time.sleep(rng.choice([0.0, 0.02, 0.2]))
        results = results_of(job, *victims)
    check_collectives(results, steps=steps)


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_a_job_is_made_again_with_the_same_losses_and_bits(layout, tmp_path):
    environment, servers = LAYOUTS[layout]
    log = str(tmp_path / "views.jsonl")
    digests = []
    for name, deaths in (("FASTPS_VIEW_LOG", {"1": 20, "3": 45}), ("FASTPS_REPLAY", {})):
        with Job(
            programs_elastic.learn, workers=4, servers=servers,
            environment={**environment, name: log}, arguments={"steps": 70, "deaths": deaths},
        ) as job:  # fmt: skip
            for rank in (1, 3):
                assert job.workers[rank].wait() != 0
            digests += [job.workers[rank].result() for rank in (0, 2)]
    assert len(set(digests)) == 1
    records = read_records(log)
    assert [one.workers for one in records] == [(0, 1, 2, 3), (0, 2, 3), (0, 2)]
    assert sum(records[-1].committed[f"noise {place}"] for place in range(3)) == 70


@pytest.mark.parametrize("layout", ["shared", "sockets"])
def test_who_waits_late_is_told_at_once_that_the_view_has_changed(layout):
    results = run(programs_elastic.wait_late, layout, 1, victim=1)
    for result in results.values():
        assert "worker 1" in result["text"]
        assert "call the operation again on all workers" in result["text"]
        assert result["seconds"] < 1.0


@pytest.mark.parametrize("layout", ["shared", "sockets"])
def test_a_barrier_keeps_no_other_thread_and_is_repeated(layout):
    results = run(programs_elastic.barriers, layout, 2, victim=2)
    assert [one["found"] for one in results.values()] == [[[3] * 3] * 10 + [[2] * 3] * 10] * 2


def test_what_nobody_waited_for_is_in_place():
    results = run(programs_elastic.in_place, "shared", workers=2)
    assert (
        list(results.values()) == [{"polled": [4] * 3, "dropped": [2] * 3, "of_set": [2] * 3}] * 2
    )


@pytest.mark.parametrize("layout", ["shared", "sockets"])
def test_a_worker_that_leaves_early_is_named_at_once(layout):
    results = run(programs_elastic.leave_early, layout, steps=8)
    for rank in (0, 2):
        assert "worker 1 left the job while others still had work" in results[rank]["text"]
        assert results[rank]["seconds"] < STALL_S


def test_who_leaves_takes_part_in_what_has_landed():
    results = run(programs_elastic.leave_at_once, "shared", workers=2)
    assert results[0]["found"] == [2] * 3
    assert run(programs_elastic.leave_a_maximum, "shared", workers=2)[0]["found"] == [1] * 4


def test_on_view_may_not_communicate():
    results = run(programs_elastic.tell_and_communicate, "shared", 1, fault="local_arrive@12")
    for result in results.values():
        assert len(result["texts"]) == 2
        assert all("on_view must not communicate" in text for text in result["texts"])


def test_a_wait_ends_in_its_time_and_may_be_called_again():
    results = run(programs_elastic.wait_in_time, "shared", workers=2)
    assert results[0] == {"is_late": True, "found": [2] * 3}


def test_a_window_of_an_earlier_view_says_whose_loss_ended_it():
    results = run(programs_elastic.use_windows, "shared", 1, victim=1)
    for result in results.values():
        assert "window 'w' has ended: worker 1 (" in result["text"]
        assert result["found"] == [1] * 3


def test_names_that_go_two_ways_are_found_out_without_worker_0():
    found = run(programs_elastic.start_differently, "shared", 0)
    assert len(set(found.values())) == 1, found
    assert "allreduce (max)" in found[1], found


@pytest.mark.parametrize("layout", ["shared", "apart"])
def test_what_is_counted_goes_on_in_the_next_view(layout):
    for one in run(programs_elastic.count, layout, 2, steps=20, victim=2).values():
        assert [steps for steps, _ in one["counts"]] == list(range(20)), one
        operations = [count for _, count in one["counts"]]
        assert operations == sorted(operations), operations
        assert operations[-1] >= 20
