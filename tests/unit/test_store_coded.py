# SPDX-License-Identifier: Apache-2.0
"""What the store does with encoded frames that break the rules, come twice or are damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_store import BROKEN, CHUNK, PEER_LOST, PROTOCOL, TIMEOUT_S, Server, make

from aids.wire import FrameFlag, FrameKind
from fastps.contract.codec import Codec, Coding, Option
from fastps.contract.contract import ANY_STALENESS, Policy, Unit
from fastps.errors import PeerLostError
from fastps.reduce._partition import Coder
from fastps.server._policies import CodedRule
from fastps.types import DType

__all__ = ["make"]
KEY = 5 << 16
WIRE = 3 * CHUNK
PLAIN = FrameFlag.PLAIN
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
        found = [receive(server, rank, WIRE) for rank in (0, 1)]
        assert found[0] == found[1]
    finally:
        server.close()


# ---- values of which changes travel encoded ----

COUNT = CODINGS["onebit"][1]
MIXED = {
    "plain in the middle": [(bytes(CHUNK), {}), (bytes(CHUNK), {"offset": CHUNK, "flags": PLAIN})],
    "encoded in the middle": [(bytes(CHUNK), {"flags": PLAIN}), (bytes(CHUNK), {"offset": CHUNK})],
    "as long as plain": [(bytes(WIRE), {"chunk_bytes": CHUNK}), (bytes(CHUNK), {"offset": WIRE})],
    "beyond plain": [(bytes(CHUNK), {"flags": PLAIN, "offset": 4 * COUNT})],
}


def follow(server: Server) -> None:
    """Make a value that workers follow by encoded changes."""
    coding = CODINGS["onebit"][0].without_memory()
    answers = Coder(coding, DType.FLOAT32, nbytes=4 * COUNT, chunk_bytes=CHUNK, name="t", rank=0)
    server.declare(
        KEY >> 16, 4 * COUNT, unit=Unit.PARTITION, policy=Policy.ACCUMULATE, is_ruled=True,
        staleness=ANY_STALENESS, coders={0: answers},
    )  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_an_operation_is_encoded_or_plain_throughout(make, name):
    server = make(2)
    follow(server)
    *before, (payload, fields) = MIXED[name]
    for earlier, its_fields in before:
        server.post(0, earlier, **{"key": KEY} | its_fields)
    with pytest.raises(PeerLostError):
        server.post(0, payload, **{"key": KEY} | fields)
    assert server.boxes[0].wait_ended(0, timeout_s=TIMEOUT_S) == PEER_LOST


def test_answers_are_encoded_like_what_was_asked(make):
    server = make(2)
    follow(server)
    seed = np.linspace(-1, 1, COUNT, dtype=np.float32)
    server.post(0, seed.tobytes(), chunk_bytes=CHUNK, key=KEY, flags=PLAIN)
    assert receive(server, 0, 4 * COUNT) == seed.tobytes()
    server.post(1, b"", key=KEY, kind=FrameKind.PULL, flags=PLAIN)
    assert receive(server, 1, 4 * COUNT) == seed.tobytes()
    update = np.ones(COUNT, np.float32)
    wire = coder("onebit", rank=0, pushes=True).encode(update.view(np.uint8), version=2)
    server.post(0, bytes(wire), chunk_bytes=CHUNK, key=KEY, key_version=2)
    got, change = receive(server, 0, WIRE), np.empty(COUNT, np.float32)
    coder("onebit").decode(got, change.view(np.uint8), version=1)
    np.testing.assert_array_equal(change, update)
    server.post(1, b"", key=KEY, key_version=2, kind=FrameKind.PULL)
    assert receive(server, 1, WIRE) == got
    server.post(1, b"", key=KEY, key_version=3, kind=FrameKind.PULL, flags=PLAIN)
    whole = np.frombuffer(receive(server, 1, 4 * COUNT), np.float32)
    np.testing.assert_array_equal(whole, seed + update)


def receive(server: Server, rank: int, nbytes: int) -> bytes:
    """Receive a whole answer."""
    got = b""
    while len(got) < nbytes:
        _, header, payload = server.boxes[rank].receive(timeout_s=TIMEOUT_S)
        assert header["kind"] == FrameKind.RESULT
        got += payload
    return bytes(got)
