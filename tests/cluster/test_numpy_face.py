# SPDX-License-Identifier: Apache-2.0
"""The NumPy face over whole jobs: every dtype, operation and shape of job, against NumPy.

The workers compare bit for bit (programs_numpy.py); the tests choose the jobs, and compare what
the workers found with each other and between jobs.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import programs_numpy
import pytest
from harness import ROOT, clean_environ
from job import Job, Process, run_job

from fastps.launch import torch_names

SHARED = {"FASTPS_SHARED_MEMORY": "1"}
SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "8192"}
SPARE_RSS_KIB = 8 << 10  # caches of the allocator; a leak of 1 KiB per step would be 10 MiB
SPARE_DESCRIPTORS = 2

JOBS = [
    pytest.param(1, 1, {}, id="1x1"),
    pytest.param(1, 3, SMALL, id="1x3-small"),
    pytest.param(2, 1, SMALL | {"FASTPS_INLINE_SUM_BYTES": "0", "FASTPS_KEY_HASH": "naive"},
                 id="2x1-engines-only"),
    pytest.param(4, 2, SMALL | {"FASTPS_ENGINE_THREADS": "2", "FASTPS_INLINE_SUM_BYTES": "4096",
                                "FASTPS_KEY_HASH": "djb2"}, id="4x2-two-engines"),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "servers", "environment"), JOBS)
def test_reductions_equal_numpy_bit_for_bit(workers, servers, environment):
    found = run_job(
        programs_numpy.reductions, workers=workers, servers=servers, environment=environment
    )
    assert len(set(found)) == 1


def test_bits_depend_on_nothing_but_the_inputs():
    """The same bits in every run and for every number of servers, threads and partitions."""
    settings = [
        (2, {}),
        (3, SMALL | {"FASTPS_LINKS_PER_PEER": "2", "FASTPS_IO_THREADS": "2",
                     "FASTPS_KEY_HASH": "built_in"}),
        (3, SMALL | {"FASTPS_ENGINE_THREADS": "0", "FASTPS_CREDIT_BYTES": "16384",
                     "FASTPS_KEY_HASH": "sdbm"}),
    ]  # fmt: skip
    found = [
        run_job(
            programs_numpy.reductions, workers=3, servers=servers, environment=environment,
            arguments={"sizes": [777, programs_numpy.MANY]},
        )
        for servers, environment in settings
    ]  # fmt: skip
    assert len({digest for run in found for digest in run}) == 1


@pytest.mark.parametrize(
    ("workers", "servers", "environment"),
    [
        (2, 2, {"FASTPS_SPIN_US": "0"}),
        (3, 2, SMALL | {"FASTPS_LINKS_PER_PEER": "2"}),
        (2, 0, SHARED),
        (3, 0, SHARED),
    ],
)
def test_shapes_sequences_orders_and_threads(workers, servers, environment):
    found = run_job(
        programs_numpy.shapes_and_flows, workers=workers, servers=servers, environment=environment
    )
    assert len(set(found)) == 1


@pytest.mark.parametrize(("workers", "servers", "environment"), [(2, 1, {}), (3, 2, SMALL)])
def test_broadcast_objects_and_barrier(workers, servers, environment):
    found = run_job(
        programs_numpy.broadcasts, workers=workers, servers=servers, environment=environment
    )
    assert found == [[str(rank), str(rank), str(workers)] for rank in range(workers)]


RANDOM_JOBS = [
    pytest.param(2, 2, 150, 60_000, SMALL, id="2x2"),
    pytest.param(3, 2, 100, 60_000, SMALL | {"FASTPS_LINKS_PER_PEER": "3",
        "FASTPS_IO_THREADS": "2", "FASTPS_ENGINE_THREADS": "2"}, id="3x2"),
    pytest.param(3, 2, 60, 60_000, SMALL | {"FASTPS_CREDIT_BYTES": "20000"}, id="credit"),
    pytest.param(2, 2, 10, 3_000_000, {}, id="large"),
    pytest.param(2, 1, 300, 300, {}, id="small"),
    pytest.param(4, 3, 250, 60_000, SMALL | {"FASTPS_LINKS_PER_PEER": "2"}, id="long",
                 marks=pytest.mark.stress),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "servers", "steps", "elements", "environment"), RANDOM_JOBS)
def test_random_programs_equal_numpy(workers, servers, steps, elements, environment):
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    found = run_job(
        programs_numpy.random_program, workers=workers, servers=servers, environment=environment,
        arguments={"seed": seed, "steps": steps, "elements": elements},
    )  # fmt: skip
    assert len(set(found)) == 1


def test_one_worker_needs_no_other_process():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    program = (
        "import fastps, programs_numpy as p\n"
        "assert p.identity() == [0, 1, 0, 1]\n"
        "p.reductions(); fastps.shutdown()\n"
        "p.shapes_and_flows(); p.broadcasts(); fastps.shutdown()\n"
        "first, last = p.cycles(count=1000, warm=10)\n"
        "assert last['fds'] == first['fds'] and last['threads'] == first['threads'], last\n"
        "assert last['rss_kib'] < first['rss_kib'] + 4096, (first, last)\n"
        f"first, last = p.failing_starts(count=20, port={port})\n"
        "assert last['fds'] == first['fds'] and last['threads'] == first['threads'], last\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env=clean_environ() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


WITHOUT = dict.fromkeys(
    ("FASTPS_SIZE", "FASTPS_NUM_SERVERS", "FASTPS_RANK", "FASTPS_LOCAL_RANK", "FASTPS_LOCAL_SIZE",
     "FASTPS_SCHEDULER_HOST", "FASTPS_SCHEDULER_PORT", "FASTPS_ROLE", *torch_names.NAMES)
)  # fmt: skip


class AliasJob(Job):
    """A job whose workers are named by another system's variables."""

    def start(self, spec):
        if spec.role == "worker":
            own = self.names(spec.rank)
            self._each = {**self._each, ("worker", spec.rank): WITHOUT | own}
        return super().start(spec)

    def names(self, rank: int) -> dict[str, str]:
        raise NotImplementedError


