# SPDX-License-Identifier: Apache-2.0
"""Which processes may join a job, the number of each member, and which members serve.

Pure functions over the members; the Membership holds the list and calls them. Refusals are
sentences for the user who started one process too many, or with other settings than the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastps.config import Config
from fastps.contract.partition import server_weights
from fastps.control.blame import Inquest, join_names
from fastps.control.identity import host_of
from fastps.control.protocol import AwaitStart, Job, Join, Leave, Member
from fastps.errors import ConfigError


@dataclass
class Peer:
    """One joined process; rank is None until the job starts, unless it was configured."""

    peer: int
    join: Join
    rank: int | None
    lease_until: float
    judge_at: float  # when the scheduler looks whether it is dead, if it stays silent
    has_started: bool = False
    place: int | None = None  # rank of the first start, which a launcher knows
    number: int | None = None  # among all members of the job that runs
    is_owner: bool = False
    start_request: AwaitStart | None = None
    start_deadline: float = 0.0
    leave_request: Leave | None = None  # of a worker that has left and only serves the others
    leave_deadline: float = 0.0
    inquest: Inquest | None = None  # while others are asked whether it lives
    late_s: float = 0.0  # in which the scheduler got no processor, since the last heartbeat
    seen: str = ""  # what its silent thread did when the scheduler last looked
    seen_since: float = 0.0  # when it was first seen in this state
    starved_until: float = 0.0  # when its silence counts, though it only waits for a processor
    unheard_s: float = 0.0  # before its lease began anew without a heartbeat
    is_cut: bool = False  # others reached it when the scheduler did not hear it
    hearing: Inquest | None = None  # while others are asked whether they reach it as another says
    first_look: Inquest | None = None  # whether others reach it at the start of its first view
    reached_by: set[int] = field(default_factory=set)  # peers that have reached it when asked
    disputed: list[Inquest] = field(default_factory=list)  # that had it live, since it was heard
    is_doubted: bool = False  # one that contradicted it was lost, and nothing showed who lied
    is_out: bool = False  # it leaves at a boundary, and has no part in the next view
    ended: str = ""  # how, if its connection has ended and its launcher may know more
    ended_until: float = 0.0  # when that counts

    @property
    def is_working(self) -> bool:
        """Return whether the process takes part in the running job."""
        return self.has_started and self.leave_request is None

    @property
    def is_staying(self) -> bool:
        """Return whether the process does not leave."""
        return self.leave_request is None and not self.is_out

    @property
    def is_worker(self) -> bool:
        """Return whether the process takes part in collectives and declarations."""
        return self.join.role in ("worker", "validator")

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
    """Return the number of members of a role, and the setting that defines it."""
    if role == "worker":
        return config.size, "FASTPS_SIZE"
    if role == "validator":
        return config.num_validators, "FASTPS_NUM_VALIDATORS"
    return config.num_servers, "FASTPS_NUM_SERVERS"


def refuse(
    join: Join, config: Config, rivals: Sequence[Peer], members: Sequence[Peer]
) -> str | None:
    """Return why a process cannot join, or None if it can; rivals: members of its role."""
    return (
        _refuse_size(join, config)
        or _refuse_count(join, config, rivals)
        or _refuse_rank(join, config, rivals)
        or refuse_links(join, members)
        or _refuse_on_loss(join, config, members)
    )


def _refuse_size(join: Join, config: Config) -> str | None:
    if join.role == "server":
        return None
    for role, theirs, may_be_unset in (
        ("worker", join.size, True),
        ("server", join.num_servers, True),
        ("validator", join.num_validators, False),
    ):
        ours, variable = places(config, role)
        if theirs != ours and not (may_be_unset and theirs == 0):
            return (
                f"this {join.role} expects {theirs} {role}(s), the scheduler {ours}; set "
                f"{variable} to the same number everywhere"
            )
    return None


def _refuse_count(join: Join, config: Config, rivals: Sequence[Peer]) -> str | None:
    total, variable = places(config, join.role)
    if len(rivals) < total:
        return None
    names = join_names([rival.full_name for rival in rivals]) or "none"
    return (
        f"role {join.role} is started too often: the job has {total} ({names}), and one more "
        f"came from {join.hostname}, pid {join.pid}; start fewer, or raise {variable}"
    )


def _refuse_rank(join: Join, config: Config, rivals: Sequence[Peer]) -> str | None:
    total, variable = places(config, join.role)
    if join.rank is None:
        return None
    if join.rank >= total:
        return (
            f"rank {join.rank} of a {join.role} from {join.hostname}, pid {join.pid}, must be "
            f"0 to {total - 1}; set FASTPS_RANK or {variable}"
        )
    for rival in rivals:
        if rival.rank == join.rank:
            return (
                f"two processes are started as {join.role} {join.rank}: {rival.full_name} and "
                f"one on {join.hostname}, pid {join.pid}; give each its own FASTPS_RANK"
            )
    return None


def refuse_links(join: Join, members: Sequence[Peer]) -> str | None:
    """Refuse a process that would send a key over another link than its owner expects."""
    for other in members:
        if other.join.links_per_peer not in (0, join.links_per_peer) and join.links_per_peer:
            return (
                f"this {join.role} makes {join.links_per_peer} link(s) per peer, "
                f"{other.full_name} {other.join.links_per_peer}; set FASTPS_LINKS_PER_PEER to the "
                "same number everywhere"
            )
    return None


def _refuse_on_loss(join: Join, config: Config, members: Sequence[Peer]) -> str | None:
    """Refuse a process that would end at the loss of a worker where others continue."""
    if join.role != "server" and join.elastic_min != config.elastic_min:
        return (
            f"this {join.role} has FASTPS_ELASTIC_MIN={join.elastic_min}, the scheduler "
            f"{config.elastic_min}; start the job with `fastps-run --min`, or set the variable to "
            "the same value in all processes"
        )
    if join.elastic_max not in (0, config.elastic_max):
        return (
            f"this {join.role} has FASTPS_ELASTIC_MAX={join.elastic_max}, the scheduler "
            f"{config.elastic_max}; start the job with `fastps-run --max`, or set the variable to "
            "the same value in all processes"
        )
    for other in members:
        if other.is_worker and join.role != "server" and other.join.goes_on != join.goes_on:
            return (
                f"this {join.role} and {other.full_name} have different FASTPS_ON_LOSS; set it "
                "to the same value everywhere"
            )
    return None


def number(group: list[Peer]) -> list[Peer]:
    """Assign free ranks in the order of arrival; return the group in rank order.

    Ranks of a group that has become smaller close up.
    """
    taken = {item.rank for item in group}
    free = (rank for rank in range(len(group)) if rank not in taken)
    for item in group:
        if item.rank is None:
            item.rank = next(free)
        if item.place is None:
            item.place = item.rank
    group = sorted(group, key=lambda item: item.rank or 0)
    if group and (group[-1].rank or 0) >= len(group):
        for rank, item in enumerate(group):
            item.rank = rank
    return group


def places_of(members: Iterable[Peer]) -> tuple[int, ...]:
    """Return the ranks that the workers among some members began with."""
    return tuple(
        sorted(item.place for item in members if item.is_worker and item.place is not None)
    )


def local_ranks(group: list[Peer]) -> dict[int, tuple[int, int]]:
    """Return (local_rank, local_size) by peer: as configured, else by host in rank order.

    Workers of one host count together even if they do not share memory: they share its devices.
    """
    hosts: dict[str, list[Peer]] = {}
    for item in group:
        hosts.setdefault(host_of(item.join.machine), []).append(item)
    found: dict[int, tuple[int, int]] = {}
    for host in hosts.values():
        for place, item in enumerate(host):
            join = item.join
            local_rank = place if join.local_rank is None else join.local_rank
            found[item.peer] = (local_rank, join.local_size or len(host))
    return found


# ---- which members serve


@dataclass(frozen=True)
class Plan:
    """The members of a job that starts, by number; weights in the order of owners."""

    peers: tuple[Peer, ...]
    members: tuple[Member, ...]
    owners: tuple[int, ...]
    weights: tuple[int, ...]
    is_local: bool

    def job(
        self, config: Config, item: Peer, generation: int, local: tuple[int, int], *, view: int
    ) -> Job:
        """Describe the job to one member."""
        return Job(
            config.job_id,
            generation,
            item.number or 0,
            config.n_programs,
            *local,
            self.members,
            self.owners,
            self.is_local,
            config.num_validators,
            view,
            self.has_board(config),
        )

    def has_board(self, config: Config) -> bool:
        """Return whether a board of all workers commits results of an elastic job, no scheduler.

        A job that is made again (FASTPS_REPLAY) commits no more than that one did, which the
        scheduler knows.
        """
        return config.is_elastic and self.is_local and config.n_programs > 1 and not config.replay


def plan_job(config: Config, workers: list[Peer], servers: list[Peer]) -> Plan:
    """Number the machines and appoint joint servers; both groups are in rank order.

    workers: followed by the validators; if there are some, only validators are trusted to serve.
    Raises ConfigError when no process can serve.
    """
    machines = _number_machines(workers + servers)
    firsts: dict[int, Peer] = {}
    for item in workers:
        firsts.setdefault(machines[item.join.machine], item)
    joint: list[Peer] = []
    goes_on = workers[0].join.goes_on
    is_last = config.is_elastic and len(workers) == 1  # its sums are its own
    is_apart = config.force_distributed or (goes_on and bool(servers)) or is_last
    is_local = len(firsts) == 1 and not is_apart
    validators = [item for item in workers if item.join.role == "validator"]
    if validators:
        return _plan_with_validators(config, workers, validators, servers, machines)
    if not (is_local or goes_on) and _wants_joint(config, list(firsts.values()), len(servers)):
        joint = list(firsts.values())
    if not goes_on:
        _check_serving(config, joint, len(servers), n_machines=len(firsts), is_local=is_local)
    peers = workers + servers
    numbers = {item.peer: number for number, item in enumerate(peers)}
    return Plan(
        tuple(peers),
        tuple(_member(item, machines) for item in peers),
        tuple(numbers[item.peer] for item in servers + joint),
        server_weights(len(firsts), len(servers), is_colocated=bool(joint)),
        is_local,
    )


def _plan_with_validators(
    config: Config, workers: list[Peer], validators: list[Peer], servers: list[Peer],
    machines: dict[str, int],
) -> Plan:  # fmt: skip
    """Plan a job with validators: servers or else validators serve, workers are not trusted."""
    is_joint = config.colocate == "on" or (config.colocate == "auto" and not servers)
    joint = validators if is_joint else []
    _check_serving(config, joint, len(servers), n_machines=len(machines), is_local=False)
    peers = workers + servers
    owners = tuple(peers.index(item) for item in servers + joint)
    members = tuple(_member(item, machines) for item in peers)
    return Plan(tuple(peers), members, owners, (1,) * len(owners), is_local=False)


def _number_machines(members: list[Peer]) -> dict[str, int]:
    """Number the machines in the order of their first members."""
    found: dict[str, int] = {}
    for item in members:
        found.setdefault(item.join.machine, len(found))
    return found


def _wants_joint(config: Config, firsts: list[Peer], n_apart: int) -> bool:
    """Return whether one worker of every machine serves too.

    With FASTPS_COLOCATE=auto: if there are fewer servers than hosts. Workers of one host that do
    not share memory still share its network card, and a server apart serves them as well.
    """
    if config.colocate != "auto":
        return config.colocate == "on"
    hosts = {host_of(item.join.machine) for item in firsts}
    return n_apart == 0 or n_apart < len(hosts)


def _check_serving(
    config: Config, joint: list[Peer], n_apart: int, *, n_machines: int, is_local: bool
) -> None:
    if not (is_local or joint or n_apart):
        raise ConfigError(
            f"this job has workers on {n_machines} machine(s), no server, and "
            f"FASTPS_COLOCATE={config.colocate}; set FASTPS_COLOCATE=auto, so that one worker "
            "of every machine serves too, or start servers (`fastps-run -s 1 ...`, or "
            "fastps-server, with FASTPS_NUM_SERVERS)"
        )
    unable = [item.full_name for item in joint if not (item.join.serves and item.join.port)]
    if unable:
        raise ConfigError(
            f"{join_names(unable)} must serve too according to the scheduler's settings, but not "
            "according to its own; set FASTPS_COLOCATE, FASTPS_SIZE and FASTPS_NUM_SERVERS to the "
            "same values everywhere"
        )


def _member(item: Peer, machines: dict[str, int]) -> Member:
    """Return a member as the others see it."""
    join = item.join
    return Member(
        join.role,
        item.rank or 0,
        join.host,
        join.port,
        join.pid,
        join.hostname,
        machines[join.machine],
        join.unix,
        join.host_id,
        join.gid,
        item.place or 0,
    )
