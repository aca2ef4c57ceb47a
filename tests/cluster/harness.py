# SPDX-License-Identifier: Apache-2.0
"""Run a script as a whole job of real processes and give back what its workers reported.

A script calls report(value) (plain JSON) as often as it likes; run_workers() gives the values of
each worker in order. The launcher ends every process; should it not, they are killed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fork_server import FORKING_PYTHON, forking

ROOT = Path(__file__).resolve().parents[2]
# Put before each script; line numbers in a traceback move by two.
PRELUDE = (
    "import warnings; warnings.simplefilter('error', FutureWarning)\n"
    "def report(value): import json, os; "
    "f = open(__file__ + '.' + os.environ['FASTPS_RANK'], 'a'); "
    "f.write(json.dumps(value) + '\\n'); f.close()"
)
SPARE_S = 30.0  # for the launcher to end a job after its own limit
MOST_SLOWED = 4.0  # so 2 s stay less than a lease, by which the dead would be noticed anyway


@dataclass(frozen=True)
class JobResult:
    """How a job ended: exit code, texts with prefixes, and reports by worker."""

    returncode: int
    stdout: str
    stderr: str
    reports: tuple[tuple[Any, ...], ...]

    def check(self) -> JobResult:
        """Give the result back if the job ended well; AssertionError shows its output."""
        assert self.returncode == 0, f"code {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


def run_workers(
    script: str,
    folder: Path,
    *,
    workers: int = 2,
    servers: int = 2,
    validators: int = 0,
    timeout_s: float = 90.0,
    environ: Mapping[str, str] | None = None,
) -> JobResult:
    """Run a script's text as the workers of a job on this machine, with real servers.

    folder: where the script is written. environ: more settings for every process. Blocks; ends
    the job after timeout_s (code 124).
    """
    path = write_script(script, folder)
    counts = ["-np", str(workers), "-s", str(servers), "-v", str(validators)]
    result = _launched([*counts, str(FORKING_PYTHON), str(path)], timeout_s, environ or {})
    return replace(result, reports=tuple(reports_of(path, rank) for rank in range(workers)))


def run_example(
    program: str,
    *arguments: str,
    timeout_s: float = 150.0,
    environ: Mapping[str, str] | None = None,
) -> JobResult:
    """Run a program of the tree as two workers; raises AssertionError where it fails."""
    command = ["-np", "2", str(FORKING_PYTHON), str(ROOT / program), *arguments]
    patience = {"FASTPS_START_TIMEOUT_S": str(timeout_s)}  # frameworks take long to import
    return _launched(command, timeout_s, patience | dict(environ or {})).check()


def _launched(command: list[str], timeout_s: float, environ: Mapping[str, str]) -> JobResult:
    process = subprocess.Popen(
        [str(FORKING_PYTHON), "-m", "fastps.launch.run", "--timeout", str(timeout_s), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=forking(clean_environ()) | {"PYTHONPATH": str(ROOT), **environ},
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s + SPARE_S)
    finally:
        process.kill()  # the kernel ends its children with it
        process.wait()
    return JobResult(process.returncode, stdout, stderr, ())


def slowed(seconds: float) -> float:
    """Give a bound of an idle machine, longer where each process has less of a processor.

    The average of the last minute lags; how many can run says so at once, of this moment alone.
    """
    average, _, _, tasks, _ = Path("/proc/loadavg").read_text(encoding="ascii").split()
    others = int(tasks.partition("/")[0]) - 1
    share = max(float(average), others) / (os.cpu_count() or 1)
    return seconds * min(max(1.0, share), MOST_SLOWED)


def write_script(script: str, folder: Path) -> Path:
    """Write a script with report() before it, in which a FutureWarning is an error."""
    path = folder / "worker.py"
    path.write_text(PRELUDE + "\n" + textwrap.dedent(script), encoding="utf-8")
    return path


def clean_environ() -> dict[str, str]:
    """Give this process's environment without settings of a job it may be part of.

    Workers are machines of their own, so that links and servers are tested; a test of shared
    memory says so. TEST_ENCRYPT, e.g. on, is FASTPS_ENCRYPT of all jobs, over TCP alone.
    """
    own = ("FASTPS_", "DMLC_", "BYTEPS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    quiet = {"FASTPS_BANNER": "0", "FASTPS_START_WATCH_S": "0"}
    if mode := os.environ.get("TEST_ENCRYPT"):
        quiet |= {"FASTPS_ENCRYPT": mode, "FASTPS_UNIX_SOCKETS": "0"}
    return kept | {"FASTPS_SHARED_MEMORY": "0"} | quiet


def reports_of(script: Path, rank: int) -> tuple[Any, ...]:
    """Read what one worker reported."""
    path = Path(f"{script}.{rank}")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tuple(json.loads(line) for line in lines)
