# SPDX-License-Identifier: Apache-2.0
"""Routes between queue pairs, found by rdma_cm instead of told by the peer's greeting.

The kernel's connection manager resolves the peer's address as IP does, asks the subnet manager on
InfiniBand, and takes two messages each way to agree with the peer's. It makes no queue pair here:
it says what ours are to be joined with, a Route.

One end of a link calls, the other is called; both know each other's address, port and secret from
the authenticated TCP connection. rdma_cm itself authenticates nobody, so a call carries the secret
of the end that is called, and its answer that of the caller. A call may come before its link asks
for it: it waits in the lobby.

One thread, "fastps:rdma-cm", makes all calls of librdmacm and of done(); other threads give it
orders. An IP address chooses the way wherever the GID is one; InfiniBand's own GIDs go by their
address family, which only hardware can show to work.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastps.errors import ConfigError, TransportError
from fastps.transport.librdmacm import Attributes, Channel, Event, Kind, State

log = logging.getLogger(__name__)

DEVICES = Path("/sys/class/infiniband")
AF_IB = 27
SERVICES = 0x0106 << 16  # RDMA_IB_IP_PS_TCP; the port stands in the last 16 bits
ALL_BITS = 2**64 - 1
DEFAULT_PARTITION = 0xFFFF
HOP_LIMIT = 64  # where the path itself needs no global address
MAX_EARLY = 1024  # calls that wait for their links: nobody has shown a secret yet
IDLE_S = 60.0  # a thread without work looks around that often
PAUSE_S = 0.05  # before another attempt
NOBODY_LISTENS, STALE, REFUSED = 8, 10, 28  # reasons of a rejection, of InfiniBand
CALL = struct.Struct("<4s8sII")  # magic, the reader's secret, queue pairs of writer and reader
REFUSAL = struct.Struct("<4sB")
MAGIC = b"FPSC"
REFUSALS = {
    1: "it expects no such link; has it the same FASTPS_HANDSHAKE_TIMEOUT_S?",
    2: "it told another secret",
    3: "it speaks another version; use one version of fastps everywhere",
    4: "too many calls wait there already",
}
NOT_EXPECTED, WRONG_SECRET, OTHER_VERSION, TOO_MANY = REFUSALS

Done = Callable[["Route | None", str], None]


class Route(NamedTuple):
    """What a queue pair is joined with to reach its peer.

    mtu: as the verbs count it. gid_index: of our own address in the device's table. gid: the
    peer's, 16 bytes. receive_from, send_from: numbers of the first packets.
    """

    mtu: int
    service_level: int
    gid_index: int
    traffic_class: int
    hop_limit: int
    lid: int
    gid: bytes
    queue_pair: int
    receive_from: int
    send_from: int


class Stage(NamedTuple):
    """What a search for a route does, and what may help when it fails."""

    doing: str
    missing: str
    cure: str


ADDRESS = Stage(
    "resolve the address of",
    "no answer",
    "can both machines reach each other over the network of their RDMA addresses (ip route get, "
    "ping)?",
)
ROUTE = Stage(
    "find a route to",
    "no answer",
    "on InfiniBand: does the subnet manager run (sminfo)?",
)
ANSWER = Stage(
    "connect to",
    "no answer",
    "is its process alive, and does rdma_cm work between the machines (rping)? without "
    "FASTPS_RDMA_CM it is not used",
)
CALLED = Stage(
    "be called by",
    "no call",
    "has it FASTPS_RDMA_CM=1 too, and a way to us (ip route get, rping)?",
)


@dataclass(slots=True, eq=False, kw_only=True)
class Way:
    """One search for a route, then the connection that it made; the router's thread only."""

    done: Done
    is_active: bool
    own_queue_pair: int
    peer_queue_pair: int
    own_secret: bytes
    peer_secret: bytes
    peer_gid: bytes
    peer_port: int
    deadline: float
    stage: Stage = CALLED
    id: int = 0
    route: Route | None = None
    again_at: float = math.inf
    trouble: str = ""  # what made it begin again

    @property
    def peer(self) -> str:
        """Name the peer for a message."""
        if self.is_active:
            return f"{name_of(self.peer_gid)} port {self.peer_port}"
        return f"{name_of(self.peer_gid)} (queue pair {self.peer_queue_pair})"

    def why(self, reason: str, cure: str = "") -> str:
        """Say why there is no route."""
        return f"rdma_cm cannot {self.stage.doing} {self.peer}: {reason}; " + (
            cure or self.stage.cure
        )


# ---- what is said ----


