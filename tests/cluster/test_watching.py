# SPDX-License-Identifier: Apache-2.0
"""What a running job tells: a live line, `fastps top`, and what Prometheus and Grafana read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from harness import ROOT, clean_environ
from rich.console import Console

from aids.free_ports import free_ports
from fastps.__main__ import main as fastps_command
from fastps.config import load
from fastps.errors import ConfigError
from fastps.launch.output import Outlet, Screen
from fastps.launch.progress_line import MergedLine
from fastps.launch.top import picture
from fastps.telemetry import watch
from fastps.telemetry.statistics import find_statistic
from fastps.telemetry.status import StatusService

LIMIT_S = 100
WAY = "TCP" if clean_environ().get("FASTPS_UNIX_SOCKETS") == "0" else "Unix"  # of links
TRAIN = """
import os, sys, numpy as np, fastps
fastps.init()
goes_on = True
while goes_on:
    fastps.push_pull(np.zeros(1000), "gradient")
    fastps.mark_step()
    goes_on = fastps.push_pull(np.array([float(os.path.exists(sys.argv[1]))]), "end")[0] == 0
fastps.shutdown()
"""


class Terminal:
    """A command on a terminal, and all that it has written there."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.text = ""
        self._mine, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone
            while data := os.read(self._mine, 65536):
                self.text += data.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        os.close(self._mine)


def wait_until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # other processes are watched from outside


def get(port: int, path: str, token: str = "", method: str = "GET") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("watched")
    (folder / "train.py").write_text(TRAIN)
    (folder / "token").write_text("a token of scrapers")
    (folder / "token").chmod(0o600)
    port, job_id = free_ports(4)[0], f"watched-{os.getpid()}"
    settings = {"FASTPS_METRICS_PORT": str(port), "FASTPS_METRICS_TOKEN_FILE": f"{folder}/token"}
    launch = [sys.executable, "-m", "fastps.launch.run", "-np", "2", "-s", "1"]
    train = [sys.executable, f"{folder}/train.py", f"{folder}/end"]
    command = [*launch, "--job-id", job_id, *train]
    terminal = Terminal(command, clean_environ() | {"PYTHONPATH": str(ROOT), **settings})
    try:
        wait_until(lambda: "steps/s" in terminal.text or terminal.process.poll() is not None)
        yield terminal, job_id, port
        (folder / "end").touch()
        assert terminal.process.wait(LIMIT_S) == 0, terminal.text
    finally:
        terminal.close()


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_live_line(job):
    terminal, job_id, _ = job
    assert re.search(
        r"\r\x1b\[K\[fastps-run\] [\d.e+]+ steps/s, [\d.]+ k?M?B/s reduced, \d+% waiting",
        terminal.text,
    ), terminal.text
    found = watch.look(job_id)
    assert [(one.about["role"], one.about["rank"]) for one in found] == [
        ("worker", 0), ("worker", 1), ("scheduler", 0), ("server", 0)]  # fmt: skip
    assert found[2].numbers["refused"] == 0
    assert all(find_statistic(name) for one in found for name in one.numbers)
    assert all(one.numbers["steps"] > 0 for one in found[:2])


@pytest.mark.timeout(3 * LIMIT_S)
def test_top(job, capsys):
    _, job_id, _ = job
    assert fastps_command(["top", "--job", job_id, "--once", "--every", "0.2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{job_id}: ")
    rows = [(line[:23].rstrip(), line[23:].split()) for line in lines[2:]]
    assert [name for name, _ in rows] == [
        "worker 0", f"  to server 0, {WAY}", "worker 1", f"  to server 0, {WAY}",
        "server 0", f"  to worker 0, {WAY}", f"  to worker 1, {WAY}"]  # fmt: skip
    for _, (number, unit, *rest) in [row for row in rows if row[0].startswith("  ")]:
        assert float(number) > 0
        assert unit in ("B", "kB", "MB")
        assert len(rest) == 2
    assert fastps_command(["top", "--job", "nobody", "--once"]) == 1


@pytest.mark.timeout(3 * LIMIT_S)
def test_top_fills_a_screen(job):
    _, job_id, _ = job
    before = watch.look(job_id)
    wait_until(lambda: watch.look(job_id)[0].numbers["steps"] > before[0].numbers["steps"])
    looks = watch.look(job_id)
    found = watch.paces(before, looks)
    lines = drawn(found, looks)
    assert lines[0].startswith(f"{job_id}: ")
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["worker", "0"], ["worker", "1"], ["server", "0"]]  # fmt: skip
    assert re.search(
        rf"worker 0 to server 0, {WAY} +[\d.e+]+ k?M?B +[\d.e+]+ k?M?B$", "\n".join(lines), re.M
    )
    assert "view 1, 3 members" in lines

    pace, links = found[0], list(found[0].flows)
    many = [
        dataclasses.replace(pace, about={**pace.about, "rank": rank}, waiting=min(rank, 9) / 10)
        for rank in range(40)
    ]
    lines = drawn(many, looks)
    assert "and 28 more processes" in lines
    assert f"and {40 * len(links) - 5} more links" in lines
    assert any(
        line.startswith("stragglers: worker 0 waits 0%, worker 1 waits 10%") for line in lines
    )


def drawn(found: list[watch.Pace], looks: list[watch.Look]) -> list[str]:
    """Return the lines of `fastps top` on a screen of 80 columns and 24 lines."""
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, color_system=None)
    console.print(picture(found, looks, console.height))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return lines


@pytest.mark.timeout(3 * LIMIT_S)
def test_top_ends_on_ctrl_c(job):
    _, job_id, _ = job
    program = "import sys; from fastps.__main__ import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "top", "--job", job_id, "--every", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        assert process.stderr.read() == ""


