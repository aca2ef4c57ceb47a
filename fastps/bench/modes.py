# SPDX-License-Identifier: Apache-2.0
"""The ways to sum that are measured, and the least bytes each must move: pure.

A mode is where the tensors live and which processes a job has; its floor is the plainest way to
move as many bytes as any such job must.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fastps.config import child_environment

MEMORY, COLOCATED_LINKS, APART_LINKS = "memory", "links colocated", "links apart"
FLOORS = (MEMORY, COLOCATED_LINKS, APART_LINKS)
NETWORK = "network"  # between the machines of a job; floors of one machine are in FLOORS


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """One way to sum."""

    name: str
    sentence: str
    floor: str
    is_registered: bool = False  # tensors come from fastps.empty
    has_servers: bool = False
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


_ONE_MACHINE = {"shared_memory": True}
_MACHINES = {"shared_memory": False}
MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "registered", "shared memory; tensors live there from birth (fastps.empty)", MEMORY,
            is_registered=True, settings=_ONE_MACHINE,
        ),
        Mode(
            "private", "shared memory; tensors are ordinary NumPy arrays", MEMORY,
            settings=_ONE_MACHINE,
        ),
        Mode(
            "colocated", "sockets; every worker serves a share of the bytes", COLOCATED_LINKS,
            settings=_MACHINES | {"colocate": "auto"},
        ),
        Mode(
            "apart", "sockets; servers are processes of their own", APART_LINKS,
            has_servers=True, settings=_MACHINES | {"colocate": "off"},
        ),
    )
}  # fmt: skip
HERE = ("registered", "private")  # what can be chosen inside a job that somebody else started


def settings_of(mode: Mode, *, is_tcp: bool) -> dict[str, str]:
    """Give the variables of a mode's job; they win over the user's own."""
    return child_environment({**mode.settings, "unix_sockets": not is_tcp})


def servers_of(mode: Mode, *, workers: int, servers: int | None) -> int:
    """Give the number of server processes of a mode's job."""
    if not mode.has_servers:
        return 0
    return workers if servers is None else servers


def least_bytes(floor: str, nbytes: int, workers: int) -> int:
    """Give the bytes that each process of a floor moves for a tensor; no way needs fewer.

    memory: each of n processes copies its share 1/n of n tensors: nbytes read and written by
    each. links colocated: each process sends, and receives, the shares of the others before and
    after they are summed: 2(n-1)/n nbytes each way. links apart: each worker sends and receives
    the whole tensor once, as do the servers together.
    """
    if floor == COLOCATED_LINKS:
        return -(-2 * (workers - 1) * nbytes // workers)
    return nbytes


def bus_factor(workers: int) -> float:
    """Give 2(n-1)/n: what an all-reduce by n equal processes moves per byte of tensor."""
    return 2 * (workers - 1) / workers


def network_bytes(nbytes: int, machines: int, servers: int) -> int:
    """Give the bytes that the busiest machine sends, and receives, at least for a tensor.

    n machines with workers, k more with servers alone: 2n(n-1) / (n^2 + kn - 2k) times the
    tensor, and never less than once. Source: Jiang et al., A Unified Architecture for
    Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters, OSDI 2020, section 4.
    """
    n, k = machines, min(servers, machines)
    return -(-2 * n * (n - 1) * nbytes // (n * n + k * n - 2 * k))