class Call(NamedTuple):
    """Who calls whom: the secret of the one that is called, and both queue pairs."""

    secret: bytes
    caller: int
    called: int


def pack_call(call: Call) -> bytes:
    """Write what goes along with a request, or with its answer."""
    return CALL.pack(MAGIC, *call)


def unpack_call(private: bytes) -> Call | None:
    """Read what came along, None when it is not ours."""
    if len(private) < CALL.size:
        return None
    magic, *call = CALL.unpack_from(private)
    return Call(*call) if magic == MAGIC else None


def why_rejected(status: int, private: bytes) -> tuple[str, str]:
    """Give the reason of a rejection and its cure, empty for that of the stage."""
    if status == NOBODY_LISTENS:
        return "nobody listens there", "is its process alive, and has it FASTPS_RDMA_CM=1 too?"
    if status == REFUSED and private[:4] == MAGIC and len(private) >= REFUSAL.size:
        code = REFUSAL.unpack_from(private)[1]
        return f"it refused: {REFUSALS.get(code, f'code {code}')}", ""
    return f"it refused with reason {status}", ""


def why_ended(event: Event) -> str:
    """Give the reason of an event that ends a search."""
    if event.kind == Kind.DEVICE_REMOVAL:
        return "the device was removed"
    if event.kind == Kind.DISCONNECTED:
        return "it ended the connection"
    return os.strerror(abs(event.status)) if event.status else "the kernel gives up"


class Lobby:
    """Calls that came, and links that are to be called, until they meet."""

    def __init__(self, room: int = MAX_EARLY) -> None:
        self._room = room
        self._expected: dict[tuple[int, int], Way] = {}
        self._early: dict[Call, tuple[int, float]] = {}

    def hear(self, call: Call | None, id: int, deadline: float) -> Way | int | None:
        """Give the link that a call is for, the number of a refusal, or None: it waits."""
        if call is None:
            return OTHER_VERSION
        way = self._expected.get((call.called, call.caller))
        if way is not None:
            if not hmac.compare_digest(call.secret, way.own_secret):
                return WRONG_SECRET
            self.leave(way)
            return way
        if len(self._early) >= self._room or call in self._early:
            return TOO_MANY
        self._early[call] = (id, deadline)
        return None

    def expect(self, way: Way) -> int:
        """Give the id of the call that has come for a link, or 0: it will be heard."""
        call = Call(way.own_secret, way.peer_queue_pair, way.own_queue_pair)
        if call in self._early:
            return self._early.pop(call)[0]
        self._expected[way.own_queue_pair, way.peer_queue_pair] = way
        return 0

    def leave(self, way: Way) -> None:
        """Expect no call for a link any more."""
        key = (way.own_queue_pair, way.peer_queue_pair)
        if self._expected.get(key) is way:
            del self._expected[key]

    def take_late(self, now: float) -> list[int]:
        """Give the ids of calls that nobody expected in time; they wait no more."""
        late = [call for call, (_, deadline) in self._early.items() if deadline <= now]
        return [self._early.pop(call)[0] for call in late]

    def deadlines(self) -> list[float]:
        """List when calls will be late."""
        return [deadline for _, deadline in self._early.values()]


# ---- addresses ----


def name_of(gid: bytes) -> str:
    """Write an address as people do."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def socket_address(gid: bytes, port: int, *, is_infiniband: bool = False) -> bytes:
    """Write the kernel's address of a GID and a port.

    Raises ConfigError for what no IP network can route.
    """
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, gid[12:])
    if is_infiniband:
        head = struct.pack("=H", AF_IB) + struct.pack("!HI16s", DEFAULT_PARTITION, 0, gid)
        return head + struct.pack(
            "!QQ8x", SERVICES | port, ALL_BITS if port else ~0xFFFF & ALL_BITS
        )
    if address.is_link_local:
        raise ConfigError(
            f"rdma_cm has no way to {address}, it is link-local; give the network interface an "
            "IPv4 address, or unset FASTPS_RDMA_CM"
        )
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16s4x", port, 0, gid)


def is_infiniband(device: str, devices: Path = DEVICES) -> bool:
    """Tell whether a device's ports speak InfiniBand, not Ethernet."""
    layers = (devices / device).glob("ports/*/link_layer")
    return any(layer.read_text(encoding="ascii").strip() == "InfiniBand" for layer in layers)


