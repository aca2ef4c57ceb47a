# SPDX-License-Identifier: Apache-2.0
"""The listeners of this process, and its links to other members, each made at its first use.

PeerTable decides which connection becomes the one link between two members. When both dial at
once, the connection of the lower number stays: that member refuses the other's. A PeerLinks object
listens. Connections for the store go to the store. Those of peers, and those that it dials itself,
go to the owner of peer links, which knows each peer by its number in the job. Threads: those that
ask for a link, the listener's, and those of the transports. A link uses a Unix socket on one host,
RDMA where both ends have a device and settings allow it, else TCP. TCP also replaces an RDMA link
over which nothing arrived.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from fastps.config import Config
from fastps.errors import (
    FastPSError,
    ProtocolError,
    ShutdownError,
    TransportError,
    TransportTimeout,
)
from fastps.native.condition import Condition
from fastps.security.handshake import Claim, NoPlaceError, Purpose
from fastps.transport import rdma
from fastps.transport._link import LinkOwner
from fastps.transport.listener import Admit, Listener, NotYet
from fastps.transport.rdma import Capability
from fastps.transport.tcp import (
    Connection,
    choose_credit,
    dial,
    open_transport,
    pack_lane,
    unpack_lane,
)
from fastps.transport.tcp._transport import TcpTransport
from fastps.transport.tcp.damage import Damage
from fastps.transport.traffic import Traffic, traffic

if TYPE_CHECKING:
    import socket

    from fastps.transport.rdma._transport import Opening, RdmaTransport

log = logging.getLogger(__name__)

ATTEMPTS = 3  # an RDMA link dialled by each of the two, then one by TCP


class _Place(Protocol):
    """Where to reach a member; control.protocol.Member has these fields."""

    @property
    def role(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def unix(self) -> str: ...
    @property
    def host_id(self) -> str: ...
    @property
    def gid(self) -> str: ...


class PeerState(enum.Enum):
    """State of the link to a peer."""

    NONE = "not made"
    DIALLING = "being dialled"  # by this process
    CHOSEN = "chosen"  # a connection was selected; the owner does not have the link yet
    OPEN = "open"


class PeerTable:
    """The state of the links of member `me` to its peers, from NONE on, each by its number."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._states: dict[int, PeerState] = {}

    def state(self, peer: int) -> PeerState:
        """Return the state of the link to a peer."""
        return self._states.get(peer, PeerState.NONE)

    def begin(self, peer: int) -> bool:
        """Ask for a link; True: the caller has to dial. ValueError for a link to this member."""
        if peer == self._me:
            raise ValueError(f"member {peer} is this process; name another member")
        if self.state(peer) is not PeerState.NONE:
            return False
        self._states[peer] = PeerState.DIALLING
        return True

    def admit(self, peer: int) -> None:
        """Select the peer's connection as the link; NoPlaceError: close it instead."""
        state = self.state(peer)
        wins = state is PeerState.DIALLING and peer < self._me
        if peer == self._me or not (state is PeerState.NONE or wins):
            raise NoPlaceError(
                f"refused the connection of member {peer}: the link to it is {state.value}"
            )
        self._states[peer] = PeerState.CHOSEN

    def dialled(self, peer: int) -> bool:
        """Select our accepted connection; False: the peer's is the link, so close ours."""
        if self.state(peer) is not PeerState.DIALLING:
            return False
        self._states[peer] = PeerState.CHOSEN
        return True

    def opened(self, peer: int) -> None:
        """Note that the owner has the link."""
        self._states[peer] = PeerState.OPEN

    def failed(self, peer: int) -> None:
        """Drop a link over which nothing arrived; the next use makes another."""
        if self.state(peer) in (PeerState.CHOSEN, PeerState.OPEN):
            del self._states[peer]

    def refused(self, peer: int) -> bool:
        """Return whether to wait for the peer's connection, after it has refused ours."""
        return self.state(peer) in (PeerState.CHOSEN, PeerState.OPEN) or peer < self._me

    def give_up(self, peer: int) -> None:
        """Note that dialling has failed; the next use dials again."""
        if self.state(peer) is PeerState.DIALLING:
            del self._states[peer]


