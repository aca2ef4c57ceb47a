# SPDX-License-Identifier: Apache-2.0
"""Child processes: started in a group of their own, signalled as a group, reaped once.

Moves signals and exit states; does not decide when. Invariants: the kernel kills a child when the
launcher dies (PR_SET_PDEATHSIG), unless survival.py decides otherwise. Orphans of a child become
children of the launcher (PR_SET_CHILD_SUBREAPER), and `sweep` finds them. A process id is
signalled only before it is reaped, so that a reused id is never hit. Used from the launcher's main
thread; processes are started while it is the only thread. `Child` runs a program; `fork` runs a
function of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pathlib
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, BinaryIO

from fastps.files import Folder
from fastps.launch import survival
from fastps.launch.limits import StartError, memory_kills
from fastps.launch.output import Screen, Stream, name_of
from fastps.launch.plan import ProcessSpec

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_STDIN = 0
_EXIT_FORK = 1  # of a forked child whose function has raised an exception
_SWEEP_GRACE_S = 1.0  # for helpers of a dead worker, such as shared memory trackers, to clean up
_SWEEP_LIMIT_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


class Subprocess:
    """A started process with its two streams: what Child and Machine share."""

    _process: subprocess.Popen[bytes]
    _stdout: Stream
    stderr: Stream

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of the group."""
        return self._process.pid

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Return the streams of output."""
        return self._stdout, self.stderr

    def pipes(self) -> Iterator[tuple[IO[bytes], Stream]]:
        """Pair each pipe that is still open with its stream."""
        pipes = (self._process.stdout, self._process.stderr)
        for pipe, stream in zip(pipes, self.streams, strict=True):
            if pipe is not None and not pipe.closed:
                yield pipe, stream


class Child(Subprocess):
    """A process of the job on this machine."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        inherited: Mapping[str, str],
        screen: Screen,
        output_dir: Folder | None,
    ) -> None:
        """Start the process; StartError when its program cannot be run."""
        self.role = spec.role
        self.name = spec.name
        self.rank = spec.rank
        self.joins = "FASTPS_ELASTIC_JOIN" in spec.environment  # a job that runs
        self.exit_code: int | None = None
        self._stdout, self.stderr = (
            open_stream(
                screen,
                spec.role,
                rank=spec.rank,
                output_dir=output_dir,
                is_error=is_error,
                start=spec.start,
            )
            for is_error in (False, True)
        )
        self._memory_kills = memory_kills()
        self._process = _start(spec, inherited=inherited)

    @property
    def is_alive(self) -> bool:
        """Return whether the end has not been noticed yet."""
        return self.exit_code is None

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        return self.is_alive and is_stopped(self.pid)

    def notice_end(self) -> bool:
        """Reap the process if it has ended; return whether it has since the last call."""
        if self.exit_code is not None or self._process.poll() is None:
            return False
        self.exit_code = self._process.returncode
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for the end and reap the process; return silently at the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.exit_code = self._process.wait(timeout_s)

    def send(self, number: int, *, why: str = "") -> None:
        """Send a signal to the whole group, and resume it if it is stopped; no-op after the end.

        why: ignored; a signal carries no text.
        """
        if not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            if number != signal.SIGKILL:
                os.killpg(self.pid, signal.SIGCONT)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process, but not to its helpers, which may not expect it."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def describe(self) -> str:
        """Return name and process id."""
        return f"{self.name} (pid {self.pid})"

    def describe_end(self) -> str:
        """Return in words how the process ended."""
        return describe_death(self.exit_code or 0, self._memory_kills)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process that was not reaped yet."""
    with contextlib.suppress(OSError):
        state = pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
        return state.split()[0] == b"T"
    return False


def describe_death(code: int, kills_before: int) -> str:
    """Return in words how a process ended; kills_before: memory_kills() at its start."""
    how = describe_exit(code)
    if code == -signal.SIGKILL and memory_kills() > kills_before:
        return f"{how}: the kernel had no memory left in its control group (OOM killer)"
    return how


def describe_exit(code: int) -> str:
    """Return in words what a return code of subprocess means."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def become_subreaper() -> None:
    """Become the parent of the children's orphans, so that `sweep` finds them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def helpers() -> list[int]:
    """Reap ended orphans; return the processes that ended children have left behind.

    Call when all known children are reaped.
    """
    return _descendants(os.getpid()) if reap_orphans() else []


def end_helpers(pids: Sequence[int]) -> None:
    """Send SIGTERM to processes, and resume those that are stopped."""
    _send_to_descendants(pids, signal.SIGTERM, signal.SIGCONT)


def sweep() -> list[int]:
    """End and reap every process left behind; return the ids of those that could not be ended.

    Call when all known children are reaped. Blocks up to 5 seconds.
    """
    start = time.monotonic()
    while reap_orphans():
        elapsed = time.monotonic() - start
        left = _descendants(os.getpid())
        if elapsed > _SWEEP_LIMIT_S:
            return left
        if elapsed > _SWEEP_GRACE_S:
            _send_to_descendants(left, signal.SIGKILL)
        time.sleep(0.02)
    return []


def reap_orphans() -> bool:
    """Reap the children that have ended; return whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _send_to_descendants(pids: Sequence[int], *numbers: int) -> None:
    """Send signals to those of some processes that are below this one.

    A process is held by a descriptor before the look that finds it, for its number may be another
    process's by the time of the signal.
    """
    with contextlib.ExitStack() as stack:
        held = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
                stack.callback(os.close, held[pid])
        for pid in held.keys() & set(_descendants(os.getpid())):
            with contextlib.suppress(ProcessLookupError):
                for number in numbers:
                    signal.pidfd_send_signal(held[pid], number)


