# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_windows_jobs.py do."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from run_program import mark

import fastps
from fastps import topology
from fastps.errors import FastPSError, MismatchError, PeerLostError

SHAPES = ((23,), (23, 23), (23, 23, 23), (), (0,), (300_001,))


def full(shape: tuple[int, ...], value: float, dtype: Any = np.float32) -> np.ndarray:
    """Make an array whose elements differ, around a worker's value."""
    count = int(np.prod(shape))
    return (value + np.arange(count) % 8 / 8).astype(dtype).reshape(shape)


def near(found: np.ndarray, value: float, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, full(found.shape, value), rtol=0, atol=tolerance)


def fresh(name: str, me: int, shape: tuple[int, ...], **how: Any) -> np.ndarray:
    array = full(shape, me)
    assert fastps.win_create(array, name, **how)
    return array


def ends(me: int, n: int) -> tuple[list[int], list[int]]:
    steps = [2**k for k in range(n.bit_length()) if 2**k < n]
    return [(me - d) % n for d in steps], [(me + d) % n for d in steps]


def creates_and_updates(me: int, n: int, shape: tuple[int, ...]) -> None:
    """Create, update without a put, free, list."""
    array = fresh("a", me, shape)
    assert not fastps.win_create(array, "a")
    fresh("b", me, shape)
    assert fastps.get_current_created_window_names() == ["a", "b"]
    assert fastps.win_update("a") is array
    near(array, me)
    assert fastps.win_free("a")
    assert not fastps.win_free("a")
    assert fastps.win_free()
    assert fastps.get_current_created_window_names() == []
    array = fresh("a", me, shape, zero_init=True)
    near(fastps.win_update("a", 0.5, dict.fromkeys(ends(me, n)[0], 1.0)), 0.5 * me, 0.6)
    fastps.win_free()
    fresh("a", me, shape)
    sources = ends(me, n)[0]
    near(fastps.win_update("a", 0.25, {one: 0.75 / len(sources) for one in sources}), me)
    fastps.win_free()


def weighs_a_star(me: int, n: int) -> None:
    """Buffers keep old copies where the array changes."""
    fastps.set_topology(topology.star_graph(n), is_weighted=True)
    array = np.full((23, 23), float(me), np.float32)
    fastps.win_create(array, "star")
    array *= 2
    fastps.set_topology(topology.ring_graph(n))  # the window keeps its graph
    found = fastps.win_update("star")
    wanted = 2 * me / n + me * (n - 1) / n if me == 0 else me / n + 2 * me * (1 - 1 / n)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    fastps.win_free("star")
    fastps.set_topology(None)


def collects(me: int, n: int, shape: tuple[int, ...]) -> None:
    degree = len(ends(me, n)[0])
    array = np.full(shape, float(me), np.float32)
    fastps.win_create(array, "c")
    for _ in range(2):
        np.testing.assert_allclose(fastps.win_update_then_collect("c"), me * (degree + 1))
    fastps.win_free()


def puts(me: int, n: int, shape: tuple[int, ...]) -> None:
    """Put, blocking and not, to all and to some, and update."""
    sources, _ = ends(me, n)
    degree = len(sources)
    for is_locked in (False, True):
        array = fresh("p", me, shape)
        assert fastps.win_put(array, "p", require_mutex=is_locked)
        fastps.barrier()
        near(fastps.win_update("p", require_mutex=is_locked), (me + sum(sources)) / (degree + 1))
        fastps.win_free()
    array = fresh("p", me, shape)
    handle = fastps.win_put_async(array, "p", dst_weights=[(me + 1) % n])
    assert fastps.win_wait(handle)
    assert fastps.win_poll(handle)
    fastps.barrier()
    near(fastps.win_update("p"), (me * degree + (me - 1) % n) / (degree + 1))
    fastps.win_free()
    array = np.full(shape, float(me), np.float32)
    fastps.win_create(array, "p")
    fastps.win_put(array, "p", dst_weights={(me + 1) % n: 1.23})
    fastps.barrier()
    wanted = (me * degree + 1.23 * ((me - 1) % n)) / (degree + 1)
    np.testing.assert_allclose(fastps.win_update("p"), wanted, atol=1e-5)
    fastps.win_free()


