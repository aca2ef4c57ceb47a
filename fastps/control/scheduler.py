# SPDX-License-Identifier: Apache-2.0
"""The scheduler: one asyncio thread between the sockets and the Membership.

Decides nothing about the job: it turns bytes into messages, passes them with the time to the
Membership and carries out its actions. Connections without a valid token end in the handshake.

A control connection belongs to one member; its number is the peer number. A pulse connection
names that number as its sender; each byte on it renews the lease. A thread without the GIL beats
on these connections too, so that members notice a scheduler that is stopped or cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from fastps._core import Beats
from fastps.config import Config
from fastps.control.acknowledged import is_unacknowledged
from fastps.control.actions import Action, Close, Finish, Note, Phase, Send
from fastps.control.blame import broke_text, pulse_s
from fastps.control.frames import FrameReader, FrameWriter, open_frames
from fastps.control.identity import host_id
from fastps.control.local_thread import PULSE, state_of
from fastps.control.membership import LAUNCHER, Membership
from fastps.control.printable import cleaned
from fastps.control.probe import PULSE_PAYLOAD, sender_to
from fastps.control.protocol import (
    MAX_FRAME_BYTES,
    Absent,
    Attend,
    AwaitEnds,
    Done,
    Failed,
    Join,
    Joined,
    Malformed,
    PeerLost,
    Rejoin,
    Rejoined,
    Started,
    Tell,
    ToMember,
    ToScheduler,
    pack,
    unpack_to_scheduler,
)
from fastps.control.silence import UNREACHED
from fastps.control.start_watch import Place
from fastps.control.view_log import ViewRecord, read_records, views_before, write_records
from fastps.errors import ConfigError, ProtocolError
from fastps.files import text_of
from fastps.security.handshake import Claim, Purpose, ServerHandshake
from fastps.security.tokens import CONTROL, Token, parse, sealed_keys, whose, wipe
from fastps.transport import sockets
from fastps.transport.encryption import check_encryption, encryption_options
from fastps.transport.handshake_gate import HandshakeGate

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES  # to a member that does not read; then it is lost
MAX_CONNECTIONS = 16  # of one process: its own, its launcher's, and those that end just now
READ_LIMIT_BYTES = 64 << 10  # asyncio's buffer per connection
PULSE_READ_BYTES = 4096
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_S = 0.02  # between looks whether a launcher's processes are out of the job
OVERSLEPT = 1 / 3  # of a lease: a tick this late means that this process was stopped itself
LOOKS_IN_LEASE = 6  # of this process at its own clock


@dataclass(frozen=True)
class SchedulerStatistics:
    """The state of the scheduler; refused counts connections and declarations, by kind."""

    phase: str
    generation: int
    members: int
    half_open: int
    refused: Mapping[str, int]


class _NotRead(ConnectionError):
    """A connection ended before or between messages."""


class Scheduler:
    """Serve one job until it is over; only `stop` and `statistics` are for other threads."""

    def __init__(
        self,
        config: Config,
        *,
        on_ready: Callable[[str, int], None] | None = None,
        listeners: Sequence[socket.socket] = (),
        machines: Mapping[Place, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
        term: int = 0,
    ) -> None:
        """listeners: bound sockets to take over; on_ready: called with host and port.

        machines: of the members, as far as a launcher knows. on_change: called on the loop's
        thread when the state of the job may have changed, before any member hears of it. term:
        0 where no other one follows a scheduler that dies; else its number, from 1 on, and those
        from 2 on take over. Raises ConfigError for a wrong token, and for encryption that there
        is not.
        """
        self._config = config
        check_encryption(config)
        self._term = term
        self._views: list[ViewRecord] = []  # that have ended
        takes_over = None
        if term > 1:
            self._views = _views_so_far(config)
            takes_over = term, views_before(self._views)
        else:
            _begin_view_log(config)
        self._has_old_views = term > 1  # some of which may have to be written again
        # changed on the loop's thread alone, read by others
        self.membership = Membership(
            config,
            now=time.monotonic(),
            machines=machines,
            state_of=self._state_of,
            replay=_views_to_replay(config),
            takes_over=takes_over,
        )
        self._on_ready = on_ready
        self._on_change = on_change
        self._listeners = list(listeners)
        self._token = _job_token(config)
        self._tokens: dict[int, Token] = {}  # that members have proven to have, by peer
        self._next_peer = 1
        self._has_launcher_ended = False  # any process, or is about to
        self._controls: dict[int, FrameWriter] = {}
        self._pulses: dict[int, FrameWriter] = {}
        self._beats: Beats  # to members, while run() lasts
        self._beaten: dict[int, list[int]] = {}  # numbers of sockets in _beats, by peer
        self._launchers: set[FrameWriter] = set()  # that are sent the first cause
        self._has_told_launchers = False
        self._connections: set[asyncio.Task[None]] = set()
        self._n_connections: Counter[str] = Counter()  # of each process that has its own token
        self._timer: asyncio.TimerHandle | None = None
        self._is_timer_due = False  # it is about to be set
        self._look_at = 0.0  # when this process looks at its own clock again
        self.address: tuple[str, int] = ("", 0)  # listened on, once run() has started

    def numbers(self) -> dict[str, float]:
        """Return the numbers in statistics(), once run() has started.

        refused_wrong_token and the like count each kind, refused all of them.
        """
        if not hasattr(self, "_gate"):
            return {}
        now = self.statistics()
        found: dict[str, float] = {"generation": now.generation, "members": now.members,
                 "half_open": now.half_open, "refused": sum(now.refused.values())}  # fmt: skip
        kinds = {kind: f"refused_{re.sub('[^a-z]+', '_', kind)}" for kind in now.refused}
        return found | {name: now.refused[kind] for kind, name in kinds.items()}

    def statistics(self) -> SchedulerStatistics:
        """Return the state of the moment."""
        return SchedulerStatistics(
            self.membership.phase.value,
            self.membership.generation,
            len(self.membership.members()),
            len(self._gate.half_open),
            MappingProxyType(self._gate.refused | self.membership.refused),
        )

    @property
    def first_cause(self) -> PeerLost | None:
        """Return which member was lost first, if any; from any thread, also after the end."""
        return self.membership.first_cause

    @property
    def n_connections(self) -> int:
        """Return the number of control connections: of members, and of those that ask to join."""
        return len(self._controls)

    def abandon(self) -> None:
        """Forget all tokens in a forked child, and let go of the sockets: our death must be seen.

        Objects that nothing calls there still hold the numbers, which therefore stay taken.
        """
        for token in (self._token, *self._tokens.values()):
            wipe(token, None)
        writers = [*self._controls.values(), *self._pulses.values(), *self._launchers]
        for one in writers:
            one.frames.wipe()
        served = [writer.get_extra_info("socket") for writer in writers]
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for sock in (*self._listeners, *served):
            if sock.fileno() >= 0:
                os.dup2(nowhere, sock.fileno(), inheritable=False)
        os.close(nowhere)

    async def run(self) -> int:
        """Listen and serve until the job is over; return the exit status of the process."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[Finish] = self._loop.create_future()

        listeners = self._listeners or self._listen()
        self._beats = Beats(pulse_s(self._config))
        self._gate = HandshakeGate(
            [*listeners, *sockets.stand_in_for(listeners)],
            key=self._claim,
            purposes=(Purpose.CONTROL, Purpose.PULSE),
            timeout_s=self._config.handshake_timeout_s,
            on_authenticated=self._welcome,
            options_of=lambda sock: encryption_options(sock, self._config),
        )
        try:
            self._gate.open()
            self._look_at = self._loop.time() + self._config.lease_s / LOOKS_IN_LEASE
            self.address = listeners[0].getsockname()[:2]
            self._set_timer()
            log.info("scheduler listens on %s", sockets.join_address(*self.address))
            if self._on_ready is not None:
                self._on_ready(*self.address)
            finish = await self._finished
        finally:
            await self._gate.close()
            await self._close_connections()
            self._beats.stop()
        was_told = self._has_launcher_ended or self.first_cause is not None
        is_news = finish.code and not was_told
        level = logging.ERROR if is_news else logging.INFO
        log.log(level, "scheduler ends: %s", finish.reason)
        return finish.code

    def stop(self, reason: str) -> None:
        """End the job in order; a second call ends it at once. From any thread."""
        with contextlib.suppress(AttributeError, RuntimeError):  # no loop yet, or no more
            self._loop.call_soon_threadsafe(self._stop, reason)

    def expect_ends(self, places: Sequence[Place], why: str) -> None:
        """Note that a launcher is about to end these processes. From the loop's thread."""
        self._has_launcher_ended = True
        self.membership.expect_ends(places, why)

    def request_locations(self) -> None:
        """Log which workers wait for which, once they have answered. From the loop's thread."""
        self._do(self.membership.request_locations(self._loop.time()))

    def report_absent(self, message: Absent) -> None:
        """Note that a process has ended, as its launcher reports. From the loop's thread."""
        self._do(self.membership.receive(LAUNCHER, message, self._loop.time()))

    # ---- listening ----

    def _listen(self) -> list[socket.socket]:
        config = self._config
        host = config.host or config.scheduler_host or "localhost"
        listeners = sockets.listen(
            host, config.scheduler_port, port_setting="FASTPS_SCHEDULER_PORT"
        )
        bound = [sock.getsockname()[0] for sock in listeners]
        if all(map(sockets.is_loopback, bound)) and not (
            host == "localhost" or sockets.is_loopback(host)
        ):
            log.warning(
                "%s resolves to %s on this machine, which other machines cannot reach; set "
                "FASTPS_HOST to an address that they can reach",
                host,
                ", ".join(bound),
            )
        return listeners

    async def _welcome(
        self, sock: socket.socket, handshake: ServerHandshake, accept: bytes
    ) -> None:
        """Accept and serve a member, whose Join must come within the time of its handshake."""
        if not sockets.is_unix(sock):
            sockets.tune(sock, self._config.tcp_user_timeout_s)
        reader, writer = await open_frames(sock.dup(), handshake.sealing, limit=READ_LIMIT_BYTES)
        try:
            writer.write(accept)
            handshake.refusal = b""  # from now on errors are messages
            is_pulse = handshake.purpose is Purpose.PULSE
            join = None if is_pulse else await self._read_join(reader)
            token = whose(self._token, 0 if is_pulse else handshake.lane, handshake.sender)
            if join is not None and not self._is_its_own(join, token, writer):
                writer.close()
                return
            if token.is_own and self._n_connections[token.who] >= MAX_CONNECTIONS:
                host, *_ = writer.get_extra_info("peername") or ("unknown",)
                text = f"{token.who} has {MAX_CONNECTIONS} connections already"
                self._gate.refuse("too many connections", host, text)
                writer.close()
                return
        except BaseException:
            writer.close()
            raise
        task = self._loop.create_task(self._serve(handshake.sender, token, join, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.close())
        if token.is_own:
            self._n_connections[token.who] += 1
            task.add_done_callback(lambda _: self._n_connections.subtract([token.who]))

    def _claim(self, purpose: Purpose, sender: int, lane: int) -> Claim:
        """Return what a new connection must prove; a pulse belongs to a control connection."""
        is_pulse = purpose is Purpose.PULSE
        token = (self._tokens.get(sender, self._token) if is_pulse
                 else whose(self._token, lane, sender))  # fmt: skip
        return Claim(token.key(CONTROL, self._config.job_id), token.who if token.is_own else "")

    def _is_its_own(
        self, join: Join | Rejoin | Absent | Attend, token: Token, writer: FrameWriter
    ) -> bool:
        """Return whether a member joins with the role and rank of its token; else refuse it."""
        asked = join.join if isinstance(join, Rejoin) else join
        if not token.is_own or (asked.role, asked.rank) == (token.role, token.rank):
            return True
        said = f"{asked.role} {asked.rank}"
        text = f"{token.who} claims to be {said}, which its token does not prove"
        host, *_ = writer.get_extra_info("peername") or ("unknown",)
        self._gate.refuse("another's place", host, text)
        if isinstance(join, Join | Rejoin):
            cure = "set FASTPS_ROLE and FASTPS_RANK to what FASTPS_TOKEN_FILE is for"
            writer.write_frame(pack(Failed(join.request, "config", f"{text}; {cure}")))
        return False

    async def _read_join(self, reader: FrameReader) -> Join | Rejoin | Absent | Attend:
        message = await _read_message(reader)
        if not isinstance(message, Join | Rejoin | Absent | Attend):
            raise ProtocolError(
                f"the first message of a member must be Join, got {type(message).__name__}"
            )
        return message

    # ---- members ----

    async def _serve(
        self,
        sender: int,
        token: Token,
        join: Join | Rejoin | Absent | Attend | None,
        reader: FrameReader,
        writer: FrameWriter,
    ) -> None:
        try:
            if join is None:
                await self._serve_pulse(sender, reader, writer)
            elif isinstance(join, Absent):
                self.report_absent(join)
            elif isinstance(join, Attend):
                await self._serve_launcher(reader, writer)
            else:
                await self._serve_control(token, join, reader, writer)
        except Exception:
            log.exception("a connection failed with an unexpected error")

    async def _serve_control(
        self,
        token: Token,
        join: Join | Rejoin,
        reader: FrameReader,
        writer: FrameWriter,
    ) -> None:
        peer, self._next_peer = self._next_peer, self._next_peer + 1
        self._controls[peer] = writer
        self._tokens[peer] = token
        if not token.is_own:  # the job's token proves no rank
            join = _without_rank(join)
        cause = "its control connection closed: it crashed, was killed or ended without shutdown()"
        try:
            self._do(self.membership.receive(peer, join, self._loop.time()))
            async for message in _messages(reader):
                self._do(self.membership.receive(peer, message, self._loop.time()))
                if isinstance(message, Tell):
                    await self._let_read(message)
        except ProtocolError as error:
            cause = broke_text(str(error))
        except OSError as error:
            cause = f"its control connection broke: {error.strerror or error}"
        finally:
            del self._controls[peer], self._tokens[peer]
            self._do(self.membership.closed(peer, cause, self._loop.time()))

    async def _let_read(self, told: Tell) -> None:
        """Read no more of a member until those that it has told something have read that.

        So who floods others waits for them, and they are not lost for what they cannot read. One
        that reads nothing keeps nobody waiting for ever.
        """
        peers = self.membership.peers_of(told.members)
        until, least = self._loop.time() + self._config.shutdown_timeout_s, float("inf")
        while (unread := self._unread_nbytes(peers)) and self._loop.time() < until:
            if unread < least:
                until, least = self._loop.time() + self._config.shutdown_timeout_s, unread
            await asyncio.sleep(LOOK_S)

    def _unread_nbytes(self, peers: Iterable[int]) -> int:
        """Return how much is unsent to those of some peers that have much to read."""
        writers = [self._controls[peer] for peer in peers if peer in self._controls]
        sizes = [one.transport.get_write_buffer_size() for one in writers if not one.is_closing()]
        return sum(nbytes for nbytes in sizes if nbytes > MAX_FRAME_BYTES)

    async def _serve_launcher(self, reader: FrameReader, writer: FrameWriter) -> None:
        """Send a launcher of another machine the first cause, and when its processes are out."""
        self._launchers.add(writer)
        try:
            if self.first_cause is not None:
                writer.write_frame(pack(self.first_cause))
            async for message in _messages(reader):
                if not isinstance(message, AwaitEnds):
                    raise ProtocolError(f"a launcher may not send {type(message).__name__}")
                places = set(message.places)
                while places & {(role, rank) for _, role, rank in self.membership.members()}:
                    await asyncio.sleep(LOOK_S)
                if self.first_cause is None:
                    writer.write_frame(pack(Done(message.request)))
        except (OSError, ProtocolError) as error:
            log.debug("the connection of a launcher ended: %s", error)
        finally:
            self._launchers.discard(writer)

    async def _serve_pulse(self, peer: int, reader: FrameReader, writer: FrameWriter) -> None:
        """Renew a lease at every byte; the member's control connection must be open already."""
        if peer in self._pulses or not self.membership.pulse(peer, self._loop.time()):
            host, *_ = writer.get_extra_info("peername") or ("unknown",)
            self._gate.refuse("pulse of nobody", host, f"peer {peer} has no lease to renew")
            return
        self._pulses[peer] = writer
        try:
            self._begin_beats(peer, writer.get_extra_info("socket").fileno())
            while await reader.read(PULSE_READ_BYTES):
                self.membership.pulse(peer, self._loop.time())
        except OSError as error:
            log.debug("pulse of peer %d broke: %s", peer, error)
        finally:
            del self._pulses[peer]
            self._stop_beats(peer)
            self._do(self.membership.pulse_closed(peer, self._loop.time()))

    # ---- actions ----

    def _do(self, actions: list[Action]) -> None:
        self._on_change()
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Close):
                self._close(action.peer)
            elif isinstance(action, Note):
                self._note(action.record)
            elif not self._finished.done():
                self._finished.set_result(action)
        if self.first_cause is not None and not self._has_told_launchers:
            self._has_told_launchers = True
            for writer in self._launchers:
                writer.write_frame(pack(self.first_cause))
        if not self._is_timer_due:  # after the answers, which somebody waits for
            self._is_timer_due = True
            self._loop.call_soon(self._set_timer)

    def _send(self, action: Send) -> None:
        writer = self._controls.get(action.peer)
        if writer is None or writer.is_closing():
            return
        transport = writer.transport
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()
            return
        try:
            writer.write_frame(pack(self._sealed(action)))
        except ProtocolError:
            log.exception("a message to peer %d is too large", action.peer)
            transport.abort()

    def _note(self, record: ViewRecord) -> None:
        """Write the log of views, if there is one."""
        until = len(self._views) if self._has_old_views else record.view
        self._views[record.view - 1 : until], self._has_old_views = [record], False
        if self._config.view_log:
            try:
                write_records(self._config.view_log, self._views)
            except OSError as error:
                log.error("FASTPS_VIEW_LOG=%s lacks a view: %s", self._config.view_log, error)

    def _sealed(self, action: Send) -> ToMember:
        """Return the message, with what the scheduler alone knows: who it is, and sealed keys.

        Keys are for a member that cannot make them itself.
        """
        message, own = action.message, self._tokens[action.peer]
        if isinstance(message, Joined | Rejoined):
            return replace(message, pid=os.getpid(), host_id=host_id(), term=self._term)
        if not (isinstance(message, Started) and own.is_own):
            return message
        job = message.job
        keys = sealed_keys(
            self._token, own, self._config.job_id, me=job.me, machine=job.members[job.me].machine,
            n=len(job.members),
        )  # fmt: skip
        return replace(message, keys=keys)

    def _close(self, peer: int) -> None:
        """Close a peer's connections; a peer that does not read is cut off later."""
        self._stop_beats(peer)
        for writers in (self._controls, self._pulses):
            writer = writers.get(peer)
            if writer is not None and not writer.is_closing():
                writer.close()
                transport = writer.transport
                self._loop.call_later(self._config.shutdown_timeout_s, transport.abort)

    def _begin_beats(self, peer: int, fd: int) -> None:
        """Beat to a member on its pulse connection, and in datagrams, which no cut way back stops.

        Datagrams need a numeric address; without them TCP has to do.
        """
        self._beaten[peer] = [self._beats.add(fd, PULSE_PAYLOAD)]
        beats = self.membership.probes_of(peer)
        if beats is not None:
            with contextlib.suppress(OSError), sender_to(*beats[:2]) as sock:
                self._beaten[peer].append(self._beats.add(sock.fileno(), beats[2]))

    def _stop_beats(self, peer: int) -> None:
        for number in self._beaten.pop(peer, ()):
            self._beats.remove(number)

    def _state_of(self, peer: int, join: Join) -> str:
        """Return what the thread of a member's heartbeats does, as far as it is seen from here."""
        if join.host_id == host_id():
            return state_of(join.pid, PULSE)
        writer = self._pulses.get(peer)
        if writer is None:
            return ""
        sock = writer.get_extra_info("socket")
        return UNREACHED if is_unacknowledged(sock, self._config.lease_s / 3) else ""

    def _set_timer(self) -> None:
        self._is_timer_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.membership.next_deadline()
        # What comes first after a pause may not move the look that shows the pause. A deadline
        # that has passed by now shows none: its tick was counted already.
        due = self._look_at if due is None else min(max(due, self._loop.time()), self._look_at)
        self._timer = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        """Judge silences of now only after the pulses that have arrived by now were read."""
        now = self._loop.time()
        self._look_at = now + self._config.lease_s / LOOKS_IN_LEASE
        if now - due > OVERSLEPT * self._config.lease_s:
            level = logging.WARNING if now - due > self._config.lease_s else logging.INFO
            text = "the scheduler itself was stopped for %.1f s, or got no processor"
            log.log(level, text, now - due)
            self._do(self.membership.slept(now, now - due))
        else:
            self.membership.delayed(now - due)
        # The loop first looks at its sockets, then wakes their readers, then runs these.
        self._loop.call_soon(self._loop.call_soon, self._loop.call_soon, self._tick_at, now)

    def _tick_at(self, now: float) -> None:
        self._do(self.membership.tick(now))

    def _stop(self, reason: str) -> None:
        if self.membership.phase is Phase.OVER and not self._finished.done():
            self._finished.set_result(Finish(1, f"{reason} again"))
            return
        self._do(self.membership.stop(reason, self._loop.time()))

    async def _close_connections(self) -> None:
        """Flush the connections, then close them."""
        if self._timer is not None:
            self._timer.cancel()
        for peer in list(self._beaten):
            self._stop_beats(peer)
        for writer in [*self._controls.values(), *self._pulses.values(), *self._launchers]:
            writer.close()
        tasks = list(self._connections)
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.shutdown_timeout_s)
        for task in self._connections:
            task.cancel()
        for writer in [*self._controls.values(), *self._pulses.values(), *self._launchers]:
            writer.transport.abort()


