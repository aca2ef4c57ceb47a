# SPDX-License-Identifier: Apache-2.0
"""Plans with stages that run on threads of their own, before and after the links."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aids.mailbox import Mailbox
from aids.scrambler import Scrambler
from aids.wire import FrameKind
from fastps import config
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport._link import InprocTransport, LinkOwner
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import PlannedTensor
from fastps.worker.local import LocalGroup

TIMEOUT_S = 20.0
SHORT_S = 0.05
N_PARTS, PART, CHUNK = 3, 256, 64
COUNT = N_PARTS * PART // 4
OK, SHUTDOWN, PEER_LOST, PROTOCOL, MISMATCH = 0, -2, -3, -4, -5


class Job:
    """One engine with a scrambler before and one after its link to a mailbox."""

    def __init__(self) -> None:
        self.engine = WorkerEngine(me=0, n_members=1)
        self.before, self.after = Scrambler(), Scrambler()
        self.engine.insert(0, self.before)
        self.engine.insert(2, self.after)
        self.server = Mailbox()
        self.transport = InprocTransport()
        self.transport.connect(self.engine, 0, self.server, 0)
        self.parcels: list[Any] = []

    def declare(self, number: int = 1, n_parts: int = N_PARTS) -> PlannedTensor:
        """Declare a tensor of parts of the same size."""
        return self.engine.declare(
            number, f"t{number}", nbytes=n_parts * PART, dtype=DType.INT32, chunk_bytes=CHUNK,
            partitions=[(i * PART, PART, 0) for i in range(n_parts)],
        )  # fmt: skip

    def go(self) -> None:
        """Start both threads."""
        self.before.go()
        self.after.go()

    def answer(self, n_parts: int = N_PARTS, version: int = 1) -> bytes:
        """Echo what is pushed; give it in the order of the keys."""
        pushed: dict[int, bytes] = {}
        while sum(map(len, pushed.values())) < n_parts * PART:
            _, header, payload = self.server.receive(timeout_s=TIMEOUT_S)
            pushed[header["key"]] = pushed.get(header["key"], b"") + payload
        for key, data in pushed.items():
            self.parcels.append(
                self.server.post(
                    0, data, kind=FrameKind.RESULT, key=key, dtype=DType.INT32, chunk_bytes=CHUNK,
                    key_version=version, sender=0,
                )
            )  # fmt: skip
        return b"".join(pushed[key] for key in sorted(pushed))

    def is_silent(self) -> bool:
        """Tell whether nothing was pushed."""
        with pytest.raises(Exception, match="within"):
            self.server.receive(timeout_s=SHORT_S)
        return True

    def close(self) -> None:
        """End threads and links."""
        self.before.close(timeout_s=TIMEOUT_S)
        self.engine.leave()
        self.transport.close(timeout_s=TIMEOUT_S)
        self.after.close(timeout_s=TIMEOUT_S)


@pytest.fixture
def job() -> Iterator[Job]:
    """Make a job, which is closed after the test."""
    made = Job()
    yield made
    made.close()


def test_bytes_pass_every_stage_in_order(job):
    job.go()
    tensor = job.declare()
    for version in (1, 2, 3):
        given = np.arange(COUNT, dtype=np.int32) * version
        array = given.copy()
        job.engine.start(tensor, array, array)
        assert job.answer(version=version) == (~given).tobytes()
        assert tensor.wait(timeout_s=TIMEOUT_S) == OK
        assert np.array_equal(array, given)


def test_a_stage_takes_the_most_urgent_part_first(job):
    tensors = [job.declare(number, 1) for number in range(5)]
    arrays = [np.zeros(PART // 4, np.int32) for _ in tensors]
    job.engine.start_many(tensors, arrays, arrays, priorities=[2, 5, 1, 4, 3])
    assert job.is_silent()
    job.go()
    first = [job.server.receive(timeout_s=TIMEOUT_S)[1]["key"] >> 16 for _ in range(5 * 4)][::4]
    assert first == [1, 3, 4, 0, 2]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_stage_that_fails_ends_the_operation_and_not_the_next(job, place):
    job.go()
    tensor = job.declare()
    array = np.zeros(COUNT, np.int32)
    getattr(job, place).fail_with(PROTOCOL)
    job.engine.start(tensor, array, array)
    if place == "after":
        job.answer()
    assert tensor.wait(timeout_s=TIMEOUT_S) == PROTOCOL
    assert place == "after" or job.is_silent()
    getattr(job, place).fail_with(OK)
    array[:] = 7
    job.engine.start(tensor, array, array)
    job.answer(version=2)
    assert tensor.wait(timeout_s=TIMEOUT_S) == OK
    assert (array == 7).all()


def test_what_is_given_up_in_a_stage_goes_no_further(job):
    tensor = job.declare()
    array = np.zeros(COUNT, np.int32)
    job.engine.start(tensor, array, array)
    job.engine.fail_tensor(1, MISMATCH)
    assert tensor.wait(timeout_s=SHORT_S) is None, "the stage has it still"
    job.go()
    assert tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    assert job.is_silent()
    assert (array == 0).all()


def test_what_is_given_up_on_the_way_is_not_looked_at_by_later_stages(job):
    job.go()
    tensor = job.declare()
    array = np.zeros(COUNT, np.int32)
    job.engine.start(tensor, array, array)
    for _ in range(N_PARTS * PART // CHUNK):
        job.server.receive(timeout_s=TIMEOUT_S)
    job.engine.fail_tensor(1, MISMATCH)
    assert tensor.wait(timeout_s=TIMEOUT_S) == MISMATCH
    assert (array == -1).all(), "flipped once"


def test_a_lost_link_ends_what_is_in_the_stages(job):
    tensors = [job.declare(number) for number in (1, 2)]
    arrays = [np.zeros(COUNT, np.int32) for _ in tensors]
    for tensor, array in zip(tensors, arrays, strict=True):
        job.engine.start(tensor, array, array)
    job.server.end(0, PEER_LOST)
    assert job.engine.wait_closed(timeout_s=TIMEOUT_S)
    job.go()
    assert [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors] == [PEER_LOST] * 2


def test_a_closed_stage_lets_through_what_it_had_and_refuses_the_rest(job):
    tensors = [job.declare(number) for number in (1, 2)]
    arrays = [np.zeros(COUNT, np.int32) for _ in tensors]
    job.engine.start(tensors[0], arrays[0], arrays[0])
    job.go()
    assert job.before.close(timeout_s=TIMEOUT_S)
    job.answer()
    assert tensors[0].wait(timeout_s=TIMEOUT_S) == OK
    job.engine.start(tensors[1], arrays[1], arrays[1])
    assert tensors[1].wait(timeout_s=TIMEOUT_S) == SHUTDOWN


def test_no_stage_finds_a_place_beyond_the_end():
    engine = WorkerEngine(me=0, n_members=1)
    with pytest.raises(ValueError, match="no place 2"):
        engine.insert(2, Scrambler())


# ---- with other ranks on the machine ----


class Machine:
    """Two ranks that share memory, of several machines or alone."""

    def __init__(self, n_servers: int, ranks: tuple[int, int] = (0, 1)) -> None:
        self.engines = [WorkerEngine(me=rank, n_members=n_servers) for rank in ranks]
        self.groups: list[Any] = [None, None]
        self.stages: list[Scrambler] = []
        key = secrets.token_bytes(32)
        threads = [
            threading.Thread(target=self._join, args=(ranks, place, key)) for place in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def _join(self, ranks: tuple[int, int], place: int, key: bytes) -> None:
        self.groups[place] = LocalGroup(
            config.load({}, environ={}), ranks=ranks, rank=ranks[place], n_workers=4, key=key,
            engine=self.engines[place],
            exchange=LinkOwner(),
        )  # fmt: skip

    def insert(self, place: int, **options: bool) -> list[Scrambler]:
        """Insert a stage on both ranks."""
        stages = [Scrambler(**options) for _ in self.engines]
        for engine, stage in zip(self.engines, stages, strict=True):
            engine.insert(place, stage)
            stage.go()
        self.stages += stages
        return stages

    def declare(self, number: int = 1) -> list[PlannedTensor]:
        """Declare a tensor on both ranks."""
        return [
            engine.declare(
                number, f"t{number}", nbytes=N_PARTS * PART, dtype=DType.INT32, chunk_bytes=CHUNK,
                partitions=[(i * PART, PART, 0) for i in range(N_PARTS)], itemsize=4,
                kernel=sum_kernel(DType.INT32),
            )
            for engine in self.engines
        ]  # fmt: skip

    def leave(self) -> None:
        """Leave the job."""
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            assert engine.wait_closed(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        """End stages and memory."""
        for stage in self.stages:
            assert stage.close(timeout_s=TIMEOUT_S)
        for group in self.groups:
            group.close(timeout_s=TIMEOUT_S)


def test_only_who_speaks_for_its_machine_goes_by_the_stages_of_the_links():
    """~a + ~b = ~(a + b + 1): a sum that is scrambled on two machines comes back one larger."""
    machines = [Machine(1), Machine(1, (2, 3))]
    pool = BufferPool()
    store = ServerStore(pool, member=0, n_members=4)
    transport = InprocTransport()
    tensors = []
    for machine in machines:
        machine.insert(1)
        machine.insert(3)
        for engine in machine.engines:
            rank = 2 * machines.index(machine) + machine.engines.index(engine)
            transport.connect(engine, 0, store, rank)
    store.declare(
        1, n_partitions=N_PARTS, dtype=DType.INT32, itemsize=4, chunk_bytes=CHUNK,
        partitions=[(i, PART, roster_of(((0, 1), (2, 3)), i)) for i in range(N_PARTS)],
        kernel=sum_kernel(DType.INT32), inline_bytes=0,
    )  # fmt: skip
    tensors = [tensor for machine in machines for tensor in machine.declare()]
    engines = [engine for machine in machines for engine in machine.engines]
    for step in range(5):
        arrays = [np.arange(COUNT, dtype=np.int32) * (rank + step) for rank in range(4)]
        for engine, tensor, array in zip(engines, tensors, arrays, strict=True):
            engine.start(tensor, array, array)
        assert [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors] == [OK] * 4
        for array in arrays:
            assert np.array_equal(array, np.arange(COUNT) * (6 + 4 * step) + 1)
    for machine in machines:
        machine.leave()
    transport.close(timeout_s=TIMEOUT_S)
    for machine in machines:
        machine.close()
    store.forget(timeout_s=TIMEOUT_S)
    store.close(timeout_s=TIMEOUT_S)


def test_ranks_of_a_machine_hear_of_a_failure_before_shared_memory():
    machine = Machine(0)
    _, second = machine.insert(0, for_links=False)
    tensors = machine.declare()
    arrays = [np.ones(COUNT, np.int32) for _ in tensors]
    for failure in (PROTOCOL, OK):
        second.fail_with(failure)
        for engine, tensor, array in zip(machine.engines, tensors, arrays, strict=True):
            array[:] = 1
            engine.start(tensor, array, array)
        statuses = [tensor.wait(timeout_s=TIMEOUT_S) for tensor in tensors]
        assert statuses == [failure] * 2
        assert [tensor.culprit for tensor in tensors] == ([1, 1] if failure else [0, 0])
    assert (arrays[0] == arrays[1]).all()
    assert (arrays[0] == ~1 + ~1).all()
    machine.leave()
    machine.close()
