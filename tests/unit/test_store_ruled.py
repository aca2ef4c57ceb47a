# SPDX-License-Identifier: Apache-2.0
"""Rules that look at each frame of whole tensors: orders of arrival, losses, threads."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import CHUNK, PEER_LOST, TIMEOUT_S, Server, make  # noqa: F401

from aids.kernels import GatedSum
from fastps import byzantine as bz
from fastps.contract.rule import Kind, Rule
from fastps.reduce._partition import Combiner
from fastps.server._policies import RuledRule
from fastps.types import DType

WORKERS = 7
KEY = 1 << 16
RULES = [
    bz.Krum(1), bz.MultiKrum(1, keep=4), bz.Bulyan(1), bz.GeometricMedian(),
    bz.NormClipping(3000.0), bz.CenteredClipping(3000.0),
]  # fmt: skip
EXACT = (Kind.KRUM, Kind.MULTI_KRUM)  # of whole numbers, if those that count are 1, 2, 4


def declare(server: Server, rule: Rule, nbytes: int, tensor_id: int = 1) -> None:
    """Make a tensor under a rule for whole tensors."""
    combiner = Combiner(rule, DType.FLOAT32, n=len(server.boxes), count=nbytes // 4)
    ruled = RuledRule(combiner)
    assert ruled.look, "the rule is not one that looks first"
    server.nbytes = nbytes
    server.declare(
        tensor_id, nbytes, kernel=ruled.kernel, look=ruled.look, states={0: ruled}, is_ruled=True
    )


def whole_numbers(rank: int, step: int, count: int) -> np.ndarray:
    """Make an update whose squares and distances are exact, however they are added up."""
    numbers = np.random.default_rng([rank, step]).integers(1, 2000, count).astype(np.float32)
    return -5 * numbers if rank == 2 else numbers


def push_frames(server: Server, updates: list[np.ndarray], order: list[int], version: int) -> None:
    """Push all updates of a round, frame by frame; order: whose frame comes next."""
    sent = [0] * len(updates)
    for rank in order:
        payload = updates[rank].tobytes()[sent[rank] : sent[rank] + CHUNK]
        if payload or not sent[rank]:
            server.post(rank, payload, key=KEY, offset=sent[rank], key_version=version)
        sent[rank] += CHUNK


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("engine_threads", [0, 2])
def test_results_are_those_of_the_formulas_in_any_order_of_arrival(engine_threads, data):
    rule = data.draw(st.sampled_from(RULES))
    count = data.draw(st.integers(1, 3 * CHUNK // 4 + 3))
    frames = -(-count * 4 // CHUNK)
    lenders = tuple(data.draw(st.sets(st.integers(0, WORKERS - 1))))
    server = Server(WORKERS, engine_threads=engine_threads, lenders=lenders)
    try:
        declare(server, rule, 4 * count)
        once, last = Combiner(rule, DType.FLOAT32, n=WORKERS, count=count), None
        for version in (1, 2, 3):
            updates = [whole_numbers(rank, version, count) for rank in range(WORKERS)]
            if version == 2:
                updates[3][-1] = np.inf  # noticed with the last frame alone
            order = data.draw(st.permutations(list(range(WORKERS)) * frames))
            push_frames(server, updates, order, version)
            wanted, refused = once.combine(updates, version=version)
            assert refused == [3] * (version == 2)
            last = bz.combine(rule, updates, version=version, last=last)
            np.testing.assert_allclose(wanted, last, rtol=1e-5, atol=1e-5)
            for rank in range(WORKERS):
                found = server.result(rank, version)
                np.testing.assert_array_equal(found, wanted)
                if rule.kind in EXACT:
                    np.testing.assert_array_equal(found, np.float32(last))
        assert server.store.statistics()["updates_refused"] == 1
    finally:
        server.close()


# ---- workers that are lost ----


def gated(make: Any, address: str, lenders: tuple[int, ...] = ()) -> tuple[Server, GatedSum]:  # noqa: F811
    """Make a server of three workers whose rule waits: where it looks, or where it makes."""
    ruled = RuledRule(Combiner(bz.Krum(0), DType.FLOAT32, n=3, count=3 * CHUNK // 4))
    gate = GatedSum(timeout_s=TIMEOUT_S, address=getattr(ruled, address))
    addresses = {"kernel": ruled.kernel, "look": ruled.look, address: gate.address}
    server: Server = make(3, lenders=lenders)
    server.declare(1, server.nbytes, states={0: ruled}, is_ruled=True, **addresses)
    return server, gate


def lose(server: Server, gate: GatedSum, rank: int) -> None:
    """End a worker's link while the rule works, and wait until the store knows."""
    ending = threading.Thread(target=server.boxes[rank].end, args=(0, PEER_LOST))
    ending.start()
    try:
        while not server.store.statistics()["rounds_failed"]:
            assert ending.is_alive() or not gate.go.is_set()
    finally:
        gate.go.set()
        ending.join(TIMEOUT_S)