def _views_to_replay(config: Config) -> list[ViewRecord]:
    if not config.replay:
        return []
    records = read_records(config.replay)
    n_workers = len(records[0].workers)
    if not config.is_elastic or n_workers != config.size:
        raise ConfigError(
            f"FASTPS_REPLAY={config.replay} is of an elastic job of {n_workers} workers; start as "
            "many, with FASTPS_ELASTIC_MIN (fastps-run --min)"
        )
    if any(one.has_boundary for one in records):
        raise ConfigError(
            f"FASTPS_REPLAY={config.replay} is of a job that workers joined or left at a "
            "commit(), which cannot be made again; give the log of a job with losses alone"
        )
    return records


def _begin_view_log(config: Config) -> None:
    """Raise ConfigError at the start if the log of views cannot be written."""
    if not config.view_log:
        return
    if not config.is_elastic:
        raise ConfigError(
            f"FASTPS_VIEW_LOG={config.view_log} is for elastic jobs, which have views; set "
            "FASTPS_ELASTIC_MIN (fastps-run --min), or leave it out"
        )
    try:
        write_records(config.view_log, [])
    except OSError as error:
        raise ConfigError(f"FASTPS_VIEW_LOG={config.view_log}: {text_of(error)}") from error


def _views_so_far(config: Config) -> list[ViewRecord]:
    """Return the views in the log of a scheduler that died."""
    if not config.view_log:
        return []
    try:
        return read_records(config.view_log)
    except ConfigError as error:  # none has ended, or somebody took the file away
        log.info("the log of views begins anew: %s", error)
        return []