def accumulates(me: int, n: int, shape: tuple[int, ...]) -> None:
    sources, _ = ends(me, n)
    degree = len(sources)
    for is_locked in (False, True):
        array = np.full(shape, float(me), np.float32)
        fastps.win_create(array, "s")
        fastps.win_accumulate(array, "s", require_mutex=is_locked)
        fastps.barrier()
        wanted = me + sum(sources) / (degree + 1)
        np.testing.assert_allclose(fastps.win_update("s"), wanted, atol=1e-5)
        fastps.win_free()
    array = np.full(shape, float(me), np.float32)
    fastps.win_create(array, "s")
    fastps.win_accumulate(array, "s", dst_weights={(me + 1) % n: 1.23})
    fastps.barrier()
    left = (me - 1) % n
    found = fastps.win_update("s", 0.5, {left: 0.5})
    np.testing.assert_allclose(found, me + 1.23 * left / 2, atol=1e-5)
    fastps.win_free()


def gets(me: int, n: int, shape: tuple[int, ...], *, is_shared: bool) -> None:
    """Get from arrays of either memory."""
    sources, _ = ends(me, n)
    for is_locked in (False, True):
        array = fastps.empty(shape, np.float32) if is_shared else np.empty(shape, np.float32)
        array[...] = full(shape, me)
        fastps.win_create(array, "g", zero_init=True)
        assert fastps.win_get("g", require_mutex=is_locked)
        fastps.barrier()
        near(fastps.win_update("g"), (me + sum(sources)) / (len(sources) + 1))
        fastps.barrier()
        array[...] = float(me)
        fastps.barrier()
        left = (me - 1) % n
        fastps.win_wait(fastps.win_get_async("g", {left: 1.23}, require_mutex=is_locked))
        fastps.barrier()
        found = fastps.win_update("g", 0.5, {left: 0.5})
        np.testing.assert_allclose(found, (me + 1.23 * left) / 2, atol=1e-5)
        fastps.win_free()


def versions(me: int, n: int, shape: tuple[int, ...]) -> None:
    sources, _ = ends(me, n)
    array = fresh("v", me, shape)
    for act in (lambda: fastps.win_put(array, "v"), lambda: fastps.win_get("v")):
        assert fastps.get_win_version("v") == dict.fromkeys(sources, 0)
        fastps.barrier()
        act()
        fastps.barrier()
        assert fastps.get_win_version("v") == dict.fromkeys(sources, 1)
        fastps.win_update("v")
        fastps.barrier()
    assert fastps.get_win_version("v") == dict.fromkeys(sources, 0)
    fastps.win_free()


def types(me: int, n: int) -> None:
    """Half types and integers too."""
    sources, _ = ends(me, n)
    before, after = (me - 1) % n, (me + 1) % n
    for dtype in (np.float16, ml_dtypes.bfloat16):  # weighed in float32, and rounded once
        array = (1 + np.arange(9_001) % 97 / 97).astype(dtype) * dtype(1 + me % 2)
        sent = array / dtype(1 + me % 2) * dtype(1 + before % 2)
        fastps.win_create(array, "h", zero_init=True)
        fastps.win_accumulate(array, "h", dst_weights={after: 0.3})
        fastps.barrier()
        wanted = (np.float32(0.3) * sent.astype(np.float32)).astype(dtype).astype(np.float32)
        wanted = np.float32(0.6) * array.astype(np.float32) + np.float32(0.7) * wanted
        found = fastps.win_update("h", 0.6, {before: 0.7})
        np.testing.assert_array_equal(found, wanted.astype(dtype))
        fastps.barrier()
        fastps.win_free()
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int64):
        array = np.full(9_001, me * (len(sources) + 1), dtype)
        fastps.win_create(array, "t")
        fastps.win_put(array, "t")
        fastps.win_flush("t")
        fastps.barrier()
        np.testing.assert_array_equal(fastps.win_update("t"), me + sum(sources))
        fastps.win_free()
    array = np.zeros(3, np.int32)
    fastps.win_create(array, "t")
    with pytest.raises(TypeError, match="is for floats, not int32"):
        fastps.win_put(array, "t", dst_weights={(me + 1) % n: 0.5})
    fastps.win_free()


