# SPDX-License-Identifier: Apache-2.0
"""Parameters that servers hold and validators alone change; what workers push goes to these.

Decides what push and pull of a held name mean: a worker's push sends a block of an update to its
validator, number `rank % validator_size()`, over their own link; a validator's gives servers the
new value, or the change; a pull reads it. Threads: those of the session; of a process's held
parameters one thread pushes.
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
from fastps.worker.handle import Array, MappedHandle, Waitable

if TYPE_CHECKING:
    from fastps.session.session import Session

Among: TypeAlias = Literal["mean", "median"]
MAX_STAMP = (1 << 31) - 1  # a field of the frame header


class HeldParameters:
    """Parameters on servers, which validators change by what they accept of workers' updates."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        asynchronous: bool = False,
        prefix: str = "Held.",
        among: Among = "mean",
        compression: Choice = None,
    ) -> None:
        """Let servers hold validator 0's parameters, and take them over here; blocks.

        parameters: C-contiguous arrays by name, the same on all workers and validators; written,
        now and by each pull(). asynchronous: what a validator pushes is added at once; otherwise
        what all validators push becomes the value: its mean, or with among="median" its median,
        so that fewer than half of them cannot move it out of what the others say. compression:
        one of fastps.Compression for workers' updates, which are judged as they are decoded; each
        worker keeps its own error feedback, blocks below min_compress_bytes go as they are.
        prefix: another one for a second model. All workers and validators call it alike,
        MismatchError of those who differ from the validators else. ConfigError in a job without
        validators, or where nobody holds the values.
        """
        self._session = session = current()
        if not session.config.num_validators:
            raise ConfigError(
                "held parameters are what validators change, and this job has none: start some, "
                "`fastps-run -v 1`, or see fastps.ServerParameters"
            )
        if not isinstance(parameters, Mapping):
            raise TypeError(f"parameters are arrays by name, {{'w': w}}, not {type(parameters)}")
        self.is_asynchronous = asynchronous
        self._policy = _policy_of(among, is_added=asynchronous)
        self.arrays = list(parameters.values())
        self.names = tuple(prefix + name for name in parameters)
        self.stamp = 0
        self.round = 0  # of the last update that was pushed here
        self._compression = compression
        self.codes = self.codes_of(session.rank)  # of this worker's updates
        self._ticks = [
            f"{prefix}judged of worker {rank}"
            for rank in range(session.size if asynchronous else 0)
        ]  # count in their stamps what was judged of each worker's
        self._telling: MappedHandle[Any] | None = None
        self._asking: Waitable | None = None
        self._pushed = 0  # updates, and what had been judged of this worker's before
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
        counts = [np.zeros(1) for _ in self._ticks]
        staleness = ANY_STALENESS if self.is_asynchronous else 0
        declare = functools.partial(
            session.declare, policy=self._policy, staleness=staleness, givers=Givers.VALIDATORS
        )
        declare(specs, updates=self._compression)
        if self._ticks:
            declare([(name, (1,), DType.FLOAT64) for name in self._ticks])
        taken = {one.channel for one, _ in session.held.values()}
        self.channel: int = 1 + max(taken, default=0)  # the same everywhere
        for place, name in enumerate(self.names):
            session.held[name] = (self, place)
        names, arrays = [*self.names, *self._ticks], [*self.arrays, *counts]
        session.start_held("start_broadcast", names, arrays, root=session.size, machine=0).wait()
        if self._ticks and session.rank < session.size:
            self._pushed = self._wait_judged(0)

    def codes_of(self, worker: int) -> Codes:
        """Make what encodes a worker's updates, or decodes them."""
        least = self._session.config.min_compress_bytes
        return Codes(self._compression, self.names, self.arrays, worker, min_bytes=least)

    # ---- reading ----

    def pull_async(self, *, stamp: int = 0, priority: int = 0) -> MappedHandle[int]:
        """Start pull() and give a handle for synchronize()."""
        handle = start_pull(self._session, self.arrays, self.names, stamp, priority)
        return MappedHandle([handle], lambda _: self._note_stamp())

    def pull(self, *, stamp: int = 0, priority: int = 0, unjudged: int | None = None) -> int:
        """Write what servers hold over the arrays here, and give how many changes it has seen.

        stamp: wait until it has seen so many: rounds, or changes that were added. unjudged: of an
        asynchronous worker, wait until no more than so many of its own updates are still to be
        judged; what has been is in the value. It waits for no other worker. Blocks to
        op_timeout_s; StallError then. ValueError for unjudged= elsewhere.
        """
        if unjudged is not None:
            if not self._ticks or self._session.rank >= self._session.size:
                raise ValueError("unjudged= is for workers whose updates are judged one by one")
            self._wait_judged(max(self._pushed - operator.index(unjudged), 0))
        return self.pull_async(stamp=stamp, priority=priority).wait()

    def _wait_judged(self, count: int) -> int:
        """Wait until so many of our updates have been judged, and give how many have been."""
        session, tick, judged = self._session, [self._ticks[self._session.rank]], -1
        while judged < count:
            if self._asking is None:
                self._asking = start_pull(session, [np.empty(1)], tick, count, 0)
            try:
                self._asking.wait()
            except StallError as error:  # it stays under way, and is waited for the next time
                judge = session.rank % session.config.num_validators
                raise StallError(
                    f"validator {judge} has not judged {count} updates of worker {session.rank} "
                    f"in time, which waits for that: does it go on calling judge()? ({error})"
                ) from error
            self._asking, judged = None, session.stamp_of(tick)
        return judged

    def _note_stamp(self) -> int:
        self.stamp = self._session.stamp_of(self.names)
        return self.stamp

    def tell_judged(self, worker: int) -> None:
        """Let a worker know that one more of its updates was judged; a validator's.

        What was made of it is with the servers before.
        """
        self.finish_telling()
        tick = [self._ticks[worker]]
        self._telling = MappedHandle(
            [self._session.push_pull_async([np.ones(1)], tick, average=False)], lambda _: None
        )

    def finish_telling(self) -> None:
        """Wait until servers know what tell_judged() said last."""
        if self._telling is not None:
            self._telling.wait()

    # ---- a worker's updates ----

    def push_async(
        self, updates: Sequence[Array | None], *, round: int | None = None, priority: int = 0
    ) -> MappedHandle[int]:
        """Start push() and give a handle for synchronize()."""
        if len(updates) != len(self.names):
            raise ValueError(f"{len(self.names)} parameters need as many updates")
        number = self.next_round() if round is None else operator.index(round)
        flights = [
            flight
            for place, update in enumerate(updates)
            for flight in self.start_push(place, update, number, priority)
        ]
        return MappedHandle(flights, lambda _: number)

    def push(
        self, updates: Sequence[Array | None], *, round: int | None = None, priority: int = 0
    ) -> int:
        """Send an update to our validator, or what validators have made to servers; blocks.

        updates: one array per parameter in their order, read; of a worker None skips one, and
        nothing but that travels. round: rising; None: the one after the value that was pulled
        last, or, asynchronously, after the last push. It is given back. priority: as of
        fastps.push(). Returns when the arrays may be changed again. ValueError for other shapes
        than declared.
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
            raise ValueError(f"tensor {name!r}: rounds count from 1, and {number} is none")
        self._pushed += number > self.round
        self.round = max(self.round, number)
        session = self._session
        if session.rank < session.size:
            return self._send(place, update, number, priority)
        if update is None:
            raise ValueError(f"tensor {name!r}: a validator skips nothing")
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
        notice = UpdateHeader(session.rank, number, self.stamp, place, update is None, nbytes)
        judge = session.size + session.rank % session.config.num_validators
        group = session.groups.pair(judge)
        send = functools.partial(group.send, target=1, tag=self.channel, priority=priority)
        flights = [send(np.frombuffer(notice.pack(), np.uint8))]
        if wire is not None and nbytes:
            flights.append(send(wire))
        return flights


def _policy_of(among: Among, *, is_added: bool) -> Policy:
    if among not in get_args(Among):
        raise ValueError(f'among={among!r} is "mean" or "median"')
    if not is_added:
        return Policy.ACCEPTED if among == "mean" else Policy.COMBINED
    if among != "mean":
        raise ValueError("what is added at once has no median: among= is for rounds")
    return Policy.ACCUMULATE


def start_pull(
    session: Session, outputs: Sequence[Array], names: Sequence[str], stamp: int, priority: int
) -> Waitable:
    """Start to read held values into arrays."""
    if not 0 <= operator.index(stamp) <= MAX_STAMP:
        raise ValueError(f"stamp {stamp} is not 0 to {MAX_STAMP}")
    return session.start_held(
        "start_pull", list(names), list(outputs), stamp=stamp, priority=priority
    )


def role() -> str:
    """Return what this process is: "worker" or "validator"."""
    session = known()
    return "worker" if session.rank < session.size else "validator"


def validator_rank() -> int:
    """Return the number of this validator, 0 to validator_size() - 1; ConfigError of a worker."""
    session = known()
    if session.rank < session.size:
        raise ConfigError(f"this is worker {session.rank}, and no validator: ask role() first")
    return session.rank - session.size


def validator_size() -> int:
    """Return the number of validators; 0 where workers are believed."""
    return known().config.num_validators


def _found(name: str) -> tuple[HeldParameters, int]:
    held: tuple[HeldParameters, int] | None = current().held.get(name)
    if held is None:
        raise ConfigError(f"tensor {name!r} is not held: HeldParameters() declares it")
    return held


def push_async(
    tensor: Array | Sequence[Array | None] | None, name: Names, *, round: int, priority: int = 0
) -> MappedHandle[None]:
    """Start push() and give a handle for synchronize()."""
    names = (name,) if isinstance(name, str) else name
    given = [tensor] if isinstance(name, str) else list(tensor or ())
    if len(names) != len(given):
        raise ValueError("a sequence of names needs a sequence of as many arrays")
    flights: list[Waitable] = []
    for label, one in zip(names, given, strict=True):
        held, place = _found(label)
        flights += held.start_push(place, one, round, priority)  # type: ignore[arg-type]
    return MappedHandle(flights, lambda _: None)


def push(
    tensor: Array | Sequence[Array | None] | None, name: Names, *, round: int, priority: int = 0
) -> None:
    """Push blocks of held parameters, by name; blocks until the arrays may be changed again.

    Of a worker: sends them to its validator, as part of the update of this round; None says that
    a block is skipped, and an update is complete when all names of its HeldParameters have come.
    Of a validator: what is to become the value, or is added to it. round: rising from 1.
    priority: what has a larger one goes first; of a worker that is between its models, for the
    blocks of one go in the order of its pushes and are judged together.
    """
    push_async(tensor, name, round=round, priority=priority).wait()


def pull_async(
    out: Arrays, name: Names, *, stamp: int = 0, priority: int = 0
) -> MappedHandle[int]:
    """Start pull() and give a handle for synchronize()."""
    session = current()
    names, arrays = pair(name, out)
    for label, array in zip(names, arrays, strict=True):
        held, place = _found(label)
        check_arrays(label, held.arrays[place], array, None, average=False)
    handle = start_pull(session, arrays, names, stamp, priority)
    return MappedHandle([handle], lambda _: session.stamp_of(names))


def pull(out: Arrays, name: Names, *, stamp: int = 0, priority: int = 0) -> int:
    """Read held parameters by name into arrays; blocks, and gives how many changes they have seen.

    stamp: wait for so many of each.
    """
    return pull_async(out, name, stamp=stamp, priority=priority).wait()
