# SPDX-License-Identifier: Apache-2.0
"""How arrays are copied: large ones past the caches, and every byte wherever they begin."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from aids import faces

PAST_CACHES = 8 << 20
SIZES = (0, 1, 1023, 1024, 1025, 4 * 4096 - 1, 4 * 4096 + 64, 3 * 4 * 4096 + 4096 + 129)
GUARD = 200
PAGE = 4096


def has_loops() -> bool:
    """Tell whether this processor has the instructions that the loops are made of."""
    return platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text()


def in_page(nbytes: int, place: int) -> np.ndarray:
    """Make an array that begins so many bytes behind the beginning of a page."""
    memory = np.zeros(nbytes + place + PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + place
    return memory[begin : begin + nbytes]


@pytest.mark.skipif(not has_loops(), reason="other processors copy by memcpy() alone")
@pytest.mark.parametrize(
    ("nbytes", "whole", "apart", "way"),
    [
        (1023, 1 << 30, 64, "library"),
        (1024, 0, 64, "moves"),
        (1 << 20, PAST_CACHES - 1, 16, "moves"),
        (1 << 20, PAST_CACHES - 1, PAGE - 1, "moves"),
        (1 << 20, PAST_CACHES - 1, 0, "library"),
        (1 << 20, PAST_CACHES - 1, 3 * PAGE, "library"),
        (1 << 20, PAST_CACHES, 0, "streams"),
        (PAST_CACHES, PAST_CACHES, 64, "streams"),
        (PAST_CACHES, 0, 64, "moves"),
    ],
)
def test_large_copies_take_the_loops_and_into_large_arrays_go_past_the_caches(
    nbytes, whole, apart, way
):
    source = in_page(nbytes, 16)
    source[:] = np.arange(nbytes, dtype=np.uint8)
    target = in_page(nbytes, 16 + apart)
    assert faces.copy(target, source, whole) == way
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("whole", [0, PAST_CACHES])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_comes_and_none_beside_them(nbytes, whole):
    random = np.random.default_rng(nbytes)
    memory = random.integers(0, 256, nbytes + 64, np.uint8)
    for to, begin in ((0, 0), (1, 0), (0, 1), (31, 33), (63, 7), (32, 32)):
        source = memory[begin : begin + nbytes]
        room = np.full(nbytes + 2 * GUARD, 170, np.uint8)
        target = room[GUARD + to : GUARD + to + nbytes]
        faces.copy(target, source, whole)
        np.testing.assert_array_equal(target, source)
        assert np.all(room[: GUARD + to] == 170)
        assert np.all(room[GUARD + to + nbytes :] == 170)