def mutexes(me: int) -> None:
    """Who holds its own mutex is waited for."""
    array = np.zeros(23, np.float32)
    fastps.win_create(array, "m")
    fastps.barrier()
    if me == 0:
        with fastps.win_mutex("m", for_self=True):
            fastps.barrier()
            time.sleep(0.4)
    else:
        fastps.barrier()
        began = time.monotonic()
        with fastps.win_mutex("m", ranks=[0]):
            assert 0.2 < time.monotonic() - began < 5.0
    fastps.barrier()
    if me == 0:
        with fastps.win_mutex("m", for_self=True, ranks=[1]):
            fastps.barrier()
            fastps.barrier()
    else:
        fastps.barrier()
        if me > 1:
            with fastps.win_mutex("m", ranks=[0]):
                pass
        fastps.barrier()
    fastps.win_free()


def associated_p(me: int, n: int) -> None:
    """One sends on a ring; then anything at random, where each value is its P."""
    fastps.turn_on_win_ops_with_associated_p()
    fastps.set_topology(topology.ring_graph(n))
    around = fastps.out_neighbor_ranks()
    array = np.ones(23)
    fastps.win_create(array, "P", zero_init=True)
    if me == 0:
        fastps.win_accumulate(array, "P", 0.5, dict.fromkeys(around, 0.5))
    fastps.barrier()
    fastps.win_update_then_collect("P")
    wanted = 0.5 if me == 0 else 1.5 if me in (1, n - 1) else 1.0
    assert fastps.win_associated_p("P") == wanted
    np.testing.assert_array_equal(array, wanted)
    fastps.win_free()
    fastps.set_topology(None)
    array = np.ones(40_001)
    fastps.win_create(array, "P", zero_init=True)
    sources, targets = ends(me, n)
    random = np.random.default_rng(me)
    for _ in range(10):
        weights = {one: random.random() for one in targets}
        fastps.win_put(array, "P", random.random(), weights)
        fastps.win_update("P", 0.5, {one: 0.5 / len(sources) for one in sources})
        fastps.win_wait(fastps.win_accumulate_async(array, "P", 0.5, weights, bool(me % 2)))
        fastps.win_update_then_collect("P", require_mutex=bool(random.integers(2)))
        np.testing.assert_allclose(array, fastps.win_associated_p("P"), rtol=1e-9)
    fastps.barrier()
    fastps.win_free()
    fastps.turn_off_win_ops_with_associated_p()


