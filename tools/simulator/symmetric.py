# SPDX-License-Identifier: Apache-2.0
"""Simulate one machine for all: all workers' machines are alike, and so are all that only serve.

Theory of operation. Two cards stand for all: a worker machine's, and that of a machine that only
serves. A tensor's bytes go to two groups of servers, those on machines of their own and those
beside workers, as the library cuts them. They travel in grains, one frame for each server of the
tensor. A grain passes four sides of cards: the worker's sending, the server's receiving, the
server's sending, the worker's receiving. b bytes from every one of n machines take n b / s of
each of the s servers' cards, less what a server has from its own machine; beside workers that
card is the worker machine's, which so divides its time between pushing and serving.

What waits for a sending side are streams: pushes and results of each group. They have turns as
their connections would, as many as there are links. So a tensor costs four events for each of
its frames per server, on any number of machines.

Approximations. A tensor with one owner loads all cards of the group a little, where one is
loaded much and the others not at all; that the owner takes its frames one after the other is
kept. Credit is shared by the links of a group. tests/unit compares with the exact simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from aids.faces import ScheduledQueue
from fastps.contract.partition import Piece
from fastps.errors import StallError
from tools.simulator.exact import QUEUE_CAPACITY, Clock
from tools.simulator.plan import (
    Cluster,
    Network,
    Outcome,
    Queues,
    Tensor,
    alone,
    cut,
    local_share,
    make_queues,
    order_of,
)


@dataclass(eq=False, slots=True)
class Grain:
    """Some frames of one tensor for one group, the same from every machine."""

    tensor: int
    group: Group
    key: int
    priority: int
    nbytes: int
    frame_bytes: int  # the largest part of one server
    owner: int  # the only one, or -1


@dataclass(eq=False, slots=True)
class Stream:
    """What waits for one side of a card, and the bytes it had over its weight."""

    queue: ScheduledQueue
    weight: float  # links, times the weight of each
    share: Callable[[Grain], float]  # of the grain's bytes that pass this card
    begin: Callable[[Grain, float], None]  # with the time when its last byte leaves
    queues: Queues
    turn: float = 0.0
    is_active: bool = False


@dataclass(eq=False, slots=True)
class Card:
    """A card that stands for many: the stream that had the least over its weight goes next."""

    clock: Clock
    network: Network
    streams: list[Stream] = field(default_factory=list)
    is_busy: bool = False
    turn: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    free_at: float = 0.0  # the receiving side

    def push(self, stream: Stream, grain: Grain) -> None:
        """Queue a grain, and wake the card."""
        stream.queue.push(grain.priority, grain.key, grain.nbytes, grain)
        self.wake(stream)

    def wake(self, stream: Stream) -> None:
        """Let a stream have turns again; those it missed with nothing to send are gone."""
        if not stream.is_active:
            stream.is_active = True
            stream.turn = max(stream.turn, self.turn)
        if not self.is_busy:
            self.send()

    def send(self) -> None:
        """Send the next grain of the stream whose turn it is."""
        self.is_busy = False
        while ready := [stream for stream in self.streams if stream.is_active]:
            stream = min(ready, key=lambda one: one.turn)
            try:
                grain = stream.queue.pop_nowait()
            except StallError:
                stream.is_active = False
                continue
            assert isinstance(grain, Grain)
            self._put(stream, grain)
            return

    def _put(self, stream: Stream, grain: Grain) -> None:
        nbytes = grain.nbytes * stream.share(grain)
        network, now = self.network, self.clock.now
        wait_s = stream.queues.wait_s(self.sent / network.bytes_per_s)
        end = now + nbytes / network.bytes_per_s / (1 - stream.queues.loss_at(wait_s))
        head_s = network.head_s + wait_s
        self.sent += nbytes
        self.turn = stream.turn
        stream.turn += nbytes / stream.weight
        self.is_busy = True
        self.clock.at(now + head_s, stream.begin, grain, end + head_s)
        self.clock.at(end, self.send)

    def receive(self, nbytes: float) -> float:
        """Take bytes in behind those that came before; give the time when they are in."""
        self.received += nbytes
        took_s = nbytes / self.network.bytes_per_s
        self.free_at = max(self.clock.now, self.free_at) + took_s
        return self.free_at


@dataclass(eq=False)
class Group:
    """One kind of server: how many, on which card, and its part of each machine's bytes.

    push_share: of a byte that a machine pushes, what leaves it. serve_share: of a byte that
    every machine pushes, what enters the card of each server.
    """

    card: Card
    servers: int
    push_share: float
    serve_share: float
    pushes: Stream
    results: Stream
    in_free_at: dict[int, float] = field(default_factory=dict)  # by owner
    out_free_at: dict[int, float] = field(default_factory=dict)


class _Run:
    """One simulation: two cards, two groups."""

    def __init__(self, tensors: Sequence[Tensor], cluster: Cluster, network: Network) -> None:
        self.tensors, self.cluster, self.network = tensors, cluster, network
        self.clock = Clock()
        self.worker = Card(self.clock, network)
        self.server = Card(self.clock, network)
        self.left = [tensor.nbytes for tensor in tensors]
        self.done_s = [0.0] * len(tensors)
        self.bus_s = local_share(cluster) / network.bus_bytes_per_s
        self.published_at = 0.0
        n, k = cluster.machines, cluster.servers
        self.groups = (
            self._group(self.server, k, 1.0, n / max(k, 1)),
            self._group(self.worker, n, (n - 1) / n, (n - 1) / n),
        )

    def _group(self, card: Card, servers: int, push: float, serve: float) -> Group:
        is_apart = card is self.server
        links = servers if is_apart else servers - 1
        receivers = self.cluster.machines - (not is_apart)
        owner = 0 if is_apart else len(self.cluster.weights) - 1
        turn = self.cluster.turn_of(owner) or 1.0
        queues = make_queues(self.cluster, self.network, owner)
        pushes = Stream(
            ScheduledQueue(self.cluster.link_credit(owner) * servers, QUEUE_CAPACITY),
            max(links, 1) * turn,
            lambda grain: grain.group.push_share,
            self._push_comes,
            queues,
        )
        results = Stream(
            ScheduledQueue(0, QUEUE_CAPACITY),
            receivers * turn,
            lambda grain: grain.group.serve_share,
            self._result_comes,
            queues,
        )
        self.worker.streams.append(pushes)
        card.streams.append(results)
        return Group(card, servers, push, serve, pushes, results)

    def start(self) -> None:
        """Note when the machines begin to push what."""
        priorities = order_of(self.tensors, self.cluster)
        pieces = cut(self.tensors, self.cluster)
        summed_at = 0.0
        for number in sorted(range(len(pieces)), key=lambda i: self.tensors[i].ready_s):
            tensor = self.tensors[number]
            summed_at = max(summed_at, tensor.ready_s) + tensor.nbytes * self.bus_s
            grains = list(self._grains(number, priorities[number], pieces[number]))
            self.clock.at(summed_at, self._submit, grains)

    def _grains(self, number: int, priority: int, pieces: Sequence[Piece]) -> Iterator[Grain]:
        """Cut a tensor into grains, those of both groups in proportion."""
        found: list[tuple[float, int, Grain]] = []
        for place, group in enumerate(self.groups):
            own = [piece for piece in pieces if self.cluster.is_apart(piece.owner) == (place == 0)]
            frames = _frames_by_turn(own, self.cluster.chunk)
            owners = {piece.owner for piece in own}
            owner = owners.pop() if len(owners) == 1 else -1
            for turn, sizes in enumerate(frames):
                middle = (turn + 0.5) / len(frames)
                nbytes, largest = sum(sizes), max(sizes)
                grain = Grain(number, group, 0, priority, nbytes, largest, owner)
                found.append((middle, place, grain))
        found.sort(key=lambda entry: entry[:2])
        for position, (_, _, grain) in enumerate(found):
            grain.key = (number << 32) + position
            yield grain

    def _submit(self, grains: Sequence[Grain]) -> None:
        for grain in grains:
            self.worker.push(grain.group.pushes, grain)

    def _push_comes(self, grain: Grain, last_s: float) -> None:
        """The first bytes of a grain are at its servers."""
        group = grain.group
        end = max(last_s, group.card.receive(grain.nbytes * group.serve_share))
        end = max(end, self._at_owner(group.in_free_at, grain))
        self.clock.at(end, self._sum, grain)

    def _sum(self, grain: Grain) -> None:
        grain.group.card.push(grain.group.results, grain)

    def _result_comes(self, grain: Grain, last_s: float) -> None:
        """The first bytes of a grain's results are back."""
        group = grain.group
        end = max(last_s, self.worker.receive(grain.nbytes * group.push_share))
        end = max(end, self._at_owner(group.out_free_at, grain))
        self.clock.at(end, self._finish, grain)

    def _at_owner(self, free_at: dict[int, float], grain: Grain) -> float:
        """Give the time when all machines' frames of a grain have passed one server's card."""
        frame_s = grain.frame_bytes * self.cluster.machines / self.network.bytes_per_s
        if grain.owner < 0:
            return self.clock.now + frame_s
        free_at[grain.owner] = max(free_at.get(grain.owner, 0.0), self.clock.now) + frame_s
        return free_at[grain.owner]

    def _finish(self, grain: Grain) -> None:
        """A grain's sum is on all machines."""
        stream = grain.group.pushes
        stream.queue.credit_return(grain.priority, grain.nbytes)
        self.worker.wake(stream)
        self.published_at = max(self.published_at, self.clock.now) + grain.nbytes * self.bus_s
        self.left[grain.tensor] -= grain.nbytes
        if not self.left[grain.tensor]:
            self.done_s[grain.tensor] = self.published_at

    def outcome(self) -> Outcome:
        """Sum up; RuntimeError if something never came."""
        if any(self.left):
            raise RuntimeError(f"the simulation stopped with {sum(self.left)} bytes on their way")
        moved = {
            "worker": max(self.worker.sent, self.worker.received),
            "server": max(self.server.sent, self.server.received),
        }
        return Outcome(self.done_s, moved, self.clock.events)


def _frames_by_turn(pieces: Sequence[Piece], chunk: int) -> list[list[int]]:
    """Give the sizes of the first frames of all owners, then of the second, and so on."""
    turns: list[list[int]] = []
    places: Counter[int] = Counter()
    for piece in pieces:
        for offset in range(0, piece.nbytes, chunk):
            place = places[piece.owner]
            places[piece.owner] += 1
            if place == len(turns):
                turns.append([])
            turns[place].append(min(chunk, piece.nbytes - offset))
    return turns


def simulate(tensors: Sequence[Tensor], cluster: Cluster, network: Network) -> Outcome:
    """Simulate the sums of all tensors over parameter servers, one machine for all."""
    if cluster.machines == 1:
        return alone(tensors, cluster, network)
    run = _Run(tensors, cluster, network)
    run.start()
    run.clock.run()
    return run.outcome()
