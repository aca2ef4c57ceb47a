# SPDX-License-Identifier: Apache-2.0
"""The data plane of one server, in a process of its own or in a worker's.

Owns pool, store and transports, made in this order and stopped in the reverse one; the control
client belongs to the caller and outlives it. Moves no tensor bytes itself. Threads:
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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastps import _core
from fastps.config import Config
from fastps.contract.codec import Codec, Coding, Option, wire_chunk
from fastps.contract.contract import (
    ANY_STALENESS,
    Givers,
    Policy,
    Roster,
    Unit,
    is_followed,
    roster_apart,
    roster_judged,
    roster_kept,
    roster_of,
    trim_of,
)
from fastps.contract.partition import tensor_of
from fastps.control.blame import cause_of_link
from fastps.control.client import ControlClient
from fastps.control.protocol import DeclareKeys, ForgetKeys, Job, KeySpec
from fastps.errors import FastPSError, StallError, Status, TransportError
from fastps.native.condition import Flag
from fastps.reduce import robust_kernel, sum_kernel
from fastps.reduce._partition import Coder, Combiner
from fastps.reduce.user_rules import find_own
from fastps.server._policies import CodedRule, KeptResidual, RuledRule
from fastps.server._store import ServerStore
from fastps.transport import rdma
from fastps.transport.listener import NotYet
from fastps.transport.peer_links import PeerLinks
from fastps.transport.sockets import watch_closely
from fastps.transport.tcp import Connection, open_transport, unpack_lane
from fastps.transport.tcp.damage import Damage, damage_text
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
FORGET_SLICE_S = 0.001  # how often it tries to forget tensors that are still in use


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
    """Own keys for the workers of a job, which connect through `peer_links`."""

    def __init__(self, config: Config, client: ControlClient, *, peer_links: PeerLinks) -> None:
        """Make everything for the client's job; start() lets workers in."""
        self._config = config
        self._client = client
        self._job = client.job
        self._me = client.job.me
        self.name = f"server {self._index(client.job)}"
        self._rosters: dict[int, Roster] = {}
        self._ending = Flag()
        self._forgetting: deque[tuple[ForgetKeys, float]] = deque()  # requests and deadlines
        self._has_warned = False
        self._names: dict[int, str] = {}  # of tensors, by id
        self._residual_coders: dict[int, dict[int, Coder]] = {}  # by id and index
        self._blamed: set[int] = set()
        self._logged_missed: dict[int, int] = {}  # rounds a worker had missed when last logged
        self._refused = 0  # members cut off for what they sent
        self.recorder: Recorder | None = None  # of a server that is a process of its own
        self._rdma = self._open_rdma()
        self._pool = _core.BufferPool(
            config.pool_bytes, on_slab=self._rdma.register if self._rdma else None
        )
        self.store = self._make_store(self._job)
        self._transport = open_transport(config)
        self._progress = Progress()
        self._peer_links = peer_links
        peer_links.serve(self._admit)
        self._news = threading.Thread(target=self._watch, name="fastps:news", daemon=True)

    def _open_rdma(self) -> RdmaTransport | None:
        """Open the RDMA device if workers may connect over it, else return None."""
        job, config = self._job, self._config
        own = job.members[self._me]
        workers = [(worker.gid, worker.host_id) for worker in job.workers]
        if config.transport == "rdma":
            rdma.wants_rdma("rdma", rdma.look_up(config), own.gid)  # raises what is missing
        if not own.gid or not rdma.has_reason(config, own.host_id, workers):
            return None
        return rdma.open_transport(config, n_links=job.size * config.links_per_peer)

    def _make_store(self, job: Job) -> ServerStore:
        store = ServerStore(
            self._pool,
            member=self._me,
            n_members=job.size,
            lanes=self._config.links_per_peer,
            engine_threads=_engine_threads(self._config),
        )
        if self._rdma is not None:
            limit = self._config.pool_bytes // 2 or self._config.rdma_pinned_bytes
            store.keep_buffers(min(limit, self._config.rdma_pinned_bytes))
        return store

    def _index(self, job: Job) -> int:
        return job.owners.index(self._me)

    def start(self) -> None:
        """Start to report workers whose links break."""
        self._news.start()

    # ---- links ----

    def _admit(self, connection: Connection, sender: int, packed_lane: int) -> None:
        generation, lane = unpack_lane(packed_lane)
        if generation != self._job.generation & 0xFFFFFF:
            raise NotYet
        if lane & rdma.RDMA_LANE:
            self._admit_by_rdma(connection.descriptor, sender, lane & ~rdma.RDMA_LANE)
        else:
            self._transport.adopt(
                connection.descriptor,
                self.store,
                peer=sender,
                lane=lane,
                is_checked=connection.is_checked,
                sealing=connection.sealing,
            )
        log.debug("worker %d is connected, lane %d", sender, lane)

    def _admit_by_rdma(self, descriptor: int, sender: int, lane: int) -> None:
        if self._rdma is None:
            os.close(descriptor)
            raise TransportError(
                "the worker asks for RDMA, which this server does not use; set FASTPS_TRANSPORT "
                "alike on all"
            )
        watch_closely(descriptor, self._config.rdma_timeout_s)
        self._rdma.adopt(descriptor, self.store, peer=sender, lane=lane, greets_first=False)

    def _watch(self) -> None:
        """Report broken links to the scheduler, which decides which member is to blame."""
        job, reported = self._job, set[int]()
        while not self._ending.is_set():
            pause_s = min(self._try_to_forget(), self.store.end_late_rounds())
            if job is not self._job:  # whose members have other numbers
                job, reported, pause_s = self._job, set(), 0.0
            gone = self.store.wait_news(timeout_s=pause_s)
            if job is not self._job:
                continue
            self._log_refusals()
            self._log_absences()
            reported &= gone.keys()
            for member in gone.keys() - reported:
                reported.add(member)
                # without a BYE; a worker in this process reports itself
                if gone[member] != Status.SHUTDOWN and member != job.me:
                    self._note_refused(job, member, gone[member])
                    self._report(job, member, gone[member])

    def _note_refused(self, job: Job, member: int, status: int) -> None:
        """Count and log a member that sent a frame which it may not send."""
        if status == Status.PROTOCOL:
            self._refused += 1
            sender = job.members[member]
            log.warning(
                "%s refuses %s %d: it sent a malformed frame, or one for a key that it may not "
                "write or read; its link is cut", self.name, sender.role, sender.rank,
            )  # fmt: skip

    def _report(self, job: Job, member: int, status: int) -> None:
        failure = "" if self._rdma is None else self._rdma.failure_of(member)
        trouble = f"RDMA: {failure}" if failure else self._damage_from(member)
        trouble = trouble or self._progress.trouble_of(member)
        with contextlib.suppress(FastPSError):
            if failure and self._rdma is not None and self._rdma.has_trouble:
                self._client.report_lost(job.me, failure, generation=job.generation)
            else:
                cause = cause_of_link(self.name, Status(status), trouble)
                self._client.report_lost(member, cause, generation=job.generation)

    def _damage_from(self, member: int) -> str:
        """Return what arrived damaged from a member, which is logged; empty if nothing did."""
        found = self._transport.damage_of(member)
        if found is None:
            return ""
        text = damage_text(Damage(*found), self._names.get)
        sender = self._job.members[member]
        log.error("%s ends its link to %s %d: %s", self.name, sender.role, sender.rank, text)
        return text

    def look_at_links(self) -> None:
        """Check that links make progress; on the control thread, every few seconds."""
        self._progress.look(self._transport.unacknowledged(), time.monotonic())

    # ---- keys ----

    def take(self, request: DeclareKeys | ForgetKeys) -> None:
        """Start what the scheduler asks for, and report its end; never raises, never waits."""
        if isinstance(request, DeclareKeys):
            self._declare_all(request)
            return
        deadline = time.monotonic() + self._config.op_timeout_s
        self._forgetting.append((request, deadline))
        self.store.wake()

    def _try_to_forget(self) -> float:
        """Forget tensors that are not in use any more; return the seconds until the next try.

        On the news thread: the last results of a tensor may still be leaving.
        """
        for _ in range(len(self._forgetting)):
            with contextlib.suppress(FastPSError):  # the scheduler is gone
                self._forget_tensors(*self._forgetting.popleft())
        return FORGET_SLICE_S if self._forgetting else NEWS_SLICE_S

    def _forget_tensors(self, request: ForgetKeys, deadline: float) -> None:
        try:
            for tensor_id in request.tensor_ids:
                self.store.forget_tensor(tensor_id, timeout_s=0.0)
                self._residual_coders.pop(tensor_id, None)
                self._names.pop(tensor_id, None)
        except StallError as error:
            if time.monotonic() < deadline:
                self._forgetting.append((request, deadline))
            else:
                self._client.keys_failed(request.request_id, str(error))
        else:
            self._client.keys_ready(request.request_id)

    def _declare_all(self, request: DeclareKeys) -> None:
        """Make room for new tensors, and answer the scheduler."""
        try:
            self.store.take_back_idle()
            for spec in request.keys:
                self._declare(spec)
            if self._rdma is not None:
                self._pool.statistics()  # pins the slabs that are new
                self._warn_of_small_bound()
        except Exception as error:  # the workers must get an answer in any case
            log.exception("%s cannot make room for new tensors", self.name)
            self._client.keys_failed(request.request_id, f"{self.name}: {error}")
        else:
            self._client.keys_ready(request.request_id)

    def _warn_of_small_bound(self) -> None:
        """Warn once that some chunks have no lasting buffer, which makes them slower."""
        if not self._has_warned and self.store.statistics()["buffers_not_kept"]:
            self._has_warned = True
            log.warning(
                "%s cannot keep a pinned buffer for every chunk, so some are slower; raise "
                "FASTPS_RDMA_PINNED_BYTES",
                self.name,
            )

    def _declare(self, spec: KeySpec) -> None:
        """Make room for our partitions; compile their kernels before the first push."""
        layout = spec.layout
        self._names[spec.tensor_id] = spec.name
        if self.recorder is not None:
            self.recorder.name_tensor(spec.tensor_id, spec.name)
        if layout.rule.has_meaning():
            self._declare_ruled(spec)
        elif layout.policy is Policy.CODEC_STATE:
            self._declare_codec_state(spec)
        elif is_followed(layout.policy, layout.coding):
            self._make_entries(
                spec, self._roster_apart(), kernel=self._kernel(spec), unit=Unit.PARTITION,
                is_ruled=True, staleness=layout.staleness, coders=self._followers(spec),
            )  # fmt: skip
        else:
            rules = self._coded_rules(spec)
            self._make_entries(
                spec, None, {index: rule.wire_bytes for index, rule in rules.items()},
                kernel=next(iter(rules.values())).kernel if rules else self._kernel(spec),
                unit=Unit.PARTITION if layout.coding.is_whole else Unit.CHUNK, states=rules,
                staleness=layout.staleness, compensation=layout.compensation,
            )  # fmt: skip

    def _declare_ruled(self, spec: KeySpec) -> None:
        """Make room for partitions whose rule sees the update of each worker by itself."""
        layout, n = spec.layout, self._job.n_workers
        dtype = DType(layout.dtype)
        follows = is_followed(layout.policy, layout.coding)
        is_coded = layout.coding.codec is not Codec.NONE and not follows
        rules = {
            index: RuledRule(
                Combiner(
                    layout.rule, dtype, n=n, count=nbytes // dtype.itemsize,
                    function=find_own(layout.rule, self._config.rules),
                ),
                self._coder(spec, index, nbytes) if is_coded else None,
                is_at_once=layout.policy is Policy.DEADLINE_ROUNDS,
            )
            for index, nbytes in self._owned(spec)
        }  # fmt: skip
        looks = {one.look for one in rules.values()}.pop() if rules else 0
        self._make_entries(
            spec, self._roster_apart(),
            {index: one.coder.wire_bytes for index, one in rules.items() if one.coder is not None},
            kernel=next(iter(rules.values())).kernel if rules else 0,
            unit=Unit.CHUNK if looks else Unit.PARTITION, states=rules, is_ruled=True, look=looks,
            gathering=layout.gathering, least=layout.rule.full,
            coders=self._followers(spec) if follows else None,
        )  # fmt: skip

    def _declare_codec_state(self, spec: KeySpec) -> None:
        """Let workers read and write what codecs keep of our partitions of another tensor."""
        coders = self._residual_coders.get(spec.beside, {})
        kept = {index: KeptResidual(coders[index]) for index, _ in self._owned(spec)}
        if any(kept[index].nbytes != nbytes for index, nbytes in self._owned(spec)):
            raise FastPSError(
                f"{spec.name!r} does not fit what codecs keep of tensor {spec.beside}; declare it "
                "with the size of that tensor"
            )
        self._make_entries(
            spec, roster_kept(self._job.n_workers, self._job.generation),
            kernel=self._kernel(spec), unit=Unit.PARTITION, states=kept,
            staleness=ANY_STALENESS, inline_bytes=0,
        )  # fmt: skip

    def _make_entries(
        self, spec: KeySpec, roster: Roster | None, wire_bytes: Mapping[int, int] | None = None,
        inline_bytes: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Make the store's entries of our partitions, as their contract says.

        roster: None for that of each partition. wire_bytes: by index, where they travel encoded.
        options: of ServerStore.declare().
        """
        layout, wire_bytes = spec.layout, wire_bytes or {}
        dtype = DType(layout.dtype)
        self.store.declare(
            spec.tensor_id,
            n_partitions=len(spec.pieces),
            partitions=[
                (index, wire_bytes.get(index, nbytes), roster or self._roster(spec, index))
                for index, nbytes in self._owned(spec)
            ],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=wire_chunk(layout.coding, layout.chunk_bytes),
            inline_bytes=(self._config.inline_sum_bytes if inline_bytes is None else inline_bytes),
            version=spec.version,
            policy=layout.policy,
            **options,
        )

    def _roster_apart(self) -> Roster:
        return roster_apart(self._job.n_workers, self._job.generation)

    def _owned(self, spec: KeySpec) -> list[tuple[int, int]]:
        """Return index and bytes of each partition that this server owns."""
        return [
            (index, nbytes) for index, (nbytes, owner) in enumerate(spec.pieces)
            if owner == self._me
        ]  # fmt: skip

    def _followers(self, spec: KeySpec) -> dict[int, Coder]:
        """Return the coders of answers: without error feedback, since answers are differences."""
        coding = spec.layout.coding.without_memory()
        return {
            index: self._coder(spec, index, nbytes, coding) for index, nbytes in self._owned(spec)
        }

    def _log_refusals(self) -> None:
        """Log, once each, the workers whose updates a rule refused."""
        for worker, (_, key) in self.store.refusals().items():
            if worker in self._blamed:
                continue
            self._blamed.add(worker)
            log.warning(
                "%s refuses an update of worker %d to %r: it has NaN, infinity or a norm that "
                "overflows; statistics() counts further ones",
                self.name, worker, self._names.get(tensor_of(key), "a tensor"),
            )  # fmt: skip

    def _log_absences(self) -> None:
        """Log workers that miss deadlines: at the first round, and at twice as many each time."""
        for worker, (missed, late) in self.store.absences().items():
            if missed < max(2 * self._logged_missed.get(worker, 0), 1):
                continue
            self._logged_missed[worker] = missed
            log.warning(
                "%s: worker %d missed the deadline of %d rounds; %d of its updates came late and "
                "count in the next round", self.name, worker, missed, late,
            )  # fmt: skip

    def _coded_rules(self, spec: KeySpec) -> dict[int, CodedRule]:
        """Return the rules of our partitions, by index; none without a codec."""
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
            self._residual_coders.setdefault(spec.tensor_id, {})[index] = coder
        return coder

    def _kernel(self, spec: KeySpec) -> int:
        dtype = DType(spec.layout.dtype)
        if trim_of(spec.layout.policy, self._job.validators):
            return robust_kernel("trimmed_mean", dtype)
        return sum_kernel(dtype)

    def _roster(self, spec: KeySpec, index: int) -> Roster:
        """Return the roster of a partition; tensors with the same contributors share it."""
        job = self._job
        if spec.layout.givers is Givers.VALIDATORS:
            trim = trim_of(spec.layout.policy, job.validators)
            return roster_judged(job.n_workers, job.validators, job.generation, trim=trim)
        if index not in self._rosters:
            there = [ranks for ranks in job.machines if ranks[0] < job.n_workers]
            self._rosters[index] = roster_of(there, index, job.generation)
        return self._rosters[index]

    # ---- generations ----

    def forget(self) -> None:
        """Drop all keys: the workers have left. Raises StallError when a link does not end."""
        self._forgetting.clear()
        self._residual_coders.clear()
        self._names.clear()
        self.store.forget(timeout_s=self._config.shutdown_timeout_s)

    def end_view(self) -> None:
        """End all links and drop all keys: members are lost. Raises StallError."""
        self._transport.abort()
        if self._rdma is not None:
            self._rdma.abort()
        self.forget()

    def begin(self, job: Job) -> None:
        """Admit the workers of a new generation, which may be others on other machines."""
        before = self._me, self._job.size
        self._me = job.me
        if before != (job.me, job.size):
            old, self.store = self.store, self._make_store(job)
            old.wake()
            old.close(timeout_s=self._config.shutdown_timeout_s)
        self._rosters.clear()
        self._job = job  # last: now its workers are let in
        self._transport.forget_damages()
        if self._rdma is not None:
            self._rdma.forget_failures()

    # ---- the end ----

    def leave(self) -> None:
        """Send BYE to the workers behind the results that they wait for. Does not wait."""
        self._ending.set()
        self._peer_links.stop_serving()
        self._transport.leave()
        if self._rdma is not None:
            self._rdma.leave()
        log.info("%s ends: %s, refused %s", self.name, self.statistics(), self._peer_links.refused)

    def close(self) -> None:
        """Wait for the links and all threads to end. Raises StallError, TransportTimeout."""
        timeout_s = self._config.shutdown_timeout_s
        self._ending.set()
        self._peer_links.stop_serving()
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
        """Yield the traffic of each link to a worker."""
        yield from traffic(self._transport)
        yield from traffic(self._rdma, "RDMA")

    def statistics(self) -> dict[str, int]:
        """Return counts of the store, the links and the listener, as a dict."""
        counts = Counter(self._transport.statistics())
        if self._rdma is not None:
            counts.update(self._rdma.statistics())
        return (
            self.store.statistics()
            | dict(counts)
            | _counted(self.store.absences())
            | {"refused": sum(self._peer_links.refused.values()) + self._refused}
        )
