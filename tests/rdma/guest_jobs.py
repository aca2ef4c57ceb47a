# SPDX-License-Identifier: Apache-2.0
"""Whole jobs over RDMA, servers and all, and under Yama; runs where there is a device."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs_rdma
import pytest
from harness import ROOT, clean_environ, reports_of, write_script
from job import Job, run_workers

HERE = Path(__file__).parent
SLOW = {"FASTPS_START_TIMEOUT_S": "150", "FASTPS_HANDSHAKE_TIMEOUT_S": "60"}
RDMA = SLOW | {"FASTPS_TRANSPORT": "rdma"}
JOB_TIMEOUT_S = 170.0
NOTICE_S = 5.0  # the device alone would need eight seconds; usual are some milliseconds
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import programs_rdma
report(programs_rdma.sums())
report(programs_rdma.training())
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Give what two workers with two servers found in two memberships of one job."""
    result = run_workers(
        SCRIPT.format(folder=str(HERE)),
        tmp_path_factory.mktemp("job"),
        timeout_s=JOB_TIMEOUT_S,
        environ=RDMA | {"FASTPS_PARTITION_BYTES": "16384"},
    )
    return list(result.check().reports)


@pytest.mark.timeout(200)
def test_every_dtype_and_what_it_costs(reports):
    """The workers compare the sums themselves; from the third round on nothing is announced."""
    for found, _ in reports:
        assert found["links"]
        assert found["announced"] == 0, found
        assert found["pinnings_for_one_frame"] == 0, found
        assert found["standing"] > 0.9 * found["frames_sent"], found
        # one for each frame, and now and then one that returns credit
        assert found["work_requests"] <= 1.2 * found["frames_sent"], found


@pytest.mark.timeout(200)
def test_a_training_without_a_framework(reports):
    first, second = (weights for _, weights in reports)
    assert first == second
    loss, begin = first[:2]
    assert loss < 0.5 * begin


@pytest.mark.timeout(200)
@pytest.mark.parametrize("role", ["worker", "server"])
def test_a_killed_process_is_noticed_at_once(role):
    with Job(programs_rdma.until_lost, servers=1, environment=RDMA) as job:
        for worker in job.workers:
            worker.wait_line("busy", timeout_s=JOB_TIMEOUT_S)
        victim = job.workers[1] if role == "worker" else job.servers[0]
        killed_at = victim.send(signal.SIGKILL)
        found = job.workers[0].result()
        assert found["at"] - killed_at < NOTICE_S, found
        assert f"{role} {1 if role == 'worker' else 0}" in found["error"]


@pytest.mark.timeout(100)
def test_the_doctor_finds_the_device():
    done = subprocess.run(
        [sys.executable, "-m", "fastps", "doctor"],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert "RDMA over rxe0 port 1" in done.stdout
    assert "; it reaches itself" in done.stdout


OPERATIONS = """
import sys
sys.path.insert(0, {folder!r})
import fastps, numpy as np
import programs_collectives as programs
from fastps.session import current
fastps.init()
world = current.current().groups.world
for count in (3, 40_000):
    programs.reductions(world, np.copy, count, "float32", programs.Op.SUM)
    programs.moves(world, np.copy, count)
    programs.letters(world, np.copy, count)
report([fastps.statistics()["work_requests"], fastps.statistics()["bytes_over_links"]])
"""


@pytest.mark.timeout(200)
def test_operations_among_workers(tmp_path):
    """Messages between workers go by RDMA where it is there."""
    result = run_workers(
        OPERATIONS.format(folder=str(ROOT / "tests" / "cluster")),
        tmp_path,
        servers=0,
        timeout_s=JOB_TIMEOUT_S,
        environ=RDMA | {"FASTPS_SHARED_MEMORY": "0"},
    )
    for ((requests, nbytes),) in result.check().reports:
        assert requests > 0
        assert nbytes > 5 * 40_000 * 4


YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
UNDER_YAMA = """
from pathlib import Path
import fastps, numpy as np
status = Path("/proc/self/status").read_text()
assert not int(status.partition("CapEff:")[2].split()[0], 16) >> 19 & 1  # CAP_SYS_PTRACE
fastps.init()
found, _ = fastps.alltoall(np.full(300_000, fastps.rank(), np.float32), [100_000] * 3)
assert np.array_equal(found, np.repeat(np.arange(3), 100_000))
report(fastps.statistics()["peer_memory"])
fastps.shutdown()
"""
# What stands between launcher and workers; of worker 2 nobody says who the launcher is.
SHELL = 'if [ "$FASTPS_RANK" = 2 ]; then unset FASTPS_LAUNCHER_PID; fi; "$@"; exit $?'


@pytest.mark.timeout(200)
def test_under_yama_workers_behind_a_shell_reach_into_each_other(tmp_path):
    YAMA.write_text("1")
    path = write_script(UNDER_YAMA, tmp_path)
    limited = ("setpriv", "--bounding-set", "-sys_ptrace")  # root might reach into anybody
    launcher = (sys.executable, "-m", "fastps.launch.run", "--timeout", str(JOB_TIMEOUT_S))
    done = subprocess.run(
        [*limited, *launcher, "-np", "3", "sh", "-c", SHELL, "sh", sys.executable, str(path)],
        cwd=ROOT,
        env=clean_environ() | SLOW | {"FASTPS_SHARED_MEMORY": "1"},
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S + 20,
        check=False,
    )
    YAMA.write_text("0")
    assert done.returncode == 0, done.stdout + done.stderr
    # worker 2 has opened its memory to descendants of its shell, of which others are none
    assert [reports_of(path, rank) for rank in range(3)] == [(1,), (1,), (2,)], done.stderr
