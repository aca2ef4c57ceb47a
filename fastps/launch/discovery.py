# SPDX-License-Identifier: Apache-2.0
"""The hosts of an elastic job, as a script of the user lists them again and again.

The script prints a line for each host that the job may use now, as in a hostfile: `a:4`. It runs
beside the launcher's loop, which never waits for it. One that fails is reported, and asked again.
Used from the launcher's main thread.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from fastps.launch.cause import Cause
from fastps.launch.hosts import Host, parse_hostfile
from fastps.launch.job import SignalInbox, interrupted
from fastps.launch.processes import before_program, describe_exit

PERIOD_S = 1.0  # between two runs of the script
LIMIT_S = 30.0  # for one run
_MAX_OUTPUT_BYTES = 1 << 20


class HostScript:
    """Runs the script each second, and reads its list."""

    def __init__(self, command: str, slots: int, report: Callable[[str], None]) -> None:
        """slots: workers of a host that is listed without a number."""
        self._argv, self._slots, self._report = shlex.split(command), slots, report
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0  # when the script starts next, or is ended
        self._fault = ""  # of the last run

    def wait_s(self, now: float) -> float:
        """Return the seconds until poll() has something to do; a script's end wakes the loop."""
        return max(self._due - now, 0.0)

    def poll(self, now: float) -> tuple[Host, ...] | None:
        """Return what the script has listed since the last call; None if there is nothing new."""
        if self._process is None:
            if now >= self._due:
                self._start(now)
            return None
        if self._process.poll() is None:
            if now >= self._due:
                self.close()
                self._fail(f"has not ended within {LIMIT_S:g} s")
                self._due = now + PERIOD_S
            return None
        return self._read(now)

    def close(self) -> None:
        """Kill a script that runs. Idempotent."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            self._close_files()

    def _start(self, now: float) -> None:
        self._due = now + LIMIT_S
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed where it is read)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._errors,
                process_group=0, preexec_fn=before_program(has_terminal=False, dies_with_us=True),
            )  # fmt: skip
        except OSError as error:
            self._close_files()
            self._fail(f"cannot be started: {error.strerror}")
            self._due = now + PERIOD_S

    def _close_files(self) -> None:
        self._output.close()
        self._errors.close()

    def _read(self, now: float) -> tuple[Host, ...] | None:
        assert self._process is not None
        code, self._process = self._process.returncode, None
        self._due = now + PERIOD_S
        with self._output as output, self._errors as errors:
            output.seek(0)
            errors.seek(0)
            text = output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
            said = errors.read(_MAX_OUTPUT_BYTES).decode(errors="replace").strip().splitlines()
        if code:
            self._fail(": ".join([describe_exit(code), *said[-1:]]))
            return None
        try:
            hosts = parse_hostfile(text, "its output") if text.strip() else ()
            found = tuple(self._with_workers_alone(host) for host in hosts)
        except ValueError as error:
            self._fail(f"lists no hosts: {error}")
            return None
        self._fault = ""
        return tuple(host for host in found if slots_of([host]))

    def _with_workers_alone(self, host: Host) -> Host:
        workers, *others = host.counts or (self._slots, 0, 0)
        if any(others):
            raise ValueError(f"{host.name} has servers, which cannot join a job; write HOST:SLOTS")
        return Host(host.name, (workers, 0, 0))

    def _fail(self, fault: str) -> None:
        """Report a fault, once as long as it stays the same."""
        if fault != self._fault:
            self._fault = fault
            self._report(f"--host-discovery-script {self._argv[0]} {fault}; it is asked again")


def slots_of(hosts: Sequence[Host]) -> int:
    """Return how many workers some hosts have place for."""
    return sum(host.counts[0] for host in hosts if host.counts)


def await_slots(
    script: HostScript, least: int, timeout_s: float, inbox: SignalInbox
) -> tuple[Host, ...] | Cause:
    """Wait until the script lists hosts for so many workers; return why not, else the hosts."""
    until, found = time.monotonic() + timeout_s, tuple[Host, ...]()
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        while (now := time.monotonic()) < until:
            listed = script.poll(now)
            found = found if listed is None else listed
            if slots_of(found) >= least:
                return found
            selector.select(min(script.wait_s(now), until - now))
            if numbers := inbox.take():
                script.close()
                return interrupted(None, numbers[0])
    script.close()
    return Cause(
        f"--host-discovery-script has listed place for {slots_of(found)} workers within "
        f"{timeout_s:g} s, and the job needs {least} to begin; lower -n or --min, or raise "
        "--start-timeout", 1,
    )  # fmt: skip
