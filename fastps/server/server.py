# SPDX-License-Identifier: Apache-2.0
"""One summation server: joins the job, takes the workers' links, follows the scheduler.

Owns control client and data plane, made in this order and stopped in the reverse one. Threads:
the main thread waits for the end, the control client's reader handles events; the rest belongs to
the data plane.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from fastps import _core
from fastps.config import Config
from fastps.config.cpu_list import parse_cpu_list
from fastps.control.client import ControlClient
from fastps.control.listen import open_listeners
from fastps.control.protocol import (
    DeclareKeys,
    Event,
    ForgetKeys,
    Job,
    JobOver,
    NewGeneration,
    NewJob,
    PeerLost,
    ViewJoined,
    ViewLost,
)
from fastps.errors import FastPSError, ViewChangedError
from fastps.native.condition import Flag
from fastps.server.dataplane import DataPlane
from fastps.telemetry.recorder import Recorder
from fastps.telemetry.status import StatusService, links_of
from fastps.transport import rdma, sockets
from fastps.transport.peer_links import PeerLinks

log = logging.getLogger(__name__)

EXIT_ORDERLY = 0
EXIT_PEER_LOST = 1


class Server:
    """Serve one job until it is over, a peer is lost or stop() is called."""

    def __init__(self, config: Config) -> None:
        """Listen, join the job and wait until it is complete.

        Blocks up to start_timeout_s. Raises ConfigError, AuthError, TransportTimeout, StallError.
        """
        self._config = config
        self._exit_status = EXIT_ORDERLY
        self._stopped = Flag()
        self._view_ended = Flag()
        self._next_generation = 0  # at least, of the next view
        self._views = threading.Thread(target=self._follow_views, name="fastps:view", daemon=True)
        self._is_ready = Flag()
        _core.set_thread_placement(list(parse_cpu_list(config.cpus)), config.numa_node)
        listeners = open_listeners(config, port=config.port)
        self.address = listeners.address
        try:
            self._client = ControlClient.connect(
                config,
                role="server",
                data_address=listeners.address,
                unix=listeners.unix,
                gid=rdma.look_up(config).usable_gid,
                on_event=self._on_event,
            )
        except BaseException:
            listeners.close()
            raise
        job = self._client.job
        device = rdma.look_up(config)
        self._peer_links = PeerLinks(
            config, listeners.sockets, device=device,
            key_of=lambda member: self._client.keys.of(member),  # which each view makes anew
        )  # fmt: skip
        self._plane = DataPlane(config, self._client, peer_links=self._peer_links)
        self._meet(job)
        if config.trace_on:
            me = job.members[job.me]
            self._plane.recorder = Recorder(
                config, role="server", rank=me.rank, number=job.me, host_id=me.host_id,
                ping=self._client.clock_ns,
            )  # fmt: skip
        self._is_ready.set()
        self._views.start()
        self._client.watch = lambda: self._plane.look_at_links()  # in each generation
        self._plane.start()
        self._peer_links.start()
        self._status = StatusService(
            config, role="server", rank=job.me - job.size, slot=job.me,
            tell=self._plane.statistics,
            links=lambda: links_of(self._plane.traffic(), self._client.job.members),
        )  # fmt: skip
        log.info(
            "%s of %d serves %d workers on %s",
            self._plane.name,
            len(job.owners),
            job.size,
            sockets.join_address(*self.address),
        )

    def run(self) -> int:
        """Wait until the job ends, stop everything, and return the exit status."""
        self._stopped.wait()
        self._status.close()
        recorder = self._plane.recorder
        if recorder is not None:
            recorder.stop_clock()
        self._plane.leave()
        self._peer_links.leave()
        with contextlib.suppress(FastPSError):
            self._client.leave(timeout_s=self._config.shutdown_timeout_s)
        self._plane.close()
        self._peer_links.close()
        if recorder is not None:
            recorder.close()
        return self._exit_status

    def stop(self) -> None:
        """Ask run() to end in order; safe in a signal handler."""
        self._stopped.set()
        self._view_ended.set()

    # ---- events of the scheduler, on the control client's thread ----

    def _on_event(self, event: Event) -> None:
        if not self._is_ready.wait(self._config.start_timeout_s):
            return
        if isinstance(event, DeclareKeys | ForgetKeys):
            self._plane.take(event)
        elif isinstance(event, ViewJoined) or (isinstance(event, ViewLost) and event.survives):
            level = logging.INFO if isinstance(event, ViewJoined) else logging.WARNING
            log.log(level, "%s; the job goes on in a new view", event.cause)
            self._next_generation = event.generation
            self._view_ended.set()
        elif isinstance(event, ViewLost):
            log.error("this server was taken for lost: %s", event.lost.cause)
            self._exit_status = EXIT_PEER_LOST
            self.stop()
        elif isinstance(event, NewGeneration):
            self._forget(event.generation)
        elif isinstance(event, NewJob):
            self._plane.begin(event.job)
            self._meet(event.job)
        elif isinstance(event, PeerLost):
            log.error("%s", event)
            if event.goes_on:  # rounds go on without its contributions
                self._peer_links.lose(event.rank)
                return
            self._exit_status = EXIT_PEER_LOST
            self.stop()
        elif isinstance(event, JobOver):
            log.info("the job is over: %s", event.reason)
            self.stop()

    # ---- views of an elastic job, on a thread of their own ----

    def _follow_views(self) -> None:
        """Take part in each next view, until the end."""
        while self._view_ended.wait() and not self._stopped.is_set():
            self._view_ended.clear()
            try:
                if self._client.job.generation < self._next_generation:
                    self._change_view()
            except ViewChangedError:  # another member was lost meanwhile
                self._view_ended.set()
            except FastPSError as error:
                if not self._stopped.is_set():
                    log.error("%s cannot go on in a new view: %s", self._plane.name, error)
                    self._exit_status = EXIT_PEER_LOST
                    self.stop()

    def _change_view(self) -> None:
        """End the links of the last view, and take those of the next one."""
        self._plane.end_view()
        job = self._client.await_view(port=0, unix="")
        self._plane.begin(job)
        self._meet(job)
        log.info("%s serves %d workers in generation %d", self._plane.name, job.n_workers,
                 job.generation)  # fmt: skip

    def _meet(self, job: Job) -> None:
        """Take the members of a generation."""
        self._peer_links.join(job.members, me=job.me, generation=job.generation)

    def _forget(self, generation: int) -> None:
        try:
            self._plane.forget()
        except FastPSError:
            log.exception("%s cannot begin generation %d", self._plane.name, generation)
            self._exit_status = EXIT_PEER_LOST
            self.stop()
