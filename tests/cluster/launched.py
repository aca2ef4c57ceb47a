# SPDX-License-Identifier: Apache-2.0
"""Launchers of one job as real processes, and the proof that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import uuid

LIMIT_S = 60.0  # for a loaded machine; every test here takes a second or less
LAUNCH = """
import os, sys
PRELUDE
from fastps.launch.options import parse
from fastps.launch.run import launch
words = [sys.argv[1]] if sys.argv[1].endswith(".py") else ["-m", sys.argv[1]]
sys.exit(launch(parse(sys.argv[2:]), environment=dict(os.environ),
                server_command=(sys.executable, *words)))
"""


class JobRunner:
    def __init__(self, folder: pathlib.Path) -> None:
        self.job_id = f"test-{uuid.uuid4().hex}"
        self.folder = folder
        self.prelude = ""  # Python that runs in the launcher first
        self._server: list[str] = []

    def server(self, code: str) -> None:
        """Let a small program stand for the server; without, it is the real one."""
        self._server = [self.write("standin.py", code)]

    def write(self, name: str, code: str) -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    def command(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            LAUNCH.replace("PRELUDE", textwrap.dedent(self.prelude)),
            *(self._server or ["fastps.server.main"]),
            "--job-id",
            self.job_id,
            *words,
        ]

    def python(self, *options: str, code: str) -> list[str]:
        script = self.write("train.py", code)
        return self.command(*options, sys.executable, script)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)

    @contextlib.contextmanager
    def started(self, command: list[str]):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def processes(self) -> list[int]:
        mark = f"FASTPS_JOB_ID={self.job_id}\0".encode()
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def wait_gone(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"


def wait_lines(process: subprocess.Popen[str], text: str, times: int) -> None:
    """Read the launcher's output until a text was seen so often."""
    for line in process.stdout:
        times -= text in line
        if times == 0:
            return
    raise AssertionError(f"no {text!r} before the output ended: {process.stderr.read()}")


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.splitlines()[-1]
