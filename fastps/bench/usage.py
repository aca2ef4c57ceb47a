# SPDX-License-Identifier: Apache-2.0
"""What the processes of a job use: processor time and memory, from the kernel's books.

Knows process ids only. Whoever may see the processes (same user, same pid namespace) can ask.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_KIB = 1024


def processes_of(job_id: str) -> tuple[int, ...]:
    """List the processes of a job on this machine, by their environment; itself at least."""
    needle = f"FASTPS_JOB_ID={job_id}".encode()
    found = {os.getpid()}
    for folder in _PROC.glob("[0-9]*") if job_id else ():
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return tuple(sorted(found))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Add up the processor time of living processes, ended threads included."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            # the kernel's number for the clock of another process, to the nanosecond
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def memory_bytes(pids: Iterable[int]) -> int:
    """Add up resident memory; a shared page counts once among those that share it.

    Where the kernel does not tell shares (no smaps_rollup) shared pages count for each process.
    """
    return sum(_memory_of(_PROC / str(pid)) for pid in pids)


def _memory_of(folder: Path) -> int:
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        with contextlib.suppress(OSError):
            for line in (folder / file).read_text(encoding="utf-8").splitlines():
                if line.startswith(field):
                    return int(line.split()[1]) * _KIB
    return 0


def same_host_mark() -> int:
    """Give a number that processes share if they see each other's process ids."""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.stat(_PROC / "self/ns/pid").st_ino
        return (int(boot.replace("-", ""), 16) ^ namespace) & ((1 << 62) - 1) | 1
    return os.getpid() | 1 << 61  # a host of its own
