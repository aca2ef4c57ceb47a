# SPDX-License-Identifier: Apache-2.0
"""A job of three workers under fastps-run, watched line by line, of which processes are killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, clean_environ

from aids.free_ports import free_port

PROGRAM = str(Path(__file__).parent / "programs_takeover.py")
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

    def kill_scheduler(self, how: int = signal.SIGKILL) -> float:
        """Kill the next scheduler as soon as it is there, or stop it; return the time."""
        self._n_killed += 1
        found = self.wait(r"scheduler (is |\()pid (\d+)(\) takes over)?$", self._n_killed)
        now = time.monotonic()
        os.kill(int(found[2]), how)
        return now

    def kill_worker(self, rank: int, how: int = signal.SIGKILL) -> None:
        os.kill(int(self.wait(rf"worker {rank} is pid (\d+)")[1]), how)

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


@contextlib.contextmanager
def two_launchers(folder: Path, *words: str, steps: int = 0, **more: str) -> Iterator[list[Run]]:
    """A job on two machines with two workers and one, and a server on each."""
    token = folder / "job.token"
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    words = ("--machines", "2", "-np", "2,1", "-s", "1", "--scheduler-host", "127.0.0.1",
             "--scheduler-port", str(free_port()), "--token-file", str(token), *words)  # fmt: skip
    with (
        job(steps, *words, "--machine-rank", "0", **more) as here,
        job(steps, *words, "--machine-rank", "1", **more) as there,
    ):
        yield [here, there]
