# SPDX-License-Identifier: Apache-2.0
"""Windows of several workers in one process, against a model of dense matrices in NumPy."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_fleet import TIMEOUT_S, WAYS, Fleet, done, spread

from aids.faces import threads_alive
from aids.wire import FrameKind, Header, pack_header
from fastps import topology
from fastps._core import CopyPool
from fastps.collectives._exchange import Exchange
from fastps.errors import Status
from fastps.graph._windows import Window, Windows
from fastps.topology import Topology
from fastps.transport.tcp._transport import TcpTransport
from fastps.types import DType
from fastps.worker._engine import WorkerEngine

WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)  # so that sums are exact
COUNTS = (0, 1, 5, 20_003, 40_000)
LONG = 4 << 20  # bytes with which hands help, where there are some


class Model:
    """What all windows hold: values and P of all workers as rows, and of all buffers."""

    def __init__(self, graph: Topology, arrays: list[np.ndarray], *, zero: bool) -> None:
        n = self.n = graph.size
        self.graph = graph
        self.x = [array.copy() for array in arrays]
        self.p = np.ones(n)
        self.edges = [(i, j) for i in range(n) for j in graph.out_neighbors(i)]
        self.b = {(i, j): arrays[j] * (0.0 if zero else 1.0) for i, j in self.edges}
        self.bp = dict.fromkeys(self.edges, 0.0)
        self.v = dict.fromkeys(self.edges, 0)

    def put(self, me: int, weights: dict[int, float], keep: float, *, adds: bool) -> None:
        for to, weight in weights.items():
            old = (self.b[me, to], self.bp[me, to]) if adds else (0.0, 0.0)
            self.b[me, to] = old[0] + weight * self.x[me]
            self.bp[me, to] = old[1] + weight * self.p[me]
            self.v[me, to] += not adds
        self.x[me] = self.x[me] * keep
        self.p[me] *= keep

    def get(self, me: int, weights: dict[int, float]) -> None:
        for source, weight in weights.items():
            self.b[source, me] = weight * self.x[source]
            self.v[source, me] += 1

    def update(self, me: int, own: float, weights: dict[int, float], resets: list[int]) -> None:
        self.x[me] = own * self.x[me] + sum(w * self.b[j, me] for j, w in weights.items())
        self.p[me] = own * self.p[me] + sum(w * self.bp[j, me] for j, w in weights.items())
        for j in self.graph.in_neighbors(me):
            self.v[j, me] = 0
            if j in resets:
                self.b[j, me], self.bp[j, me] = self.b[j, me] * 0.0, 0.0

    def check(self, windows: list[Window], arrays: list[np.ndarray]) -> None:
        for me, window in enumerate(windows):
            np.testing.assert_array_equal(arrays[me], self.x[me])
            assert window.p == self.p[me]
            assert window.versions() == {j: self.v[j, me] for j in window.sources}
            assert window.masses() == {j: self.bp[j, me] for j in window.sources}
            for j in window.sources:
                found = np.frombuffer(window.peek(j), arrays[me].dtype)
                np.testing.assert_array_equal(found, self.b[j, me])


@st.composite
def graphs(draw: Any) -> Topology:
    """Draw any directed graph of 1 to 5 workers."""
    n = draw(st.integers(1, 5))
    bits = draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))
    weights = np.array(bits, float).reshape(n, n)
    np.fill_diagonal(weights, 1.0)
    return Topology(weights)


def some(data: Any, peers: tuple[int, ...]) -> dict[int, float]:
    chosen = data.draw(st.lists(st.sampled_from(peers), unique=True)) if peers else []
    return {peer: data.draw(st.sampled_from(WEIGHTS)) for peer in chosen}


def step(data: Any, model: Model, windows: list[Window], arrays: list[np.ndarray]) -> None:
    """Draw what one worker does, several actions in flight; do it, and to the model too."""
    me = data.draw(st.integers(0, model.n - 1))
    window, flights = windows[me], []
    for _ in range(data.draw(st.integers(1, 3))):
        what = data.draw(st.sampled_from(["put", "add", "get", "update"]))
        is_locked = data.draw(st.booleans())
        if what == "get":
            weights = some(data, window.sources)
            flights.append(window.get(weights, is_locked=is_locked))
            model.get(me, weights)
        elif what == "update":
            own, weights = data.draw(st.sampled_from(WEIGHTS)), some(data, window.sources)
            resets = [peer for peer in weights if data.draw(st.booleans())]
            flights.append(
                window.update(own, weights, resets=resets, is_locked=is_locked, has_p=True)
            )
            model.update(me, own, weights, resets)
        else:
            weights, keep = some(data, window.targets), data.draw(st.sampled_from(WEIGHTS))
            flights.append(
                window.put(
                    arrays[me], weights, adds=what == "add", self_weight=keep, has_p=True,
                    is_locked=is_locked, is_inline=data.draw(st.booleans()),
                )
            )  # fmt: skip
            model.put(me, weights, keep, adds=what == "add")
    for flight in flights:
        done(flight)


@settings(max_examples=60, deadline=None)
@given(st.data(), graphs(), st.sampled_from(WAYS), st.booleans())
def test_windows_do_what_matrices_do(data, graph, way, zero):
    fleet = Fleet(graph.size, way)
    try:
        compare(data, fleet, graph, zero=zero)
    finally:  # also where data run out
        fleet.close()


def compare(data: Any, fleet: Fleet, graph: Topology, *, zero: bool) -> None:
    """Do random steps and see that all holds what the model says."""
    count = data.draw(st.sampled_from(COUNTS))
    arrays = [np.arange(count, dtype=np.float64) % 7 + me for me in range(graph.size)]
    is_readable = data.draw(st.booleans())
    windows = fleet.create(graph, arrays, zero=zero, is_readable=is_readable)
    model = Model(graph, arrays, zero=zero)
    for _ in range(data.draw(st.integers(0, 6))):
        step(data, model, windows, arrays)
    model.check(windows, arrays)
    assert all(window.free(timeout_s=TIMEOUT_S) for window in windows)


@pytest.fixture(params=WAYS)
def make(request: Any) -> Any:
    """Give what makes a fleet, which ends with the test."""
    fleets: list[Fleet] = []

    def run(n: int) -> Fleet:
        fleets.append(Fleet(n, request.param))
        return fleets[-1]

    yield run
    for fleet in fleets:
        fleet.close()


Make = Callable[[int], Fleet]


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(np.float16, None), (np.float64, None), (np.int32, None), (np.int64, None),
     (ml_dtypes.bfloat16, DType.BFLOAT16)],
)  # fmt: skip
def test_every_type_is_put_added_and_averaged(make, dtype, code):
    fleet, graph = make(4), topology.exponential_graph(4)
    arrays = [np.full(1001, 3 * me + 3).astype(dtype) for me in range(4)]
    raw = [array.view(np.uint16) if code else array for array in arrays]
    windows = fleet.create(graph, raw, zero=True, dtype=code)
    for me, window in enumerate(windows):
        done(window.put(raw[me], dict.fromkeys(window.targets, 1.0)))
        done(window.put(raw[me], dict.fromkeys(window.targets, 1.0), adds=True))
    for window in windows:
        done(window.update(**spread(window)))
    wanted = [
        (3 * me + 3 + 2 * sum(3 * j + 3 for j in windows[me].sources)) / 3 for me in range(4)
    ]
    assert [float(array[1000]) for array in arrays] == wanted


@pytest.mark.parametrize("count", [LONG // 4 - 1, LONG // 4, LONG // 4 + 8193, 3_000_001])
def test_long_windows_by_many_hands(make, count):
    """Every copy and sum of arrays around 4 MiB, and longer ones, which several threads share."""
    fleet, graph, hands = make(3), topology.fully_connected_graph(3), CopyPool(3)
    random = np.random.default_rng(count)
    arrays = [random.integers(-99, 99, count).astype(np.float32) for _ in range(3)]
    model = Model(graph, arrays, zero=False)
    windows = fleet.create(graph, arrays, is_readable=bool(count % 2))
    for me, window in enumerate(windows):
        one, other = window.targets
        for weights, keep, adds in (
            ({one: 1.0, other: 0.5}, 1.0, False), ({one: 1.0, other: 0.25}, 0.5, True)
        ):  # fmt: skip
            done(window.put(arrays[me], weights, adds=adds, self_weight=keep, has_p=True))
            model.put(me, weights, keep, adds=adds)
        done(window.get({one: 1.0, other: 2.0}))
        model.get(me, {one: 1.0, other: 2.0})
        done(window.update(0.5, {one: 1.0, other: 0.25}, resets=[other], has_p=True))
        model.update(me, 0.5, {one: 1.0, other: 0.25}, [other])
        done(window.update(1.0, {one: 1.0, other: 1.0}, resets=[one], is_mean=True, has_p=True))
        model.update(me, 1.0, {one: 1.0, other: 1.0}, [one])
    model.check(windows, arrays)
    assert hands.close()


def test_mass_is_kept_whatever_meets(make):
    """Push-sum at random times: values and P, in arrays and buffers, always sum to the same."""
    n, rounds = 4, 40
    fleet, graph = make(n), topology.exponential_graph(n)
    arrays = [np.full(30_000, float(me + 1)) for me in range(n)]
    windows = fleet.create(graph, arrays, zero=True)
    failures: list[BaseException] = []

    def work(me: int) -> None:
        window, random = windows[me], np.random.default_rng(me)
        share = 1 / (len(window.targets) + 1)
        try:
            for _ in range(rounds):
                flights = [
                    window.put(
                        arrays[me], dict.fromkeys(window.targets, share), adds=True,
                        self_weight=share, has_p=True, is_inline=bool(random.integers(2)),
                        is_locked=bool(random.integers(2)),
                    )
                    for _ in range(random.integers(1, 4))
                ]  # fmt: skip
                ones = dict.fromkeys(window.sources, 1.0)
                flights.append(
                    window.update(1.0, ones, resets=window.sources, is_mean=True, has_p=True,
                                  is_locked=bool(random.integers(2)))
                )  # fmt: skip
                for flight in flights:
                    done(flight)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    total, mass = sum(arrays), sum(window.p for window in windows)
    for window in windows:
        total = total + sum(np.frombuffer(window.peek(one)) for one in window.sources)
        mass += sum(window.masses().values())
    np.testing.assert_allclose(total, n * (n + 1) / 2, rtol=1e-12)
    assert mass == pytest.approx(n, rel=1e-12)
    assert all(np.ptp(array) < 1e-12 for array in arrays)  # each put took effect at once


def test_an_exchange_has_windows_once(make):
    """The second ones start no thread, which would outlive them."""
    fleet, before = make(1), threads_alive()
    with pytest.raises(ValueError, match="has windows already"):
        Windows(fleet.exchanges[0])
    assert threads_alive() == before


def test_a_mutex_keeps_others_out_in_their_order(make):
    fleet = make(4)
    windows = fleet.create(topology.fully_connected_graph(4), [np.zeros(3)] * 4)
    first = done(windows[1].lock([0]))
    waiting = []
    for me in (2, 0, 3):
        waiting.append(windows[me].lock([0]))
        assert waiting[-1].wait(timeout_s=0.05) is None
        assert waiting[-1].awaited == [0]
    again = done(windows[1].lock([0]))  # who has it may have it again
    first.unlock()
    assert waiting[0].wait(timeout_s=0.05) is None
    again.unlock()
    for action, later in zip(waiting, [*waiting[1:], None], strict=True):
        done(action)
        assert later is None or later.wait(timeout_s=0.05) is None
        action.unlock()


def test_an_owner_keeps_out_some(make):
    fleet = make(3)
    arrays = [np.full(3, float(me)) for me in range(3)]
    windows = fleet.create(topology.fully_connected_graph(3), arrays)
    own = done(windows[0].lock([0], excluded=[1]))
    done(windows[2].put(arrays[2], {0: 1.0}, is_locked=True))
    kept_out = windows[1].put(arrays[1], {0: 1.0}, is_locked=True)
    assert kept_out.wait(timeout_s=0.1) is None
    own.unlock()
    done(kept_out)
    assert windows[0].versions() == {1: 1, 2: 1}


def test_a_wish_for_a_mutex_can_be_taken_back(make):
    fleet = make(3)
    windows = fleet.create(topology.fully_connected_graph(3), [np.zeros(3)] * 3)
    held = done(windows[0].lock([0, 1]))
    wish = windows[1].lock([0, 1])
    assert wish.wait(timeout_s=0.05) is None
    wish.unlock()
    assert wish.wait(timeout_s=TIMEOUT_S) == Status.TIMEOUT
    held.unlock()
    done(windows[2].lock([0, 1])).unlock()


def test_a_get_that_waits_for_the_owner_counts_once(make):
    fleet = make(2)
    windows = fleet.create(topology.fully_connected_graph(2), [np.zeros(3), np.ones(3)])
    turn = fleet.rooms[1][:8].view(np.int64)
    turn += 1  # as while worker 1 writes its array
    get = windows[0].get({1: 1.0})
    assert fleet.way == "frames" or get.wait(timeout_s=0.05) is None
    turn += 1
    done(get)
    assert windows[0].versions() == {1: 1}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_is_gone_fails_what_needs_it_and_holds_no_mutex(make):
    fleet = make(4)
    arrays = [np.zeros(50_000) for _ in range(4)]
    windows = fleet.create(topology.fully_connected_graph(4), arrays)
    done(windows[3].lock([0]))
    wish = windows[1].put(arrays[1], {0: 1.0}, is_locked=True)
    assert wish.wait(timeout_s=0.05) is None
    fleet.exchanges[3].fail(Status.PEER_LOST)  # its links end
    done(wish)
    wait_until(lambda: fleet.homes[1].lost == [3])
    lost = windows[1].put(arrays[1], {2: 1.0, 3: 1.0})
    assert lost.wait(timeout_s=TIMEOUT_S) == Status.PEER_LOST
    assert lost.culprit == 3
    done(windows[1].put(arrays[1], {2: 1.0}))


def test_a_window_that_was_freed_refuses(make):
    fleet = make(2)
    arrays = [np.zeros(50_000), np.zeros(50_000)]
    windows = fleet.create(topology.fully_connected_graph(2), arrays)
    assert windows[0].free()
    with pytest.raises(ValueError, match="was freed"):
        windows[0].put(arrays[0], {1: 1.0})
    if fleet.way == "frames":
        assert windows[1].put(arrays[1], {0: 1.0}).wait(timeout_s=TIMEOUT_S) == Status.MISMATCH
        assert windows[1].get({0: 1.0}).wait(timeout_s=TIMEOUT_S) == Status.MISMATCH


def test_a_window_that_is_given_up_stays_while_a_frame_lands():
    """The peer has stopped in the middle of a frame, and goes on later."""
    nbytes, put = 4 << 20, 1
    fleet = Fleet(2)
    transport = TcpTransport()
    lone = Exchange(me=0, n_members=2, engine=WorkerEngine(me=0, n_members=2, lanes={}))
    fleet.homes[0], home = Windows(lone), fleet.homes[0]
    near, far = socket.socketpair()
    try:
        transport.adopt(near.detach(), lone, peer=1)
        arrays = [np.zeros(nbytes, np.uint8) for _ in range(2)]
        windows = fleet.create(topology.fully_connected_graph(2), arrays)
        head = Header(kind=FrameKind.WINDOW, flags=put, key=1, key_version=1, sender=1,
                      dtype=int(DType.UINT8), length=nbytes)  # fmt: skip
        far.sendall(pack_header(head) + bytes(nbytes // 2))  # more than the socket holds
        assert not windows[0].free(timeout_s=0.05)
        windows.clear()
        fleet.rooms.clear()
        gc.collect()
        far.sendall(bytes(nbytes - nbytes // 2))
        far.settimeout(TIMEOUT_S)
        assert far.recv(len(pack_header(head))), "no answer to what has landed"
    finally:
        far.close()
        lone.leave()
        transport.close(timeout_s=TIMEOUT_S)
        lone.dismiss()
        assert fleet.homes[0].stop(timeout_s=TIMEOUT_S)
        fleet.homes[0] = home
        fleet.close()
