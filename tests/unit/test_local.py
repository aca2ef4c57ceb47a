# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine in shared memory, several engines in one process, against NumPy."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps import config
from fastps.errors import FastPSError, PeerLostError, ShutdownError, Status
from fastps.reduce import sum_kernel
from fastps.transport._link import LinkOwner
from fastps.transport.pipe.ptrace import choose_root, list_ancestors
from fastps.types import DType, dtype_of
from fastps.worker import local
from fastps.worker._engine import WorkerEngine
from fastps.worker.local import LocalGroup

E_SHUTDOWN, E_PEER_LOST, E_MISMATCH = Status.SHUTDOWN, Status.PEER_LOST, Status.MISMATCH
TIMEOUT_S = 20.0
LARGE = 1 << 20  # bytes: private arrays of this size go by the stage


@contextlib.contextmanager
def machine(n, **overrides):
    """Make the engines of n ranks, numbered 0, 3, 6 and so on; close them at the end."""
    settings_ = config.load({"start_timeout_s": 20.0, **overrides}, environ={})
    ranks = [3 * place for place in range(n)]
    key = secrets.token_bytes(32)
    groups = [None] * n

    def join(place):
        engine = WorkerEngine(me=ranks[place], n_members=0)
        group = LocalGroup(
            settings_,
            ranks=ranks,
            rank=ranks[place],
            n_workers=n,
            key=key,
            engine=engine,
            exchange=LinkOwner(),
        )
        groups[place] = SimpleNamespace(group=group, engine=engine, arena=group.arena)

    threads = [threading.Thread(target=join, args=(place,)) for place in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    try:
        yield groups
    finally:
        for group in groups:
            group.engine.leave()
        for group in groups:
            assert group.engine.wait_closed(timeout_s=10)
            group.group.close(timeout_s=10)


@pytest.fixture(scope="module", params=[0, 2], ids=["cores", "cores to spare"])
def trio(request):
    """Make three ranks; with cores to spare, or so they think, their helpers stay awake."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(local, "count_cores", lambda *_: request.param)
        with machine(3) as groups:
            yield groups


def declare(groups, number, nbytes, dtype=DType.FLOAT32, version=0):
    """Declare one tensor on all ranks."""
    return [
        group.engine.declare(
            number,
            f"t{number}",
            nbytes=nbytes,
            dtype=dtype,
            itemsize=dtype.itemsize,
            kernel=sum_kernel(dtype),
            version=version,
        )
        for group in groups
    ]


def shared(group, array):
    """Give a copy of an array in a rank's shared memory."""
    block, _ = group.arena.allocate(array.nbytes)
    copy = np.frombuffer(block, dtype=array.dtype, count=array.size)
    copy[:] = array
    return copy


def finish(tensors):
    """Wait for one operation on all ranks; give the statuses."""
    return [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]


_numbers = iter(range(1 << 17))
DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, np.uint8]


