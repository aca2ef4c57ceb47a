# SPDX-License-Identifier: Apache-2.0
"""Which processes of a job run on which machine: pure.

Every launcher of a job gets the same counts, one per machine, and so knows all totals and every
rank without communication. Ranks are assigned machine by machine, separately for each role.
Machine 0 has the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Layout:
    """Numbers of workers, servers and validators by machine, and the number of this machine."""

    workers: tuple[int, ...] = (1,)
    servers: tuple[int, ...] = (0,)
    machine: int = 0
    validators: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ()  # of the machines, if known
    first: int = 0  # rank of the first worker that joins a job that runs, machine 0 here; 0: none

    @property
    def is_spread(self) -> bool:
        """Return whether the job has more than one machine."""
        return len(self.workers) > 1

    @property
    def size(self) -> int:
        """Return the number of workers of the whole job."""
        return sum(self.workers)

    @property
    def num_servers(self) -> int:
        """Return the number of server processes of the whole job."""
        return sum(self.servers)

    @property
    def num_validators(self) -> int:
        """Return the number of validators of the whole job."""
        return sum(self.validators)

    @property
    def worker_ranks(self) -> range:
        """Return the ranks of this machine's workers."""
        ranks = _share(self.workers, self.machine)
        return range(ranks.start + self.first, ranks.stop + self.first)

    def spare_ranks(self, per_machine: int) -> range:
        """Return the ranks of this machine's spares, which follow those of all workers."""
        first = self.size + self.machine * per_machine
        return range(first, first + per_machine)

    @property
    def server_ranks(self) -> range:
        """Return the ranks of this machine's servers."""
        return _share(self.servers, self.machine)

    @property
    def validator_ranks(self) -> range:
        """Return the ranks of this machine's validators."""
        return _share(self.validators, self.machine)

    @property
    def needs_scheduler(self) -> bool:
        """Return whether the job has a scheduler; a single worker needs none."""
        has_others = self.num_servers > 0 or self.num_validators > 0 or self.first > 0
        return self.size > 1 or has_others

    @property
    def has_scheduler(self) -> bool:
        """Return whether the scheduler runs in this machine's launcher."""
        return self.needs_scheduler and self.machine == 0

    def places(self) -> dict[tuple[str, int], str]:
        """Return the machine of every process, by role and rank; nothing for one machine."""
        found: dict[tuple[str, int], str] = {}
        for machine in range(len(self.workers)) if self.is_spread else ():
            for role, counts in (
                ("worker", self.workers), ("server", self.servers), ("validator", self.validators)
            ):  # fmt: skip
                name = self.names[machine] if self.names else f"machine {machine}"
                found |= {(role, rank): name for rank in _share(counts, machine)}
        return found

    def describe(self) -> str:
        """Return which processes of the job run on this machine, in words."""
        workers = _words("worker", self.worker_ranks, self.size)
        servers = _words("server", self.server_ranks, self.num_servers)
        validators = _words("validator", self.validator_ranks, self.num_validators)
        words = f"machine {self.machine} of {len(self.workers)}: {workers}, {servers}"
        return f"{words}, {validators}" if self.num_validators else words


def make_layout(
    workers: Sequence[int],
    servers: Sequence[int],
    validators: Sequence[int] = (0,),
    *,
    machines: int | None = None,
    machine: int | None = None,
) -> Layout:
    """Lay out a job; a single count applies to every machine.

    machines: their number, None to take it from the counts. machine: the number of this machine,
    None if there is only one. Raises ValueError with a sentence for the user.
    """
    number = machines or max(len(workers), len(servers), len(validators))
    layout = Layout(
        _spread(workers, number, option="-np"),
        _spread(servers, number, option="-s"),
        machine or 0,
        _spread(validators, number, option="-v"),
    )
    if layout.size == 0:
        raise ValueError("the job has no worker; set -np to at least 1")
    if machine is None and layout.is_spread:
        raise ValueError(
            f"a job on {number} machines needs --machine-rank, 0 to {number - 1}, the number of "
            "this machine; machine 0 is the one of --scheduler-host"
        )
    if layout.machine >= number:
        raise ValueError(f"--machine-rank must be 0 to {number - 1}, got {machine}")
    ours = (layout.worker_ranks, layout.server_ranks, layout.validator_ranks)
    if not (any(ours) or layout.has_scheduler):
        raise ValueError(
            f"machine {machine} has neither workers nor servers; give it some, or leave it out"
        )
    return layout


def _spread(counts: Sequence[int], machines: int, *, option: str) -> tuple[int, ...]:
    """Return one count for each machine."""
    if len(counts) == 1:
        return tuple(counts) * machines
    if len(counts) != machines:
        raise ValueError(
            f"{option} {','.join(map(str, counts))} has {len(counts)} numbers for {machines} "
            "machines; give one number for all machines, or one for each"
        )
    return tuple(counts)


def _share(counts: Sequence[int], machine: int) -> range:
    first = sum(counts[:machine])
    return range(first, first + sum(counts[machine : machine + 1]))


def _words(role: str, ranks: range, total: int) -> str:
    if not ranks:
        return f"none of {total} {role}s"
    if len(ranks) == 1:
        return f"{role} {ranks[0]} of {total}"
    return f"{role}s {ranks[0]} to {ranks[-1]} of {total}"
