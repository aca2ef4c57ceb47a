# SPDX-License-Identifier: Apache-2.0
"""Simulate every frame on every link of a cluster.

Theory of operation. Events are (time, number, function, arguments) on one heap. A card sends one
frame at a time; links with something to send have turns (Cluster.turn_of). A
link's next frame comes from the library's own ScheduledQueue, with its priority and its credit.
The frame's first packet reaches the receiver's card one latency later; that card takes frames in
the order in which they come, at its own rate (cut-through). When the frames of all machines for
one chunk are there, its result is queued for all of them; a result gives the credit back.

Nothing is random: two runs give the same times. The time it takes goes with the frames, some
10 us for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aids.faces import ScheduledQueue
from fastps.contract.partition import Piece, key_of
from fastps.errors import StallError
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

QUEUE_CAPACITY = 16  # of a queue at first; it grows by itself
# Of the library's loans, which are C constants of transport/tcp/_transport.pyx.
BORROW_BYTES = 512 << 10
STARVED_S = 2e-3
MAX_STARVED_S = 0.4
FIRST_WAIT_S = 0.012
MAX_HALVINGS = 8
PATIENCE = 16
WAIT_SHARE = 4


class Clock:
    """Hold the time and what will happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Let something happen at a time; of equal times, in the order of the calls."""
        self.events += 1
        heapq.heappush(self._heap, (time_s, self.events, what, arguments))

    def run(self) -> None:
        """Let everything happen."""
        while self._heap:
            self.now, _, what, arguments = heapq.heappop(self._heap)
            what(*arguments)


@dataclass(eq=False, slots=True)
class Part:
    """A partition that a machine pushes, or one chunk's result on its way to all machines."""

    tensor: int
    owner: int
    key: int
    priority: int
    nbytes: int
    first_chunk: int = 0
    cursor: int = 0  # bytes taken from the queue; a result of one frame is shared and stays at 0
    order: int = 0  # among those of the same priority


