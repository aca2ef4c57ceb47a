# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of the faults of tools/chaos; `make chaos` draws others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, clean_environ

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import netlab
from tools.netlab import NetLab

pytestmark = [pytest.mark.alone]

EVENTS, SEED = 60, 42
LIMIT_S = 420.0  # on two idle processors it takes less than 240 s
PARTITIONS_LIMIT_S = 240.0  # on two idle processors it takes less than 40 s
LOSSES = "kill worker,segv worker,stop long worker,kill server,segv server,stop long server"
ELASTIC = (
    "--elastic",
    "1",
    "--events",
    "26",
    "--seed",
    "83",
    "--kinds",
    LOSSES,
    "--layouts",
    "memory,colocated,apart,two-machines,compression,local-sgd",
)  # in less than 60 s
CHAOS = (sys.executable, "-m", "tools.chaos")


def environment(**more: str) -> dict[str, str]:
    return clean_environ() | {"PYTHONPATH": str(ROOT)} | more


@pytest.mark.stress
@pytest.mark.timeout(LIMIT_S + 60)
def test_jobs_do_what_they_have_to_about_a_sample_of_faults(tmp_path):
    own = ("--seed", str(SEED), "--events", str(EVENTS), "--log", str(tmp_path / "log"))
    done = subprocess.run(
        [*CHAOS, *own], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{EVENTS} events, 0 findings" in done.stdout


@pytest.mark.stress
@pytest.mark.timeout(LIMIT_S + 60)
def test_elastic_jobs_go_on_after_a_sample_of_losses(tmp_path):
    done = subprocess.run(
        [*CHAOS, *ELASTIC, "--log", str(tmp_path / "log")], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "26 events, 0 findings" in done.stdout


@pytest.mark.root
@pytest.mark.timeout(PARTITIONS_LIMIT_S + 60)
def test_an_elastic_job_goes_on_on_the_schedulers_side_of_a_partition(tmp_path):
    """Machine 0 alone, 1, or 4 is cut off; 0 sends nothing to 2; 3 sends nothing to 0."""
    if lack := netlab.missing():
        pytest.skip(f"no make-believe hosts here: {lack}")
    seeds = (0, 1, 4, 16, 27)
    own = [word for seed in seeds for word in ("--only", f"five-machines {seed}")]
    done = subprocess.run(
        [*CHAOS, *own, "--elastic", "2", "--log", str(tmp_path / "log")], cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=PARTITIONS_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "5 events, 0 findings" in done.stdout


def marked(mark: str) -> list[str]:
    """List the processes that have a word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return [line for line in found if line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_no_process_and_no_lab(tmp_path, number):
    mark = f"{tmp_path.name}-{os.getpid()}"
    layouts = ["memory", "apart"] + ["two-machines"] * (not netlab.missing())
    words = ("--events", "9", "--layouts", ",".join(layouts), "--log", str(tmp_path / "log"))
    with subprocess.Popen(
        [*CHAOS, *words], cwd=ROOT, env=environment(TEST_MARK=mark, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as driver:  # fmt: skip
        assert "9 events from seed 1" in "".join(driver.stdout.readline() for _ in range(1))
        until = time.monotonic() + 60
        while not any("program.py" in line for line in marked(mark)):
            assert time.monotonic() < until
            time.sleep(0.02)
        driver.send_signal(number)
        driver.wait(60)
    while found := marked(mark):
        assert time.monotonic() < until + 30, found
        time.sleep(0.05)
    labs = [space for space in netlab.namespaces() if f"fastps-chaos{driver.pid}x" in space]
    assert not labs


RECEIVES = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("", 9000))
    sock.settimeout(30)
    print("up", flush=True)
    while (word := sock.recv(9)) != b"end":
        print(word.decode(), flush=True)
"""
SENDS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.sendto(sys.argv[2].encode(), (sys.argv[1], 9000))
"""


@pytest.mark.root
def test_a_cut_of_the_lab_drops_one_way_alone():
    if lack := netlab.missing():
        pytest.skip(f"no make-believe hosts here: {lack}")

    def send(source: int, word: str) -> None:
        words = [sys.executable, "-c", SENDS, lab.address(1 - source), word]
        assert lab.popen(source, words).wait(30) == 0

    with NetLab(hosts=2) as lab:
        hosts = [
            lab.popen(host, [sys.executable, "-c", RECEIVES], stdout=subprocess.PIPE, text=True)
            for host in range(2)
        ]
        assert [host.stdout.readline() for host in hosts] == ["up\n"] * 2
        send(0, "before")
        lab.cut(0, 1)
        for source in range(2):
            send(source, "cut")
        lab.heal(0, 1)
        for source in range(2):
            send(source, "healed")
            send(source, "end")
        heard = [host.communicate(timeout=30)[0].split() for host in hosts]
    assert heard == [["cut", "healed"], ["before", "healed"]]
