# SPDX-License-Identifier: Apache-2.0
"""One job by several launchers, as on several machines: all here, told apart by FASTPS_MACHINE."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from harness import slowed
from launched import LIMIT_S, JobRunner, last_line, wait_lines

from aids.free_ports import free_port

DEATH_LIMIT_S = 20.0  # the promise is 5 s; the machine may be busy
SUM = """
import os, numpy as np, fastps
fastps.init()
total = fastps.push_pull(np.arange(5.0) * (fastps.rank() + 1), "x", average=False)
assert (total == np.arange(5.0) * 6).all()
line = f"{fastps.rank()} {fastps.size()} {fastps.local_rank()} {fastps.local_size()}\\n"
os.write(1, line.encode())
fastps.shutdown()
"""
STEPS = """
import os, numpy as np, fastps
fastps.init()
gradient = np.full(100_000, 1.0 + fastps.rank(), dtype=np.float32)
for step in range(1_000_000):
    total = fastps.push_pull(gradient, "gradient", average=False)
    assert (total == 6.0).all()
    if step == 0:
        os.write(1, f"pid {os.getpid()}\\n".encode())
"""
# Worker 2 stays in the job until the test lets it go.
LATE = """
import os, pathlib, time, numpy as np, fastps
fastps.init()
fastps.push_pull(np.ones(5), "x")
if fastps.rank() == 2:
    print("stays", flush=True)
    end = time.monotonic() + 60
    while not pathlib.Path(__file__).with_name("go").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
fastps.shutdown()
"""

EARLY = """
import os, pathlib, time, fastps
there = pathlib.Path(__file__).with_name("there")
if os.environ["FASTPS_RANK"] == "0":  # fails when the other is about to begin
    end = time.monotonic() + 60
    while not there.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.5)
    exit(3)
there.touch()
fastps.init()
"""

# Worker 2 is out of the job in the middle of it, and does not fail.
GONE = """
import os, signal, sys, numpy as np, fastps
fastps.init()
fastps.push_pull(np.ones(5), "x")
if fastps.rank() == {rank}:
    print("pid", os.getpid(), flush=True)
    {how}
