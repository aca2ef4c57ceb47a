# SPDX-License-Identifier: Apache-2.0
"""What ties a worker to its job: control client, engine, links, and the server it may be beside.

Decides which machine the worker says it is on, and whether it can serve. Made in the order
listeners, client, engine, server, links, local group; close() goes the way back. Threads: those of
its parts; events come on the client's.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastps import _core
from fastps.collectives._exchange import Exchange
from fastps.config import Config
from fastps.config.cpu_list import parse_cpu_list
from fastps.contract.codec import Codec, wire_chunk
from fastps.contract.contract import WHOLE, Policy, is_followed, pusher_of
from fastps.control.blame import Failure
from fastps.control.client import ControlClient
from fastps.control.identity import machine_name
from fastps.control.listen import Listeners, open_listeners
from fastps.control.protocol import (
    DeclaredTensor,
    DeclareKeys,
    Event,
    ForgetKeys,
    Job,
    JobOver,
    Layout,
    PeerLeft,
    PeerLost,
    TensorSpec,
    ViewJoined,
    ViewLost,
)
from fastps.errors import (
    FastPSError,
    PeerLostError,
    Status,
    TransportError,
    ViewChangedError,
)
from fastps.native.condition import Flag
from fastps.session.server_links import Links
from fastps.telemetry.status import StatusService, links_of
from fastps.transport import rdma, shm, sockets
from fastps.transport.peer_links import PeerLinks
from fastps.transport.tcp import choose_chunk
from fastps.transport.tcp.damage import damage_text
from fastps.transport.tcp.progress import Progress
from fastps.transport.traffic import Traffic
from fastps.types import DType
from fastps.worker._engine import WorkerEngine
from fastps.worker._plan import Decoding, Encoding, PlannedTensor
from fastps.worker.local import LocalGroup

if TYPE_CHECKING:
    from fastps.reduce._partition import Coder
    from fastps.server.dataplane import DataPlane
    from fastps.telemetry.recorder import Recorder
    from fastps.transport._link import Mapping
    from fastps.worker._board import Board

log = logging.getLogger(__name__)

_NEWS_S = 1.0  # for the scheduler to say which member is lost, where a link fails
MAX_KEPT = 256  # layouts of which is known what engines are told


def _shares(config: Config) -> bool:
    """Return whether this worker shares memory with others of its machine; log why it does not."""
    if config.num_validators or (config.goes_on and config.num_servers):
        return False  # whoever may lie, or die, may write to what others read, or not at all
    is_wanted = config.shared_memory and config.size > 1
    reason = shm.can_share(config.shared_memory_bytes) if is_wanted else ""
    if reason:
        log.warning("%s; this worker reduces over sockets instead", reason)
    return config.shared_memory and not reason


def may_serve(config: Config) -> bool:
    """Return whether the scheduler may appoint this worker as a server, as far as settings say."""
    if config.num_validators and config.role == "worker":
        return False
    if config.colocate != "auto":
        return config.colocate == "on"
    has_enough = 0 < config.size <= config.num_servers
    return not has_enough or config.elastic_min > 0  # whose servers may be lost


def say_hello(config: Config, on_event: Callable[[Event], None]) -> ControlClient:
    """Return the client of a newcomer, which waits with it for a job that runs.

    on_event: as of Connections, which take the client over. Raises what Connections raise.
    """
    listeners = open_listeners(config, port=0)
    try:
        return _connect(config, listeners, on_event=on_event, is_newcomer=True)
    finally:
        listeners.close()  # the connections of its first view open others


def _connect(
    config: Config, listeners: Listeners, *, on_event: Callable[[Event], None],
    is_newcomer: bool = False,
) -> ControlClient:  # fmt: skip
    return ControlClient.connect(
        config,
        role=config.role,
        data_address=listeners.address,
        unix=listeners.unix,
        serves=may_serve(config),
        machine=machine_name(config, is_shared=_shares(config)),
        gid=rdma.look_up(config).usable_gid,
        on_event=on_event,
        is_newcomer=is_newcomer,
    )


def choose_threads() -> int:
    """Return the threads that encode: a quarter of the CPUs, 1 to 4."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), 4)


