# SPDX-License-Identifier: Apache-2.0
"""Cables that are cut, between hosts of a make-believe network, with a lease of 0.9 s."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from control_cluster import SCHEDULER_PROGRAM, make_settings
from harness import ROOT, slowed

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import netlab
from tools.netlab import NetLab

pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.timeout(110)]

LEASE_S = 0.9
HOSTS = 4  # with one member each; the scheduler is on host 0
MEMBER = """
import json, socket, sys, time
from fastps.config import load
from fastps.control.client import ControlClient
client = ControlClient.connect(
    load(json.loads(sys.argv[1]), {}), role="worker", data_address=("0.0.0.0", 1),
    on_event=lambda event: print(time.monotonic(), event, flush=True),
)
print("joined", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def job(
    hosts: Sequence[int] = range(HOSTS), **changes: object
) -> Iterator[tuple[NetLab, subprocess.Popen[str], list[subprocess.Popen[str]]]]:
    """Run a scheduler on host 0, and members on some hosts; give these."""
    if lack := netlab.missing():
        pytest.skip(f"no make-believe hosts here: {lack}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    with NetLab(hosts=HOSTS, rate="1gbit", cc="cubic") as lab:
        settings = make_settings(
            size=len(hosts), num_servers=0, lease_s=LEASE_S, scheduler_host=lab.address(0),
            **changes,
        )  # fmt: skip
        command = [sys.executable, "-c", SCHEDULER_PROGRAM, json.dumps(settings)]
        scheduler = lab.popen(0, command, env=environ, stderr=subprocess.PIPE, **pipes)
        settings["scheduler_port"] = int(scheduler.stdout.readline())
        command = [sys.executable, "-c", MEMBER, json.dumps(settings)]
        members = [lab.popen(host, command, env=environ, **pipes) for host in hosts]
        try:
            for member in members:
                assert member.stdout.readline() == "joined\n"
            yield lab, scheduler, members
        finally:
            for process in (scheduler, *members):
                process.kill()
                process.communicate()


def change(lab: NetLab, host: int, *words: str) -> float:
    """Change the network of a host; give the time."""
    at = time.monotonic()
    subprocess.run(["ip", "-n", lab.host_name(host), *words], check=True)
    return at


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_without_a_cable_is_dead_for_the_others(host: int) -> None:
    """Host 0 has the scheduler: the others name that, and nobody blames an honest worker."""
    with job() as (lab, _, members):
        at = change(lab, host, "link", "set", "eth0", "down")
        for number, member in enumerate(members):
            when, text = member.stdout.readline().split(" ", 1)
            is_alone = number == host or host == 0
            name = "scheduler (" if is_alone else f"({lab.host_name(host)}, pid"
            assert name in text
            assert ("silent for" if number or host else "its machine is cut off") in text
            assert float(when) - at < slowed(1.2), text


def test_a_machine_without_power_changes_the_view_at_one_time() -> None:
    with job([0, 0, 1, 1, 1], elastic_min=1) as (lab, _, members):
        at = change(lab, 1, "link", "set", "eth0", "down")
        for member in members[:2]:
            lines = [member.stdout.readline().split(" ", 1) for _ in range(3)]
            times = [float(when) - at for when, _ in lines]
            assert max(times) - min(times) < slowed(0.1), times
            assert max(times) < slowed(1.2), times
            assert all("ViewLost(" in text and lab.host_name(1) in text for _, text in lines)
            assert "all 3 members there are silent" in lines[0][1]


def test_a_path_that_is_cut_one_way_is_no_death() -> None:
    with job() as (lab, scheduler, members):
        change(lab, 1, "route", "add", "blackhole", lab.address(0))
        outputs = [member.stdout for member in members]
        assert not select.select(outputs, [], [], 4 * LEASE_S)[0]
        scheduler.kill()
        log = scheduler.stderr.read()
        assert "others reach it: its path to the scheduler is cut" in log
        assert lab.host_name(1) in log
