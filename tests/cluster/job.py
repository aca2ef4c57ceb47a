# SPDX-License-Identifier: Apache-2.0
"""A job whose processes a test holds in its hands: each can be watched, signalled and outlived.

The launcher ends everybody when one process fails; tests of failures want to see what the others
do by themselves. So this starts the processes of the launcher's own plan directly, and the
scheduler, which the launcher has in a thread, as one more process. A worker's
program is a function of a `programs_*.py` file; it tells where it is with `mark(...)` lines, and
its return value (plain JSON) is its result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fork_server import IMPORT_PATH, Forked, is_forkable, the_server
from harness import JobResult, clean_environ, reports_of, slowed, write_script

from fastps.config import versions
from fastps.launch.layout import Layout
from fastps.launch.options import Options
from fastps.launch.plan import (
    SERVER_MODULE,
    Identity,
    ProcessSpec,
    make_plan,
    scheduler_environment,
)
from fastps.launch.secrets import Handout

RUNNER = Path(__file__).with_name("run_program.py")
BACKLOG = 512
# Generous: a loaded machine; nothing waits that long when all is well. More under a sanitizer.
WAIT_S = 60.0 * float(os.environ.get("TEST_PATIENCE", "1"))
TOLD_S = 2.0  # between a death and the last error on an idle machine
RESULT = "RESULT "
Environments = Mapping[tuple[str, int], Mapping[str, str | None]]  # None takes one away


def start(
    argv: Sequence[str], environ: Mapping[str, str], stderr: IO[bytes], fds: Sequence[int]
) -> Forked | subprocess.Popen[str]:
    """Start a process with its stdout in a pipe, without a wait for imports where that can be."""
    if is_forkable(argv, environ):
        return the_server().start(argv, environ, stderr, fds)
    return subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        pass_fds=fds,
    )


class Process:
    """One process of a job and what it has said."""

    def __init__(
        self, spec: ProcessSpec, environ: Mapping[str, str], *, fds: Sequence[int] = ()
    ) -> None:
        self.spec = spec
        self.lines: list[str] = []
        self._heard = threading.Condition()
        self._has_ended = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self.popen = start(spec.argv, {**environ, **spec.environment}, self._stderr, fds)
        self._reader = threading.Thread(target=self._read, name=f"reader of {spec.name}")
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._heard:
                self.lines.append(line.rstrip("\n"))
                self._heard.notify_all()
        with self._heard:
            self._has_ended = True
            self._heard.notify_all()

    @property
    def pid(self) -> int:
        """Give the process id."""
        return self.popen.pid

    def send(self, number: int) -> float:
        """Send a signal; give the time.monotonic() of it, which all processes share."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def wait_line(self, text: str, *, times: int = 1, timeout_s: float = WAIT_S) -> str:
        """Wait until so many lines begin with text; give the last of them."""

        def found() -> list[str]:
            return [line for line in self.lines if line.startswith(text)]

        with self._heard:
            self._heard.wait_for(lambda: len(found()) >= times or self._has_ended, timeout_s)
            lines = found()
        assert len(lines) >= times, f"{self.spec.name} did not say {text!r}\n{self.report()}"
        return lines[times - 1]

    def end(self) -> None:
        """Send SIGTERM, once it would end the process in order: one that was just started dies."""
        deadline = time.monotonic() + WAIT_S
        while not self._heeds(signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.01)  # nobody tells that a handler was installed
        self.popen.send_signal(signal.SIGTERM)  # none if it has ended

    def _heeds(self, number: int) -> bool:
        """Tell whether it has a handler for a signal, or has ended."""
        if self.popen.poll() is not None:
            return True
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the end and give the exit code, negative for a signal."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.spec.name} did not end within {timeout_s:g} s\n{self.report()}"
            ) from None
        self._reader.join(WAIT_S)
        return code

    def result(self, timeout_s: float = WAIT_S) -> Any:
        """Wait for an orderly end and give what the program returned."""
        code = self.wait(timeout_s)
        assert code == 0, f"{self.spec.name} ended with {code}\n{self.report()}"
        return json.loads(next(x for x in self.lines if x.startswith(RESULT))[len(RESULT) :])

    def stderr(self) -> str:
        """Give what it wrote to stderr so far."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")

    def report(self) -> str:
        """Give all it said, for the message of a failed test."""
        said = "\n".join(self.lines[-50:])
        return f"---- {self.spec.name} stdout\n{said}\n---- stderr\n{self.stderr()[-6000:]}"

    def close(self) -> None:
        """Kill it if it lives and free everything."""
        self.popen.kill()
        self.popen.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.popen.stdout is not None
        if not self._reader.is_alive():  # else what it forked lives and has the pipe
            self.popen.stdout.close()
        self._stderr.close()


class Job:
    """The processes of one job, as a context; leaving it kills what is left.

    program: function of the workers, or a command. arguments: its keywords. environment: settings
    of all. each: more for single ones, by (role, rank). skip: processes not to be started.
    host: the address of this machine that the scheduler listens on. own_tokens: as fastps-run
    hands them out; else all have the job's.
    """

    def __init__(
        self,
        program: Callable[..., Any] | Sequence[str],
        *,
        workers: int = 2,
        servers: int = 2,
        validators: int = 0,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        each: Environments | None = None,
        skip: Sequence[tuple[str, int]] = (),
        host: str = "127.0.0.1",
        own_tokens: bool = False,
    ) -> None:
        self.processes: dict[tuple[str, int], Process] = {}
        self.token = secrets.token_hex(16)
        self.job_id = f"test-{secrets.token_hex(6)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._held = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.scheduler_port: int = self._held.getsockname()[1]
        self._n_workers, self._n_servers, self._n_validators = workers, servers, validators
        self._command = command_of(program, arguments or {}) if callable(program) else program
        self._environment = {
            "FASTPS_LINGER_S": "30",
            "FASTPS_SCHEDULER_HOST": host,
            **(environment or {}),
        }
        self._each = each or {}
        self._skip = set(skip)
        self._handout = Handout(self.token.encode() if own_tokens else b"")

    def __enter__(self) -> Job:
        """Start everything."""
        try:
            for spec in self._plan():
                if (spec.role, spec.rank) not in self._skip:
                    self.start(spec)
        except BaseException:
            self.close()
            raise
        self._held.close()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left."""
        self.close()

    def _plan(self) -> Sequence[ProcessSpec]:
        """Plan as the launcher does, but with the scheduler as a process of its own."""
        options = Options(
            command=self._command,
            layout=Layout(
                (self._n_workers,), (self._n_servers,), validators=(self._n_validators,)
            ),
            environment=tuple(self._environment.items()),
            log_level="WARNING",
        )
        address = ("127.0.0.1", self.scheduler_port)
        identity = Identity(self.job_id, ("FASTPS_TOKEN", self.token), address)
        serve = versions.command_of(SERVER_MODULE)
        argv = (*serve, "--role", "scheduler", "--listen-fd", str(self._held.fileno()))
        scheduler = ProcessSpec("scheduler", 0, argv, scheduler_environment(options, identity))
        plan = make_plan(options, identity, cpus=2, inherited={})
        return (scheduler, *self._handout.hand_out(plan))

    def start(self, spec: ProcessSpec) -> Process:
        """Start one more process."""
        own = self._each.get((spec.role, spec.rank), {})
        environ = clean_environ() | {"PYTHONPATH": IMPORT_PATH}
        merged = {**spec.environment, **own}
        settings = {name: value for name, value in merged.items() if value is not None}
        fds = (self._held.fileno(),) if spec.role == "scheduler" else ()
        process = Process(dataclasses.replace(spec, environment=settings), environ, fds=fds)
        self.processes[spec.role, spec.rank] = process
        return process

    @property
    def workers(self) -> list[Process]:
        """List the workers by rank."""
        return self.of_role("worker")

    @property
    def servers(self) -> list[Process]:
        """List the servers by rank."""
        return self.of_role("server")

    @property
    def scheduler(self) -> Process:
        """Give the scheduler."""
        return self.processes["scheduler", 0]

    def of_role(self, role: str) -> list[Process]:
        """List the processes of a role by rank."""
        return [self.processes[key] for key in sorted(self.processes) if key[0] == role]

    def others(self, *victims: Process) -> list[Process]:
        """List everybody but the victims."""
        return [item for item in self.processes.values() if item not in victims]

    def results(self, timeout_s: float = WAIT_S) -> list[Any]:
        """Wait for workers and validators and give what they returned; show all on failure."""
        try:
            return [one.result(timeout_s) for one in self.workers + self.of_role("validator")]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    def end_in_order(self) -> None:
        """End servers and scheduler as the launcher does; they must end well."""
        for group in (self.servers, [self.scheduler]):
            for process in group:
                process.end()
            for process in group:
                code = process.wait()
                assert code == 0, f"{process.spec.name} ended with {code}\n{process.report()}"

    def report(self) -> str:
        """Give what everybody said."""
        return "\n".join(process.report() for process in self.processes.values())

    def close(self) -> None:
        """Kill what is left; idempotent."""
        self._held.close()
        for process in self.processes.values():
            process.popen.kill()
        for process in self.processes.values():
            process.close()
        self._handout.close()


