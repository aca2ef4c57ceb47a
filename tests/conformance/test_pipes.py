# SPDX-License-Identifier: Apache-2.0
"""Pipes between ranks of one machine, stepped by hand: what is sent arrives, once and in order."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_nets import IN_ORDER, OPEN, PEER_LOST, collect, outcome, payload_of

from aids.mailbox import Mailbox
from fastps.errors import FastPSError, PeerLostError, StallError
from fastps.transport import shm
from fastps.transport._link import Mapping
from fastps.transport.pipe._transport import PipeTransport, pipe_memory_bytes

CHUNK = 64 << 10
PIPE = 1 << 22
BOTH_WAYS = 1 << 20
OFFSET = 4096
ARENA = 16 << 20


class Pipes:
    """Ranks of one process, each with a mailbox and an arena."""

    def __init__(self, n: int = 2) -> None:
        descriptor = shm.create_memory(OFFSET + pipe_memory_bytes(n))
        self.memory = Mapping(descriptor, OFFSET + pipe_memory_bytes(n))
        os.close(descriptor)
        self.arenas = [shm.Arena(ARENA) for _ in range(n)]
        mappings = [arena.mapping for arena in self.arenas]
        self.ends = [PipeTransport(self.memory, OFFSET, mappings, index) for index in range(n)]
        self.boxes = [Mailbox(adopts=True) for _ in range(n)]
        for index, end in enumerate(self.ends):
            for other in range(n):
                if other != index:
                    end.adopt(other, self.boxes[index], other)

    def lent(self, index: int, data: bytes) -> np.ndarray[Any, Any]:
        """Give an array with these bytes in the arena of a rank."""
        block, _ = self.arenas[index].allocate(max(len(data), 1))
        array = np.frombuffer(block, np.uint8, len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return array

    def has_news(self, index: int) -> bool:
        """Tell whether others have told a rank something that it has not seen yet."""
        mail = self.memory.address + OFFSET + 64 * index
        return bool(np.ctypeslib.ctypes.c_uint64.from_address(mail).value)

    def settle(self) -> None:
        """Step until nobody has anything to do."""
        while any(end.step() for end in self.ends):
            pass

    def close(self) -> None:
        """End what is left."""
        for end in self.ends:
            end.abort()
        self.settle()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def pipes():
    made = []

    def make(n: int = 2) -> Pipes:
        made.append(Pipes(n))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("is_lent", [False, True], ids=["inline", "lent"])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, CHUNK, CHUNK + 1, 3 * PIPE + 5])
def test_a_payload_arrives_whole(pipes, nbytes, is_lent):
    net = pipes()
    data = payload_of(nbytes)
    source = net.lent(0, data) if is_lent else np.frombuffer(data, np.uint8)
    parcel = net.boxes[0].post(1, source, key=7, chunk_bytes=CHUNK, kick=2)
    net.settle()
    assert collect(net.boxes[1], nbytes) == data
    assert outcome(parcel) == "OK"


def test_lent_bytes_are_sent_when_they_were_read(pipes):
    net = pipes()
    lent = net.boxes[0].post(1, net.lent(0, b"abc"), kick=2)
    inline = net.boxes[0].post(1, b"abc", kick=2)
    inline.wait(timeout_s=0.0)
    with pytest.raises(StallError):
        lent.wait(timeout_s=0.0)
    assert net.ends[1].step()  # the reader reads; the writer has yet to see it
    net.settle()
    lent.wait(timeout_s=0.0)


def test_a_writer_is_told_once_when_all_that_it_lent_was_read(pipes):
    net = pipes()
    lent = net.boxes[0].post(1, net.lent(0, payload_of(5 * CHUNK)), chunk_bytes=CHUNK, kick=2)
    assert [net.ends[1].step() and net.has_news(0) for _ in range(5)] == [False] * 4 + [True]
    net.settle()
    lent.wait(timeout_s=0.0)


def test_a_writer_without_room_is_told_when_half_the_pipe_was_read(pipes):
    net = pipes()
    net.boxes[0].post(1, payload_of(3 * PIPE), chunk_bytes=CHUNK, kick=2)
    n_frames = PIPE // (CHUNK + 64)
    told = [net.ends[1].step() and net.has_news(0) for _ in range(n_frames)]
    assert n_frames // 2 <= told.index(True) + 1 <= n_frames // 2 + 2


def test_who_has_something_to_read_writes_no_more_than_caches_hold(pipes):
    net = pipes()
    there, back = payload_of(2 * BOTH_WAYS, 1), payload_of(3 * BOTH_WAYS, 2)
    parcels = [net.boxes[0].post(1, there, chunk_bytes=CHUNK, kick=2)]
    parcels.append(net.boxes[1].post(0, back, chunk_bytes=CHUNK, kick=2))
    read = [net.ends[0].step() for _ in range(2 * BOTH_WAYS // CHUNK)]
    assert read == [True] * (BOTH_WAYS // (CHUNK + 64)) + [False] * read.count(False)
    net.settle()
    assert b"".join(net.boxes[0].receive(timeout_s=0.0)[2] for _ in range(48)) == back
    assert b"".join(net.boxes[1].receive(timeout_s=0.0)[2] for _ in range(32)) == there
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_a_full_pipe_goes_on_when_it_was_read(pipes):
    net = pipes()
    data = [payload_of(PIPE // 3, seed) for seed in range(9)]
    parcels = [net.boxes[0].post(1, one, key=k, kick=2) for k, one in enumerate(data)]
    with pytest.raises(StallError):
        parcels[-1].wait(timeout_s=0.0)
    net.settle()
    found = {}
    for _ in range(sum(-(-len(one) // (PIPE // 3 - 64)) for one in data)):
        _, header, part = net.boxes[1].receive(timeout_s=0.0)
        found[header["key"]] = found.get(header["key"], b"") + part
    assert found == dict(enumerate(data))
    assert {outcome(parcel) for parcel in parcels} == {"OK"}


def test_who_leaves_is_heard_after_what_it_sent(pipes):
    net = pipes(3)
    net.boxes[0].post(1, b"last words", kick=2)
    net.ends[0].leave()
    net.settle()
    assert net.boxes[1].receive(timeout_s=0.0)[2] == b"last words"
    assert [net.boxes[1].ended(0), net.boxes[1].ended(2)] == [IN_ORDER, OPEN]
    assert [net.boxes[0].ended(1), net.boxes[0].ended(2)] == [IN_ORDER, IN_ORDER]
    assert [net.ends[i].n_open for i in range(3)] == [0, 1, 1]
    with pytest.raises(FastPSError):
        net.boxes[1].post(0, b"x", kick=2)


def test_what_is_under_way_comes_back_when_it_ends(pipes):
    net = pipes()
    lent = net.boxes[0].post(1, net.lent(0, payload_of(5)), kick=2)
    queued = net.boxes[0].post(1, payload_of(2 * PIPE), chunk_bytes=CHUNK, kick=2)
    net.ends[0].abort()
    net.ends[0].step()
    assert net.boxes[0].ended(1) == PEER_LOST
    for parcel in (lent, queued):
        with pytest.raises(PeerLostError):
            parcel.wait(timeout_s=0.0)


def test_a_frame_that_no_peer_sends_ends_the_link(pipes):
    net = pipes()
    net.boxes[0].post(1, b"x" * 64, kick=2)
    header = OFFSET + 2 * 64 + 320 + (320 + PIPE)  # rank 0's pipe to rank 1, its first frame
    raw = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * 8).from_address(net.memory.address + header)
    )
    raw[0] ^= 0xFF  # the magic
    net.ends[1].step()
    assert net.boxes[1].ended(0) == -4


@given(data=st.data())
def test_any_order_of_posts_and_steps(data):
    net = Pipes(data.draw(st.integers(2, 3), label="ranks"))
    try:
        _post_and_step(net, len(net.ends), data)
    finally:
        net.close()


def _post_and_step(net: Pipes, n: int, data: st.DataObject) -> None:
    sizes = st.sampled_from([0, 1, 64, 5000, CHUNK, 200_000, 700_000])
    sent: dict[tuple[int, int], list[bytes]] = {}
    parcels = []
    for number in range(data.draw(st.integers(0, 25), label="steps")):
        index = data.draw(st.integers(0, n - 1))
        if data.draw(st.booleans(), label="step"):
            net.ends[index].step()
            continue
        other = (index + data.draw(st.integers(1, n - 1))) % n
        payload = payload_of(data.draw(sizes), number)
        sent.setdefault((index, other), []).append(payload)
        source = net.lent(index, payload) if data.draw(st.booleans(), label="lent") else payload
        parcels.append(net.boxes[index].post(other, source, key=number, chunk_bytes=CHUNK, kick=2))
    net.settle()
    for other in range(n):
        _check_arrivals(net.boxes[other], {i: sent.get((i, other), []) for i in range(n)})
    assert {outcome(parcel) for parcel in parcels} <= {"OK"}


def _check_arrivals(box: Mailbox, expected: dict[int, list[bytes]]) -> None:
    """Compare what came from each peer; items of one peer may take turns."""
    n_frames = sum(max(1, -(-len(p) // CHUNK)) for some in expected.values() for p in some)
    found: dict[tuple[int, int], bytes] = {}
    for _ in range(n_frames):
        peer, header, part = box.receive(timeout_s=0.0)
        before = found.get((peer, header["key"]), b"")
        assert header["offset"] == len(before)
        found[peer, header["key"]] = before + part
    for peer, payloads in expected.items():
        arrived = [found[key] for key in sorted(found) if key[0] == peer]
        assert arrived == payloads
    with pytest.raises(StallError):
        box.receive(timeout_s=0.0)
