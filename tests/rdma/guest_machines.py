# SPDX-License-Identifier: Apache-2.0
"""Jobs on several machines; runs on machine 0 of three, of which the last has no RDMA device.

In the order of the file: the last test loses machine 1.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from machine_hand import Remote, address_of

JOB_S = 100.0
TROUBLE = {
    "FASTPS_RDMA_TIMEOUT_S": "3",
    "FASTPS_LEASE_S": "30",  # long enough that it is the device that notices first
    "FASTPS_SHUTDOWN_TIMEOUT_S": "1",
}
NOTICE_S = 9.0  # the device rounds up, the verdict takes 2 s, and the machine is slow
SHUTDOWN_S = 5.0  # of three steps
SOON_S = 9.0  # both processes come up, ask and are refused; the start timeout is far away
WITHOUT = 2  # the machine without a device
PORTS = itertools.count(7100)
RDMA_SAID = "is reached by RDMA: RDMA over rxe0 port 1, GID 1"

pytestmark = pytest.mark.timeout(150)


def settings(machines: tuple[int, ...], scheduler: int, **more: str) -> dict[str, str]:
    """Give the environment of a job by hand."""
    return {
        "FASTPS_SIZE": str(len(machines)),
        "FASTPS_SCHEDULER_HOST": address_of(scheduler),
        "FASTPS_SCHEDULER_PORT": str(next(PORTS)),
        "FASTPS_TOKEN": "the same secret on all machines",
        "FASTPS_PARTITION_BYTES": "262144",
        "FASTPS_START_TIMEOUT_S": str(JOB_S),
        "FASTPS_LOG_LEVEL": "INFO",
        **more,
    }


@contextlib.contextmanager
def job(
    function: str,
    *machines: int,
    servers: tuple[int, ...] = (),
    scheduler: int = 0,
    trouble: str = "",
    **more: str,
) -> Iterator[list[Remote]]:
    """Start a worker on each machine, a scheduler, and servers apart where it says."""
    environ = settings(machines, scheduler, **more) | {"FASTPS_NUM_SERVERS": str(len(servers))}
    if servers:
        environ["FASTPS_COLOCATE"] = "off"
    with contextlib.ExitStack() as stack:
        begin = stack.enter_context
        begin(Remote(scheduler, "server", environ=environ, role="scheduler"))
        for machine in servers:
            begin(Remote(machine, "server", environ=environ))
        workers = []
        for rank, machine in enumerate(machines):
            keywords = {"trouble": trouble} if trouble and rank else {}
            own = environ | {"FASTPS_RANK": str(rank)}
            workers.append(begin(Remote(machine, function, environ=own, **keywords)))
        yield workers


def results(workers: list[Remote], timeout_s: float = JOB_S) -> list[Any]:
    """Wait for all; give what they returned."""
    return [worker.result(timeout_s=timeout_s) for worker in workers]


def lines_with(worker: Remote, text: str) -> list[str]:
    """Give the lines of a worker's log that hold a text."""
    return [line for line in worker.lines if text in line]


# ---- which transport is taken ----


def test_fastps_run_on_two_machines():
    words = ["--machines", "2", "--scheduler-host", address_of(0), "--scheduler-port", "7654"]
    words += ["--start-timeout", str(JOB_S), "--log-level", "INFO"]
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(Remote(machine, "launch", words=words)) for machine in range(2)
        ]
        assert results(launchers) == [0, 0]
    for rank, launcher in enumerate(launchers):
        other = f"[worker {rank}] INFO server {1 - rank} (in worker {1 - rank}) {RDMA_SAID}"
        assert lines_with(launcher, other), launcher
        line = lines_with(launcher, f"[worker {rank}] RESULT ")[0]
        check_links(json.loads(line.partition("RESULT ")[2]))


def check_links(counts: dict[str, int]) -> None:
    """Check that frames went over RDMA both ways, most of them by standing grants."""
    assert counts["announced"] > 0, counts
    assert counts["standing"] > counts["announced"], counts
    assert counts["work_requests"] > counts["standing"], counts
    assert counts["server_work_requests"] > 0, counts


