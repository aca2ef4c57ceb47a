# SPDX-License-Identifier: Apache-2.0
"""What holds and sums the keys of one server, in a process of its own or beside a worker.

Owns pool, store, transport and listener, made in this order and stopped in the reverse one; the
control client is somebody else's and outlives it. Moves no tensor bytes itself. Threads:
fastps:accept admits links, fastps:news reports links that broke; I/O and engine threads belong
to transport and store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastps import _core
from fastps.config import Config
from fastps.contract.codec import Codec, Coding, Option, wire_chunk
from fastps.contract.contract import (
    ANY_STALENESS,
    Cast,
    Givers,
    Policy,
    Unit,
    cast_apart,
    cast_judged,
    cast_kept,
    cast_of,
    is_followed,
    trim_of,
)
from fastps.contract.partition import link_counts, tensor_of
from fastps.control.blame import cause_of_link
from fastps.control.client import ControlClient
from fastps.control.protocol import DeclareKeys, ForgetKeys, Job, KeySpec
from fastps.errors import FastPSError, StallError, Status, TransportError
from fastps.reduce import robust_kernel, sum_kernel
from fastps.reduce._partition import Coder, Combiner
from fastps.reduce.user_rules import find_own
from fastps.server._policies import CodedRule, KeptResidual, RuledRule
from fastps.server._store import ServerStore
from fastps.transport import rdma
from fastps.transport.listener import NotYet
from fastps.transport.peer_links import PeerLinks
from fastps.transport.sockets import watch_closely
from fastps.transport.tcp import unpack_lane
from fastps.transport.tcp._transport import TcpTransport
from fastps.transport.tcp.progress import Progress
from fastps.transport.traffic import Traffic, traffic
from fastps.types import DType

if TYPE_CHECKING:
    from fastps.telemetry.recorder import Recorder
    from fastps.transport.rdma._transport import RdmaTransport

log = logging.getLogger(__name__)

CPUS_PER_ENGINE = 4  # the rest moves bytes; a chunk just read is summed fastest where it was read
MAX_AUTO_ENGINES = 4  # two threads sum at the speed of memory
NEWS_SLICE_S = 5.0  # how often the news thread looks whether it should end
FAREWELL_SLICE_S = 0.001  # how often it tries to forget what is still in use


def _counted(absent: dict[int, tuple[int, int]]) -> dict[str, int]:
    """Name counts of absences as statistics() does."""
    sums = [sum(column) for column in zip(*absent.values(), strict=True)] or [0, 0]
    found = {"rounds_missed": sums[0], "updates_late": sums[1]}
    for worker, (missed, late) in absent.items():
        found[f"rounds_missed_of_worker_{worker}"] = missed
        found[f"updates_late_of_worker_{worker}"] = late
    return found


def _engine_threads(config: Config) -> int:
    """Return the number of summing threads: as configured, else by the CPUs at hand."""
    if config.engine_threads >= 0:
        return config.engine_threads
    return min(len(os.sched_getaffinity(0)) // CPUS_PER_ENGINE, MAX_AUTO_ENGINES)


class DataPlane:
    """Own keys for the workers of a job, who come in by the doors of the node."""

    def __init__(self, config: Config, client: ControlClient, *, node: PeerLinks) -> None:
        """Make everything for the client's job; start() lets workers in."""
        self._config = config
        self._client = client
        self._job = client.job
        self._me = client.job.me
        self.name = f"server {self._index(client.job)}"
        self._casts: dict[int, Cast] = {}
        self._ending = threading.Event()
        self._farewells: deque[tuple[ForgetKeys, float]] = deque()  # and until when to try
        self._has_warned = False
        self._names: dict[int, str] = {}  # of tensors under rules, by id
        self._keepers: dict[int, dict[int, Coder]] = {}  # by id and index: with error feedback
        self._blamed: set[int] = set()
        self._named: dict[int, int] = {}  # rounds that a worker had missed when we said so
        self._refused = 0  # members cut off for what they sent
        self.recorder: Recorder | None = None  # of a server that is a process of its own
        self._rdma = self._open_rdma()
        self._pool = _core.BufferPool(
            config.pool_bytes, on_slab=self._rdma.register if self._rdma else None
        )
        self.store = self._make_store(self._job)
        self._transport = TcpTransport(io_threads=config.io_threads, spin_us=config.spin_us)
        self._progress = Progress()
        self._node = node
        node.serve(self._admit)
        self._news = threading.Thread(target=self._watch, name="fastps:news", daemon=True)

    def _open_rdma(self) -> RdmaTransport | None:
        """Open the RDMA device if workers may come over it; None: they will not, or cannot."""
        job, config = self._job, self._config
        own = job.members[self._me]
        workers = [(worker.gid, worker.host_id) for worker in job.workers]
        if config.transport == "rdma":
            rdma.wants_rdma("rdma", rdma.look_up(config), own.gid)  # or say what is missing
        if not own.gid or not rdma.has_reason(config, own.host_id, workers):
            return None
        return rdma.open_transport(config, n_links=job.size * self._lanes(job))

    def _make_store(self, job: Job) -> ServerStore:
        store = self._make_plain_store(job)
        if self._rdma is not None:
            limit = self._config.pool_bytes // 2 or self._config.rdma_pinned_bytes
            store.keep_buffers(min(limit, self._config.rdma_pinned_bytes))
        return store

    def _make_plain_store(self, job: Job) -> ServerStore:
        return ServerStore(
            self._pool,
            member=self._me,
            n_members=job.size,
            lanes=self._lanes(job),
            engine_threads=_engine_threads(self._config),
        )

    def _lanes(self, job: Job) -> int:
        """Return the links that each worker has to this server."""
        return link_counts(job.weights, self._config.links_per_peer)[self._index(job)]

    def _index(self, job: Job) -> int:
        return job.owners.index(self._me)

    def start(self) -> None:
        """Report the workers whose links break."""
        self._news.start()

    # ---- links ----

    def _admit(self, descriptor: int, sender: int, packed_lane: int) -> None:
        generation, lane = unpack_lane(packed_lane)
        if generation != self._job.generation & 0xFFFFFF:
            raise NotYet
        if lane & rdma.RDMA_LANE:
            self._admit_by_rdma(descriptor, sender, lane & ~rdma.RDMA_LANE)
        else:
            self._transport.adopt(descriptor, self.store, peer=sender, lane=lane)
        log.debug("worker %d is connected, lane %d", sender, lane)

    def _admit_by_rdma(self, descriptor: int, sender: int, lane: int) -> None:
        if self._rdma is None:
            os.close(descriptor)
            raise TransportError("it wants RDMA, which this server does not use")
        watch_closely(descriptor, self._config.rdma_timeout_s)
        self._rdma.adopt(descriptor, self.store, peer=sender, lane=lane, greets_first=False)

    def _watch(self) -> None:
        """Tell the scheduler of links that broke; it decides who is to blame."""
        reported: set[int] = set()
        while not self._ending.is_set():
            pause_s = min(self._try_farewells(), self.store.end_late_rounds())
            gone = self.store.wait_news(timeout_s=pause_s)
            self._blame()
            self._name_absent()
            reported &= gone.keys()
            for member in gone.keys() - reported:
                reported.add(member)
                # no BYE; a worker in this process speaks for itself
                if gone[member] != Status.SHUTDOWN and member != self._me:
                    self._note_refused(member, gone[member])
                    self._report(member, gone[member])

    def _note_refused(self, member: int, status: int) -> None:
        """Count and name a member that sent what it has no business to send."""
        if status == Status.PROTOCOL:
            self._refused += 1
            who = self._job.members[member]
            log.warning(
                "%s refuses %s %d: what it sent is malformed, or to a key that is not its own to "
                "write or read; its link is cut", self.name, who.role, who.rank,
            )  # fmt: skip

    def _report(self, member: int, status: int) -> None:
        failure = "" if self._rdma is None else self._rdma.failure_of(member)
        trouble = f"RDMA: {failure}" if failure else self._progress.trouble_of(member)
        with contextlib.suppress(FastPSError):
            if failure and self._rdma is not None and self._rdma.has_trouble:
                self._client.report_lost(self._me, failure)
            else:
                cause = cause_of_link(self.name, Status(status), trouble)
                self._client.report_lost(member, cause)

    def look_at_links(self) -> None:
        """See whether links make progress; on the control thread, every few seconds."""
        self._progress.look(self._transport.unacknowledged(), time.monotonic())

    # ---- keys ----

    def take(self, request: DeclareKeys | ForgetKeys) -> None:
        """Do what the scheduler asks and tell it when that is done; never raises, never waits."""
        if isinstance(request, DeclareKeys):
            self._hold(request)
            return
        deadline = time.monotonic() + self._config.op_timeout_s
        self._farewells.append((request, deadline))
        self.store.wake()

    def _try_farewells(self) -> float:
        """Forget what is not in use any more; give the seconds until this is worth trying again.

        On the news thread: the last results of a tensor may still be leaving.
        """
        for _ in range(len(self._farewells)):
            with contextlib.suppress(FastPSError):  # where nobody hears us any more
                self._try_farewell(*self._farewells.popleft())
        return FAREWELL_SLICE_S if self._farewells else NEWS_SLICE_S

    def _try_farewell(self, request: ForgetKeys, deadline: float) -> None:
        try:
            for tensor_id in request.tensor_ids:
                self.store.forget_tensor(tensor_id, timeout_s=0.0)
                self._keepers.pop(tensor_id, None)
        except StallError as error:
            if time.monotonic() < deadline:
                self._farewells.append((request, deadline))
            else:
                self._client.keys_failed(request.request_id, str(error))
        else:
            self._client.keys_ready(request.request_id)

    def _hold(self, request: DeclareKeys) -> None:
        """Make ready for new tensors."""
        try:
            self.store.take_back_idle()
            for spec in request.keys:
                self._declare(spec)
            if self._rdma is not None:
                self._pool.statistics()  # pins the slabs that are new
                self._warn_of_small_bound()
        except Exception as error:  # whatever it is, the workers must not wait for an answer
            log.exception("%s cannot hold new tensors", self.name)
            self._client.keys_failed(request.request_id, f"{self.name}: {error}")
        else:
            self._client.keys_ready(request.request_id)

    def _warn_of_small_bound(self) -> None:
        """Say once that some tensors will be slower than they could be."""
        if not self._has_warned and self.store.statistics()["buffers_not_kept"]:
            self._has_warned = True
            log.warning(
                "%s cannot keep a buffer for every chunk; the others are asked for each "
                "time: raise FASTPS_RDMA_PINNED_BYTES",
                self.name,
            )

    def _declare(self, spec: KeySpec) -> None:
        """Make room for our partitions; compile their kernels before the first push."""
        dtype = DType(spec.layout.dtype)
        if self.recorder is not None:
            self.recorder.name_tensor(spec.tensor_id, spec.name)
        if spec.layout.rule.has_meaning():
            self._declare_ruled(spec, dtype)
            return
        if spec.layout.policy is Policy.CODEC_STATE:
            self._declare_kept(spec, dtype)
            return
        if is_followed(spec.layout.policy, spec.layout.coding):
            self._declare_followed(spec, dtype)
            return
        rules = self._coded_rules(spec)
        self.store.declare(
            spec.tensor_id,
            n_partitions=len(spec.pieces),
            partitions=[
                (index, rules[index].wire_bytes if rules else nbytes, self._cast(spec, index))
                for index, (nbytes, owner) in enumerate(spec.pieces)
                if owner == self._me
            ],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=wire_chunk(spec.layout.coding, spec.layout.chunk_bytes),
            kernel=next(iter(rules.values())).kernel if rules else self._kernel(spec),
            unit=Unit.PARTITION if spec.layout.coding.is_whole else Unit.CHUNK,
            states=rules,
            inline_bytes=self._config.inline_sum_bytes,
            version=spec.version,
            policy=spec.layout.policy,
            staleness=spec.layout.staleness,
            compensation=spec.layout.compensation,
        )

    def _declare_ruled(self, spec: KeySpec, dtype: DType) -> None:
        """Make room for partitions of which a rule sees what each worker gives."""
        job = self._job
        follows = is_followed(spec.layout.policy, spec.layout.coding)
        is_coded = spec.layout.coding.codec is not Codec.NONE and not follows
        rules = {
            index: RuledRule(
                Combiner(
                    spec.layout.rule, dtype, n=job.n_workers, count=nbytes // dtype.itemsize,
                    function=find_own(spec.layout.rule, self._config.rules),
                ),
                self._coder(spec, index, nbytes) if is_coded else None,
                is_at_once=spec.layout.policy is Policy.DEADLINE_ROUNDS,
            )
            for index, nbytes in self._owned(spec)
        }  # fmt: skip
        looks = {one.look for one in rules.values()}.pop() if rules else 0
        cast = cast_apart(job.n_workers, job.generation)
        self._names[spec.tensor_id] = spec.name
        self.store.declare(
            spec.tensor_id,
            n_partitions=len(spec.pieces),
            partitions=[
                (index, spec.pieces[index][0] if one.coder is None else one.coder.wire_bytes, cast)
                for index, one in rules.items()
            ],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=wire_chunk(spec.layout.coding, spec.layout.chunk_bytes),
            kernel=next(iter(rules.values())).kernel if rules else 0,
            unit=Unit.CHUNK if looks else Unit.PARTITION,
            states=rules,
            is_ruled=True,
            look=looks,
            inline_bytes=0,
            version=spec.version,
            policy=spec.layout.policy,
            gathering=spec.layout.gathering,
            least=spec.layout.rule.full,
            coders=self._followers(spec) if follows else None,
        )

    def _declare_followed(self, spec: KeySpec, dtype: DType) -> None:
        """Make room for values to which each worker adds by itself, both ways encoded."""
        cast = cast_apart(self._job.n_workers, self._job.generation)
        self.store.declare(
            spec.tensor_id,
            n_partitions=len(spec.pieces),
            partitions=[(index, nbytes, cast) for index, nbytes in self._owned(spec)],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=wire_chunk(spec.layout.coding, spec.layout.chunk_bytes),
            kernel=self._kernel(spec),
            unit=Unit.PARTITION,
            is_ruled=True,
            inline_bytes=0,
            version=spec.version,
            policy=spec.layout.policy,
            staleness=spec.layout.staleness,
            coders=self._followers(spec),
        )

    def _declare_kept(self, spec: KeySpec, dtype: DType) -> None:
        """Let what codecs keep of our partitions of another tensor be read and written."""
        cast = cast_kept(self._job.n_workers, self._job.generation)
        coders = self._keepers.get(spec.beside, {})
        kept = {index: KeptResidual(coders[index]) for index, _ in self._owned(spec)}
        if any(kept[index].nbytes != nbytes for index, nbytes in self._owned(spec)):
            raise FastPSError(f"{spec.name!r} is not what codecs keep of tensor {spec.beside}")
        self.store.declare(
            spec.tensor_id,
            n_partitions=len(spec.pieces),
            partitions=[(index, nbytes, cast) for index, nbytes in self._owned(spec)],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=spec.layout.chunk_bytes,
            kernel=self._kernel(spec),
            unit=Unit.PARTITION,
            states=kept,
            inline_bytes=0,
            version=spec.version,
            policy=spec.layout.policy,
            staleness=ANY_STALENESS,
        )

    def _owned(self, spec: KeySpec) -> list[tuple[int, int]]:
        """List our partitions: index and bytes."""
        return [
            (index, nbytes) for index, (nbytes, owner) in enumerate(spec.pieces)
            if owner == self._me
        ]  # fmt: skip

    def _followers(self, spec: KeySpec) -> dict[int, Coder]:
        """Make what encodes answers: what they lose is in the next one, so it keeps nothing."""
        coding = spec.layout.coding.without_memory()
        return {
            index: self._coder(spec, index, nbytes, coding) for index, nbytes in self._owned(spec)
        }

    def _blame(self) -> None:
        """Name, once each, the workers of which rules refused updates."""
        for worker, (_, key) in self.store.refusals().items():
            if worker in self._blamed:
                continue
            self._blamed.add(worker)
            log.warning(
                "%s refuses an update of worker %d to %r, which has NaN, infinity or a norm that "
                "is no number; statistics() counts what it goes on to refuse",
                self.name, worker, self._names.get(tensor_of(key), "a tensor"),
            )  # fmt: skip

    def _name_absent(self) -> None:
        """Say without whom rounds end: of each worker at the first, and at twice as many."""
        for worker, (missed, late) in self.store.absences().items():
            if missed < max(2 * self._named.get(worker, 0), 1):
                continue
            self._named[worker] = missed
            log.warning(
                "%s: worker %d missed the deadline of %d rounds; %d updates of it came late, and "
                "count in the round after", self.name, worker, missed, late,
            )  # fmt: skip

    def _coded_rules(self, spec: KeySpec) -> dict[int, CodedRule]:
        """Return the rules of our partitions, by index; none where elements travel as they are."""
        if spec.layout.coding.codec is Codec.NONE:
            return {}
        return {
            index: CodedRule(self._coder(spec, index, nbytes))
            for index, nbytes in self._owned(spec)
        }

    def _coder(
        self, spec: KeySpec, index: int, nbytes: int, coding: Coding | None = None
    ) -> Coder:
        coder = Coder(
            coding or spec.layout.coding, DType(spec.layout.dtype), nbytes=nbytes,
            chunk_bytes=spec.layout.chunk_bytes, name=spec.name, partition=index, rank=self._me,
        )  # fmt: skip
        if coding is None and spec.layout.coding.has(Option.FEEDBACK):
            self._keepers.setdefault(spec.tensor_id, {})[index] = coder
        return coder

    def _kernel(self, spec: KeySpec) -> int:
        dtype = DType(spec.layout.dtype)
        if trim_of(spec.layout.policy, self._job.validators):
            return robust_kernel("trimmed_mean", dtype)
        return sum_kernel(dtype)

    def _cast(self, spec: KeySpec, index: int) -> Cast:
        """Return the cast of a partition, the same for all tensors of the same givers."""
        job = self._job
        if spec.layout.givers is Givers.VALIDATORS:
            trim = trim_of(spec.layout.policy, job.validators)
            return cast_judged(job.n_workers, job.validators, job.generation, trim=trim)
        if index not in self._casts:
            there = [ranks for ranks in job.machines if ranks[0] < job.n_workers]
            self._casts[index] = cast_of(there, index, job.generation)
        return self._casts[index]

    # ---- generations ----

    def forget(self) -> None:
        """Drop all keys: the workers have left. Raises StallError when a link does not end."""
        self._farewells.clear()
        self._keepers.clear()
        self.store.forget(timeout_s=self._config.shutdown_timeout_s)

    def begin(self, job: Job) -> None:
        """Let the workers of a new generation in, who may be on other machines than the old."""
        if self._lanes(job) != self._lanes(self._job):
            old, self.store = self.store, self._make_store(job)
            old.wake()
            old.close(timeout_s=self._config.shutdown_timeout_s)
        self._casts.clear()
        self._job = job  # last: now its workers are let in
        if self._rdma is not None:
            self._rdma.forget_failures()

    # ---- the end ----

    def leave(self) -> None:
        """Say BYE to the workers once they have what they wait for. Does not wait."""
        self._ending.set()
        self._node.stop_serving()
        self._transport.leave()
        if self._rdma is not None:
            self._rdma.leave()
        log.info("%s ends: %s, refused %s", self.name, self.statistics(), self._node.refused)

    def close(self) -> None:
        """Wait for the links and all threads to end. Raises StallError, TransportTimeout."""
        timeout_s = self._config.shutdown_timeout_s
        self._ending.set()
        self._node.stop_serving()
        self._transport.close(timeout_s=timeout_s)
        if self._rdma is not None:
            self._rdma.close(timeout_s=timeout_s)
        self.store.wake()
        if self._news.is_alive():
            self._news.join(timeout_s)
        self.store.close(timeout_s=timeout_s)

    def abandon(self) -> None:
        """Close the links' descriptors in a forked child."""
        self._transport.abandon()
        if self._rdma is not None:
            self._rdma.abandon()

    def traffic(self) -> Iterator[Traffic]:
        """Tell of each link to a worker."""
        yield from traffic(self._transport)
        yield from traffic(self._rdma, "RDMA")

    def statistics(self) -> dict[str, int]:
        """Count what the store summed, the links moved and, in the end, the listener refused."""
        counts = Counter(self._transport.statistics())
        if self._rdma is not None:
            counts.update(self._rdma.statistics())
        return (
            self.store.statistics()
            | dict(counts)
            | _counted(self.store.absences())
            | {"refused": sum(self._node.refused.values()) + self._refused}
        )