fastps.push_pull(np.ones(5), "x")
fastps.shutdown()
"""


class Machines:
    """The launchers of one job."""

    def __init__(self, folder) -> None:
        self.job = JobRunner(folder)
        self.token = folder / "job.token"
        self.write_token(self.token)
        self.port = free_port()

    def write_token(self, path) -> None:
        path.touch(mode=0o600)
        path.write_text(f"token of {path.name}, long enough")

    def command(self, machine: int, *words: str, token=None, code: str) -> list[str]:
        name = f"FASTPS_MACHINE={'abc'[machine]}"
        address = ["--scheduler-host", "127.0.0.1", "--scheduler-port", str(self.port)]
        place = ["--machine-rank", str(machine), "--token-file", str(token or self.token)]
        return self.job.python(*address, *place, "--env", name, *words, code=code)

    @contextlib.contextmanager
    def started(self, *words: str, machines: int = 2, code: str):
        """Start all launchers with the same words."""
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(self.job.started(self.command(rank, *words, code=code)))
                for rank in range(machines)
            ]


@pytest.fixture
def machines(tmp_path):
    """Give launchers of one job; none of its processes may be left."""
    found = Machines(tmp_path)
    yield found
    found.job.wait_gone()


def ends(launchers) -> list[tuple[int, str, str]]:
    """Wait for launchers; give exit code, stdout and stderr of each."""
    found = []
    for launcher in launchers:
        stdout, stderr = launcher.communicate(timeout=LIMIT_S)
        found.append((launcher.returncode, stdout, stderr))
    return found


def test_two_machines_sum(machines):
    with machines.started("-np", "2,1", "-s", "0,1", code=SUM) as launchers:
        first, second = ends(launchers)
    assert first[0] == second[0] == 0, (first, second)
    assert first[2] == second[2] == ""
    assert sorted(first[1].splitlines()) == ["[worker 0] 0 3 0 2", "[worker 1] 1 3 1 2"]
    assert second[1] == "[worker 2] 2 3 0 1\n"


def test_machine_of_servers_alone(machines):
    words = ("-np", "3,0", "-s", "0,1")
    with machines.started(*words, code=SUM) as launchers:
        first, second = ends(launchers)
    assert first[0] == second[0] == 0, (first, second)
    assert len(first[1].splitlines()) == 3
    assert second[1:] == ("", "")


def test_scheduler_without_workers(machines):
    words = ("-np", "0,3", "-s", "1,0", "--env", "FASTPS_LINGER_S=0.2")
    with machines.started(*words, code=SUM) as launchers:
        first, second = ends(launchers)
    assert first == (0, "", ""), second
    assert second[0] == 0


def test_launchers_wait_for_the_workers_of_others(machines):
    # a worker that also serves would itself wait for the others
    words = ("-np", "2,1", "-s", "1,0", "--env", "FASTPS_COLOCATE=off")
    with machines.started(*words, code=LATE) as launchers:
        wait_lines(launchers[1], "stays", 1)
        deadline = time.monotonic() + LIMIT_S
        while len(machines.job.processes()) > 2:  # server 0 and worker 2
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(subprocess.TimeoutExpired):
            launchers[0].wait(0.5)
        (machines.job.folder / "go").touch()
        first, second = ends(launchers)
    assert first[0] == second[0] == 0, (first, second)
    assert first[2] == second[2] == ""


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_launcher_ends_the_job_everywhere(machines, victim):
    with machines.started("-np", "2,1", "-s", "1,0", code=STEPS) as launchers:
        wait_lines(launchers[0], "] pid ", 2)
        wait_lines(launchers[1], "] pid ", 1)
        launchers[victim].kill()
        began = time.monotonic()
        code, _, stderr = ends([launchers[1 - victim]])[0]
    assert time.monotonic() - began < DEATH_LIMIT_S
    assert code == 1
    assert "PeerLostError" in stderr
    culprit = ("scheduler (127.0.0.1", "worker 2 (")[victim]
    assert stderr.splitlines()[-1].startswith(f"[fastps-run] {culprit}")


@pytest.mark.parametrize("victim", [0, 1])
def test_interrupt_of_one_launcher_ends_the_job_everywhere(machines, victim):
    with machines.started("-np", "2,1", "-s", "1,0", code=STEPS) as launchers:
        wait_lines(launchers[0], "] pid ", 2)
        wait_lines(launchers[1], "] pid ", 1)
        launchers[victim].send_signal(signal.SIGINT)
        began = time.monotonic()
        found = ends(launchers)
    assert time.monotonic() - began < DEATH_LIMIT_S
    assert found[victim][0] == 130
    assert "interrupted by SIGINT" in found[victim][2].splitlines()[-1]
    code, _, stderr = found[1 - victim]
    assert code == 1, stderr
    culprits = ("worker [01] left the job|fastps-run on the scheduler's machine ended it: "
                "interrupted by SIGINT", "worker 2 left the job")  # fmt: skip
    assert re.match(rf"\[fastps-run\] ({culprits[victim]})", stderr.splitlines()[-1])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os._exit(0)", "is lost: it ended with exit code 0 before it had left the job"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "is lost: it was silent for longer than its"),
    ],
    ids=["ends well", "stopped"],
)
def test_a_worker_that_is_lost_and_does_not_fail_is_named_on_its_machine(
    machines, how, said, rank
):
    words = ("-np", "2,1", "--grace", "2", "--env", "FASTPS_LEASE_S=4")
    with machines.started(*words, code=GONE.format(how=how, rank=rank)) as launchers:
        found = ends(launchers)
    assert [code for code, _, _ in found] == [1, 1], found
    lines = [stderr.splitlines()[-1] for _, _, stderr in found]
    assert all(re.match(rf"\[fastps-run\] worker {rank} \(", line) for line in lines), lines
    assert re.search(said, lines[rank // 2]), lines


def test_error_before_the_start_on_the_first_machine_reaches_the_other(machines):
    with machines.started("-np", "1,1", "-s", "0,1", "--grace", "40", code=EARLY) as launchers:
        first, second = ends(launchers)
    assert first[0] == 3
    assert second[0] != 0
    last = second[2].splitlines()[-1]
    assert re.match(
        r"\[fastps-run\] worker 0 \(.*pid \d+\) is lost: it ended with exit code 3", last
    )


def test_wrong_token_is_refused_and_the_missing_are_named(machines):
    other = machines.token.with_name("other.token")
    machines.write_token(other)
    words = ("-np", "1,1", "-s", "1,0", "--start-timeout", f"{slowed(3):g}")
    with machines.job.started(machines.command(0, *words, code=SUM)) as first:
        second = machines.job.run(machines.command(1, *words, token=other, code=SUM))
        code, _, stderr = ends([first])[0]
    assert second.returncode == 1
    assert "AuthError" in second.stderr
    assert "wrong job token" in second.stderr or "does not know the job token" in second.stderr
    assert code != 0
    assert "missing: worker 1" in stderr
    assert "refused a connection (" in stderr


def test_no_token_says_how_to_make_one(machines):
    words = ["-np", "1,1", "--machine-rank", "1", "--scheduler-host", "127.0.0.1"]
    words += ["--scheduler-port", str(machines.port), sys.executable, "-c", "print('ran')"]
    result = machines.job.run(machines.job.command(*words))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "(umask 077; python3 -c " in last_line(result)
    assert "--token-file job.token" in last_line(result)
    result = machines.job.run(machines.job.command("--dry-run", *words))
    assert result.returncode == 0
    assert "# the job needs a token; make one with: (umask 077;" in result.stdout
    assert "# machine 1 of 2: worker 1 of 2, none of 0 servers\n" in result.stdout


def test_port_in_use_is_said_before_anything_is_started(machines):
    with socket.create_server(("127.0.0.1", machines.port)):
        result = machines.job.run(machines.command(0, "-np", "1,1", code="print('ran')"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert f"cannot listen on 127.0.0.1:{machines.port}" in last_line(result)
    assert "--scheduler-port" in last_line(result)
