# SPDX-License-Identifier: Apache-2.0
"""Say what is simulated: a network, a cluster, tensors; and how the library would cut them.

Decides nothing of its own: owners and pieces come from fastps.contract.partition, sizes of frames
and the credit of a link from fastps.transport.tcp, so that a change of the library changes the
figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastps.contract.partition import Piece, Placement, cut_tensor, server_weights
from fastps.transport.tcp import LIGHT_CREDIT_BYTES, REMOTE_CREDIT_BYTES, choose_chunk
from tools.netlab import PAYLOAD_SHARE

PARTITION_BYTES = 4_096_000  # fastps.config's default of partition_bytes
ANY_REMOTE_HOST = "192.0.2.1"  # reserved for documents: never this machine
PACKET_BYTES = 1514  # what a switch takes in before it passes it on
# What cubic does to queues that drop at their end. Fitted to tools/bench/shaped.py with two to
# four workers and servers apart, 100 to 400 Mbit/s, 20 ms, 256 KiB to 64 MiB.
QUEUE_GROWTH = 0.033  # seconds of queue per second of sending, for each competing sender
QUEUE_LOSS = 0.02  # of the rate, once a queue is full
# Who sends when. What the library does stands first, then what it could do.
TURNS = ("tcp", "weighted")
RULES = ("urgent", "loans")
LIBRARY_TURNS, LIBRARY_RULE = TURNS[0], RULES[0]


@dataclass(frozen=True)
class Network:
    """Describe the links: every machine has one card, full duplex, on a switch that never blocks.

    rate_bps: of a card, each way, in bits per second. payload_share: what headers leave of it.
    latency_s: from one card to another. queue_s: how long a full queue before a card takes to
    drain; TCP fills it by and by, and then loses packets. 0 is a network without loss and
    standing queues. bus_bytes_per_s: how fast a machine sums among its own workers.
    """

    rate_bps: float
    payload_share: float = PAYLOAD_SHARE
    latency_s: float = 20e-6
    queue_s: float = 0.0
    bus_bytes_per_s: float = 100e9

    @property
    def bytes_per_s(self) -> float:
        """Give what a card moves of payload, one way."""
        return self.rate_bps / 8 * self.payload_share

    @property
    def head_s(self) -> float:
        """Give the time after which a frame's first packet is at its receiver."""
        return self.latency_s + PACKET_BYTES * 8 / self.rate_bps


@dataclass(frozen=True)
class Cluster:
    """Describe who takes part: machines with workers, workers on each, machines that only serve.

    With is_colocated, one worker of each machine serves as well, as far as the servers apart
    leave it anything.

    turns: how the links of a card share it. "tcp": in proportion to their credit, which is what a
    connection has in flight; "weighted": in proportion to the servers' weights.
    credit_bytes: of each link; 0: as the library chooses.
    credit_rule: "urgent", only what is at least as urgent counts against the credit of an item;
    "loans", everything counts, and links that starve borrow all the more often.
    """

    machines: int
    servers: int
    local: int = 1
    is_colocated: bool = True
    partition_bytes: int = PARTITION_BYTES
    chunk_bytes: int = 0
    credit_bytes: int = 0
    turns: str = LIBRARY_TURNS
    credit_rule: str = LIBRARY_RULE
    has_priority: bool = True

    @property
    def weights(self) -> tuple[int, ...]:
        """Give the library's weights of all servers, those apart first."""
        return server_weights(self.machines, self.servers, is_colocated=self.is_colocated)

    @property
    def owners(self) -> int:
        """Count the servers that own anything."""
        return sum(1 for weight in self.weights if weight)

    @property
    def chunk(self) -> int:
        """Give the bytes of a frame: as set, else as the library chooses between machines."""
        return self.chunk_bytes or choose_chunk([ANY_REMOTE_HOST])

    def link_credit(self, owner: int) -> int:
        """Return the credit from one machine to one server: every local worker has a link."""
        is_light = self.weights[owner] < max(self.weights)
        chosen = LIGHT_CREDIT_BYTES if is_light else REMOTE_CREDIT_BYTES
        return (self.credit_bytes or chosen) * self.local

    def turn_of(self, owner: int) -> float:
        """Return how often a link to or from a server has its turn; 0 if it owns nothing."""
        weight = self.weights[owner]
        return float(self.link_credit(owner) if weight and self.turns == "tcp" else weight)

    def machine_of(self, owner: int) -> int:
        """Give the machine of a server: workers' machines come first, then those that serve."""
        is_apart = owner < self.servers
        return self.machines + owner if is_apart else owner - self.servers

    def is_apart(self, owner: int) -> bool:
        """Tell whether a server has a machine of its own."""
        return owner < self.servers


