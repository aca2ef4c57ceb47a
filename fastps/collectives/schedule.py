# SPDX-License-Identifier: Apache-2.0
"""Which messages an operation consists of on one member of a group.

Decides who sends what to whom, in which order, and what is summed where; never knows what the
bytes mean, how they travel, or a rank of the job: members are indices in the group. Pure: every
member calls the same function with the same sizes, and the steps that they get fit together.

A piece of an operation has an *owner*. Its way is a tree of two levels: where several members
share a machine, an *agent* on each machine sums for it, receives for it and passes on inside it,
so that bytes cross the network once per machine. Agents change from piece to piece, so all
members work. machines: the number of each member's machine; without, each is one of its own, and
the tree is a star. Sums are made in group order inside each machine, then in the order of the
machines' first members, whatever the size; all members get the bytes of one and the same sum.

A step waits for those of its `after`, smaller indices. Beyond that, what arrives may be written
where a SEND reads, if it was made from what that SEND sent. Pieces of 0 bytes have no steps.

In what follows n members on m machines exchange M bytes; B is the bandwidth of each member's way
in and of its way out, and a floor the time that no algorithm can beat. Messages are those that
a member sends, if none is longer than MAX_MESSAGE_BYTES.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 64  # bytes; pieces of one array begin at multiples of a cache line
MAX_MESSAGE_BYTES = 1 << 30
PIECE_BYTES = 1 << 20  # of what is passed on: early enough to overlap, and still in a cache
MIN_PIECE_BYTES = 64 << 10  # a shorter piece saves less time than its message costs
PIPELINE = 16  # pieces for each who passes a broadcast on: the last one costs 1/16
SUM_PIPELINE = 32  # pieces of a share of a sum between machines
CONFIRMED = 1 << 15  # label of what ends a gather; those of its parts are below it
CHAINED_BYTES = 4  # of an element of a sum that goes from machine to machine
CHAINED_PIECES = 32  # that a member of the chain has under way: scratch for no more
SUM_LAG = 2  # pieces after which a sum leaves, between machines
# A message costs about 5 us, in which 8 KiB travel. Who sends M bytes to all, instead of a share
# of each sum to its owner and back, saves half of the messages; that pays up to 16 KiB.
SMALL_BYTES = 16 << 10
ALONE_BYTES = 4 << 20  # a block that takes long enough on a link to be asked for by itself
DIRECT_MEMBERS = 8  # with more, small messages go in few rounds instead of all at once


class Kind(enum.IntEnum):
    """What a step does."""

    SEND = 0
    RECEIVE = 1
    FOLD = 2  # sum what lies here and what arrives
    COPY = 3


class Place(enum.IntEnum):
    """Which of the three arrays that an operation has on a member."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Source(NamedTuple):
    """What a FOLD or COPY reads: a peer's message, or bytes here if the peer is ourselves."""

    peer: int
    label: int
    place: Place
    offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a member does, once all steps of `after` are done; what _exchange.pyx runs.

    peer: of a SEND or RECEIVE; else ourselves. label: names the message between the two; unique
    for each ordered pair. offset, nbytes: of what is sent or written in `place`; at most
    MAX_MESSAGE_BYTES. sources: of a FOLD, in the order of its sum, or the one of a COPY.
    is_final: of a FOLD that makes a whole sum, not a machine's part of it: an average divides
    there. A group of one has such a FOLD too, of one source. weights: of a FOLD in which sources
    have weights, the number of its first among those of the operation; -1: it has none.
    """

    kind: Kind
    peer: int
    label: int
    place: Place
    offset: int
    nbytes: int
    after: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    is_final: bool = False
    weights: int = -1


@dataclass(frozen=True)
class Schedule:
    """All steps of one member, and the bytes of scratch that they use."""

    steps: tuple[Step, ...]
    scratch_bytes: int


def allgather(me: int, counts: Sequence[int], machines: Sequence[int] = ()) -> Schedule:
    """Plan the copy of every INPUT, of counts[member] bytes, to all, concatenated in OUTPUT.

    One round of n - 1 messages, (n - 1) counts[me] bytes. With machines: two rounds, each block
    crosses the network once per other machine. Up to SMALL_BYTES a block and with more than
    DIRECT_MEMBERS: Bruck's ceil(log2 n) rounds of one message, M bytes at most. Between machines
    of one member blocks of ALONE_BYTES or more are asked for one by one, as in alltoall().
    Floor: (M - the least count) / B.
    """
    steps = _Steps(me, len(counts))
    if len(counts) > DIRECT_MEMBERS and sum(counts) <= len(counts) * SMALL_BYTES:
        return _gather_by_bruck(steps, counts)
    topology, came = _topology(len(counts), machines), _At(Place.OUTPUT, 0)
    is_star = len(topology.machines) == len(counts) == len(set(machines))
    for piece in _in_turn(topology.blocks(counts), steps):
        after = came.after if is_star and piece.nbytes >= ALONE_BYTES else ()
        out = _At(Place.OUTPUT, piece.offset, after)
        at = _At(Place.INPUT, piece.start) if me == piece.owner else out
        steps.copy(at, out, piece.nbytes)
        at = steps.spread(topology.role(me, piece), piece, at)
        came = came if me == piece.owner else at
    return steps.done()


def reducescatter(
    me: int, counts: Sequence[int], itemsize: int, machines: Sequence[int] = ()
) -> Schedule:
    """Plan the sum of each member's block, of counts[member] bytes, of every INPUT.

    One round of n - 1 messages, M - counts[me] bytes. With machines: two rounds, a block crosses
    the network once per other machine. Floor: (M - the least count) / B.
    """
    steps, topology = _Steps(me, len(counts)), _topology(len(counts), machines)
    for piece in _in_turn(topology.blocks(counts, itemsize), steps):
        to = _At(Place.OUTPUT, piece.start) if me == piece.owner else None
        steps.collect(topology.role(me, piece), piece, to)
    return steps.done()


def allreduce(
    me: int, n: int, nbytes: int, itemsize: int, machines: Sequence[int] = ()
) -> Schedule:
    """Plan the sum of every INPUT on all members; OUTPUT may be the same memory.

    Each owns an n-th of the sum, in pieces of PIECE_BYTES at most: two rounds, for every piece of
    its own n - 1 messages and one for each other, 2 M (n - 1) / n bytes. With machines: four
    rounds, 2 M (m - 1) / m bytes out of each machine. Up to SMALL_BYTES everybody sends INPUT to
    all and sums itself: one round of n - 1 messages, or, with more than DIRECT_MEMBERS, Bruck's
    ceil(log2 n) of one; (n - 1) M bytes. Floor: 2 M (n - 1) / (n B). Between machines shares are
    of SUM_PIPELINE pieces or more: what is left of the last ones, when all sums are made, costs
    time. Sums leave SUM_LAG pieces later, so that what others have to sum goes first: four hosts
    with links of 200 Mbit/s take 1.08 to 1.10 of the floor for 16 MiB, else 1.11 to 1.14.
    """
    steps, topology = _Steps(me, n), _topology(n, machines)
    if nbytes <= SMALL_BYTES:
        steps.sum_at_once(topology, _exchanged(steps, nbytes), nbytes)
        return steps.done()
    is_far, totals = len(set(machines)) > 1, dict[int, _At]()
    laps = _laps(nbytes, topology.width, SUM_PIPELINE) if is_far else 1
    pieces = _in_turn(topology.shares(nbytes, itemsize, laps), steps)
    for piece, is_summed in _behind(pieces, SUM_LAG if is_far else 0):
        role, to = topology.role(me, piece), _At(Place.OUTPUT, piece.offset)
        if is_summed:
            steps.spread(role, piece, totals.pop(piece.label))
        else:
            total = steps.collect(role, piece, to)
            totals[piece.label] = total if me == piece.owner else to
    return steps.done()


def reduce(
    me: int, n: int, nbytes: int, itemsize: int, root: int, machines: Sequence[int] = ()
) -> Schedule:
    """Plan the sum of every INPUT on the root; OUTPUT is the root's alone, maybe its INPUT.

    The others own the sum, in pieces of PIECE_BYTES at most, and send it to the root: two rounds,
    for every piece a message to its owner or the root, M bytes. With machines: three rounds, M
    bytes into and out of each machine; two machines or one: the members of the root's own the
    sum, and M bytes come in. Shares of SUM_PIPELINE pieces between machines, as in allreduce().
    If the root is on the first machine or the last of three or more, and SUM_PIPELINE pieces for
    each are long enough, what is summed goes from machine to machine in a chain: as many rounds
    as machines, but each link has one stream to carry. Four hosts with links of 200 Mbit/s take
    1.03 to 1.04 M / B for 16 MiB, and by owners 1.20. Not so elements of less than 4 bytes:
    floats among them would be rounded by each machine. Up to SMALL_BYTES all send to the root:
    one message. Floor: M / B.
    """
    steps, topology = _Steps(me, n), _topology(n, machines)
    if nbytes <= SMALL_BYTES:
        here = _At(Place.INPUT, 0)
        if me != root:
            steps.send(root, 0, here, nbytes)
        else:
            steps.sum_at_once(topology, steps.parts(range(n), here), nbytes)
        return steps.done()
    ends = topology.machines[0], topology.machines[-1]
    is_far, n_pieces = len(set(machines)) > 1, SUM_PIPELINE * len(topology.machines)
    is_long = nbytes >= n_pieces * MIN_PIECE_BYTES and itemsize >= CHAINED_BYTES
    if is_far and is_long and topology.home[root] in ends and len(topology.machines) > 2:
        steps.sum_along(topology, topology.shares(nbytes, itemsize, SUM_PIPELINE), root)
        return steps.done()
    near, far = topology.parted(root)
    owners = far if len(far.machines) > 1 else near
    laps = _laps(nbytes, owners.width, SUM_PIPELINE) if is_far else 1
    for piece in _in_turn(owners.shares(nbytes, itemsize, laps), steps):
        to = _At(Place.OUTPUT, piece.offset) if me == root else None
        total = steps.collect(topology.role(me, piece), piece, to)
        if me == piece.owner != root:
            steps.send(root, piece.label, total, piece.nbytes)
        elif to and piece.owner != root:
            steps.receive(piece.owner, piece.label, to, piece.nbytes)
    return steps.done()


def broadcast(me: int, n: int, nbytes: int, root: int, machines: Sequence[int] = ()) -> Schedule:
    """Plan the copy of the root's INPUT to every OUTPUT but the root's.

    The root sends every piece to one other, PIPELINE pieces or more to each, who passes it on to
    the rest: two rounds, no more than M bytes out of anybody. With machines: three rounds, M
    bytes into and no more out of each machine; the root's machine has them from the root.
    Between machines, if PIPELINE pieces for each are no shorter than MIN_PIECE_BYTES, pieces go
    from machine to machine in a chain: as many rounds as machines, but each link has one stream
    to carry. Four hosts with links of 200 Mbit/s take 1.03 M / B for 16 MiB until the last has
    all, and with passing on 1.07 to 1.10.
    Up to MIN_PIECE_BYTES: one round from the root, n - 1 messages, or, with more than
    DIRECT_MEMBERS, a binomial tree, ceil(log2 n) messages at most. Floor: M / B.
    """
    steps, topology = _Steps(me, n), _topology(n, machines)
    place = Place.INPUT if me == root else Place.OUTPUT
    near, far = topology.parted(root)
    is_small = nbytes <= MIN_PIECE_BYTES
    is_direct = is_small or far.width < 2 or len(set(machines)) == 1
    n_chain = PIPELINE * len(far.machines)
    is_chain = len(far.machines) > 1 < len(set(machines)) and nbytes >= n_chain * MIN_PIECE_BYTES
    laps = -(-n_chain // far.width) if is_chain else _laps(nbytes, far.width, PIPELINE)
    for piece in _wholes(nbytes, root) if is_direct else far.shares(nbytes, laps=laps):
        if is_small and n > DIRECT_MEMBERS:
            role = _binomial(me, n, root)
        elif is_direct:
            role = topology.role(me, piece)
        elif is_chain:
            role = _chain(me, root, piece, near, far)
        else:
            role = _passing_on(me, root, piece, near, far)
        steps.spread(role, piece, _At(place, piece.offset))
    return steps.done()


def gather(me: int, counts: Sequence[int], root: int, *, is_confirmed: bool = False) -> Schedule:
    """Plan the copy of every INPUT, of counts[member] bytes, to the root, concatenated in OUTPUT.

    One message, counts[me] bytes. Floor: (M - counts[root]) / B, the root's way in. is_confirmed:
    nobody is through before the root has everything; it tells each other member by one byte.
    """
    mine = [counts[me] if who == root else 0 for who in range(len(counts))]
    moves = alltoall(me, mine, counts if me == root else [0] * len(counts)).steps
    if not is_confirmed:
        return Schedule(moves, 0)
    everything = tuple(range(len(moves)))
    if me != root:
        return Schedule((*moves, Step(Kind.RECEIVE, root, CONFIRMED, Place.SCRATCH, 0, 1)), 1)
    others = [who for who in range(len(counts)) if who != root]
    words = [
        Step(Kind.SEND, who, CONFIRMED, Place.SCRATCH, 0, 1, after=everything) for who in others
    ]
    return Schedule((*moves, *words), 1)


def scatter(me: int, counts: Sequence[int], root: int) -> Schedule:
    """Plan the copy of each member's block, of counts[member] bytes, of the root's INPUT.

    n - 1 messages of the root, M - counts[root] bytes. Floor: those / B, the root's way out.
    """
    mine = [counts[me] if who == root else 0 for who in range(len(counts))]
    return alltoall(me, counts if me == root else [0] * len(counts), mine)


def alltoall(
    me: int,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    machines: Sequence[int] = (),
) -> Schedule:
    """Return every member its block of everybody's INPUT, in OUTPUT by sender; counts in bytes.

    One round of n - 1 messages, what is sent to others; whatever the size, since who passed
    blocks on would have to know the counts of others. Floor: the most sent or received / B.
    Between machines a block of ALONE_BYTES or more is asked for when the one before it is there:
    streams that share links do not end together, and then some are idle. Four hosts with links of
    200 Mbit/s take 1.03 to 1.11 of the floor for blocks of 16 MiB, and 1.13 to 1.19 without.
    """
    steps = _Steps(me, len(send_counts))
    reads, writes = _starts(send_counts), _starts(receive_counts)
    is_far = len(set(machines)) > 1
    came = _At(Place.OUTPUT, 0)
    for peer in reversed(steps.others()):
        for label, (start, size) in enumerate(_messages(receive_counts[peer])):
            after = came.after if is_far and size >= ALONE_BYTES else ()
            came = steps.receive(peer, label, _At(Place.OUTPUT, writes[peer] + start, after), size)
    for peer in steps.others():
        for label, (start, size) in enumerate(_messages(send_counts[peer])):
            steps.send(peer, label, _At(Place.INPUT, reads[peer] + start), size)
    for start, size in _messages(send_counts[me]):
        here, to = _At(Place.INPUT, reads[me] + start), _At(Place.OUTPUT, writes[me] + start)
        steps.copy(here, to, size)
    return steps.done()


def barrier(me: int, n: int) -> Schedule:
    """End when everybody has begun; messages of one byte.

    One round of n - 1 messages; with more than DIRECT_MEMBERS, ceil(log2 n) rounds of one to the
    member 1, 2, 4, ... places on (Hensgen, Finkel and Manber, 1988). Floor: one message's time.
    """
    steps = _Steps(me, n)
    at = steps.room(1)
    for label, distance in enumerate(_distances(n)):
        steps.send((me + distance) % n, label, at, 1)
        came = steps.receive((me - distance) % n, label, steps.room(1), 1)
        if n > DIRECT_MEMBERS:
            at = at._replace(after=(*at.after, *came.after))
    return steps.done()


# ---- parts of an array and their ways ----
class _At(NamedTuple):
    """Bytes in an array of ours, and the steps that put them there; or a message of a peer."""

    place: Place
    offset: int
    after: tuple[int, ...] = ()
    peer: int | None = None


class _Piece(NamedTuple):
    """Bytes that take one way: at offset of the whole array, at start of their block."""

    label: int
    turn: int  # chooses the agents
    lap: int  # the pieces of one lap have different owners
    owner: int
    offset: int
    start: int
    nbytes: int


class _Role(NamedTuple):
    """A member's place in the tree of a piece; those that it sums for include itself."""

    parent: int | None  # the owner has none
    inside: tuple[int, ...]  # of its machine, if it is the agent there
    between: tuple[int, ...]  # the agents in machine order, if it is the owner


