# SPDX-License-Identifier: Apache-2.0
"""Run one job, let its event happen, observe what follows, and end whatever is left.

Entered by a process of its own for each job (__main__ forks it), with one thread. It is the
subreaper of the job: orphans become its children. As root it has a mount namespace of its own, in
which /dev/shm and the small disk are empty tmpfs, so that what lies there afterwards is the job's.

Invariants. Every wait has a deadline. All processes carry a mark in their environment; those that
still run after the job's end are reported as left behind, then killed. Processes that it starts
get SIGKILL from the kernel if it dies itself; it gets SIGTERM if the driver dies. The lab is
removed in `finally`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastps.launch.processes import become_subreaper, reap_orphans
from tools.chaos.events import CUTS, LATE_S, SIGNALS, STEPS, Event
from tools.chaos.layouts import SETTINGS, Layout
from tools.chaos.seen import Seen
from tools.netlab import NetLab

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "chaos" / "program.py"
TICK_S = 0.002
LIMIT_S = 45.0  # of a whole job, longer on a loaded machine
SETTLE_S = 3.0  # for processes to be gone once their launchers are
FORK_S = 0.3  # a child of a launcher that still has its command line is the scheduler
GRACE_S = "8"
AHEAD_S = 86_400  # of a clock that is ahead
DISK_BYTES = 64 * 1024
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def has_mounts() -> bool:
    """Return whether mounts of our own can be made: in a child, which is left at once."""
    pid = os.fork()
    if not pid:
        os._exit(_LIBC.unshare(_CLONE_NEWNS) != 0)
    return os.waitpid(pid, 0)[1] == 0


def has_clocks() -> bool:
    """Return whether processes can be started with another monotonic clock."""
    words = ["unshare", "-T", "--monotonic", "1", "--fork", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True, check=False, timeout=10).returncode == 0
    return False


def load_now() -> float:
    """Return how many processes want each processor, at this moment or in the last minute."""
    average, _, _, tasks, _ = Path("/proc/loadavg").read_text(encoding="ascii").split()
    others = int(tasks.partition("/")[0]) - 1
    return max(float(average), others) / (os.cpu_count() or 1)


def marked(mark: str) -> dict[int, tuple[str, dict[str, str]]]:
    """Find the processes of a job: command line and environment by process id."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            if mark.encode() not in environment:
                continue
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            if state in "ZX":
                continue
            words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
            pairs = [
                one.partition("=") for one in environment.decode(errors="replace").split("\0")
            ]
            line = words.decode(errors="replace").strip()
            found[int(entry)] = line, {name: value for name, _, value in pairs}
    return found


