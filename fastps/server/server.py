# SPDX-License-Identifier: Apache-2.0
"""One summation server: joins the job, takes the workers' links, follows the scheduler.

Owns pool, store, transport, listener and control client, made in this order and stopped in the
reverse one. Moves no tensor bytes itself. Threads: the main thread waits for the end, the
control client's reader handles events, fastps:accept admits links, fastps:news reports links
that broke; I/O and engine threads belong to transport and store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from fastps import _core
from fastps.affinity import parse_cpu_list
from fastps.config import Config
from fastps.control.client import ControlClient
from fastps.control.protocol import (
    DeclareKeys,
    Event,
    JobOver,
    KeySpec,
    NewGeneration,
    PeerLost,
)
from fastps.errors import FastPSError
from fastps.partition import make_partitions
from fastps.reduce import sum_kernel
from fastps.server._store import ServerStore
from fastps.transport import sockets
from fastps.transport._tcp import TcpTransport
from fastps.transport.interfaces import own_address
from fastps.transport.tcp import Listener, NotYet, unpack_lane
from fastps.types import DType

log = logging.getLogger(__name__)

EXIT_ORDERLY = 0
EXIT_PEER_LOST = 1
E_SHUTDOWN = -2  # a worker said BYE
CPUS_PER_ENGINE = 4  # the rest moves bytes; a chunk just read is summed fastest where it was read
MAX_AUTO_ENGINES = 4  # two threads sum at the speed of memory
NEWS_SLICE_S = 5.0  # how often the news thread looks whether it should end


def _engine_threads(config: Config) -> int:
    """Give the number of summing threads: as configured, else by the CPUs at hand."""
    if config.engine_threads >= 0:
        return config.engine_threads
    return min(len(os.sched_getaffinity(0)) // CPUS_PER_ENGINE, MAX_AUTO_ENGINES)


class Server:
    """Serve one job until it is over, a peer is lost or stop() is called."""

    def __init__(self, config: Config) -> None:
        """Listen, join the job and wait until it is complete.

        Blocks up to start_timeout_s. Raises ConfigError, AuthError, TransportTimeout, StallError.
        """
        self._config = config
        self._exit_status = EXIT_ORDERLY
        self._stopped = threading.Event()
        self._is_ready = threading.Event()
        self._store: ServerStore | None = None
        _core.set_thread_placement(list(parse_cpu_list(config.cpus)), config.numa_node)
        self._pool = _core.BufferPool(config.pool_bytes)
        listeners = sockets.listen(own_address(config), config.port)
        self.address: tuple[str, int] = listeners[0].getsockname()[:2]
        try:
            self._client = ControlClient.connect(
                config, role="server", data_address=self.address, on_event=self._on_event
            )
        except BaseException:
            sockets.close_all(listeners)
            raise
        job = self._client.job
        self.index = job.rank
        self._generation = job.generation
        self._store = ServerStore(
            self._pool,
            index=job.rank,
            n_workers=job.size,
            lanes=config.links_per_peer,
            engine_threads=_engine_threads(config),
        )
        self._transport = TcpTransport(io_threads=config.io_threads, spin_us=config.spin_us)
        self._listener = Listener(listeners, config, key=self._client.data_key, admit=self._admit)
        self._news = threading.Thread(target=self._watch, name="fastps:news", daemon=True)
        self._is_ready.set()
        self._listener.start()
        self._news.start()
        log.info(
            "server %d of %d serves %d workers on %s",
            job.rank,
            len(job.servers),
            job.size,
            sockets.join_address(*self.address),
        )

    def run(self) -> int:
        """Wait until the job ends; stop everything; give the exit status."""
        self._stopped.wait()
        self._close()
        return self._exit_status

    def stop(self) -> None:
        """Ask run() to end in order; safe in a signal handler."""
        self._stopped.set()

    def _close(self) -> None:
        """Stop in the reverse order of creation; report what does not end."""
        timeout_s = self._config.shutdown_timeout_s
        assert self._store is not None
        self._stopped.set()
        self._listener.close(timeout_s=timeout_s)
        self._transport.leave()
        log.info(
            "server %d ends: %s, %s, refused %s",
            self.index,
            self._store.statistics(),
            self._transport.statistics(),
            self._listener.statistics(),
        )
        with contextlib.suppress(FastPSError):
            self._client.leave(timeout_s=timeout_s)
        self._transport.close(timeout_s=timeout_s)
        self._store.wake()
        self._news.join(timeout_s)
        self._store.close(timeout_s=timeout_s)

    # ---- links ----

    def _admit(self, descriptor: int, sender: int, packed_lane: int) -> None:
        generation, lane = unpack_lane(packed_lane)
        if generation != self._generation & 0xFFFFFF:
            raise NotYet
        assert self._store is not None
        self._transport.adopt(descriptor, self._store, peer=sender, lane=lane)
        log.debug("worker %d is connected, lane %d", sender, lane)

    def _watch(self) -> None:
        """Tell the scheduler of links that broke; it decides who is to blame."""
        store = self._store
        assert store is not None
        reported: set[int] = set()
        while not self._stopped.is_set():
            gone = store.wait_news(timeout_s=NEWS_SLICE_S)
            reported &= gone.keys()
            for rank in gone.keys() - reported:
                reported.add(rank)
                if gone[rank] != E_SHUTDOWN:
                    self._report(rank, gone[rank])

    def _report(self, rank: int, status: int) -> None:
        cause = f"its link to server {self.index} broke (status {status})"
        with contextlib.suppress(FastPSError):
            self._client.report_lost("worker", rank, cause)

    # ---- events of the scheduler, on the control client's thread ----

    def _on_event(self, event: Event) -> None:
        if not self._is_ready.wait(self._config.start_timeout_s):
            return
        if isinstance(event, DeclareKeys):
            self._declare(event)
        elif isinstance(event, NewGeneration):
            self._begin_generation(event.generation)
        elif isinstance(event, PeerLost):
            log.error("%s", event)
            self._exit_status = EXIT_PEER_LOST
            self.stop()
        elif isinstance(event, JobOver):
            log.info("the job is over: %s", event.reason)
            self.stop()

    def _begin_generation(self, generation: int) -> None:
        assert self._store is not None
        try:
            self._store.forget(timeout_s=self._config.shutdown_timeout_s)
        except FastPSError:
            log.exception("server %d cannot begin generation %d", self.index, generation)
            self._exit_status = EXIT_PEER_LOST
            self.stop()
        self._generation = generation

    def _declare(self, request: DeclareKeys) -> None:
        try:
            for spec in request.tensors:
                self._declare_tensor(spec)
        except Exception as error:  # whatever it is, the workers must not wait for an answer
            log.exception("cannot hold new tensors")
            self._client.keys_failed(request.request_id, f"server {self.index}: {error}")
        else:
            self._client.keys_ready(request.request_id)

    def _declare_tensor(self, spec: KeySpec) -> None:
        """Make room for our partitions; compile the dtype's kernel before the first push."""
        pieces = make_partitions(spec.tensor_id, spec.nbytes, spec.partition_bytes)
        dtype = DType(spec.dtype)
        assert self._store is not None
        self._store.declare(
            spec.tensor_id,
            n_partitions=len(pieces),
            partitions=[
                (index, nbytes)
                for index, (_, nbytes) in enumerate(pieces)
                if spec.owners[index] == self.index
            ],
            dtype=dtype,
            itemsize=dtype.itemsize,
            chunk_bytes=spec.chunk_bytes,
            kernel=sum_kernel(dtype),
            inline_bytes=self._config.inline_sum_bytes,
        )