@functools.lru_cache(maxsize=MAX_KEPT)
def _engine_terms(layout: Layout, *, is_shared: bool) -> dict[str, Any]:
    """Return what the engine is told of each tensor of a layout; is_shared: reduced in memory."""
    dtype, kernel = DType(layout.dtype), 0
    follows = is_followed(layout.policy, layout.coding)
    if is_shared:
        # imported here: a worker that only sends does not need the kernels
        from fastps.reduce import sum_kernel  # noqa: PLC0415

        kernel = sum_kernel(dtype)
    return {
        "nbytes": layout.nbytes,
        "dtype": layout.dtype,
        "chunk_bytes": layout.chunk_bytes,
        "itemsize": dtype.itemsize,
        "kernel": kernel,
        "frame_bytes": wire_chunk(layout.coding, layout.chunk_bytes),
        "is_ruled": layout.rule.has_meaning() or follows or layout.policy is Policy.CODEC_STATE,
        "waits_for_whole": layout.rule.wants_whole or layout.policy in WHOLE or follows,
        "adds": follows,
    }


def _ignore(event: Event) -> None:
    """Take an event that nobody waits for any more."""


class Connections:
    """Everything that a worker of a running job holds on to; made whole or not at all."""

    _is_first = True  # view of this process

    def __init__(
        self, config: Config, on_event: Callable[[Event], None],
        client: ControlClient | None = None,
    ) -> None:  # fmt: skip
        """Join the job, connect to every server, wait for everybody; blocks to start_timeout_s.

        on_event gets the scheduler's news, on the control thread, after the engine heard of it.
        client: of the last view, whose end_view() has returned; joins the next one with it.
        """
        self._config = config
        self._on_event = on_event
        self._lost: list[int] = []  # workers without which the job goes on
        self._missed: dict[int, float] = {}  # workers whose links ended alone: to report from when
        self._is_leaving = False
        self._is_first = client is None
        self._last_job: Job | None = None
        self._told_loss: PeerLost | None = None
        self._is_told = Flag()
        self._interrupt = sockets.Interrupt()  # set when a member is lost before we are whole
        self._group: LocalGroup | None = None
        self._server: DataPlane | None = None
        self._links: Links | None = None
        self._progress = Progress()
        self._names: dict[int, str] = {}  # of tensors, by id
        _core.set_thread_placement(list(parse_cpu_list(config.cpus)), config.numa_node)
        _core.arm_fault(config.fault)
        self.peer_links: PeerLinks | None = None
        self.recorder: Recorder | None = None
        self._status: StatusService | None = None
        listeners = open_listeners(config, port=0)
        try:
            if client is None:
                self.client = self._join(listeners)
            else:
                self._device = rdma.look_up(config)
                self.client, self._last_job = client, client.known_job
                client.give_events_to(self._take)
                client.await_view(port=listeners.address[1], unix=listeners.unix)
            self.job = self.client.job
            is_alone = self.job.is_local and self.job.size > 1
            self.owners = () if is_alone else self.job.owners
            self._lanes = dict.fromkeys(self.owners, config.links_per_peer)
            self.engine = WorkerEngine(
                me=self.job.me, n_members=len(self.job.members), lanes=self._lanes
            )
            self.exchange = Exchange(
                me=self.job.me, n_members=len(self.job.members), engine=self.engine,
                goes_on=config.goes_on,
            )  # fmt: skip
            self._codec = Encoding()
            if self.owners:
                self.engine.insert(0, self._codec)
                self.engine.insert(2, Decoding(self._codec))
            for rank in self._lost:  # before there was an exchange
                self.exchange.lose(rank)
            with self._interrupt:
                self._make(listeners)
                self._share_memory()
            self._begin_telemetry()
            self.client.barrier("fastps.connected", timeout_s=config.start_timeout_s)
            if self._server is not None:
                self.peer_links.stop_serving()  # everybody is inside
        except BaseException as error:
            is_start = client is None and hasattr(self, "client")
            cause = self._loss_behind(error) if is_start else None
            self._undo(listeners)
            if is_start:
                self.client.close()
            if cause is not None:
                raise PeerLostError(f"the job did not start: {cause}") from error
            raise

    def _loss_behind(self, error: BaseException) -> PeerLost | None:
        """Return the loss that made links or waits fail; the scheduler may be about to tell it."""
        is_named = isinstance(error, PeerLostError) and not isinstance(error, ViewChangedError)
        if is_named or not isinstance(error, TransportError):
            return None
        self._is_told.wait(_NEWS_S)
        return self._told_loss

    # ---- making ----

    def _join(self, listeners: Listeners) -> ControlClient:
        self._device = rdma.look_up(self._config)
        return _connect(self._config, listeners, on_event=self._take)

    def _make(self, listeners: Listeners) -> None:
        self.peer_links = PeerLinks(
            self._config, listeners.sockets, key_of=self.client.keys.of, device=self._device
        )
        self.peer_links.join(self.job.members, me=self.job.me, generation=self.job.generation)
        if self.job.me in self.job.owners:
            self._server = self._make_server(self.peer_links)
        self.peer_links.link_peers(self.exchange)
        self.exchange.pin = self.peer_links.hold
        self.peer_links.start()
        self._links = Links(
            self._config,
            self.job,
            self.engine,
            key_of=self.client.keys.of,
            device=self._device,
        )
        own = None if self._server is None else self._server.store
        self._links.connect(self._lanes, own)

    def _share_memory(self) -> None:
        """Meet the other workers of our machine, if there are any."""
        ranks = next(ranks for ranks in self.job.machines if self.job.me in ranks)
        if len(ranks) == 1:
            return
        self._group = LocalGroup(
            self._config,
            ranks=ranks,
            rank=self.job.me,
            n_workers=self.job.size,
            key=self._memory_key(),
            engine=self.engine,
            exchange=self.exchange,
            has_board=self.job.has_board,
        )
        self.exchange.pages = self._group.pages

    @property
    def board(self) -> Board | None:
        """Where the workers of this view commit results; None: the scheduler does."""
        return None if self._group is None else self._group.board

    def _memory_key(self) -> bytes:
        """Make a key that no other job or generation has, also without a token."""
        members = ",".join(f"{item.host}/{item.pid}" for item in self.job.workers)
        words = f"memory {self.job.generation} {members}"
        return hmac.digest(self.client.keys.memory, words.encode(), "sha256")

    def _make_server(self, peer_links: PeerLinks) -> DataPlane:
        # imported here: a worker that only sends needs neither the kernels nor the store
        from fastps.server.dataplane import DataPlane  # noqa: PLC0415

        server = DataPlane(self._config, self.client, peer_links=peer_links)
        server.start()
        log.info("worker %d is %s too", self.job.me, self.job.owner_name(self.job.me))
        return server

    def _begin_telemetry(self) -> None:
        """Trace and measure as settings say."""
        if self._config.telemetry_on:
            self.engine.measure_speed()
        if self._config.trace_on:
            from fastps.telemetry.recorder import Recorder  # noqa: PLC0415  (seldom needed)

            me = self.job.members[self.job.me]
            view = "" if self._is_first else f"-view{self.job.generation}"
            self.recorder = Recorder(
                self._config, role="worker", rank=self.job.me, number=self.job.me,
                host_id=me.host_id, ping=self.client.clock_ns, ending=view,
            )  # fmt: skip

    def begin_status(self, tell: Callable[[], dict[str, float]]) -> None:
        """Let others ask what `tell` gives; leaves with ConfigError where that cannot be."""
        try:
            self._status = StatusService(
                self._config, role=self._config.role, rank=self.job.me, slot=self.job.local_rank,
                tell=tell, links=lambda: links_of(self._traffic(), self.job.members),
            )  # fmt: skip
        except FastPSError:
            self.close()
            raise

    # ---- at work ----

    def _traffic(self) -> Iterator[Traffic]:
        """Yield each link of this process, those of the server in it too."""
        for part in (self._links, self.peer_links, self._group, self._server):
            if part is not None:
                yield from part.traffic()

    def describe_links(self) -> str:
        """Return by which way tensors go to those who sum them, and why."""
        if not self.owners:
            return "memory of this machine"
        assert self._links is not None
        return self._links.describe()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a frame, the same on all workers."""
        members = self.job.members if self.owners else self.job.workers
        if self._config.chunk_bytes:
            return self._config.chunk_bytes
        if rdma.carries_all(self._config, [(item.gid, item.host_id) for item in members]):
            return self._config.partition_bytes  # a frame is one work request
        return choose_chunk(
            [members[owner].host for owner in self.owners],
            host_ids=[item.host_id for item in members],
        )

    def forget_tensor(self, tensor: PlannedTensor) -> None:
        """Drop the records of a tensor that nothing uses any more."""
        self.engine.forget(tensor)
        self._names.pop(tensor.tensor_id, None)

    def make_tensor(self, spec: TensorSpec, answer: DeclaredTensor) -> PlannedTensor:
        """Make the records of a tensor, in the pieces that the scheduler chose."""
        if self.recorder is not None:
            self.recorder.name_tensor(answer.tensor_id, spec.name)
        self._names[answer.tensor_id] = spec.name
        partitions = []
        offset = 0
        for nbytes, owner in answer.pieces:
            partitions.append((offset, nbytes, owner))
            offset += nbytes
        tensor = self.engine.declare(
            answer.tensor_id,
            spec.name,
            partitions=partitions,
            version=answer.version,
            coders=self._coders(spec, answer),
            **_engine_terms(spec.layout, is_shared=self._group is not None),
        )
        compensation, policy = spec.layout.compensation, spec.layout.policy
        tensor.is_compensated = compensation.strength > 0 or policy is Policy.DEADLINE_ROUNDS
        tensor.expect(spec.layout)
        return tensor

    def _coders(self, spec: TensorSpec, answer: DeclaredTensor) -> list[Coder | None] | None:
        """Make what encodes the partitions that we push; None: they travel as they are."""
        layout = spec.layout
        if layout.coding.codec is Codec.NONE or not self.owners:
            return None
        # imported here: most jobs compress nothing
        from fastps.reduce._partition import Coder  # noqa: PLC0415

        self._codec.go(self._config.codec_threads or choose_threads())
        ranks = next(ranks for ranks in self.job.machines if self.job.me in ranks)
        return [
            Coder(
                layout.coding, DType(layout.dtype), nbytes=nbytes, chunk_bytes=layout.chunk_bytes,
                name=spec.name, partition=index, rank=self.job.me, pushes=True,
            )
            if layout.rule.has_meaning() or is_followed(layout.policy, layout.coding)
            or pusher_of(ranks, index) == self.job.me
            else None
            for index, (nbytes, _) in enumerate(answer.pieces)
        ]  # fmt: skip

    def reach(self, members: Sequence[int]) -> None:
        """Make the links to members that there are not yet; blocks as PeerLinks.reach() does.

        Raises ViewChangedError when an elastic job loses a member meanwhile.
        """
        assert self.peer_links is not None
        for member in members:
            if self.exchange.is_linked(member):
                continue
            if not self._config.goes_on:
                self._reach_one(member)
            elif member not in self.exchange.gone:
                self._try_to_reach(member)

    def _reach_one(self, member: int) -> None:
        assert self.peer_links is not None
        try:
            with self._interrupt:
                self.peer_links.reach(member)
        except TransportError as error:
            if not self._config.is_elastic:
                raise
            if not self._interrupt.is_set:
                self.client.report_lost(member, f"it cannot be reached: {error}")
            raise ViewChangedError(
                f"worker {member} cannot be reached: {error}; call the operation again on all "
                "workers"
            ) from error

    def _try_to_reach(self, member: int) -> None:
        """Make a link, or go on without the member: an operation has its number on all sides."""
        assert self.peer_links is not None
        try:
            self.peer_links.reach(member)
        except TransportError as error:
            log.warning("worker %d cannot be reached: %s", member, error)
            self.exchange.lose(member)
            self._report_missed(member, f"it cannot be reached: {error}")

    def _report_missed(self, member: int, cause: str) -> None:
        """Report a worker that is lost to us, so that all agree on who is: it, or this one.

        Else others would wait for what the two do not exchange. Without a scheduler nobody can.
        """
        self._missed[member] = math.inf
        with contextlib.suppress(FastPSError):
            self.client.report_lost(member, cause)

    def _look_at_missed(self, now: float) -> None:
        """Report workers whose links ended, and of whom the scheduler has not said why in time."""
        wait_s = self._config.lease_s + _NEWS_S
        for member in {*self.exchange.gone} - {*self._lost}:
            if now > self._missed.setdefault(member, now + wait_s):
                trouble = self.exchange.trouble_of(member)
                self._report_missed(member, trouble or "the link to it ended")

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that a worker is on."""
        return self.job.workers[rank].machine

    def set_credit(self, credit_bytes: int) -> None:
        """Set the credit of all links to owners; see Links.set_credit()."""
        if self._links is not None:
            self._links.set_credit(credit_bytes)

    def failure(self, tensor: str, status: int, *, said: str = "", culprit: int = -1) -> Failure:
        """Gather what is known here about an operation that failed.

        culprit: what the engine names; it counts only where no link of ours has ended.
        """
        kind = Status(status)
        broken = self.engine.failure or self.exchange.failure
        is_told = kind is Status.PEER_LOST and broken is None and culprit >= 0
        if broken is None or broken[1] < 0:
            return Failure(tensor, kind, said, culprit if is_told else None, view=self.job.view)
        trouble = "" if self._links is None else self._links.failure_of(broken[1])
        trouble = trouble or self._damage_from(broken[1])
        trouble = trouble or self._progress.trouble_of(broken[1])
        trouble = trouble or self.exchange.trouble_of(broken[1])
        return Failure(
            tensor,
            kind,
            said,
            culprit if is_told else None,
            broken[1],
            self.job.owner_name(broken[1]),
            f" ({trouble})" if trouble else "",
            is_ours=self._links is not None and self._links.has_trouble,
            view=self.job.view,
        )

    def _damage_from(self, member: int) -> str:
        """Return what arrived damaged from a member; empty if nothing did."""
        for links in (self._links, self.peer_links):
            damage = None if links is None else links.damage_of(member)
            if damage is not None:
                return damage_text(damage, self._names.get)
        return ""

    def look_at_links(self, now: float) -> None:
        """See whether links make progress; on the control thread, every few seconds."""
        if self._config.goes_on and not self._is_leaving:
            self._look_at_missed(now)
        if self._links is not None:
            peer_links = [] if self.peer_links is None else self.peer_links.unacknowledged()
            self._progress.look([*self._links.unacknowledged(), *peer_links], now)
        if self._server is not None:
            self._server.look_at_links()

    def trouble_of_links(self) -> str:
        """Return which links make no progress; empty if all do."""
        troubles = ((peer, self._progress.trouble_of(peer)) for peer in self._progress.peers)
        return "; ".join(
            f"the link to {self.job.owner_name(peer)}: {text}" for peer, text in troubles
        )

    def fail_tensor(self, tensor_id: int, status: int) -> None:
        """Fail what is in flight on a tensor that can never be complete.

        The server beside us first: while it may sum from our arrays they are not the user's.
        """
        if self._server is not None:
            self._server.store.fail_tensor(tensor_id, status)
        self.engine.fail_tensor(tensor_id, status)

    @property
    def arena(self) -> shm.Arena | None:
        """The memory that others of this machine can reach; None if there are none."""
        return None if self._group is None else self._group.arena

    @property
    def arenas(self) -> dict[int, Mapping]:
        """The memory of each worker of this machine, by rank, where they share it."""
        return {} if self._group is None else self._group.arenas

    def statistics(self) -> dict[str, float]:
        """Count what the engine and its links did; with server_ before it, what was served."""
        counts: Counter[str] = Counter({"bytes_registered": 0, "bytes_staged": 0})
        counts.update(self.engine.statistics())
        counts.update(self.exchange.statistics())
        counts.update(self._codec.statistics())
        for links in (self._links, self.peer_links):
            if links is not None:
                counts.update(links.statistics())
        counts["bytes_over_links"] = counts["bytes_sent"]
        if self._group is not None:
            counts.update(self._group.statistics())
        if self._server is not None:
            served = self._server.statistics()
            counts.update({f"server_{name}": count for name, count in served.items()})
        return dict(counts)

    def _take(self, event: Event) -> None:
        """Take news on the control thread; keys are the embedded server's business."""
        if isinstance(event, DeclareKeys | ForgetKeys):
            if self._server is not None:
                self._server.take(event)
            return
        if isinstance(event, ViewLost | PeerLost):
            lost = event.lost if isinstance(event, ViewLost) else event
            self._told_loss = self._told_loss or lost
            self._is_told.set()
        if isinstance(event, ViewLost | ViewJoined):
            if self._is_first or self.client.known_job is not self._last_job:
                self._fail(Status.PEER_LOST)  # else we have yet to be told of the next view
        elif isinstance(event, PeerLost):
            self._lose(event)
        elif isinstance(event, JobOver):
            self._fail(Status.SHUTDOWN)
        elif isinstance(event, PeerLeft):
            self._missed[event.member] = math.inf
            if hasattr(self, "engine"):
                self.engine.member_left(event.member)
        self._on_event(event)

    def _lose(self, lost: PeerLost) -> None:
        """End everything, or go on without the one that is lost, or without the scheduler."""
        if not lost.goes_on or (lost.role, lost.rank) == ("worker", self.client.job.me):
            self._fail(Status.PEER_LOST)
        elif lost.role == "worker":
            self._lost.append(lost.rank)
            if hasattr(self, "exchange"):
                self.exchange.lose(lost.rank)
            if self.peer_links is not None:
                self.peer_links.lose(lost.rank)

    def _fail(self, status: int) -> None:
        """End everything in flight; news may come before we are whole."""
        self._interrupt.set()
        if self.peer_links is not None:
            self.peer_links.fail()
        if hasattr(self, "exchange"):
            self.engine.fail(status)
            self.exchange.fail(status)

    # ---- the end ----

    def close(self) -> None:
        """Leave the job in order and join every thread. Blocks to shutdown_timeout_s a step.

        First nothing more is pushed; then the scheduler lets us go, which it does at once, or, if
        others may still need the server beside us, when they leave too; then that server says
        BYE; then all links have ended, and only then their memory goes.
        """
        timeout_s = self._config.shutdown_timeout_s
        if self._status is not None:
            self._status.close()
            self._status = None  # which knows its session, as that knows us
        if self.recorder is not None:
            self.recorder.stop_clock()
        self._is_leaving = True
        self.exchange.leave()
        self.engine.leave()
        try:
            self.client.leave(timeout_s=timeout_s)
        except FastPSError as error:
            log.warning("left the job without the scheduler's answer: %s", error)
        if self._server is not None:
            self._server.leave()
        if self.peer_links is not None:
            self.peer_links.leave()
        self.engine.wait_closed(timeout_s=timeout_s)
        self._close_links(timeout_s)
        self._on_event = _ignore  # so that the session, if nobody else holds it, goes at once

    def end_view(self) -> ControlClient:
        """End all but the connection to the scheduler, which is returned, at once.

        When this returns, nothing of this process writes what other members can see, and what was
        in flight has failed. Blocks to shutdown_timeout_s a step.
        """
        timeout_s = self._config.shutdown_timeout_s
        if self._status is not None:
            self._status.close()
            self._status = None
        self._fail(Status.PEER_LOST)
        self.engine.wait_closed(timeout_s=timeout_s)
        self._close_links(timeout_s)
        self.client.give_events_to(self._on_event)
        return self.client

    def _close_links(self, timeout_s: float) -> None:
        if self._links is not None:
            self._links.close(timeout_s=timeout_s)
        if hasattr(self, "_codec") and not self._codec.close(timeout_s=timeout_s):
            log.warning("the threads of the codec did not end within %g s", timeout_s)
        if self._server is not None:
            self._server.close()
        if self.peer_links is not None:
            self.peer_links.close()
        if self._group is not None:
            self._group.close(timeout_s=timeout_s)
            self._group = None
        if self.recorder is not None:
            self.recorder.close()
        if hasattr(self, "exchange"):
            self.exchange.dismiss()

    def _undo(self, listeners: Listeners) -> None:
        """Free what was made of something that did not become whole."""
        with contextlib.suppress(FastPSError):
            self._close_links(self._config.shutdown_timeout_s)
        listeners.close()

    def abandon(self) -> None:
        """Close the links' descriptors in a forked child, so that our death stays visible."""
        for item in (self._links, self._server, self.peer_links, self.recorder, self._status):
            if item is not None:
                item.abandon()
