# SPDX-License-Identifier: Apache-2.0
"""Orders and news between launcher and scheduler: what is sent arrives, and garbage never does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastps.control import launcher_protocol as protocol
from fastps.control.actions import Phase
from fastps.control.launcher_protocol import (
    MAX_FRAME_BYTES,
    AskLife,
    End,
    EndWhenLeft,
    ExpectEnds,
    FrameReader,
    Lives,
    Located,
    RequestLocations,
    State,
    pack,
    unpack_news,
    unpack_order,
)
from fastps.control.protocol import LENGTH, MAX_MEMBERS, MAX_TEXT_CHARS, Absent, PeerLost
from fastps.errors import ProtocolError

texts = st.text(st.characters(codec="utf-8"), max_size=50)
ids, ranks = st.integers(0, 2**62 - 1), st.integers(0, MAX_MEMBERS - 1)
roles = st.sampled_from(["worker", "server", "validator"])
orders = st.one_of(
    st.builds(End, texts),
    st.builds(EndWhenLeft, texts),
    st.builds(ExpectEnds, st.lists(st.tuples(roles, ranks), max_size=5).map(tuple), texts),
    st.builds(RequestLocations, ids),
    st.builds(AskLife, ids),
    st.builds(Absent, roles, ranks, texts, ids, texts),
)
causes = st.builds(PeerLost, roles, ranks, texts, ids, texts, st.booleans())
news = st.one_of(
    st.builds(
        State, st.sampled_from(Phase), ids, ranks, st.booleans(), st.booleans(),
        st.none() | causes,
    ),
    st.builds(Located, ids),
    st.builds(Lives, ids),
)  # fmt: skip


def pieces_of(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """Yield a stream in pieces, as sockets may."""
    ends = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(ends):
        yield data[start:end]


@given(st.lists(orders, max_size=5), st.lists(news, max_size=5), st.lists(st.integers(0)))
def test_messages_arrive_however_they_are_cut(ordered, told, cuts):
    for messages, unpack in ((ordered, unpack_order), (told, unpack_news)):
        reader = FrameReader()
        data = b"".join(pack(one) for one in messages)
        bodies = [body for piece in pieces_of(data, cuts) for body in reader.feed(piece)]
        assert [unpack(body) for body in bodies] == messages


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda b: LENGTH.pack(len(b)) + b))
@example(LENGTH.pack(0))
@example(LENGTH.pack(MAX_FRAME_BYTES + 1))
@example(LENGTH.pack(1) + b"\xc0")
def test_garbage_is_refused_or_waits_for_more(data):
    for unpack, kinds in ((unpack_order, protocol.Order), (unpack_news, protocol.News)):
        reader = FrameReader()
        try:
            for body in reader.feed(data):
                assert isinstance(unpack(body), get_args(kinds))
        except ProtocolError:
            continue
        assert len(reader._pending) <= len(data)


@given(orders, st.integers(0), st.binary(min_size=1, max_size=4))
def test_a_damaged_order_is_an_order_or_refused(order, place, noise):
    frame = pack(order)
    start = LENGTH.size + place % (len(frame) - LENGTH.size)
    frame[start : start + len(noise)] = noise
    try:
        found = [unpack_order(body) for body in FrameReader().feed(bytes(frame))]
    except ProtocolError:
        return
    assert all(isinstance(one, get_args(protocol.Order)) for one in found)


@pytest.mark.parametrize(
    "order",
    [End("x" * (MAX_TEXT_CHARS + 1)), RequestLocations(-1), ExpectEnds((("leader", 0),), "")],
)
def test_orders_out_of_bounds_are_refused(order):
    (body,) = FrameReader().feed(bytes(pack(order)))
    with pytest.raises(ProtocolError, match="an order of the launcher is malformed"):
        unpack_order(body)


def test_the_longest_order_fits():
    places = tuple(("validator", MAX_MEMBERS - 1) for _ in range(MAX_MEMBERS))
    order = ExpectEnds(places, "\U0001f600" * MAX_TEXT_CHARS)
    (body,) = FrameReader().feed(bytes(pack(order)))
    assert unpack_order(body) == order
    with pytest.raises(ProtocolError, match="1 to 1048576 are allowed"):
        pack(ExpectEnds(places * 2, ""))


def test_news_are_no_orders():
    (body,) = FrameReader().feed(bytes(pack(Located(1))))
    with pytest.raises(ProtocolError, match="an order of the launcher is malformed"):
        unpack_order(body)
    (body,) = FrameReader().feed(bytes(pack(End("why"))))
    with pytest.raises(ProtocolError, match="news of the scheduler are malformed"):
        unpack_news(body)
