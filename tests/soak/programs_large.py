# SPDX-License-Identifier: Apache-2.0
"""What the workers of soak_large.py do."""

from __future__ import annotations

import numpy as np

import fastps
from fastps import current

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
    return True


def pattern(start: int, length: int, seed: int) -> np.ndarray:
    """Give bytes that differ everywhere from those 4 GiB away."""
    first = (start // PIECE * 7 + seed) % 251
    return BYTES[first : first + length]


def fill(array: np.ndarray, seed: int) -> None:
    """Write the pattern."""
    for start in range(0, array.size, PIECE):
        piece = array[start : start + PIECE]
        piece[:] = pattern(start, piece.size, seed)


def check(array: np.ndarray, seeds: list[int]) -> None:
    """Compare with the sum of patterns."""
    for start in range(0, array.size, PIECE):
        piece = array[start : start + PIECE]
        want = np.zeros(piece.size, np.uint8)
        for seed in seeds:
            want += pattern(start, piece.size, seed)
        assert np.array_equal(piece, want), f"wrong from {start} on"