class _Topology:
    """Members by machine, machines in the order of their first members."""

    def __init__(self, machines: Iterable[tuple[int, ...]]) -> None:
        self.machines = tuple(machines)
        self.home = {member: there for there in self.machines for member in there}
        self.width = len(self.machines) * max(map(len, self.machines), default=0)

    def parted(self, member: int) -> tuple[_Topology, _Topology]:
        """Return the machine of a member, and the others."""
        near = self.home[member]
        return _Topology([near]), _Topology(one for one in self.machines if one is not near)

    def agent(self, machine: tuple[int, ...], piece: _Piece) -> int:
        return piece.owner if piece.owner in machine else machine[piece.turn % len(machine)]

    def role(self, me: int, piece: _Piece) -> _Role:
        """Place a member: others of a machine below its agent, agents below the owner."""
        agent = self.agent(self.home[me], piece)
        if me != agent:
            return _Role(agent, (me,), (me,))
        if me != piece.owner:
            return _Role(piece.owner, self.home[me], (me,))
        return _Role(None, self.home[me], tuple(self.agent(one, piece) for one in self.machines))

    def shares(self, nbytes: int, itemsize: int = 1, laps: int = 1) -> list[_Piece]:
        """Cut evenly into pieces of at most PIECE_BYTES for all machines, and all on each."""
        laps = max(laps, -(-nbytes // (self.width * PIECE_BYTES)))
        pieces = []
        for k, (offset, size) in enumerate(_cut(nbytes, laps * self.width, itemsize)):
            turn, machine = divmod(k, len(self.machines))
            owner = self.machines[machine][turn % len(self.machines[machine])]
            pieces.append(_Piece(k, turn, k // self.width, owner, offset, offset, size))
        return pieces

    def blocks(self, counts: Sequence[int], itemsize: int = 1) -> list[_Piece]:
        """Cut what belongs to each member; into pieces where it is passed on."""
        is_passed_on = 1 < len(self.machines) < len(self.home)
        limit = PIECE_BYTES if is_passed_on else MAX_MESSAGE_BYTES
        cuts = [
            (lap, owner, first + start, start, size)
            for owner, (first, count) in enumerate(zip(_starts(counts), counts, strict=False))
            for lap, (start, size) in enumerate(_cut(count, -(-count // limit), itemsize))
        ]
        return [_Piece(k, k, *cut) for k, cut in enumerate(cuts)]


def _topology(n: int, machines: Sequence[int]) -> _Topology:
    """Sort members by machine; on a single one, as on unknown ones, all are alike."""
    members: dict[int, tuple[int, ...]] = {}
    for member, machine in enumerate(machines if len(set(machines)) > 1 else range(n)):
        members[machine] = (*members.get(machine, ()), member)
    return _Topology(members.values())


def _laps(nbytes: int, width: int, most: int) -> int:
    """Choose how many pieces each of `width` members gets of what is passed on."""
    return min(most, nbytes // max(width * MIN_PIECE_BYTES, 1))


def _cut(nbytes: int, parts: int, itemsize: int = 1) -> list[tuple[int, int]]:
    """Cut into at most `parts` even (offset, nbytes), between cache lines and elements."""
    grain = math.lcm(ALIGNMENT, itemsize)
    step = max(-(-nbytes // (max(parts, 1) * grain)), 1) * grain
    return [(offset, min(step, nbytes - offset)) for offset in range(0, nbytes, step)]


def _messages(nbytes: int) -> list[tuple[int, int]]:
    return _cut(nbytes, -(-nbytes // MAX_MESSAGE_BYTES))


def _wholes(nbytes: int, owner: int) -> list[_Piece]:
    cuts = enumerate(_messages(nbytes))
    return [_Piece(k, 0, 0, owner, offset, offset, size) for k, (offset, size) in cuts]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _distances(n: int) -> list[int]:
    """Return how far on to send, once each: to all others, or so that all hear in few rounds."""
    if n <= DIRECT_MEMBERS:
        return list(range(1, n))
    return [1 << bit for bit in range((n - 1).bit_length())]


def _in_turn(pieces: list[_Piece], steps: _Steps) -> list[_Piece]:
    """Sort so that members begin with different owners, each with the one after itself."""
    return sorted(pieces, key=lambda one: (one.lap, (one.owner - steps.me - 1) % steps.n))


def _behind(pieces: list[_Piece], lag: int) -> Iterator[tuple[_Piece, bool]]:
    """Yield each piece as one to sum, and, so many laps later, True: as one that is summed."""
    summed: deque[_Piece] = deque()
    for piece in pieces:
        yield piece, False
        summed.append(piece)
        while summed and summed[0].lap + lag <= piece.lap:
            yield summed.popleft(), True
    for one in summed:
        yield one, True


def _binomial(me: int, n: int, root: int) -> _Role:
    """Place a member in a tree in which who has the bytes doubles with every message."""
    place = (me - root) % n
    lowest = place & -place or n
    below = [place + (1 << bit) for bit in range((lowest - 1).bit_length())]
    children = tuple((root + one) % n for one in below if one < n)
    return _Role((me - lowest) % n if place else None, (), children)


def _passing_on(me: int, root: int, piece: _Piece, near: _Topology, far: _Topology) -> _Role:
    """Place a member: the root gives to its machine and to the owner, who gives to the rest."""
    if me == root:
        return _Role(None, near.home[root], (piece.owner,))
    if me in near.home:
        return _Role(root, (me,), (me,))
    role = far.role(me, piece)
    return role._replace(parent=root) if me == piece.owner else role


def _chain(me: int, root: int, piece: _Piece, near: _Topology, far: _Topology) -> _Role:
    """Place a member: the root gives to its machine and the next, whose agent to the one after."""
    if me in near.home:
        below = (far.agent(far.machines[0], piece),) if me == root else ()
        return _Role(None if me == root else root, near.home[root] if below else (), below)
    agents = [root, *(far.agent(there, piece) for there in far.machines)]
    place = far.machines.index(far.home[me]) + 1
    if me != agents[place]:
        return _Role(agents[place], (), ())
    return _Role(agents[place - 1], far.home[me], tuple(agents[place + 1 : place + 2]))


# ---- the steps of one member ----
class _Steps:
    """The steps of one member of n while they are written down."""

    def __init__(self, me: int, n: int) -> None:
        self.me, self.n = me, n
        self._steps: list[Step] = []
        self._scratch_bytes = 0

    def done(self) -> Schedule:
        return Schedule(tuple(self._steps), self._scratch_bytes)

    def others(self) -> list[int]:
        """List the other members from the next on, so that not all send to one at once."""
        return [(self.me + distance) % self.n for distance in range(1, self.n)]

    def room(self, nbytes: int) -> _At:
        """Take scratch, from a cache line on."""
        start = -(-self._scratch_bytes // ALIGNMENT) * ALIGNMENT
        self._scratch_bytes = start + nbytes
        return _At(Place.SCRATCH, start)

    def send(self, peer: int, label: int, at: _At, nbytes: int) -> _At:
        return self._add(Step(Kind.SEND, peer, label, at.place, at.offset, nbytes, at.after))

    def receive(self, peer: int, label: int, to: _At, nbytes: int) -> _At:
        return self._add(Step(Kind.RECEIVE, peer, label, to.place, to.offset, nbytes, to.after))

    def copy(self, at: _At, to: _At, nbytes: int) -> _At:
        """Copy bytes, unless they are there."""
        if at[:2] == to[:2]:
            return at
        sources = (Source(self.me, 0, at.place, at.offset),)
        step = Step(Kind.COPY, self.me, 0, to.place, to.offset, nbytes, at.after, sources)
        return self._add(step)

    def parts(self, members: Iterable[int], at: _At) -> list[_At]:
        """List what members contribute: ours lies at a place, the others' arrive."""
        arriving = _At(Place.SCRATCH, 0)
        return [at if who == self.me else arriving._replace(peer=who) for who in members]

    def fold(
        self, label: int, parts: Sequence[_At], nbytes: int, to: _At | None, *, is_final: bool
    ) -> _At:
        """Sum parts in their order; one alone stays where it is, unless the sum is final."""
        if len(parts) == 1 and not is_final:
            return parts[0]
        to = to or self.room(nbytes)
        after = tuple(sorted({step for one in (*parts, to) for step in one.after}))
        sources = tuple(
            Source(self.me if part.peer is None else part.peer, label, part.place, part.offset)
            for part in parts
        )
        return self._add(
            Step(Kind.FOLD, self.me, label, *to[:2], nbytes, after, sources, is_final)
        )

    def _add(self, step: Step) -> _At:
        if step.nbytes == 0:
            return _At(step.place, step.offset)
        self._steps.append(step)
        return _At(step.place, step.offset, (len(self._steps) - 1,))

    def collect(self, role: _Role, piece: _Piece, to: _At | None) -> _At:
        """Sum a piece of INPUT up its tree, as far as it is ours, and send that to the parent."""
        label, nbytes, at = piece.label, piece.nbytes, _At(Place.INPUT, piece.offset)
        at = self.fold(label, self.parts(role.inside, at), nbytes, to, is_final=False)
        if role.parent is None:
            return self.fold(label, self.parts(role.between, at), nbytes, to, is_final=True)
        self.send(role.parent, label, at, nbytes)
        return at

    def spread(self, role: _Role, piece: _Piece, at: _At) -> _At:
        """Have a piece from the parent, and pass it down: first to who has most below it."""
        if role.parent is not None:
            at = self.receive(role.parent, piece.label, at, piece.nbytes)
        for members in (role.between, role.inside):
            for who in sorted(members, key=lambda one: (self.me - one) % self.n):
                if who != self.me:
                    self.send(who, piece.label, at, piece.nbytes)
        return at

    def sum_along(self, topology: _Topology, pieces: Sequence[_Piece], root: int) -> None:
        """Add our machine's sum of each piece to that of those before, and send it to the next."""
        home, spare = topology.home[self.me], deque[_At]()
        place, last = topology.machines.index(home), len(topology.machines) - 1
        for piece in pieces:
            agents = [
                root if root in there else topology.agent(there, piece)
                for there in topology.machines
            ]
            label, nbytes, out = piece.label, piece.nbytes, _At(Place.OUTPUT, piece.offset)
            parts = self.parts(home, _At(Place.INPUT, piece.offset))
            target = (*agents[place + 1 :], root)[0]
            if self.me != agents[place]:
                self.send(agents[place], label, parts[home.index(self.me)], nbytes)
                continue
            to = out if target == self.me else None
            if len(spare) == CHAINED_PIECES:
                to = spare.popleft()
            at = self.fold(label, parts, nbytes, to, is_final=False)
            if place:
                before = _At(Place.SCRATCH, 0, peer=agents[place - 1])
                to = to or (at if at.place is Place.SCRATCH else None)
                at = self.fold(label, [before, at], nbytes, to, is_final=place == last)
            if target != self.me:
                sent = self.send(target, label, at, nbytes)
                spare.extend([sent] * (at.place is Place.SCRATCH))
            if self.me == root and place != last:
                self.receive(agents[last], label, out, nbytes)

    def bruck(self, counts: Sequence[int]) -> _At:
        """Gather all INPUTs in scratch, ours first, then those of the members after us.

        Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
        communications in multiport message-passing systems", 1997: with every message what is
        held at most doubles.
        """
        starts = _starts([counts[who] for who in (self.me, *self.others())])
        at = self.copy(_At(Place.INPUT, 0), self.room(starts[-1]), counts[self.me])
        for label, held in enumerate(_distances(self.n)):
            n_taken = min(held, self.n - held)
            self.send((self.me - held) % self.n, label, at, starts[n_taken])
            to = _At(Place.SCRATCH, at.offset + starts[held])
            nbytes = starts[held + n_taken] - starts[held]
            came = self.receive((self.me + held) % self.n, label, to, nbytes)
            at = at._replace(after=(*at.after, *came.after))
        return at

    def sum_at_once(self, topology: _Topology, parts: Sequence[_At], nbytes: int) -> None:
        """Sum what everybody sends us in one message, in the order of every sum."""
        machines = [[parts[who] for who in there] for there in topology.machines]
        sums = [self.fold(0, there, nbytes, None, is_final=False) for there in machines]
        self.fold(0, sums, nbytes, _At(Place.OUTPUT, 0), is_final=True)


def _gather_by_bruck(steps: _Steps, counts: Sequence[int]) -> Schedule:
    at, starts = steps.bruck(counts), _starts(counts)
    first = starts[-1] - starts[steps.me]
    steps.copy(at, _At(Place.OUTPUT, starts[steps.me]), first)
    steps.copy(at._replace(offset=at.offset + first), _At(Place.OUTPUT, 0), starts[steps.me])
    return steps.done()


def _exchanged(steps: _Steps, nbytes: int) -> list[_At]:
    """Send INPUT to all and give where everybody's is, none where it is written over."""
    if steps.n > DIRECT_MEMBERS:
        at = steps.bruck([nbytes] * steps.n)
        places = [(who - steps.me) % steps.n for who in range(steps.n)]
        return [at._replace(offset=at.offset + place * nbytes) for place in places]
    here = steps.copy(_At(Place.INPUT, 0), steps.room(nbytes), nbytes)
    for peer in steps.others():
        steps.send(peer, 0, here, nbytes)
    return steps.parts(range(steps.n), here)