def _parent(pid: int) -> int:
    """Return a process's parent; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def sweep(mark: str) -> None:
    """Kill all processes of a job, until none is left."""
    until = time.monotonic() + 10.0
    while (found := marked(mark)) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans()
        time.sleep(0.02)
    while reap_orphans() and time.monotonic() < until:
        time.sleep(0.01)


class Started:
    """One process that the driver started, with its outputs in files."""

    def __init__(
        self, name: str, words: list[str], environment: dict[str, str], folder: Path
    ) -> None:
        self.name = name
        self.stderr = folder / f"{name.replace(' ', '-')}.stderr"
        with self.stderr.open("wb") as errors, Path(os.devnull).open("wb") as nothing:
            self.popen = subprocess.Popen(
                words, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=nothing,
                stderr=errors, preexec_fn=die_with_parent,
            )  # fmt: skip


class Histories:
    """The records of all workers, read as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._partial: dict[str, bytes] = {}
        self.records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call."""
        new = []
        for name in os.listdir(self._folder):
            if name.startswith("history.") and name not in self._files:
                self._files[name] = (self._folder / name).open("rb")
        for name, file in self._files.items():
            data = self._partial.get(name, b"") + file.read()
            *lines, self._partial[name] = data.split(b"\n")
            new += [json.loads(line) for line in lines]
        self.records += new
        return new

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


class Runner:
    """One job and its event."""

    def __init__(self, event: Event, layout: Layout, folder: Path, elastic: int | None) -> None:
        self.event, self.layout, self.folder, self.elastic = event, layout, folder, elastic
        self.mark = f"chaos-{secrets.token_hex(8)}"
        self.seen = Seen()
        self.histories = Histories(folder)
        self.started: list[Started] = []
        self.lab: NetLab | None = None
        self.small = folder / "small"
        self._has_mounts = False
        self._due_at: float | None = None  # of the driver's own event
        self._undo_at: float | None = None
        self._stopped: int | None = None
        self._is_done = False  # the second fault
        self._forks: dict[int, float] = {}  # of the launcher, when they were first seen
        self._latest = 0.0

    # ---- the job

    def run(self) -> Seen:
        """Run the job to its end or its deadline."""
        become_subreaper()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self.seen.load = {"before": load_now(), "seed": self.event.seed % 10_000}
        try:
            if self.layout.is_lab:
                name = f"fastps-chaos{os.getppid()}x{os.getpid()}"
                self.lab = NetLab(hosts=len(self.layout.machines), name=name)
                self.lab.up()
            self._mount()
            shared = set(os.listdir("/dev/shm"))
            self.seen.began_at = time.monotonic()
            self._start()
            self._watch()
            self._look_for_leftovers(shared)
        finally:
            sweep(self.mark)
            if self.lab is not None:
                self.lab.down()
            self.histories.close()
        after = load_now()
        share = max(self.seen.load["before"], after)
        self.seen.load |= {"after": after, "share": share, "driver_late_s": self._latest}
        return self.seen

    def _mount(self) -> None:
        self.small.mkdir()
        if os.geteuid() or _LIBC.unshare(_CLONE_NEWNS):
            return
        if _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
            return
        self._has_mounts = not _LIBC.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1g")
        if self.event.kind == "disk":
            size = f"size={DISK_BYTES}".encode()
            _LIBC.mount(b"none", str(self.small).encode(), b"tmpfs", 0, size)

    def _environment(self) -> dict[str, str]:
        own = ("FASTPS_", "DMLC_", "BYTEPS_", "TORCHELASTIC_", "CHAOS")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        scratch = self.small if self.event.kind == "disk" else self.folder / "tmp"
        scratch.mkdir(exist_ok=True)
        elastic = {} if self.elastic is None else {"FASTPS_ELASTIC_MIN": str(self.elastic)}
        return {
            **kept, **SETTINGS, **self.layout.environment, **elastic,
            "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
            "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch),
            "CHAOS_MARK": self.mark, "CHAOS": json.dumps(self._plan()),
        }  # fmt: skip

    def _plan(self) -> dict[str, Any]:
        event = self.event
        act = late = None
        if event.role == "worker" and event.kind in SIGNALS:
            act = {"rank": event.rank, "phase": event.phase, "step": event.step,
                   "delay_s": event.delay_s, "signal": int(SIGNALS[event.kind]),
                   "probe": event.probe}  # fmt: skip
        if event.phase in ("waiting", "late"):
            rank = event.rank if event.phase == "late" else self._straggler()
            late = {"rank": rank, "step": event.step, "s": LATE_S}
        return {
            "folder": str(self.folder), "seed": int(self.seen.load["seed"]),
            "work": self.layout.work, "steps": STEPS, "pause_s": 0.004, "elastic": self.elastic,
            "is_polite": event.is_polite, "late": late, "act": act,
            "has_fractions": self.layout.has_fractions,
        }  # fmt: skip

    def _straggler(self) -> int:
        """Return a worker that is not the victim."""
        is_first = self.event.role == "worker" and self.event.rank == 0
        return 1 if is_first else 0

    def _start(self) -> None:
        environment = self._environment()
        if self.layout.launcher == "none":
            self._start_by_hand(environment)
            return
        python = sys.executable
        for machine, (workers, servers) in enumerate(self.layout.machines):
            if self.layout.launcher == "torchrun":
                words = [python, "-m", "torch.distributed.run", "--standalone",
                         "--nproc-per-node", str(workers)]  # fmt: skip
            else:
                words = [python, "-m", "fastps.launch.run", "--grace", GRACE_S, "--no-live"]
                words += self._of_machines() if self.lab else []
                counts = zip(*self.layout.machines, strict=True) if self.lab else [
                    (workers,), (servers,)
                ]  # fmt: skip
                for option, numbers in zip(("-np", "-s"), counts, strict=True):
                    words += [option, ",".join(map(str, numbers))]
                words += ["--machine-rank", str(machine)] if self.lab else []
                words += [] if self.elastic is None else ["--min", str(self.elastic)]
            if self.event.kind == "disk":
                words += ["--output-dir", str(self.small / "logs"), "--log-level", "DEBUG"]
                words += ["--timeline", str(self.small / "timeline.json")]
            own = dict(environment)
            if self.event.kind == "clock" and self.event.rank == machine:
                own["CHAOS_SKEW_S"] = str(AHEAD_S)
                words = ["unshare", "-T", "--monotonic", str(AHEAD_S), "--fork", "--kill-child",
                         *words]  # fmt: skip
            command = (
                [python, str(PROGRAM)] if self.layout.launcher == "fastps-run" else [str(PROGRAM)]
            )
            words += command
            words = self.lab.command(machine, words) if self.lab else words
            self.started.append(Started(f"launcher {machine}", words, own, self.folder))

    def _of_machines(self) -> list[str]:
        assert self.lab is not None
        token = self.folder / "token"
        if not token.exists():
            token.touch(0o600)
            token.write_text(secrets.token_hex(24))
        return ["--machines", str(self.lab.hosts), "--scheduler-host", self.lab.address(0),
                "--scheduler-port", "29555", "--token-file", str(token)]  # fmt: skip

    def _start_by_hand(self, environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        workers, servers = self.layout.workers, self.layout.servers
        common = environment | {
            "FASTPS_TOKEN": secrets.token_hex(24), "FASTPS_SIZE": str(workers),
            "FASTPS_NUM_SERVERS": str(servers), "FASTPS_SCHEDULER_HOST": "127.0.0.1",
            "FASTPS_SCHEDULER_PORT": str(port),
        }  # fmt: skip
        server = [sys.executable, "-m", "fastps.server.main"]
        roles = [("scheduler", 0, [*server, "--role", "scheduler"]),
                 *(("server", rank, server) for rank in range(servers)),
                 *(("worker", rank, [sys.executable, str(PROGRAM)])
                   for rank in range(workers))]  # fmt: skip
        for role, rank, words in roles:
            own = common | {"FASTPS_ROLE": role, "FASTPS_RANK": str(rank)}
            if (role, rank) == (self.event.role, self.event.rank) and role == "server":
                own["FASTPS_FAULT"] = self.event.probe
            self.started.append(Started(f"{role} {rank}", words, own, self.folder))

    # ---- the event

    def _watch(self) -> None:
        limit = LIMIT_S * min(max(1.0, self.seen.load["before"] / 2), 3.0)
        deadline = self.seen.began_at + limit
        asked_at = None
        while any(one.popen.poll() is None for one in self.started):
            before = time.monotonic()
            self._observe(before)
            if before > deadline:
                if asked_at is None:
                    asked_at = self._ask_where(before)
                elif before > asked_at + 1.0:
                    self.seen.is_hung = True
                    break
            time.sleep(TICK_S)
            self._latest = max(self._latest, time.monotonic() - before - TICK_S)
        self.seen.ended_at = time.monotonic()
        for one in self.started:
            text = one.stderr.read_text(errors="replace")
            self.seen.launchers[one.name] = {"code": one.popen.poll(), "stderr": text[-20_000:]}

    def _ask_where(self, now: float) -> float:
        """Let Python programs of a job that hangs write where they are."""
        for pid, (line, _) in marked(self.mark).items():
            if "program.py" in line and "fastps.launch" not in line and "torch.dist" not in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGQUIT)
        return now

    def _observe(self, now: float) -> None:
        event = self.event
        for record in self.histories.read():
            if record["what"] == "event":
                self._happened(record["at"])
                if event.kind == "stop":
                    self._stopped = int(record["member"].partition(":")[2])
                    self._undo_at = record["at"] + event.seconds
            elif self._due_at is None and self._is_moment(record):
                self._due_at = record["at"] + event.delay_s
        if event.kind in ("disk", "clock") and self.seen.event_at is None:
            self._happened(self.seen.began_at)
        if event.probe and self.seen.event_at is None:
            self._look_for_death(now)
        is_ours = event.kind in CUTS or (event.kind in SIGNALS and event.role != "worker")
        is_ours = is_ours and not event.probe
        if is_ours and self._due_at is None and event.phase == "start":
            self._due_at = self.seen.began_at + 0.05 + event.delay_s
        if (
            is_ours
            and self._due_at is not None
            and now >= self._due_at
            and self.seen.event_at is None
        ):
            self._do()
        if self._undo_at is not None and now >= self._undo_at:
            self._undo()
        happened = self.seen.event_at
        if event.then_role and not self._is_done and happened is not None:
            self._do_second(now, happened)

    def _is_moment(self, record: dict[str, Any]) -> bool:
        phase = self.event.phase
        if phase == "leaving":
            return record["what"] == "leave"
        what = "enter" if phase == "waiting" else "step"
        return record["what"] == what and record.get("step") == self.event.step

    def _happened(self, at: float) -> None:
        if self.seen.event_at is None:
            self.seen.event_at = at

    def _look_for_death(self, now: float) -> None:
        """See that a worker or server which a probe kills is dead."""
        for one in self.started:
            if one.name == f"server {self.event.rank}" and one.popen.poll() == -signal.SIGKILL:
                self._happened(now)
        if self.event.role == "server":
            return
        begun = [one for one in self.histories.records
                 if one["what"] == "begin" and one["rank"] == self.event.rank]  # fmt: skip
        if not begun or self.seen.event_at is not None:
            return
        pid = begun[-1]["member"].partition(":")[2]
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        has_left = any(one["what"] == "left" and one["rank"] == self.event.rank
                       for one in self.histories.records)  # fmt: skip
        if state in "ZX" and not has_left and not self._has_error(self.event.rank):
            self._happened(now)

    def _has_error(self, rank: int) -> bool:
        return any(
            one["what"] == "error" and one["rank"] == rank for one in self.histories.records
        )

    def _do_second(self, now: float, happened: float) -> None:
        if now >= happened + self.event.then_s:
            self._is_done = True
            pid = self._process(self.event.then_role, self.event.then_rank)
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)

    def _process(self, role: str, rank: int) -> int | None:
        for one in self.started:
            if one.name == f"{role} {rank}":
                return one.popen.pid if one.popen.poll() is None else None
        launcher = self.started[0].popen.pid
        for pid, (line, names) in marked(self.mark).items():
            is_fork = "fastps.launch.run" in line and _parent(pid) == launcher
            if is_fork and role == "scheduler":
                first = self._forks.setdefault(pid, time.monotonic())
                if time.monotonic() > first + FORK_S:
                    return pid
            if names.get("FASTPS_ROLE") == role and names.get("FASTPS_RANK") == str(rank):
                return pid
        return None

    def _do(self) -> None:
        event = self.event
        if event.kind in CUTS:
            self._cut("cut")
            self._happened(time.monotonic())
            self._undo_at = time.monotonic() + event.seconds if event.seconds else None
            return
        pid = self._process(event.role, event.rank)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[event.kind])
            self._happened(time.monotonic())
            if event.kind == "stop":
                self._stopped, self._undo_at = pid, time.monotonic() + event.seconds

    def _cut(self, verb: str) -> None:
        assert self.lab is not None
        change = self.lab.cut if verb == "cut" else self.lab.heal
        ways = self.event.ways(self.lab.hosts)
        for source in sorted({source for source, _ in ways}):
            change(source, *(to for one, to in ways if one == source))

    def _undo(self) -> None:
        self._undo_at = None
        if self.event.kind in CUTS:
            self._cut("heal")
        elif self._stopped in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped, signal.SIGCONT)

    # ---- what is left

    def _look_for_leftovers(self, shared: set[str]) -> None:
        until = time.monotonic() + SETTLE_S * min(max(1.0, load_now()), 4.0)
        while (found := marked(self.mark)) and time.monotonic() < until:
            reap_orphans()
            time.sleep(0.02)
        self.histories.read()
        self.seen.records = self.histories.records
        if not self.seen.is_hung:
            for pid, (line, names) in found.items():
                who = f"{names.get('FASTPS_ROLE') or 'worker'} {names.get('FASTPS_RANK', '')}"
                self.seen.left.append(f"process {pid} ({who.strip()}): {line[:200]}")
        new = set(os.listdir("/dev/shm")) - shared
        new = new if self._has_mounts else {name for name in new if "fastps" in name}
        if not self.seen.is_hung:
            self.seen.left += [f"/dev/shm/{name}" for name in sorted(new)]
            self.seen.left += [f"temporary file {one}" for one in self._temporary()]

    def _temporary(self) -> Iterator[str]:
        scratch = self.folder / "tmp"
        for one in sorted(scratch.rglob("*")) if scratch.exists() else []:
            if one.is_file() or one.is_socket():
                yield str(one.relative_to(scratch))