def check_told(job: Job, victim: Process, ranks: Sequence[int], name: str) -> None:
    """Have an error that names a victim of SIGKILL on workers, in time, and see everybody end.

    Results: their errors in "texts", and when the first one was raised in "at".
    """
    assert victim.wait() == -signal.SIGKILL, victim.report()
    killed_at = time.monotonic()
    for rank in ranks:
        result = job.workers[rank].result()
        for text in result["texts"]:
            assert "PeerLostError" in text, result
            assert name in text, result
        assert result["at"] - killed_at < slowed(TOLD_S), result
    for process in job.others(victim):
        process.wait(TOLD_S + 15)


def command_of(program: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the command that runs a function of a file in a process of its own."""
    file = program.__code__.co_filename
    return (sys.executable, str(RUNNER), file, program.__name__, json.dumps(dict(arguments)))


def run_job(
    program: Callable[..., Any],
    *,
    workers: int = 2,
    servers: int = 2,
    validators: int = 0,
    timeout_s: float = WAIT_S,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    each: Environments | None = None,
) -> list[Any]:
    """Run a job to its orderly end; give the workers' results by rank, then the validators'."""
    with Job(
        program,
        workers=workers,
        servers=servers,
        validators=validators,
        arguments=arguments,
        environment=environment,
        each=each,
    ) as job:
        results = job.results(timeout_s)
        job.end_in_order()
        return results


def run_workers(
    script: str,
    folder: Path,
    *,
    workers: int = 2,
    servers: int = 2,
    timeout_s: float = 90.0,
    environ: Mapping[str, str] | None = None,
) -> JobResult:
    """Do what the launcher's run_workers() of harness.py does, without a launcher: faster.

    returncode is that of the first worker that failed.
    """
    path = write_script(script, folder)
    command = (sys.executable, str(path))
    with Job(command, workers=workers, servers=servers, environment=environ) as job:
        deadline = time.monotonic() + timeout_s
        codes = [worker.wait(max(deadline - time.monotonic(), 0)) for worker in job.workers]
        if not any(codes):
            job.end_in_order()
        lines = [line for worker in job.workers for line in worker.lines]
        texts = [process.stderr() for process in job.processes.values()]
    reports = tuple(reports_of(path, rank) for rank in range(workers))
    code = next((code for code in codes if code), 0)
    return JobResult(code, "\n".join(lines), "\n".join(texts), reports)
