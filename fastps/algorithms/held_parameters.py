# SPDX-License-Identifier: Apache-2.0
"""Parameters that servers hold and only validators change; workers push updates to validators.

Implements push and pull of held names. A worker's push sends a block of an update to its
validator, number `rank % validator_size()`, over their own link. A validator's push sends servers
the new value, or the change. A pull reads the value. Threads: those of the session; one thread
pushes the held parameters of a process.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from fastps.byzantine.update_codecs import Codes
from fastps.byzantine.updates import UpdateHeader
from fastps.contract.compression import Choice
from fastps.contract.contract import ANY_STALENESS, Givers, Policy
from fastps.errors import ConfigError, StallError
from fastps.session.current import current, known
from fastps.session.tensor_spec import Arrays, Names, check_arrays, pair
from fastps.types import DType, ReduceOp, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle, Waitable

if TYPE_CHECKING:
    from fastps.session.session import Session

Among: TypeAlias = Literal["mean", "median"]
MAX_STAMP = (1 << 31) - 1  # a field of the frame header


class HeldParameters:
    """Parameters on servers, which validators change by the updates that they accept."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        asynchronous: bool = False,
        prefix: str = "Held.",
        among: Among = "mean",
        compression: Choice = None,
    ) -> None:
        """Make servers hold validator 0's parameters, and take them over here; blocks.

        parameters: C-contiguous arrays by name, the same on all workers and validators; written,
        now and by each pull(). asynchronous: a validator's push is added at once. Otherwise the
        value becomes the mean of all validators' pushes, or with among="median" the median, so
        that fewer than half of them cannot move it beyond the others' values. compression: one of
        fastps.Compression for workers' updates, which are judged as they are decoded. Each worker
        keeps its own error feedback, and blocks below min_compress_bytes are sent as they are.
        prefix: a second model needs another one. All workers and validators call it with the same
        options, else members that differ from the validators raise MismatchError. ConfigError in
        a job without validators, or without servers.
        """
        self._session = session = current()
        if not session.config.num_validators:
            raise ConfigError(
                "HeldParameters needs validators, and this job has none: start some with "
                "`fastps-run -v 1`, or use fastps.ServerParameters"
            )
        if not isinstance(parameters, Mapping):
            raise TypeError(
                "parameters must be a mapping of names to arrays, {'w': w}, not "
                f"{type(parameters).__name__}"
            )
        self.is_asynchronous = asynchronous
        self._policy = _policy_of(among, is_added=asynchronous)
        self.arrays = list(parameters.values())
        self.names = tuple(prefix + name for name in parameters)
        self.stamp = 0
        self.round = 0  # of the last push
        self._compression = compression
        self.codes = self.codes_of(session.rank)  # of this worker's updates
        self._counters = [
            f"{prefix}judged of worker {rank}"
            for rank in range(session.size if asynchronous else 0)
        ]  # whose stamps count the judged updates of each worker
        self._counting: Handle[Any] | None = None  # push to a counter
        self._reading: Waitable | None = None  # pull of this worker's counter
        self._pushed = 0  # updates, plus those that were judged before
        self._begin()

    def _begin(self) -> None:
        session = self._session
        for name, array in zip(self.names, self.arrays, strict=True):
            check_arrays(name, array, array, None, average=False)
        specs = [
            (name, array.shape, dtype_of(array.dtype))
            for name, array in zip(self.names, self.arrays, strict=True)
        ]
        if self._policy is Policy.COMBINED:
            for _, _, dtype in specs:
                ReduceOp.TRIMMED_MEAN.check(dtype)
        counts = [np.zeros(1) for _ in self._counters]
        staleness = ANY_STALENESS if self.is_asynchronous else 0
        declare = functools.partial(
            session.declare, policy=self._policy, staleness=staleness, givers=Givers.VALIDATORS
        )
        declare(specs, updates=self._compression)
        if self._counters:
            declare([(name, (1,), DType.FLOAT64) for name in self._counters])
        taken = {one.channel for one, _ in session.held.values()}
        self.channel: int = 1 + max(taken, default=0)  # the same on all members
        for place, name in enumerate(self.names):
            session.held[name] = (self, place)
        names, arrays = [*self.names, *self._counters], [*self.arrays, *counts]
        session.start_held("start_broadcast", names, arrays, root=session.size, machine=0).wait()
        if self._counters and session.rank < session.size:
            self._pushed = self._wait_judged(0)

    def codes_of(self, worker: int) -> Codes:
        """Return the codecs of a worker's updates."""
        least = self._session.config.min_compress_bytes
        return Codes(self._compression, self.names, self.arrays, worker, min_bytes=least)

    # ---- reading ----

    def pull_async(self, *, stamp: int = 0, priority: int = 0) -> Handle[int]:
        """Start pull() and return a handle for synchronize()."""
        handle = start_pull(self._session, self.arrays, self.names, stamp, priority)
        return MappedHandle([handle], lambda _: self._note_stamp())

    def pull(self, *, stamp: int = 0, priority: int = 0, unjudged: int | None = None) -> int:
        """Overwrite the arrays with the servers' values; return the stamp, their changes so far.

        stamp: wait until the stamp, of rounds or of added changes, is at least that. unjudged: for
        an asynchronous worker, wait until at most so many of its own updates are not judged yet;
        judged ones are in the values. Waits for no other worker. Blocks up to op_timeout_s, then
        StallError. ValueError for unjudged= on other members.
        """
        if unjudged is not None:
            if not self._counters or self._session.rank >= self._session.size:
                raise ValueError("unjudged= needs asynchronous=True, and is for workers only")
            self._wait_judged(max(self._pushed - operator.index(unjudged), 0))
        return self.pull_async(stamp=stamp, priority=priority).wait()

    def _wait_judged(self, count: int) -> int:
        """Wait until so many of this worker's updates are judged; return how many are."""
        session, counter, judged = self._session, [self._counters[self._session.rank]], -1
        while judged < count:
            if self._reading is None:
                self._reading = start_pull(session, [np.empty(1)], counter, count, 0)
            try:
                self._reading.wait()
            except StallError as error:  # the pull stays in flight, for the next wait
                judge = session.rank % session.config.num_validators
                raise StallError(
                    f"validator {judge} has not judged {count} updates of worker {session.rank} "
                    f"in time: check that it still calls judge() ({error})"
                ) from error
            self._reading, judged = None, session.stamp_of(counter)
        return judged

    def _note_stamp(self) -> int:
        self.stamp = self._session.stamp_of(self.names)
        return self.stamp

    def count_judged(self, worker: int) -> None:
        """Count one more judged update of a worker, on the servers; for validators.

        Call it when the servers have the result of that update.
        """
        self.finish_counting()
        counter = [self._counters[worker]]
        self._counting = MappedHandle(
            [self._session.push_pull_async([np.ones(1)], counter, average=False)], lambda _: None
        )

    def finish_counting(self) -> None:
        """Wait for the push of the last count_judged()."""
        if self._counting is not None:
            self._counting.wait()

    # ---- a worker's updates ----

    def push_async(
        self, updates: Sequence[Array | None], *, round: int | None = None, priority: int = 0
    ) -> Handle[int]:
        """Start push() and return a handle for synchronize()."""
        if len(updates) != len(self.names):
            raise ValueError(
                f"{len(self.names)} parameters need as many updates, got {len(updates)}"
            )
        number = self.next_round() if round is None else operator.index(round)
        handles = [
            handle
            for place, update in enumerate(updates)
            for handle in self.start_push(place, update, number, priority)
        ]
        return MappedHandle(handles, lambda _: number)

    def push(
        self, updates: Sequence[Array | None], *, round: int | None = None, priority: int = 0
    ) -> int:
        """Send an update to this worker's validator, or a validator's values to servers; blocks.

        updates: one array per parameter in their order, read; a worker may pass None to skip one,
        and then only that is sent. round: rising; None: the one after the last pulled value, or,
        asynchronously, after the last push. priority: as of fastps.push(). Returns the round, when
        the arrays may be changed again. ValueError for other shapes than declared.
        """
        return self.push_async(updates, round=round, priority=priority).wait()

    def next_round(self) -> int:
        """Return the round of the next push."""
        return self.round + 1 if self.is_asynchronous else self.stamp + 1

    def start_push(
        self, place: int, update: Array | None, number: int, priority: int
    ) -> Sequence[Waitable]:
        """Start to push one block."""
        name, like = self.names[place], self.arrays[place]
        if update is not None:
            check_arrays(name, like, update, None, average=False)
        if number < 1:
            raise ValueError(f"tensor {name!r}: round must be >= 1, got {number}")
        self._pushed += number > self.round
        self.round = max(self.round, number)
        session = self._session
        if session.rank < session.size:
            return self._send(place, update, number, priority)
        if update is None:
            raise ValueError(
                f"tensor {name!r}: a validator must push an array, not None; zeros change nothing"
            )
        handle = session.push_pull_async(
            [update], [name], average=False, out=[like], priority=priority
        )
        return [MappedHandle([handle], lambda _: self._note_stamp())]

    def _send(
        self, place: int, update: Array | None, number: int, priority: int
    ) -> Sequence[Waitable]:
        session = self._session
        wire = None if update is None else self.codes.encode(place, update, number)
        nbytes = 0 if wire is None else wire.nbytes
        header = UpdateHeader(session.rank, number, self.stamp, place, update is None, nbytes)
        judge = session.size + session.rank % session.config.num_validators
        group = session.groups.pair(judge)
        send = functools.partial(group.send, target=1, tag=self.channel, priority=priority)
        handles = [send(np.frombuffer(header.pack(), np.uint8))]
        if wire is not None and nbytes:
            handles.append(send(wire))
        return handles


