# SPDX-License-Identifier: Apache-2.0
"""Start processes of Python without waiting for imports: fork them from one that has them.

Importing torch takes a second and a half of a processor; a job of four workers would pay it four
times. So each process that runs tests has at most one server, which imports what workers begin
with and then only forks. What it forks is a program as any other, with arguments, environment and
output of its own, and a Forked is used as a subprocess.Popen is. Who needs an environment that
modules read while they are loaded gets a process started afresh.

Programs that the launcher, torchrun or a shell starts are forked where the file forking/python
stands for python; see forking().
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# What fastps.init() and the first operations import, and Python for the first address.
JOINING = (
    "encodings.idna", "fastps.byzantine", "fastps.collectives.objects", "fastps.config.launchers",
    "fastps.session.connections", "fastps.session.drift", "fastps.session.forget",
    "fastps.session.fork", "fastps.session.groups", "fastps.session.join", "fastps.session.routes",
    "fastps.session.session", "fastps.session.single_worker",
)  # fmt: skip
SERVING = ("fastps.server.main", "fastps.server.server")
LAUNCHING = ("fastps.launch.run",)
# What these start by sys.executable is forked, too; others may hand down descriptors.
STARTERS = ("fastps.launch.run", "fastps.launch.byteps", "fastps.bench")
# fastps, and the programs of tests: servers import rules by their names
ROOT = str(Path(__file__).resolve().parents[2])
IMPORT_PATH = os.pathsep.join((ROOT, str(Path(__file__).parent)))
ALWAYS = ("numpy.random", "pytest", "fastps", *JOINING, *SERVING, *LAUNCHING)
# Of the frameworks that tests have imported, or will, as far as it is there; none starts a thread
# when it is imported.
FRAMEWORKS = {
    # and the data of examples
    "torch": ("fastps.torch", "torch._dynamo", "torch.nn.parallel", "sklearn.datasets"),
    "tensorflow": ("fastps.tensorflow",),
    "jax": ("fastps.jax",),
}
# Names of what is read when it is used.
LATE = ("FASTPS_", "DMLC_", "BYTEPS_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "GROUP_", "MASTER_")  # fmt: skip
# What else differs in programs that others start, and loading does not read.
FREE = (*LATE, "PATH", "PYTHONPATH", "PYTEST_", "PWD", "OLDPWD", "SHLVL", "_", "RAY_enable",
        "FORKING_PYTHON", "TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")  # fmt: skip
FORKING_PYTHON = Path(__file__).parent / "forking" / "python"
EXPECTED: set[str] = set()  # frameworks whose tests do not import them
# As the launcher sets them, the first where workers are not fewer than processors. No thread may
# be there when a process is forked, which OpenBLAS would start, too.
OWN = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
START_S = 60.0  # to import on a loaded machine
MOST_BYTES = 100_000  # of arguments and environment; a socket takes that at once
STATUS_BYTES = 4
MOST_FDS = 8
# Made before any test, of which each has to leave as many sockets as it found. Programs that come
# to the door while the server still imports wait there.
PAIR = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ADDRESS = f"fastps-fork-server-{os.getpid()}"
DOOR = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Forked:
    """A process that the server forked: pid, poll(), wait(), kill() and stdout as of a Popen."""

    def __init__(self, argv: Sequence[str], pid: int, status: int, stdout: IO[str]) -> None:
        self.args, self.pid, self.stdout = argv, pid, stdout
        self.returncode: int | None = None
        self._status = status  # the server writes here how the process ended
        self._lock = threading.Lock()

    def _hear(self, timeout_s: float | None) -> int | None:
        """Wait for the end, and give the exit code."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
                told = os.read(self._status, STATUS_BYTES)
                os.close(self._status)
                code = int.from_bytes(told, "little", signed=True)
                self.returncode = code if told else -signal.SIGKILL  # with the server
            return self.returncode

    def poll(self) -> int | None:
        """Give the exit code, negative for a signal; None while it lives."""
        return self._hear(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired after timeout seconds."""
        code = self._hear(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is just being told
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, seen from the one that asks it to."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = PAIR
        self._socket.settimeout(START_S)
        self._lock = threading.Lock()
        DOOR.bind("\0" + ADDRESS)
        DOOR.listen(64)
        fds = [theirs.fileno(), DOOR.fileno()]
        command = [sys.executable, __file__, *map(str, fds), *modules]
        with theirs, DOOR:
            self._popen = subprocess.Popen(
                command,
                env=while_loading(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # so that buffers are those of a pipe
                pass_fds=fds,
            )
        atexit.register(self.close)

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stderr: IO[bytes],
        fds: Sequence[int] = (),
    ) -> Forked:
        """Run what `argv` would, python and a file or -m and a module; stdout is a pipe.

        fds: descriptors that it has with the same numbers. Blocks until it is forked.
        """
        asked = json.dumps([list(argv[1:]), dict(environ), os.getcwd(), [], list(fds)]).encode()
        assert len(asked) < MOST_BYTES, "too long"
        lines, stdout = os.pipe()
        status, told = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [asked], [told, stdout, stderr.fileno(), *fds])
                pid = int(self._socket.recv(64))
        finally:
            os.close(stdout)
            os.close(told)
        return Forked(argv, pid, status, os.fdopen(lines))

    def close(self) -> None:
        """End the server, which kills what is left of those it forked."""
        self._socket.close()
        self._popen.wait()


@functools.cache
def the_server() -> ForkServer:
    """Return this process's server, with the frameworks that this process has."""
    late = (names for one, names in FRAMEWORKS.items() if one in {*sys.modules, *EXPECTED})
    return ForkServer((*ALWAYS, *itertools.chain(*late)))


def forking(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `python`, and FORKING_PYTHON, are forked from the server."""
    the_server()
    path = f"{FORKING_PYTHON.parent}:{Path(sys.executable).parent}:{environ['PATH']}"
    return {**environ, "PATH": path, "FORKING_PYTHON": f"{ADDRESS} {sys.executable}"}


def while_loading(environ: Mapping[str, str]) -> dict[str, str]:
    """Give what of an environment modules may read while they are loaded, as in the server."""
    kept = {name: value for name, value in environ.items() if not name.startswith(LATE)}
    return kept | OWN | {"PYTHONPATH": IMPORT_PATH}


def is_forkable(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether the server can start it: python itself, with nothing that loading reads."""
    given = {name: value for name, value in environ.items() if not name.startswith(LATE)}
    is_plain = argv[0] == sys.executable and (argv[1] == "-m" or argv[1].endswith(".py"))
    return is_plain and OWN | given == while_loading(os.environ)


class Nursery:
    """In the server: what it has forked, and who wants to know how that ends."""

    def __init__(
        self, control: socket.socket, door: socket.socket, environ: Mapping[str, str]
    ) -> None:
        self._control, self._door = control, door
        self._environ = environ  # which was there when imports began
        self._told: dict[int, tuple[int, int]] = {}  # by descriptor of a process: pid, status
        self._links: dict[int, int] = {}  # of what others started: its pid
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(door, select.POLLIN)

    def serve(self) -> bytes:
        """Fork whenever asked to; returns only in the process that was forked, what is asked."""
        while True:
            for fd, _ in self._poll.poll():
                asked = b""
                if fd == self._control.fileno():
                    asked = self._fork()
                elif fd == self._door.fileno():
                    asked = self._fork_for_others()
                elif fd in self._links:
                    os.kill(self._links[fd], signal.SIGKILL)  # what started it is gone
                    self._poll.unregister(fd)
                elif fd in self._told:  # else both ended at once, and that was told
                    self._tell(fd)
                if asked:
                    return asked

    def _tell(self, fd: int) -> None:
        """Tell how a process ended."""
        self._poll.unregister(fd)
        pid, status = self._told.pop(fd)
        if self._links.pop(status, None):
            with contextlib.suppress(KeyError):
                self._poll.unregister(status)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(status, code.to_bytes(STATUS_BYTES, "little", signed=True))
        os.close(status)
        os.close(fd)

    def _fork(self) -> bytes:
        """Fork as asked: what is asked in the new process, nothing here."""
        asked, fds, _, _ = socket.recv_fds(self._control, MOST_BYTES, MOST_FDS)
        if not asked:
            self._end()
        status, *given = fds
        pid = self._fork_one(status, given, [1, 2, *json.loads(asked)[4]])
        if pid == 0:
            return asked
        self._control.send(str(pid).encode())
        return b""

    def _fork_for_others(self) -> bytes:
        """Fork a program that was started as forking/python; refuse what has to load itself."""
        link, _ = self._door.accept()
        link.settimeout(START_S)
        asked, given, strange = b"", [], []
        with contextlib.suppress(OSError):
            asked, given, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_FDS)
        if asked:
            theirs = OWN | json.loads(asked)[1]
            differing = dict(theirs.items() ^ self._environ.items())
            strange = [name for name in differing if not name.startswith(FREE)]
        if not asked or strange:
            for one in given:
                os.close(one)
            with link, contextlib.suppress(OSError):
                link.send(b"0 " + " ".join(strange).encode())
            return b""
        status = link.detach()
        pid = self._fork_one(status, given, [0, 1, 2])
        if pid == 0:
            return asked
        self._links[status] = pid
        self._poll.register(status, select.POLLIN)
        with contextlib.suppress(OSError):
            os.write(status, str(pid).encode())
        return b""

    def _fork_one(self, status: int, given: Sequence[int], wanted: Sequence[int]) -> int:
        """Fork; status is written to in the end, the new process has `given` as `wanted`."""
        pid = os.fork()
        if pid == 0:
            self._become(given, wanted)
            return 0
        fd = os.pidfd_open(pid)
        self._told[fd] = pid, status
        self._poll.register(fd, select.POLLIN)
        for one in given:
            os.close(one)
        return pid

    def _become(self, given: Sequence[int], wanted: Sequence[int]) -> None:
        """Keep nothing of the server in the new process but what it has imported."""
        mine = [fd for fds in self._told.items() for fd in (fds[0], fds[1][1])]
        free = max(*wanted, *given, *mine, self._door.detach(), self._control.detach()) + 1
        for number, fd in enumerate(given):
            os.dup2(fd, free + number)
        os.closerange(3, free)
        for number, fd in enumerate(wanted):
            os.dup2(free + number, fd)
        os.closerange(free, free + len(given))

    def _end(self) -> None:
        for pid, _ in self._told.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def run(words: list[str], environ: dict[str, str], folder: str, cpus: list[int]) -> None:
    """Run a file, a module or a text as python would; cpus: where, if not everywhere."""
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    first = sys.path.index(IMPORT_PATH.split(os.pathsep)[0])
    sys.path[first : first + len(IMPORT_PATH.split(os.pathsep))] = filter(None, given)
    os.environ.clear()
    os.environ.update(environ)
    if ROOT not in sys.path:
        sys.path.append(ROOT)  # as of an editable installation
    os.chdir(folder)
    if cpus:
        os.sched_setaffinity(0, cpus)
    sys.path[0] = "" if words[0] == "-c" else folder
    if words[0] == "-P":
        del words[0], sys.path[0]
    while words[0] == "-W":
        warnings._setoption(words[1])
        del words[:2]
    if words[0] == "-m" and words[1].startswith(STARTERS) and "FORKING_PYTHON" in environ:
        sys.executable = str(FORKING_PYTHON)
    random.seed()
    sys.modules["numpy"].random.seed()
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        if not hasattr(sys.modules.get(words[1]), "__path__"):
            sys.modules.pop(words[1], None)  # or runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def end() -> None:
    """End well, as the interpreter does, but do not take apart one by one what was imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Import, fork, and run in what was forked."""
    control, door = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    environ = dict(os.environ)
    for name in sys.argv[3:]:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    gc.freeze()  # what is there stays, and is shared
    asked = Nursery(control, door, environ).serve()
    run(*json.loads(asked)[:4])
    end()


if __name__ == "__main__":
    main()
