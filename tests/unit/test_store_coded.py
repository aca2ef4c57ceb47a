# SPDX-License-Identifier: Apache-2.0
"""What the store does with encoded frames that break the rules, come twice or are damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_store import BROKEN, CHUNK, PEER_LOST, PROTOCOL, TIMEOUT_S, Server, make

from aids.wire import FrameKind
from fastps.coding import Codec, Coding, Option
from fastps.contract import Unit
from fastps.errors import PeerLostError
from fastps.reduce.codec._coder import Coder
from fastps.server._coded import CodedRule
from fastps.types import DType

__all__ = ["make"]
KEY = 5 << 16
WIRE = 3 * CHUNK
CODINGS = {  # with a partition of so many elements, which has WIRE bytes when it is encoded
    "onebit": (Coding(Codec.ONEBIT, 0, Option.FEEDBACK), 32 * 46),
    "topk": (Coding(Codec.TOPK, 23), 1000),
    "randomk": (Coding(Codec.RANDOMK, 46), 1000),
}


def coder(name: str, **options: object) -> Coder:
    """Make the coder of a server, or of a worker that pushes."""
    coding, count = CODINGS[name]
    return Coder(coding, DType.FLOAT32, nbytes=4 * count, chunk_bytes=CHUNK, name="t", **options)


def declare(server: Server, name: str) -> None:
    """Make a tensor that is encoded."""
    rule = CodedRule(coder(name, rank=0))
    assert rule.wire_bytes == WIRE
    server.rule = rule
    server.declare(KEY >> 16, WIRE, kernel=rule.kernel, states={0: rule}, unit=Unit.PARTITION)


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_breaks_the_rules_is_cut_off(make, name):
    server = make(3)
    declare(server, "onebit")
    *before, (payload, fields) = BROKEN[name]
    for earlier, its_fields in before:
        server.post(0, earlier, **{"key": KEY} | its_fields)
    with pytest.raises(PeerLostError):
        server.post(0, payload, **{"key": KEY} | fields)
    assert server.boxes[0].wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST
    while server.store.wait_news(timeout_s=TIMEOUT_S) != {0: PROTOCOL}:
        pass


def test_a_round_that_is_replayed_is_cut_off(make):
    server = make(2)
    declare(server, "onebit")
    frames = bytes(WIRE)
    for rank in (0, 1):
        server.post(rank, frames, chunk_bytes=CHUNK, key=KEY)
    server.post(0, frames, chunk_bytes=CHUNK, key=KEY, key_version=2)
    with pytest.raises(PeerLostError):
        server.post(0, frames, chunk_bytes=CHUNK, key=KEY, key_version=1)
    assert server.boxes[0].wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST


@pytest.mark.parametrize("name", CODINGS)
@given(data=st.data())
def test_what_is_damaged_is_a_wrong_sum_for_all_alike_and_nothing_worse(name, data):
    """The bytes are right in number; what they mean is the sender's affair (see byzantine)."""
    count = CODINGS[name][1]
    values = np.linspace(-1, 1, count, dtype=np.float32)
    wire = bytearray(coder(name, rank=0, pushes=True).encode(values.view(np.uint8), version=1))
    for place in data.draw(st.lists(st.integers(0, WIRE - 1), max_size=20)):
        wire[place] = data.draw(st.integers(0, 255))
    server = Server(2)
    try:
        declare(server, name)
        for rank in (0, 1):
            server.post(rank, bytes(wire), chunk_bytes=CHUNK, key=KEY)
        found = []
        for rank in (0, 1):
            got = b""
            while len(got) < WIRE:
                _, header, payload = server.boxes[rank].receive(timeout_s=TIMEOUT_S)
                assert header["kind"] == FrameKind.RESULT
                got += payload
            found.append(got)
        assert found[0] == found[1]
    finally:
        server.close()