def errors(me: int, n: int) -> None:
    """Bad input is named."""
    with pytest.raises(ValueError, match="there is no window 'x'"):
        fastps.win_update("x")
    array = np.zeros(23, np.float32)
    with pytest.raises(MismatchError, match="worker 1 has 96 bytes of FLOAT32, and worker 0 92"):
        fastps.win_create(np.zeros(24, np.float32) if me == 1 else array, "e")
    assert fastps.win_create(array, "e")
    for call, words in (
        (lambda: fastps.win_put(array[1:], "e"), "the array is"),
        (lambda: fastps.win_put(array, "e", dst_weights=[me]), "dst_weights name"),
        (lambda: fastps.win_get("e", {n: 1.0}), "src_weights name"),
        (lambda: fastps.win_update("e", 0.5), "both or neither"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    fastps.win_free()


def everything() -> str:
    """Do every row of the table."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    for shape in SHAPES:
        creates_and_updates(me, n, shape)
        collects(me, n, shape)
        puts(me, n, shape)
        accumulates(me, n, shape)
        gets(me, n, shape, is_shared=True)
        gets(me, n, shape, is_shared=False)
        versions(me, n, shape)
    types(me, n)
    mutexes(me)
    errors(me, n)
    if n > 2:
        weighs_a_star(me, n)
        associated_p(me, n)
    fastps.shutdown()
    return "done"


def long_ones() -> str:
    """Windows of 4 MiB and more, whose copies and sums several threads share."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    for count in ((1 << 20) - 1, (1 << 20) + 1, 2_200_003):
        puts(me, n, (count,))
        accumulates(me, n, (count,))
        gets(me, n, (count,), is_shared=True)
        gets(me, n, (count,), is_shared=False)
    fastps.shutdown()
    return "done"


def alone() -> str:
    """Windows of a job of one."""
    fastps.init()
    array = fresh("w", 3, (23,))
    fastps.win_put(array, "w", self_weight=0.5)
    near(fastps.win_update("w") * 2, 3)
    with fastps.win_mutex("w", for_self=True):
        assert fastps.get_win_version("w") == {}
    assert fastps.win_free()
    fastps.shutdown()
    return "done"


def busy() -> list[float]:
    """Put to those whose Python does nothing but count, or sleep."""
    fastps.init()
    me, found = fastps.rank(), []
    fastps.set_topology(topology.ring_graph(fastps.size(), 2))
    array = np.full(500_000, float(me))
    fastps.win_create(array, "w", zero_init=True)
    fastps.barrier()
    for turn in range(2):
        began = time.monotonic()
        if me == 0:
            for _ in range(5):
                fastps.win_put(array, "w", require_mutex=True)
            fastps.win_get("w", require_mutex=True)
            found.append(time.monotonic() - began)
        elif turn == 0:
            while time.monotonic() < began + 2.0:
                pass
        else:
            time.sleep(2.0)
        fastps.barrier()
    fastps.shutdown()
    return found


def push_sum(rounds: int) -> list[float]:
    """Do push-sum at random times, stopped now and then; give what this worker holds."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    fastps.turn_on_win_ops_with_associated_p()
    array = np.full(60_000, float(me + 1))
    fastps.win_create(array, "x", zero_init=True)
    random = np.random.default_rng(me)
    share = 1 / (len(fastps.out_neighbor_ranks()) + 1)
    weights = dict.fromkeys(fastps.out_neighbor_ranks(), share)
    mark("begun")
    for _ in range(rounds):
        time.sleep(random.random() * 0.01)
        fastps.win_accumulate(array, "x", share, weights, bool(random.integers(2)))
        fastps.win_update_then_collect("x", bool(random.integers(2)))
    fastps.barrier()
    fastps.win_update_then_collect("x")
    fastps.barrier()
    p = fastps.win_associated_p("x")
    spread = float(np.ptp(array))
    for _ in range(40):  # in step, to agree
        fastps.win_accumulate(array, "x", share, weights)
        fastps.barrier()
        fastps.win_update_then_collect("x")
        fastps.barrier()
    found = [float(array[0]), p, spread, float(array[0]) / fastps.win_associated_p("x")]
    assert fastps.win_associated_p("x") <= n
    mass = [float(array[0]), fastps.win_associated_p("x")]
    fastps.shutdown()
    return [*found, *mass]


def killed() -> str:
    """Put until a neighbour dies; say how that ended."""
    fastps.init()
    array = np.zeros(2_000_000)
    fastps.win_create(array, "w")
    mark("begun")
    try:
        while True:
            fastps.win_accumulate(array, "w", require_mutex=True)
            fastps.win_update_then_collect("w")
    except PeerLostError as error:
        try:
            fastps.win_put(array, "w")
        except FastPSError as again:
            return f"{error} / {type(again).__name__}"
        raise


def creates_late() -> str:
    """Create a window; the last worker comes after the others' time limit."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    x, stalls = np.full(9, float(me)), 0
    if me == n - 1:
        time.sleep(2.5)
    while True:
        try:
            assert fastps.win_create(x, "late", zero_init=True)
        except fastps.StallError:
            stalls += 1
            with pytest.raises(ValueError, match="with the same array again"):
                fastps.win_create(np.zeros(9), "late")
        else:
            break
    assert (stalls > 0) is (me < n - 1)
    fastps.win_put(x, "late")
    fastps.barrier()
    fastps.win_update("late")
    assert (x == (n - 1) / 2).all(), x  # all are neighbours
    assert fastps.win_free("late")
    fastps.shutdown()
    return "done"
