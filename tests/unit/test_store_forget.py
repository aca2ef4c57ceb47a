# SPDX-License-Identifier: Apache-2.0
"""Names that the store forgets: not while anything is under way, and nothing comes back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from test_store import CHUNK, MISMATCH, PROTOCOL, TIMEOUT_S, make, values_of  # noqa: F401

from aids.wire import FrameFlag, FrameKind
from fastps.contract.contract import ANY_STALENESS, Policy, Roster
from fastps.errors import PeerLostError, StallError
from fastps.reduce import sum_kernel
from fastps.types import DType

KEY = 1 << 16
LANDINGS = 300


@pytest.mark.parametrize("policy", [Policy.SUM, Policy.ACCUMULATE])
@pytest.mark.parametrize("version", [0, 1, 2, 7])
def test_versions_go_on_where_an_id_is_used_again(make, policy, version):  # noqa: F811
    server = make(2)
    server.declare(1, server.nbytes, version=version, policy=policy, staleness=ANY_STALENESS)
    for step in range(1, 4):
        given = [values_of(rank, server.nbytes, step) for rank in range(2)]
        for rank in range(2):
            server.push(rank, given[rank], key=KEY, key_version=version + step)
            if policy == Policy.ACCUMULATE:
                server.result(rank, version + step)
        if policy == Policy.SUM:
            for rank in range(2):
                assert np.array_equal(server.result(rank, version + step), given[0] + given[1])


@pytest.mark.parametrize("policy", [Policy.SUM, Policy.ACCUMULATE])
@pytest.mark.parametrize("kind", [FrameKind.PUSH, FrameKind.PULL])
@pytest.mark.parametrize("late", [1, 4, 5])
def test_frames_of_the_tensor_before_are_refused(make, policy, kind, late):  # noqa: F811
    """They cannot come: who asks to forget has seen the end of all that it has begun."""
    server = make(2)
    server.declare(1, 64, version=5, policy=policy, staleness=ANY_STALENESS)
    with pytest.raises(PeerLostError):
        server.post(0, bytes(64) * (kind == FrameKind.PUSH), kind=kind, key=KEY, key_version=late)
    assert server.store.wait_news(timeout_s=TIMEOUT_S) == {0: PROTOCOL}


def test_who_has_begun_to_push_may_end_though_the_round_failed(make):  # noqa: F811
    server = make(2)
    server.declare(1, server.nbytes)
    server.post(0, values_of(0).tobytes()[:CHUNK], key=KEY)
    server.push(1, values_of(1), key=KEY, flags=FrameFlag.AVERAGE)
    assert server.error(0) == server.error(1) == (1, MISMATCH, 1)
    with pytest.raises(StallError):
        server.store.forget_tensor(1, timeout_s=0.02)
    rest = values_of(0).tobytes()[CHUNK:]
    server.post(0, rest, key=KEY, offset=CHUNK, chunk_bytes=CHUNK)
    server.store.forget_tensor(1, timeout_s=TIMEOUT_S)
    server.push(0, values_of(0))  # its link is alive


@pytest.mark.parametrize("lenders", [(), (0,)])
@pytest.mark.parametrize("engine_threads", [0, 1])
def test_frames_land_while_it_is_tried_to_forget(make, engine_threads, lenders):  # noqa: F811
    """One partition stays in use; frames of the other are put off at times, and none is lost."""
    server = make(2, engine_threads=engine_threads, io_threads=2, lenders=lenders)
    server.store.declare(
        1,
        n_partitions=2,
        partitions=[(index, 3 * CHUNK, Roster((0, 1), (0, 1), 2, 2)) for index in range(2)],
        dtype=DType.FLOAT32,
        itemsize=4,
        chunk_bytes=CHUNK,
        kernel=sum_kernel(DType.FLOAT32),
        inline_bytes=0,
    )
    server.post(0, values_of(0).tobytes()[:CHUNK], key=KEY | 1)
    enough = threading.Event()
    attempts = [0]

    def attempt() -> None:
        while not enough.is_set():
            with pytest.raises(StallError):
                server.store.forget_tensor(1, timeout_s=0.0)
            attempts[0] += 1

    thread = threading.Thread(target=attempt)
    thread.start()
    try:
        for version in range(1, LANDINGS):
            given = [values_of(rank, server.nbytes, version) for rank in range(2)]
            flags = [FrameFlag(0), FrameFlag.AVERAGE if version % 5 == 0 else FrameFlag(0)]
            for rank in range(2):
                server.push(rank, given[rank], key=KEY, key_version=version, flags=flags[rank])
            for rank in range(2):
                if version % 5:
                    total = server.result(rank, version)
                    assert np.array_equal(total, given[0] + given[1])
                else:
                    assert server.error(rank) == (version, MISMATCH, 1)
    finally:
        enough.set()
        thread.join(TIMEOUT_S)
    assert attempts[0] > 0
    server.post(0, values_of(0).tobytes()[CHUNK:], key=KEY | 1, offset=CHUNK, chunk_bytes=CHUNK)
    server.push(1, values_of(1), key=KEY | 1)
    for rank in range(2):
        assert np.array_equal(server.result(rank), values_of(0) + values_of(1))
    server.store.forget_tensor(1, timeout_s=TIMEOUT_S)
    assert server.store.statistics()["tensors"] == 1


def test_rounds_that_fail_are_forgotten_when_their_last_frame_is_here(make):  # noqa: F811
    """Somebody tries all the time; whoever still pushes to a failed round is not cut off."""
    server = make(2, io_threads=2)
    for turn in range(LANDINGS):
        server.declare(1, server.nbytes, version=turn)
        done = threading.Event()

        def attempt(done: threading.Event = done) -> None:
            server.store.forget_tensor(1, timeout_s=TIMEOUT_S)
            done.set()

        fields = {"key": KEY, "key_version": turn + 1}
        data = values_of(0).tobytes()
        server.post(0, data[:CHUNK], **fields)
        thread = threading.Thread(target=attempt)
        thread.start()
        server.push(1, values_of(1), flags=FrameFlag.AVERAGE, **fields)
        for offset in range(CHUNK, len(data), CHUNK):
            assert not done.is_set()
            server.post(0, data[offset : offset + CHUNK], offset=offset, **fields)
        assert server.error(0) == server.error(1) == (turn + 1, MISMATCH, 1)
        thread.join(TIMEOUT_S)
        assert done.is_set()