def test_a_server_apart_is_reached_by_rdma_from_other_machines_only():
    with job("sums", 0, 1, servers=(1,)) as workers:
        far, near = results(workers)
        assert far["work_requests"] > 0, far
        assert near["work_requests"] == 0 < near["bytes_sent"], near
        assert lines_with(workers[0], f"server 0 {RDMA_SAID}"), workers[0]
        assert not lines_with(workers[1], "RDMA"), workers[1]


def test_a_machine_without_a_device_takes_tcp_and_says_why():
    with job("sums", 0, 1, WITHOUT) as workers:
        counts = results(workers)
    assert [count["work_requests"] > 0 for count in counts] == [True, True, False], counts
    for worker in workers[:2]:
        assert lines_with(worker, RDMA_SAID), worker
        assert lines_with(
            worker, "server 2 (in worker 2) is reached without RDMA: the peer has no RDMA device"
        ), worker
    why = lines_with(workers[2], "without RDMA: the kernel knows no RDMA device")
    assert len(why) == 2, workers[2]


def test_a_fabric_that_carries_nothing_gives_way_to_tcp():
    """Found out before the first tensor, by a message that does not arrive."""
    with job("astray", 0, 1, FASTPS_RDMA_GID_INDEX="2", FASTPS_RDMA_TIMEOUT_S="1") as workers:
        counts = results(workers)
    assert [count["work_requests"] for count in counts] == [0, 0], counts
    for rank, worker in enumerate(workers):
        why = f"server {1 - rank} (in worker {1 - rank}): no RDMA, TCP takes its place: "
        (line,) = lines_with(worker, why)
        assert "retry counter exceeded" in line or "ended while" in line, line


def test_rdma_without_a_device_is_refused_at_once():
    """On both sides, each with what it knows."""
    with job("refused", 0, WITHOUT, FASTPS_TRANSPORT="rdma") as workers:
        found = results(workers)
    for end, why in zip(found, ("the peer has no", "the kernel knows no"), strict=True):
        assert end["type"] == "ConfigError", found
        assert f"FASTPS_TRANSPORT=rdma, but {why} RDMA device" in end["text"], found
        assert "see `fastps doctor`" in end["text"], found
        assert end["after_s"] < SOON_S, found


# ---- what happens to machines ----


def is_gone(text: str, peer: int) -> bool:
    """Tell whether an error says that a machine is gone, by whichever noticed it first."""
    device, connection = "transport retry counter exceeded", "the peer's machine does not answer"
    return any(f"on the link to peer {peer}: {why}" in text for why in (device, connection))


def in_trouble(trouble: str, *, scheduler: int = 0) -> list[Any]:
    """Run a job of which machine 1 gets into trouble; give what both ends noticed."""
    with job("until_lost", 0, 1, scheduler=scheduler, trouble=trouble, **TROUBLE) as workers:
        found = results(workers[:1] if trouble == "vanish" else workers)
    print(*workers, sep="\n")
    for end in found:
        assert end["type"] == "PeerLostError", found
        assert end["after_s"] < NOTICE_S, found
        assert end["shutdown_s"] < SHUTDOWN_S, found
    return found


def test_a_network_that_is_cut_is_noticed_at_both_ends():
    """Only the far end can still ask the scheduler, which knows nothing but silence."""
    far, near = in_trouble("cut")
    assert "worker 1 (machine-1, pid" in far["text"], far
    assert is_gone(far["text"], 1), far
    assert "it has given no sign of life for" in far["text"], far
    assert "the link to server 0 (in worker 0) broke" in near["text"], near
    assert "the device's port is down" in near["text"], near


def test_an_address_that_is_taken_away_ends_the_links_over_it():
    for end in in_trouble("readdress"):
        assert "worker 1 (machine-1" in end["text"], end
        assert "the address (GID) of the device's port changed" in end["text"], end


def test_a_network_that_came_back_is_used_again():
    with job("sums", 0, 1) as workers:
        for counts in results(workers):
            check_links(counts)


def test_a_lost_machine_is_noticed():
    """It takes the scheduler along: what the other end knows by itself has to do."""
    (found,) = in_trouble("vanish", scheduler=1)
    assert "the link to server 1 (in worker 1) broke" in found["text"], found
    assert is_gone(found["text"], 1), found
