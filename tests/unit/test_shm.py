# SPDX-License-Identifier: Apache-2.0
"""Shared memory: blocks of an arena, limits, and how descriptors are handed round."""

from __future__ import annotations

import gc
import hmac
import os
import socket
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.errors import TransportTimeout
from fastps.transport import shm

MIB = 1 << 20
KEY = b"k" * 32


def test_this_machine_can_share():
    assert shm.can_share() == ""


def test_why_it_cannot_is_said(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert "No space left" in shm.can_share()


def test_files_stand_in_where_there_is_no_memfd(monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    before = set(os.listdir("/dev/shm"))
    arena = shm.Arena(4 * MIB)
    block, _ = arena.allocate(MIB)
    np.frombuffer(block, np.uint8)[:] = 1
    assert set(os.listdir("/dev/shm")) == before
    arena.close()


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 300_000)), min_size=1, max_size=60))
def test_blocks_never_overlap_and_come_back(steps):
    arena = shm.Arena(4 * MIB)
    held: dict[int, object] = {}
    sizes: dict[int, int] = {}
    for is_end, number in steps:
        if is_end and held:
            offset = sorted(held)[number % len(held)]
            del held[offset], sizes[offset]
            continue
        try:
            block, offset = arena.allocate(number)
        except MemoryError:
            continue
        array = np.frombuffer(block, np.uint8)
        assert array.nbytes == number
        assert offset % 4096 == 0
        array[:] = len(held)
        for other, nbytes in sizes.items():
            assert offset + max(number, 1) <= other or other + max(nbytes, 1) <= offset
        held[offset], sizes[offset] = block, number
        del array, block
    held.clear()
    gc.collect()
    whole, offset = arena.allocate(4 * MIB)
    assert offset == 0
    del whole
    arena.close()
    held.clear()
    with pytest.raises(MemoryError, match="has ended"):
        arena.allocate(1)


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6000)), min_size=1, max_size=200))
def test_packed_blocks_never_overlap_and_come_back(steps):
    arena = shm.Arena(4 * MIB)
    held: dict[int, tuple[object, int, int]] = {}
    for number, (is_end, nbytes) in enumerate(steps):
        if is_end and held:
            held.pop(sorted(held)[nbytes % len(held)])
            continue
        block, offset = arena.allocate_packed(nbytes)
        assert offset % 64 == 0
        array = np.frombuffer(block, np.uint8)
        assert array.nbytes == nbytes
        array[:] = number % 256
        held[offset] = block, nbytes, number % 256
        del array, block
    for block, nbytes, number in held.values():
        assert (np.frombuffer(block, np.uint8, nbytes) == number).all()
    arena.close()


def test_many_small_blocks_share_pages_and_ask_seldom_how_much_is_left(monkeypatch):
    arena, asked = shm.Arena(64 * MIB), []
    monkeypatch.setattr(shm, "memory_left", lambda: asked.append(1) or 1 << 40)
    blocks = [arena.allocate_packed(16)[0] for _ in range(100_000)]
    assert arena.used_bytes <= 64 * len(blocks) + shm.SHELF_BYTES
    assert len(asked) <= 8
    used = arena.used_bytes
    blocks.clear()
    blocks = [arena.allocate_packed(64)[0] for _ in range(100_000)]
    assert arena.used_bytes == used
    arena.freeze()
    before = {arena.allocate_packed(16)[1] for _ in range(10)}
    blocks.clear()
    assert before.isdisjoint(arena.allocate_packed(16)[1] for _ in range(1000))
    arena.close()


def test_threads_never_get_the_same_memory():
    arena = shm.Arena(256 * MIB)
    held: list[tuple[int, int]] = []
    blocks = []
    start = threading.Barrier(8)

    def take():
        start.wait(10)
        for size in range(1, 40):
            block, offset = arena.allocate(size * 4096)  # each needs new memory: others run
            blocks.append(block)
            held.append((offset, size * 4096))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    held.sort()
    assert len(held) == 8 * 39
    assert all(a + nbytes <= b for (a, nbytes), (b, _) in pairwise(held))
    arena.close()


def test_what_a_dead_process_may_write_is_not_lent_again():
    arena = shm.Arena(4 * MIB)
    block, first = arena.allocate(MIB)
    arena.freeze()
    del block
    _, second = arena.allocate(MIB)
    assert second != first
    arena.close()


def test_a_container_without_memory_is_named(monkeypatch):
    arena = shm.Arena(64 * MIB)
    monkeypatch.setattr(shm, "memory_left", lambda: 70 * MIB)
    arena.allocate(MIB)
    with pytest.raises(MemoryError, match="docker run --memory"):
        arena.allocate(32 * MIB)
    arena.close()


