# SPDX-License-Identifier: Apache-2.0
"""What the workers of soak_large.py do."""

from __future__ import annotations

import numpy as np

import fastps
from fastps.collectives.group import Group
from fastps.session import current

PIECE = 1 << 26  # elements looked at at once
BYTES = np.resize(np.arange(251, dtype=np.uint8), PIECE + 251)
WAIT_S = 1200.0


def five_gigabytes(*, gigabytes: float) -> bool:
    """Do operations on one array of more bytes than 32 bits count, and look at every one."""
    fastps.init()
    world = current.current().groups.world
    count = int(gigabytes * 1e9) + 1
    array = np.empty(count, np.uint8)
    fill(array, world.rank)
    world.allreduce(array, array, op=fastps.Sum).wait(WAIT_S)
    check(array, [0, 1])
    fill(array, world.rank)
    world.broadcast(array, root=1).wait(WAIT_S)
    check(array, [1])
    if world.rank == 0:
        fill(array, 7)
        world.send(array, 1).wait(WAIT_S)
    else:
        world.receive(array, 0).wait(WAIT_S)
        check(array, [7])
    fill(array, world.rank)
    fastps.push_pull(array, "large", average=False, out=array)
    check(array, [0, 1])
    blocks(world, array)
    return True


def blocks(world: Group, array: np.ndarray) -> None:
    """Do what cuts an array in two, each block longer than 31 bits count."""
    me, half, odd = world.rank, array.size // 2, array.size % 2
    counts = [half + odd, half]
    own = np.empty(counts[me], np.uint8)
    fill(own, me)
    world.allgather(own, array, counts=counts).wait(WAIT_S)
    for rank, block in enumerate(np.split(array, counts[:1])):
        check(block, [rank])
    fill(array, me)
    world.reducescatter(array, own, counts=counts, op=fastps.Sum).wait(WAIT_S)
    check(own, [0, 1], first=me * counts[0])
    fill(own, me)
    world.gather(own, array if me == 1 else None, root=1, counts=counts).wait(WAIT_S)
    for rank, block in enumerate(np.split(array, counts[:1]) if me == 1 else ()):
        check(block, [rank])
    fill(array, 3)
    world.scatter(array if me == 0 else None, own, root=0, counts=counts).wait(WAIT_S)
    check(own, [3], first=me * counts[0])
    fill(array, me)
    world.reduce(array, array if me == 0 else None, root=0, op=fastps.Sum).wait(WAIT_S)
    check(array, [0, 1] if me == 0 else [1])
    del own
    one = np.full(1, 9, np.uint8)
    fill(array, 5 + me)
    if me == 0:  # one block of everything, and one byte back
        world.alltoall(array, one, send_counts=[0, array.size], receive_counts=[0, 1]).wait(WAIT_S)
        assert one[0] == 9
    else:
        world.alltoall(one, array, send_counts=[1, 0], receive_counts=[array.size, 0]).wait(WAIT_S)
        check(array, [5])


def pattern(start: int, length: int, seed: int) -> np.ndarray:
    """Give bytes that differ everywhere from those 4 GiB away."""
    first = (start // PIECE * 7 + seed) % 251
    return BYTES[first : first + length]


def fill(array: np.ndarray, seed: int) -> None:
    """Write the pattern."""
    for start in range(0, array.size, PIECE):
        piece = array[start : start + PIECE]
        piece[:] = pattern(start, piece.size, seed)


def check(array: np.ndarray, seeds: list[int], first: int = 0) -> None:
    """Compare with the sum of patterns, from element `first` of these on."""
    start = 0
    while start < array.size:
        skipped = (first + start) % PIECE  # patterns are made piece by piece
        piece = array[start : start + PIECE - skipped]
        want = np.zeros(piece.size, np.uint8)
        for seed in seeds:
            want += pattern(first + start - skipped, skipped + piece.size, seed)[skipped:]
        assert np.array_equal(piece, want), f"wrong from {start} on"
        start += piece.size
