# SPDX-License-Identifier: Apache-2.0
"""Steps of one's own, and now and then an exchange of what they have changed.

All workers keep the same *agreed* values, besides those that each trains. What a worker's steps
have changed since is averaged over those that send, and an outer optimizer makes the next agreed
values of it: DiLoCo (Douillard et al., "DiLoCo: Distributed low-communication training of language
models", 2023, algorithm 1). Fragments leave in turn, and may arrive some steps later: Streaming
DiLoCo (Douillard et al., 2025, sections 2.2 and 2.3). A worker may sit out an exchange, or leave
single tensors out of it; local_blocks.py says what becomes of what it changed. Who sends what is
drawn by counters, so every worker knows it of all. Servers may hold the agreed values and the
outer optimizer instead (server_rounds.py); then an exchange may have a deadline.

Knows tensors only as something with `[...]`: what is a framework's stands in subclasses. All of
it runs in the thread that steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fastps.algorithms import codec_state
from fastps.algorithms.local_blocks import Block, Blocks, ParticipationSchedule, Reset
from fastps.algorithms.outer import Outer
from fastps.algorithms.server_rounds import ServerRounds
from fastps.contract.rule import Choice as Rule
from fastps.session.current import current
from fastps.types import DType
from fastps.worker.handle import Array, Waitable

if TYPE_CHECKING:
    from fastps.worker._plan import PlannedTensor

_STATE = ("steps", "outer", "fragments")


@dataclass(frozen=True)
class Terms:
    """When and what is exchanged; the keywords of LocalSGD, the same on all workers."""

    sync_every: int
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0
    participation: float = 1.0
    sparsity: float = 0.0
    error_reset: Reset = "kept"
    seed: int = 0
    deadline_s: float | None = None
    outer_on: Literal["workers", "servers"] = "workers"

    def __post_init__(self) -> None:
        """Refuse terms that cannot be. Raises ValueError."""
        if not 1 <= self.fragments <= self.sync_every:
            raise ValueError(
                f"fragments={self.fragments} and sync_every={self.sync_every}: there is at least "
                "one fragment, and a step for each"
            )
        if not 0 <= self.delay < self.sync_every:
            raise ValueError(
                f"delay={self.delay} is not 0 to {self.sync_every - 1}: a fragment has to be back "
                "before it leaves again"
            )
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep={self.keep} is not between 0 and 1")
        assert self.lots  # which refuses some
        if self.outer_on not in ("workers", "servers") or (self.deadline_s or 1.0) <= 0:
            raise ValueError(
                f"outer_on={self.outer_on!r} is 'workers' or 'servers', and "
                f"deadline_s={self.deadline_s} above 0, or None"
            )

    @property
    def is_gathered(self) -> bool:
        """Return whether servers hold what is agreed: only they can go on without the late."""
        return self.outer_on == "servers" or self.deadline_s is not None

    @property
    def lots(self) -> ParticipationSchedule:
        """Return who leaves what out."""
        return ParticipationSchedule(
            self.participation, self.sparsity, self.error_reset, self.seed
        )

    @property
    def skips(self) -> bool:
        """Return whether something may be left out."""
        return self.lots.skips

    def offset(self, number: int) -> int:
        """Return by how many steps a fragment is before the first one."""
        return number * self.sync_every // self.fragments

    def draw(self, size: int, fragment: int, exchange: int, n: int) -> np.ndarray[Any, Any]:
        """Draw who sends which of n tensors in an exchange of a fragment: bool[size, n]."""
        return self.lots.draw(size, fragment, exchange, n)


@dataclass
class Fragment:
    """Blocks that travel together, in rooms: each under a name of its own, of one type.

    values: what came from servers for each room, where these hold it. exchanges: how many there
    were. gives, counts: of each room, whether this worker sends it, and anybody. handle: of what
    is under way or not applied yet, and due, the step after which it is; sent: that after which
    it left.
    """

    blocks: list[Block]
    rooms: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    codes: list[DType] = field(default_factory=list)
    exchanges: int = 0
    gives: list[bool] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    handles: list[Waitable] = field(default_factory=list)
    due: int | None = None
    sent: int = 0

    def wait(self) -> None:
        """Wait for what is under way."""
        while self.handles:
            self.handles[-1].wait()
            self.handles.pop()


class LocalSteps(Blocks):
    """Exchange what local steps change; subclasses know the framework's tensors."""

    def __init__(
        self, named: Sequence[tuple[str, Any]], terms: Terms, *, compression: Any, rule: Rule,
        prefix: str, outer: Any,
    ) -> None:  # fmt: skip
        """Take rank 0's values of the tensors, keep them as agreed, and declare; blocks."""
        if len(named) < terms.fragments:
            raise ValueError(f"{len(named)} parameters are not {terms.fragments} fragments")
        self.steps, self._terms, self._prefix = 0, terms, prefix
        if terms.skips and rule is None:
            rule = "average"  # over those that send
        self._how = {"compression": compression, "rule": rule}
        self._gathered: ServerRounds | None = None
        if terms.is_gathered:
            self._gathered = ServerRounds(_for_servers(outer), terms.deadline_s or 0.0)
        known = [(f"{prefix}.{name}", own) for name, own in named]
        self._check(known)
        if self._gathered is None:  # else rank 0's values come from servers
            self._seed(known)
        self._fragments = self._deal([own for _, own in named])
        for number, fragment in enumerate(self._fragments):
            self._lay_out(fragment, f"{prefix}.{number}")
            self._declare(fragment)

    # ---- what is a framework's ----

    @abstractmethod
    def _check(self, named: Sequence[tuple[str, Any]]) -> None:
        """Raise TypeError or ValueError for what cannot be trained."""

    @abstractmethod
    def _seed(self, named: Sequence[tuple[str, Any]]) -> None:
        """Copy rank 0's values to all workers."""

    @abstractmethod
    def _code(self, agreed: Any) -> DType:
        """Return the element type of a tensor."""

    @abstractmethod
    def _over(self, room: Array, agreed: Any) -> Any:
        """Return a tensor like another over a room's memory."""

    @abstractmethod
    def _improve(self, blocks: Sequence[Block]) -> None:
        """Let the outer optimizer make the next agreed values; `change` is its gradient."""

    @abstractmethod
    def _outer_state(self) -> Any:
        """Return what the outer optimizer keeps."""

    @abstractmethod
    def _load_outer(self, state: Any) -> None:
        """Take what an outer optimizer kept."""

    def _mix_rest(self) -> None:
        """Average what is exchanged besides, with the first fragment."""

    # ---- layout ----

    def _deal(self, tensors: Sequence[Any]) -> list[Fragment]:
        """Deal out the tensors, each to the fragment that has the fewest bytes so far."""
        fragments = [Fragment([]) for _ in range(self._terms.fragments)]
        for own in tensors:
            lightest = min(fragments, key=lambda one: sum(b.own.nbytes for b in one.blocks))
            agreed = self._widen(own)
            lightest.blocks.append(Block(own, agreed, agreed))
        return fragments

    def _lay_out(self, fragment: Fragment, name: str) -> None:
        """Make rooms: of tensors of one type side by side, or of each where some are left out."""
        groups: dict[str, list[Block]] = {}
        for number, block in enumerate(fragment.blocks):
            label = self._code(block.agreed).name.lower()
            label = f"{label}.{number}" if self._terms.sparsity else label
            groups.setdefault(label, []).append(block)
        for label, blocks in sorted(groups.items()):
            code = self._code(blocks[0].agreed)
            sizes = [math.prod(block.agreed.shape) for block in blocks]
            room, value = (current().empty((sum(sizes),), code) for _ in range(2))
            room.fill(0)
            for block, end in zip(blocks, np.cumsum(sizes, dtype=int), strict=True):
                piece = slice(end - math.prod(block.agreed.shape), end)
                block.change = self._over(room[piece], block.agreed)
                block.lane = len(fragment.rooms)
                if self._gathered is not None:
                    block.value = self._over(value[piece], block.agreed)
            fragment.rooms.append(room)
            if self._gathered is not None:
                fragment.values.append(value)
            fragment.names.append(f"{name}.{label}")
            fragment.codes.append(code)

    def _declare(self, fragment: Fragment) -> None:
        """Tell all workers and servers how what changed travels; blocks."""
        if self._gathered is not None:
            for block in fragment.blocks:
                block.value[...] = block.agreed
            self._gathered.declare(fragment.names, fragment.values, fragment.codes, **self._how)
            for block in fragment.blocks:
                block.agreed[...] = block.value
                self._take(block, 0.0)
            return
        specs = zip(fragment.names, fragment.rooms, fragment.codes, strict=True)
        current().declare([(name, room.shape, code) for name, room, code in specs], **self._how)

    # ---- exchanges ----

    def advance(self) -> None:
        """Count a step that was done; all workers count alike.

        Begins to send the fragment whose turn it is, without waiting, and gives the worker what is
        agreed of the one that is due; blocks for that one until it is there.
        """
        self.steps += 1
        for number, fragment in enumerate(self._fragments):
            if (self.steps + self._terms.offset(number)) % self._terms.sync_every == 0:
                self._send(number, self._terms.delay)
                if number == 0 and self._gathered is None:  # it waits for all
                    self._mix_rest()
            if fragment.due == self.steps:
                self._apply(fragment)

    def _send(self, number: int, delay: int, *, is_whole: bool = False) -> None:
        """Start to exchange what the worker has changed: what was agreed minus what it has."""
        fragment, session = self._fragments[number], current()
        n = len(fragment.rooms)
        lots = np.ones((session.size, n), bool)
        if self._terms.skips and not is_whole:
            lots = self._terms.draw(session.size, number, fragment.exchanges, n)
        fragment.gives = [bool(one) for one in lots[session.rank]]
        fragment.counts = [
            self._gathered is not None or bool(lots[:, lane].any()) for lane in range(n)
        ]
        for block in fragment.blocks:
            if fragment.gives[block.lane]:
                self._subtract(block.base, block.own, out=block.change)
                if block.rounding is not None:
                    block.change += block.rounding
        fragment.handles = self._start(fragment)
        fragment.exchanges += 1
        fragment.sent, fragment.due = self.steps, self.steps + delay

    def _start(self, fragment: Fragment) -> list[Waitable]:
        """Push the rooms that this worker gives, and have the others filled."""
        handles: list[Waitable] = []
        if self._gathered is not None:
            for name, room, value, gives in zip(
                fragment.names, fragment.rooms, fragment.values, fragment.gives, strict=True
            ):
                handles += self._gathered.start(name, room, value, gives=gives)
            return handles
        for room, name, code, gives in zip(
            fragment.rooms, fragment.names, fragment.codes, fragment.gives, strict=True
        ):
            if gives:
                one = current().push_pull_async(room, name, out=room, dtype=code)
            else:
                one = current().push_pull_async([room], [name], out=[room], dtype=code,
                                                gives=False)  # fmt: skip
            handles.append(one)
        return handles

    def _apply(self, fragment: Fragment) -> None:
        fragment.wait()
        fragment.due = None
        counted = [block for block in fragment.blocks if fragment.counts[block.lane]]
        before = [
            None if fragment.gives[block.lane] else self._clone(block.agreed) for block in counted
        ]
        self._take_agreed(counted)
        for block, last in zip(counted, before, strict=True):
            self._give_back(block, last, self._terms.keep, self._terms.error_reset)

    def _take_agreed(self, blocks: Sequence[Block]) -> None:
        """Make the next agreed values, or take those that servers have made."""
        if self._gathered is None:
            self._improve(blocks)
            return
        for block in blocks:
            block.agreed[...] = block.value

    def synchronize(self) -> None:
        """Exchange now what has changed, of all workers, so that all have the same; blocks.

        For the end of training, or before a test. All workers call it after as many steps. What
        has just been exchanged by all is not sent again.
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
        self._mix_rest()

    def _settle(self, fragment: Fragment) -> None:
        """Have what came late to servers counted, and take what is agreed then."""
        if self._gathered is None:
            return
        self._gathered.settle(fragment.names, fragment.values)
        for block in fragment.blocks:
            block.agreed[...] = block.value
            block.base = block.agreed

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, but the worker's own values; waits for fragments.

        With it goes what this worker's codecs keep (error feedback, momentum). Each worker saves
        its own. Where servers hold what is agreed, or have codecs with error feedback, all workers
        call it after as many steps, and what servers hold and keep is in rank 0's state.
        """
        for fragment in self._fragments:
            fragment.wait()
        held = [self._held_state(fragment) for fragment in self._fragments]
        return {
            "steps": self.steps,
            "outer": self._outer_state(),
            "fragments": [
                self._state_of(fragment) | one
                for fragment, one in zip(self._fragments, held, strict=True)
            ],
        }

    def _held_state(self, fragment: Fragment) -> dict[str, Any]:
        """Return what servers hold, after all that came late, and what came from them last.

        Or, where they hold nothing, what their codecs keep.
        """
        if self._gathered is None:
            found = codec_state.read(fragment.names)
            return {"residuals": found and [
                None if one is None else self._packed(one) for one in found
            ]}  # fmt: skip
        came = [self._packed(value) for value in fragment.values]
        held = [value.copy() for value in fragment.values]
        self._gathered.settle(fragment.names, held)
        if current().rank:
            return {"values": came, "held": None}
        kept, steps = self._gathered.read(fragment.names, held)
        packed = [[self._packed(one) for one in row] for row in (held, *kept)]
        return {"values": came, "held": {"values": packed[0], "kept": packed[1:], "steps": steps}}

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
            "lots": (list(fragment.gives), list(fragment.counts)),
        }

    def _tensors(self, fragment: Fragment) -> list[PlannedTensor | None]:
        """Find what keeps something of a fragment's rooms; None in a job of one worker."""
        found = {one.tensor.name: one.tensor for one in current().started(fragment.names)}
        return [found.get(name) for name in fragment.names]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); own values are loaded besides. ValueError else."""
        given = state.get("fragments", ())
        sizes = [[block.agreed.shape for block in one.blocks] for one in self._fragments]
        if (
            not set(_STATE) <= set(state)
            or [[x.shape for x in one.get("agreed", ())] for one in given] != sizes
            or [len(one["kept"]) for one in given] != [len(f.rooms) for f in self._fragments]
            or any(("held" in one) != (self._gathered is not None) for one in given)
        ):
            raise ValueError(
                "this is no state of a LocalSGD of this model with as many fragments; load it "
                "into one that was made as the one that was saved"
            )
        self.steps = state["steps"]
        self._load_outer(state["outer"])
        for fragment, one in zip(self._fragments, given, strict=True):
            self._load(fragment, one)

    def _load(self, fragment: Fragment, state: Mapping[str, Any]) -> None:
        fragment.wait()
        none = [None] * len(fragment.blocks)  # states of before these were kept
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
        fragment.gives, fragment.counts = map(list, state["lots"])
        if self._gathered is not None:
            self._seed_again(self._gathered, fragment, state)
        else:
            kept = state["residuals"]
            codec_state.write(fragment.names, kept and [
                None if one is None else np.asarray(one) for one in kept
            ])  # fmt: skip

    def _seed_again(
        self, gathered: ServerRounds, fragment: Fragment, state: Mapping[str, Any]
    ) -> None:
        """Restore what servers held; then have what came from them last."""
        held = state["held"] or {"values": fragment.values, "kept": [], "steps": 0}
        for value, one in zip(fragment.values, held["values"], strict=True):
            value[...] = np.asarray(one)
        kept = [[np.asarray(one) for one in row] for row in held["kept"]]
        gathered.seed(fragment.names, fragment.values, kept, held["steps"])
        for value, one in zip(fragment.values, state["values"], strict=True):
            value[...] = np.asarray(one)


def _for_servers(outer: Any) -> Outer:
    """Return the outer optimizer that servers are to have. TypeError."""
    if outer is not None and not isinstance(outer, Outer):
        raise TypeError(
            f"servers have no {type(outer).__name__}: give Outer, Nesterov or Adam of fastps.outer"
        )
    return Outer() if outer is None else outer