def _without_rank(join: Join | Rejoin) -> Join | Rejoin:
    """Return what a newcomer says, without the rank that it has not proven."""
    if isinstance(join, Rejoin):
        return replace(join, join=replace(join.join, rank=None)) if join.join.is_newcomer else join
    return replace(join, rank=None) if join.is_newcomer else join


def _job_token(config: Config) -> Token:
    token = parse(config.token_bytes())
    if token.is_own:
        raise ConfigError(
            f"this is the token of {token.who}, but the scheduler verifies all members; set its "
            "FASTPS_TOKEN_FILE to a file with the job's token"
        )
    return token


async def _read_message(reader: FrameReader) -> ToScheduler | Malformed:
    try:
        return cleaned(unpack_to_scheduler(await reader.read_body()))
    except asyncio.IncompleteReadError as error:
        raise _NotRead from error


async def _messages(
    reader: FrameReader,
) -> AsyncIterator[ToScheduler | Malformed]:
    """Read messages until the connection ends."""
    with contextlib.suppress(_NotRead):
        while True:
            yield await _read_message(reader)


def serve(
    config: Config,
    *,
    on_ready: Callable[[str, int], None] | None = None,
    listeners: Sequence[socket.socket] = (),
    beside: Callable[[Scheduler], contextlib.AbstractContextManager[object]] = (
        contextlib.nullcontext
    ),
) -> int:
    """Run a scheduler in this process until its job is over; return the exit status.

    Arguments are those of Scheduler; beside: makes a context for the time of the job. SIGTERM and
    SIGINT end the job in order, a second one at once. Errors of the set-up are raised. Main
    thread only.
    """
    scheduler = Scheduler(config, on_ready=on_ready, listeners=listeners)
    with beside(scheduler):
        return asyncio.run(_serve(scheduler))


async def _serve(scheduler: Scheduler) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)  # run() begins
    for number in _SIGNALS:
        loop.add_signal_handler(number, scheduler.stop, f"the scheduler got {number.name}")
    try:
        return await serving
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
