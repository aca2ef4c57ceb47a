# SPDX-License-Identifier: Apache-2.0
"""The command `fastps doctor`: show what this machine offers to a job, and test it.

Changes nothing, except for --link-pyverbs, which makes one symbolic link. It tests with real jobs
of two workers, one for each kind of connection between them. Threads: those of the jobs.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastps import config
from fastps.config import versions
from fastps.errors import FastPSError
from fastps.launch import team
from fastps.security import ciphers
from fastps.session import current
from fastps.transport import rdma, shm, sockets

CPU_TABLE = Path("/proc/cpuinfo")
CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512_bf16", "asimd", "sve", "bf16")
MIB = 1 << 20
EXIT_BROKEN = 1
PACKAGES = ("numba", "torch", "msgspec")  # packages whose versions a bug report should contain
TRIAL_COUNT, TRIAL_S = 1 << 16, 60.0  # elements summed; limit, for a kernel is compiled first


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "--link-pyverbs",
        action="store_true",
        help="make the distribution's pyverbs importable by this Python, with one symbolic link",
    )
    parser.add_argument(
        "--no-trial", dest="tries", action="store_false", help="do not run the test jobs"
    )


def run(parsed: argparse.Namespace) -> int:
    """Print the findings and run the test jobs; return 1 if one failed. Raises FastPSError."""
    if parsed.link_pyverbs:
        sys.stdout.write(f"linked {rdma.link_pyverbs()}\n")
    settings = config.load()
    for what, how in findings(settings):
        _tell(what, how)
    failures = 0
    for way, given in trials(settings).items() if parsed.tries else ():
        why = attempt(given)
        _tell("push_pull", f"{way}: {why or 'works'}")
        failures += bool(why)
    return EXIT_BROKEN if failures else 0


def _tell(what: str, how: str) -> None:
    sys.stdout.write(f"{what + ':':17}{how}\n")
    sys.stdout.flush()


def trials(settings: config.Config) -> dict[str, dict[str, Any]]:
    """Return the test jobs: the connection between their workers, and their settings."""
    by_sockets: dict[str, dict[str, Any]] = {
        "2 workers, by links": {"shared_memory": False, "num_servers": 0}
    }
    if not settings.shared_memory or shm.can_share(settings.shared_memory_bytes):
        return by_sockets
    return {"2 workers, in shared memory": {}, **by_sockets}


def attempt(given: dict[str, Any]) -> str:
    """Run a job of two workers that sums a tensor; return why it failed, or an empty text."""
    given = {"banner": False, "start_timeout_s": TRIAL_S, **given}
    try:
        sums = team.run(add, np=2, timeout_s=TRIAL_S, **given)
    except (FastPSError, OSError) as error:
        return f"fails: {type(error).__name__}: {error}"
    return "" if sums == [(3.0, 3.0)] * 2 else f"fails: wrong sums, {sums} instead of 3"


def add() -> tuple[float, float]:
    """Sum 1 of the first worker and 2 of the second; return the least and the largest sum."""
    session = current.current()
    ours = np.full(TRIAL_COUNT, session.rank + 1, np.float32)
    total = np.asarray(session.push_pull(ours, "fastps.doctor", average=False))
    return float(total.min()), float(total.max())


def _package(name: str) -> str:
    version = versions.version_of(name)
    return f"no {name}" if version == versions.UNKNOWN else f"{name} {version}"


def findings(settings: config.Config) -> Iterator[tuple[str, str]]:
    """Yield (name, finding) of everything that decides how a job runs on this machine."""
    yield "versions", versions.describe()
    yield "packages", ", ".join(map(_package, PACKAGES))
    yield "CPUs", f"{len(os.sched_getaffinity(0))} for this process; {cpu_features()}"
    yield "GPUs", _gpus()
    yield "shared memory", shm.can_share() or "works between workers of this machine"
    yield "Unix sockets", _unix_sockets()
    yield "RDMA", _rdma(settings)
    yield "encryption", _encryption()
    yield "lockable memory", _memory_limit()
    yield "transport", f"FASTPS_TRANSPORT={settings.transport}: {_ways(settings)}"


def _gpus() -> str:
    """Return which GPUs the kernel shows, and what becomes of tensors on one."""
    found = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    return (
        f"{', '.join(sorted(map(str, found))) or 'none'}; sums are made on CPUs, and tensors of "
        "PyTorch on a GPU are copied through the host"
    )


def _ways(settings: config.Config) -> str:
    """Return which transport carries bytes on this machine, and which to others."""
    is_shared = settings.shared_memory and not shm.can_share(settings.shared_memory_bytes)
    sockets_here = "Unix sockets" if settings.unix_sockets else "TCP"
    here = "shared memory" if is_shared else sockets_here
    if rdma.look_up(settings).is_usable:
        return f"{here} on this machine, RDMA to others"
    there = "nothing (there is no RDMA device)" if settings.transport == "rdma" else "TCP"
    return f"{here} on this machine, {there} to others"


def cpu_features(table: Path = CPU_TABLE) -> str:
    """List the CPU features that the sums use."""
    try:
        lines = table.read_text("ascii", "replace").splitlines()
    except OSError:
        return "features unknown"
    words: set[str] = set()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            words.update(flags.split())
    return " ".join(name for name in CPU_FEATURES if name in words) or "no vector features known"


def _unix_sockets() -> str:
    try:
        sock, _ = sockets.listen_unix()
    except (OSError, FastPSError) as error:
        return f"cannot be used: {error}"
    sock.close()
    return "work between processes of this machine"


def _rdma(settings: config.Config) -> str:
    """Return which RDMA device there is, and whether it works."""
    found = rdma.probe(settings)
    if not found.is_usable:
        return found.describe()
    why = rdma.try_out(settings)
    result = f"but it does not reach itself: {why}" if why else "it reaches itself"
    return f"{found.describe()}; {result}"


def _encryption() -> str:
    """Return which library and cipher there are, and how fast one thread is with it."""
    try:
        version = ciphers.load()
    except FastPSError as error:
        return f"cannot be used: {error}"
    kind = ciphers.best_kind()
    return f"{version}; {kind.label} at {ciphers.rate(kind) / 1e9:.1f} GB/s on one thread"


def _memory_limit() -> str:
    """Return how much memory an RDMA device may pin."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or rdma.may_lock():
        return "without limit"
    return f"{limit // MIB} MiB (`ulimit -l`); RDMA needs the size of all tensors"
