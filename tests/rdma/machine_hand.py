# SPDX-License-Identifier: Apache-2.0
"""The hands of a test on several machines: they start its programs there.

`python machine_hand.py MACHINES COMMAND...` runs on every machine of tools/rdma-vm at once. Each
imports what programs need, then forks a process for each that is asked for, since imports take
ten times longer than a small job there. Machine 0 also runs the command, the test, and ends with
its status; the others end with machine 0. `machine_hand.py --ask FUNCTION` is a worker's program
for fastps-run: the machine's hand runs the function with the environment that the launcher made.
Only for tests: whoever reaches the port may run any function.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
PORT = 7000
BOOT_S = 120.0  # from the first machine that is up to the last
ASK_S = 120.0
LOOK_S = 0.1  # how often a machine that is not up is tried again
READ_BYTES = 1 << 16
EXIT = "EXIT "
RESULT = "RESULT "


def address_of(machine: int) -> str:
    """Give the address of a machine."""
    return f"10.9.0.{machine + 1}"


def own_machine() -> int:
    """Give the number of this machine, by its name."""
    return int(os.uname().nodename.rpartition("-")[2])


# ---- asking ----


class Remote:
    """A function of programs_machines.py in a process of its own on a machine; a context.

    Its output is heard line by line. Leaving the context kills it, should it live.
    """

    def __init__(
        self,
        machine: int,
        function: str,
        *,
        environ: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> None:
        self.name = f"{function} on machine {machine}"
        self.lines: list[str] = []
        self._rest = b""
        self._sock = dial(machine, BOOT_S)
        request = {"function": function, "keywords": keywords, "environ": dict(environ or {})}
        self._sock.sendall(json.dumps(request).encode() + b"\n")

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def wait_line(self, text: str, *, timeout_s: float) -> str:
        """Wait for a line that begins with the text; give it."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while True:
            for line in self.lines[seen:]:
                if line.startswith(text):
                    return line
                assert not line.startswith(EXIT), f"{self.name} did not say {text!r}\n{self}"
            seen = len(self.lines)
            self._hear(deadline)

    def status(self, *, timeout_s: float) -> int:
        """Wait for the end; give the exit status, negative for a signal."""
        return int(self.wait_line(EXIT, timeout_s=timeout_s)[len(EXIT) :])

    def result(self, *, timeout_s: float) -> Any:
        """Wait for an orderly end; give what the function returned."""
        assert self.status(timeout_s=timeout_s) == 0, f"{self.name} failed\n{self}"
        found = [line for line in self.lines if line.startswith(RESULT)]
        return json.loads(found[-1][len(RESULT) :]) if found else None

    def _hear(self, deadline: float) -> None:
        """Wait for some more lines."""
        self._sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            data = self._sock.recv(READ_BYTES)
        except TimeoutError:
            raise AssertionError(f"{self.name} says nothing\n{self}") from None
        assert data, f"the hand of {self.name} is gone\n{self}"
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode(errors="replace") for line in lines]

    def __str__(self) -> str:
        """Give all that it said."""
        return "\n".join([f"---- {self.name}", *self.lines])


def dial(machine: int, timeout_s: float) -> socket.socket:
    """Connect to the hand of a machine, which may not be up yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address_of(machine), PORT), timeout=timeout_s)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)  # nothing tells when another machine is up


# ---- doing ----


def become(connection: socket.socket, request: Mapping[str, Any]) -> NoReturn:
    """Be the program that was asked for; what it writes goes to who asked."""
    for descriptor in (1, 2):
        os.dup2(connection.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="replace")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    os.environ.update(request["environ"])
    status = 1
    try:
        module = importlib.import_module("programs_machines")
        result = getattr(module, request["function"])(**request["keywords"])
        print(RESULT + json.dumps(result), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def attend(connection: socket.socket) -> None:
    """Start the program, wait for it, or for the end of interest in it; tell its status."""
    with connection.makefile("r") as lines:
        request = json.loads(lines.readline())
    program = os.fork()
    if program == 0:
        become(connection, request)
    select.select([connection, os.pidfd_open(program)], [], [])
    os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"\n{EXIT}{status}\n".encode())


def serve(listener: socket.socket, until: int) -> None:
    """Attend to whoever connects, until a descriptor can be read."""
    while until not in (ready := select.select([listener, until], [], [])[0]):
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        attendant = os.fork()
        if attendant == 0:
            listener.close()
            with contextlib.suppress(Exception):
                attend(connection)
            os._exit(0)
        connection.close()


def warm() -> None:
    """Import what programs need, and load the kernels from their cache."""
    sys.modules["scipy"] = None  # type: ignore[assignment]  # numba would spend seconds on it
    sys.path[:0] = [str(HERE), str(HERE.parent / "cluster")]
    from fastps.reduce import sum_kernel  # noqa: PLC0415
    from fastps.types import DType  # noqa: PLC0415

    for name in ("fastps.server.main", "fastps.server.server", "programs_machines"):
        importlib.import_module(name)
    for code in (DType.FLOAT32, DType.INT64):
        sum_kernel(code)


def own_settings() -> dict[str, str]:
    """Give the settings of fastps in the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("FASTPS_")}


def ask(function: str) -> int:
    """Let the hand of this machine run a function; show what it says and give its status."""
    with Remote(own_machine(), function, environ=own_settings()) as remote:
        status = remote.status(timeout_s=ASK_S)
        print(*remote.lines[:-1], sep="\n", flush=True)
    return status


def main(machines: int, command: list[str]) -> int:
    """Serve; on machine 0 run the test meanwhile."""
    machine = own_machine()
    environ = dict(os.environ)
    for name in own_settings():  # those of this run are none of a job
        del os.environ[name]
    warm()
    with socket.create_server((address_of(machine), PORT), backlog=64) as listener:
        if machine > 0:
            first, _ = listener.accept()  # it says nothing; its end is the end of the test
            serve(listener, first.fileno())
            return 0
        others = [dial(rank, BOOT_S) for rank in range(1, machines)]
        test = subprocess.Popen(command, env=environ)
        serve(listener, os.pidfd_open(test.pid))
        for other in others:
            other.close()
    return test.wait()


if __name__ == "__main__":
    is_worker = sys.argv[1] == "--ask"
    sys.exit(ask(sys.argv[2]) if is_worker else main(int(sys.argv[1]), sys.argv[2:]))