@settings(max_examples=60, deadline=None)
@given(
    count=st.one_of(st.integers(0, 300), st.sampled_from([16384, 70001, 300_007])),
    dtype=st.sampled_from(DTYPES),
    is_shared=st.lists(st.booleans(), min_size=3, max_size=3),
    in_place=st.lists(st.booleans(), min_size=3, max_size=3),
    average=st.booleans(),
    order=st.permutations(range(3)),
    seed=st.integers(0, 1 << 30),
)
def test_sum_equals_numpy(trio, count, dtype, is_shared, in_place, average, order, seed):
    rng = np.random.default_rng(seed)
    values = [rng.integers(-20, 20, count).astype(dtype) for _ in trio]
    expected = sum(value.astype(np.float64) for value in values)
    if average:
        expected = expected / 3 if np.dtype(dtype).kind == "f" else np.floor(expected / 3)
    average = average and np.dtype(dtype).kind != "u"
    if not average:
        expected = sum(value.astype(np.int64) for value in values)
    tensors = declare(trio, next(_numbers), values[0].nbytes, dtype_of(np.dtype(dtype)))
    arrays = [
        shared(group, value) if is_here else value.copy()
        for group, value, is_here in zip(trio, values, is_shared, strict=True)
    ]
    outputs = [
        array if here else np.empty_like(array)
        for array, here in zip(arrays, in_place, strict=True)
    ]
    for place in order:
        trio[place].engine.start(tensors[place], arrays[place], outputs[place], average=average)
    assert finish(tensors) == [0, 0, 0]
    for output in outputs:
        assert output.tobytes() == outputs[0].tobytes()
    np.testing.assert_allclose(
        outputs[0].astype(np.float64), expected.astype(dtype).astype(np.float64), rtol=1e-3
    )


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([1, 1000, 100_003, 400_000]),
    root=st.integers(0, 2),
    is_shared=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_broadcast_copies_the_roots_bytes(trio, count, root, is_shared):
    value = np.arange(count, dtype=np.int32)
    tensors = declare(trio, next(_numbers), value.nbytes, DType.INT32)
    arrays = [np.full(count, -1, np.int32) for _ in trio]
    arrays[root][:] = value
    arrays = [
        shared(group, array) if here else array
        for group, array, here in zip(trio, arrays, is_shared, strict=True)
    ]
    for group, tensor, array in zip(trio, tensors, arrays, strict=True):
        group.engine.start_broadcast([tensor], [array], root=3 * root)
    assert finish(tensors) == [0, 0, 0]
    for array in arrays:
        assert np.array_equal(array, value)


