# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: servers hold the parameters, workers push changes and get the new values.

Decides how parameters come to the servers (one broadcast of rank 0's) and how far the fastest
worker may run ahead; the servers count (server/_accumulate.pxi). With staleness s, the answer to a
worker's n-th push includes the first n - s pushes of all others: stale synchronous parallel (Ho et
al., NIPS 2013). Threads: those of the session.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np

from fastps.contract.compression import Choice
from fastps.contract.contract import ANY_STALENESS, PROMPT, Compensation, Policy
from fastps.errors import ConfigError
from fastps.session.current import check_not_elastic, current
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle

if TYPE_CHECKING:
    from fastps.algorithms.server_copies import ServerCopies
    from fastps.session.session import Session

# lambda, or a Compensation; "adaptive": lambda_0 = 2 and decay 0.95, of the paper's section 6.1
Compensating: TypeAlias = float | Literal["adaptive"] | Compensation
MOST_RATE = 1e30  # travels as a float32
ADAPTIVE = Compensation(2.0, is_adaptive=True, decay=0.95)


class ServerParameters:
    """Parameters that servers hold, and to which each worker adds changes at its own pace."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        *,
        staleness: float | None = None,
        prefix: str = "Async.",
        dtype: DType | None = None,
        delay_compensation: Compensating | None = None,
        compression: Choice = None,
    ) -> None:
        """Make the servers hold rank 0's parameters, and take them over here; blocks.

        parameters: C-contiguous arrays by name, the same on all workers; written, now and by each
        push(). staleness: how many pushes the fastest worker may be ahead of the slowest; with 0
        all go in lockstep, with None or infinity nobody waits. Workers of one machine that share
        memory add their changes first, in lockstep; with FASTPS_SHARED_MEMORY=0 each goes alone.
        prefix: a second model needs another one. dtype: BFLOAT16 with uint16 arrays.
        delay_compensation: lambda of DC-ASGD, or "adaptive", for changes that are -learning_rate
        times a gradient, float32 or float64; see docs/async.md. compression: of push_pull(), for
        changes and answers of float32 or float64, without a bound of staleness. Losses of an
        answer are made up by the next answer, and with error feedback those of a change by the
        next change. All workers must pass the same options, else MismatchError. An elastic job
        takes float32 and float64, without these options but prefix (ConfigError).
        ConfigError if there is no server; a single worker needs none.
        """
        self._prefix, self.bound = prefix, _bound_of(staleness)
        self.compensation = compensation_of(delay_compensation)
        self.arrays = list(parameters.values())
        self._given = list(parameters)
        self._names = [prefix + name for name in parameters]
        self._dtype = dtype
        self._home = current()
        self._copies: dict[str, Array] = {}  # of parameters that encoded answers update
        self._kept: ServerCopies | None = None  # in an elastic job: what survives a server
        if self._session.is_elastic:
            self._keep(compression)
        elif self._session.size > 1:
            self._seed(compression)

    @property
    def _session(self) -> Session:
        """Return the session that holds them; ShutdownError once that has ended."""
        self._home.check_usable()
        return self._home

    def _keep(self, compression: Choice) -> None:
        """Have servers hold values that all survivors go on with."""
        from fastps.algorithms.server_copies import ServerCopies  # noqa: PLC0415  (few jobs)

        if self.bound != ANY_STALENESS or self.compensation.strength or compression is not None:
            raise ConfigError(
                "an elastic job supports ServerParameters without a bound of staleness, delay "
                "compensation and compression only: leave staleness=, delay_compensation= and "
                "compression= out, or start the job without --min"
            )
        for name, array in zip(self._names, self.arrays, strict=True):
            code = self._dtype or dtype_of(array.dtype)
            if code not in (DType.FLOAT32, DType.FLOAT64):
                raise ConfigError(
                    f"tensor {name!r} is {code.name.lower()}, and in an elastic job "
                    "ServerParameters are float32 or float64: convert it, or start the job "
                    "without --min"
                )
        self._kept = ServerCopies(
            cast("Any", self._session), self._names, self.arrays, self._prefix
        )

    def _seed(self, compression: Choice) -> None:
        specs = [
            (name, array.shape, dtype_of(array.dtype) if self._dtype is None else self._dtype)
            for name, array in zip(self._names, self.arrays, strict=True)
        ]
        for name, _, code in specs:
            if self.compensation.strength and code not in (DType.FLOAT32, DType.FLOAT64):
                raise ConfigError(
                    f"tensor {name!r} is {code.name.lower()}, and delay_compensation supports "
                    "float32 and float64 only: leave it out, or hold the tensor in float32"
                )
        self._session.declare(
            specs, policy=Policy.ACCUMULATE, staleness=self.bound, compensation=self.compensation,
            compression=compression,
        )  # fmt: skip
        self._take_seed()
        for name, array in zip(self._names, self.arrays, strict=True):
            (started,) = self._session.started([name])
            if started.tensor.is_followed:
                self._copies[name] = array.copy()

    def _take_seed(self) -> None:
        self._session.broadcast_async(self.arrays, 0, self._names, dtype=self._dtype).wait()

    def push(
        self,
        deltas: Sequence[Array | None] | Mapping[str, Array | None],
        *,
        learning_rate: float | None = None,
    ) -> list[Array]:
        """Add changes to the parameters and return the new values; see push_async(). Blocks."""
        return self.push_async(deltas, learning_rate=learning_rate).wait()

    def push_async(
        self,
        deltas: Sequence[Array | None] | Mapping[str, Array | None],
        *,
        learning_rate: float | None = None,
    ) -> Handle[list[Array]]:
        """Start to add changes to the parameters, and to overwrite those here with the new values.

        deltas: one per parameter in their order, or by name; read. None only reads a parameter,
        by a frame without payload. Neither deltas nor parameters may be used before wait() has
        returned. It waits for no worker, except for one so slow that this worker is more than
        `staleness` pushes ahead; StallError names it. Each change is added once, in the order of
        arrival. learning_rate: required with delay_compensation (else ValueError), the factor of
        the gradients; 0 adds changes as they are. Bytes on the wire: nbytes each way.
        """
        rate = _rate_of(learning_rate) if self.compensation.strength else None
        if isinstance(deltas, Mapping):
            deltas = [deltas[name] for name in self._given]
        if len(deltas) != len(self.arrays):
            raise ValueError(
                f"{len(self.arrays)} parameters need as many changes, got {len(deltas)}"
            )
        if self._kept is not None:
            return MappedHandle([self._kept.push_async(deltas)], lambda _: self.arrays)
        if self._session.size > 1:
            return MappedHandle(self._start(deltas, rate), lambda _: self._take_answer())
        for array, delta in zip(self.arrays, deltas, strict=True):
            if delta is not None:
                np.add(array, delta, out=array)
        return MappedHandle([], lambda _: self.arrays)

    def _start(self, deltas: Sequence[Array | None], rate: float | None) -> list[Handle[Any]]:
        """Push the changes, and read the parameters without one."""
        handles: list[Handle[Any]] = []
        places = [place for place, delta in enumerate(deltas) if delta is not None]
        others = [place for place, delta in enumerate(deltas) if delta is None]
        outs = [
            self._copies.get(name, array)
            for name, array in zip(self._names, self.arrays, strict=True)
        ]
        if places:
            handles.append(self._session.push_pull_async(
                [one for one in deltas if one is not None], [self._names[i] for i in places],
                average=False, out=[outs[i] for i in places], dtype=self._dtype,
                learning_rate=rate,
            ))  # fmt: skip
        if others:
            names, arrays = [self._names[i] for i in others], [outs[i] for i in others]
            handles.append(self._session.start_held("start_pull", names, arrays, is_coded=True))
        return handles

    def _take_answer(self) -> list[Array]:
        """Return the arrays, with the values of encoded answers."""
        for name, array in zip(self._names, self.arrays, strict=True):
            if name in self._copies:
                np.copyto(array, self._copies[name])
        return self.arrays

    # ---- checkpoints ----

    @property
    def is_coded(self) -> bool:
        """Return whether changes of some parameters travel encoded."""
        return bool(self._copies)

    def read(self) -> list[Array]:
        """Return the servers' values, not encoded, without changing the parameters here; blocks.

        No push of this worker may be in flight. Waits for no worker, but workers that share memory
        must all call it. Later encoded answers are changes of these values.
        """
        if self._kept is not None:
            found = self._kept.read()
            return [a.reshape(b.shape) for a, b in zip(found, self.arrays, strict=True)]
        found = [array.copy() for array in self.arrays]
        if self._session.size > 1:
            self._session.start_held("start_pull", self._names, found).wait()
            self._note_whole(found)
        return found

    def seed(self, values: Sequence[Array]) -> None:
        """Replace the servers' values by rank 0's, and read them; blocks.

        All workers call it, with no push of theirs in flight. values: on rank 0 of read(); on
        others any arrays of these shapes.
        """
        check_not_elastic("values given to servers again", "make new ServerParameters of them")
        for array, value in zip(self.arrays, values, strict=True):
            array[...] = value
        if self._session.size == 1:
            return
        for _ in range(2):  # the first read may come before rank 0 has written
            self._session.barrier(f"{self._prefix} seed")
            self._take_seed()
        self._session.barrier(f"{self._prefix} seed")
        self._note_whole(self.arrays)

    def _note_whole(self, values: Sequence[Array]) -> None:
        """Remember values that came not encoded: later encoded answers are changes of them."""
        for name, value in zip(self._names, values, strict=True):
            if name in self._copies:
                np.copyto(self._copies[name], value)

    def kept(self) -> list[Any]:
        """Return this worker's codec state (error feedback, momentum) of each parameter.

        For checkpoints, with no push in flight.
        """
        found = {one.tensor.name: one.tensor.kept() for one in self._session.started(self._names)}
        return [found.get(name, []) for name in self._names]

    def restore(self, kept: Sequence[Any]) -> None:
        """Load the codec state of kept(). ValueError for that of other parameters."""
        given = dict(zip(self._names, kept, strict=True))
        for one in self._session.started(self._names):
            one.tensor.restore(given[one.tensor.name])


def compensation_of(wanted: Compensating | None) -> Compensation:
    """Return the contract's Compensation of a user's argument. ValueError out of range."""
    if wanted is None or wanted == "adaptive":
        return PROMPT if wanted is None else ADAPTIVE
    if isinstance(wanted, str):
        raise ValueError(
            f"delay_compensation must be a number, a Compensation or 'adaptive', got {wanted!r}"
        )
    found = wanted if isinstance(wanted, Compensation) else Compensation(float(wanted))
    if not 0 <= found.strength < math.inf or not 0 <= found.decay < 1:
        raise ValueError(
            "delay_compensation needs a finite strength >= 0, and a decay >= 0 and < 1, got "
            f"{found}"
        )
    return found


def _rate_of(learning_rate: float | None) -> float:
    if learning_rate is None or not 0 <= learning_rate < MOST_RATE:
        raise ValueError(
            "delay_compensation needs learning_rate=, the factor of the gradients, >= 0 and < "
            f"{MOST_RATE:g}, got {learning_rate=}"
        )
    return float(learning_rate)


def _bound_of(staleness: float | None) -> int:
    """Return the contract's bound of a user's staleness. ValueError out of range."""
    if staleness is None or staleness == math.inf:
        return ANY_STALENESS
    bound = operator.index(staleness)  # type: ignore[arg-type]
    if not 0 <= bound < ANY_STALENESS:
        raise ValueError(f"staleness must be >= 0 and < {ANY_STALENESS}, or None, got {staleness}")
    return bound
