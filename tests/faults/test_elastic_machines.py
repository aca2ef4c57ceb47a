# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs on several machines go on when one of them has no worker left."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from harness import ROOT, clean_environ

pytestmark = pytest.mark.timeout(110)

PROGRAM = """
import os, signal
import numpy as np
import fastps
fastps.init()
me = int(os.environ["FASTPS_RANK"])
for step in range(20):
    if step == 9 and me == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    found = int(fastps.push_pull(np.full(9, 1 << me, np.int32), "x", average=False)[0])
print("LAST", found, flush=True)
"""


@pytest.mark.parametrize(("least", "victim"), [(1, 0), (1, 1), (2, 0)])
def test_the_scheduler_stays_for_the_workers_of_other_machines(tmp_path, least, victim):
    program, token = tmp_path / "train.py", tmp_path / "job.token"
    program.write_text(textwrap.dedent(PROGRAM).replace("VICTIM", str(victim)))
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "fastps.launch.run", "--machines", "2", "-np", "1", "--min",
             str(least), "--scheduler-host", "127.0.0.1", "--scheduler-port", port,
             "--token-file", str(token)]  # fmt: skip
    machines = [
        subprocess.Popen(
            [*words, "--machine-rank", str(machine), sys.executable, str(program)],
            env=clean_environ() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for machine in range(2)
    ]  # fmt: skip
    shown = [machine.communicate(timeout=90)[0] for machine in machines]
    codes = [machine.returncode for machine in machines]
    if least == 2:
        assert codes[0] == 128 + signal.SIGKILL, shown
        assert codes[1] == 1, shown
        assert "worker 0" in (last := shown[0].splitlines()[-1])
        assert "was killed by SIGKILL; it failed first, so the job was ended" in last
        assert "PeerLostError" in shown[1]
        return
    assert codes[1 - victim] == 0, shown
    assert f"LAST {1 << (1 - victim)}" in shown[1 - victim]
    assert codes[0] == 0  # as the job; the other machine alone knows its own workers


def test_a_machine_of_servers_reports_the_loss_of_its_only_one(tmp_path):
    program, token = tmp_path / "train.py", tmp_path / "job.token"
    program.write_text(textwrap.dedent(PROGRAM).replace("me == VICTIM", "True"))
    token.touch(0o600)
    token.write_text(secrets.token_hex(16))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "fastps.launch.run", "--machines", "2", "-np", "1,0", "-s",
             "0,1", "--min", "1", "--scheduler-host", "127.0.0.1", "--scheduler-port", port,
             "--token-file", str(token)]  # fmt: skip
    machines = [
        subprocess.Popen(
            [*words, "--machine-rank", str(machine), sys.executable, str(program)],
            env=clean_environ() | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for machine in range(2)
    ]  # fmt: skip
    worker, server = (machine.communicate(timeout=90)[0] for machine in machines)
    assert machines[0].returncode == 128 + signal.SIGKILL, worker
    assert machines[1].returncode not in (0, None), server
    assert "Traceback" not in server
    assert "server 0" in server


@pytest.mark.parametrize(("least", "victim"), [(1, 0), (1, 1), (2, 1)])
def test_a_leader_goes_on_without_a_machine_that_has_no_worker_left(tmp_path, least, victim):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM).replace("VICTIM", str(victim)))
    done = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-H", "localhost:1,127.0.0.1:1", "--min",
         str(least), sys.executable, str(program)],
        env=clean_environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    if least == 2:
        assert done.returncode not in (0, 124), shown
        assert "worker 1" in done.stderr.splitlines()[-1], shown
        return
    assert done.returncode == 0, shown
    assert f"LAST {1 << (1 - victim)}" in shown
    assert ("of 2 machines continue without it" in shown) == (victim == 1), shown


def test_a_launcher_takes_no_lost_worker_for_the_one_whose_rank_another_has_now(tmp_path):
    """Worker 1 has rank 0 when it is lost, and ends the job: worker 0 is not to blame."""
    program = tmp_path / "train.py"
    text = """
    import os, signal, time
    import numpy as np
    import fastps
    fastps.init()
    me = int(os.environ["FASTPS_RANK"])
    for step in range(20):
        if (step, me) in [(5, 0), (9, 1)]:
            os.kill(os.getpid(), signal.SIGKILL)
        fastps.push_pull(np.ones(9, np.float32), "x")
    """
    program.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "3", "--min", "2", sys.executable,
         str(program)],
        env=clean_environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 137, done.stderr
    assert last.startswith("[fastps-run] worker 1 "), done.stderr


def test_a_launcher_blames_the_lost_worker_that_a_survivor_names_as_why_it_ended(tmp_path):
    """The scheduler knows only that the last one ended the job, for the first was spared."""
    program = tmp_path / "train.py"
    text = """
    import os, signal, sys, time
    import fastps
    from fastps.session import current
    causes = []
    fastps.init(elastic=fastps.Elastic(min=1, on_view=lambda view: causes.append(view.cause)))
    if os.environ["FASTPS_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while not causes:
        time.sleep(0.01)
    print(f"PeerLostError: the job did not start: {causes[0]}", file=sys.stderr, flush=True)
    current.current()._client.close()  # without leaving, as where its first view fails
    time.sleep(0.5)  # so the scheduler knows before the launcher does
    os._exit(1)
    """
    program.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "2", "--min", "1", sys.executable,
         str(program)],
        env=clean_environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 137, done.stderr
    assert last.startswith("[fastps-run] worker 1 "), done.stderr