class PeerLinks:
    """Listeners and peer links of this process; made before it joins, closed when it has left.

    sockets: bound, Unix and TCP. key_of: returns the key of the links with a member. Call serve()
    before start(), and join() with the members of each generation. Thread-safe.
    """

    def __init__(
        self,
        config: Config,
        sockets: Sequence[socket.socket],
        *,
        key_of: Callable[[int], bytes],
        device: Capability,
    ) -> None:
        self._config = config
        self._key_of = key_of
        self._device = device
        self._places: Sequence[_Place] = ()
        self._me = self._generation = 0
        self._owner: LinkOwner | None = None
        self._table = PeerTable(0)
        self._over: FastPSError | None = None  # why this process makes no link any more
        self._changed = Condition()  # guards table, owner and transports
        self._tcp: TcpTransport | None = None
        self._rdma: RdmaTransport | None = None
        self._openings: dict[int, Opening] = {}  # of RDMA links
        self._by_tcp: set[int] = set()  # peers that RDMA does not reach
        self._admit_data: Admit = _refuse
        admit: dict[Purpose, Admit] = {Purpose.DATA: self._take_data, Purpose.PEER: self.admit}
        self._listener = Listener(sockets, config, key=self._claim, admit=admit)

    # ---- listening ----

    def join(self, places: Sequence[_Place], *, me: int, generation: int) -> None:
        """Take the members of a generation by number; all earlier links have ended."""
        with self._changed:
            self._places, self._me, self._generation = places, me, generation
            self._table = PeerTable(me)
            self._openings.clear()
            self._by_tcp.clear()
            if self._tcp is not None:
                self._tcp.forget_damages()

    def serve(self, admit: Admit) -> None:
        """Pass connections to the store of this process to admit; the default refuses them."""
        self._admit_data = admit

    def stop_serving(self) -> None:
        """Refuse connections to the store from now on: all members are connected."""
        self._admit_data = _refuse

    def link_peers(self, owner: LinkOwner) -> None:
        """Set the owner of peer links; peers that dialled before are waiting for it."""
        with self._changed:
            self._owner = owner

    def start(self) -> None:
        """Start to accept connections."""
        self._listener.start()

    def _claim(self, _: Purpose, sender: int, lane: int) -> Claim | None:
        """Return the key that a connecting member has to prove; None: of a later generation.

        Members have other keys in each view, and some hear of the next one before this process.
        """
        ahead = unpack_lane(lane)[0] - self._generation & 0xFFFFFF
        if 0 < ahead < 1 << 23:
            return None
        return Claim(self._key_of(sender), f"member {sender}")

    def _take_data(
        self, connection: Connection, sender: int, lane: int
    ) -> Callable[[], None] | None:
        return self._admit_data(connection, sender, lane)

    # ---- peers ----

    def reach(self, peer: int) -> None:
        """Make the link to a member unless there is one; block until it can be used.

        Waits at most connect_timeout_s and twice handshake_timeout_s, and three times that where
        TCP has to replace RDMA. Raises ValueError for a number that no other member has, and
        TransportTimeout, TransportError or AuthError that name the member; ShutdownError after
        leave(), also in threads that wait here.
        """
        if not 0 <= peer < len(self._places):
            raise ValueError(f"no member {peer}: the job has members 0 to {len(self._places) - 1}")
        if self._owner is None and self._over is None:
            raise TransportError(
                f"cannot link to {self._name(peer)}: this process has no owner of peer links"
            )
        for _ in range(ATTEMPTS):
            with self._changed:
                self._check_open(peer)
                is_ours = self._table.begin(peer)
                if not is_ours:
                    self._wait_open(peer)
            if is_ours:
                self._make(peer)
            if self._is_proven(peer):
                return
        raise TransportError(
            f"no link to {self._name(peer)} works after {ATTEMPTS} attempts; check the network"
        )

    def _is_proven(self, peer: int) -> bool:
        """Wait until an RDMA link has carried a message; False: TCP has to replace it."""
        opening = self._openings.get(peer)
        if opening is None:
            return self._table.state(peer) is PeerState.OPEN
        try:
            opening.wait(timeout_s=2 * self._config.handshake_timeout_s)
        except TransportError as error:
            self._fall_back(peer, opening)
            rdma.give_up(self._config, self._name(peer), error)
            return False
        return True

    def _fall_back(self, peer: int, opening: Opening | None) -> None:
        """Make the next link to a peer use TCP, unless another thread has done so."""
        with self._changed:
            if self._openings.get(peer) is opening:
                self._openings.pop(peer, None)
                if self._config.transport != "rdma":
                    self._by_tcp.add(peer)
                self._table.failed(peer)
                self._changed.notify_all()

    def _make(self, peer: int) -> None:
        try:
            connection, is_rdma = self._dial(self._places[peer], peer)
        except BaseException as error:
            with self._changed:
                if isinstance(error, FastPSError) and self._table.refused(peer):
                    self._wait_open(peer, error)
                    return
                self._table.give_up(peer)
                self._changed.notify_all()
            raise
        with self._changed:
            if self._over is None and self._table.dialled(peer):
                self._adopt(connection, peer, is_rdma=is_rdma, greets_first=True)
                return
            os.close(connection.descriptor)
            self._check_open(peer)  # else the peer's connection is the link

    def _wait_open(self, peer: int, cause: FastPSError | None = None) -> None:
        """Wait until another thread or the peer has made the link; the lock is held."""
        timeout_s = self._config.handshake_timeout_s
        deadline = time.monotonic() + timeout_s + (0 if cause else self._config.connect_timeout_s)
        while self._table.state(peer) in (PeerState.DIALLING, PeerState.CHOSEN):
            self._check_open(peer)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._changed.wait(left_s):
                self._table.give_up(peer)
                self._changed.notify_all()
                raise cause or TransportTimeout(
                    f"no link to {self._name(peer)} within {timeout_s:g} s; raise "
                    "FASTPS_HANDSHAKE_TIMEOUT_S if the machines are overloaded"
                )
        if self._table.state(peer) is not PeerState.OPEN and peer not in self._by_tcp:
            raise cause or TransportError(f"another thread could not link to {self._name(peer)}")

    def _check_open(self, peer: int) -> None:
        """Raise why no link is made any more, if so; the lock is held."""
        if self._over is not None:
            raise type(self._over)(f"cannot link to {self._name(peer)}: {self._over}")

    def fail(self) -> None:
        """Make no link any more, and end the waits for some: the job, or its view, has failed."""
        self._end(TransportError("a member of the job is lost"))

    def _end(self, error: FastPSError) -> None:
        with self._changed:
            self._over = self._over or error
            self._changed.notify_all()

    def lose(self, peer: int) -> None:
        """Stop waiting for a link to a member that is lost."""
        with self._changed:
            self._table.give_up(peer)
            self._changed.notify_all()

    def _name(self, peer: int) -> str:
        member = self._places[peer]
        return f"{member.role} {member.rank}"

    # ---- dialling ----

    def _dial(self, member: _Place, peer: int) -> tuple[Connection, bool]:
        """Return a connection that the member accepted, and whether RDMA is set up over it."""
        is_rdma = peer not in self._by_tcp and self._takes_rdma(member)
        is_near = self._config.unix_sockets and member.host_id == self._places[self._me].host_id
        connection = dial(
            (member.host, member.port),
            self._config,
            key=self._key_of(peer),
            purpose=Purpose.PEER,
            sender=self._me,
            lane=pack_lane(self._generation, rdma.RDMA_LANE if is_rdma else 0),
            what=self._name(peer),
            unix=member.unix if is_near and not is_rdma else "",
        )
        return connection, is_rdma

    def _takes_rdma(self, member: _Place) -> bool:
        own = self._places[self._me].host_id
        is_wanted, _ = rdma.takes_rdma(
            self._config, self._device, own, host_id=member.host_id, gid=member.gid
        )
        return is_wanted and self._device_transport() is not None

    # ---- accepting ----

    def admit(self, connection: Connection, sender: int, packed_lane: int) -> Callable[[], None]:
        """Select a connection of another member; return the function that makes it the link.

        Call that function once the other side knows, because from then on frames may follow. Owns
        the connection, except when it raises NotYet. Raises ProtocolError for a connection that
        cannot be the link.
        """
        generation, lane = unpack_lane(packed_lane)
        is_rdma = bool(lane & rdma.RDMA_LANE)
        if self._owner is None or generation != self._generation & 0xFFFFFF:
            raise NotYet
        self._forget_failed(sender)
        try:
            if sender >= len(self._places):
                raise ProtocolError(
                    f"no member {sender}: the job has members 0 to {len(self._places) - 1}"
                )
            with self._changed:
                self._table.admit(sender)
        except FastPSError:
            os.close(connection.descriptor)
            raise

        def finish() -> None:
            with self._changed:
                self._adopt(connection, sender, is_rdma=is_rdma, greets_first=False)

        return finish

    def _forget_failed(self, peer: int) -> None:
        """Remove a failed RDMA link to a peer that dials again.

        NotYet: the peer may know already, while this process still waits for that link to end.
        """
        opening = self._openings.get(peer)
        if opening is None:
            return
        if not opening.is_settled:
            raise NotYet
        try:
            opening.wait(timeout_s=0)
        except TransportError:
            self._fall_back(peer, opening)

    def _adopt(
        self, connection: Connection, peer: int, *, is_rdma: bool, greets_first: bool
    ) -> None:
        """Hand a connection to its transport, and the link to its owner; the lock is held."""
        assert self._owner is not None
        if not is_rdma:
            self._sockets().adopt(
                connection.descriptor,
                self._owner,
                peer=peer,
                credit_bytes=choose_credit(connection.descriptor, self._config),
                is_checked=connection.is_checked,
                sealing=connection.sealing,
            )
        elif not self._adopt_by_rdma(connection.descriptor, peer, greets_first=greets_first):
            return
        self._table.opened(peer)
        self._changed.notify_all()

    def _adopt_by_rdma(self, descriptor: int, peer: int, *, greets_first: bool) -> bool:
        assert self._owner is not None
        transport = self._device_transport()
        try:
            if transport is None:
                os.close(descriptor)
                raise TransportError("the peer asks for RDMA, but the device here cannot be used")
            self._openings[peer] = rdma.begin_link(
                transport,
                descriptor,
                self._owner,
                self._config,
                peer=peer,
                greets_first=greets_first,
            )
        except TransportError as error:
            self._fall_back(peer, None)
            rdma.give_up(self._config, self._name(peer), error)
            return False
        return True

    # ---- transports, made at their first use ----

    def _sockets(self) -> TcpTransport:
        if self._tcp is None:
            self._tcp = open_transport(self._config)
        return self._tcp

    def _device_transport(self) -> RdmaTransport | None:
        with self._changed:
            if self._rdma is None and self._device.is_usable:
                self._rdma = rdma.open_transport(self._config, n_links=1)
                if self._rdma is None:  # open_transport() has logged why
                    reason = "its device cannot be opened"
                    self._device = dataclasses.replace(self._device, reason=reason)
            return self._rdma

    def _transports(self) -> list[TcpTransport | RdmaTransport]:
        """List the transports that were made."""
        return [one for one in (self._tcp, self._rdma) if one is not None]

    def hold(self, array: object) -> None:
        """Pin a large array before its operation begins, where there are RDMA links."""
        if self._rdma is not None:
            self._rdma.hold(array)

    def damage_of(self, peer: int) -> Damage | None:
        """Return the last frame of a peer that failed its check; see TcpTransport."""
        found = None if self._tcp is None else self._tcp.damage_of(peer)
        return found and Damage(*found)

    def unacknowledged(self) -> list[tuple[int, int, int, int]]:
        """List the links that retransmit; see TcpTransport."""
        return [] if self._tcp is None else self._tcp.unacknowledged()

    def statistics(self) -> dict[str, int]:
        """Add up the counters of all peer links."""
        counts: Counter[str] = Counter()
        for transport in self._transports():
            counts.update(transport.statistics())
        return dict(counts)

    def traffic(self) -> Iterator[Traffic]:
        """Yield each peer link."""
        yield from traffic(self._tcp)
        yield from traffic(self._rdma, "RDMA")

    @property
    def refused(self) -> dict[str, int]:
        """Count the connections that were refused, by reason."""
        return self._listener.statistics()

    # ---- the end ----

    def leave(self) -> None:
        """Stop listening and send BYE on all peer links; idempotent, does not wait for them."""
        self._listener.close(timeout_s=self._config.shutdown_timeout_s)
        self._end(ShutdownError("shutdown() is ending this session"))
        for transport in self._transports():
            transport.leave()

    def close(self) -> None:
        """End all peer links and join their threads. Raises TransportTimeout."""
        self.leave()
        for transport in self._transports():
            transport.close(timeout_s=self._config.shutdown_timeout_s)
        self._tcp = self._rdma = None
        self._owner = None  # it refers to this object: free its memory without a collection

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._listener.abandon()
        for transport in self._transports():
            transport.abandon()


def _refuse(connection: Connection, sender: int, lane: int) -> None:
    os.close(connection.descriptor)
    raise ProtocolError(f"member {sender} asks for a link to a store, but this process has none")
