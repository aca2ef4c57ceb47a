# SPDX-License-Identifier: Apache-2.0
"""Messages, bytes and rounds of operations are those that their docstrings say."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from schedule_simulator import Simulator

from fastps.collectives import schedule
from fastps.collectives.schedule import Kind, Place, Schedule, Source, Step

PIECE = 1024  # bytes; the arrays here have several pieces for everybody
LIMITS = {
    "PIECE_BYTES": PIECE, "MIN_PIECE_BYTES": 128, "SMALL_BYTES": 64, "PIPELINE": 4,
    "SUM_PIPELINE": 4,
}  # fmt: skip
LAYOUTS = [(0, 0, 1, 1), (0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2), (3, 3, 3, 1, 1, 1)]


@pytest.fixture(autouse=True)
def limits(monkeypatch) -> None:
    """Let pieces be short."""
    for name, value in LIMITS.items():
        monkeypatch.setattr(schedule, name, value)


def ran(make: Callable[[int], Schedule], n: int) -> Simulator:
    """Run what members make, in arrays that are large enough."""
    schedules = [make(me) for me in range(n)]
    arrays = [[np.zeros(n * 8 * PIECE, np.uint8) for _ in range(n)] for _ in range(2)]
    simulator = Simulator(schedules, *arrays)
    simulator.run()
    return simulator


def numbers(count: Callable[[int], int], n: int) -> list[int]:
    """List a figure of every member."""
    return [count(me) for me in range(n)]


@pytest.mark.parametrize("n", range(2, 8))
def test_large_operations_on_single_machines(n):
    size, counts = 2 * n * PIECE, [PIECE + 64 * me for me in range(n)]
    total = sum(counts)

    gathered = ran(lambda me: schedule.allgather(me, counts), n)
    assert gathered.rounds == 1
    assert numbers(gathered.messages, n) == [n - 1] * n
    assert numbers(gathered.sent_bytes, n) == [(n - 1) * count for count in counts]

    scattered = ran(lambda me: schedule.reducescatter(me, counts, 4), n)
    assert scattered.rounds == 1
    assert numbers(scattered.messages, n) == [n - 1] * n
    assert numbers(scattered.sent_bytes, n) == [total - count for count in counts]

    reduced = ran(lambda me: schedule.allreduce(me, n, size, 4), n)
    assert reduced.rounds == 2
    assert numbers(reduced.messages, n) == [4 * (n - 1)] * n
    assert numbers(reduced.sent_bytes, n) == [2 * size * (n - 1) // n] * n
    assert all(step.nbytes <= PIECE for one in reduced.members for step in one.schedule.steps)

    exchanged = ran(lambda me: schedule.alltoall(me, [counts[me]] * n, counts), n)
    assert exchanged.rounds == 1
    assert numbers(exchanged.messages, n) == [n - 1] * n


@pytest.mark.parametrize("place", range(3))
def test_sums_on_one_machine_have_no_more_pieces_than_sums_anywhere(place):
    large = 60 * PIECE
    for machines in ((0, 0, 0), (5, 5, 5)):
        assert schedule.allreduce(place, 3, large, 4, machines) == schedule.allreduce(
            place, 3, large, 4
        )
        assert schedule.reduce(place, 3, large, 4, 1, machines) == schedule.reduce(
            place, 3, large, 4, 1
        )


@pytest.mark.parametrize("n", range(2, 8))
@pytest.mark.parametrize("root", [0, 1])
def test_large_operations_with_a_root_on_single_machines(n, root):
    counts, size = [PIECE + 64 * me for me in range(n)], 4 * (n - 1) * PIECE

    summed = ran(lambda me: schedule.reduce(me, n, size, 4, root), n)
    assert summed.rounds == min(n - 1, 2)
    assert summed.received_bytes(root) == size
    assert all(one == size for me, one in enumerate(numbers(summed.sent_bytes, n)) if me != root)
    assert summed.sent_bytes(root) == (size if n > 2 else 0)
    whole = ran(lambda me: schedule.reduce(me, n, (n - 1) * PIECE, 4, root), n)  # not cut
    assert all(one == n - 1 for me, one in enumerate(numbers(whole.messages, n)) if me != root)

    spread = ran(lambda me: schedule.broadcast(me, n, size, root), n)
    assert spread.rounds == min(n - 1, 2)
    assert spread.sent_bytes(root) == size
    assert max(numbers(spread.sent_bytes, n)) == size
    assert all(
        one == size for me, one in enumerate(numbers(spread.received_bytes, n)) if me != root
    )
    if n > 2:
        assert spread.messages(root) == LIMITS["PIPELINE"] * (n - 1)

    gathered = ran(lambda me: schedule.gather(me, counts, root), n)
    scattered = ran(lambda me: schedule.scatter(me, counts, root), n)
    assert gathered.rounds == scattered.rounds == 1
    assert numbers(gathered.messages, n) == [int(me != root) for me in range(n)]
    assert (
        gathered.received_bytes(root) == scattered.sent_bytes(root) == sum(counts) - counts[root]
    )
    assert scattered.messages(root) == n - 1


@pytest.mark.parametrize("machines", LAYOUTS)
def test_bytes_cross_the_network_once_per_machine(machines):
    n, m = len(machines), len(set(machines))
    counts = [4 * PIECE] * n
    of_machine = {one: 4 * PIECE * machines.count(one) for one in machines}
    total = sum(counts)

    gathered = ran(lambda me: schedule.allgather(me, counts, machines), n)
    out, into = gathered.crossing(machines)
    assert gathered.rounds == 2
    assert out == {one: (m - 1) * nbytes for one, nbytes in of_machine.items()}
    assert into == {one: total - nbytes for one, nbytes in of_machine.items()}

    scattered = ran(lambda me: schedule.reducescatter(me, counts, 4, machines), n)
    out, into = scattered.crossing(machines)
    assert scattered.rounds == 2
    assert out == {one: total - nbytes for one, nbytes in of_machine.items()}
    assert into == {one: (m - 1) * nbytes for one, nbytes in of_machine.items()}

    reduced = ran(lambda me: schedule.allreduce(me, n, total, 4, machines), n)
    out, into = reduced.crossing(machines)
    assert reduced.rounds == 4
    assert out == into == dict.fromkeys(of_machine, 2 * total * (m - 1) // m)


@pytest.mark.parametrize("machines", LAYOUTS)
@pytest.mark.parametrize("root", [0, 3])
def test_a_roots_bytes_cross_the_network_once_per_machine(machines, root):
    n, m = len(machines), len(set(machines))
    size, home = 12 * PIECE, machines[root]
    others = set(machines) - {home}

    summed = ran(lambda me: schedule.reduce(me, n, size, 2, root, machines), n)
    out, into = summed.crossing(machines)
    assert summed.rounds == 3
    assert into[home] == size
    assert out[home] == (size if m > 2 else 0)
    assert all(out[one] == size and into[one] in (0, size) for one in others)

    spread = ran(lambda me: schedule.broadcast(me, n, size, root, machines), n)
    out, into = spread.crossing(machines)
    assert spread.rounds == min(m, 3)
    assert out[home] == size
    assert into == dict.fromkeys(others, size)
    assert max(out.values()) == size


@pytest.mark.parametrize("machines", [tuple(range(5)), (0, 0, 1, 1, 2, 2), (2, 0, 1, 0, 3, 2)])
@pytest.mark.parametrize("root", [0, -1])
def test_a_large_sum_goes_from_machine_to_machine(machines, root, monkeypatch):
    """Each machine gets what those before it have summed, and the root, if it is first, all."""
    monkeypatch.setattr(schedule, "SUM_PIPELINE", 16)
    n, m = len(machines), len(set(machines))
    at, size = root % n if root else 0, LIMITS["MIN_PIECE_BYTES"] * 16 * m
    summed = ran(lambda me: schedule.reduce(me, n, size, 4, at, machines), n)
    out, into = summed.crossing(machines)
    is_alone, is_first = m == n, machines[at] == machines[0]
    assert summed.rounds == m - (not is_first) + (not is_alone)
    assert sum(out.values()) == sum(into.values()) == size * (m - (not is_first))
    assert max(out.values()) == max(into.values()) == into[machines[at]] == size
    pieces = summed.messages(1 if is_alone else n - 2)
    assert 15 * m <= pieces
    for member in summed.members:
        assert member.schedule.scratch_bytes <= schedule.CHAINED_PIECES * size // (16 * m) + 64


@pytest.mark.parametrize("machines", [tuple(range(5)), (0, 0, 1, 1, 2, 2), (2, 0, 1, 0, 3, 0)])
@pytest.mark.parametrize("root", [0, 3])
def test_what_is_large_goes_from_machine_to_machine(machines, root):
    """Every machine gets it once and, but for the last, gives it on once."""
    n, m = len(machines), len(set(machines))
    size = LIMITS["MIN_PIECE_BYTES"] * LIMITS["PIPELINE"] * (m - 1)
    spread = ran(lambda me: schedule.broadcast(me, n, size, root, machines), n)
    out, into = spread.crossing(machines)
    assert into == dict.fromkeys(set(machines) - {machines[root]}, size)
    assert sorted(out.values()) == [size] * (m - 1) or sorted(out.values())[0] == 0
    assert sum(out.values()) == size * (m - 1)
    assert max(out.values()) == size
    assert m - 1 <= spread.rounds <= m


@pytest.mark.parametrize("machines", [machines for machines in LAYOUTS if len(machines) == 6])
def test_all_members_of_a_machine_work_alike(machines):
    n = len(machines)
    reduced = ran(lambda me: schedule.allreduce(me, n, 12 * PIECE, 4, machines), n)
    folds = [sum(step.kind is Kind.FOLD for step in one.schedule.steps) for one in reduced.members]
    assert len(set(folds)) == 1
    gathered = ran(lambda me: schedule.allgather(me, [6 * PIECE] * n, machines), n)
    sent = numbers(gathered.sent_bytes, n)
    assert max(sent) - min(sent) <= 2 * PIECE * n


@pytest.mark.parametrize("n", [2, 3, 8, 9, 16, 17, 33])
def test_small_operations(n):
    rounds = 1 if n <= schedule.DIRECT_MEMBERS else math.ceil(math.log2(n))
    messages = n - 1 if rounds == 1 else rounds
    sum_everywhere = ran(lambda me: schedule.allreduce(me, n, 64, 4), n)
    everything = ran(lambda me: schedule.allgather(me, [64] * n), n)
    for done in (sum_everywhere, everything):
        assert done.rounds == rounds
        assert numbers(done.messages, n) == [messages] * n
        assert numbers(done.sent_bytes, n) == [(n - 1) * 64] * n

    met = ran(lambda me: schedule.barrier(me, n), n)
    assert met.rounds == rounds
    assert numbers(met.messages, n) == [messages] * n

    root = n - 1
    at_root = ran(lambda me: schedule.reduce(me, n, 64, 4, root), n)
    assert numbers(at_root.messages, n) == [int(me != root) for me in range(n)]
    from_root = ran(lambda me: schedule.broadcast(me, n, 128, root), n)
    assert from_root.rounds == (1 if rounds == 1 else int(math.log2(n)))
    assert from_root.messages(root) == messages
    assert sum(numbers(from_root.messages, n)) == n - 1


@pytest.mark.parametrize("n", [2, 3, 8, 9, 13])
def test_a_barrier_ends_when_all_have_begun(n):
    for late in range(n):
        empty = [np.empty(0, np.uint8)] * n
        simulator = Simulator([schedule.barrier(me, n) for me in range(n)], empty, empty)
        simulator.go(without=late)
        for member in simulator.members:
            assert len(member.done) < len(member.schedule.steps)
        simulator.run()


@pytest.mark.parametrize(
    "make",
    [
        lambda me: schedule.allgather(me, [PIECE] * 5),
        lambda me: schedule.alltoall(me, [PIECE] * 5, [PIECE] * 5),
        lambda me: schedule.reducescatter(me, [PIECE] * 5, 4),
        lambda me: schedule.allreduce(me, 5, 5 * PIECE, 4),
        lambda me: schedule.allreduce(me, 5, 64, 4),
    ],
    ids=["allgather", "alltoall", "reducescatter", "allreduce", "small allreduce"],
)
def test_nobody_is_sent_to_by_all_at_once(make):
    peers = [[step.peer for step in make(me).steps if step.kind is Kind.SEND] for me in range(5)]
    for turn in zip(*peers, strict=True):
        assert len(set(turn)) == 5


@pytest.mark.parametrize("machines", [(), (0, 0, 1), (0, 1, 2)])
def test_gigabytes_are_cut_into_messages(machines, monkeypatch):
    monkeypatch.undo()
    n, size = 3, 5 << 30
    for made in (
        schedule.allgather(0, [size] * n, machines),
        schedule.reducescatter(0, [size] * n, 8, machines),
        schedule.alltoall(0, [size] * n, [size] * n),
        schedule.gather(0, [size] * n, 0),
        schedule.scatter(0, [size] * n, 0),
        schedule.broadcast(0, n, size, 0, machines),
        schedule.broadcast(0, n, size, 0, (0, 0, 0)),
        schedule.allreduce(0, n, size, 8, machines),
        schedule.reduce(0, n, size, 8, 1, machines),
    ):
        assert max(step.nbytes for step in made.steps) <= schedule.MAX_MESSAGE_BYTES
        assert all(step.offset % 64 == 0 for step in made.steps)


# ---- the simulator finds what it looks for ----
def pair(first: Sequence[Step], second: Sequence[Step]) -> Simulator:
    """Let two members run steps, each in one array that is everything to it."""
    arrays = [np.zeros(16, np.uint8) for _ in range(2)]
    return Simulator([Schedule(tuple(first), 0), Schedule(tuple(second), 0)], arrays, arrays)


SEND = Step(Kind.SEND, 1, 0, Place.INPUT, 0, 8)
RECEIVE = Step(Kind.RECEIVE, 0, 0, Place.OUTPUT, 0, 8)


def test_messages_without_a_partner_are_found():
    with pytest.raises(AssertionError, match="without a partner"):
        pair([SEND], [])
    with pytest.raises(KeyError):
        pair([], [RECEIVE])
    with pytest.raises(AssertionError):
        pair([SEND], [Step(Kind.RECEIVE, 0, 0, Place.OUTPUT, 0, 7)])
    with pytest.raises(AssertionError, match="two messages"):
        pair([SEND, SEND], [RECEIVE])


def test_a_deadlock_is_found():
    steps = [
        [
            Step(Kind.RECEIVE, 1 - me, 0, Place.OUTPUT, 0, 8),
            Step(Kind.SEND, 1 - me, 0, Place.INPUT, 8, 8, (0,)),
        ]
        for me in range(2)
    ]
    with pytest.raises(AssertionError, match="stuck"):
        pair(*steps).run()


def test_writing_over_what_is_still_sent_is_found():
    copy = Step(Kind.COPY, 0, 0, Place.OUTPUT, 0, 8, (), (Source(0, 0, Place.INPUT, 8),))
    simulators = [pair([SEND, copy], [RECEIVE]) for _ in range(50)]
    for seed, simulator in enumerate(simulators):
        simulator.random.seed(seed)
    with pytest.raises(AssertionError, match="still uses"):
        deque(map(Simulator.run, simulators), maxlen=0)