def _descendants(root: int) -> list[int]:
    """List the processes below `root`, parents first, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # a name in brackets has any bytes
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def _start(spec: ProcessSpec, *, inherited: Mapping[str, str]) -> subprocess.Popen[bytes]:
    prepare = before_program(
        has_terminal=spec.has_stdin and _has_terminal(),
        dies_with_us=not survival.outlives_launcher(spec.role),
    )
    try:
        return subprocess.Popen(
            spec.argv,
            env={**inherited, **spec.environment, "FASTPS_LAUNCHER_PID": str(os.getpid())},
            stdin=None if spec.has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            preexec_fn=prepare,  # safe: no thread yet
        )
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        message = f"cannot start {spec.name}: {spec.argv[0]!r}: {error.strerror}"
        raise StartError(message, exit_code=code) from error


def fork(
    work: Callable[[], int], *, name: str, output: int, keeps: Collection[int], dies_with_us: bool
) -> int:
    """Run a function in a child process, with its result as the exit code; return the process id.

    name: of the process in ps. output: a descriptor for its standard streams; keeps: those that
    it goes on to use. All others lead to /dev/null there, since objects that belong to the
    launcher still hold their numbers. The child ignores signals for the users' programs.
    """
    parent = os.getpid()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        text = f"cannot start the process {name}: {error.strerror} (check ulimit -u)"
        raise StartError(text, exit_code=126) from error
    if pid == 0:
        code = _EXIT_FORK
        try:
            os.setpgid(0, 0)
            if dies_with_us:
                _die_with(parent)
            _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
            _let_go_of_descriptors(output, keeps)
            _let_go_of_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            gc.freeze()  # what the launcher made is not collected here
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return pid


def _let_go_of_descriptors(output: int, keeps: Collection[int]) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        if number in (1, 2):
            os.dup2(output, number)
        elif number != nowhere and number not in keeps:
            with contextlib.suppress(OSError):  # of the listing itself
                os.fstat(number)
                os.dup2(nowhere, number)
    os.close(nowhere)


def _let_go_of_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _has_terminal() -> bool:
    """Return whether standard input is our terminal, and we are its foreground group."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    return False


def give_terminal(group: int) -> None:
    """Make a process group the foreground group of our terminal, if there is one."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    with contextlib.suppress(OSError):
        os.tcsetpgrp(_STDIN, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, old)


def before_program(*, has_terminal: bool, dies_with_us: bool) -> Callable[[], None]:
    """Return the function that runs in the child before its program."""
    parent = os.getpid()

    def prepare() -> None:
        if has_terminal:
            give_terminal(os.getpid())
        if dies_with_us:
            _die_with(parent)

    return prepare


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the line above
        os._exit(1)


def open_stream(
    screen: Screen, role: str, *, rank: int, output_dir: Folder | None, is_error: bool,
    start: int = 1,
) -> Stream:  # fmt: skip
    """Return the stream of one pipe's lines to the screen and, with output_dir, to a file.

    start: of ProcessSpec; each has a file of its own.
    """
    log: BinaryIO | None = None
    if output_dir is not None:
        kind = "stderr" if is_error else "stdout"
        which = name_of(role, rank).replace(" ", "-")
        name = f"{which}.{kind}" if start == 1 else f"{which}.start-{start}.{kind}"
        log = os.fdopen(output_dir.make(name), "wb")
    return Stream(screen, role, rank=rank, is_error=is_error, log=log)
