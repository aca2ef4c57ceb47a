# SPDX-License-Identifier: Apache-2.0
"""BufferPool: loans never overlap, never move, are counted, and stay out of forked children."""

from __future__ import annotations

import mmap
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from aids import faces
from fastps import _core
from fastps.errors import ConfigError, FastPSError, ShutdownError

MIB = 1 << 20
HUGE_PAGE = 2 * MIB


class PoolMachine(RuleBasedStateMachine):
    """Lend and give back in any order; every loan is filled with its own mark."""

    loans = Bundle("loans")

    @initialize(limit=st.sampled_from([0, 3 * HUGE_PAGE]))
    def make(self, limit):
        self.limit = limit
        self.slabs = {}
        self.pool = _core.BufferPool(limit, slab_bytes=HUGE_PAGE, on_slab=self.slabs.__setitem__)
        self.out = {}
        self.lent = 0

    @rule(
        target=loans,
        nbytes=st.one_of(
            st.integers(0, 3 * mmap.PAGESIZE),
            st.integers(0, HUGE_PAGE),
            st.sampled_from([HUGE_PAGE // 2, HUGE_PAGE // 2 + 1, HUGE_PAGE + 1]),
        ),
    )
    def lend(self, nbytes):
        try:
            buffer = faces.Buffer(self.pool, nbytes)
        except FastPSError:
            if not self.limit:
                raise
            return None
        start = buffer.address
        assert start % mmap.PAGESIZE == 0
        assert len(buffer) == buffer.nbytes == nbytes
        for other, _ in self.out.values():
            end = other.address + max(other.nbytes, 1)
            assert start + max(nbytes, 1) <= other.address or end <= start
        assert any(a <= start and start + nbytes <= a + size for a, size in self.slabs.items())
        self.lent += 1
        np.frombuffer(buffer, np.uint8)[:] = self.lent % 251
        self.out[self.lent] = (buffer, self.lent % 251)
        return self.lent

    @rule(loan=consumes(loans))
    def give_back(self, loan):
        if loan is None:
            return
        buffer, mark = self.out.pop(loan)
        assert bool(np.all(np.frombuffer(buffer, np.uint8) == mark))
        buffer.give_back()
        with pytest.raises(ValueError, match="given back"):
            buffer.give_back()

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "pool"):
            return
        now = self.pool.statistics()
        assert now.loans == len(self.out)
        assert now.total_loans == self.lent
        assert now.slabs == len(self.slabs)
        assert now.mapped_bytes == sum(self.slabs.values())
        assert sum(b.nbytes for b, _ in self.out.values()) <= now.loaned_bytes <= now.mapped_bytes
        assert now.peak_loaned_bytes >= now.loaned_bytes
        assert not self.limit or now.mapped_bytes <= self.limit

    def teardown(self):
        for buffer, _ in getattr(self, "out", {}).values():
            buffer.give_back()
        if hasattr(self, "pool"):
            self.pool.close()
            assert self.pool.statistics().slabs == 0


TestPoolMachine = PoolMachine.TestCase


@pytest.fixture
def pool():
    made = _core.BufferPool(slab_bytes=HUGE_PAGE)
    yield made
    made.close()


def smaps_of(address: int) -> tuple[int, int, dict[str, str]]:
    """Give bounds and fields of the mapping that holds an address."""
    bounds, fields = (0, 0), {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head and bounds[0] <= address < bounds[1]:
            break
        if head:
            bounds, fields = (int(head[1], 16), int(head[2], 16)), {}
        else:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    assert bounds[0] <= address < bounds[1]
    return bounds[0], bounds[1], fields


def test_slabs_are_resident_and_excluded_from_fork(pool):
    buffer = faces.Buffer(pool, 5 * MIB)  # a slab of its own, 6 MiB
    start, end, fields = smaps_of(buffer.address)
    flags = fields["VmFlags"].split()
    assert start <= buffer.address
    assert buffer.address + 6 * MIB <= end
    assert buffer.address % HUGE_PAGE == 0
    assert "dc" in flags  # do not copy on fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags  # huge pages advised
    assert int(fields["Rss"].split()[0]) * 1024 >= 6 * MIB
    buffer.give_back()


def test_a_forked_child_owns_no_loan(pool):
    buffer = faces.Buffer(pool, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests' libraries
        child = os.fork()
    if child == 0:
        os._exit(child_finds_nothing(pool, buffer))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buffer.give_back()
    assert pool.statistics().loans == 0


def child_finds_nothing(pool, buffer) -> int:
    """Return 0 when every use in a forked child is refused and nothing crashes."""
    accepted = 0
    for use, argument in ((lambda n: faces.Buffer(pool, n), 1), (memoryview, buffer)):
        try:
            use(argument)
            accepted += 1
        except ShutdownError:
            continue
    pool.close()
    return accepted


def test_freed_blocks_are_lent_again(pool):
    first = faces.Buffer(pool, 10_000)
    large = faces.Buffer(pool, 3 * MIB)
    addresses = (first.address, large.address)
    first.give_back()
    large.give_back()
    mapped = pool.statistics().mapped_bytes
    again = faces.Buffer(pool, 9_000), faces.Buffer(pool, 2 * MIB + 1)
    assert (again[0].address, again[1].address) == addresses
    assert pool.statistics().mapped_bytes == mapped
    for buffer in again:
        buffer.give_back()


def test_a_view_keeps_the_loan(pool):
    buffer = faces.Buffer(pool, 64)
    view = memoryview(buffer)
    assert not view.readonly
    with pytest.raises(BufferError, match="1 views"):
        buffer.give_back()
    view.release()
    buffer.give_back()
    for use in (lambda: memoryview(buffer), lambda: buffer.address):
        with pytest.raises(ValueError, match="given back"):
            use()


def test_a_collected_loan_warns_and_returns(pool):
    with pytest.warns(ResourceWarning, match="64 bytes"):
        faces.Buffer(pool, 64)
    assert pool.statistics().loans == 0


def test_limit_is_kept_and_named():
    pool = _core.BufferPool(HUGE_PAGE)
    whole = faces.Buffer(pool, HUGE_PAGE)
    with pytest.raises(FastPSError, match="cannot lend"):
        faces.Buffer(pool, 1)
    assert pool.statistics().refusals == 1
    whole.give_back()
    small = faces.Buffer(pool, 1)  # the large block serves when nothing may be mapped
    assert pool.statistics().mapped_bytes == HUGE_PAGE
    small.give_back()
    with pytest.raises(FastPSError):
        faces.Buffer(pool, 2**63)
    pool.close()


def test_close_with_a_loan_out_keeps_the_slab():
    regions = []
    pool = _core.BufferPool(slab_bytes=HUGE_PAGE, on_slab=lambda *slab: regions.append(slab))
    buffer = faces.Buffer(pool, 100)
    np.frombuffer(buffer, np.uint8)[:] = 7
    pool.close()
    with pytest.raises(FastPSError, match="cannot lend"):
        faces.Buffer(pool, 1)
    assert bytes(buffer) == b"\7" * 100
    assert regions == [(buffer.address, HUGE_PAGE)]
    buffer.give_back()
    assert pool.statistics().mapped_bytes == HUGE_PAGE
    pool.close()
    assert pool.statistics().mapped_bytes == 0


def test_a_failing_hook_fails_the_loan_and_is_tried_again():
    calls = []

    def refuse_once(address: int, nbytes: int) -> str:
        calls.append(address)
        if len(calls) == 1:
            raise OSError("no registration")
        return "region"

    pool = _core.BufferPool(slab_bytes=HUGE_PAGE, on_slab=refuse_once)
    with pytest.raises(OSError, match="no registration"):
        faces.Buffer(pool, 1)
    buffer = faces.Buffer(pool, 1)
    assert calls == [buffer.address] * 2
    buffer.give_back()
    pool.close()


def test_threads_share_a_pool(pool):
    def work(worker: int) -> None:
        for step in range(200):
            buffer = faces.Buffer(pool, (worker * 977 + step * 4001) % (HUGE_PAGE // 2))
            view = np.frombuffer(buffer, np.uint8)
            view[:] = worker
            assert bool(np.all(view == worker))
            del view
            buffer.give_back()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    now = pool.statistics()
    assert now.loans == now.loaned_bytes == 0
    assert now.total_loans == 800


def test_impossible_slabs_are_refused():
    for slab_bytes in (0, 2**62):
        with pytest.raises(ConfigError, match="slab_bytes"):
            _core.BufferPool(slab_bytes=slab_bytes)
