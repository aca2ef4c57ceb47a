# SPDX-License-Identifier: Apache-2.0
"""By which way a worker reaches each owner of keys, and the links that this makes.

Memory for the server in the worker's own process, RDMA where both ends have a device and settings
allow it, else a Unix socket on its own host, else TCP. A fabric is trusted only when it has
carried something: where a link by RDMA cannot be set up, TCP takes its place, unless settings
insist. Threads: those of the transports.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fastps.config import Config
from fastps.control.protocol import Job
from fastps.errors import TransportError
from fastps.transport import rdma
from fastps.transport._link import InprocTransport
from fastps.transport.rdma import Capability
from fastps.transport.tcp import (
    SAME_HOST_CREDIT_BYTES,
    Connection,
    choose_credit,
    dial,
    open_transport,
    pack_lane,
)
from fastps.transport.tcp._transport import TcpTransport
from fastps.transport.tcp.damage import Damage
from fastps.transport.traffic import Traffic, traffic
from fastps.worker._engine import WorkerEngine

if TYPE_CHECKING:
    from fastps.server._store import ServerStore
    from fastps.transport.rdma._transport import Opening, RdmaTransport

log = logging.getLogger(__name__)

SETTLING_S = 5.0  # beyond a link's own deadline, for an I/O thread that is busy


class Links:
    """The links of one worker; connect() makes them, close() waits for their end."""

    def __init__(
        self,
        config: Config,
        job: Job,
        engine: WorkerEngine,
        *,
        key_of: Callable[[int], bytes],
        device: Capability,
    ) -> None:
        self._config = config
        self._job = job
        self._engine = engine
        self._key_of = key_of
        self._device = device
        self._host_id = job.members[job.me].host_id
        self._weights = dict(zip(job.owners, job.weights, strict=True))
        self._tcp: TcpTransport | None = None
        self._memory: InprocTransport | None = None
        self._rdma: RdmaTransport | None = None
        self._sockets: set[str] = set()  # kinds, in words

    # ---- making ----

    def connect(self, lanes: Mapping[int, int], own: ServerStore | None) -> None:
        """Link the engine with members, as often as lanes says; blocks until all links work.

        own: what this process itself owns keys with. Raises ConfigError, TransportError.
        """
        me = self._job.me
        remote = [
            (member, lane)
            for member, count in lanes.items()
            for lane in range(count)
            if member != me or own is None
        ]
        if own is not None:
            for lane in range(lanes.get(me, 0)):
                self._link_in_memory(own, lane)
        by_rdma = self._begin_rdma(remote)
        self._finish_rdma(by_rdma)
        for place in remote:
            if place not in by_rdma:
                self._link_by_socket(*place)

    def _link_in_memory(self, store: ServerStore, lane: int) -> None:
        """Join the engine with the store beside it."""
        if self._memory is None:
            self._memory = InprocTransport()
        self._memory.connect(
            self._engine,
            self._job.me,
            store,
            self._job.me,
            lane=lane,
            by_reference=True,
        )

    def _link_by_socket(self, owner: int, lane: int) -> None:
        if self._tcp is None:
            self._tcp = open_transport(self._config)
        member = self._job.members[owner]
        is_near = self._config.unix_sockets and member.host_id == self._host_id
        self._sockets.add("Unix sockets" if is_near and member.unix else "TCP")
        connection = self._dial(owner, lane, unix=member.unix if is_near else "")
        is_light = self._weights[owner] < max(self._weights.values())
        credit_bytes = choose_credit(connection.descriptor, self._config, is_light=is_light)
        self._tcp.adopt(
            connection.descriptor,
            self._engine,
            peer=owner,
            lane=lane,
            credit_bytes=credit_bytes,
            follows=not self._config.credit_bytes and credit_bytes != SAME_HOST_CREDIT_BYTES,
            is_checked=connection.is_checked,
            sealing=connection.sealing,
        )

    def _dial(self, owner: int, lane: int, *, unix: str = "") -> Connection:
        member = self._job.members[owner]
        return dial(
            (member.host, member.port),
            self._config,
            key=self._key_of(owner),
            sender=self._job.me,
            lane=pack_lane(self._job.generation, lane),
            what=self._job.owner_name(owner),
            unix=unix,
        )

    # ---- RDMA ----

    def _begin_rdma(self, remote: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Opening]:
        """Open the device if it may reach some owners, and begin the links to those."""
        owners = dict.fromkeys(owner for owner, _ in remote)
        wanted = {owner for owner in owners if self._wants_rdma(owner)}
        places = [place for place in remote if place[0] in wanted]
        if places:
            self._rdma = rdma.open_transport(self._config, n_links=len(places))
        openings: dict[tuple[int, int], Opening] = {}
        for owner, lane in places if self._rdma is not None else ():
            if owner in wanted:
                try:
                    openings[owner, lane] = self._begin_link(owner, lane)
                except TransportError as error:
                    self._give_up(owner, error)
                    wanted.remove(owner)
        return openings

    def _wants_rdma(self, owner: int) -> bool:
        member = self._job.members[owner]
        is_wanted, why = rdma.takes_rdma(
            self._config, self._device, self._host_id, host_id=member.host_id, gid=member.gid
        )
        how = "by" if is_wanted else "without"
        if why:
            log.info("%s is reached %s RDMA: %s", self._job.owner_name(owner), how, why)
        return is_wanted

    def _begin_link(self, owner: int, lane: int) -> Opening:
        assert self._rdma is not None
        descriptor = self._dial(owner, lane | rdma.RDMA_LANE).descriptor
        return rdma.begin_link(
            self._rdma, descriptor, self._engine, self._config, peer=owner, lane=lane
        )

    def _finish_rdma(self, openings: dict[tuple[int, int], Opening]) -> None:
        """Wait until links work; take those out that do not, where TCP may take their place."""
        timeout_s = self._config.handshake_timeout_s + SETTLING_S
        for (owner, lane), opening in list(openings.items()):
            try:
                opening.wait(timeout_s=timeout_s)
            except TransportError as error:
                self._give_up(owner, error)
                del openings[owner, lane]
        if openings:
            assert self._rdma is not None
            self._engine.hold_with(self._rdma.hold)
        elif self._rdma is not None:
            self._rdma.close(timeout_s=self._config.shutdown_timeout_s)
            self._rdma = None

    def _give_up(self, owner: int, error: TransportError) -> None:
        rdma.give_up(self._config, self._job.owner_name(owner), error)

    # ---- at work ----

    def describe(self) -> str:
        """Return which kinds of links there are, and why none by RDMA."""
        kinds = ["memory"] if self._memory is not None else []
        if self._rdma is not None:
            return ", ".join([*kinds, self._device.describe(), *sorted(self._sockets)])
        why = self._device.describe() if self._sockets else ""
        return ", ".join([*kinds, *sorted(self._sockets)]) + (f" ({why})" if why else "")

    @property
    def has_trouble(self) -> bool:
        """Return whether our own RDMA device failed, not a peer."""
        return self._rdma is not None and self._rdma.has_trouble

    def failure_of(self, owner: int) -> str:
        """Return what broke on a link by RDMA; empty if nothing did."""
        return "" if self._rdma is None else self._rdma.failure_of(owner)

    def damage_of(self, owner: int) -> Damage | None:
        """Return the last frame of an owner that failed its check; see TcpTransport."""
        found = None if self._tcp is None else self._tcp.damage_of(owner)
        return found and Damage(*found)

    def unacknowledged(self) -> list[tuple[int, int, int, int]]:
        """List the links that send again and again; see TcpTransport."""
        return [] if self._tcp is None else self._tcp.unacknowledged()

    def set_credit(self, credit_bytes: int) -> None:
        """Set the credit of every link; 0: what it began with, or finds out that it needs."""
        for transport in (self._tcp, self._rdma):
            if transport is not None:
                transport.set_credit(credit_bytes)

    def statistics(self) -> dict[str, int]:
        """Add up the counters of all links but those in memory; credit_bytes: the largest."""
        counts: Counter[str] = Counter({"bytes_sent": 0})
        transports = [each for each in (self._tcp, self._rdma) if each is not None]
        counts["credit_bytes"] = max(
            (one[-1] for each in transports for one in each.each()), default=0
        )
        for transport in (self._tcp, self._rdma):
            if transport is not None:
                counts.update(transport.statistics())
        return dict(counts)

    def traffic(self) -> Iterator[Traffic]:
        """Yield each link."""
        yield from traffic(self._tcp)
        yield from traffic(self._rdma, "RDMA")
        yield from traffic(self._memory)

    # ---- the end ----

    def close(self, *, timeout_s: float) -> None:
        """End all links and join their threads. Raises TransportTimeout."""
        for transport in (self._tcp, self._rdma, self._memory):
            if transport is not None:
                transport.close(timeout_s=timeout_s)

    def abandon(self) -> None:
        """Close the links' descriptors in a forked child."""
        for transport in (self._tcp, self._rdma, self._memory):
            if transport is not None:
                transport.abandon()
