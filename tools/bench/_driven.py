# SPDX-License-Identifier: Apache-2.0
"""Processes of one system that obey a benchmark, over one connection each.

A process connects to BENCH_DRIVER and sends its rank. Then it gets commands, one JSON object a
line, and answers each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

START_S, ANSWER_S, END_S = 120, 300, 15

Commands = list[tuple[list[str], dict[str, str]]]  # each with settings of its own


def free_port() -> int:
    """Give a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def settings_of(*words: str) -> dict[str, str]:
    """Read words such as NAME=VALUE; skip empty ones."""
    return dict(word.split("=", 1) for word in words if word)


class Driven:
    """The processes of one system."""

    def __init__(
        self, name: str, commands: Commands, *, workers: int, settings: Mapping[str, str]
    ) -> None:
        """Start all commands; `files` talk to the workers by rank. settings: of all processes."""
        self.name = name
        self.files: list[Any] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(START_S)
        environment = {
            **os.environ,
            "BENCH_DRIVER": f"127.0.0.1:{self.listener.getsockname()[1]}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(workers),
            **settings,
        }
        self.processes = [
            subprocess.Popen(command, env=environment | own, start_new_session=True)
            for command, own in commands
        ]
        self._accept(workers)

    def _accept(self, workers: int) -> None:
        files: dict[int, Any] = {}
        try:
            for _ in range(workers):
                sock, _ = self.listener.accept()
                sock.settimeout(ANSWER_S)
                file = sock.makefile("rw", encoding="utf-8")
                files[json.loads(file.readline())["rank"]] = file
        except TimeoutError:
            self.close()
            raise SystemExit(f"{self.name}: only {len(files)} processes came up") from None
        self.files = [files[rank] for rank in sorted(files)]

    def ask(self, **command: object) -> list[dict[str, Any]]:
        """Let all workers run a command; give their answers by rank."""
        for file in self.files:
            file.write(json.dumps(command) + "\n")
            file.flush()
        answers = [file.readline() for file in self.files]
        if not all(answers):
            raise SystemExit(f"{self.name}: a process ended early; see its messages above")
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """Hang up; end what does not end by itself."""
        for file in self.files:
            with contextlib.suppress(OSError):
                file.close()
        self.listener.close()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