def test_all_ways_give_the_same_bits(trio):
    rng = np.random.default_rng(7)
    values = [rng.standard_normal(LARGE // 4).astype(np.float32) for _ in trio]
    expected = (values[0] + values[1]) + values[2]
    for is_shared in (True, False):
        tensors = declare(trio, next(_numbers), LARGE)
        arrays = [
            shared(group, value) if is_shared else value.copy()
            for group, value in zip(trio, values, strict=True)
        ]
        for group, tensor, array in zip(trio, tensors, arrays, strict=True):
            group.engine.start(tensor, array, array)
        assert finish(tensors) == [0, 0, 0]
        assert all(np.array_equal(array, expected) for array in arrays)


def test_many_in_flight_in_another_order_on_every_rank(trio):
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in rng.integers(1, 90_000, 30)]
    numbers = [next(_numbers) for _ in sizes]
    tensors = [
        declare(trio, number, 4 * size) for number, size in zip(numbers, sizes, strict=True)
    ]
    for _ in range(3):
        arrays = [[np.full(size, place + 1, np.float32) for size in sizes] for place in range(3)]
        arrays[1] = [shared(trio[1], array) for array in arrays[1]]
        for place, group in enumerate(trio):
            for index in rng.permutation(len(sizes)):
                array = arrays[place][index]
                group.engine.start(tensors[index][place], array, array)
        for index in rng.permutation(len(sizes)):
            assert finish(tensors[index]) == [0, 0, 0]
            assert all(np.all(arrays[place][index] == 6.0) for place in range(3))


def test_a_tensor_of_more_bytes_than_32_bits_count_is_one_part(trio):
    for tensor, group in zip(declare(trio, next(_numbers), 5 << 30), trio, strict=True):
        assert tensor.nbytes == 5 << 30
        group.engine.forget(tensor)


def test_rounds_without_a_pause(trio):
    tensors = declare(trio, next(_numbers), 4096)
    arrays = [shared(group, np.zeros(1024, np.float32)) for group in trio]
    wrong = []

    def work(place):
        for step in range(300):
            arrays[place][:] = step + place
            trio[place].engine.start(tensors[place], arrays[place], arrays[place])
            tensors[place].wait(timeout_s=TIMEOUT_S)
            if not np.all(arrays[place] == 3 * step + 3):
                wrong.append((place, step))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_number_is_used_again(trio):
    """By all at once, as soon as the last rank has dropped it; memory of copies comes back."""
    number, dropped, wrong = next(_numbers), threading.Barrier(3), []
    used = [group.arena.used_bytes for group in trio]
    declared = [group.engine.statistics()["tensors"] for group in trio]

    def work(place):
        rng, version = np.random.default_rng(7), 0  # the same sizes on all ranks
        for _ in range(150):
            count = int(rng.choice([0, 1, 100, 20_000, 50_000, 100_000]))
            tensor = declare(trio[place : place + 1], number, count * 4, version=version)[0]
            is_shared = rng.integers(0, 2, 3)[place]
            array = np.empty(count, np.float32)
            array = shared(trio[place], array) if is_shared and count else array
            for step in range(rng.integers(1, 4)):
                array[:] = step + place
                is_odd = bool(rng.integers(0, 5) == 0) and place == 1
                trio[place].engine.start(tensor, array, array, average=is_odd)
                status = tensor.wait(timeout_s=TIMEOUT_S)
                if status not in (0, E_MISMATCH) or (
                    status == 0 and np.any(array != 3 * step + 3)
                ):
                    wrong.append((place, version, status))
                version += 1
            trio[place].engine.forget(tensor)
            del array
            dropped.wait(TIMEOUT_S)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert [group.arena.used_bytes for group in trio] == used
    assert [group.engine.statistics()["tensors"] for group in trio] == declared


def test_the_helper_works_while_nobody_waits(trio):
    tensors = declare(trio, next(_numbers), LARGE)
    arrays = [np.ones(LARGE // 4, np.float32) for _ in trio]
    for group, tensor, array in zip(trio, tensors, arrays, strict=True):
        group.engine.start(tensor, array, array)
    finished = threading.Event()
    for _ in range(2000):
        if all(np.all(array == 3) for array in arrays):
            finished.set()
            break
        finished.wait(0.005)
    assert finished.is_set()
    assert finish(tensors) == [0, 0, 0]


def test_another_operation_is_a_mismatch_for_all(trio):
    tensors = declare(trio, next(_numbers), 400)
    arrays = [np.ones(100, np.float32) for _ in trio]
    for place, group in enumerate(trio):
        group.engine.start(tensors[place], arrays[place], arrays[place], average=place == 2)
    assert finish(tensors) == [E_MISMATCH] * 3
    assert {tensor.culprit for tensor in tensors} == {6}


def test_a_name_in_flight_cannot_start_again(trio):
    tensors = declare(trio, next(_numbers), 400)
    arrays = [np.ones(100, np.float32) for _ in trio]
    trio[0].engine.start(tensors[0], arrays[0], arrays[0])
    with pytest.raises(FastPSError, match="in flight"):
        trio[0].engine.start(tensors[0], arrays[0], arrays[0])
    assert tensors[0].wait(timeout_s=0.05) is None
    for place in (1, 2):
        trio[place].engine.start(tensors[place], arrays[place], arrays[place])
    assert finish(tensors) == [0, 0, 0]


def test_who_leaves_fails_what_it_has_not_started():
    with machine(2) as groups:
        tensors = declare(groups, 0, 400)
        arrays = [np.ones(100, np.float32) for _ in groups]
        groups[0].engine.start(tensors[0], arrays[0], arrays[0])
        groups[1].engine.leave()
        groups[0].engine.member_left(3)
        assert tensors[0].wait(timeout_s=TIMEOUT_S) == E_PEER_LOST
        assert tensors[0].culprit == 3
        with pytest.raises(PeerLostError, match="worker 3"):
            groups[0].engine.start(tensors[0], arrays[0], arrays[0])


@pytest.mark.parametrize("nbytes", [400, LARGE])
def test_failing_ends_every_wait(nbytes):
    with machine(2) as groups:
        tensors = declare(groups, 0, nbytes)
        array = np.ones(nbytes // 4, np.float32)
        groups[0].engine.start(tensors[0], array, array)
        waiter = threading.Timer(0.1, lambda: groups[0].engine.fail(E_PEER_LOST))
        waiter.start()
        assert tensors[0].wait(timeout_s=TIMEOUT_S) == E_PEER_LOST
        waiter.join()
        assert groups[0].engine.failure == (E_PEER_LOST, -1)
        with pytest.raises(PeerLostError):
            groups[0].engine.start(tensors[0], array, array)


def test_leaving_fails_own_operations():
    with machine(2) as groups:
        tensors = declare(groups, 0, 400)
        array = np.ones(100, np.float32)
        groups[0].engine.start(tensors[0], array, array)
        groups[0].engine.leave()
        assert tensors[0].wait(timeout_s=TIMEOUT_S) == E_SHUTDOWN
        with pytest.raises(ShutdownError):
            groups[0].engine.start(tensors[0], array, array)


def test_memory_is_used_again(trio):
    arena = trio[0].arena
    first = [arena.allocate(100_000) for _ in range(4)]
    offsets = sorted(offset for _, offset in first)
    del first
    again = [arena.allocate(100_000) for _ in range(4)]
    assert sorted(offset for _, offset in again) == offsets


def test_a_limit_names_its_setting():
    with machine(2, shared_memory_bytes=8 << 20) as groups:
        with pytest.raises(MemoryError, match="FASTPS_SHARED_MEMORY_BYTES"):
            groups[0].arena.allocate(16 << 20)
        tensors = declare(groups, 0, 400)  # and the group goes on
        arrays = [np.ones(100, np.float32) for _ in groups]
        for group, tensor, array in zip(groups, tensors, arrays, strict=True):
            group.engine.start(tensor, array, array)
        assert finish(tensors) == [0, 0]


def helpers():
    """List the helper threads of this process: number and place of its rank."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            name = (task / "comm").read_text().strip()
            if name.startswith("fastps:local:"):
                found[int(task.name)] = int(name.rpartition(":")[2])
    return found


def follow(groups, new, places):
    """Let the users of ranks run on a core each; say where the helpers may run then."""
    tensors = declare(groups, next(_numbers), 4000)
    barrier = threading.Barrier(len(groups), timeout=TIMEOUT_S)

    def rank(place):
        os.sched_setaffinity(0, {places[place]})
        array = np.ones(1000, np.float32)
        for _ in range(400):  # who comes last does not wait
            barrier.wait()
            groups[place].engine.start(tensors[place], array, array)
            assert tensors[place].wait(timeout_s=TIMEOUT_S) == 0

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {place: os.sched_getaffinity(number) for number, place in new.items()}


@pytest.mark.parametrize(
    ("launcher", "ancestors", "root"),
    [
        (0, [40, 30, 1], 40),  # of another launcher: the parent
        (30, [40, 30, 1], 30),  # a shell stands between
        (40, [40, 30, 1], 40),
        (50, [40, 30, 1], 40),  # a number of another pid namespace: a stranger's here
        (1, [40, 1], 0),  # who is the first process of a container
        (0, [1], 0),
        (7, [], 0),  # the parent is outside of the namespace
    ],
)
def test_whose_descendants_may_reach_into_a_worker(launcher, ancestors, root):
    assert choose_root(launcher, ancestors) == root


def test_ancestors_begin_with_the_parent():
    found = list_ancestors()
    assert found[0] == os.getppid()
    code = "from fastps.transport.pipe.ptrace import list_ancestors; print(*list_ancestors())"
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join([sys.executable, '-c', code])}; exit $?"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert [*map(int, done.stdout.split())][1:] == [os.getpid(), *found]


CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("n", [len(CORES), len(CORES) - 1])
def test_a_helper_stays_with_its_user_where_no_core_is_spare(n):
    if not 2 <= n <= 8:
        pytest.skip(f"{n} ranks are no test of {len(CORES)} cores")
    others = helpers()
    with machine(n) as groups:
        new = {number: place for number, place in helpers().items() if number not in others}
        for turn in range(2):
            places = [CORES[(place + turn) % len(CORES)] for place in range(n)]
            expected = {
                place: {core} if n == len(CORES) else set(CORES)
                for place, core in enumerate(places)
            }
            assert follow(groups, new, places) == expected