def index_of(gid: bytes, device: str, devices: Path = DEVICES) -> int:
    """Find an address in a device's table."""
    text = ipaddress.IPv6Address(gid).exploded
    for entry in (devices / device).glob("ports/*/gids/*"):
        try:
            if entry.read_text(encoding="ascii").strip() == text:
                return int(entry.name)
        except OSError:  # an empty entry
            continue
    raise ConfigError(f"{device} has no address {text}; see ibv_devinfo -v")


class _NoRouteError(Exception):
    """Why there is no route, in full."""


# ---- the router ----


class Router:
    """Finds routes to peers, and lets theirs find us.

    gid: address of the port in use, as the kernel writes it. device: the one that routes must go
    over. timeout_s: how long one search may take. partition: index of the one that our queue
    pairs are in. traffic_class: of the routes that this end looks for; the other takes it over.
    Listens at once. Raises ConfigError when rdma_cm is not there, TransportError when it cannot
    listen.
    """

    port: int  # where it listens; peers are told

    def __init__(
        self,
        gid: str,
        *,
        device: str,
        timeout_s: float,
        partition: int = 0,
        traffic_class: int = 0,
    ) -> None:
        self._gid = ipaddress.IPv6Address(gid).packed
        self._device = device
        self._timeout_s = timeout_s
        self._partition = partition
        self._traffic_class = traffic_class
        self._is_infiniband = is_infiniband(device)
        self._gid_index = index_of(self._gid, device)
        self._lock = threading.Lock()  # of the next four
        self._orders: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._why = "this end's router is closed"
        self._wake_fd = -1
        self._lobby = Lobby()
        self._ways: dict[int, Way] = {}  # by id
        self._pending: set[Way] = set()
        self._channel = self._open()
        self._listener = self._listen()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._poll.register(self._channel.descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="fastps:rdma-cm", daemon=True)
        self._thread.start()

    def find(
        self,
        done: Done,
        *,
        is_active: bool,
        own_queue_pair: int,
        peer_queue_pair: int,
        own_secret: bytes,
        peer_secret: bytes,
        peer_gid: bytes,
        peer_port: int,
    ) -> Way:
        """Begin to look for the route to a peer's queue pair; any thread, never blocks.

        done: called once, on the router's thread, timeout_s later at most, with the route, or with
        None and why there is none. is_active: this end calls; the other must not. Both secrets
        have 8 bytes. Give what comes back to forget() once the queue pair is closed. Raises
        TransportError after close().
        """
        way = Way(
            done=done,
            is_active=is_active,
            own_queue_pair=own_queue_pair,
            peer_queue_pair=peer_queue_pair,
            own_secret=bytes(own_secret),
            peer_secret=bytes(peer_secret),
            peer_gid=bytes(peer_gid),
            peer_port=peer_port,
            deadline=time.monotonic() + self._timeout_s,
        )
        if not self._order(partial(self._begin, way)):
            raise TransportError(f"no route to {way.peer}: {self._why}; fastps.init() again")
        return way

    def forget(self, way: Way) -> None:
        """End what find() began, in whatever state it is; any thread, idempotent."""
        self._order(partial(self._forget, way))

    def close(self, *, timeout_s: float) -> None:
        """End the thread and all connections; searches end without a route. Idempotent."""
        with self._lock:
            self._is_closing = True
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the router of rdma_cm did not end within %g s; see dmesg", timeout_s)

    def _order(self, action: Callable[[], None]) -> bool:
        with self._lock:
            if self._is_closing:
                return False
            self._orders.append(action)
            os.eventfd_write(self._wake_fd, 1)
            return True

    # ---- beginning ----

    def _open(self) -> Channel:
        try:
            return Channel()
        except OSError as error:
            raise ConfigError(
                f"FASTPS_RDMA_CM=1, but this kernel's rdma_cm cannot be used: {error.strerror}; "
                "modprobe rdma_ucm, and let this user read and write /dev/infiniband/rdma_cm"
            ) from error

    def _listen(self) -> int:
        listener = 0
        try:
            listener = self._channel.create()
            self.port = self._channel.listen(listener, self._address(self._gid, 0))
            return listener
        except (OSError, ConfigError) as error:
            if listener:
                self._channel.destroy(listener)
            self._channel.close()
            if isinstance(error, ConfigError):
                raise
            raise TransportError(
                f"rdma_cm cannot listen at {name_of(self._gid)} of {self._device}: "
                f"{error.strerror}; rdma link and ip address show what there is"
            ) from error

    def _address(self, gid: bytes, port: int) -> bytes:
        return socket_address(gid, port, is_infiniband=self._is_infiniband)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wait()
                self._take_orders()
                while (event := self._channel.take_event()) is not None:
                    self._serve(event)
                self._expire(time.monotonic())
        except Exception:
            log.exception("the router of rdma_cm fails; no more links can be made")
            self._why = "this end's router failed, its log says why"
        finally:
            self._end()

    def _wait(self) -> None:
        now = time.monotonic()
        due = [min(way.deadline, way.again_at) for way in self._pending]
        left_s = min([*due, *self._lobby.deadlines(), now + IDLE_S]) - now
        self._poll.poll(max(math.ceil(left_s * 1000), 0))

    def _take_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)  # before the orders: a later one wakes us again
        while self._orders:
            self._orders.popleft()()

    def _serve(self, event: Event) -> None:
        if event.kind == Kind.CONNECT_REQUEST:
            self._hear(event)
        elif event.id == self._listener:
            if event.kind == Kind.DEVICE_REMOVAL:
                log.warning("%s was removed", self._device)
                self._why, self._is_closing = f"{self._device} was removed", True
        elif (way := self._ways.get(event.id)) is not None:
            self._advance(way, event)

    def _expire(self, now: float) -> None:
        for way in [way for way in self._pending if way.deadline <= now]:
            trouble = way.trouble or way.stage.missing
            self._fail(way, way.why(f"{trouble} within {self._timeout_s:g} s"))
        for way in [way for way in self._pending if way.again_at <= now]:
            self._begin(way)
        for id in self._lobby.take_late(now):
            self._refuse(id, NOT_EXPECTED)

    def _end(self) -> None:
        with self._lock:
            self._is_closing = True
        self._take_orders()
        for way in list(self._pending):
            self._fail(way, way.why(self._why, "fastps.init() again"))
        for way in list(self._ways.values()):
            self._hang_up(way)
        for id in [*self._lobby.take_late(math.inf), self._listener]:
            self._destroy(id)
        self._channel.close()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # ---- one search ----

    def _begin(self, way: Way) -> None:
        self._pending.add(way)
        way.again_at = math.inf
        if self._is_closing:
            return
        if way.is_active:
            self._step(way, self._resolve_address)
        elif id := self._lobby.expect(way):
            self._step(way, partial(self._answer, id=id))

    def _step(self, way: Way, action: Callable[[Way], None]) -> None:
        """Do the next thing of a search; it ends when that cannot be done."""
        try:
            action(way)
        except (_NoRouteError, ConfigError) as error:
            self._fail(way, str(error))
        except OSError as error:
            self._fail(way, way.why(os.strerror(error.errno or 0)))

    def _advance(self, way: Way, event: Event) -> None:
        if event.kind in (Kind.DISCONNECTED, Kind.DEVICE_REMOVAL) and way not in self._pending:
            self._hang_up(way)  # the link itself learns it elsewhere
        elif way not in self._pending:
            return
        elif event.kind == Kind.ADDRESS_RESOLVED:
            self._step(way, self._resolve_route)
        elif event.kind == Kind.ROUTE_RESOLVED:
            self._step(way, self._call)
        elif event.kind == Kind.CONNECT_RESPONSE:
            self._step(way, partial(self._hear_answer, event=event))
        elif event.kind == Kind.ESTABLISHED and way.route is not None:
            self._succeed(way)
        elif event.kind == Kind.REJECTED and event.status == STALE:
            self._begin_again(way)
        elif event.kind == Kind.REJECTED:
            self._fail(way, way.why(*why_rejected(event.status, event.private)))
        else:
            self._fail(way, way.why(why_ended(event)))

    def _begin_again(self, way: Way) -> None:
        """A kernel still holds a connection of an old queue pair of this number, and ends it."""
        self._hang_up(way)
        way.trouble = "an old connection of this queue pair did not end"
        way.again_at = time.monotonic() + PAUSE_S

    def _resolve_address(self, way: Way) -> None:
        way.stage = ADDRESS
        own = self._address(self._gid, 0)
        peer = self._address(way.peer_gid, way.peer_port)
        self._adopt(way, self._channel.create())
        if self._traffic_class:
            self._channel.set_traffic_class(way.id, self._traffic_class)
        self._channel.resolve_address(way.id, own, peer, timeout_s=self._timeout_s)

    def _resolve_route(self, way: Way) -> None:
        way.stage = ROUTE
        self._check_device(way)
        self._channel.resolve_route(way.id, timeout_s=self._timeout_s)

    def _call(self, way: Way) -> None:
        way.stage = ANSWER
        call = Call(way.peer_secret, way.own_queue_pair, way.peer_queue_pair)
        self._channel.connect(way.id, way.own_queue_pair, pack_call(call))

    def _hear_answer(self, way: Way, event: Event) -> None:
        answer = unpack_call(event.private)
        wanted = Call(way.own_secret, way.peer_queue_pair, way.own_queue_pair)
        if answer is None or not hmac.compare_digest(pack_call(answer), pack_call(wanted)):
            self._channel.reject(way.id, REFUSAL.pack(MAGIC, WRONG_SECRET))
            raise _NoRouteError(
                way.why("the answer is not our peer's", "who else uses rdma_cm at this address?")
            )
        way.route = self._read_route(way)
        self._channel.establish(way.id)
        self._succeed(way)

    def _hear(self, event: Event) -> None:
        """Somebody calls: find the link that it is for."""
        call = unpack_call(event.private)
        if call is not None and call.caller != event.queue_pair:
            call = None
        found = self._lobby.hear(call, event.id, time.monotonic() + self._timeout_s)
        if isinstance(found, Way):
            self._step(found, partial(self._answer, id=event.id))
        elif found is not None:
            self._refuse(event.id, found)

    def _answer(self, way: Way, id: int) -> None:
        self._adopt(way, id)
        self._check_device(way)
        way.route = self._read_route(way)
        answer = Call(way.peer_secret, way.own_queue_pair, way.peer_queue_pair)
        self._channel.accept(way.id, way.own_queue_pair, pack_call(answer))

    def _refuse(self, id: int, refusal: int) -> None:
        log.warning("refused a call over rdma_cm at port %d: %s", self.port, REFUSALS[refusal])
        try:
            self._channel.reject(id, REFUSAL.pack(MAGIC, refusal))
        except OSError as error:
            log.debug("cannot refuse it: %s", error)  # it has gone
        self._destroy(id)

    def _check_device(self, way: Way) -> None:
        device = self._channel.device_of(way.id)
        if device != self._device:
            raise _NoRouteError(
                way.why(
                    f"IP goes over {device or 'no RDMA device'}, not over {self._device}",
                    "set FASTPS_RDMA_DEVICE, or change the route (ip route get)",
                )
            )

    def _read_route(self, way: Way) -> Route:
        first = self._channel.attributes(way.id, State.INIT)
        receive = self._channel.attributes(way.id, State.RTR)
        send = self._channel.attributes(way.id, State.RTS)
        if receive.dest_qp_num != way.peer_queue_pair:
            raise _NoRouteError(way.why("it connected another queue pair", "use one version"))
        if first.pkey_index != self._partition:
            raise _NoRouteError(
                way.why(
                    f"the route is in partition {first.pkey_index} of the port's table",
                    f"fastps uses partition {self._partition}; unset FASTPS_RDMA_CM",
                )
            )
        return self._make_route(way, receive, send.sq_psn)

    def _make_route(self, way: Way, receive: Attributes, send_from: int) -> Route:
        path = receive.path
        is_global = bool(path.is_global)  # not within a subnet of InfiniBand; harmless there
        return Route(
            mtu=receive.path_mtu,
            service_level=path.service_level,
            gid_index=path.gid_index if is_global else self._gid_index,
            traffic_class=path.traffic_class if is_global else 0,
            hop_limit=path.hop_limit if is_global else HOP_LIMIT,
            lid=path.lid,
            gid=bytes(path.gid) if is_global else way.peer_gid,
            queue_pair=receive.dest_qp_num,
            receive_from=receive.rq_psn,
            send_from=send_from,
        )

    # ---- the end of one ----

    def _succeed(self, way: Way) -> None:
        self._pending.discard(way)
        self._tell(way, way.route, "")

    def _fail(self, way: Way, why: str) -> None:
        self._pending.discard(way)
        self._lobby.leave(way)
        self._hang_up(way)
        self._tell(way, None, why)

    def _tell(self, way: Way, route: Route | None, why: str) -> None:
        try:
            way.done(route, why)
        except Exception:
            log.exception("what waited for the route to %s fails", way.peer)

    def _forget(self, way: Way) -> None:
        if way in self._pending:
            self._fail(way, way.why("this end gave up", "its log says why"))
        else:
            self._hang_up(way)

    def _adopt(self, way: Way, id: int) -> None:
        way.id = id
        self._ways[id] = way

    def _hang_up(self, way: Way) -> None:
        if way.id:
            del self._ways[way.id]
            self._destroy(way.id)
            way.id = 0

    def _destroy(self, id: int) -> None:
        try:
            self._channel.destroy(id)
        except OSError as error:
            log.warning("cannot end a connection of rdma_cm: %s; see dmesg", error)