def test_memory_left_is_bounded_by_the_machine():
    assert 0 < shm.memory_left() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def exchange_all(count, results, *, key=KEY, timeout_s=10.0, ranks=None):
    """Let count ranks, or some of them, exchange one descriptor each."""

    def join(rank):
        mine = shm.create_memory(4096)
        os.pwrite(mine, bytes([rank]), 0)
        try:
            results[rank] = shm.exchange(
                (mine,), ranks=range(count), rank=rank, key=key,
                deadline=time.monotonic() + timeout_s,
            )  # fmt: skip
        except Exception as error:
            results[rank] = error
        finally:
            os.close(mine)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks or range(count)]
    for thread in threads:
        thread.start()
    return threads


def check_exchange(results, count):
    for rank in range(count):
        assert not isinstance(results[rank], Exception), results[rank]
        for other, (descriptor,) in enumerate(results[rank]):
            assert os.pread(descriptor, 1, 0) == bytes([other])
            os.close(descriptor)


@pytest.mark.parametrize(("count", "batch"), [(2, 128), (30, 128), (9, 2)])
def test_everybody_gets_everything(count, batch, monkeypatch):
    monkeypatch.setattr(shm, "DESCRIPTORS_PER_MESSAGE", batch)
    before = len(os.listdir("/proc/self/fd"))
    results = {}
    for thread in exchange_all(count, results):
        thread.join(30)
    check_exchange(results, count)
    assert len(os.listdir("/proc/self/fd")) == before


def meeting_of(key):
    return "\0fastps-" + hmac.digest(key, b"meeting of 0", "sha256").hex()[:32]


def connect_to(name):
    """Connect to the meeting as soon as it is there."""
    deadline = time.monotonic() + 10.0
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(name)
            return sock
        except ConnectionRefusedError:
            sock.close()
            assert time.monotonic() < deadline
        time.sleep(0.002)


def test_silent_visitors_do_not_hold_up_the_meeting():
    key = os.urandom(32)
    results = {}
    began = time.monotonic()
    leader, *_ = exchange_all(2, results, key=key, timeout_s=60.0, ranks=[0])
    silent = [connect_to(meeting_of(key)) for _ in range(5)]
    for thread in [leader, *exchange_all(2, results, key=key, timeout_s=60.0, ranks=[1])]:
        thread.join(70)
    assert time.monotonic() - began < 20.0
    check_exchange(results, 2)
    for sock in silent:
        sock.close()


def test_nobody_can_take_memory_away_from_under_the_others():
    descriptor = shm.create_memory(8192)
    for nbytes in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    os.posix_fallocate(descriptor, 0, 8192)
    os.close(descriptor)


def test_strangers_do_not_disturb():
    key = os.urandom(32)
    name = meeting_of(key)
    results = {}
    threads = exchange_all(2, results, key=key)
    for _ in range(20):
        try:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(name)
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        except OSError:
            pass
    for thread in threads:
        thread.join(30)
    check_exchange(results, 2)


def test_who_does_not_come_is_named():
    mine = shm.create_memory(4096)
    with pytest.raises(TransportTimeout, match=r"workers \[3\]"):
        shm.exchange((mine,), ranks=[0, 3], rank=0, key=KEY, deadline=time.monotonic() + 0.2)
    with pytest.raises(TransportTimeout, match="first worker"):
        shm.exchange((mine,), ranks=[0, 3], rank=3, key=KEY, deadline=time.monotonic() + 0.2)
    os.close(mine)


def test_what_a_forked_child_sees_is_not_lent_again_while_it_lives():
    arena = shm.Arena(16 * MIB)
    gone, first = arena.allocate(MIB)
    kept, second = arena.allocate(MIB)
    np.frombuffer(gone, np.uint8)[:] = 7
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:  # looks when it is told to, and says what it saw
        ours.close()
        theirs.recv(1)
        theirs.send(bytes(np.frombuffer(gone, np.uint8)[:1]))
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        del gone
        later, third = arena.allocate(MIB)
        np.frombuffer(later, np.uint8)[:] = 9
        ours.send(b"1")
        assert ours.recv(1) == b"\7"
        assert third not in (first, second)
        del later
        assert arena.allocate(MIB)[1] == third  # which no child has
    finally:
        ours.close()  # ends the child
        os.waitpid(child, 0)
    assert arena.allocate(MIB)[1] == first
    del kept
    arena.close()
