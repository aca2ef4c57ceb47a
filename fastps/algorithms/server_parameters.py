# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training: servers hold the parameters, workers push changes and take what is there.

Decides how parameters come to the servers (one broadcast of rank 0's) and how far the fastest
worker may run ahead; the servers count (server/_accumulate.pxi). With staleness s what a worker
gets with its n-th push holds the first n - s of every other: stale synchronous parallel (Ho et
al., NIPS 2013). Threads: those of the session.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from fastps.contract.compression import Choice
from fastps.contract.contract import ANY_STALENESS, PROMPT, Compensation, Policy
from fastps.errors import ConfigError
from fastps.session.current import current
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array, Handle, MappedHandle

# lambda; lambda_0 and decay with what adapts; "adaptive": 2 and 0.95, of the paper's section 6.1
Compensating: TypeAlias = float | Literal["adaptive"] | Compensation
MOST_RATE = 1e30  # travels as a float32
ADAPTIVE = Compensation(2.0, is_adaptive=True, decay=0.95)


class ServerParameters:
    """Parameters that the servers hold, and to which each worker adds at its own pace."""

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
        """Let the servers hold rank 0's parameters, and take them over here; blocks.

        parameters: C-contiguous arrays by name, the same on all workers; written, now and by each
        push(). staleness: how many pushes the fastest worker may be ahead of the slowest; with 0
        all go in step, None or infinity lets nobody wait. The workers of one machine that share
        memory add first and go in step; FASTPS_SHARED_MEMORY=0 takes each for itself. prefix:
        another one for a second model. dtype: BFLOAT16 with uint16 arrays. delay_compensation:
        lambda of DC-ASGD, or "adaptive", for changes that are -learning_rate times a gradient,
        float32 or float64; see docs/async.md. compression: of push_pull(), for changes and for
        answers, float32 or float64 without a bound of staleness; what it loses of an answer is in
        the next one, of a change there too with error feedback. All workers must call it alike,
        MismatchError else.
        ConfigError where no server is there to hold them; a worker without any others needs none.
        """
        self._prefix, self.bound = prefix, _bound_of(staleness)
        self.compensation = compensation_of(delay_compensation)
        self.arrays = list(parameters.values())
        self._given = list(parameters)
        self._names = [prefix + name for name in parameters]
        self._dtype = dtype
        self._session = current()
        self._copies: dict[str, Array] = {}  # of what changes by what comes encoded
        if self._session.size > 1:
            self._seed(compression)

    def _seed(self, compression: Choice) -> None:
        specs = [
            (name, array.shape, dtype_of(array.dtype) if self._dtype is None else self._dtype)
            for name, array in zip(self._names, self.arrays, strict=True)
        ]
        for name, _, code in specs:
            if self.compensation.strength and code not in (DType.FLOAT32, DType.FLOAT64):
                raise ConfigError(
                    f"{name!r} is {code.name.lower()}, and delays are compensated for float32 and "
                    "float64 alone: leave delay_compensation out, or hold it in float32"
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
        """Add changes to the parameters and give what is there then; see push_async(). Blocks."""
        return self.push_async(deltas, learning_rate=learning_rate).wait()

    def push_async(
        self,
        deltas: Sequence[Array | None] | Mapping[str, Array | None],
        *,
        learning_rate: float | None = None,
    ) -> MappedHandle[list[Array]]:
        """Start to add changes to the parameters, and to write what is there then over them here.

        deltas: one per parameter in their order, or by name; read. None adds nothing: what is
        there is read, for which a frame without bytes is sent. Neither they nor the
        parameters may be touched before wait() has returned. That waits for nobody, except for
        workers so slow that this one is more than `staleness` pushes ahead; StallError names
        them. Each change is added once, in the order in which they come. learning_rate: with
        delay_compensation, what the gradients were multiplied by, and it travels along; 0 adds
        changes as they are. ValueError without. Bytes on the wire: nbytes each way.
        """
        rate = _rate_of(learning_rate) if self.compensation.strength else None
        if isinstance(deltas, Mapping):
            deltas = [deltas[name] for name in self._given]
        if len(deltas) != len(self.arrays):
            raise ValueError(f"{len(self.arrays)} parameters need as many changes")
        if self._session.size > 1:
            return MappedHandle(self._start(deltas, rate), lambda _: self._landed())
        for array, delta in zip(self.arrays, deltas, strict=True):
            if delta is not None:
                np.add(array, delta, out=array)
        return MappedHandle([], lambda _: self.arrays)

    def _start(self, deltas: Sequence[Array | None], rate: float | None) -> list[Handle[Any]]:
        """Push what is given, and read the rest."""
        flights: list[Handle[Any]] = []
        places = [place for place, delta in enumerate(deltas) if delta is not None]
        others = [place for place, delta in enumerate(deltas) if delta is None]
        outs = [
            self._copies.get(name, array)
            for name, array in zip(self._names, self.arrays, strict=True)
        ]
        if places:
            flights.append(self._session.push_pull_async(
                [one for one in deltas if one is not None], [self._names[i] for i in places],
                average=False, out=[outs[i] for i in places], dtype=self._dtype,
                learning_rate=rate,
            ))  # fmt: skip
        if others:
            names, arrays = [self._names[i] for i in others], [outs[i] for i in others]
            flights.append(self._session.start_held("start_pull", names, arrays, is_coded=True))
        return flights

    def _landed(self) -> list[Array]:
        """Return the arrays, with what came encoded."""
        for name, array in zip(self._names, self.arrays, strict=True):
            if name in self._copies:
                np.copyto(array, self._copies[name])
        return self.arrays

    # ---- checkpoints ----

    @property
    def is_coded(self) -> bool:
        """Return whether changes travel encoded, of some parameters at least."""
        return bool(self._copies)

    def read(self) -> list[Array]:
        """Return what servers hold, whole, and leave the parameters here as they are; blocks.

        When no push of this worker is under way. Waits for nobody, but workers that share memory
        call it alike. What comes encoded from then on is a change of just this.
        """
        found = [array.copy() for array in self.arrays]
        if self._session.size > 1:
            self._session.start_held("start_pull", self._names, found).wait()
            self._note_whole(found)
        return found

    def seed(self, values: Sequence[Array]) -> None:
        """Let servers hold rank 0's values in place of what they hold, and read them; blocks.

        All workers call it alike, when no push of theirs is under way. values: of read(), or, but
        of rank 0, whatever has their shapes.
        """
        for array, value in zip(self.arrays, values, strict=True):
            array[...] = value
        if self._session.size == 1:
            return
        for _ in range(2):  # who reads the first time may come before rank 0 has written
            self._session.barrier(f"{self._prefix} seed")
            self._take_seed()
        self._session.barrier(f"{self._prefix} seed")
        self._note_whole(self.arrays)

    def _note_whole(self, values: Sequence[Array]) -> None:
        """Remember what came whole: what comes encoded then is by how much it has changed."""
        for name, value in zip(self._names, values, strict=True):
            if name in self._copies:
                np.copyto(self._copies[name], value)

    def kept(self) -> list[Any]:
        """Return what the codecs of this worker keep (error feedback, momentum) of each parameter.

        For checkpoints, when no push is under way.
        """
        found = {one.tensor.name: one.tensor.kept() for one in self._session.started(self._names)}
        return [found.get(name, []) for name in self._names]

    def restore(self, kept: Sequence[Any]) -> None:
        """Take what kept() gave. ValueError for what other parameters keep."""
        given = dict(zip(self._names, kept, strict=True))
        for one in self._session.started(self._names):
            one.tensor.restore(given[one.tensor.name])


def compensation_of(wanted: Compensating | None) -> Compensation:
    """Return the contract's words for what users say. ValueError for what is no lambda."""
    if wanted is None or wanted == "adaptive":
        return PROMPT if wanted is None else ADAPTIVE
    if isinstance(wanted, str):
        raise ValueError(f"delay_compensation {wanted!r} is neither a number nor 'adaptive'")
    found = wanted if isinstance(wanted, Compensation) else Compensation(float(wanted))
    if not 0 <= found.strength < math.inf or not 0 <= found.decay < 1:
        raise ValueError(f"{found} needs a strength from 0 on and a decay from 0 to below 1")
    return found


def _rate_of(learning_rate: float | None) -> float:
    if learning_rate is None or not 0 <= learning_rate < MOST_RATE:
        raise ValueError(
            f"learning_rate={learning_rate}: with delay_compensation say what the gradients were "
            "multiplied by, a number from 0 on"
        )
    return float(learning_rate)


def _bound_of(staleness: float | None) -> int:
    """Return the contract's words for what users say."""
    if staleness is None or staleness == math.inf:
        return ANY_STALENESS
    bound = operator.index(staleness)  # type: ignore[arg-type]
    if not 0 <= bound < ANY_STALENESS:
        raise ValueError(f"staleness {staleness} is no number of pushes: give 0 or more, or None")
    return bound
