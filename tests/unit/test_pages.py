# SPDX-License-Identifier: Apache-2.0
"""Arrays that come again are gathered in huge pages; nothing else about them changes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from aids.faces import note_use
from fastps._core import HugePages, may_gather

MIB = 1 << 20
TIMES = 10  # USE_TIMES
needs_kernel = pytest.mark.skipif(not may_gather(), reason="no huge pages, or none on demand")


def make(nbytes: int) -> np.ndarray:
    """Give private memory in pages of 4 KiB, all of it written."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.arange(nbytes, dtype=np.uint8)
    memory.madvise(mmap.MADV_HUGEPAGE)  # from here on it may have some
    return array


def large(array: np.ndarray) -> int:
    """Count the bytes of huge pages in the mapping of an array."""
    address = array.ctypes.data
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"AnonHugePages: +(\d+) kB", part)
            return int(found[1]) << 10 if found else 0
    raise AssertionError("no such mapping")


def see(pages: HugePages, array: np.ndarray, times: int) -> None:
    for _ in range(times):
        note_use(pages, array)


@needs_kernel
def test_what_comes_again_is_gathered_once_and_stays_what_it_was():
    array, pages = make(16 * MIB), HugePages()
    expected, before = array.copy(), large(array)
    see(pages, array, TIMES - 1)
    assert (pages.bytes_gathered, large(array)) == (0, before)
    see(pages, array, 5)
    assert 0 < pages.bytes_gathered <= 16 * MIB
    assert large(array) >= pages.bytes_gathered
    assert np.array_equal(array, expected)


@needs_kernel
def test_only_whole_pages_inside_an_array_are_touched():
    array, pages = make(16 * MIB), HugePages()
    inside = array[MIB + 1 : 7 * MIB - 1]
    see(pages, inside, TIMES)
    assert pages.bytes_gathered in (4 * MIB, 2 * MIB)  # by where the mapping begins


@pytest.mark.parametrize(
    "make_it",
    [
        lambda: np.zeros(0, np.float32),
        lambda: np.ones(MIB, np.uint8),
        lambda: np.frombuffer(bytes(5 * MIB), np.uint8),
        lambda: np.frombuffer(mmap.mmap(-1, 8 * MIB), np.uint8),  # shared, never written
    ],
)
def test_what_is_short_or_not_private_does_no_harm(make_it):
    array, pages = make_it(), HugePages()
    before = array.copy()
    see(pages, array, 2 * TIMES)
    assert np.array_equal(array, before)


@needs_kernel
def test_a_range_is_left_alone_and_others_are_not():
    array, other = make(8 * MIB), make(8 * MIB)
    pages = HugePages(array.ctypes.data, array.nbytes)
    see(pages, array, 2 * TIMES)
    assert pages.bytes_gathered == 0
    see(pages, other, TIMES)
    assert pages.bytes_gathered > 0


@needs_kernel
def test_arrays_of_changing_places_are_never_gathered():
    array, pages = make(16 * MIB), HugePages()
    for length in range(4 * MIB, 8 * MIB, 4096):
        note_use(pages, array[:length])
    assert pages.bytes_gathered == 0


@pytest.mark.parametrize(("text", "may"), [("always madvise [never]\n", False), (None, False)])
def test_the_machines_owner_may_want_none(tmp_path, text, may):
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    assert may_gather(setting) is may
