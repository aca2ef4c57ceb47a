# SPDX-License-Identifier: Apache-2.0
"""The jobs that chaos happens to: processes, machines, links and the work of the program. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

LEASE_S = 3.0
SETTINGS = {
    "FASTPS_LEASE_S": f"{LEASE_S:g}", "FASTPS_HEARTBEAT_S": "0.25",
    "FASTPS_CONNECT_TIMEOUT_S": "3", "FASTPS_TCP_USER_TIMEOUT_S": "3", "FASTPS_OP_TIMEOUT_S": "20",
    "FASTPS_START_TIMEOUT_S": "15",
    "FASTPS_SHUTDOWN_TIMEOUT_S": "3", "FASTPS_LINGER_S": "1", "FASTPS_STALL_WATCH_S": "0",
    "FASTPS_START_WATCH_S": "0", "FASTPS_BANNER": "0", "FASTPS_PARTITION_BYTES": "32768",
    "FASTPS_CHUNK_BYTES": "16384", "FASTPS_MIN_COMPRESS_BYTES": "100", "OMP_NUM_THREADS": "1",
}  # fmt: skip
TCP = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "0"}
QUICK = {
    "FASTPS_LEASE_S": "0.9", "FASTPS_HEARTBEAT_S": "0.1", "FASTPS_CONNECT_TIMEOUT_S": "2",
    "FASTPS_TCP_USER_TIMEOUT_S": "1",
}  # fmt: skip
PATIENT = {"FASTPS_START_TIMEOUT_S": "40"}  # for torch's imports


@dataclass(frozen=True)
class Layout:
    """One way to run the training program.

    machines: (workers, servers) of each. work: a key of WORKS in program.py. launcher: fastps-run,
    torchrun, or "none", where the driver starts scheduler and members itself. is_lab: each
    machine is a host of tools/netlab.py. elastic: what the work does in an elastic job that loses
    a member: it "goes on", or "raises" an error. is_split: its events are all partitions of its
    network in turn, so it is only used when its name is given.
    """

    name: str
    machines: tuple[tuple[int, int], ...]
    work: str = "push_pull"
    environment: dict[str, str] = field(default_factory=dict)
    launcher: str = "fastps-run"
    is_lab: bool = False
    seconds: float = 2.0  # a job without a fault, on an idle machine
    elastic: str = "goes on"
    is_split: bool = False

    @property
    def lease_s(self) -> float:
        """Return the lease of its processes."""
        return float(self.environment.get("FASTPS_LEASE_S", LEASE_S))

    @property
    def workers(self) -> int:
        """Return the number of workers of all machines."""
        return sum(workers for workers, _ in self.machines)

    @property
    def servers(self) -> int:
        """Return the number of dedicated servers of all machines."""
        return sum(servers for _, servers in self.machines)

    @property
    def has_fractions(self) -> bool:
        """Return whether the sums are made in rank order, which the program then tests."""
        return self.work == "push_pull"

    def members_of(self, machine: int) -> list[tuple[str, int]]:
        """List the workers and servers of one machine, as (role, rank)."""
        before = self.machines[:machine]
        workers, servers = self.machines[machine]
        first = sum(one for one, _ in before), sum(one for _, one in before)
        return [
            *(("worker", first[0] + place) for place in range(workers)),
            *(("server", first[1] + place) for place in range(servers)),
        ]

    def machine_of(self, role: str, rank: int) -> int:
        """Return the machine of a worker or server; launchers are numbered by machine."""
        if role in ("launcher", "machine"):
            return rank
        return next(
            (m for m in range(len(self.machines)) if (role, rank) in self.members_of(m)), 0
        )


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("memory", ((3, 0),)),
        Layout("colocated", ((3, 0),), environment=TCP),
        Layout("apart", ((3, 2),), environment=TCP),
        Layout("by-hand", ((2, 1),), environment=TCP, launcher="none"),
        Layout("two-machines", ((2, 0), (1, 0)), is_lab=True),
        Layout("three-machines", ((1, 0), (1, 0), (0, 1)), is_lab=True),
        Layout("five-machines", ((1, 0),) * 5, environment=QUICK, is_lab=True, is_split=True),
        Layout("compression", ((3, 1),), "compression", TCP),
        Layout("sets", ((4, 0),), "sets", elastic="raises"),
        Layout("local-sgd", ((2, 0),), "local_sgd", TCP),
        Layout("windows", ((4, 0),), "windows", elastic="raises"),
        Layout("torchrun", ((2, 0),), "torch", PATIENT, "torchrun", seconds=6.0, elastic="raises"),
        Layout("ddp", ((2, 0),), "ddp", PATIENT, seconds=9.0, elastic="raises"),
    )
}
