# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an elastic job dies: its launcher starts another one, and no step is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness import ROOT, clean_environ, slowed
from test_join_launched import write_program

from fastps.control.view_log import read_records

PROGRAM = str(Path(__file__).parent / "programs_takeover.py")
NEW_ONE_S = 2.5  # from a kill to the view after it; the best of some on a loaded machine
LAST_S = 90.0
LAYOUTS = {
    "memory": ((), {}),  # a board commits
    "sockets": (("-s", "1"), {"FASTPS_SHARED_MEMORY": "0"}),  # the scheduler commits
}


class Run:
    """A job of three workers under fastps-run, and what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._is_over = False
        self._n_killed = 0  # schedulers
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as shown:
            for line in shown:
                with self._news:
                    self.lines.append(line.rstrip())
                    self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def find(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in list(self.lines) if (found := re.search(pattern, line))]

    def wait(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait for so many lines of a pattern, and return the last one."""
        with self._news:
            self._news.wait_for(lambda: len(self.find(pattern)) >= count or self._is_over, LAST_S)
        found = self.find(pattern)
        assert len(found) >= count, (pattern, "\n".join(self.lines[-60:]))
        return found[count - 1]

    def kill_scheduler(self) -> float:
        """Kill the next scheduler as soon as it is there; return the time."""
        self._n_killed += 1
        found = self.wait(r"scheduler (is |\()pid (\d+)(\) takes over)?$", self._n_killed)
        now = time.monotonic()
        os.kill(int(found[2]), signal.SIGKILL)
        return now

    def kill_worker(self, rank: int) -> None:
        os.kill(int(self.wait(rf"worker {rank} is pid (\d+)")[1]), signal.SIGKILL)

    def end(self) -> str:
        """Wait for the end, and return what all of it has shown."""
        self.process.wait(LAST_S)
        self._reader.join(LAST_S)
        return "\n".join(self.lines)


@contextlib.contextmanager
def job(
    steps: int, *words: str, layout: str = "memory", least: str = "2", program: str = PROGRAM
) -> Iterator[Run]:
    more, settings = LAYOUTS[layout]
    process = subprocess.Popen(
        [sys.executable, "-m", "fastps.launch.run", "-np", "3", "--min", least, "--log-level",
         "INFO", *more, *words, sys.executable, program, str(steps)],
        env=clean_environ() | {"PYTHONPATH": str(ROOT), **settings},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    run = Run(process)
    try:
        yield run
    finally:
        process.kill()
        run.end()


def digests(shown: str, ranks: Sequence[int] = (0, 1, 2)) -> set[str]:
    """Return the digests of the sums of workers that have all come to their end."""
    found = dict(re.findall(r"worker (\d)\] END (\w+)", shown))
    assert found.keys() == set(map(str, ranks)), shown
    return set(found.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_is_lost(layout, tmp_path):
    """Killed five times: at work, before others have come back to it, and while a view changes."""
    log, times = tmp_path / "views.jsonl", []
    with job(70, "--view-log", str(log), layout=layout) as run:
        for kill in range(2):
            run.wait("STEP", 20 + 60 * kill)
            killed = run.kill_scheduler()
            found = run.wait(rf"VIEW {kill + 2} ([\d.]+)", 3)
            times.append(float(found[1]) - killed)
        run.wait("STEP", 140)
        run.kill_scheduler()
        run.kill_scheduler()
        run.wait("took over from", 3)
        run.kill_scheduler()
        shown = run.end()
    print(f"{layout}: the next view began after", *(f"{one:.2f} s" for one in times))
    assert run.process.returncode == 0, shown
    assert len(digests(shown)) == 1
    assert "continue without it" not in shown
    assert min(times) < slowed(NEW_ONE_S)
    records = read_records(str(log))
    assert {one.workers for one in records} == {(0, 1, 2)}
    assert records[-1].committed["t0"] == 70


def test_the_launcher_of_one_of_two_machines_starts_another_one(tmp_path):
    """The third time a worker of the other machine dies too."""
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = ("--machines", "2", "-np", "2,1", "-s", "1", "--scheduler-host", "127.0.0.1",
             "--scheduler-port", port, "--token-file", str(token))  # fmt: skip
    with (
        job(70, *words, "--machine-rank", "0") as here,
        job(70, *words, "--machine-rank", "1") as there,
    ):
        for kill in range(2):
            there.wait("STEP", 10 + 20 * kill)
            here.kill_scheduler()
            there.wait(f"VIEW {kill + 2}")
        there.wait("STEP", 50)
        here.kill_scheduler()
        there.kill_worker(2)
        there.end()
        shown = here.end()
    assert here.process.returncode == 0, shown
    assert len(digests(shown, (0, 1))) == 1
    assert len(re.findall(r"^\[fastps-run\].* takes over$", shown, re.M)) == 3, shown


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_dies_too_and_the_job_can_be_made_again(layout, tmp_path):
    log = tmp_path / "views.jsonl"
    with job(50, "--view-log", str(log), layout=layout) as run:
        run.wait("STEP", 30)
        run.kill_scheduler()
        run.kill_worker(2)
        shown = run.end()
    assert run.process.returncode == 0, shown
    survivors = digests(shown, (0, 1))
    assert len(survivors) == 1
    with job(50, "--replay", str(log), layout=layout) as again:
        shown = again.end()
    assert again.process.returncode == 0, shown
    assert digests(shown, (0, 1)) == survivors


def test_workers_that_are_about_to_join_do_so_later(tmp_path):
    """Killed when one is about to say hello, when it waits, and as soon as it has joined."""
    program = write_program(tmp_path, victim=2)
    with job(0, "--respawn", "1", program=program) as run:
        run.wait("is started instead")
        run.kill_scheduler()
        run.wait("waits to join")
        run.kill_scheduler()
        run.wait("view .* joined")
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode == 0, shown
    assert shown.count("LAST 7 3") == 3, shown


def test_too_few_are_left_when_both_die():
    with job(400, least="3") as run:
        run.wait("STEP", 20)
        run.kill_worker(1)
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode != 0
    assert re.search(r"worker 1.*killed by SIGKILL", shown), shown


def test_a_scheduler_that_dies_before_the_start_ends_the_job():
    with job(10) as run:
        run.wait("scheduler is pid")
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode != 0
    assert "killed by SIGKILL" in shown


def test_one_that_dies_while_workers_leave_changes_no_exit_code():
    with job(20) as run:
        run.wait("STEP 19")
        run.kill_scheduler()
        run.wait("END")
        with contextlib.suppress(ProcessLookupError):  # it has ended with the job
            run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode == 0, shown
    assert len(digests(shown)) == 1