class TorchrunJob(AliasJob):
    """RANK and friends; ranks are the other way round than the order of starting."""

    def names(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(2 - rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(2 - rank),
            "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
            "FASTPS_SCHEDULER_PORT": str(self.scheduler_port), "FASTPS_NUM_SERVERS": "1",
        }  # fmt: skip


class BytepsJob(AliasJob):
    """DMLC and BYTEPS variables: two machines of two, all here."""

    def names(self, rank: int) -> dict[str, str]:
        return {
            "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": str(rank // 2),
            "BYTEPS_LOCAL_RANK": str(rank % 2), "BYTEPS_LOCAL_SIZE": "2", "DMLC_NUM_SERVER": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(self.scheduler_port),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("host", "environment"),
    [
        ("::1", {}),
        ("localhost", {"FASTPS_INTERFACE": "lo"}),
        ("127.0.0.1", {"FASTPS_INTERFACE": "127.0.0.0/8"}),
    ],
)
def test_addresses_and_interfaces(host, environment):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with Job(programs_numpy.identity, servers=1, host=host, environment=environment) as job:
        assert job.results() == [[0, 2, 0, 2], [1, 2, 1, 2]]
        job.end_in_order()


def test_ranks_of_torchrun():
    with TorchrunJob(programs_numpy.identity, workers=3, servers=1) as job:
        found = job.results()
        job.end_in_order()
    assert found == [[2, 3, 2, 3], [1, 3, 1, 3], [0, 3, 0, 3]]


def test_ranks_of_byteps():
    with BytepsJob(programs_numpy.identity, workers=4, servers=1) as job:
        found = job.results()
        job.end_in_order()
    assert found == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]


def footprint_of(process: Process) -> dict[str, int]:
    """Count descriptors, threads and resident KiB of another process."""
    folder = Path("/proc") / str(process.pid)
    fields = dict(
        line.split(":", 1) for line in (folder / "status").read_text("ascii").splitlines()
    )
    return {
        "fds": len(list((folder / "fd").iterdir())),
        "threads": int(fields["Threads"]),
        "rss_kib": int(fields["VmRSS"].split()[0]),
    }


def check_growth(first: dict[str, int], last: dict[str, int], who: str) -> None:
    """Fail when a process has grown."""
    assert last["threads"] <= first["threads"], (who, first, last)
    assert last["fds"] <= first["fds"] + SPARE_DESCRIPTORS, (who, first, last)
    assert last["rss_kib"] <= first["rss_kib"] + SPARE_RSS_KIB, (who, first, last)


@pytest.mark.parametrize("more", [{"FASTPS_LINKS_PER_PEER": "2"}, SHARED], ids=["links", "shared"])
def test_a_hundred_memberships_leave_nothing(more):
    environment = {"FASTPS_LINGER_S": "60", **more}
    with Job(
        programs_numpy.cycles, arguments={"count": 100, "warm": 10}, environment=environment
    ) as job:
        for rank, (first, last) in enumerate(job.results()):
            check_growth(first, last, f"worker {rank}")
        for process in [*job.servers, job.scheduler]:
            found = footprint_of(process)
            assert found["fds"] < 40, (process.spec.name, found)
            assert found["threads"] < 20, (process.spec.name, found)
        job.end_in_order()


def test_ten_thousand_steps_leave_nothing():
    arguments = {"count": 10_000, "warm": 1000}
    with Job(programs_numpy.steps, arguments=arguments, environment=SMALL) as job:
        job.workers[0].wait_line("AT 1000")
        before = {item: footprint_of(item) for item in [*job.servers, job.scheduler]}
        job.workers[0].wait_line("AT 10000")
        for process, first in before.items():
            check_growth(first, footprint_of(process), process.spec.name)
        for rank, (first, last) in enumerate(job.results()):
            check_growth(first, last, f"worker {rank}")
        job.end_in_order()
