# SPDX-License-Identifier: Apache-2.0
"""Let workers of one job come and go all the time, and check what they trained.

    make churn                                  300 s, seed 1
    make churn SECONDS=1800 SEED=7
    python -m tools.churn --every 0.5 --most 6  an event each half second, six workers at most

One job trains with exact integers (tools/churn/program.py). Now and then one of its workers is
killed, which the launcher replaces, one is told to leave by SIGTERM, or another launcher brings
one that joins. Then all end together. All must have taken the same steps with the same weights,
and a replay in NumPy must have the same (tools/churn/check.py). Nothing may grow: private memory,
threads and open files of the scheduler and of the worker that has been there longest. The exit
code is 1 if something is wrong. Events come at random times, so a seed draws the same events, but
not the same moments of the job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastps.config.closed_pipe import ends_quietly
from tools.churn.check import check

PROGRAM = Path(__file__).with_name("program.py")
KINDS = {"kill": 4, "leave": 2, "join": 3}  # how often each is drawn
START = 4  # workers of the launcher that has the scheduler
LEAST = 2  # workers that are left alone
START_S = 30  # that a worker waits for a job, which may have ended meanwhile
END_S = 2.0 * START_S  # from the wish that all end to the end of the last process
READY_S = 60.0  # until the first step
MAX_GROWTH = {"memory": 24 << 20, "threads": 2, "files": 8}


@dataclass
class Member:
    """A worker, as its history shows it."""

    number: int
    pid: int
    joins: bool
    steps: int = 0
    is_over: bool = False


@dataclass
class Churn:
    """A job, and what is done to it."""

    folder: Path
    seed: int
    most: int
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)  # to leave
    done: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)  # bytes of files of history
    history: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[int, Member] = field(default_factory=dict)

    def start(self) -> None:
        """Start the launcher with the scheduler."""
        self.token = self.folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32), encoding="ascii")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.launch(
            "-np", str(START), "--min", "1", "--max", str(self.most), "--respawn", "1000000",
            "--scheduler-host", "127.0.0.1", "--scheduler-port", str(self.port),
        )  # fmt: skip

    def launch(self, *options: str) -> None:
        """Start a launcher; its output goes to a file."""
        plan = {"folder": str(self.folder), "seed": self.seed, "pause_s": 0.03}
        log = self.folder / f"launcher.{len(self.launchers)}"
        command = [sys.executable, "-m", "fastps.launch.run", *options,
                   "--token-file", str(self.token), sys.executable, str(PROGRAM)]  # fmt: skip
        settings = {"FASTPS_LEASE_S": "5", "FASTPS_START_TIMEOUT_S": str(START_S)}
        environ = os.environ | {"CHURN": json.dumps(plan)} | settings
        with log.open("w", encoding="utf-8") as out:
            self.launchers.append(
                subprocess.Popen(command, env=environ, stdout=out, stderr=out, text=True)
            )

    def records(self) -> list[dict[str, Any]]:
        """Return all that workers have written since the last call."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("history.*")):
            with path.open("rb") as file:
                file.seek(self.read[path.name])
                lines, _, _ = file.read().rpartition(b"\n")
            self.read[path.name] += len(lines) + bool(lines)
            found += [json.loads(line) for line in lines.splitlines()]
        self.history += found
        return found

    def members(self) -> list[Member]:
        """Return the workers that live and train."""
        for one in self.records():
            if one["what"] == "begin":
                self.seen[one["number"]] = Member(one["number"], one["pid"], one["joins"])
            member = self.seen[one["number"]]
            member.steps += one["what"] == "step"
            member.is_over |= one["what"] in ("left", "end", "error")
        gone = self.killed | self.told
        return [
            one for one in self.seen.values()
            if one.steps and not one.is_over and one.number not in gone
        ]  # fmt: skip

    def act(self, kind: str, chance: random.Random) -> None:
        """Let one worker come or go."""
        members = self.members()
        own = [one for one in members if not one.joins]
        if kind == "join":
            if len(members) >= self.most + 1:  # one may wait as a spare
                return
            self.launch("--join", f"127.0.0.1:{self.port}", "-np", "1")
        else:
            if len(members) <= LEAST:
                return
            one = chance.choice(members)
            if kind == "leave" and len(own) < LEAST and one in own:
                return  # its launcher has the scheduler, and ends with its last worker
            gone, number = (
                (self.killed, signal.SIGKILL) if kind == "kill" else (self.told, signal.SIGTERM)
            )
            gone.add(one.number)
            with suppress(ProcessLookupError):
                os.kill(one.pid, number)
        self.done[kind] += 1

    def end(self) -> list[str]:
        """Let all end together; return what was wrong with that."""
        (self.folder / "stop").touch()
        until = time.monotonic() + END_S
        broken = []
        for place, launcher in enumerate(self.launchers):
            try:
                launcher.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                broken.append(f"launcher {place} did not end within {END_S:g} s")
                launcher.kill()
                launcher.wait()
        if self.launchers[0].returncode:
            text = (self.folder / "launcher.0").read_text(encoding="utf-8").strip()
            last = text.rpartition("\n")[2]
            broken.append(f"the job's launcher returned {self.launchers[0].returncode}: {last}")
        return broken


