# SPDX-License-Identifier: Apache-2.0
"""The processes of one system: start them, give them commands, watch their CPU time and memory.

All processes that a system starts, its servers and launchers too, carry a mark in their
environment; by it they are found, counted and, should they not end by themselves, killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench._driven import free_port
from tools.bench.peers._places import Places
from tools.bench.peers._systems import System

START_S = 90.0
ANSWER_S = 600.0  # for one command: 64 MB on processes that spin against each other
END_S = 15.0
LAST_WORDS_S = 20.0  # on a busy machine; it is over when one of them has ended
POLL_S = 0.5  # between two looks whether processes still live
SAMPLE_S = 0.02  # between two looks at memory
MIN_ITERATIONS = 3
BATCHES = 4  # a turn is cut so that it can end near its time
LOG_LINES = 8


class TeamError(Exception):
    """A system did not start, or did not answer."""


class UnavailableError(TeamError):
    """A system says itself that it cannot do what is asked."""


@dataclass(frozen=True)
class Work:
    """What one turn does: so many tensors of so many bytes in each call."""

    nbytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Give the bytes of one call."""
        return self.nbytes * self.count


@dataclass
class Turn:
    """What one system did in one round."""

    seconds: list[float] = field(default_factory=list)  # of each iteration, at rank 0
    cpu_s: float = 0.0  # of all its processes
    wall_s: float = 0.0
    memory: int = 0  # most bytes of all its processes, seen while it summed
    other_cpu_s: float = 0.0  # of everything else on the machine
    ways: dict[str, float] = field(default_factory=dict)  # bytes by the way they went, if told

    @property
    def median_s(self) -> float:
        """Give the seconds of the median iteration."""
        return statistics.median(self.seconds)

    def cpu_per_gb(self, work: Work) -> float:
        """Give CPU seconds per 1e9 bytes of tensor."""
        return self.cpu_s / len(self.seconds) / (work.total / 1e9)


class Link:
    """The driver's end of the connection to one worker: a JSON line there, a JSON line back."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank = -1
        self.rest = bytearray()
        sock.settimeout(POLL_S)

    def say(self, message: dict[str, object]) -> None:
        """Send one message."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, while_waiting: Callable[[], None]) -> dict[str, Any]:
        """Wait for one message; while_waiting is called now and then, and ends it by raising."""
        while b"\n" not in self.rest:
            try:
                part = self.sock.recv(1 << 16)
            except TimeoutError:
                while_waiting()
                continue
            if not part:
                raise ConnectionError("the connection ended")
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        return dict(json.loads(line))