@dataclass(eq=False, slots=True)
class Credit:
    """A queue's credit with the library's loans to those who starve (transport/tcp).

    Machines may have pushed different chunks of one priority, each as far as its credit goes:
    then none gets a result, and some must send more than they have credit for.
    counts_all: as if all priorities were one.
    """

    nbytes: int
    clock: Clock
    retry: Callable[[], None]
    counts_all: bool
    queue: ScheduledQueue = field(init=False)
    loans: int = 0  # since the last result
    total_loans: int = 0
    starved_at: float | None = None
    usual_wait_s: float = FIRST_WAIT_S

    def __post_init__(self) -> None:
        self.queue = ScheduledQueue(self.nbytes, QUEUE_CAPACITY)

    def take(self) -> Part:
        """Take the most urgent item; StallError if there is none, or no credit."""
        try:
            if self.counts_all and self._held() >= self.nbytes:
                raise StallError("no credit")
            part = self.queue.pop_nowait()
        except StallError:
            self._note_starved()
            raise
        if self.starved_at is not None:
            waited_s = self.clock.now - self.starved_at
            self.usual_wait_s += (waited_s - self.usual_wait_s) / WAIT_SHARE
        self.starved_at = None
        assert isinstance(part, Part)
        return part

    def _held(self) -> int:
        """Give what counts of the bytes in flight against the next item."""
        stats = self.queue.statistics()
        return stats.credit_used - stats.credit_lent if self.counts_all else stats.credit_ahead

    def _note_starved(self) -> None:
        now = self.clock.now
        if self.queue.statistics().depth == 0:
            self.starved_at = None
        elif self.starved_at is None:
            self.starved_at = now
            patience = min(PATIENCE * self.usual_wait_s, MAX_STARVED_S)
            patience /= 1 << min(self.loans, MAX_HALVINGS)
            self.clock.at(now + max(patience, STARVED_S), self._lend, now)

    def _lend(self, starved_at: float) -> None:
        if self.starved_at != starved_at:
            return
        self.starved_at = None
        self.loans += 1
        self.total_loans += 1
        self.queue.lend(BORROW_BYTES)
        self.retry()

    def give_back(self, part: Part, nbytes: int) -> None:
        """Return the credit of what has its result, which pays back what was lent."""
        self.loans = 0
        self.queue.credit_return(part.priority, nbytes)
        self.retry()


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a connection: its queue, and where it leads."""

    queue: ScheduledQueue
    card: Card
    receiver: Card
    chunk: int
    arrive: Callable[[int, Part, int, int], None]  # (who, part, chunk number, bytes)
    who: int  # the machine whose push or result this is
    weight: float = 1.0
    queues: Queues = field(default_factory=Queues)
    turn: float = 0.0  # bytes over weight
    is_waiting: bool = False
    credit: Credit | None = None

    def wake(self) -> None:
        """Have the card look at the queue again."""
        self.card.want(self)

    def push(self, part: Part) -> None:
        """Queue what is left of a part: its next frame counts against the credit."""
        charged = min(self.chunk, part.nbytes - part.cursor)
        self.queue.push(part.priority, part.order, charged, part)
        self.card.want(self)

    def take_frame(self) -> tuple[Part, int, int]:
        """Take the most urgent frame as (part, chunk number, bytes); StallError if none may go."""
        part = self.credit.take() if self.credit else self.queue.pop_nowait()
        assert isinstance(part, Part)
        left = part.nbytes - part.cursor
        number = part.first_chunk + part.cursor // self.chunk
        if left <= self.chunk:
            return part, number, left
        part.cursor += self.chunk
        charged = min(self.chunk, part.nbytes - part.cursor)
        self.queue.push(part.priority, part.order, charged, part)
        return part, number, self.chunk


@dataclass(eq=False, slots=True)
class Card:
    """A network card, both directions; or the way inside a machine, past its card."""

    clock: Clock
    byte_s: float  # time of one byte
    head_s: float  # until a frame's first packet is at its receiver, if nothing is queued
    is_busy: bool = False
    free_at: float = 0.0  # the receiving side
    sent: int = 0
    received: int = 0
    turn: float = 0.0
    turns: int = 0
    waiting: list[tuple[float, int, Link]] = field(default_factory=list)

    def want(self, link: Link) -> None:
        """Give a link its turn; those it missed with nothing to send are gone."""
        if not link.is_waiting:
            link.turn = max(link.turn, self.turn)
            self._wait(link)
        if not self.is_busy:
            self.send()

    def _wait(self, link: Link) -> None:
        link.is_waiting = True
        self.turns += 1
        heapq.heappush(self.waiting, (link.turn, self.turns, link))

    def send(self) -> None:
        """Send the next frame of the next link that has one."""
        self.is_busy = False
        while self.waiting:
            turn, _, link = heapq.heappop(self.waiting)
            link.is_waiting = False
            try:
                part, number, nbytes = link.take_frame()
            except StallError:  # empty, or without credit: a push or a result brings it back
                continue
            self.turn = turn
            link.turn = turn + nbytes / link.weight
            self._wait(link)
            self._put(link, part, number, nbytes)
            return

    def _put(self, link: Link, part: Part, number: int, nbytes: int) -> None:
        clock = self.clock
        wait_s = link.queues.wait_s(self.sent * self.byte_s)
        comes_at = clock.now + self.head_s + wait_s
        frame_s = nbytes * self.byte_s / (1 - link.queues.loss_at(wait_s))
        self.is_busy = True
        self.sent += nbytes
        clock.at(comes_at, link.receiver.receive, link, part, number, nbytes)
        clock.at(clock.now + frame_s, self.send)

    def receive(self, link: Link, part: Part, number: int, nbytes: int) -> None:
        """Take in a frame whose first packet is here, behind those that came before."""
        self.received += nbytes
        self.free_at = max(self.clock.now, self.free_at) + nbytes * self.byte_s
        self.clock.at(self.free_at, link.arrive, link.who, part, number, nbytes)


class _Run:
    """One simulation: the state of all machines."""

    def __init__(self, tensors: Sequence[Tensor], cluster: Cluster, network: Network) -> None:
        self.cluster = cluster
        self.clock = Clock()
        self.tensors = tensors
        hosts = cluster.machines + cluster.servers
        byte_s, bus_s = 1 / network.bytes_per_s, 1 / network.bus_bytes_per_s
        self.cards = [Card(self.clock, byte_s, network.head_s) for _ in range(hosts)]
        self.inner = [Card(self.clock, bus_s, 0.0) for _ in range(cluster.machines)]
        self.pushes: dict[tuple[int, int], Link] = {}
        self.results: dict[tuple[int, int], Link] = {}
        self.arrived: dict[tuple[int, int], int] = {}  # frames of a chunk, by key and number
        self.left = [[tensor.nbytes] * cluster.machines for tensor in tensors]
        self.done_s = [0.0] * len(tensors)
        # The bus of a machine, once for sums and once for results.
        self.bus_s = local_share(cluster) * bus_s
        self.published_at = [0.0] * cluster.machines
        self.network = network

    def _credit(self, owner: int, retry: Callable[[], None]) -> Credit:
        cluster = self.cluster
        counts_all = cluster.credit_rule == "loans"
        return Credit(cluster.link_credit(owner), self.clock, retry, counts_all)

    def _link(self, machine: int, owner: int, *, is_push: bool) -> Link:
        """Give the link between a machine and a server, in one direction; make it at first use."""
        links = self.pushes if is_push else self.results
        link = links.get((machine, owner))
        if link is None:
            host = self.cluster.machine_of(owner)
            ends = [self.cards[machine], self.cards[host]]
            if host == machine:
                ends = [self.inner[machine]] * 2
            card, receiver = ends if is_push else reversed(ends)
            arrive = self._landed if is_push else self._returned
            queue = ScheduledQueue(0, QUEUE_CAPACITY)
            link = Link(queue, card, receiver, self.cluster.chunk, arrive, machine)
            link.weight = self.cluster.turn_of(owner)
            if host != machine:
                link.queues = make_queues(self.cluster, self.network, owner)
            if is_push:
                link.credit = self._credit(owner, link.wake)
                link.queue = link.credit.queue
            links[machine, owner] = link
        return link

    def start(self) -> None:
        """Note when every machine begins to push what."""
        priorities = order_of(self.tensors, self.cluster)
        pieces = cut(self.tensors, self.cluster)
        summed_at = 0.0
        by_time = sorted(range(len(self.tensors)), key=lambda i: self.tensors[i].ready_s)
        for number in by_time:
            tensor = self.tensors[number]
            summed_at = max(summed_at, tensor.ready_s) + tensor.nbytes * self.bus_s
            parts = [
                self._part(number, priorities[number], index, piece)
                for index, piece in enumerate(pieces[number])
            ]
            self.clock.at(summed_at, self._submit, parts)

    @staticmethod
    def _part(tensor: int, priority: int, index: int, piece: Piece) -> Part:
        key = key_of(tensor, index)
        return Part(tensor, piece.owner, key, priority, piece.nbytes, order=key)

    def _submit(self, parts: list[Part]) -> None:
        for machine in range(self.cluster.machines):
            for part in parts:
                own = replace(part)
                self._link(machine, part.owner, is_push=True).push(own)

    def _landed(self, machine: int, part: Part, number: int, nbytes: int) -> None:
        """A server has one machine's frame of a chunk; the last one makes the result."""
        chunk = (part.key, number)
        count = self.arrived.pop(chunk, 0) + 1
        if count < self.cluster.machines:
            self.arrived[chunk] = count
            return
        result = replace(part, nbytes=nbytes, first_chunk=number, cursor=0, order=part.key)
        for receiver in range(self.cluster.machines):
            self._link(receiver, part.owner, is_push=False).push(result)

    def _returned(self, machine: int, part: Part, number: int, nbytes: int) -> None:
        """A machine has a chunk's result: it gives it to its workers, and may push more."""
        credit = self.pushes[machine, part.owner].credit
        assert credit is not None
        credit.give_back(part, nbytes)
        published = max(self.published_at[machine], self.clock.now) + nbytes * self.bus_s
        self.published_at[machine] = published
        self.left[part.tensor][machine] -= nbytes
        if not self.left[part.tensor][machine]:
            self.done_s[part.tensor] = max(self.done_s[part.tensor], published)

    def outcome(self) -> Outcome:
        """Sum up; RuntimeError if something never came."""
        missing = sum(map(sum, self.left))
        if missing:
            raise RuntimeError(f"the simulation stopped with {missing} bytes on their way")
        machines = self.cluster.machines
        worker = [float(max(card.sent, card.received)) for card in self.cards[:machines]]
        server = [float(max(card.sent, card.received)) for card in self.cards[machines:]]
        moved = {"worker": max(worker), "server": max(server, default=0.0)}
        credits = [link.credit for link in self.pushes.values() if link.credit]
        loans = sum(credit.total_loans for credit in credits)
        return Outcome(self.done_s, moved, self.clock.events, loans)


def simulate(tensors: Sequence[Tensor], cluster: Cluster, network: Network) -> Outcome:
    """Simulate the sums of all tensors over parameter servers, frame by frame."""
    if cluster.machines == 1:
        return alone(tensors, cluster, network)
    run = _Run(tensors, cluster, network)
    run.start()
    run.clock.run()
    return run.outcome()
