# SPDX-License-Identifier: Apache-2.0
"""Who may join a job, and which number and place each member gets.

Pure functions over the members; the Membership holds the list and calls them. Refusals are
sentences for the user who started one process too many or with other numbers than the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastps.config import Config
from fastps.control.collectives import join_names
from fastps.control.protocol import AwaitStart, Join, Member


@dataclass
class Peer:
    """One joined process; rank is None until the job starts, unless it was configured."""

    peer: int
    join: Join
    rank: int | None
    lease_until: float
    has_started: bool = False
    start_request: AwaitStart | None = None
    start_deadline: float = 0.0

    @property
    def name(self) -> str:
        """Role and rank, as far as known."""
        number = "" if self.rank is None else f" {self.rank}"
        return f"{self.join.role}{number}"

    @property
    def full_name(self) -> str:
        """Role, rank, machine and process."""
        return f"{self.name} ({self.join.hostname}, pid {self.join.pid})"


def places(config: Config, role: str) -> tuple[int, str]:
    """Give the number of members of a role, and the setting that says so."""
    if role == "worker":
        return config.size, "FASTPS_SIZE"
    return config.num_servers, "FASTPS_NUM_SERVERS"


def refuse(join: Join, config: Config, rivals: Sequence[Peer]) -> str | None:
    """Say why a newcomer cannot have a place among its rivals, None if it can."""
    return (
        _refuse_size(join, config)
        or _refuse_count(join, config, rivals)
        or _refuse_rank(join, config, rivals)
    )


def _refuse_size(join: Join, config: Config) -> str | None:
    if join.role == "worker" and join.size not in (0, config.size):
        return (
            f"this worker expects {join.size} worker(s), the scheduler {config.size}; "
            "set FASTPS_SIZE to the same number everywhere"
        )
    if join.role == "worker" and join.num_servers not in (0, config.num_servers):
        return (
            f"this worker expects {join.num_servers} server(s), the scheduler "
            f"{config.num_servers}; set FASTPS_NUM_SERVERS to the same number everywhere"
        )
    return None


def _refuse_count(join: Join, config: Config, rivals: Sequence[Peer]) -> str | None:
    total, variable = places(config, join.role)
    if len(rivals) < total:
        return None
    names = join_names([rival.full_name for rival in rivals]) or "none"
    return (
        f"role {join.role} is started too often: the job has {total} of them ({names}) and "
        f"one more came from {join.hostname}, pid {join.pid}; start fewer or raise {variable}"
    )


def _refuse_rank(join: Join, config: Config, rivals: Sequence[Peer]) -> str | None:
    total, variable = places(config, join.role)
    if join.rank is None:
        return None
    if join.rank >= total:
        return (
            f"rank {join.rank} of a {join.role} from {join.hostname}, pid {join.pid}, is not "
            f"0 to {total - 1}; set FASTPS_RANK or {variable}"
        )
    for rival in rivals:
        if rival.rank == join.rank:
            return (
                f"two processes want to be {join.role} {join.rank}: {rival.full_name} and "
                f"one of {join.hostname}, pid {join.pid}; give each its own FASTPS_RANK"
            )
    return None


def number(group: list[Peer]) -> list[Peer]:
    """Give free ranks to those without, by arrival; return the group in rank order."""
    taken = {item.rank for item in group}
    free = (rank for rank in range(len(group)) if rank not in taken)
    for item in group:
        if item.rank is None:
            item.rank = next(free)
    return sorted(group, key=lambda item: item.rank or 0)


def local_ranks(group: list[Peer]) -> dict[int, tuple[int, int]]:
    """Give (local_rank, local_size) by peer: as configured, else by machine in rank order."""
    machines: dict[tuple[str, str], list[Peer]] = {}
    for item in group:
        machines.setdefault((item.join.boot_id, item.join.hostname), []).append(item)
    found: dict[int, tuple[int, int]] = {}
    for machine in machines.values():
        for place, item in enumerate(machine):
            join = item.join
            local_rank = place if join.local_rank is None else join.local_rank
            found[item.peer] = (local_rank, join.local_size or len(machine))
    return found


def face(item: Peer) -> Member:
    """Describe a member to the others."""
    join = item.join
    return Member(join.role, item.rank or 0, join.host, join.port, join.pid, join.hostname)