@dataclass(frozen=True)
class Tensor:
    """Describe one tensor to be summed: when a machine has it, and how urgent it is."""

    nbytes: int
    ready_s: float = 0.0
    priority: int = 0
    name: str = ""


@dataclass
class Outcome:
    """Tell when each tensor's sum is on all machines, and what the cards moved."""

    done_s: list[float]
    sent_bytes: dict[str, float]  # of the busiest machine of each kind, payload
    events: int = 0
    loans: int = 0  # of credit, to links that starved

    @property
    def end_s(self) -> float:
        """Give the time when everything is there."""
        return max(self.done_s, default=0.0)


def cut(tensors: Sequence[Tensor], cluster: Cluster) -> list[tuple[Piece, ...]]:
    """Cut all tensors as the scheduler of a job would that declares them in this order."""
    placement = Placement(cluster.weights)
    return [
        cut_tensor(
            tensor.nbytes,
            partition_bytes=cluster.partition_bytes,
            placement=placement,
            tensor_id=number,
        )
        for number, tensor in enumerate(tensors)
    ]


def order_of(tensors: Sequence[Tensor], cluster: Cluster) -> list[int]:
    """Give the priority of each tensor: its own, or first ready first served."""
    if cluster.has_priority:
        return [tensor.priority for tensor in tensors]
    by_time = sorted(range(len(tensors)), key=lambda index: tensors[index].ready_s)
    ranks = [0] * len(tensors)
    for rank, index in enumerate(by_time):
        ranks[index] = -rank
    return ranks


@dataclass(frozen=True)
class Queues:
    """Tell what stands in the queues before the cards, which TCP fills by and by.

    limit_s: as far as they get, for they cannot hold more than the credit lets out. growth: per
    second of sending. loss: of the rate when they are full.
    """

    limit_s: float = 0.0
    growth: float = 0.0
    loss: float = 0.0

    def wait_s(self, sent_s: float) -> float:
        """Give how long a frame waits after its sender has been sending for so long."""
        return min(self.limit_s, self.growth * sent_s)

    def loss_at(self, wait_s: float) -> float:
        """Give the part of the rate that is lost."""
        return self.loss if wait_s == self.limit_s else 0.0


def make_queues(cluster: Cluster, network: Network, owner: int) -> Queues:
    """Return the queues on the way to a server: half of what is not on its way, each way."""
    if not network.queue_s:
        return Queues()
    waiting = max(0, cluster.link_credit(owner) - 2 * cluster.chunk)
    room_s = waiting / 2 * cluster.machines / network.bytes_per_s
    growth = QUEUE_GROWTH * (cluster.machines - 1)
    loss = QUEUE_LOSS if room_s > network.queue_s else 0.0
    return Queues(min(network.queue_s, room_s), growth, loss)


def local_share(cluster: Cluster) -> float:
    """Give the part of a tensor that a machine's bus moves per worker to sum, or to publish."""
    return (cluster.local - 1) / cluster.local


def alone(tensors: Sequence[Tensor], cluster: Cluster, network: Network) -> Outcome:
    """Simulate one machine, which sums on its bus and sends nothing."""
    bus_s = local_share(cluster) / network.bus_bytes_per_s
    done_s = [0.0] * len(tensors)
    free_at = 0.0
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].ready_s):
        free_at = max(free_at, tensors[index].ready_s) + tensors[index].nbytes * bus_s
        done_s[index] = free_at + tensors[index].nbytes * bus_s
    return Outcome(done_s, {"worker": 0.0, "server": 0.0})


def optimum_s(nbytes: float, cluster: Cluster, network: Network) -> float:
    """Give the time below which no placement can sum, with k servers of any kind.

    n machines, k that only serve, M bytes, B bytes per second: 2n(n-1)M / ((n^2 + kn - 2k) B)
    with servers beside workers, max(M, nM/k) / B without. Source: Jiang et al., OSDI 2020,
    section 4.
    """
    n, k = cluster.machines, cluster.servers
    if n < 2:
        return 0.0
    if not cluster.is_colocated or k >= n:
        return max(1.0, n / k) * nbytes / network.bytes_per_s
    return 2 * n * (n - 1) * nbytes / ((n * n + k * n - 2 * k) * network.bytes_per_s)


def ring_bound_s(nbytes: float, machines: int, network: Network) -> float:
    """Give the least time of a ring all-reduce, 2(n-1)M / (nB)."""
    return 2 * (machines - 1) / machines * nbytes / network.bytes_per_s
