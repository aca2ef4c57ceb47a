# SPDX-License-Identifier: Apache-2.0
"""Choose CPUs for the library's threads.

Decides which thread may run where, from texts in the kernel's own notation; never pins anything.
`read_node_texts` is the one function here that touches a file. CPUs that the process may not use
(cgroup, taskset) are never chosen. Threads: any; there is no state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fastps.errors import ConfigError

__all__ = [
    "MAX_CPUS",
    "choose_cpus",
    "format_cpu_list",
    "parse_cpu_list",
    "parse_node_texts",
    "read_node_texts",
]

MAX_CPUS = 1024  # as in _core.pxd; bounds what a text like 0-999999999 can cost
NODE_ROOT = Path("/sys/devices/system/node")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Read CPU numbers from the kernel's list notation, as 0-3,8; ascending, without repeats.

    An empty text gives no CPU. Raises ConfigError for anything else.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"CPU list {text!r}: {part!r} is neither 3 nor 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= MAX_CPUS:
            raise ConfigError(f"CPU list {text!r}: {part!r} is not within 0-{MAX_CPUS - 1}")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Collection[int]) -> str:
    """Write CPU numbers in the kernel's list notation."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_node_texts(texts: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
    """Read the CPUs of each NUMA node from the texts of its `cpulist` file."""
    return {node: parse_cpu_list(text) for node, text in texts.items()}


def read_node_texts(root: Path = NODE_ROOT) -> dict[int, str]:
    """Read the `cpulist` of each NUMA node of this machine; empty where the kernel has none."""
    texts = {}
    for path in root.glob("node[0-9]*/cpulist"):
        texts[int(path.parent.name.removeprefix("node"))] = path.read_text(encoding="ascii")
    return texts


def choose_cpus(
    num_threads: int,
    allowed: Collection[int],
    *,
    cpus: str = "",
    numa_node: int = -1,
    nodes: Mapping[int, Sequence[int]] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Give each thread the CPUs it may run on; none means wherever the process may.

    The CPUs asked for by list, node or both, as far as they are allowed, are dealt out in equal
    runs; with more threads than CPUs they are taken in turn. Raises ConfigError when none is left.
    """
    if not cpus.strip() and numa_node < 0:
        return ((),) * num_threads
    wanted = set(allowed)
    if cpus.strip():
        wanted &= set(parse_cpu_list(cpus))
    if numa_node >= 0:
        wanted &= set(_cpus_of_node(numa_node, nodes or {}))
    if not wanted:
        raise ConfigError(
            f"FASTPS_CPUS={cpus!r} and FASTPS_NUMA_NODE={numa_node} leave no CPU; "
            f"this process may use {format_cpu_list(allowed)}"
        )
    return tuple(_share(sorted(wanted), thread, num_threads) for thread in range(num_threads))


def _cpus_of_node(node: int, nodes: Mapping[int, Sequence[int]]) -> Sequence[int]:
    if node not in nodes:
        known = ", ".join(map(str, sorted(nodes))) or "none"
        raise ConfigError(f"FASTPS_NUMA_NODE={node} does not exist; this machine has: {known}")
    return nodes[node]


def _share(cpus: Sequence[int], thread: int, num_threads: int) -> tuple[int, ...]:
    if num_threads >= len(cpus):
        return (cpus[thread % len(cpus)],)
    count = len(cpus)
    return tuple(cpus[thread * count // num_threads : (thread + 1) * count // num_threads])