def sample(pid: int) -> dict[str, int] | None:
    """Return private memory, threads and open files of a process; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        memory = int(status.split("RssAnon:")[1].split()[0]) << 10
    except (OSError, IndexError):
        return None
    return {
        "memory": memory, "threads": int(status.split("Threads:")[1].split()[0]), "files": files
    }  # fmt: skip


def scheduler_of(launcher: int) -> int | None:
    """Return the process id of the scheduler of a launcher, if that is a process of its own."""
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, IndexError):
            text = path.read_text(encoding="ascii")
            command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ")
            if f"PPid:\t{launcher}\n" in text and b"scheduler" in command:
                return int(path.parent.name)
    return None


def growth(samples: Sequence[dict[str, int]]) -> list[str]:
    """Return what grew from the second quarter of samples to the last one, as sentences."""
    if len(samples) < 8:
        return []
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found = []
    for what, most in MAX_GROWTH.items():
        before, after = (min(one[what] for one in some) for some in (early, late))
        if after - before > most:
            found.append(f"{what} grew from {before} to {after}")
    return found


def wait_for_steps(job: Churn) -> None:
    """Wait until all first workers train."""
    until = time.monotonic() + READY_S
    while len(job.members()) < START:
        if time.monotonic() > until or job.launchers[0].poll() is not None:
            raise SystemExit((job.folder / "launcher.0").read_text(encoding="utf-8")[-2000:])
        time.sleep(0.2)


def run(options: argparse.Namespace, folder: Path) -> list[str]:
    """Run the job; return what was wrong."""
    chance = random.Random(options.seed)
    job = Churn(folder, options.seed, options.most)
    job.start()
    wait_for_steps(job)
    oldest = job.members()[0]
    scheduler = scheduler_of(job.launchers[0].pid)
    watched = {"the oldest worker": oldest.pid} | (
        {"the scheduler": scheduler} if scheduler else {}
    )
    samples: dict[str, list[dict[str, int]]] = {name: [] for name in watched}
    job.told.add(oldest.number)  # so that nothing happens to it
    until = time.monotonic() + options.seconds
    while time.monotonic() < until and job.launchers[0].poll() is None:
        time.sleep(chance.expovariate(1 / options.every))
        job.act(chance.choices([*KINDS], [*KINDS.values()])[0], chance)
        for name, pid in watched.items():
            if (found := sample(pid)) is not None:
                samples[name].append(found)
    broken = job.end()
    job.records()
    records = job.history
    broken += check(records, seed=options.seed, killed=job.killed)
    broken += [f"{name}: {text}" for name, some in samples.items() for text in growth(some)]
    steps = 1 + max((one["step"] for one in records if one["what"] == "step"), default=-1)
    n_begun = sum(one["what"] == "begin" for one in records)
    n_views = sum(one["what"] == "train" and one["number"] == oldest.number for one in records)
    report(f"{steps} steps, {n_begun} processes, {dict(job.done)}; "
           f"the oldest worker began its function {n_views} times")  # fmt: skip
    for name, some in samples.items():
        if some:
            report(f"{name}: {some[0]} at first, {some[-1]} at last")
    return broken


def report(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@ends_quietly
def main() -> int:
    """Run, and print what was wrong; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.churn", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=300.0, help="how long (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the events (default 1)")
    parser.add_argument("--every", type=float, default=2.0,
                        help="mean seconds between two events (default 2)")  # fmt: skip
    parser.add_argument("--most", type=int, default=8, help="workers at most (default 8)")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the job")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="churn-"))
    broken = run(options, folder)
    for text in broken[:20]:
        report(f"WRONG: {text}")
    if broken or options.keep:
        report(f"history and output of launchers: {folder}")
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    report(f"{len(broken)} findings")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