def _policy_of(among: Among, *, is_added: bool) -> Policy:
    if among not in get_args(Among):
        raise ValueError(f'among must be "mean" or "median", got {among!r}')
    if not is_added:
        return Policy.ACCEPTED if among == "mean" else Policy.COMBINED
    if among != "mean":
        raise ValueError(
            f"among={among!r} needs rounds, and asynchronous=True has none: leave one out"
        )
    return Policy.ACCUMULATE


def start_pull(
    session: Session, outputs: Sequence[Array], names: Sequence[str], stamp: int, priority: int
) -> Waitable:
    """Start to read held values into arrays."""
    if not 0 <= operator.index(stamp) <= MAX_STAMP:
        raise ValueError(f"stamp must be from 0 to {MAX_STAMP}, got {stamp}")
    return session.start_held(
        "start_pull", list(names), list(outputs), stamp=stamp, priority=priority
    )


def role() -> str:
    """Return this process's role: "worker" or "validator"."""
    session = known()
    return "worker" if session.rank < session.size else "validator"


def validator_rank() -> int:
    """Return the number of this validator, 0 to validator_size() - 1; ConfigError of a worker."""
    session = known()
    if session.rank < session.size:
        raise ConfigError(
            f"only validators have a validator_rank(); this process is worker {session.rank}: "
            "check role() first"
        )
    return session.rank - session.size


