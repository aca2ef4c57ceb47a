# SPDX-License-Identifier: Apache-2.0
"""The session: one worker's membership in a job, from init() to shutdown().

Owns the connections of one worker (connections.py) and what the user may do with them. A session
without them (one worker, no server) does everything locally. current.py holds the process's.
Public methods may be called from any thread; each tensor name has at most one operation in
flight.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastps.byzantine import rules
from fastps.collectives._calls import invalidate_call_cache
from fastps.collectives.objects import decode_of, encode_for_all
from fastps.config import Config
from fastps.contract.compression import Choice, coding_of
from fastps.contract.contract import Givers, Policy
from fastps.contract.rule import SUMMED, Rule
from fastps.contract.rule import Choice as RuleChoice
from fastps.control.blame import VERDICT_WAIT_S, Failure, Witness
from fastps.control.protocol import (
    MAX_BLOB_BYTES,
    Done,
    Event,
    JobOver,
    Layout,
    Locate,
    Parts,
    PeerLeft,
    PeerLost,
    TensorPoisoned,
    TensorSpec,
    Told,
)
from fastps.errors import (
    ConfigError,
    FastPSError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutdownError,
    Status,
)
from fastps.session import fork, single_worker
from fastps.session.differences import Differences
from fastps.session.drift import Drift
from fastps.session.forget import ForgetMixin
from fastps.session.host import StartedTensor
from fastps.session.join import AVERAGE, JoinState
from fastps.session.routes import RouteChecker
from fastps.session.stall_watch import StallWatch, dispute
from fastps.session.steps import Steps
from fastps.session.tensor_spec import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    Arrays,
    Names,
    check_arrays,
    check_taking_part,
    checked_priorities,
    checked_shape,
    describe,
    make_layout,
    outputs_of,
    pair,
)
from fastps.transport.tcp import LOCAL_CHUNK_BYTES
from fastps.types import DType, checked_seconds, dtype_of, numpy_dtype
from fastps.worker.handle import Array, OperationHandle, Waiting

if TYPE_CHECKING:
    from fastps.control.client import ControlClient, PendingReply
    from fastps.session.connections import Connections
    from fastps.session.groups import Groups
    from fastps.session.view import View
    from fastps.worker._plan import PlannedTensor, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")

SUM = -1  # what a handle's operation was, or AVERAGE, or the rank of a broadcast's root
_OPERATIONS = {SUM: "a sum", AVERAGE: "an average"}
_ENDINGS = (PeerLostError, ShutdownError)  # what an engine raises that has ended
RESULT_BYTES = 256 << 10  # of a sum from which on it lies in shared memory
SMALL_BYTES = 16 << 10  # of a result up to which a copy costs less than finding room for it there


class State(enum.Enum):
    """What a session is: read without a lock, changed under one."""

    OPEN = "open"
    SUSPENDED = "suspended"  # by the user, for a while
    CLOSING = "closing"  # and never open again
    CLOSED = "closed"
    FORKED = "forked"  # in a child: the parent's


_OPEN = State.OPEN  # looking it up takes longer than comparing it
_UNUSABLE: dict[State, tuple[type[FastPSError], str]] = {
    State.SUSPENDED: (FastPSError, "communication is suspended; call resume() first"),
    State.CLOSING: (ShutdownError, "shutdown() is ending this session: nothing can begin"),
    State.CLOSED: (
        ShutdownError,
        "shutdown() has ended this session; call fastps.init() and use only what is made then",
    ),
    State.FORKED: (
        NotInitializedError,
        "this process was forked from one that called fastps.init(); only the original "
        "may communicate. Call fastps.init() in the worker processes themselves",
    ),
}


class Session(ForgetMixin):
    """Membership of this process in a job; made by init().

    A session of one worker without servers is single: it has no connections, and `_client` is
    None from the start to the end.
    """

    is_elastic = False  # whether it goes on in a new view: then it is an ElasticSession
    # rank and size that a newcomer will have, until it has joined the job
    expected: tuple[int, int] | None = None
    joins = 0  # views that newcomers have joined

    def __init__(self, config: Config) -> None:
        """Join the job, connect to every server, wait for everybody; blocks to start_timeout_s."""
        self.state, self._state_lock = State.OPEN, threading.Lock()
        self.wait_seconds = [0.0]
        self._client: ControlClient | None = None
        self.n_forgotten = 0
        self.held: dict[str, Any] = {}  # by name: see algorithms/held_parameters.py
        self.extra_statistics: list[Callable[[], dict[str, float]]] = []  # what statistics() adds
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        fork.sessions.add(self)
        self._begin(config)
        if config.num_servers or config.n_programs > 1 or config.force_distributed:
            self._connect(config)

    def _connect(self, config: Config) -> None:
        """Join the job."""
        # imported here: a job of one worker needs neither links nor engines
        from fastps.session.connections import Connections  # noqa: PLC0415

        self._join(Connections(config, self._on_event))

    def _begin(self, config: Config) -> None:
        """Make what a session consists of beside its connections, and knows of other members."""
        self.config = config
        self._lock = threading.Lock()  # declarations; held while the scheduler answers
        self._tensors: dict[str, PlannedTensor] = {}
        self._witness = Witness()
        self.left, self.gone = self._witness.left, self._witness.gone  # as far as we know
        self._poisoned = self._witness.poisoned
        self._groups: Groups | None = None
        if not hasattr(self, "steps"):  # they go on in the next view of an elastic job
            self.steps = Steps(self)
        self.join_state = JoinState(self, self.steps)
        self.routes = RouteChecker(self, self.join_state)
        self.stalls = StallWatch(self, self.routes, self.steps)
        self.differences, self.drift = Differences(self), Drift(self, self.join_state)
        self._chunk_bytes = config.chunk_bytes or LOCAL_CHUNK_BYTES
        self._alone = single_worker.Tensors()

    def _join(self, connections: Connections) -> None:
        """Take the connections, and the place in the job that they have."""
        self.connections = connections
        self._client, self._engine = self.connections.client, self.connections.engine
        job = self.connections.job
        self.rank, self.size = job.me, job.n_workers
        self._witness.me = job.me
        self.local_rank, self.local_size = job.local_rank, job.local_size
        self._chunk_bytes = self.connections.chunk_bytes
        self.stalls.begin(self._client)
        self.connections.begin_status(self.statistics)

    # ---- declaring ----

    def declare(
        self,
        specs: Sequence[tuple[str, tuple[int, ...], DType]],
        *,
        policy: Policy = Policy.SUM,
        compression: Choice = None,
        updates: Choice = None,
        rule: RuleChoice = None,
        parts: Parts = (),
        **terms: Any,
    ) -> None:
        """Declare tensors by (name, shape, dtype) before their first use, all in one round trip.

        policy: of fastps.contract.contract. compression, rule: of fastps.push_pull(). updates: of
        what validators change, the compression of what is pushed to them. parts: name, dtype and
        shape of each thing that travels in these tensors, compared with the first. terms: others
        of tensor_spec.make_layout(). Declaring twice is allowed. Blocks until every server is
        ready for them. Raises MismatchError when another worker, or this one earlier, declared
        one differently; ConfigError when there is no server for the policy or the rule, or the
        rule is not possible.
        """
        self.check_usable()
        if policy != Policy.SUM and not (self._client and self.connections.owners):
            raise ConfigError(
                f"{policy.name} needs servers, and workers of one machine reduce in shared "
                "memory; start servers (fastps-run -s 1) and set FASTPS_FORCE_DISTRIBUTED=1"
            )
        found = rules.rule_of(rule)
        wanted = [
            self._spec(
                name, checked_shape(name, shape), DType(code), policy=policy,
                coding=coding_of(compression, name), updates=coding_of(updates, name), rule=found,
                parts=() if place else parts, **terms,
            )
            for place, (name, shape, code) in enumerate(specs)
        ]  # fmt: skip
        self._declare_specs(wanted)

    def _spec(self, name: str, shape: tuple[int, ...], dtype: DType, **terms: Any) -> TensorSpec:
        is_sent = self._client is not None and bool(self.connections.owners)
        layout = make_layout(
            self.config,
            self._chunk_bytes,
            name,
            shape,
            dtype,
            is_sent=is_sent,
            n=self.size,
            **terms,
        )
        return TensorSpec(name, layout)

    def _declare_specs(self, wanted: Sequence[TensorSpec]) -> None:
        if self._client is None:
            self._alone.declare(wanted)
            return
        if wanted and (first := wanted[0].layout).givers is Givers.WORKERS:
            above = self.rank - self.size
            check_taking_part(wanted[0].name, above, self.config, first.policy)
        with self._lock:
            # a known name with another shape goes to the scheduler too, so that all hear of it
            fresh = [spec for spec in wanted if self._layout_of(spec.name) != spec.layout]
            if not fresh:
                return
            answers = self._client.declare(fresh, timeout_s=self.config.op_timeout_s)
            self.check_usable()
            for spec, answer in zip(fresh, answers, strict=True):
                tensor = self.connections.make_tensor(spec, answer)
                self._tensors[spec.name] = tensor

    def declare_as(self, spec: TensorSpec) -> None:
        """Declare a tensor just as another worker did. Blocks, and raises, as declare() does."""
        self.check_usable()
        self._declare_specs([spec])

    def _layout_of(self, name: str) -> Layout | None:
        """Return what a name was declared as; None: it is new."""
        tensor = self._tensors.get(name)
        return self._alone.layouts.get(name) if tensor is None else tensor.layout

    def _rule_of(self, name: str) -> Rule:
        layout = self._layout_of(name)
        return SUMMED if layout is None else layout.rule

    def is_free_for(
        self, name: str, shape: tuple[int, ...], dtype: DType, parts: Parts | None = None
    ) -> bool:
        """Return whether servers, if any, can take a name: it is not declared for something else.

        parts: of declare(); None: any. MismatchError for one about which workers disagreed.
        """
        self.routes.check(name)
        if self._poisoned:
            self._check_poison((name,))
        known = self._layout_of(name)
        if self.config.goes_on:
            return False
        return known is None or (
            known.shape == shape and known.dtype == dtype and parts in (None, known.parts)
        )

    def _declare_new(
        self, names: Sequence[str], arrays: Sequence[Array], dtype: DType | None
    ) -> None:
        """Declare what is new or has changed; all else stays what it was declared as."""
        wanted = []
        alike: dict[tuple[tuple[int, ...], DType], Layout] = {}  # of many names few differ
        for name, array in zip(names, arrays, strict=True):
            known = self._layout_of(name)
            code = dtype_of(array.dtype) if dtype is None else dtype
            if known is None or known.shape != array.shape or known.dtype != code:
                layout = alike.get((array.shape, code))
                if layout is None:
                    layout = self._spec(name, array.shape, code).layout
                    alike[array.shape, code] = layout
                wanted.append(TensorSpec(name, layout))
        if wanted:
            self._declare_specs(wanted)

    def _find(
        self, names: Sequence[str], arrays: Sequence[Array], dtype: DType | None
    ) -> list[PlannedTensor]:
        """Return the tensors of names, which are declared where they are new or have changed."""
        self._declare_new(names, arrays, dtype)
        if self._poisoned:
            self._check_poison(names)
        return self._known_tensors(names)

    def _known_tensors(self, names: Sequence[str]) -> list[PlannedTensor]:
        try:
            return [self._tensors[name] for name in names]
        except KeyError:
            self.check_usable()  # another thread may have closed us, and forgotten all
            raise

    def _agree(
        self,
        names: Sequence[str],
        arrays: Sequence[Array],
        dtype: DType | None,
        compression: Choice,
        learning_rate: float | None,
        rule: RuleChoice,
    ) -> None:
        """Declare tensors with their compression and rule, and tell them the learning rate."""
        codings, found = [coding_of(compression, name) for name in names], rules.rule_of(rule)
        wanted = [
            self._spec(name, array.shape, dtype or dtype_of(array.dtype), coding=it, rule=found)
            for name, array, it in zip(names, arrays, codings, strict=True)
            if it is not None or found is not None
        ]
        self._declare_specs(wanted)
        for name in names:
            if learning_rate is not None and name in self._tensors:
                self._tensors[name].follow(learning_rate)

    def _fitting(
        self, names: Sequence[str], arrays: Sequence[Array]
    ) -> list[PlannedTensor] | None:
        """Return the tensors of names if all arrays are what was declared; None: look closer."""
        found = []
        for name, array in zip(names, arrays, strict=True):
            known = self._tensors.get(name)
            if known is None or not known.fits(array):
                return None
            found.append(known)
        return None if self._poisoned else found

    def _check_poison(self, names: Sequence[str]) -> None:
        if poison := self._poison_of(names):
            raise MismatchError(poison)

    def _poison_of(self, names: Sequence[str]) -> str:
        """Return why one of these tensors cannot be used any more; empty: all can."""
        return next((self._poisoned[name].message for name in names if name in self._poisoned), "")

    def _submit(
        self, names: Sequence[str], start: Callable[..., T], *args: Any, **options: Any
    ) -> T:
        """Call the engine, and return what it does.

        Turns the bare error of a dead one into one that names the culprit.
        """
        try:
            begun = start(*args, **options)
        except _ENDINGS as error:
            raise self._ended(names[0] if names else "", error) from None
        if self._poisoned or self.join_state.is_on:
            self._note_started(names)
        return begun

    def _ended(self, name: str, error: PeerLostError | ShutdownError) -> FastPSError:
        is_loss = isinstance(error, PeerLostError)
        status = Status.PEER_LOST if is_loss else Status.SHUTDOWN
        return self._blame(self.connections.failure(name, status, said=str(error)))

    def _note_started(self, names: Sequence[str]) -> None:
        """Fail what was started in the moment between the last check and the bad news.

        And let those take part who have run out of data.
        """
        if self.join_state.is_on:
            self.join_state.tell(self.started(names))
        for name in names:
            if name in self._poisoned:
                self.poison(self._poisoned[name])

    # ---- operations ----

    def push_pull(
        self,
        tensor: Arrays,
        name: Names,
        *,
        average: bool = True,
        priority: int | Sequence[int] = 0,
        out: Arrays | None = None,
        compression: Choice = None,
        learning_rate: float | None = None,
        rule: RuleChoice = None,
    ) -> Array | list[Array]:
        """Sum tensor over all workers and give the result; see push_pull_async(). Blocks."""
        known = None
        if compression is None and learning_rate is None and rule is None:
            known = self._start_known(tensor, name, average, priority, out)
        if known is None:
            handle = self.push_pull_async(
                tensor, name, average=average, priority=priority, out=out,
                compression=compression, learning_rate=learning_rate, rule=rule,
            )  # fmt: skip
            return handle.wait()
        began = time.perf_counter()
        status = known.wait(timeout_s=self.config.op_timeout_s, spin_us=self.config.spin_us)
        self.wait_seconds[0] += time.perf_counter() - began
        assert isinstance(tensor, np.ndarray)
        if status == 0 and not (average and self.join_state.has_rounds):
            return tensor
        handle = self._handle([known], [tensor], _reduction(average), is_single=True)
        return handle.wait(0.0)  # raises, or corrects an average

    def _start_known(
        self,
        tensor: Arrays,
        name: Names,
        average: bool,
        priority: int | Sequence[int],
        output: Arrays | None,
    ) -> Ticket | None:
        """Start what needs no more checks than the engine's own; None: take the long way."""
        if output is not tensor or type(name) is not str or type(priority) is not int:
            return None
        known = self._tensors.get(name)
        if known is None or self._poisoned or self._client is None or not known.fits(tensor):
            return None
        if not average and self._rule_of(name).has_meaning():
            return None
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            return None
        self.check_usable()
        array: Any = tensor  # which fits() has seen
        try:
            begun = self._engine.start(known, array, array, average=average, priority=priority)
        except _ENDINGS as error:
            raise self._ended(name, error) from None
        if self._poisoned or self.join_state.is_on:
            self._note_started((name,))
        return begun

    def push_pull_async(
        self,
        tensor: Arrays,
        name: Names,
        *,
        average: bool = True,
        priority: int | Sequence[int] = 0,
        out: Arrays | None = None,
        dtype: DType | None = None,
        compression: Choice = None,
        learning_rate: float | None = None,
        rule: RuleChoice = None,
        contributes: bool = True,
    ) -> OperationHandle:
        """Start to sum tensor over all workers; a sequence of tensors travels as one submit.

        tensor: C-contiguous arrays, read; out: arrays of the same shape and dtype, written (None
        makes new ones, tensor itself works in place). name: the same on all workers, one
        operation in flight each. priority: larger leaves first. dtype: BFLOAT16 with uint16
        arrays. NaN and infinities pass through. compression, learning_rate, rule: of push_pull().
        contributes: False leaves this worker out of a round under a rule; the result is zeros if
        no worker contributes. Does not block, except to declare new names. Raises ValueError,
        TypeError, MismatchError, PeerLostError, DuplicateNameError.
        """
        known = None
        is_plain = compression is None and learning_rate is None and rule is None
        if dtype is None and is_plain and contributes:
            known = self._start_known(tensor, name, average, priority, out)
        if known is not None:
            assert isinstance(tensor, np.ndarray)
            return self._handle((known,), (tensor,), _reduction(average), is_single=True)
        self.check_usable()
        is_single = isinstance(name, str)
        names, arrays = pair(name, tensor)
        outputs = outputs_of(tensor, arrays, out, self.result_like, is_single=is_single)
        tensors = self._fitting(names, arrays) if out is tensor and dtype is None else None
        if tensors is None:
            for label, array, output in zip(names, arrays, outputs, strict=True):
                check_arrays(label, array, output, dtype, average=average)
        priorities = checked_priorities(priority, len(names))
        found = rules.rule_of(rule)
        for label in () if average else names:
            rules.check_sum(label, found or self._rule_of(label))
        if self._client is None and not contributes:
            arrays = [np.zeros_like(array) for array in arrays]
        if not is_plain:
            self._agree(names, arrays, dtype, compression, learning_rate, rule)
        if self._client is None:
            alone = self._start_alone(names, arrays, dtype)
            self._alone.finish(names, arrays, outputs)
            return self._handle(alone, outputs, SUM, is_single=is_single)
        if tensors is None:
            tensors = self._find(names, arrays, dtype)
        if is_single and contributes:
            ticket = self._submit(
                names, self._engine.start, tensors[0], arrays[0], outputs[0], average=average,
                priority=priorities[0],
            )  # fmt: skip
            return self._handle([ticket], outputs, _reduction(average), is_single=True)
        how: dict[str, Any] = {
            "average": average,
            "contributes": contributes,
            "priorities": priorities,
        }
        tickets = self._submit(names, self._engine.start_many, tensors, arrays, outputs, **how)
        return self._handle(tickets, outputs, _reduction(average), is_single=is_single)

    def broadcast_async(
        self, tensor: Arrays, root_rank: int, name: Names, *, dtype: DType | None = None
    ) -> OperationHandle:
        """Start to copy the root's tensor into everybody's, in place; sequences as one submit."""
        self.check_usable()
        root_rank = self._checked_root(root_rank)
        is_single = isinstance(name, str)
        names, arrays = pair(name, tensor)
        for label, array in zip(names, arrays, strict=True):
            check_arrays(label, array, array, dtype, average=False)
        if self._client is None:
            alone = self._start_alone(names, arrays, dtype)
            return self._handle(alone, arrays, SUM, is_single=is_single)
        tensors = self._find(names, arrays, dtype)
        tickets = self._submit(
            names, self._engine.start_broadcast, tensors, arrays, root=root_rank,
            machine=self.connections.machine_of(root_rank),
        )  # fmt: skip
        return self._handle(tickets, arrays, root_rank, is_single=is_single)

    def start_held(
        self, verb: str, names: Sequence[str], arrays: Sequence[Array], **options: Any
    ) -> OperationHandle:
        """Start what an engine does with values that servers hold: start_pull, start_broadcast."""
        self.check_usable()
        tensors = self._known_tensors(names)
        start: Callable[..., list[Ticket]] = getattr(self._engine, verb)
        tickets = self._submit(names, start, tensors, arrays, **options)
        return self._handle(tickets, arrays, options.get("root", SUM), is_single=False)

    def stamp_of(self, names: Sequence[str]) -> int:
        """Count the changes that all values which came last have seen; see HeldParameters."""
        return min((self._tensors[name].stamp for name in names), default=0)

    def _start_alone(
        self, names: Sequence[str], arrays: Sequence[Array], dtype: DType | None
    ) -> list[single_worker.SingleTicket]:
        self._declare_new(names, arrays, dtype)
        return self._alone.begin(names)

    @functools.cached_property
    def _waiting(self) -> Waiting:
        """What all handles have in common; close() drops it, for it refers to the session."""
        config = self.config
        return Waiting(
            self._explain, config.op_timeout_s, config.spin_us, self.wait_seconds,
            self.join_state.lack,
        )  # fmt: skip

    def _handle(
        self, tickets: Sequence[Ticket | single_worker.SingleTicket], outputs: Sequence[Array],
        operation: int, *, is_single: bool,
    ) -> OperationHandle:  # fmt: skip
        return OperationHandle(
            tickets, outputs, self._waiting, is_single=is_single, operation=operation,
            is_average=operation == AVERAGE and self._client is not None,
        )  # fmt: skip

    def call_in_views(self, call: Callable[[View], object]) -> None:
        """Have a function called with each next view; a session that is not elastic has none."""

    def acknowledge_view(self) -> None:
        """Note that the program knows of the present view; only an elastic session has others."""

    # ---- groups ----

    @property
    def groups(self) -> Groups:
        """The groups of this session, made at their first use."""
        if self._groups is None:
            self._groups = self._groups_kind()(
                self, self.join_state, self.routes, self.stalls, self.differences
            )
        return self._groups

    def _groups_kind(self) -> type[Groups]:
        from fastps.session.groups import Groups  # noqa: PLC0415  (most jobs need none)

        return Groups

    @property
    def known_groups(self) -> Groups | None:
        """The groups, if there was a use for them."""
        return self._groups

    # ---- workers that have called join() ----

    def started(self, names: Sequence[str] | None = None) -> list[StartedTensor]:
        """Return what was started last on tensors; None: of all, what is in flight."""
        found = []
        for name in list(self._tensors) if names is None else names:
            tensor = self._tensors.get(name)
            if tensor is not None and (names or tensor.is_in_flight):
                found.append(StartedTensor(tensor, tensor.layout))
        return found

    def version_of(self, name: str) -> int:
        """Count the operations started on a tensor."""
        tensor = self._tensors.get(name)
        return 0 if tensor is None else tensor.version

    def versions(self) -> dict[str, int]:
        """Count the operations started on each tensor."""
        return {name: tensor.version for name, tensor in list(self._tensors.items())}

    def tell(self, members: Sequence[int], data: bytes, **how: bool) -> None:
        """Let workers hear data, all in one order; how: of ControlClient.tell()."""
        assert self._client is not None
        self._client.tell(members, data, **how)

    # ---- memory ----

    @property
    def can_share(self) -> bool:
        """Return whether arrays of empty() lie in memory that other workers reach."""
        is_joined = self._client is not None and not self.is_over
        return is_joined and self.connections.arena is not None

    def empty(self, shape: tuple[int, ...], dtype: DType | np.dtype[Any]) -> Array:
        """Return an uninitialised array, in shared memory where can_share; see fastps.empty()."""
        self.check_usable()
        kind = numpy_dtype(dtype) if isinstance(dtype, DType) else np.dtype(dtype)
        count = math.prod(shape)
        if self._client is None or self.connections.arena is None or not count:
            return np.empty(shape, kind)
        block, _ = self.connections.arena.allocate(count * kind.itemsize)
        flat: Array = np.frombuffer(block, kind, count)  # type: ignore[call-overload]
        return flat.reshape(shape)

    def result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array for a result, a large one in shared memory where there is some."""
        if math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
            return np.empty(shape, dtype)
        try:
            return self.empty(shape, dtype)
        except MemoryError:
            return np.empty(shape, dtype)

    def result_like(self, array: Array) -> Array:
        """Return where a sum goes: a large one gains by memory that others write."""
        make = self.result if array.nbytes > RESULT_BYTES else np.empty
        return make(array.shape, array.dtype)

    def is_shared(self, array: Array) -> bool:
        """Return whether an array lies in one piece in memory that other workers reach."""
        arena = self.connections.arena if self._client and not self.is_over else None
        is_inside = arena is not None and arena.holds(array.ctypes.data, array.nbytes)
        return is_inside and bool(array.flags.c_contiguous)

    def enter_barrier(
        self, name: str = "barrier", *, timeout_s: float | None = None
    ) -> PendingReply[Done] | None:
        """Start barrier(); None where nobody else is to come."""
        self.check_usable()
        timeout_s = self.config.op_timeout_s if timeout_s is None else checked_seconds(timeout_s)
        client = self._client
        return None if client is None else client.enter_barrier(name, timeout_s=timeout_s)

    def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Wait until every worker has come here; StallError names who is missing."""
        if (asked := self.enter_barrier(name, timeout_s=timeout_s)) is not None:
            asked.wait()

    def broadcast_object(self, obj: Any, root_rank: int = 0, name: str = "object") -> Any:
        """Return the root's object on all workers; blocks, and never unpickles anything.

        Carries what collectives/objects.py can, 64 MiB at most among several workers; raises
        TypeError on all for anything else.
        """
        self.check_usable()
        root_rank = self._checked_root(root_rank)
        most = MAX_BLOB_BYTES if self._client else math.inf
        data = encode_for_all(obj, most) if root_rank == self.rank else None
        if (client := self._client) is not None:
            data = client.blob(name, root_rank, data, timeout_s=self.config.op_timeout_s)
        return decode_of(root_rank, data or b"")

    def statistics(self) -> dict[str, float]:
        """Count operations, bytes, frames, system calls and seconds spent in wait()."""
        numbers = {"wait_seconds": self.wait_seconds[0], **self.steps.statistics()}
        if self._client is not None and not self.is_over:
            numbers |= self.connections.statistics()
        for tally in self.extra_statistics:
            numbers |= tally()
        return numbers

    # ---- failures ----

    def root_of(self, root_rank: int) -> Any:
        """Return which process a root is, for several broadcasts from it; takes its own results.

        In an elastic job that process keeps its place when ranks close up between them.
        """
        return self._checked_root(root_rank)

    def is_root(self, root: Any) -> bool:
        """Return whether this worker is a root by root_of()."""
        return bool(root == self.rank)

    def _checked_root(self, root_rank: int) -> int:
        if not 0 <= operator.index(root_rank) < self.size:
            raise ValueError(f"root_rank must be from 0 to {self.size - 1}, got {root_rank}")
        return operator.index(root_rank)

    def check_usable(self) -> None:
        """Raise ShutdownError once it is ending, NotInitializedError in a forked child.

        And FastPSError while it is suspended.
        """
        if self.state is not _OPEN:
            kind, text = _UNUSABLE[self.state]
            raise kind(text)

    @property
    def is_ours(self) -> bool:
        """Whether it was made in this process, not in the one that this was forked from."""
        return self.state is not State.FORKED

    @property
    def is_over(self) -> bool:
        """Whether it is ending or has ended."""
        return self.state in (State.CLOSING, State.CLOSED)

    @property
    def _scheduler(self) -> ControlClient | None:
        """Who can be asked about a failure; None: nobody, or nobody any more."""
        return None if self.is_over else self._client

    def suspend(self) -> None:
        """Let operations raise FastPSError until resume()."""
        self._become(State.SUSPENDED, State.OPEN)

    def resume(self) -> None:
        """Let operations go again; does nothing where they are not suspended."""
        self._become(State.OPEN, State.SUSPENDED)

    def _become(self, state: State, *before: State) -> bool:
        """Change the state if it is one of those; return whether it was."""
        with self._state_lock:
            if self.state not in before:
                return False
            self.state = state
            return True

    def _explain(
        self, ticket: Ticket, operation: int, status: int | None, timeout_s: float
    ) -> FastPSError:
        """Word the error of an operation that failed, or, if status is None, did not end."""
        if status is None:
            return self.stalls.error(self.stalls.pending_of(ticket), timeout_s)
        if status == Status.MISMATCH and ticket.name not in self._poisoned:
            started = _OPERATIONS.get(operation, f"a broadcast from worker {operation}")
            layout = ticket.tensor.layout
            started += f" of {describe(layout.dtype, layout.shape)}"
            error = dispute(self._scheduler, ticket.name, ticket.version, started)
            if ticket.name not in self._poisoned:  # who heard of that before us disputes nothing
                return error
        culprit = ticket.culprit
        return self._blame(self.connections.failure(ticket.name, status, culprit=culprit))

    def blame(
        self, name: str, status: int, *, said: str = "", culprit: int = -1,
        connections: Connections | None = None,
    ) -> FastPSError:  # fmt: skip
        """Word the error of a group's operation that failed; see Connections.failure().

        connections: on which it was; None: those of now.
        """
        found = connections or self.connections
        failure = found.failure(name, status, said=said, culprit=culprit)
        return self._blame(replace(failure, is_operation=True))

    def _blame(self, failure: Failure) -> FastPSError:
        """Tell the scheduler what was seen, and ask it who was lost first."""
        client = self._scheduler
        verdict = None
        if failure.is_loss and client is not None:
            with contextlib.suppress(FastPSError):
                is_heard = client.begin_probe()
                report = self._witness.report(failure)
                if report is not None:
                    client.report_lost(report.member, report.cause, is_owner=report.is_owner)
                verdict = client.verdict(
                    VERDICT_WAIT_S,
                    unless=lambda: bool(self._witness.departure(failure.owner, failure.culprit)),
                )
                if verdict is None and not is_heard():
                    failure = replace(failure, silent=client.address)
        return self._witness.error(failure, verdict)

    def poison(self, poison: TensorPoisoned) -> None:
        """Let nobody use a tensor any more, and fail what is in flight on it."""
        self._poisoned[poison.name] = poison
        if (tensor := self._tensors.get(poison.name)) is not None:
            self.connections.fail_tensor(tensor.tensor_id, Status.MISMATCH)

    def _on_event(self, event: Event) -> None:
        """Take news from the scheduler, on the control client's thread."""
        self._witness.on_event(event)
        if isinstance(event, PeerLeft):
            self.differences.lose(event.member)
        self.join_state.wake()
        if isinstance(event, TensorPoisoned):
            self.poison(event)
        elif isinstance(event, Told):
            heard = (self.routes, self.differences, self.drift)
            if not any(one.on_message(event) for one in heard):
                self.join_state.on_message(event)
        elif isinstance(event, Locate):
            self.stalls.answer(event)
        elif isinstance(event, PeerLost):
            log.info("%s", event)  # the scheduler warns of it, and operations raise it
            if event.role == "worker":
                self.differences.lose(event.rank)
            if not self.config.goes_on:
                self.join_state.end(Status.PEER_LOST)
        elif isinstance(event, JobOver):
            log.warning("the job is over: %s", event.reason)
            self.join_state.end(Status.SHUTDOWN)

    # ---- the end ----

    def close(self) -> None:
        """Leave the job in order and join every thread; idempotent. Blocks to shutdown_timeout_s.

        Operations still in flight fail with ShutdownError.
        """
        invalidate_call_cache()
        if not self._become(State.CLOSING, State.OPEN, State.SUSPENDED):
            return
        try:
            if self._groups is not None:
                self._groups.close()
            if self._client is not None:
                self.connections.close()
        finally:
            self._become(State.CLOSED, State.CLOSING)
            self._tensors.clear()  # they hold shared memory
            self.__dict__.pop("_waiting", None)
            fork.sessions.discard(self)

    def abandon(self) -> None:
        """Give up in a forked child: close the links' descriptors, so that our death is seen."""
        self.state = State.FORKED
        self.__dict__.pop("_waiting", None)
        if hasattr(self, "connections"):  # also while close() ends them
            self.connections.abandon()


def _reduction(average: bool) -> int:
    return AVERAGE if average else SUM
