# SPDX-License-Identifier: Apache-2.0
"""What the contract of a key changes: who has to give, who gets, what the rule sees at once."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from test_store import CHUNK, IN_ORDER, MISMATCH, PROTOCOL, TIMEOUT_S, make, values_of  # noqa: F401

from aids.kernels import SUM_TYPE
from aids.wire import FrameFlag, FrameKind
from fastps.contract.contract import Policy, Roster, Unit
from fastps.errors import PeerLostError, StallError
from fastps.server._policies import TRANSITIONS, RoundEvent, RoundState

PULL = {"kind": FrameKind.PULL}


# ---- quorum ----


def test_a_pull_that_leaves_a_contribution_out_is_an_error_that_names_its_sender(make):  # noqa: F811
    server = make(3)
    server.push(0, values_of(0))
    server.post(1, **PULL)
    server.push(2, values_of(2))
    for rank in range(3):
        assert server.error(rank) == (1, MISMATCH, 1)


def test_a_quorum_says_how_many_have_to_push(make):  # noqa: F811
    server = make(3, roster=Roster((0, 1, 2), (0, 1, 2), 2, 3))
    for absent, version in [(0, 1), (2, 2), (1, 3)]:
        for rank in range(3):
            if rank == absent:
                server.post(rank, key_version=version, **PULL)
            else:
                server.push(rank, values_of(rank), key_version=version)
        present = [values_of(rank) for rank in range(3) if rank != absent]
        for rank in range(3):
            assert np.array_equal(server.result(rank, version), present[0] + present[1])
    server.push(0, values_of(0), key_version=4)
    server.post(1, key_version=4, **PULL)
    server.post(2, key_version=4, **PULL)
    for rank in range(3):
        assert server.error(rank) == (4, MISMATCH, 2)


# ---- contributors and readers ----


def test_who_only_reads_pulls_each_round_and_is_not_missed_in_the_sum(make):  # noqa: F811
    server = make(3, roster=Roster((2, 0), (0, 1), 2, 5))
    server.push(0, values_of(0), flags=FrameFlag.AVERAGE)
    server.push(2, values_of(2), flags=FrameFlag.AVERAGE)
    with pytest.raises(StallError):
        server.boxes[0].receive(timeout_s=0.0)
    server.post(1, flags=FrameFlag.AVERAGE, **PULL)
    average = (values_of(2) + values_of(0)) * (np.float32(1) / np.float32(5))
    for rank in (0, 1):
        assert np.array_equal(server.result(rank), average)
    _, header, payload = server.boxes[2].receive(timeout_s=TIMEOUT_S)
    assert payload == b""
    assert header["flags"] & FrameFlag.NO_RESULT


@pytest.mark.parametrize(
    ("rank", "payload", "fields"), [(1, bytes(CHUNK), {}), (2, b"", PULL), (3, b"", PULL)]
)
def test_who_does_what_its_part_does_not_allow_is_cut_off(make, rank, payload, fields):  # noqa: F811
    server = make(4, roster=Roster((2, 0), (0, 1), 2, 5))
    with pytest.raises(PeerLostError):
        server.post(rank, payload, **fields)
    while server.store.wait_news(timeout_s=TIMEOUT_S) != {rank: PROTOCOL}:
        pass


def test_who_has_no_part_in_a_key_may_go(make):  # noqa: F811
    server = make(3, roster=Roster((0, 1), (0, 1), 2, 2))
    server.push(0, values_of(0))
    server.boxes[2].end(0, IN_ORDER)
    while 2 not in server.store.wait_news(timeout_s=TIMEOUT_S):
        pass
    server.push(1, values_of(1))
    for rank in range(2):
        assert np.array_equal(server.result(rank), values_of(0) + values_of(1))


def test_keys_of_one_store_have_casts_of_their_own(make):  # noqa: F811
    server = make(3)
    for tensor, roster in [(1, Roster((0,), (0,), 1, 1)), (2, Roster((1, 2), (1, 2), 2, 2))]:
        server.roster = roster
        server.declare(tensor, server.nbytes)
        for rank in roster.contributors:
            server.push(rank, values_of(rank), key=tensor << 16)
        total = sum(values_of(rank) for rank in roster.contributors)
        for rank in roster.readers:
            assert np.array_equal(server.result(rank), total)


# ---- units ----


class Median:
    """A rule that needs a whole partition: the source whose sum is neither least nor largest."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.callback = SUM_TYPE(self.run)
        self.address = ctypes.cast(self.callback, ctypes.c_void_p).value or 0

    def run(self, sources: int, n: int, into: int, count: int, args: int) -> int:
        """Choose by sums over all elements."""
        self.counts.append(count)
        table = (ctypes.c_void_p * n).from_address(sources)
        kind = ctypes.c_float * count
        arrays = [np.ctypeslib.as_array(kind.from_address(place)) for place in table]
        chosen = sorted(arrays, key=lambda array: float(array.sum()))[n // 2].copy()
        np.ctypeslib.as_array(kind.from_address(into))[:] = chosen
        return 1


@pytest.mark.parametrize("engine_threads", [0, 1])
@pytest.mark.parametrize("lenders", [(), (1,)])
@pytest.mark.parametrize("extra", [0, 4])
def test_a_rule_may_see_a_whole_partition(make, engine_threads, lenders, extra):  # noqa: F811
    rule = Median()
    server = make(3, engine_threads=engine_threads, lenders=lenders)
    nbytes = 5 * CHUNK + extra
    server.nbytes = nbytes
    server.declare(1, nbytes, kernel=rule.address, unit=Unit.PARTITION)
    for version in (1, 2, 3):
        given = [values_of(rank, nbytes, version) for rank in range(3)]
        for rank in (2, 0, 1):
            server.push(rank, given[rank], key=1 << 16, key_version=version)
        want = sorted(given, key=lambda array: float(array.sum()))[1]
        for rank in range(3):
            assert np.array_equal(server.result(rank, version), want)
    assert rule.counts == [nbytes // 4] * 3


def test_a_laggard_in_the_middle_of_a_failed_partition_is_not_counted_in_the_next(make):  # noqa: F811
    server = make(2)
    server.declare(1, server.nbytes, unit=Unit.PARTITION)
    key = {"key": 1 << 16}
    server.post(0, values_of(0).tobytes()[:CHUNK], **key)
    server.post(1, bytes(CHUNK), flags=FrameFlag.AVERAGE, **key)
    for rank in range(2):
        assert server.error(rank) == (1, MISMATCH, 1)
        server.post(rank, bytes(2 * CHUNK), offset=CHUNK, chunk_bytes=CHUNK, **key)
    for version in (2, 3):
        for rank in range(2):
            server.push(rank, values_of(rank), key_version=version, **key)
        for rank in range(2):
            assert np.array_equal(server.result(rank, version), values_of(0) + values_of(1))


def test_only_sums_go_by_partitions(make):  # noqa: F811
    server = make(2)
    with pytest.raises(ValueError, match="need whole partitions"):
        server.declare(1, 64, unit=Unit.PARTITION, policy=Policy.ACCUMULATE)


# ---- the table ----


def test_every_state_can_be_reached_and_left():
    assert {state for state, _ in TRANSITIONS} == set(RoundState)
    assert {event for _, event in TRANSITIONS} == set(RoundEvent)
    assert set(TRANSITIONS.values()) | {RoundState.IDLE} == set(RoundState)


# ---- forgetting ----


@pytest.mark.parametrize("policy", [Policy.SUM, Policy.ACCUMULATE])
def test_a_name_can_be_forgotten_and_its_id_used_again(make, policy):  # noqa: F811
    server = make(2)
    for turn, nbytes in enumerate([3 * CHUNK, CHUNK, 5 * CHUNK + 4]):
        server.declare(1, nbytes, policy=policy)
        server.nbytes = nbytes
        given = [values_of(rank, nbytes, turn) for rank in range(2)]
        server.push(0, given[0], key=1 << 16)
        if policy == Policy.SUM:
            with pytest.raises(StallError, match="tensor 1 is still in use"):
                server.store.forget_tensor(1, timeout_s=0.01)
        server.push(1, given[1], key=1 << 16)
        assert np.array_equal(server.result(1), given[0] + given[1])
        server.result(0)
        server.store.forget_tensor(1, timeout_s=TIMEOUT_S)
        server.store.forget_tensor(1, timeout_s=0.0)
        assert server.store.statistics()["tensors"] == 1
        assert server.pool.statistics().loans == 0
    with pytest.raises(PeerLostError):
        server.push(0, values_of(0), key=1 << 16)


def test_what_failed_can_be_forgotten(make):  # noqa: F811
    server = make(3)
    server.declare(1, server.nbytes)
    server.push(0, values_of(0), key=1 << 16)
    server.push(1, values_of(1), key=1 << 16, flags=FrameFlag.AVERAGE)
    for rank in (0, 1):
        assert server.error(rank) == (1, MISMATCH, 1)
    server.store.forget_tensor(1, timeout_s=TIMEOUT_S)
    assert server.pool.statistics().loans == 0


def test_names_are_forgotten_while_others_are_pushed(make):  # noqa: F811
    """Many declare, push, forget in turn; another thread pushes one name all the time."""
    server = make(2, engine_threads=1, io_threads=2)
    enough = threading.Event()
    rounds = [0]

    def push_on() -> None:
        while not enough.is_set():
            rounds[0] += 1
            for rank in range(2):
                server.push(rank, values_of(rank), key_version=rounds[0], priority=7)
            for rank in range(2):
                take(server, rank, 0, rounds[0], 3)

    boxes: dict[tuple[int, int], list[int]] = {}
    lock = threading.Lock()

    def take(server, rank: int, key: int, version: int, n: int) -> None:
        """Receive n frames of a key; keep those of others for whom they concern."""
        while True:
            with lock:
                if len(boxes.get((rank, key), [])) >= n:
                    boxes[rank, key] = []
                    return
                try:
                    _, header, _ = server.boxes[rank].receive(timeout_s=0.0)
                except StallError:
                    continue
                assert header["kind"] == FrameKind.RESULT
                boxes.setdefault((rank, header["key"]), []).append(header["key_version"])

    thread = threading.Thread(target=push_on)
    thread.start()
    try:
        for turn in range(200):
            policy = (Policy.SUM, Policy.ACCUMULATE)[turn % 2]
            server.declare(5, CHUNK, policy=policy)
            for rank in range(2):
                server.post(rank, bytes(CHUNK), key=5 << 16)
            for rank in range(2):
                take(server, rank, 5 << 16, 1, 1)
            server.store.forget_tensor(5, timeout_s=TIMEOUT_S)
    finally:
        enough.set()
        thread.join(TIMEOUT_S)
    assert rounds[0] > 0
    assert server.store.statistics()["tensors"] == 1
