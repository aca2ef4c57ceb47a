# SPDX-License-Identifier: Apache-2.0
"""Schedules of operations among neighbours: the messages and folds of one member of a group.

Decides who sends what to whom and what is mixed where, as collectives/schedule.py does for all
members; never knows weights, tensors or a rank of the job. Pure. Members know their own
neighbours only, so two may disagree about an edge. is_checked: the two ends of every edge exchange
messages of one byte beside the data. So a member that expects an edge hears from the other end,
or hears that the other end does not expect it.

Mixed arrays are added in the order of members, each once, in whatever order they arrive. The
weights of a FOLD are those of its sources, in their order; behind them are those of scaled copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastps.collectives.schedule import (
    ALIGNMENT,
    MAX_MESSAGE_BYTES,
    PIECE_BYTES,
    SMALL_BYTES,
    Kind,
    Place,
    Schedule,
    Source,
    Step,
)

SPEAKS, HEARS, FIRST = 0, 1, 2  # labels: the checks of the two ends of an edge, then the data
INSIDE, BETWEEN, BACK = 0, 1, 2  # the rounds of a piece between machines
N_WAYS = 3


class Edges(NamedTuple):
    """The edges of a member, or a machine, to others, by index.

    sources: members whose arrays are mixed, ascending. ignored: other members that send. targets:
    members that receive our array, and which of its scaled copies; -1: as it is. is_mean: weights
    are all alike, so that mixing is a sum and a division.
    """

    sources: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]
    ignored: tuple[int, ...] = ()
    is_mean: bool = False
    is_checked: bool = False

    @property
    def n_copies(self) -> int:
        """Number of scaled copies."""
        return 1 + max((copy for _, copy in self.targets), default=-1)


def neighbor_allreduce(me: int, edges: Edges, nbytes: int, itemsize: int) -> Schedule:
    """Mix INPUT with those of the sources into OUTPUT, which is other memory.

    One round, with a message to each target and from each source for every piece. Scaled copies
    are sent from scratch. Memory does not grow with the number of sources.
    """
    steps = _Steps(me)
    for label, (offset, size) in _pieces(nbytes, 1, itemsize, PIECE_BYTES):
        here = _At(Place.INPUT, offset)
        steps.send(edges, edges.targets, here, label, size, 1 + len(edges.sources))
        members = sorted((me, *edges.sources))
        parts = [here._replace(peer=None if one == me else one) for one in members]
        weights = -1 if edges.is_mean else 0
        steps.fold(parts, label, _At(Place.OUTPUT, offset), size, weights, is_final=edges.is_mean)
        for peer in edges.ignored:
            steps.ignore(peer, label, size)
    return steps.checked(edges, [peer for peer, _ in edges.targets],
                         [*edges.sources, *edges.ignored])  # fmt: skip


def neighbor_allgather(
    me: int, edges: Edges, nbytes: int, counts: Sequence[int], order: Sequence[int]
) -> Schedule:
    """Put the INPUTs of sources one after the other into OUTPUT, in the given order.

    counts: bytes of each source of `order`. One round, one message to each target.
    """
    steps = _Steps(me)
    for label, (offset, size) in _pieces(nbytes, 1, 1, MAX_MESSAGE_BYTES):
        steps.send(edges, edges.targets, _At(Place.INPUT, offset), label, size, 0)
    start = 0
    for peer, count in zip(order, counts, strict=True):
        for label, (offset, size) in _pieces(count, 1, 1, MAX_MESSAGE_BYTES):
            steps.receive(peer, label, _At(Place.OUTPUT, start + offset), size)
        start += count
    return steps.checked(edges, [peer for peer, _ in edges.targets], order)


def neighbor_exchange(
    me: int, edges: Edges, nbytes: int, stride: int, order: Sequence[int]
) -> Schedule:
    """Send each target its block of INPUT, and put those of the sources into OUTPUT.

    Blocks of nbytes are stride bytes apart; edges.targets have the block of each peer.
    """
    steps = _Steps(me)
    for label, (offset, size) in _pieces(nbytes, 1, 1, MAX_MESSAGE_BYTES):
        for peer, block in steps.in_turn(edges.targets):
            steps.send_one(peer, label, _At(Place.INPUT, block * stride + offset), size)
        for row, peer in enumerate(order):
            steps.receive(peer, label, _At(Place.OUTPUT, row * stride + offset), size)
    return steps.checked(edges, [peer for peer, _ in edges.targets], order)


def hierarchical_neighbor_allreduce(
    me: int, machines: Sequence[tuple[int, ...]], edges: Edges, nbytes: int, itemsize: int
) -> Schedule:
    """Mix the average of our machine's INPUTs with those of other machines, into OUTPUT of all.

    machines: their members. edges: those of our machine, by index. Each piece goes through one
    agent on each machine, which averages there, mixes with other machines, and sends the result to
    the machine's members: three rounds. A piece leaves a machine once for each target. Agents
    change from piece to piece.
    """
    steps = _Steps(me)
    ours = next(index for index, members in enumerate(machines) if me in members)
    widest = max(map(len, machines)) if nbytes > SMALL_BYTES else 1  # some may have no member left
    for label, (offset, size) in _pieces(nbytes, widest, itemsize, PIECE_BYTES):
        agents = [members[label % len(members)] if members else -1 for members in machines]
        way = _Way(label, offset, size, agents, ours)
        if me == agents[ours]:
            steps.lead(way, machines[ours], edges)
        else:
            steps.follow(way, agents[ours])
    firsts = [members[0] if members else -1 for members in machines]
    if me != firsts[ours]:
        return steps.done()
    return steps.checked(edges, [firsts[to] for to, _ in edges.targets],
                         [firsts[one] for one in (*edges.sources, *edges.ignored)])  # fmt: skip


# ---- parts ----


class _At(NamedTuple):
    """Bytes in an array of this member, and the step that put them there; or a peer's message."""

    place: Place
    offset: int
    after: tuple[int, ...] = ()
    peer: int | None = None