class Team:
    """All processes of one system, its workers obeying over one connection each."""

    def __init__(
        self,
        system: System,
        places: Places,
        *,
        size: int,
        servers: int,
        launch: Sequence[str] = (),
    ) -> None:
        self.system, self.label, self.size = system, system.label, size
        self.mark = secrets.token_hex(8)
        self.pids: list[int] = []
        self.idle_cpu_s = self.idle_wall_s = 0.0  # while others were measured
        self.links: list[Link] = []
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.listener = socket.create_server(("127.0.0.1", 0))
        environment = {
            **os.environ,
            **system.environment(places),
            "BENCH_DRIVER": f"127.0.0.1:{self.listener.getsockname()[1]}",
            "BENCH_MARK": self.mark,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
        }
        self.processes = [
            subprocess.Popen(
                command,
                env=environment | own,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
            for command, own in system.commands(size, servers, launch)
        ]
        try:
            self._accept()
        except BaseException:
            self.close(is_patient=False)
            raise
        self.refresh()
        self.memory_at_start = self.memory()

    def _accept(self) -> None:
        deadline = time.monotonic() + START_S
        self.listener.settimeout(POLL_S)
        while len(self.links) < self.size:
            try:
                link = Link(self.listener.accept()[0])
            except TimeoutError:
                self._expect_alive(deadline, "start")
                continue
            self.links.append(link)
            hello = self._hear(link, deadline, "start")
            if "missing" in hello:
                raise UnavailableError(hello["missing"])
            link.rank = hello["rank"]
        self.links.sort(key=lambda link: link.rank)

    def _hear(self, link: Link, deadline: float, verb: str) -> dict[str, Any]:
        try:
            return link.hear(lambda: self._expect_alive(deadline, verb))
        except OSError as error:
            raise self._failure(verb, str(error)) from error

    def _expect_alive(self, deadline: float, verb: str) -> None:
        codes = [process.poll() for process in self.processes]
        ended = [code for code in codes if code is not None]
        if ended:
            raise self._failure(verb, f"a process ended with code {ended[0]}")
        if time.monotonic() > deadline:
            raise self._failure(verb, "its time is over")

    def _failure(self, verb: str, reason: str) -> TeamError:
        deadline = time.monotonic() + LAST_WORDS_S  # connections end before reasons are written
        while all(process.poll() is None for process in self.processes):
            if time.monotonic() > deadline:
                break
            time.sleep(SAMPLE_S)
        return TeamError(f"did not {verb}: {reason}{self.last_lines()}")

    def last_lines(self) -> str:
        """Give what its processes said last, on lines of their own."""
        log = self.log.fileno()  # whose place is the processes', who may be writing there
        lines = os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in lines[-LOG_LINES:])

    def ask(self, op: str, **command: object) -> list[dict[str, Any]]:
        """Let all workers run a command; give their answers by rank."""
        deadline, verb = time.monotonic() + ANSWER_S, f"answer to {op}"
        try:
            for link in self.links:
                link.say({"op": op, **command})
        except OSError as error:
            raise self._failure(verb, str(error)) from error
        return [self._hear(link, deadline, verb) for link in self.links]

    def check(self, work: Work, seed: int) -> tuple[bool, int]:
        """Tell whether one sum is right everywhere, and the most memory seen meanwhile."""
        self.refresh()
        with sampled(self.memory) as seen:
            answers = self.ask("check", nbytes=work.nbytes, count=work.count, seed=seed)
        return all(answer["is_right"] for answer in answers), max(seen)

    def time(self, work: Work, *, budget_s: float, most: int) -> Turn:
        """Run iterations until there are `most`, or at least three and budget_s is over."""
        turn, batch = Turn(), 1
        ways = self.ways()
        cpu, busy, began = self.cpu_seconds(), busy_seconds(), time.monotonic()
        while len(turn.seconds) < most:
            took = time.monotonic() - began
            if took >= budget_s and len(turn.seconds) >= MIN_ITERATIONS:
                break
            answers = self.ask("time", nbytes=work.nbytes, count=work.count, iterations=batch)
            turn.seconds += answers[0]["seconds"]
            batch = next_batch(turn.seconds, budget_s=budget_s, most=most)
        turn.wall_s = time.monotonic() - began
        turn.cpu_s = self.cpu_seconds() - cpu
        turn.other_cpu_s = max(0.0, busy_seconds() - busy - turn.cpu_s)
        turn.ways = {
            name: (number - ways[name]) / len(turn.seconds) for name, number in self.ways().items()
        }
        return turn

    def ways(self) -> dict[str, float]:
        """Add up the workers' counters of bytes by the way they went."""
        answers = self.ask("statistics")
        return {name: sum(answer[name] for answer in answers) for name in answers[0]}

    def forget(self, work: Work) -> None:
        """Drop the arrays of a work."""
        self.ask("forget", nbytes=work.nbytes, count=work.count)

    def refresh(self) -> None:
        """Look again which processes belong to this system."""
        self.pids = marked_processes(self.mark)

    def cpu_seconds(self) -> float:
        """Add up the CPU time of its processes."""
        return sum(map(process_cpu_seconds, self.pids))

    def memory(self) -> int:
        """Add up the memory of its processes, a page shared by n counted 1/n in each."""
        return sum(map(process_memory, self.pids))

    def close(self, *, is_patient: bool = True) -> None:
        """Hang up; end what does not end by itself, or at once if not patient."""
        for link in self.links:
            link.sock.close()
        self.listener.close()
        deadline = time.monotonic() + (END_S if is_patient else 0.0)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for pid in marked_processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(END_S)
        self.log.close()


def next_batch(seconds: Sequence[float], *, budget_s: float, most: int) -> int:
    """Choose the next number of iterations: a part of the time, by the mean of the last ones."""
    recent = seconds[-MIN_ITERATIONS:]
    mean = max(sum(recent) / len(recent), 1e-7)
    fitting = int(budget_s / BATCHES / mean)
    return max(1, min(fitting, most - len(seconds), 4 * len(seconds)))


@contextlib.contextmanager
def sampled(look: Any) -> Iterator[list[int]]:
    """Collect what look() gives, now and then and at both ends, while the body runs."""
    seen, is_over = [look()], threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            seen.append(look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
        seen.append(look())


def marked_processes(mark: str) -> list[int]:
    """List the processes with our mark in their environment."""
    needle = f"BENCH_MARK={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def process_cpu_seconds(pid: int) -> float:
    """Give the CPU time of a process by its clock, in nanosecond steps; 0 once it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it
    except OSError:
        return 0.0


def process_memory(pid: int) -> int:
    """Give the proportional share of memory of a process in bytes; 0 once it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def busy_seconds() -> float:
    """Give the seconds that all cores of the machine spent on work since it started."""
    user, nice, system, _, _, irq, softirq = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / float(os.sysconf("SC_CLK_TCK"))
