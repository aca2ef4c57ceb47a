# SPDX-License-Identifier: Apache-2.0
"""A member's connection to the scheduler: join, request, receive events.

Moves messages between the member and the scheduler; decides nothing about the job. Threads: any
number of callers; one daemon reader thread that hands answers to callers and events to
`on_event`. A thread of _core (no GIL) renews the lease on a connection of its own: a busy
interpreter must not look like a dead process. It listens to the scheduler's beats too: after
lease_s without one it ends the reading of the other connection, so that all waits end. Every wait
has a deadline.

The scheduler's deadline comes first, because its error can name the missing members; the client's
deadline, a little later, matters only if the scheduler does not answer.

Where the scheduler's launcher starts another one after its death, the reader thread comes back to
that one, and reports what it was told in this view (journal.py, recovery.py). Requests fail
meanwhile with ViewChangedError, since the next view begins then; those to meetings that have ended
for other members are answered.

A forked child is not a member: its copies of the descriptors are closed right after the fork, and
every call there raises NotInitializedError.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from msgspec.structs import replace

from fastps._core import Pulse
from fastps.config import Config
from fastps.control.blame import pulse_s, unheard_text
from fastps.control.dial import Notice, dial, dial_control, token_of
from fastps.control.frames import ControlSocket
from fastps.control.identity import host_id, machine_name
from fastps.control.journal import Journal, PendingMeeting
from fastps.control.local_thread import BEATS, stat_of
from fastps.control.probe import PULSE_PAYLOAD, listen_for_probes, probe
from fastps.control.protocol import (
    LENGTH,
    MAX_BLOB_BYTES,
    Answer,
    AskClock,
    AwaitStart,
    Barrier,
    Blob,
    BlobData,
    ClockTold,
    Confirm,
    Confirmed,
    Declare,
    Declared,
    DeclaredTensor,
    Dispute,
    Done,
    Dropped,
    Event,
    Failed,
    Forget,
    Job,
    JobOver,
    Join,
    Joined,
    KeysFailed,
    KeysReady,
    Leave,
    Meeting,
    PeerLost,
    Regroup,
    Regrouped,
    Rejoined,
    ReportLost,
    Request,
    ResultsCommitted,
    StallTold,
    Started,
    Tell,
    TensorSpec,
    ToScheduler,
    Unheard,
    ViewLost,
    Waiting,
    check_name,
    failure_of,
    pack_to_scheduler,
    text_of,
    unpack_to_member,
)
from fastps.control.stall_inquiry import ANSWER_S
from fastps.errors import (
    AuthError,
    ConfigError,
    FastPSError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    StallError,
    ViewChangedError,
)
from fastps.native.condition import Condition, Flag
from fastps.security.handshake import Purpose
from fastps.security.tokens import CONTROL, Keys, Token, make_keys, unseal_keys, wipe, wipe_text
from fastps.transport import sockets
from fastps.types import checked_seconds

log = logging.getLogger(__name__)

GRACE_S = 2.0  # how much longer the client waits than the scheduler
ADMITTED_S = 7 * 86400.0  # for a newcomer to be admitted
NOTICE_S = 5.0  # to write a message that has no answer
LOOKS = 4  # at waiting operations, within the time of the stall watch
MAX_LOOK_S = 2.5
REDIAL_S = 5.0  # to reach a scheduler that takes over from one that died
AGAIN_S = 0.02  # between tries, where one that took over has died too
AWAY = (
    "the scheduler died, and its launcher starts another one; the job goes on in a new view: call "
    "the operation again on all workers"
)

AnswerT = TypeVar("AnswerT", bound=Answer)

_clients: weakref.WeakSet[ControlClient] = weakref.WeakSet()  # of this process, for fork


def _forget_clients_in_child() -> None:
    """Close a forked child's copies of the control descriptors."""
    for client in list(_clients):
        client._abandon()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_clients_in_child)


class _Gone(FastPSError):
    """The connection to a scheduler that takes over has ended too."""


class Reply(Future[Answer]):
    """An answer to come, which a waiting main thread may give up by Ctrl-C: see Condition."""

    asked: PendingMeeting | None = None  # of a meeting

    def __init__(self) -> None:
        """Wait for it."""
        super().__init__()
        self._condition = Condition()


