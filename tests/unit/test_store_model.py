# SPDX-License-Identifier: Apache-2.0
"""The store against its model: random machines, chunk by chunk, every frame compared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from store_model import Contribution, Frame, KeyModel, Op

from aids.mailbox import Mailbox
from aids.wire import FrameFlag, FrameKind
from fastps._core import BufferPool
from fastps.contract.contract import roster_of
from fastps.errors import StallError
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport._link import InprocTransport
from fastps.types import DType

TIMEOUT_S = 60.0
TENSOR = 3
CHUNK = 64
IN_ORDER = -2
SIZES = [0, 4, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK, 3 * CHUNK + 8]


class StoreMachine(RuleBasedStateMachine):
    """Workers that obey the protocol, but not each other; two keys, each with its own model.

    Machines have one or two workers; which of them pushes a key depends on the key. Some workers
    lend their memory, and spoil it as soon as their round is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool()
        self.transport = InprocTransport()
        self.parcels: list[object] = []

    @initialize(
        local_sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        lenders=st.sets(st.integers(0, 5)),
        sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=2),
        engine_threads=st.integers(0, 1),
        abstainers=st.integers(0, 2),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self,
        local_sizes: list[int],
        lenders: set[int],
        sizes: list[int],
        engine_threads: int,
        abstainers: int,
        seed: int,
    ) -> None:
        """Make a store and its workers."""
        self.random = np.random.default_rng(seed)
        n_workers = sum(local_sizes)
        machines = [
            range(sum(local_sizes[:m]), sum(local_sizes[: m + 1]))
            for m, _ in enumerate(local_sizes)
        ]
        self.pushers = [tuple(ranks[key % len(ranks)] for ranks in machines) for key in range(2)]
        self.machine_of = {rank: m for m, ranks in enumerate(machines) for rank in ranks}
        self.n_machines = len(machines)
        quorum = max(1, len(machines) - abstainers)
        self.store = ServerStore(
            self.pool,
            member=0,
            n_members=n_workers,
            engine_threads=engine_threads,
        )
        self.rosters = [replace(roster_of(machines, key), quorum=quorum) for key in range(2)]
        self.lenders = frozenset(lenders)
        self.n_workers, self.quorum = n_workers, quorum
        self.failed = self.summed = 0  # of tensors that were forgotten
        self.alive = set(range(n_workers))
        self.declare(sizes, version=0)
        self.boxes = [Mailbox() for _ in range(n_workers)]
        for rank, box in enumerate(self.boxes):
            self.transport.connect(self.store, rank, box, 0, by_reference=rank in lenders)
        self.lent: dict[tuple[int, int], list[bytearray]] = {}

    def declare(self, sizes: list[int], version: int) -> None:
        """Declare the tensor of two partitions; its operations count on from version."""
        self.store.declare(
            TENSOR,
            n_partitions=2,
            partitions=[(key, sizes[key], self.rosters[key]) for key in range(2)],
            dtype=DType.FLOAT32,
            itemsize=4,
            chunk_bytes=CHUNK,
            kernel=sum_kernel(DType.FLOAT32),
            inline_bytes=0,
            version=version,
        )
        self.keys = [
            KeyModel(
                n_workers=self.n_workers,
                pushers=pushers,
                lenders=self.lenders,
                nbytes=nbytes,
                chunk_bytes=CHUNK,
                quorum=self.quorum,
            )
            for nbytes, pushers in zip(sizes, self.pushers, strict=True)
        ]
        for model in self.keys:
            model.gone = set(range(self.n_workers)) - self.alive
        # per key and rank: the version in progress, and whether it is over for the worker
        self.version = [[version] * self.n_workers for _ in sizes]
        self.is_over = [[True] * self.n_workers for _ in sizes]

    # ---- what a worker does ----

    def post(self, rank: int, key: int, payload: bytes = b"", **fields: int) -> None:
        """Send one frame and wait until the store has taken it."""
        memory = bytearray(payload)
        self.lent.setdefault((rank, key), []).append(memory)
        parcel = self.boxes[rank].post(
            0,
            memory,
            key=TENSOR << 16 | key,
            dtype=DType.FLOAT32,
            key_version=self.version[key][rank],
            sender=rank,
            **fields,
        )
        self.parcels.append(parcel)
        parcel.wait(timeout_s=TIMEOUT_S)

    def contribution_of(self, rank: int, key: int) -> Contribution | None:
        """Give what the worker told its current round."""
        round_ = self.keys[key].rounds.get(self.version[key][rank])
        return round_.contributions.get(rank) if round_ else None

    def is_idle(self, rank: int, key: int) -> bool:
        """Tell whether a worker may begin the next version of a key."""
        contribution = self.contribution_of(rank, key)
        pushing = contribution is not None and contribution.payload is not None
        return self.is_over[key][rank] and not (
            pushing and contribution.cursor < self.keys[key].nbytes
        )

    def choose(self, data: st.DataObject, can: object) -> tuple[int, int] | None:
        """Draw a living worker and a key for which `can` holds."""
        choices = [
            (rank, key)
            for key in range(2)
            for rank in self.pushers[key]
            if rank in self.alive and can(rank, key)
        ]
        return data.draw(st.sampled_from(choices)) if choices else None

    @rule(data=st.data(), agrees=st.integers(0, 7), is_pull=st.integers(0, 5))
    def start(self, data: st.DataObject, agrees: int, is_pull: int) -> None:
        """Let an idle worker begin its next round, mostly the one that the others began."""
        choice = self.choose(data, self.is_idle)
        if choice is None:
            return
        rank, key = choice
        self.version[key][rank] += 1
        self.is_over[key][rank] = False
        version = self.version[key][rank]
        round_ = self.keys[key].rounds.get(version)
        op = round_.op if round_ and agrees else self.draw_op(data)
        if op.flags & FrameFlag.BROADCAST:
            self.join(rank, key, op, pushes=op.root == self.machine_of[rank])
        else:
            self.join(rank, key, op, pushes=is_pull > 0)

    def draw_op(self, data: st.DataObject) -> Op:
        """Draw what to do with a key."""
        ops = [Op(), Op(FrameFlag.AVERAGE)]
        ops += [Op(FrameFlag.BROADCAST, root) for root in range(self.n_machines)]
        return data.draw(st.sampled_from(ops))

    def join(self, rank: int, key: int, op: Op, *, pushes: bool) -> None:
        """Send the first frame of a round."""
        model, version = self.keys[key], self.version[key][rank]
        if not pushes:
            model.join(rank, version, op, Contribution(None, True, op.flags))
            self.post(rank, key, kind=FrameKind.PULL, flags=op.flags, subject=op.root)
            self.compare(key)
            return
        values = self.random.standard_normal(model.nbytes // 4).astype(np.float32)
        is_root = bool(op.flags & FrameFlag.BROADCAST)
        flags = op.flags | (FrameFlag.NO_RESULT if is_root else FrameFlag(0))
        model.join(rank, version, op, Contribution(values.tobytes(), not is_root, flags))
        self.push_chunk(rank, key)

    def push_chunk(self, rank: int, key: int) -> None:
        """Send the next chunk of a worker's contribution."""
        model, version = self.keys[key], self.version[key][rank]
        contribution = self.contribution_of(rank, key)
        assert contribution is not None
        begin = contribution.cursor
        model.chunk(rank, version)
        payload = contribution.payload[begin : begin + CHUNK]
        root = self.machine_of[rank] if contribution.flags & FrameFlag.BROADCAST else 0
        self.post(rank, key, payload, flags=contribution.flags, offset=begin, subject=root)
        self.compare(key)

    @rule(data=st.data())
    def push_on(self, data: st.DataObject) -> None:
        """Let a worker that is in the middle of its contribution send the next chunk."""
        if choice := self.choose(data, self.has_more):
            self.push_chunk(*choice)

    def has_more(self, rank: int, key: int) -> bool:
        """Tell whether a worker is in the middle of its contribution."""
        contribution = self.contribution_of(rank, key)
        pushing = contribution is not None and contribution.payload is not None
        return pushing and contribution.cursor < self.keys[key].nbytes

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), luck=st.integers(0, 15), status=st.sampled_from([IN_ORDER, -3]))
    def leave(self, data: st.DataObject, luck: int, status: int) -> None:
        """Let a worker go, in order or not."""
        if luck:
            return
        rank = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(rank)
        self.boxes[rank].end(0, status)
        while rank not in self.store.wait_news(timeout_s=TIMEOUT_S):
            pass
        for key in range(2):
            self.spoil(rank, key)
            self.keys[key].leave(rank)
            self.compare(key)

    # ---- names that are forgotten ----

    @contextlib.contextmanager
    def attempts(self) -> Iterator[None]:
        """Try to forget the tensor all the time, in vain."""
        enough, wrong = threading.Event(), []

        def attempt() -> None:
            while not enough.is_set():
                with contextlib.suppress(StallError):
                    self.store.forget_tensor(TENSOR, timeout_s=0.0)
                    wrong.append("it is in use")
                    return

        thread = threading.Thread(target=attempt)
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join(TIMEOUT_S)
            assert not wrong

    @precondition(lambda self: any(model.is_busy() for model in self.keys))
    @rule(data=st.data())
    def push_on_while_it_is_tried_to_forget(self, data: st.DataObject) -> None:
        """Let frames of one key land while the other, in use, keeps the tensor."""
        busy = [key for key, model in enumerate(self.keys) if model.is_busy()]
        other = 1 - data.draw(st.sampled_from(busy))
        with self.attempts():
            for rank in self.pushers[other]:
                if rank in self.alive and self.is_idle(rank, other):
                    self.begin_sum(rank, other)
                while rank in self.alive and self.has_more(rank, other):
                    self.push_chunk(rank, other)

    def begin_sum(self, rank: int, key: int) -> None:
        """Let an idle worker begin a round as the others did, or a plain sum."""
        self.version[key][rank] += 1
        self.is_over[key][rank] = False
        round_ = self.keys[key].rounds.get(self.version[key][rank])
        op = round_.op if round_ else Op()
        is_root = op.root == self.machine_of[rank]
        self.join(rank, key, op, pushes=is_root or not op.flags & FrameFlag.BROADCAST)

    @rule(sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=2), gap=st.integers(0, 2))
    def forget(self, sizes: list[int], gap: int) -> None:
        """Forget the tensor, if it is not in use, and use its number again."""
        if any(model.is_busy() for model in self.keys):
            with pytest.raises(StallError):
                self.store.forget_tensor(TENSOR, timeout_s=0.0)
            return
        if any(model.has_laggards() for model in self.keys):
            return  # what they push would come to nothing that is there
        self.store.forget_tensor(TENSOR, timeout_s=TIMEOUT_S)
        assert self.store.statistics()["tensors"] == 0
        assert self.pool.statistics().loans == 0
        self.failed += sum(model.failed for model in self.keys)
        self.summed += sum(model.summed for model in self.keys)
        self.declare(sizes, max(map(max, self.version)) + gap)
        for rank, key in list(self.lent):
            self.spoil(rank, key)

    # ---- what the store answers ----

    def compare(self, key: int) -> None:
        """Receive what the model says must come now, in any order between kinds of frames."""
        wanted: dict[int, list[Frame]] = {}
        for rank, frame in self.keys[key].take():
            if rank in self.alive:
                wanted.setdefault(rank, []).append(frame)
        for rank, frames in wanted.items():
            got = [self.receive(rank, key) for _ in frames]
            assert sorted(got) == sorted(frames)
            assert [f for f in got if f.payload] == [f for f in frames if f.payload]
            self.note(rank, key, frames)

    def receive(self, rank: int, key: int) -> Frame:
        """Take one frame as the model spells it."""
        _, header, payload = self.boxes[rank].receive(timeout_s=TIMEOUT_S)
        assert header["key"] == TENSOR << 16 | key
        assert header["sender"] == 0
        assert header["dtype"] == DType.FLOAT32
        is_error = header["kind"] == FrameKind.ERROR
        return Frame(
            header["kind"],
            header["key_version"],
            header["offset"],
            payload,
            0 if is_error else header["flags"],
            header["priority"],
            header["status"],
            header["subject"],
        )

    def note(self, rank: int, key: int, frames: list[Frame]) -> None:
        """See which operations these frames end for the worker."""
        model, version = self.keys[key], self.version[key][rank]
        last = (model.n_chunks - 1) * CHUNK
        for frame in frames:
            assert frame.version == version
            acknowledges = frame.flags & FrameFlag.NO_RESULT
            if frame.kind == FrameKind.ERROR or acknowledges or frame.offset == last:
                self.is_over[key][rank] = True
                self.spoil(rank, key)

    def spoil(self, rank: int, key: int) -> None:
        """Overwrite what a worker lent: nobody may read it any more."""
        for memory in self.lent.pop((rank, key), []):
            memory[:] = b"\xff" * len(memory)

    def teardown(self) -> None:
        """Let everybody go; nothing may be left anywhere."""
        if hasattr(self, "store"):
            for box in self.boxes:
                with pytest.raises(StallError):
                    box.receive(timeout_s=0.0)
            numbers = self.store.statistics()
            failed = self.failed + sum(model.failed for model in self.keys)
            summed = self.summed + sum(model.summed for model in self.keys)
            assert (numbers["rounds_failed"], numbers["chunks_summed"]) == (failed, summed)
            self.transport.abort()
            self.store.forget(timeout_s=TIMEOUT_S)
            assert self.pool.statistics().loans == 0
        self.transport.close(timeout_s=TIMEOUT_S)
        if hasattr(self, "store"):
            self.store.close(timeout_s=TIMEOUT_S)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=60)
