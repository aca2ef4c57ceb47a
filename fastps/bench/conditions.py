# SPDX-License-Identifier: Apache-2.0
"""Describe where and with what a run was made, so that no figure stands alone."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from fastps.config import explain

PACKAGES = ("fastps", "numpy", "numba")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_NODES = Path("/sys/devices/system/node")


def conditions() -> dict[str, Any]:
    """Collect machine, kernel, versions, settings that are not defaults, and load."""
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))) or 1,
        "kernel": platform.release(),
        "congestion": _read(_CONGESTION) or "unknown",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
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


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.lower().startswith(("model name", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