class PendingReply(Generic[AnswerT]):
    """The handle of the scheduler's answer to a request."""

    def __init__(
        self,
        future: Future[Answer],
        kind: type[AnswerT],
        what: str,
        timeout_s: float,
        deadline: float,
        give_up: Callable[[], None],
    ) -> None:
        """Hold the future of a request; give_up drops the request after its deadline."""
        self._future, self._kind, self._what = future, kind, what
        self._timeout_s, self._deadline, self._give_up = timeout_s, deadline, give_up
        self.poll = future.done

    def wait(self, timeout_s: float | None = None) -> AnswerT:
        """Wait for the answer, up to its deadline or timeout_s. Raises the error in it."""
        left_s = max(self._deadline - time.monotonic(), 0)
        if timeout_s is not None:
            left_s = min(left_s, checked_seconds(timeout_s))
        try:
            answer = self._future.result(left_s)
        except TimeoutError as error:
            raise self.timeout_error() from error
        if isinstance(answer, Failed):
            raise failure_of(answer)
        if not isinstance(answer, self._kind):
            raise ProtocolError(f"{self._what}: the scheduler answered {type(answer).__name__}")
        return answer

    def timeout_error(self) -> StallError:
        """Return the error of a missing answer."""
        if time.monotonic() >= self._deadline:
            self._give_up()
        return StallError(
            f"{self._what}: the scheduler did not answer within {round(self._timeout_s, 1):g} s; "
            "check that its process and machine run, or raise the timeout if it is only slow"
        )


