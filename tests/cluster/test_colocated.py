# SPDX-License-Identifier: Apache-2.0
"""Workers that serve too, as processes on one host that each count as a machine."""

from __future__ import annotations

import signal
import time

import programs_colocated
import programs_numpy
import pytest
from harness import clean_environ
from job import Job, run_job

LIMIT_S = 5.0
WAIT_FOR_REFUSAL_S = 30.0  # not the start timeout of 60 s
SPARE_RSS_KIB = 8192
APART = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_PARTITION_BYTES": "65536"}


@pytest.mark.parametrize(
    ("workers", "servers", "settings", "joint"),
    [
        (2, 0, {}, {"0": 0, "1": 1}),
        (3, 1, {"FASTPS_COLOCATE": "on"}, {"0": 1, "1": 2, "2": 3}),
        (2, 2, {}, {}),
        (4, 0, {"FASTPS_UNIX_SOCKETS": "0", "FASTPS_LINKS_PER_PEER": "2"}, {"0": 0, "1": 1}),
        (2, 0, {"FASTPS_PARTITION_BYTES": "4096", "FASTPS_CHUNK_BYTES": "4096"}, {"0": 0}),
    ],
)
def test_sums_broadcasts_and_barriers(workers, servers, settings, joint):
    places = run_job(
        programs_colocated.work,
        workers=workers,
        servers=servers,
        environment=APART | settings,
        arguments={"rounds": 2},
    )
    has_unix = (clean_environ() | settings).get("FASTPS_UNIX_SOCKETS") != "0"
    for place in places:
        assert place["machines"] == [[rank] for rank in range(workers)]
        assert place["apart"] == servers
        assert joint.items() <= place["joint"].items()
        assert len(place["joint"]) == (workers if joint else 0)
        assert set(place["unix"]) == {has_unix}


def test_named_machines_and_a_second_membership():
    each = {("worker", rank): {"FASTPS_MACHINE": name} for rank, name in enumerate("ab")}
    environment = {"FASTPS_PARTITION_BYTES": "65536"}
    with Job(
        programs_colocated.work,
        servers=1,
        environment=environment,
        each=each,
        arguments={"memberships": 3, "rounds": 1},
    ) as job:
        for place in job.results():
            assert place["joint"] == {"0": 1, "1": 2}
        job.end_in_order()


def test_memberships_leave_nothing():
    found = run_job(
        programs_numpy.cycles,
        servers=0,
        environment=APART,
        arguments={"count": 25, "warm": 5},
    )
    for first, last in found:
        # a thread that was joined may still be on its way out; twenty memberships would leave more
        assert last["threads"] <= first["threads"] + 2
        assert last["fds"] <= first["fds"] + 2
        assert last["rss_kib"] <= first["rss_kib"] + SPARE_RSS_KIB


@pytest.mark.parametrize(("servers", "weights"), [(0, [1, 1, 1]), (1, [4, 2, 2, 2])])
def test_bytes_follow_the_weights(servers, weights):
    found = run_job(
        programs_colocated.shares,
        workers=3,
        servers=servers,
        environment=APART | {"FASTPS_COLOCATE": "on"},
    )
    for place in found:
        nbytes, own = place["nbytes"], place["joint"][str(place["rank"])]
        parts = [weight / sum(weights) for weight in weights]
        for index, part in enumerate(parts):
            assert place["owned"][str(index)] == pytest.approx(part * nbytes, rel=0.02)
        # what a worker pushes to itself takes no link; what it serves comes from the two others
        assert place["sent"] == pytest.approx((1 - parts[own]) * nbytes, rel=0.02)
        assert place["served"] == pytest.approx(2 * parts[own] * nbytes, rel=0.02)


@pytest.mark.parametrize("servers", [0, 1])
def test_death_of_a_joint_worker(servers):
    environment = APART | {"FASTPS_COLOCATE": "on"}
    with Job(programs_colocated.train, workers=3, servers=servers, environment=environment) as job:
        victim = job.workers[0]
        job.workers[1].wait_line("STEP", times=2)
        killed_at = victim.send(signal.SIGKILL)
        for worker in job.workers[1:]:
            result = worker.result()
            assert result["error"] == "PeerLostError", result
            assert "worker 0" in result["text"], result
            assert result["at"] - killed_at < LIMIT_S
        for process in job.others(victim):
            process.wait()


def test_death_within_the_server_of_a_worker():
    each = {("worker", 1): {"FASTPS_FAULT": "server_sum@50:kill"}}
    with Job(programs_colocated.train, workers=2, servers=0, environment=APART, each=each) as job:
        assert job.workers[1].wait() == -signal.SIGKILL
        result = job.workers[0].result()
        assert result["error"] == "PeerLostError", result
        assert "worker 1" in result["text"]


@pytest.mark.parametrize("patience_s", ["0.3", "10"])
def test_orderly_exit_while_others_push(patience_s):
    environment = APART | {"FASTPS_SHUTDOWN_TIMEOUT_S": patience_s}
    with Job(
        programs_colocated.train,
        workers=3,
        servers=0,
        environment=environment,
        arguments={"leaver": 1},
    ) as job:
        left_at = float(job.workers[1].wait_line("LEAVING").split()[1])
        job.workers[1].result()
        for rank in (0, 2):
            result = job.workers[rank].result()
            assert result["error"] == "PeerLostError", result
            assert "worker 1" in result["text"], result
            assert result["at"] - left_at < LIMIT_S


def test_nobody_is_blamed_when_nothing_is_needed_from_the_one_that_left():
    environment = APART | {"FASTPS_SHUTDOWN_TIMEOUT_S": "0.3", "FASTPS_LINGER_S": "0.3"}
    with Job(
        programs_colocated.leave_while_idle,
        workers=3,
        servers=0,
        environment=environment,
        arguments={"pause_s": 2.5},
    ) as job:
        assert [worker.result() for worker in job.workers] == [
            {"rank": 0},
            {"rank": 1},
            {"rank": 2},
        ]
        assert job.scheduler.wait() == 0
        assert "is lost" not in "".join(worker.stderr() for worker in job.workers)


def test_first_one_to_leave_serves_the_others_to_the_end():
    found = run_job(
        programs_colocated.leave_one_by_one,
        workers=3,
        servers=0,
        environment=APART,
        arguments={"pause_s": 0.5},
    )
    assert found[0]["took"] > 0.9  # the last one came after a second


def test_bytes_move_while_the_interpreter_of_a_server_is_busy():
    found = run_job(programs_colocated.busy, workers=2, servers=0, environment=APART)
    assert found[0]["held"] > 0.9
    assert found[1]["took"] < 0.7 * found[0]["held"]


def test_nobody_serves():
    environment = APART | {"FASTPS_COLOCATE": "off"}
    with Job(programs_colocated.work, workers=2, servers=0, environment=environment) as job:
        began = time.monotonic()
        for worker in job.workers:
            assert worker.wait() == 1
            assert "ConfigError" in worker.stderr()
            assert "FASTPS_COLOCATE=auto" in worker.stderr()
        assert job.scheduler.wait() == 1
        assert time.monotonic() - began < WAIT_FOR_REFUSAL_S