class _Way(NamedTuple):
    """The way of a piece between machines: its agent on each."""

    label: int
    offset: int
    nbytes: int
    agents: Sequence[int]
    ours: int

    def name(self, way: int) -> int:
        """Return the label of its messages in one of the three rounds."""
        return self.label * N_WAYS + way


def _pieces(
    nbytes: int, parts: int, itemsize: int, limit: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Cut into at least so many even (label, (offset, nbytes)), at lines and elements."""
    grain = math.lcm(ALIGNMENT, itemsize)
    parts = max(-(-nbytes // (limit * parts)), 1) * parts
    step = max(-(-nbytes // (parts * grain)), 1) * grain
    cuts = [(offset, min(step, nbytes - offset)) for offset in range(0, nbytes, step)]
    return enumerate(cuts, start=FIRST)


@dataclass
class _Steps:
    """The steps of one member, while its schedule is made."""

    me: int
    steps: list[Step] = field(default_factory=list)
    scratch_bytes: int = 0
    waste: _At | None = None  # receives ignored messages, one after the other

    def done(self) -> Schedule:
        return Schedule(tuple(self.steps), self.scratch_bytes)

    def room(self, nbytes: int) -> _At:
        """Allocate scratch memory at a cache line."""
        start = -(-self.scratch_bytes // ALIGNMENT) * ALIGNMENT
        self.scratch_bytes = start + nbytes
        return _At(Place.SCRATCH, start)

    def add(self, step: Step) -> _At:
        self.steps.append(step)
        return _At(step.place, step.offset, (len(self.steps) - 1,))

    def fold(
        self, parts: Sequence[_At], label: int, to: _At, nbytes: int, weights: int = -1,
        *, is_final: bool = False,
    ) -> _At:  # fmt: skip
        after = tuple(sorted({step for part in parts for step in part.after}))
        sources = tuple(
            Source(self.me if part.peer is None else part.peer, label, part.place, part.offset)
            for part in parts
        )
        return self.add(Step(Kind.FOLD, self.me, label, to.place, to.offset, nbytes, after,
                             sources, is_final, weights))  # fmt: skip

    def receive(self, peer: int, label: int, to: _At, nbytes: int) -> _At:
        return self.add(Step(Kind.RECEIVE, peer, label, to.place, to.offset, nbytes, to.after))

    def send_one(self, peer: int, label: int, at: _At, nbytes: int) -> None:
        self.add(Step(Kind.SEND, peer, label, at.place, at.offset, nbytes, at.after))

    def send(
        self, edges: Edges, targets: Sequence[tuple[int, int]], at: _At, label: int, nbytes: int,
        first_weight: int,
    ) -> None:  # fmt: skip
        """Send to the targets; each scaled copy is made once."""
        copies = [
            self.fold([at], label, self.room(nbytes), nbytes, first_weight + copy)
            for copy in range(edges.n_copies)
        ]
        for peer, copy in self.in_turn(targets):
            self.send_one(peer, label, at if copy < 0 else copies[copy], nbytes)

    def in_turn(self, targets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return targets in the order in which to send: the next one after this member first."""
        return sorted(targets, key=lambda one: one[0] < self.me)

    def ignore(self, peer: int, label: int, nbytes: int) -> None:
        """Receive an ignored message over the one before; the first is the longest."""
        self.waste = self.receive(peer, label, self.waste or self.room(nbytes), nbytes)

    def lead(self, way: _Way, members: Sequence[int], edges: Edges) -> None:
        """Average a piece inside the machine, mix it with other machines', and send it back."""
        here = _At(Place.INPUT, way.offset)
        parts = [here._replace(peer=None if one == self.me else one) for one in members]
        mean = here
        if len(members) > 1:
            mean = self.fold(parts, way.name(INSIDE), self.room(way.nbytes), way.nbytes,
                             is_final=True)  # fmt: skip
        targets = [(way.agents[to], copy) for to, copy in edges.targets]
        name = way.name(BETWEEN)
        self.send(edges, targets, mean, name, way.nbytes, 1 + len(edges.sources))
        sources = [mean if one == way.ours else _At(Place.SCRATCH, 0, peer=way.agents[one])
                   for one in sorted((way.ours, *edges.sources))]  # fmt: skip
        found = self.fold(sources, name, _At(Place.OUTPUT, way.offset), way.nbytes, 0)
        for one in edges.ignored:
            self.ignore(way.agents[one], name, way.nbytes)
        for peer in members:
            if peer != self.me:
                self.send_one(peer, way.name(BACK), found, way.nbytes)

    def follow(self, way: _Way, agent: int) -> None:
        """Send a piece to the machine's agent, and receive the mixed one."""
        self.send_one(agent, way.name(INSIDE), _At(Place.INPUT, way.offset), way.nbytes)
        self.receive(agent, way.name(BACK), _At(Place.OUTPUT, way.offset), way.nbytes)

    def checked(self, edges: Edges, targets: Sequence[int], sources: Sequence[int]) -> Schedule:
        """Exchange a byte over every edge where is_checked, and return the schedule."""
        if edges.is_checked:
            for ours, theirs, peers in ((SPEAKS, HEARS, targets), (HEARS, SPEAKS, sources)):
                for peer in peers:
                    self.send_one(peer, ours, self.room(1), 1)
                    self.receive(peer, theirs, self.room(1), 1)
        return self.done()