@pytest.mark.timeout(3 * LIMIT_S)
def test_what_prometheus_reads(job):
    parser = pytest.importorskip("prometheus_client.parser")
    _, job_id, port = job
    samples = {}
    for slot, role in enumerate(("worker", "worker", "server")):
        text = get(port + slot, "/metrics", "a token of scrapers")
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, sample.labels["role"], sample.labels["rank"]] = sample.value
                assert (sample.labels["job"], sample.labels["role"]) == (job_id, role)
    assert samples["fastps_operations_total", "worker", "1"] > 0
    assert samples["fastps_bytes_summed_total", "server", "0"] > 0
    said = json.loads(get(port, "/status.json", "a token of scrapers"))
    assert samples["fastps_link_bytes_sent_total", "server", "0"] > 0
    assert [(one["peer"], one["way"]) for one in said["links"]] == [("server 0", WAY)]
    assert said["numbers"]["steps"] >= samples["fastps_steps_total", "worker", "0"]
    board = json.loads((ROOT / "deploy/grafana/fastps.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for name, _, _ in samples}
    assert {name for expr in shown for name in re.findall(r"fastps_\w+", expr)} <= names


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    ("path", "token", "method", "code"),
    [
        ("/metrics", "", "GET", 401),
        ("/status.json", "wrong", "GET", 401),
        ("/", "a token of scrapers", "GET", 404),
        ("/status.json", "a token of scrapers", "POST", 501),
    ],
)
def test_who_is_told_nothing(job, path, token, method, code):
    _, _, port = job
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(port, path, token, method)
    assert refused.value.code == code
    refused.value.close()


def test_other_machines_need_a_token():
    config = load({"metrics_port": 9400, "metrics_host": "0.0.0.0", "status": False}, {})
    with pytest.raises(ConfigError, match="FASTPS_METRICS_TOKEN_FILE"):
        StatusService(config, role="worker", rank=0, slot=0, tell=dict)


def pace(rank: int, waiting: float, steps: float = 2.0) -> watch.Pace:
    return watch.Pace({"role": "worker", "rank": rank}, steps, 8.0, 1.5e6, 0, 0, waiting, 1)


def test_words():
    assert watch.in_one_line([]) == ""
    assert watch.in_one_line([pace(0, 0.5), pace(1, 0.1)]) == (
        "2 steps/s, 1.5 MB/s reduced, 30% waiting, slowest worker 1")  # fmt: skip
    assert watch.in_one_line([pace(0, 0.5, 0), pace(1, 0.5, 0)]) == (
        "8 ops/s, 1.5 MB/s reduced, 50% waiting")  # fmt: skip
    table = "x: 1 @fastps-status/a/worker/0/7\nx: 1 @fastps-status/b/server/0/8\nx: 1 /run/s\n"
    table += "y: 3 @fastps-status/b/server/0/8\n"  # somebody else looks at it just now
    assert watch.names(table) == ["fastps-status/a/worker/0/7", "fastps-status/b/server/0/8"]
    assert watch.names(table, "b") == ["fastps-status/b/server/0/8"]
    spaced = "x: 1 @fastps-status/my job/worker/0/7\n"
    assert watch.names(spaced) == watch.names(spaced, "my job") == [spaced[6:-1]]


def test_a_pace_is_what_changed_between_two_looks_by_the_second():
    about = {"job": "j", "role": "worker", "rank": 0}
    links = [{"peer": "s", "way": "tcp", "bytes_sent": 100, "bytes_received": 50}]
    later = [{**links[0], "bytes_sent": 500, "bytes_received": 10},
             {"peer": "w", "way": "pipe", "bytes_sent": 8, "bytes_received": 4}]  # fmt: skip
    numbers = {"steps": 4.0, "operations": 10.0, "wait_seconds": 1.0, "bytes_sent": 3.0}
    grown = {"steps": 8.0, "operations": 30.0, "wait_seconds": 2.0, "bytes_sent": 5.0,
             "server_bytes_sent": 6.0, "links": 2.0}  # fmt: skip
    scheduler = watch.Look(9.0, {**about, "role": "scheduler"}, {})
    before = [watch.Look(10.0, about, numbers, links), scheduler]
    stranger = watch.Look(12.0, {**about, "rank": 1}, {})
    (found,) = watch.paces(before, [watch.Look(12.0, about, grown, later), stranger, scheduler])
    assert (found.about, found.steps, found.operations, found.waiting) == (about, 2, 10, 0.5)
    assert (found.bytes_sent, found.bytes_received, found.links) == (4, 0, 2)
    assert found.flows == [watch.Flow("s", "tcp", 200, 0), watch.Flow("w", "pipe", 4, 2)]
    assert [watch.in_bytes(one) for one in (999, 1000, 2.5e6, 4e12)] == [
        "999 B", "1 kB", "2.5 MB", "4e+03 GB"
    ]  # fmt: skip


def test_the_line_stays_below_all_others():
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    screen = Screen(outlet, outlet, has_colour=False)
    screen.live("fast")
    screen.show("worker", 0, b"loss 1", is_error=False)
    screen.live("")
    line, erase = b"[fastps-run] fast", b"\r\x1b[K"
    assert os.read(reader, 4096) == erase + line + erase + b"[worker 0] loss 1\n" + line + erase
    joint = MergedLine()
    for rank, waiting in ((0, 0.5), (1, 0.1)):
        joint.update(rank, [[rank, 2.0, 8.0, 1.5e6, waiting]])
        joint.update(7, [])  # a machine of servers alone
    joint.show(screen)
    assert os.read(reader, 4096) == (
        erase + b"[fastps-run] 2 steps/s, 1.5 MB/s reduced, 30% waiting, slowest worker 1"
    )
    os.close(reader)
    os.close(writer)