def test_who_is_lost_while_the_rule_looks_fails_the_round(make):  # noqa: F811
    server, gate = gated(make, "look")
    values = [whole_numbers(rank, 1, 3 * CHUNK // 4) for rank in range(3)]
    for rank in (0, 1):
        server.push(rank, values[rank], key=KEY)
    server.post(2, values[2].tobytes()[:CHUNK], key=KEY)
    assert gate.begun.wait(TIMEOUT_S)
    lose(server, gate, 2)
    for rank in (0, 1):
        assert server.error(rank) == (1, PEER_LOST, 2)
    assert gate.calls == 1


def test_what_the_lost_one_lent_is_not_read_for_the_result(make):  # noqa: F811
    """All was looked at, and the first frame is being made."""
    server, gate = gated(make, "kernel", lenders=(2,))
    for rank in range(3):
        server.push(rank, whole_numbers(rank, 1, 3 * CHUNK // 4), key=KEY)
    assert gate.begun.wait(TIMEOUT_S)
    lose(server, gate, 2)
    for rank in (0, 1):
        assert server.error(rank) == (1, PEER_LOST, 2)
    assert gate.calls == 1


def test_what_the_lost_one_pushed_counts_when_all_was_looked_at(make):  # noqa: F811
    server, gate = gated(make, "kernel")
    values = [whole_numbers(rank, 1, 3 * CHUNK // 4) for rank in range(3)]
    for rank in range(3):
        server.push(rank, values[rank], key=KEY)
    assert gate.begun.wait(TIMEOUT_S)
    server.boxes[2].end(0, PEER_LOST)
    while 2 not in server.store.wait_news(timeout_s=TIMEOUT_S):
        pass
    gate.go.set()
    wanted = bz.combine(bz.Krum(0), values).astype(np.float32)
    for rank in (0, 1):
        np.testing.assert_array_equal(server.result(rank), wanted)
    assert gate.calls == 3


# ---- threads ----


def test_rules_of_several_tensors_work_at_the_same_time(make):  # noqa: F811
    server: Server = make(3, engine_threads=2)
    rule = bz.Krum(0)
    combiners = [Combiner(rule, DType.FLOAT32, n=3, count=3 * CHUNK // 4) for _ in range(2)]
    ruled = [RuledRule(one) for one in combiners]
    gates = [GatedSum(timeout_s=TIMEOUT_S, address=one.look) for one in ruled]
    for i, (one, gate) in enumerate(zip(ruled, gates, strict=True), 1):
        server.declare(i, server.nbytes, kernel=one.kernel, look=gate.address, states={0: one},
                       is_ruled=True)  # fmt: skip
    for tensor, rank in itertools.product((1, 2), range(3)):
        values = whole_numbers(rank, tensor, 3 * CHUNK // 4)
        server.push(rank, values, key=tensor << 16)
    for gate in gates:  # none of them has gone on
        assert gate.begun.wait(TIMEOUT_S)
    for tensor, gate in enumerate(gates, 1):
        gate.go.set()
        values = [whole_numbers(rank, tensor, 3 * CHUNK // 4) for rank in range(3)]
        for rank in range(3):
            np.testing.assert_array_equal(server.result(rank), bz.combine(rule, values))
