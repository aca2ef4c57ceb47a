# SPDX-License-Identifier: Apache-2.0
"""Local SGD: steps on each worker alone, and from time to time an exchange of their changes.

All workers keep the same *agreed* values, besides their own values that each trains. The change
of a worker's own values is averaged over the workers that send, and an outer optimizer makes the
next agreed values of the average: DiLoCo (Douillard et al., "DiLoCo: Distributed low-communication
training of language models", 2023, algorithm 1). Fragments of the model are sent in turn, and may
be applied some steps later: Streaming DiLoCo (Douillard et al., 2025, sections 2.2 and 2.3). A
worker may skip an exchange, or leave single tensors out of it (local_blocks.py). Participation is
drawn from counters, so every worker knows that of all. Servers may hold the agreed values and the
outer optimizer instead (server_rounds.py); then an exchange may have a deadline.

Knows tensors only as something with `[...]`; subclasses know the framework. All of it runs in the
thread that steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastps.algorithms import codec_state
from fastps.algorithms.local_blocks import Block, Blocks, ParticipationSchedule
from fastps.algorithms.outer import Outer
from fastps.algorithms.server_rounds import ServerRounds
from fastps.contract.rule import Choice as Rule
from fastps.session.current import check_not_elastic, current, in_one_scope
from fastps.types import DType
from fastps.worker.handle import Array, Waitable

if TYPE_CHECKING:
    from fastps.worker._plan import PlannedTensor

_STATE = ("steps", "outer", "fragments")


@dataclass(frozen=True, kw_only=True)
class Terms(ParticipationSchedule):
    """When and what is exchanged; the keywords of LocalSGD, the same on all workers."""

    sync_every: int
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0
    deadline_s: float | None = None
    outer_on: Literal["workers", "servers"] = "workers"

    def __post_init__(self) -> None:
        """Raise ValueError for options out of range."""
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(
                "fragments must be from 1 to sync_every, got "
                f"fragments={self.fragments} and sync_every={self.sync_every}"
            )
        if not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"delay must be from 0 to sync_every - 1 = {self.sync_every - 1}, got "
                f"{self.delay}: a fragment must arrive before it is sent again"
            )
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep must be from 0 to 1, got {self.keep}")
        super().__post_init__()
        if self.outer_on not in ("workers", "servers") or (self.deadline_s or 1.0) <= 0:
            raise ValueError(
                "outer_on must be 'workers' or 'servers', and deadline_s above 0, or None, got "
                f"outer_on={self.outer_on!r} and deadline_s={self.deadline_s}"
            )

    @property
    def is_on_servers(self) -> bool:
        """Return whether servers hold the agreed values; a deadline needs that too."""
        return self.outer_on == "servers" or self.deadline_s is not None

    def offset(self, number: int) -> int:
        """Return the number of steps by which a fragment is sent before the first one."""
        return number * self.sync_every // self.fragments


@dataclass
class Fragment:
    """Blocks that are exchanged together, in buffers of one dtype each with a name.

    changes: the buffers that this worker sends; values: those of values from servers. exchanges:
    their number so far. sends, counts: of each buffer, whether this worker sends it, and whether
    anyone does. handles: of an exchange that is not applied yet. due: the step after which it is
    applied; sent: the step after which it was sent.
    """

    blocks: list[Block]
    changes: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    codes: list[DType] = field(default_factory=list)
    exchanges: int = 0
    sends: list[bool] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    handles: list[Waitable] = field(default_factory=list)
    due: int | None = None
    sent: int = 0

    def wait(self) -> None:
        """Wait for the exchange in flight, if there is one."""
        while self.handles:
            self.handles[-1].wait()
            self.handles.pop()


class LocalSteps(Blocks):
    """Exchange the changes of local steps; subclasses know the framework's tensors."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], terms: Terms, *, compression: Any, rule: Rule,
        prefix: str, outer: Any,
    ) -> None:  # fmt: skip
        """Take rank 0's values as the agreed ones on all workers, and declare; blocks."""
        if len(named) < terms.fragments:
            raise ValueError(
                f"fragments must be at most the number of parameters, {len(named)}, got "
                f"{terms.fragments}"
            )
        if terms.skips:
            check_not_elastic("participation= and sparsity= of LocalSGD", "leave them out")
        self.steps, self._terms, self._prefix = 0, terms, prefix
        if terms.skips and rule is None:
            rule = "average"  # over those that send
        self._how = {"compression": compression, "rule": rule}
        self._servers: ServerRounds | None = None
        if terms.is_on_servers:
            self._servers = ServerRounds(_for_servers(outer), terms.deadline_s or 0.0)
        known = [(f"{prefix}.{name}", own) for name, own in named]
        self._check(known)
        if self._servers is None:  # else servers send rank 0's values
            self._seed(known)
        self._fragments = self._deal([own for _, own in named])
        for number, fragment in enumerate(self._fragments):
            self._lay_out(fragment, f"{prefix}.{number}")
            self._declare(fragment)

    # ---- of the framework ----

    @abstractmethod
    def _check(self, named: Sequence[tuple[str, Any]]) -> None:
        """Raise TypeError or ValueError for tensors that are not supported."""

    @abstractmethod
    def _seed(self, named: Sequence[tuple[str, Any]]) -> None:
        """Copy rank 0's values to all workers."""

    @abstractmethod
    def _code(self, agreed: Any) -> DType:
        """Return the element type of a tensor."""

    @abstractmethod
    def _over(self, array: Array, agreed: Any) -> Any:
        """Return a tensor like another over an array's memory."""

    @abstractmethod
    def _outer_step(self, blocks: Sequence[Block]) -> None:
        """Make the next agreed values by the outer optimizer; `change` is its gradient."""

    @abstractmethod
    def _outer_optimizer(self) -> Any:
        """Return the outer optimizer, with state_dict() and load_state_dict()."""

    def _average_buffers(self) -> None:
        """Average the model's buffers, with the first fragment."""

    # ---- layout ----

    def _deal(self, tensors: Sequence[Any]) -> list[Fragment]:
        """Distribute the tensors, each to the fragment that has the fewest bytes so far."""
        fragments = [Fragment([]) for _ in range(self._terms.fragments)]
        for own in tensors:
            lightest = min(fragments, key=lambda one: sum(b.own.nbytes for b in one.blocks))
            agreed = self._widen(own)
            lightest.blocks.append(Block(own, agreed, agreed))
        return fragments

    def _lay_out(self, fragment: Fragment, name: str) -> None:
        """Allocate buffers, one per dtype, or with sparsity one per tensor."""
        groups: dict[str, list[Block]] = {}
        for number, block in enumerate(fragment.blocks):
            label = self._code(block.agreed).name.lower()
            label = f"{label}.{number}" if self._terms.sparsity else label
            groups.setdefault(label, []).append(block)
        for label, blocks in sorted(groups.items()):
            code = self._code(blocks[0].agreed)
            sizes = [math.prod(block.agreed.shape) for block in blocks]
            change, value = (current().empty((sum(sizes),), code) for _ in range(2))
            change.fill(0)
            for block, end in zip(blocks, np.cumsum(sizes, dtype=int), strict=True):
                piece = slice(end - math.prod(block.agreed.shape), end)
                block.change = self._over(change[piece], block.agreed)
                block.lane = len(fragment.changes)
                if self._servers is not None:
                    block.value = self._over(value[piece], block.agreed)
            fragment.changes.append(change)
            if self._servers is not None:
                fragment.values.append(value)
            fragment.names.append(f"{name}.{label}")
            fragment.codes.append(code)

    def _declare(self, fragment: Fragment) -> None:
        """Declare the buffers of changes, or the values that servers hold; blocks."""
        if self._servers is not None:
            for block in fragment.blocks:
                block.value[...] = block.agreed
            self._servers.declare(fragment.names, fragment.values, fragment.codes, **self._how)
            for block in fragment.blocks:
                block.agreed[...] = block.value
                self._take(block, 0.0)
            return
        specs = zip(fragment.names, fragment.changes, fragment.codes, strict=True)
        current().declare([(name, one.shape, code) for name, one, code in specs], **self._how)

    # ---- exchanges ----

    def advance(self) -> None:
        """Count a step that was done; all workers count the same steps.

        Starts to send the fragment whose turn it is, and applies the one that is due; blocks until
        the latter has arrived.
        """
        self.steps += 1
        for number, fragment in enumerate(self._fragments):
            if (self.steps + self._terms.offset(number)) % self._terms.sync_every == 0:
                self._send(number, self._terms.delay)
                if number == 0 and self._servers is None:  # it waits for all workers
                    self._average_buffers()
            if fragment.due == self.steps:
                self._apply(fragment)

    def _send(self, number: int, delay: int, *, is_whole: bool = False) -> None:
        """Start to exchange the changes of a fragment: base minus own values."""
        fragment, session = self._fragments[number], current()
        n = len(fragment.changes)
        drawn = np.ones((session.size, n), bool)
        if self._terms.skips and not is_whole:
            drawn = self._terms.draw(session.size, number, fragment.exchanges, n)
        fragment.sends = [bool(one) for one in drawn[session.rank]]
        fragment.counts = [
            self._servers is not None or bool(drawn[:, lane].any()) for lane in range(n)
        ]
        for block in fragment.blocks:
            if fragment.sends[block.lane]:
                self._subtract(block.base, block.own, out=block.change)
                if block.rounding is not None:
                    block.change += block.rounding
        fragment.handles = self._start(fragment)
        fragment.exchanges += 1
        fragment.sent, fragment.due = self.steps, self.steps + delay

    def _start(self, fragment: Fragment) -> list[Waitable]:
        """Push the buffers that this worker sends, and get the results of all."""
        handles: list[Waitable] = []
        if self._servers is not None:
            for name, change, value, sends in zip(
                fragment.names, fragment.changes, fragment.values, fragment.sends, strict=True
            ):
                handles += self._servers.start(name, change, value, sends=sends)
            return handles
        session = current()
        with in_one_scope(session) as scope:
            for change, name, code, sends in zip(
                fragment.changes, fragment.names, fragment.codes, fragment.sends, strict=True
            ):
                if sends:
                    one = session.push_pull_async(change, name, out=change, dtype=code, **scope)
                else:
                    one = session.push_pull_async([change], [name], out=[change], dtype=code,
                                                    contributes=False)  # fmt: skip
                handles.append(one)
        return handles

    def _apply(self, fragment: Fragment) -> None:
        fragment.wait()
        fragment.due = None
        counted = [block for block in fragment.blocks if fragment.counts[block.lane]]
        before = [
            None if fragment.sends[block.lane] else self._clone(block.agreed) for block in counted
        ]
        if self._servers is None:
            self._outer_step(counted)
        else:
            for block in counted:
                block.agreed[...] = block.value
        for block, last in zip(counted, before, strict=True):
            self._give_back(block, last, self._terms.keep, self._terms.error_reset)

    def synchronize(self) -> None:
        """Exchange all changes now, so that all workers have the same values; blocks.

        For the end of training, or before a test. All workers call it after the same number of
        steps. Fragments that all workers have just exchanged are not sent again.
        """
        for fragment in self._fragments:
            if fragment.due is not None:
                self._apply(fragment)
        for number, fragment in enumerate(self._fragments):
            if fragment.sent < self.steps or self._terms.skips:
                self._send(number, 0, is_whole=True)
        for fragment in self._fragments:
            if fragment.due is not None:
                self._apply(fragment)
            self._settle(fragment)
            for block in fragment.blocks:
                self._take(block, 0.0)
        self._average_buffers()

    def _settle(self, fragment: Fragment) -> None:
        """Make servers count late changes, and take over the agreed values after that."""
        if self._servers is None:
            return
        self._servers.settle(fragment.names, fragment.values)
        for block in fragment.blocks:
            block.agreed[...] = block.value
            block.base = block.agreed

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, without the worker's own values; waits for fragments.

        It includes the state of this worker's codecs (error feedback, momentum). Each worker saves
        its own. If servers hold the agreed values, or have codecs with error feedback, all workers
        call it after the same number of steps, and the servers' state is in that of rank 0.
        """
        for fragment in self._fragments:
            fragment.wait()
        held = [self._held_state(fragment) for fragment in self._fragments]
        return {
            "steps": self.steps,
            "outer": self._outer_optimizer().state_dict(),
            "fragments": [
                self._state_of(fragment) | one
                for fragment, one in zip(self._fragments, held, strict=True)
            ],
        }

    def _held_state(self, fragment: Fragment) -> dict[str, Any]:
        """Return the servers' values, after late changes, and the last values from them.

        If servers hold no values, return the state of their codecs.
        """
        if self._servers is None:
            found = codec_state.read(fragment.names)
            return {"residuals": found and [
                None if one is None else self._packed(one) for one in found
            ]}  # fmt: skip
        last = [self._packed(value) for value in fragment.values]
        held = [value.copy() for value in fragment.values]
        self._servers.settle(fragment.names, held)
        if current().rank:
            return {"values": last, "held": None}
        kept, steps = self._servers.read(fragment.names, held)
        packed = [[self._packed(one) for one in row] for row in (held, *kept)]
        return {"values": last, "held": {"values": packed[0], "kept": packed[1:], "steps": steps}}

    def _state_of(self, fragment: Fragment) -> dict[str, Any]:
        return {
            "agreed": [self._clone(block.agreed) for block in fragment.blocks],
            "bases": [
                None if block.base is block.agreed else self._clone(block.base)
                for block in fragment.blocks
            ],
            "roundings": [
                None if block.rounding is None else self._clone(block.rounding)
                for block in fragment.blocks
            ],
            "changes": [self._clone(block.change) for block in fragment.blocks],
            "kept": [
                [] if tensor is None else tensor.kept() for tensor in self._tensors(fragment)
            ],
            "numbers": (fragment.exchanges, fragment.sent, fragment.due),
            "lots": (list(fragment.sends), list(fragment.counts)),
        }

    def _tensors(self, fragment: Fragment) -> list[PlannedTensor | None]:
        """Return the tensors that keep codec state of a fragment; None in a job of one worker."""
        found = {one.tensor.name: one.tensor for one in current().started(fragment.names)}
        return [found.get(name) for name in fragment.names]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict(), besides loading own values. ValueError for another model."""
        given = state.get("fragments", ())
        sizes = [[block.agreed.shape for block in one.blocks] for one in self._fragments]
        if (
            not set(_STATE) <= set(state)
            or [[x.shape for x in one.get("agreed", ())] for one in given] != sizes
            or [len(one["kept"]) for one in given] != [len(f.changes) for f in self._fragments]
            or any(("held" in one) != (self._servers is not None) for one in given)
        ):
            raise ValueError(
                "the state does not fit: it is not of a LocalSGD of this model with the same "
                "fragments; create LocalSGD with the options of the one that was saved"
            )
        self.steps = state["steps"]
        self._outer_optimizer().load_state_dict(state["outer"])
        for fragment, one in zip(self._fragments, given, strict=True):
            self._load(fragment, one)

    def _load(self, fragment: Fragment, state: Mapping[str, Any]) -> None:
        fragment.wait()
        none = [None] * len(fragment.blocks)  # for states of earlier versions
        for block, agreed, base, rounding, change in zip(
            fragment.blocks, state["agreed"], state["bases"], state.get("roundings", none),
            state["changes"], strict=True,
        ):  # fmt: skip
            block.agreed[...] = agreed
            block.base = block.agreed if base is None else self._clone(base)
            block.rounding = None if rounding is None else self._clone(rounding)
            block.change[...] = change
        for tensor, kept in zip(self._tensors(fragment), state["kept"], strict=True):
            if tensor is not None:
                tensor.restore(kept)
        fragment.exchanges, fragment.sent, fragment.due = state["numbers"]
        fragment.sends, fragment.counts = map(list, state["lots"])
        if self._servers is not None:
            self._restore_servers(self._servers, fragment, state)
        else:
            kept = state["residuals"]
            codec_state.write(fragment.names, kept and [
                None if one is None else np.asarray(one) for one in kept
            ])  # fmt: skip

    def _restore_servers(
        self, servers: ServerRounds, fragment: Fragment, state: Mapping[str, Any]
    ) -> None:
        """Restore the servers' values, then the last values from them."""
        held = state["held"] or {"values": fragment.values, "kept": [], "steps": 0}
        for value, one in zip(fragment.values, held["values"], strict=True):
            value[...] = np.asarray(one)
        kept = [[np.asarray(one) for one in row] for row in held["kept"]]
        servers.seed(fragment.names, fragment.values, kept, held["steps"])
        for value, one in zip(fragment.values, state["values"], strict=True):
            value[...] = np.asarray(one)


def _for_servers(outer: Any) -> Outer:
    """Return the outer optimizer for the servers; TypeError for one of a framework."""
    if outer is not None and not isinstance(outer, Outer):
        raise TypeError(
            f"servers do not support {type(outer).__name__} as outer optimizer: use Outer, "
            "Nesterov or Adam of fastps.outer"
        )
    return Outer() if outer is None else outer
