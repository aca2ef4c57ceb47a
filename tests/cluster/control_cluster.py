# SPDX-License-Identifier: Apache-2.0
"""A scheduler and members on loopback: in threads, or in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastps.config import Config, load
from fastps.control.client import ControlClient
from fastps.control.protocol import DeclareKeys, Event
from fastps.control.scheduler import Scheduler

TOKEN = "a token of 32 bytes for the tests"
WAIT_S = 20.0  # generous: a loaded machine; nothing waits that long when all is well

MEMBER_PROGRAM = """
import json, sys
from fastps.config import load
from fastps.control.client import ControlClient
settings, role = json.loads(sys.argv[1]), sys.argv[2]
address = ("127.0.0.1", 1) if role == "server" else None
client = ControlClient.connect(
    load(settings, {}), role=role, data_address=address,
    on_event=lambda event: print("event", event, flush=True),
)
print("joined", client.job.me, flush=True)
sys.stdin.read()
"""

SCHEDULER_PROGRAM = """
import json, sys
from fastps.config import load
from fastps.control.scheduler import serve
config = load(json.loads(sys.argv[1]), {})
sys.exit(serve(config, on_ready=lambda host, port: print(port, flush=True)))
"""


def make_settings(**changes: object) -> dict[str, object]:
    """Give the settings of a quick job on loopback; TEST_ENCRYPT is its mode."""
    return {
        "scheduler_host": "127.0.0.1",
        "size": 2,
        "num_servers": 2,
        "token": TOKEN,
        "job_id": "job",
        "start_timeout_s": WAIT_S,
        "linger_s": WAIT_S,
        "shutdown_timeout_s": 5.0,
        "encrypt": os.environ.get("TEST_ENCRYPT") or "off",
    } | changes


class SchedulerThread:
    """A scheduler in a thread of this process."""

    def __init__(self, listeners: Sequence[socket.socket] = (), **changes: object) -> None:
        self.settings = make_settings(**changes)
        self.code: int | None = None
        self._ready = threading.Event()
        self.scheduler = Scheduler(
            load(self.settings, {}),
            on_ready=lambda host, port: self._ready.set(),
            listeners=listeners,
        )
        self.thread = threading.Thread(target=self._run, name="scheduler of a test")

    def _run(self) -> None:
        self.code = asyncio.run(self.scheduler.run())

    def __enter__(self) -> SchedulerThread:
        self.thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.stop("the test ends")
        self.scheduler.stop("the test ends")
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def config(self, **changes: object) -> Config:
        """Give the settings of a member."""
        address = {
            "scheduler_host": self.scheduler.address[0],
            "scheduler_port": self.scheduler.address[1],
        }
        return load(self.settings | address | changes, {})


class Recorder:
    """Collects a member's events; servers acknowledge keys at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._condition = threading.Condition()
        self._client: ControlClient | None = None

    def attach(self, client: ControlClient) -> None:
        """Tell which client to answer on."""
        with self._condition:
            self._client = client
            self._condition.notify_all()

    def __call__(self, event: Event) -> None:
        """Take an event on the reader thread."""
        with self._condition:
            self.events.append(event)
            self._condition.notify_all()
            if isinstance(event, DeclareKeys):
                self._condition.wait_for(lambda: self._client is not None, WAIT_S)
                assert self._client is not None
                self._client.keys_ready(event.request_id)

    def wait_for(self, kind: type, *, timeout_s: float = WAIT_S) -> Event:
        """Wait for the first event of a kind."""

        def found() -> Event | None:
            return next((event for event in self.events if isinstance(event, kind)), None)

        with self._condition:
            event = self._condition.wait_for(found, timeout_s)
        assert event is not None, f"no {kind.__name__} in {timeout_s} s, only {self.events}"
        return event


class Member:
    """A connected client and what it was told."""

    def __init__(self, config: Config, role: str = "worker") -> None:
        self.told = Recorder()
        address = ("127.0.0.1", 1) if role == "server" else None
        self.client = ControlClient.connect(
            config, role=role, data_address=address, on_event=self.told
        )
        self.told.attach(self.client)


@contextlib.contextmanager
def started_job(**changes: object) -> Iterator[tuple[SchedulerThread, list[Member], list[Member]]]:
    """Run a complete job: the scheduler, its workers and its servers by rank."""
    with SchedulerThread(**changes) as scheduler:
        config = scheduler.config()
        with ThreadPoolExecutor(config.size + config.num_servers) as pool:
            workers = [pool.submit(Member, config) for _ in range(config.size)]
            servers = [pool.submit(Member, config, "server") for _ in range(config.num_servers)]
        groups = [
            sorted((future.result() for future in group), key=lambda item: item.client.job.me)
            for group in (workers, servers)
        ]
        try:
            yield scheduler, groups[0], groups[1]
        finally:
            for member in groups[0] + groups[1]:
                member.client.close()


class Process:
    """A program of a test in its own process."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        """Read one line of its output; the test's own timeout bounds it."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def scheduler_process(settings: dict[str, object]) -> Iterator[tuple[Config, Process]]:
    """Run a scheduler in its own process; give the settings of its members, and the process."""
    with Process(SCHEDULER_PROGRAM, json.dumps(settings)) as process:
        port = int(process.read_line())
        yield load(settings | {"scheduler_port": port}, {}), process


def seconds_since(start: float) -> float:
    """Give the time since a time.monotonic()."""
    return time.monotonic() - start