class ControlClient:
    """One member's connection to the scheduler, from connect() to leave() and close()."""

    def __init__(
        self,
        config: Config,
        control: ControlSocket,
        token: Token,
        on_event: Callable[[Event], None],
    ) -> None:
        """Take over an authenticated connection; use connect() instead."""
        self._config = config
        self._sock = sock = control.sock
        self._frames = control.frames  # sealed under _send_lock, opened by the reader thread
        self._on_event = on_event
        self._pid = os.getpid()
        self._send_lock = threading.Lock()  # one frame at a time; taken alone
        self._unsent: deque[bytearray] = deque()  # messages without answer that wait for the lock
        self._lock = threading.Lock()  # _pending, _cause, _is_closed; never held while waiting
        self._pending: dict[int, Reply] = {}
        self._epoch = 0  # number of connections to schedulers before this one
        self._is_here = Flag()  # the scheduler: it has not died, or another one is
        self._is_here.set()
        self._term = 0  # of the scheduler; 0: no other one would follow it
        self._journal = Journal()  # of the reader thread
        self._join_sent: Join | None = None
        self._start_sent: AwaitStart | None = None
        self._leave_request = -1
        self._reached_at = 0.0  # a scheduler that takes over
        self._has_left = False
        self._numbers = itertools.count(1)
        self._cause: FastPSError | None = None  # why no request can succeed any more
        self._first_lost: PeerLost | None = None
        self._over: JobOver | None = None
        self._is_decided = False  # a first cause or the end of the job is known
        self._news = Condition()  # notified at every event, and with _is_decided
        self._is_ending = False  # the scheduler will close the connection in order
        self._is_closed = False
        self._write_failure = ""
        self._is_silent = False  # the scheduler did not answer the last probe
        self._pulse: Pulse | None = None
        self._job: Job | None = None
        self.expected = 0, 1  # rank and size that a newcomer would have
        self.watch: Callable[[], None] = _nothing  # called periodically on the reader thread
        self.local_address = sockets.own_end(sock)
        self._probes, self._cookie = listen_for_probes(self.local_address)
        self.keys: Keys  # once the job has started
        self._token = token
        sock.settimeout(None)
        _clients.add(self)
        self._reader = threading.Thread(target=self._read, name="fastps:control", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        config: Config,
        *,
        role: str,
        data_address: tuple[str, int] | None,
        on_event: Callable[[Event], None],
        unix: str = "",
        machine: str = "",
        gid: str = "",
        serves: bool = True,
        is_newcomer: bool = False,
    ) -> ControlClient:
        """Join the job and wait until all workers and servers have joined.

        data_address: of the listener for data connections, None without one; unix: its abstract
        name, if any. serves: whether this process may own keys. machine: from machine_name();
        empty for a process that shares memory with all of its host. gid: of an RDMA device, if
        any. is_newcomer: it joins a job that runs, and only says hello here; await_view() waits.
        Blocks up to start_timeout_s. on_event is called on the reader thread, possibly before
        connect returns; it may send keys_ready and the like, but must not wait for an answer.
        Raises ConfigError (address, numbers, a role started too often), AuthError, ProtocolError,
        TransportTimeout (no scheduler), StallError (members missing), PeerLostError.
        """
        deadline = time.monotonic() + config.start_timeout_s
        token = token_of(config)
        with Notice(config, deadline) as notice:
            control = dial_control(config, token, deadline=deadline, notice=notice)
        client = cls(config, control, token, on_event)
        try:
            machine = machine or machine_name(config, is_shared=True)
            join = client._make_join(
                role, data_address, unix=unix, machine=machine, gid=gid, serves=serves
            )
            client._join(replace(join, is_newcomer=is_newcomer), deadline)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def job(self) -> Job:
        """The job as it was when it, or its present view, started."""
        assert self._job is not None
        return self._job

    @property
    def known_job(self) -> Job | None:
        """The job; None for a newcomer that has yet to join it."""
        return self._job

    def give_events_to(self, on_event: Callable[[Event], None]) -> None:
        """Pass later events to another function; see connect()."""
        self._on_event = on_event

    def await_view(self, *, port: int, unix: str) -> Job:
        """Await the start of the next view, after ViewLost, and return the job in it.

        port, unix: where this member listens now. Blocks until all survivors have come, up to
        twice start_timeout_s, and a newcomer until it is admitted. Raises ViewChangedError when
        another member is lost meanwhile, and PeerLostError when too few are left.
        """
        self._is_here.wait(self._config.start_timeout_s)
        timeout_s = 2 * self._config.start_timeout_s if self._job else ADMITTED_S
        wait = AwaitStart(next(self._numbers), timeout_s, port, unix)
        if self._join_sent is not None and (port or unix):
            self._join_sent = replace(self._join_sent, port=port, unix=unix)
        self._start_sent = wait
        return self._ask(wait, Started, what="the next view of the job", timeout_s=timeout_s).job

    # ---- requests of workers ----

    def declare(self, specs: Sequence[TensorSpec], *, timeout_s: float) -> list[DeclaredTensor]:
        """Declare tensors and wait until every server is ready for them; idempotent.

        One round trip for the whole batch. Raises MismatchError when another worker declared one
        of them differently, StallError naming the servers that are not ready, PeerLostError.
        """
        if not specs:
            return []
        for spec in specs:
            check_name(spec.name, dimensions=len(spec.layout.shape))
        timeout_s = checked_seconds(timeout_s)
        what = f"declaring {specs[0].name!r}" + (f" and {len(specs) - 1} more" * (len(specs) > 1))
        message = Declare.of(next(self._numbers), specs, timeout_s)
        return list(self._ask(message, Declared, what=what, timeout_s=timeout_s).tensors)

    def forget(self, versions: Mapping[str, int], *, timeout_s: float) -> int:
        """Wait until all workers ask to forget tensors, then until servers have; timeout_s each.

        versions: of the last operation, by name. Returns the argument for dropped().
        """
        timeout_s = checked_seconds(timeout_s)
        message = Forget(next(self._numbers), tuple(versions.items()), timeout_s)
        what = f"forgetting {', '.join(versions)[:80]}"
        return self._ask(message, Done, what=what, timeout_s=2 * timeout_s).request

    def dropped(self, request: int) -> None:
        """Report that this worker has dropped the tensors of a forget()."""
        self.send(Dropped(request))

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Wait until every worker has entered the barrier; StallError names the missing."""
        self._check_may_wait(f"barrier {name!r}")
        self.enter_barrier(name, timeout_s=timeout_s).wait()

    def enter_barrier(self, name: str, *, timeout_s: float) -> PendingReply[Done]:
        """Start barrier(); wait() of the result ends it, or raises its error."""
        check_name(name)
        timeout_s = checked_seconds(timeout_s)
        message = Barrier(next(self._numbers), name, timeout_s)
        return self._begin(message, Done, what=f"barrier {name!r}", timeout_s=timeout_s)

    def blob(self, name: str, root_rank: int, data: bytes | None, *, timeout_s: float) -> bytes:
        """Return every worker the root's bytes, at most 64 MiB; all workers must call it."""
        check_name(name)
        if data is not None and len(data) > MAX_BLOB_BYTES:
            raise ConfigError(
                f"blob {name!r} has {len(data)} bytes, at most {MAX_BLOB_BYTES} are allowed; "
                "broadcast large data as arrays"
            )
        timeout_s = checked_seconds(timeout_s)
        message = Blob(next(self._numbers), name, root_rank, data, timeout_s)
        what = f"blob {name!r} of worker {root_rank}"
        if data is not None:
            self._ask(message, Done, what=what, timeout_s=timeout_s)
            return data
        return self._ask(message, BlobData, what=what, timeout_s=timeout_s).data

    def dispute(self, name: str, version: int, started: str, *, timeout_s: float) -> MismatchError:
        """Report what was started on a tensor whose workers disagree; return all reports."""
        message = Dispute(next(self._numbers), name, version, text_of(started), timeout_s)
        try:
            self._ask(message, Done, what=f"dispute {name!r}", timeout_s=timeout_s)
        except MismatchError as error:
            return error
        raise ProtocolError(f"dispute {name!r}: the scheduler answered without an error")

    def who_stalls(self, waiting: Waiting) -> str:
        """Ask which workers delay an operation; blocks while they are asked where they are."""
        message = replace(waiting, request=next(self._numbers))
        what = f"asking which worker delays {waiting.what}"
        return self._ask(message, StallTold, what=what, timeout_s=2 * ANSWER_S).text

    def clock_ns(self) -> int:
        """Return the scheduler's CLOCK_MONOTONIC in nanoseconds."""
        message = AskClock(next(self._numbers))
        timeout_s = self._config.op_timeout_s
        told = self._ask(message, ClockTold, what="asking for the time", timeout_s=timeout_s)
        return round(told.seconds * 1e9)

    # ---- reports of members, without answers ----

    def keys_ready(self, request_id: int) -> None:
        """Report that this server can take pushes for the keys of a DeclareKeys."""
        self.send(KeysReady(request_id))

    def keys_failed(self, request_id: int, message: str) -> None:
        """Report that this server cannot hold the keys of a DeclareKeys."""
        self.send(KeysFailed(request_id, text_of(message)))

    def report_lost(
        self, member: int, cause: str, *, is_owner: bool = False, generation: int = 0
    ) -> None:
        """Report that a data connection broke; the scheduler decides which member is to blame.

        Naming this member itself means that the fault is here. generation: in which it broke; 0:
        the present one.
        """
        self.send(ReportLost(member, text_of(cause), is_owner, generation))

    def regroup(self, generation: int, *, leaves: bool, timeout_s: float) -> int:
        """Wait until all workers of a generation are at a boundary.

        leaves: this one wants to leave there. Returns the generation that follows where somebody
        joins or leaves, else 0. Raises ViewChangedError after a loss.
        """
        timeout_s = checked_seconds(timeout_s)
        message = Regroup(next(self._numbers), "boundary", generation, timeout_s, leaves)
        what = "waiting for all workers at a boundary"
        return self._ask(message, Regrouped, what=what, timeout_s=timeout_s).generation

    def tell(self, members: Sequence[int], data: bytes, *, has_joined: bool = False) -> None:
        """Send data to workers, as the event Told; has_joined: of Tell."""
        self.send(Tell(tuple(members), data, has_joined))

    def verdict(
        self, timeout_s: float, *, unless: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait for the first cause of a loss, or the job's end; None if neither came in time.

        unless: ends the wait when it returns true; called first and after every event. It must
        not block.
        """
        self._check_usable()
        with self._news:
            self._news.wait_for(lambda: self._is_decided or unless(), timeout_s)
        if self._first_lost is not None:
            return str(self._first_lost)
        return None if self._over is None else f"the job is over: {self._over.reason}"

    def begin_probe(self) -> Callable[[], bool]:
        """Start a probe of the scheduler; return a function that tells whether it answers.

        That function blocks until GRACE_S after the start at most. leave() does not wait for a
        scheduler that did not answer. An ended connection counts as an answer, since the end has
        an error of its own.
        """
        asked: list[PendingReply[ClockTold]] = []
        with contextlib.suppress(FastPSError):
            message = AskClock(next(self._numbers))
            asked += [self._begin(message, ClockTold, what="asking for the time", timeout_s=0.0)]

        def has_answered() -> bool:
            with contextlib.suppress(PeerLostError, ShutdownError):
                try:
                    for one in asked:
                        one.wait()
                except StallError:
                    self._is_silent = True
            return not self._is_silent

        return has_answered

    @property
    def address(self) -> str:
        """Return the scheduler's address as host:port."""
        return sockets.join_address(self._config.scheduler_host, self._config.scheduler_port)

    # ---- the end ----

    def leave(self, *, timeout_s: float) -> None:
        """Leave in order, so that the others do not see a lost member, and close.

        A worker that serves too waits until all workers leave, or for timeout_s. Does not raise
        if the scheduler or a peer is lost. Does not wait for a scheduler that did not answer the
        last probe.
        """
        if self._is_closed or self._is_forked():
            return
        self._is_ending = True
        try:
            message = Leave(next(self._numbers), timeout_s)
            self._check_may_wait("leaving")
            self._is_here.wait(timeout_s)
            self._leave_request = message.request
            asked = self._begin(message, Done, what="leaving", timeout_s=timeout_s)
            if not self._is_silent:
                asked.wait()
        except (PeerLostError, ShutdownError) as error:
            log.debug("left without an answer: %s", error)
        finally:
            self.close()

    def close(self) -> None:
        """End the connection, both threads and every wait; idempotent, from any thread."""
        with self._lock:
            if self._is_closed or self._is_forked():
                return
            self._is_closed = True
        self._end(ShutdownError("the control connection was closed by this process"))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._stop_pulse()
        if threading.current_thread() is not self._reader:
            self._reader.join(self._config.shutdown_timeout_s)
            if self._reader.is_alive():
                log.warning("the control thread is still inside on_event; it ends after that")
        self._decide()  # ends verdict()
        with self._send_lock:  # held for short times only: the socket is shut down
            self._sock.close()
        self._probes.close()
        _clients.discard(self)
        self._on_event = _ignore  # so that our owner is in no reference cycle
        self.watch = _nothing

    # ---- joining ----

    def _make_join(
        self,
        role: str,
        data_address: tuple[str, int] | None,
        *,
        unix: str,
        machine: str,
        gid: str,
        serves: bool,
    ) -> Join:
        config, is_worker = self._config, role != "server"
        host, port = data_address or (self.local_address, 0)
        return Join(
            request=next(self._numbers),
            role=role,
            rank=self._token.rank if config.rank is None and self._token.is_own else config.rank,
            local_rank=config.local_rank,
            local_size=config.local_size,
            size=config.size if is_worker else 0,
            num_servers=config.num_servers if is_worker else 0,
            host=self.local_address if sockets.is_wildcard(host) else host,
            port=port,
            pid=os.getpid(),
            hostname=text_of(socket.gethostname()),
            host_id=text_of(host_id()),
            machine=text_of(machine),
            unix=unix,
            gid=text_of(gid),
            links_per_peer=config.links_per_peer,
            serves=serves,
            goes_on=config.goes_on,
            num_validators=config.num_validators if is_worker else 0,
            elastic_min=config.elastic_min if is_worker else 0,
            elastic_max=config.elastic_max if is_worker else 0,
            is_watched=config.launcher_pid == os.getppid(),
            probe_host=self.local_address,
            probe_port=self._probes.getsockname()[1],
            cookie=self._cookie,
        )

    def _join(self, message: Join, deadline: float) -> None:
        timeout_s = self._config.handshake_timeout_s
        joined = self._ask(message, Joined, what="joining the job", timeout_s=timeout_s)
        self._join_sent, self._term = message, joined.term
        self._start_pulse(joined, deadline)
        if message.is_newcomer:
            self.expected = joined.rank, joined.size
            return
        remaining_s = max(deadline - time.monotonic(), 0.0)
        limit_s = self._config.start_timeout_s
        wait = AwaitStart(next(self._numbers), remaining_s, limit_s=limit_s)
        self._ask(wait, Started, what="the start of the job", timeout_s=remaining_s)

    def _take_start(self, started: Started) -> None:
        """Take the job, or its next view, on the reader thread: events after it are of it."""
        self._job = job = started.job
        self._journal.begin(job.generation)
        job_id = self._config.job_id
        if self._token.is_own:
            self.keys = unseal_keys(self._token, job_id, started.keys)
        else:
            self.keys = make_keys(self._token, job_id, job.me, job.members[job.me].machine)

    def _start_pulse(self, joined: Joined | Rejoined, deadline: float) -> None:
        is_here = joined.host_id == host_id()
        beats = stat_of(joined.pid, BEATS) if is_here else None
        with dial(
            self._config,
            self._token.key(CONTROL, self._config.job_id),
            purpose=Purpose.PULSE,
            sender=joined.member,
            deadline=deadline,
        ) as sock:  # the pulse has its own copy of the descriptor
            sock.settimeout(None)
            self._pulse = Pulse(
                sock.fileno(), PULSE_PAYLOAD, pulse_s(self._config),
                lease_s=self._config.lease_s, end_fd=self._sock.fileno(),
                answer_fd=self._probes.fileno(), cookie=self._cookie,
                peer_stat=os.fsencode(beats or ""),
            )  # fmt: skip

    def _stop_pulse(self) -> None:
        """End the beats; the descriptor is closed with the last reference."""
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.stop()

    # ---- sending ----

    def _ask(
        self, message: Request, kind: type[AnswerT], *, what: str, timeout_s: float
    ) -> AnswerT:
        """Send a request and wait for its answer."""
        self._check_may_wait(what)
        return self._begin(message, kind, what=what, timeout_s=timeout_s).wait()

    def _check_may_wait(self, what: str) -> None:
        if threading.current_thread() is self._reader:
            raise FastPSError(f"{what}: on_event must not wait for the scheduler")

    def _begin(
        self, message: Request, kind: type[AnswerT], *, what: str, timeout_s: float
    ) -> PendingReply[AnswerT]:
        """Send a request; the caller waits for its answer later."""
        self._check_usable()
        frame = pack_to_scheduler(message)
        deadline = time.monotonic() + timeout_s + GRACE_S
        future, epoch = self._enlist(message)
        give_up = functools.partial(self._unlist, message.request)
        asked = PendingReply(future, kind, what, timeout_s, deadline, give_up)
        try:
            self._write(frame, deadline, epoch)
        except TimeoutError as error:
            raise asked.timeout_error() from error
        return asked

    def _unlist(self, number: int) -> None:
        with self._lock:
            self._pending.pop(number, None)

    def _enlist(self, message: Request) -> tuple[Reply, int]:
        """Return the future of a request, and of which connection it is."""
        future = Reply()
        if self._term and isinstance(message, Meeting):
            future.asked = PendingMeeting(message)
        with self._lock:
            if self._cause is not None:
                raise type(self._cause)(str(self._cause))
            if not self._is_here.is_set():
                raise ViewChangedError(AWAY)
            self._pending[message.request] = future
            return future, self._epoch

    def send(self, message: ToScheduler) -> None:
        """Send a message without answer; if another thread is sending, that thread sends it.

        Never waits for another thread, since the reader thread sends too.
        """
        self._check_usable()
        self._unsent.append(pack_to_scheduler(message))
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Send queued messages, unless another thread holds the lock and will send them."""
        while self._unsent and self._is_here.is_set() and self._send_lock.acquire(blocking=False):
            try:
                while self._unsent:
                    self._write_locked(self._unsent.popleft(), time.monotonic() + NOTICE_S)
            finally:
                self._send_lock.release()

    def _write(self, frame: bytearray, deadline: float, epoch: int) -> None:
        """Send a frame, and then the messages that others have queued meanwhile.

        epoch: of the connection that it is for; the request has failed if there is another one.
        """
        if not self._send_lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise TimeoutError("another thread is still sending")
        try:
            if self._epoch == epoch:
                self._write_locked(frame, deadline)
        finally:
            self._send_lock.release()
        self._send_unsent()

    def _write_locked(self, frame: bytearray, deadline: float) -> None:
        """Write to the socket; a failure ends the connection, which the reader reports."""
        try:
            sockets.write_all(self._sock, self._frames.seal(frame), deadline=deadline)
        except OSError as error:
            self._write_failure = f"cannot send to it: {error.strerror or error}"
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    # ---- the reader thread ----

    def _read(self) -> None:
        while True:
            cause = self._read_all()
            pulse = self._pulse
            silent_s = 0.0 if pulse is None else pulse.silent_s
            if silent_s:
                cause = unheard_text(silent_s)
            if (silent_s and self._job is None) or not self._may_come_back():
                break
            if silent_s:
                self._tell_unheard(silent_s)
            try:
                self._come_back()
            except (FastPSError, OSError) as error:
                cause = f"{cause}; no other one takes over: {error}"
                silent_s = 0.0
                break
        self._scheduler_lost(cause)
        if silent_s:
            self._tell_unheard(silent_s)

    def _tell_unheard(self, silent_s: float) -> None:
        """Tell the scheduler, which may live, that this member gives it up."""
        if self._send_lock.acquire(timeout=NOTICE_S):
            try:
                frame = pack_to_scheduler(Unheard(silent_s))
                self._write_locked(frame, time.monotonic() + NOTICE_S)
            finally:
                self._send_lock.release()

    def _read_all(self) -> str:
        """Take all messages of a connection; return why it has ended."""
        try:
            while (body := self._read_body()) is not None:
                self._take(unpack_to_member(body))
        except ProtocolError as error:
            return str(error)
        except OSError as error:
            return f"the connection broke: {error.strerror or error}"
        return self._write_failure or "it closed the connection: it ended or was killed"

    # ---- another scheduler ----

    def _may_come_back(self) -> bool:
        """Return whether another scheduler follows that may need this member; then await it."""
        has_joined = self._job is not None or self._start_sent is not None
        is_over = self._has_left or self._over is not None or self._first_lost is not None
        with self._lock:
            if not (self._term and has_joined) or is_over or self._is_closed or self._cause:
                return False
            self._is_here.clear()
        return True

    def _come_back(self) -> None:
        """Come back to the scheduler that takes over; blocks. Raises FastPSError, OSError."""
        log.info("the scheduler died; this process comes back to the one that takes over")
        self._stop_pulse()
        self._write_failure = ""
        self._reached_at = time.monotonic()
        while True:
            try:
                answer = self._report()
                if self._leave_request not in self._pending:
                    self._return_pulse(answer)
                break
            except (_Gone, AuthError, ProtocolError, OSError) as error:  # it may have died too
                log.info("the scheduler that takes over is not there: %s", error)
                if self._is_closed or time.monotonic() > self._reached_at + REDIAL_S:
                    raise
                if self._is_here.wait(AGAIN_S):  # closed meanwhile
                    raise
        self._answer_pending(answer)
        self._send_unsent()

    def _return_pulse(self, answer: Joined | Rejoined) -> None:
        try:
            self._start_pulse(answer, time.monotonic() + REDIAL_S)
        except FastPSError as error:
            raise _Gone(str(error)) from error

    def _report(self) -> Joined | Rejoined:
        """Dial once, and report what this member is; return the answer."""
        until = time.monotonic() + REDIAL_S
        control = dial_control(self._config, self._token, deadline=until, awaits_machine=False)
        self._reached_at = time.monotonic()
        with self._send_lock:
            before, self._sock, self._frames = self._sock, control.sock, control.frames
            self._epoch += 1
        before.close()
        request = next(self._numbers)
        assert self._join_sent is not None
        join = replace(self._join_sent, request=request)
        message = join if self._job is None else self._journal.rejoin(
            request, join, self._job, term=self._term, leaves=self._leave_request in self._pending
        )  # fmt: skip
        control.sock.settimeout(None)
        until = time.monotonic() + self._config.lease_s + REDIAL_S + 2 * GRACE_S
        sockets.write_all(
            self._sock, self._frames.seal(pack_to_scheduler(message)), deadline=until
        )
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while poll.poll(max(until - time.monotonic(), 0.0) * 1000):
            body = self._read_frame()
            if body is None:
                raise _Gone("it closed the connection")
            found = unpack_to_member(body)
            if not isinstance(found, Answer) or found.request != request:
                self._take(found)
            elif isinstance(found, Joined | Rejoined):
                self._term = found.term
                for members, entries in found.committed if isinstance(found, Rejoined) else ():
                    self._take(ResultsCommitted(entries, members))
                return found
            else:
                raise failure_of(found) if isinstance(found, Failed) else ProtocolError(f"{found}")
        raise StallError("it did not answer")

    def _answer_pending(self, answer: Joined | Rejoined) -> None:
        """Answer the requests that the last scheduler took with it, or let them fail.

        A newcomer's wait for its first view goes on.
        """
        waits = self._start_sent if self._job is None else None
        with self._lock:
            left = dict(sorted(self._pending.items()))
            self._pending.clear()
            if waits is not None and waits.request in left:
                self._pending[waits.request] = left.pop(waits.request)
            else:
                waits = None
            self._is_here.set()
        if (leaving := left.pop(self._leave_request, None)) is not None:
            self._has_left = True
            leaving.set_result(Done(self._leave_request))
        if isinstance(answer, Rejoined):
            meetings = [one.asked for one in left.values() if one.asked is not None]
            for asked, known in self._journal.answered(meetings, answer.met):
                self._journal.note(asked, known)
                left.pop(asked.request).set_result(known)
        for future in left.values():
            future.set_exception(ViewChangedError(AWAY))
        if waits is not None:
            frame = pack_to_scheduler(waits)
            with contextlib.suppress(TimeoutError):  # then the scheduler is lost, or reads it late
                self._write(frame, time.monotonic() + NOTICE_S, self._epoch)

    def _watch_until_readable(self) -> None:
        """Call `watch` periodically until there is something to read."""
        look_s = min(self._config.stall_watch_s / LOOKS, MAX_LOOK_S)
        poll = select.poll()
        with contextlib.suppress(ValueError):  # closed meanwhile, as the next read shows
            poll.register(self._sock, select.POLLIN)
        while self._sock.fileno() >= 0 and not poll.poll(look_s * 1000):
            try:
                self.watch()
            except Exception:
                log.exception("the stall watch failed")

    def _read_body(self) -> bytes | None:
        if self._config.stall_watch_s:
            self._watch_until_readable()
        return self._read_frame()

    def _read_frame(self) -> bytes | None:
        prefix = sockets.read_blocking(self._sock, LENGTH.size)
        if not prefix:
            return None
        prefix = bytes(prefix)
        rest = sockets.read_blocking(self._sock, self._frames.rest_nbytes(prefix))
        return self._frames.open(prefix, bytes(rest)) if rest else None

    def _take(self, message: Answer | Event) -> None:
        self._is_silent = False
        if isinstance(message, Started):
            self._take_start(message)
        if isinstance(message, Answer):
            self._has_left = self._has_left or message.request == self._leave_request
            with self._lock:
                future = self._pending.pop(message.request, None)
            if future is not None:
                if future.asked is not None:
                    self._journal.note(future.asked, message)
                future.set_result(message)
            return
        if isinstance(message, Confirm):
            self._confirm(message)
            return
        if self._term:
            self._journal.take(message)
        if isinstance(message, PeerLost):
            if not message.goes_on or message.rank == self.job.me:
                self._note_lost(message)
        elif isinstance(message, ViewLost) and not message.survives:
            self._note_lost(message.lost)
        elif isinstance(message, JobOver):
            self._is_ending = True
            self._over = message
            self._decide()
        self._deliver(message)
        with self._news:
            self._news.notify_all()

    def _confirm(self, question: Confirm) -> None:
        """Find out in a thread whether another member answers, and send that."""

        def work() -> None:
            reached_ms = probe(question)
            with contextlib.suppress(FastPSError, OSError, ValueError):  # closed meanwhile
                self.send(Confirmed(question.suspect, reached_ms))

        threading.Thread(target=work, name="fastps:probe", daemon=True).start()

    def _deliver(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            log.exception("the handler of %s failed", type(event).__name__)

    def _note_lost(self, lost: PeerLost) -> None:
        """Keep the first cause; the scheduler itself fails the pending requests."""
        if self._first_lost is None:
            self._first_lost = lost
        self._decide()

    def _decide(self) -> None:
        with self._news:
            self._is_decided = True
            self._news.notify_all()

    def _scheduler_lost(self, cause: str) -> None:
        """End all waits, since no answer can come any more."""
        if self._is_ending:
            self._end(ShutdownError("the job is over or was left"))
            self._decide()
            return
        goes_on = self._config.goes_on and not self._config.num_validators
        lost = self._first_lost or PeerLost(
            "scheduler", 0, self.address, 0, cause, goes_on=goes_on
        )
        if not self._end(PeerLostError(str(lost))):
            return
        if self._first_lost is None:
            self._note_lost(lost)
            self._deliver(lost)

    def _end(self, cause: FastPSError) -> bool:
        """Fail all pending and later requests; return False if that was done before."""
        with self._lock:
            is_first = self._cause is None
            self._cause = self._cause or cause
            waiting = list(self._pending.values())
            self._pending.clear()
            self._is_here.set()
        for future in waiting:
            future.set_exception(type(cause)(str(cause)))
        return is_first

    # ---- fork ----

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_usable(self) -> None:
        if self._is_forked():
            raise NotInitializedError(
                "this process was forked from a member of the job and is not a member itself; "
                "call fastps.init() in the process that trains"
            )

    def _abandon(self) -> None:
        """Close this process's copies of the descriptors; the parent's connections stay open."""
        self._stop_pulse()
        self._probes.close()
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        self._frames.wipe()
        wipe(self._token, getattr(self, "keys", None))
        wipe_text(self._config.token)


def _ignore(event: Event) -> None:
    """Drop an event after close()."""


def _nothing() -> None:
    """Watch nothing."""
