# SPDX-License-Identifier: Apache-2.0
"""The conditions of a run, and the resources its processes use, as the kernel reports them.

Every figure is recorded with its conditions. Needs the same user and pid namespace as the
processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastps.config import explain
from fastps.config.versions import version_of

_PROC = Path("/proc")


def conditions() -> dict[str, Any]:
    """Return machine, kernel, versions, settings that are not defaults, and load."""
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _field("cpuinfo", "model name", "cpu model") or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "kernel": platform.release(),
        "congestion": _text("sys/net/ipv4/tcp_congestion_control").strip() or "unknown",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("fastps", "numpy", "numba")},
        "settings": {name: value for name, value, source in explain() if source != "default"},
        "load_average": round(os.getloadavg()[0], 2),
    }


def headline(found: dict[str, Any]) -> str:
    """Describe conditions in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"{found['cpu']}, {found['cpus']} CPUs, {found['numa_nodes']} NUMA node(s), "
        f"kernel {found['kernel']}, {found['congestion']}\n"
        f"python {found['python']}, {versions}, load {found['load_average']}"
    )


def processes_of(job_id: str) -> tuple[int, ...]:
    """List the processes of a job on this machine, by their environment; at least this one."""
    needle = f"FASTPS_JOB_ID={job_id}".encode()
    found = {os.getpid()}
    for folder in _PROC.glob("[0-9]*") if job_id else ():
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return tuple(sorted(found))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the total processor time of living processes, including their ended threads."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            # the kernel's clock id for the processor time of another process
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the total resident memory; a shared page counts once among its processes (PSS).

    On kernels without smaps_rollup shared pages count for each process.
    """
    found = (_field(f"{pid}/smaps_rollup", "pss:") or _field(f"{pid}/status", "vmrss:")
             for pid in pids)  # fmt: skip
    return sum(int(words.split()[0]) * 1024 for words in found if words)


def same_host_mark() -> int:
    """Return a number that is equal for processes that see each other's process ids."""
    boot = _text("sys/kernel/random/boot_id").strip().replace("-", "")
    if not boot:
        return os.getpid() | 1 << 61  # a host of its own
    namespace = (_PROC / "self/ns/pid").stat().st_ino
    return (int(boot, 16) ^ namespace) & ((1 << 62) - 1) | 1


def _text(file: str) -> str:
    """Return a file of /proc; empty if it does not exist, as for an ended process."""
    with contextlib.suppress(OSError):
        return (_PROC / file).read_text(encoding="utf-8", errors="replace")
    return ""


def _field(file: str, *names: str) -> str:
    """Return the text after the colon of the first line that begins with one of the names."""
    lines = (line for line in _text(file).splitlines() if line.lower().startswith(names))
    return next(lines, "").partition(":")[2].strip()
