# SPDX-License-Identifier: Apache-2.0
"""fastps-run with the real servers: right sums, quiet logs, and the cause when something dies."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from launched import LIMIT_S, JobRunner, last_line

DEATH_LIMIT_S = 20.0  # the promise is 5 s; the machine may be busy
# Steps without end, as a training program makes them, until something dies.
STEPS = """
import os, numpy as np, fastps
fastps.init()
print("pid", os.getpid(), flush=True)
gradient = np.full(100_000, 1.0 + fastps.rank(), dtype=np.float32)
while True:
    total = fastps.push_pull(gradient, "gradient", average=False)
    assert (total == 3.0).all()
"""


@pytest.fixture
def job(tmp_path):
    """Run jobs with the real server program; none of their processes may be left."""
    found = JobRunner(tmp_path)
    yield found
    found.wait_gone()


def wait_pid(process, name):
    """Read the launcher's output until each worker is in its first step; give one's pid."""
    found = {}
    while len(found) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if "] pid " in line:
            mark, _, pid = line.partition("] pid ")
            found[mark.strip("[")] = int(pid)
    return found[name]


def pid_of_server(job, index):
    for pid in job.processes():
        with open(f"/proc/{pid}/environ", "rb") as file:
            names = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
        if names[b"FASTPS_ROLE"] == b"server" and names[b"FASTPS_RANK"] == b"%d" % index:
            return pid
    raise AssertionError(f"no server {index}")


def test_sums_are_right_and_nothing_is_said_about_it(job):
    result = job.run(
        job.python(
            "-np",
            "3",
            "-s",
            "2",
            code="""
            import numpy as np, fastps
            fastps.init()
            rank = fastps.rank()
            result = fastps.push_pull(np.arange(5.0) * (rank + 1), "x", average=False)
            assert (result == np.arange(5.0) * 6).all()
            print(rank, fastps.size(), fastps.local_rank(), fastps.local_size())
            fastps.shutdown()
            """,
        )
    )
    assert result.returncode == 0, result.stderr
    expected = [f"[worker {rank}] {rank} 3 {rank} 3" for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == expected
    assert result.stderr == ""


def test_worker_error_is_the_first_cause(job):
    result = job.run(
        job.python(
            "-np",
            "2",
            "-s",
            "2",
            code="""
            import numpy as np, fastps
            fastps.init()
            fastps.push_pull(np.ones(9), "before")
            if fastps.rank() == 1:
                raise ValueError("no such learning rate")
            fastps.push_pull(np.ones(9), "after")
            """,
        )
    )
    assert result.returncode == 1
    assert last_line(result).startswith("[fastps-run] worker 1 (pid ")
    assert last_line(result).endswith("Its last output: ValueError: no such learning rate")


def test_killed_worker_is_the_first_cause(job):
    with job.started(job.python("-np", "2", "-s", "2", code=STEPS)) as process:
        pid = wait_pid(process, "worker 0")
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began < DEATH_LIMIT_S
    assert process.returncode == 137
    assert stderr.splitlines()[-1].startswith(f"[fastps-run] worker 0 (pid {pid}) was killed by")


def test_killed_server_is_the_first_cause(job):
    with job.started(job.python("-np", "2", "-s", "2", code=STEPS)) as process:
        wait_pid(process, "worker 0")
        pid = pid_of_server(job, 1)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began < DEATH_LIMIT_S
    assert process.returncode == 137
    assert stderr.splitlines()[-1].startswith(f"[fastps-run] server 1 (pid {pid}) was killed by")


def test_stopped_worker_is_the_first_cause(job):
    command = job.python("-np", "2", "-s", "1", "--env", "FASTPS_LEASE_S=2", code=STEPS)
    with job.started(command) as process:
        pid = wait_pid(process, "worker 1")
        os.kill(pid, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    last = stderr.splitlines()[-1]
    assert last.startswith(f"[fastps-run] worker 1 (pid {pid}) is lost: it was silent"), stderr


@pytest.mark.parametrize("servers", ["0", "1"])
@pytest.mark.parametrize("other", ["raise", "os._exit(7)", "raise RuntimeError('no training')"])
def test_who_raises_is_the_first_cause_however_late_it_ends(job, servers, other):
    """As with torch, whose programs need seconds to end after an exception."""
    program = f"""
        import atexit, os, signal, numpy as np, fastps
        if os.environ["FASTPS_RANK"] == "1":
            atexit.register(signal.pause)
        fastps.init()
        try:
            for step in range(1_000_000):
                if step == 5 and fastps.rank() == 1:
                    raise ValueError("bad batch\\nin data.bin")
                fastps.push_pull(np.ones(100, np.float32), "x")
        except fastps.FastPSError:
            {other}
    """
    result = job.run(job.python("-np", "2", "-s", servers, "--grace", "1", code=program))
    last = last_line(result)
    assert re.fullmatch(
        r"\[fastps-run\] worker 1 \(pid \d+\) is lost: its program ended with ValueError: bad "
        r"batch in data.bin; it failed first, so the job was ended", last
    ), result.stderr  # fmt: skip
    assert result.returncode == 1  # its own, and not of those who lost it


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_who_ends_well_too_early_is_the_first_cause(job, end):
    program = f"""
        import os, sys, numpy as np, fastps
        fastps.init()
        for step in range(1_000_000):
            if step == 5 and fastps.rank() == 1:
                {end}
            fastps.push_pull(np.ones(100, np.float32), "x")
    """
    result = job.run(job.python("-np", "3", code=program))
    assert result.returncode == 1
    pattern = (
        r"\[fastps-run\] worker 1 \(pid \d+\) ended with exit code 0 and (is lost|left the job)"
    )
    assert re.match(pattern, last_line(result)), result.stderr


def test_interrupt_ends_a_training_in_order(job):
    with job.started(job.python("-np", "2", "-s", "1", code=STEPS)) as process:
        wait_pid(process, "worker 0")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "interrupted by SIGINT" in stderr.splitlines()[-1]
    assert "KeyboardInterrupt" in stderr


def test_killed_launcher_leaves_no_server(job):
    with job.started(job.python("-np", "2", "-s", "2", code=STEPS)) as process:
        wait_pid(process, "worker 1")
        process.kill()
        process.wait(LIMIT_S)
        job.wait_gone()
