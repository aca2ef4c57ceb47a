# SPDX-License-Identifier: Apache-2.0
"""Which way the operations of a name go: found out where workers do not agree about it.

An operation of all workers with a name goes by way of the servers, or in shared memory, or else
among members: where it is no sum, or its name was declared with another shape. Where workers
differ, each would wait for the others. So who has waited among members for LEAST_S tells the
others how many operations of the name it has begun by each way; who is waiting the other way
then, and has begun more there and fewer here, knows that they differ, for one name's operations
have one order on all workers. All hear of it, and all that is in flight under the name fails.
Threads: the control thread, but for why().
"""

from __future__ import annotations

import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any

from fastps.arrays import describe
from fastps.collectives._calls import forget_calls
from fastps.collectives.names import Part
from fastps.control.protocol import TensorPoisoned
from fastps.control.stalls import LEAST_S
from fastps.errors import MismatchError
from fastps.objects import decode_object, encode_object

if TYPE_CHECKING:
    from fastps.collectives._exchange import Operation
    from fastps.control.protocol import Told
    from fastps.session import Session
    from fastps.uneven import StartedTensor

_BEGUN, _DIFFER = "begun", "differ"
_REDUCTIONS = {-1: "a sum", -2: "an average"}


class Ways:
    """What one worker knows of names whose operations go by different ways."""

    def __init__(self, session: Session) -> None:
        self._session: Session = weakref.proxy(session)  # which goes at once when it ends
        self._since: dict[tuple[int, int], float] = {}  # when an operation was first seen
        self._texts: dict[str, str] = {}  # of operations among members that fail, by name

    def look(self) -> None:
        """Tell of operations among members that have waited; of each once."""
        now = time.monotonic()
        pending = {(one.channel, one.number): one for one in self._named()}
        self._since = {key: self._since.get(key, now) for key in pending}
        for key, operation in pending.items():
            if now - self._since[key] >= LEAST_S:
                self._since[key] = float("inf")
                self._tell_begun(operation)

    def _named(self) -> list[Operation]:
        """List the operations of all workers with a name that are in flight among members."""
        groups = self._session.known_groups
        if groups is None or self._session.size == 1:
            return []
        world = groups.world.ranks
        found = self._session.connections.exchange.operations
        return [
            one
            for one in found
            if one.about and one.about[1] and one.about[0].ranks == world and not one.is_done
        ]

    def _tell_begun(self, operation: Operation) -> None:
        name = operation.about[1]
        counts = [(tensor, self._session.version_of(tensor)) for tensor in self._tensors_of(name)]
        told = (_BEGUN, str(name), operation.number, operation.name, counts)
        others = [rank for rank in range(self._session.size) if rank != self._session.rank]
        self._session.tell(others, encode_object(told))

    def _tensors_of(self, name: str) -> list[str]:
        """List the tensors that others may sum in the place of an operation of a name."""
        if not isinstance(name, Part):
            return [name]
        parts = (f"{name.whole}.{place}" for place in itertools.count())
        known = itertools.takewhile(lambda part: self._session.started([part]), parts)
        return [str(name), name.whole, *known]

    def hear(self, event: Told) -> bool:
        """Take what another worker tells, if it is for us."""
        kind, *told = decode_object(event.data)
        if kind == _BEGUN:
            self._compare(event.member, *told)
        elif kind == _DIFFER:
            self._fail(*told)
        return kind in (_BEGUN, _DIFFER)

    def _compare(
        self, rank: int, name: str, number: int, words: str, counts: list[tuple[str, int]]
    ) -> None:
        """See whether we are where the other worker waits for us in vain."""
        groups = self._session.known_groups
        if groups is not None and groups.world.count_of(name) >= number:
            return
        ahead = [
            started
            for tensor, version in counts
            for started in self._session.started([tensor])
            if started.tensor.is_in_flight and started.tensor.version > version
        ]
        if ahead:
            names = [one.spec.name for one in ahead]
            told = (_DIFFER, names, name, number, self._text(rank, words, ahead[0]))
            self._session.tell(range(self._session.size), encode_object(told))

    def _text(self, rank: int, words: str, started: StartedTensor) -> str:
        tensor, spec = started
        what = _REDUCTIONS.get(tensor.operation, f"a broadcast from worker {tensor.operation}")
        return (
            f"{tensor.name!r}: worker {rank} started {words!r} among the workers, and worker "
            f"{self._session.rank} {what} of {describe(spec.dtype, tuple(spec.shape))}, which "
            "goes by way of the servers or shared memory: let all workers call the same on a "
            "name, with one shape and dtype, or give it another name"
        )

    def _fail(self, tensors: list[str], name: str, number: int, text: str) -> None:
        """Let what is in flight here fail, and whatever is started under the names from now on."""
        self._texts |= dict.fromkeys([name, *tensors], text)
        forget_calls()
        for tensor in tensors:
            self._session.poison(TensorPoisoned(0, tensor, text))
        for operation in self._named():
            if str(operation.about[1]) == name and operation.number == number:
                self._session.connections.exchange.refuse(operation)

    def check(self, name: str) -> None:
        """Raise MismatchError for a name under which workers have gone different ways."""
        if self._texts and (text := self._texts.get(name)):
            raise MismatchError(text)

    def why(self, operation: Operation) -> str:
        """Say why an operation fails; empty: not for that."""
        about: tuple[Any, ...] | None = operation.about
        return self._texts.get(str(about[1]), "") if self._texts and about else ""