def validator_size() -> int:
    """Return the number of validators; 0 in a job that trusts its workers."""
    return known().config.num_validators


def _found(name: str) -> tuple[HeldParameters, int]:
    held: tuple[HeldParameters, int] | None = current().held.get(name)
    if held is None:
        raise ConfigError(f"tensor {name!r} is not held: declare it by HeldParameters() first")
    return held


def push_async(
    tensor: Array | Sequence[Array | None] | None, name: Names, *, round: int, priority: int = 0
) -> Handle[None]:
    """Start push() and return a handle for synchronize()."""
    names = (name,) if isinstance(name, str) else name
    given = [tensor] if isinstance(name, str) else list(tensor or ())
    if len(names) != len(given):
        raise ValueError(f"{len(names)} names need as many arrays, got {len(given)}")
    handles: list[Waitable] = []
    for label, one in zip(names, given, strict=True):
        held, place = _found(label)
        handles += held.start_push(place, one, round, priority)  # type: ignore[arg-type]
    return MappedHandle(handles, lambda _: None)


def push(
    tensor: Array | Sequence[Array | None] | None, name: Names, *, round: int, priority: int = 0
) -> None:
    """Push blocks of held parameters, by name; blocks until the arrays may be changed again.

    A worker sends them to its validator, as part of the update of this round; None skips a block,
    and an update is complete when all names of its HeldParameters have been pushed. A validator
    sends the new value, or the change to add. round: rising from 1. priority: larger ones are sent
    first; a worker's priorities order its models, since the blocks of one model are sent in the
    order of pushes and judged together.
    """
    push_async(tensor, name, round=round, priority=priority).wait()


def pull_async(out: Arrays, name: Names, *, stamp: int = 0, priority: int = 0) -> Handle[int]:
    """Start pull() and return a handle for synchronize()."""
    session = current()
    names, arrays = pair(name, out)
    for label, array in zip(names, arrays, strict=True):
        held, place = _found(label)
        check_arrays(label, held.arrays[place], array, None, average=False)
    handle = start_pull(session, arrays, names, stamp, priority)
    return MappedHandle([handle], lambda _: session.stamp_of(names))


def pull(out: Arrays, name: Names, *, stamp: int = 0, priority: int = 0) -> int:
    """Read held parameters by name into arrays; return the number of changes so far. Blocks.

    stamp: wait for so many changes of each.
    """
    return pull_async(out, name, stamp=stamp, priority=priority).wait()
