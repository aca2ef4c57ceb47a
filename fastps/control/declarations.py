# SPDX-License-Identifier: Apache-2.0
"""The tensors of one generation: ids, pieces, and whether all workers mean the same by a name.

Decides the id, the pieces and their servers of each tensor, runs the job's only Placement, and
compares what each worker declares with what the first one declared. Pure: time is an argument,
answers are returned as (peer, message) pairs. Knows nothing of connections.
Of names whose values validators give, their word counts: workers wait for it, and who says
something else is refused alone.
A name that all workers forget is free when every server has dropped its keys; its id is used
again, with versions that go on, when every worker has said that it dropped it too.
Invariants: a declaration is answered exactly once, when every server holds all its keys or when
that has become impossible; a poisoned tensor stays poisoned for the generation, as does one that
some server has not dropped in time: nobody knows who still holds it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import msgspec

from fastps.config import Config
from fastps.contract.codec import Option
from fastps.contract.contract import Givers, Policy
from fastps.contract.partition import MAX_PIECES, Placement, check_tensor, cut_tensor, most_pieces
from fastps.control.blame import join_names
from fastps.control.collectives import Answers, Entry
from fastps.control.protocol import (
    Declare,
    Declared,
    DeclaredTensor,
    DeclareKeys,
    Done,
    Failed,
    Forget,
    ForgetKeys,
    KeySpec,
    Layout,
    Parts,
    Pieces,
    TensorPoisoned,
)
from fastps.errors import ConfigError
from fastps.types import DType

REFUSED = "declarations"  # kind of what is refused of workers, against the validators' word
_UPDATES_CURE = (
    ": give all HeldParameters and Validators of it the same compression=, and all processes the "
    "same FASTPS_MIN_COMPRESS_BYTES"
)
_EARLY = -1  # a batch that no server has, of declarations for which validators have no word yet
MAX_KEPT = 256  # layouts, and ways to cut, that are known again
MAX_POISON_LINES = 4  # tensors named in one MismatchError; the rest are counted
MAX_VERSION = 1 << 31  # an id that has come so far is not used again: versions have 32 bits
_ITEMSIZES = {int(code): code.itemsize for code in DType}


log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=MAX_KEPT)
def _shared(value: Any) -> Any:
    """Return an equal value that is in use: many names have few layouts, and are cut alike."""
    return value


class _Tensor(msgspec.Struct, gc=False):
    """One name; small, for there may be hundreds of thousands of them."""

    name: str
    layout: Layout
    pieces: Pieces
    tensor_id: int
    version: int  # that the tensors with this id before have reached
    batch: int  # DeclareKeys that servers must acknowledge
    agreed: int = 0  # bit r: rank r declared it so
    poison: tuple[str, str] | None = None  # kind and message


@dataclass(frozen=True)
class _Waiting:
    """A declaration that waits for servers; or, of tensors that are none any more, a farewell."""

    rank: int
    peer: int
    request: int
    timeout_s: float
    deadline: float
    tensors: tuple[_Tensor, ...]
    batches: frozenset[int]
    is_farewell: bool = False
    early: Declare | None = None  # of a worker, for which validators have no word yet


class Declarations:
    """The tensor table of one generation."""

    def __init__(
        self,
        config: Config,
        *,
        owners: Mapping[int, int],
        weights: Sequence[int] = (),
        refused: dict[str, int] | None = None,
    ) -> None:
        """Place keys on the owners, peers by number among the members, by their weights in order.

        Without owners tensors are cut all the same; then the owner, 0, means nothing. refused:
        where what is refused of workers is counted, by kind.
        """
        self._owners = dict(owners)
        self._numbers = tuple(owners) or (0,)  # of the placement's owners
        self._placement = Placement(
            tuple(weights) or (1,) * len(self._numbers),
            config.key_hash,
            built_in_hash_coef=config.built_in_hash_coef,
        )
        self._tensors: dict[str, _Tensor] = {}
        # with their last versions, by the batch of ForgetKeys that servers must acknowledge
        self._leaving: dict[int, list[tuple[_Tensor, int]]] = {}
        self._resting: list[tuple[list[tuple[int, int]], list[_Waiting]]] = []  # till they drop it
        self._free_ids: list[tuple[int, int]] = []  # and the version that each has reached
        self._n_ids = 0
        self._n_pieces = 0
        self._peers: dict[int, int] = {}  # by rank, of the workers that have declared
        self._unready: dict[int, set[int]] = {}  # batch -> owners that have not answered
        self._batches = 0
        self._waiting: list[_Waiting] = []
        self._n_workers = config.size
        self._judged: set[str] = set()  # names that validators have declared to be theirs
        self._refused = {} if refused is None else refused

    def declare(self, rank: int, peer: int, asked: Declare, now: float) -> Answers:
        """Take a batch of a worker; answer it now or when the servers are ready."""
        layouts = [_shared(layout) for layout in asked.layouts]
        refusal = self._refuse(asked, layouts)
        if refusal is not None:
            return [(peer, Failed(asked.request, "config", refusal))]
        if rank < self._n_workers and (wrong := self._otherwise(rank, asked)):
            return [(peer, Failed(asked.request, "mismatch", wrong))]
        if rank < self._n_workers and self._is_early(asked):
            self._wait_for_validators(rank, peer, asked, now)
            return []
        out = self._make_way(asked) if rank >= self._n_workers else []
        new: list[KeySpec] = []
        tensors: list[_Tensor] = []
        for name, number in asked.tensors:
            tensor = self._tensors.get(name)
            if tensor is None:
                tensor, keys = self._add(name, layouts[number])
                new.append(keys)
            elif tensor.layout != layouts[number]:
                text = self._mismatch_text(tensor, rank, layouts[number])
                out += self._poison(tensor, "mismatch", text)
            tensor.agreed |= 1 << rank
            tensors.append(tensor)
        self._peers[rank] = peer
        if new:
            out += self._announce(DeclareKeys.of(self._batches, new))
        batches = frozenset(tensor.batch for tensor in tensors)
        deadline = now + asked.timeout_s
        self._waiting.append(
            _Waiting(rank, peer, asked.request, asked.timeout_s, deadline, tuple(tensors), batches)
        )
        return out + self._settle() + (self._resume() if rank >= self._n_workers else [])

    # ---- names of validators ----

    def _otherwise(self, rank: int, asked: Declare) -> str:
        """Return what a worker declares that is the validators', and not as they do."""
        for name, number in asked.tensors if self._judged else ():
            layout = asked.layouts[number]
            if name in self._judged and self._tensors[name].layout != layout:
                text = self._mismatch_text(self._tensors[name], rank, layout)
                count = self._refused[REFUSED] = self._refused.get(REFUSED, 0) + 1
                log.warning("refused a declaration (%d so far): %s", count, text)
                return text
        return ""

    def _is_early(self, asked: Declare) -> bool:
        return any(name not in self._judged for name in _judged_by(asked))

    def _wait_for_validators(self, rank: int, peer: int, asked: Declare, now: float) -> None:
        self._unready[_EARLY] = set()
        self._waiting.append(
            _Waiting(rank, peer, asked.request, asked.timeout_s, now + asked.timeout_s, (),
                     frozenset([_EARLY]), early=asked)
        )  # fmt: skip

    def _make_way(self, asked: Declare) -> Answers:
        """Take names for a validator, also from workers that have declared them before."""
        out: Answers = []
        for name in _judged_by(asked):
            if name not in self._judged:
                self._judged.add(name)
                tensor = self._tensors.pop(name, None)
                if tensor is not None:
                    text = f"tensor {name!r} is the validators', who have declared it"
                    out += self._poison(tensor, "mismatch", text)
        return out

    def _resume(self) -> Answers:
        """Take up the declarations that waited for validators, as of when they came."""
        early = [item for item in self._waiting if item.early is not None]
        self._waiting = [item for item in self._waiting if item.early is None]
        out: Answers = []
        for item in early:
            assert item.early is not None
            out += self.declare(item.rank, item.peer, item.early, item.deadline - item.timeout_s)
        return out

    def keys_ready(self, owner: int, batch: int) -> Answers:
        """Note that an owner holds the keys of a batch."""
        unready = self._unready.get(batch, {-1})  # nobody, of what was never asked
        unready.discard(owner)
        if unready:
            return []
        del self._unready[batch]
        self._take_off(batch)
        return self._settle()

    def keys_failed(self, owner: int, batch: int, message: str) -> Answers:
        """Poison the tensors of a batch that an owner cannot hold."""
        out: Answers = []
        server = f"server {self._numbers.index(owner)}"
        what = "forget" if batch in self._leaving else "hold"
        for tensor in self._tensors.values():
            if tensor.batch == batch:
                text = f"tensor {tensor.name!r}: {server} cannot {what} it: {message}"
                out += self._poison(tensor, "error", text)
        return out + self.keys_ready(owner, batch) + self._settle()

    def forget(self, asked: Mapping[int, Entry]) -> Answers:
        """Forget tensors, as all workers have asked; they hear of it when all servers have."""
        lasts = [dict(it.asked.tensors) for it in asked.values() if isinstance(it.asked, Forget)]
        why = self._refuse_farewell(lasts[0])  # the names of all
        if why is not None:
            return [(it.peer, Failed(it.asked.request, "config", why)) for it in asked.values()]
        tensors = tuple(self._tensors[name] for name in lasts[0])
        batch = self._batches
        self._leaving[batch] = [(one, max(last[one.name] for last in lasts)) for one in tensors]
        for tensor in tensors:
            tensor.batch = batch
        for rank, entry in asked.items():
            timeout_s = entry.asked.timeout_s
            self._waiting.append(
                _Waiting(rank, entry.peer, entry.asked.request, timeout_s,
                         entry.deadline + timeout_s, tensors, frozenset([batch]), is_farewell=True)
            )  # fmt: skip
        out = self._announce(ForgetKeys(batch, tuple(one.tensor_id for one in tensors)))
        if batch not in self._unready:
            self._take_off(batch)
        return out + self._settle()

    def dropped(self, peer: int, request: int) -> None:
        """Learn that a worker has nothing any more of what it was told is forgotten."""
        self._let_go(lambda item: (item.peer, item.request) == (peer, request))

    def remove(self, rank: int) -> None:
        """Forget a worker that left: nothing is sent to it any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.rank != rank]
        self._peers.pop(rank, None)
        self._let_go(lambda item: item.rank == rank)

    def fail_all(self, kind: str, message: str) -> Answers:
        """End every declaration that waits with the same error."""
        ended, self._waiting = self._waiting, []
        return [(item.peer, Failed(item.request, kind, message)) for item in ended]

    def expire(self, now: float) -> Answers:
        """End the declarations that have waited too long."""
        late = [item for item in self._waiting if item.deadline <= now]
        self._waiting = [item for item in self._waiting if item.deadline > now]
        out: Answers = []
        for item in late:
            text = self._late_text(item)
            for tensor in item.tensors if item.is_farewell else ():
                out += self._poison(tensor, "stall", text)  # some server may have dropped it
            out.append((item.peer, Failed(item.request, "stall", text)))
        return out + (self._settle() if late else [])

    def next_deadline(self) -> float | None:
        """Return the time when expire() has something to do."""
        return min((item.deadline for item in self._waiting), default=None)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """List (peer, request) of everybody who waits."""
        for item in self._waiting:
            yield item.peer, item.request

    def _refuse_farewell(self, names: Mapping[str, int]) -> str | None:
        for name in names:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.batch in self._unready:
                return f"tensor {name!r} is not declared and cannot be forgotten"
            if tensor.poison is not None:
                return f"tensor {name!r} cannot be forgotten: {tensor.poison[1]}"
        return None

    def _take_off(self, batch: int) -> None:
        """Free the names of a batch that every server has dropped; its ids rest."""
        ids: list[tuple[int, int]] = []
        usable = [item for item in self._leaving.pop(batch, ()) if item[0].poison is None]
        for tensor, version in usable:
            del self._tensors[tensor.name]
            self._judged.discard(tensor.name)
            for nbytes, owner in tensor.pieces:
                self._placement.add_load(self._numbers.index(owner), -nbytes)
            self._n_pieces -= len(tensor.pieces)
            ids.append((tensor.tensor_id, max(version, tensor.version)))
        told = [item for item in self._waiting if item.is_farewell and batch in item.batches]
        self._resting.append(([item for item in ids if item[1] < MAX_VERSION], told))

    def _let_go(self, has_dropped: Callable[[_Waiting], bool]) -> None:
        """Use ids again that nobody holds any more."""
        for ids, holders in self._resting:
            holders[:] = [item for item in holders if not has_dropped(item)]
            self._free_ids += [] if holders else ids
        self._resting = [resting for resting in self._resting if resting[1]]

    def _refuse(self, asked: Declare, layouts: Sequence[Layout]) -> str | None:
        """Check a whole batch before any of it takes effect."""
        n_pieces = self._n_pieces
        checked: set[int] = set()  # numbers of layouts
        most: dict[int, int] = {}  # pieces of a new tensor, by the number of its layout
        for name, number in asked.tensors:
            try:
                if number not in checked:
                    if number >= len(layouts):
                        raise ConfigError(f"there is no layout {number} among {len(layouts)}")
                    self._check(layouts[number])
                    checked.add(number)
                if self._is_new(name, layouts[number]):
                    if number not in most:
                        most[number] = self._count_pieces(layouts[number])
                    n_pieces += most[number]
            except ConfigError as error:
                return f"tensor {name!r}: {error}"
        if n_pieces <= MAX_PIECES:
            return None
        return (
            f"{len(asked.tensors)} tensors from {asked.tensors[0][0]!r} on need up to {n_pieces} "
            f"partitions, with those before; a job may have {MAX_PIECES}: raise "
            "FASTPS_PARTITION_BYTES, or declare fewer tensors"
        )

    def _check(self, layout: Layout) -> None:
        """Raise ConfigError if no tensor can have a layout."""
        itemsize = _ITEMSIZES.get(layout.dtype)
        if itemsize is None:
            raise ConfigError(f"dtype code {layout.dtype} is unknown")
        nbytes = math.prod(layout.shape) * itemsize
        if layout.nbytes != nbytes:
            raise ConfigError(f"{_side(layout)} has {nbytes} bytes, not {layout.nbytes}")
        try:
            layout.coding.check()
            layout.updates.check()
            layout.rule.check()
            layout.gathering.check()
        except ValueError as error:
            raise ConfigError(f"{error}") from None

    def _is_new(self, name: str, layout: Layout) -> bool:
        """Return whether a name adds a tensor to the job; ConfigError if it cannot be."""
        known = self._tensors.get(name)
        if known is not None and known.batch in self._leaving:
            raise ConfigError("it is being forgotten")
        if known is None and layout.policy is Policy.CODEC_STATE:
            self._check_kept(layout)
        return known is None

    def _count_pieces(self, layout: Layout) -> int:
        """Return the most pieces that a new tensor has; ConfigError if it has too many."""
        cut = {"partition_bytes": layout.partition_bytes}
        check_tensor(layout.nbytes, n_owners=len(self._placement.owners), **cut)
        return most_pieces(layout.nbytes, placement=self._placement, **cut)

    def _check_kept(self, layout: Layout) -> None:
        """Raise ConfigError unless there is a tensor with codecs that keep so many elements."""
        other = self._tensors.get(layout.beside)
        if other is None:
            raise ConfigError(f"there is no tensor {layout.beside!r}, whose codecs keep something")
        theirs = other.layout
        if not (theirs.coding.has(Option.FEEDBACK) and theirs.policy is Policy.SUM
                and (math.prod(theirs.shape),) == layout.shape
                and layout.dtype == DType.FLOAT32):  # fmt: skip
            raise ConfigError(f"codecs of tensor {layout.beside!r} keep no {_side(layout)}")

    def _pieces_beside(self, other: _Tensor) -> Pieces:
        """Cut what codecs keep of a tensor, float32, as that is, and count it."""
        size = DType(other.layout.dtype).itemsize
        pieces = tuple(
            (nbytes // size * DType.FLOAT32.itemsize, owner) for nbytes, owner in other.pieces
        )
        for nbytes, owner in pieces:
            self._placement.add_load(self._numbers.index(owner), nbytes)
        return pieces

    def _add(self, name: str, layout: Layout) -> tuple[_Tensor, KeySpec]:
        tensor_id, version = self._free_ids.pop() if self._free_ids else (self._n_ids, 0)
        self._n_ids = max(self._n_ids, tensor_id + 1)
        other = self._tensors[layout.beside] if layout.beside else None
        cut = self._cut(layout, tensor_id) if other is None else self._pieces_beside(other)
        pieces = _shared(cut)
        self._n_pieces += len(pieces)
        tensor = _Tensor(name, layout, pieces, tensor_id, version, self._batches)
        self._tensors[name] = tensor
        beside = 0 if other is None else other.tensor_id
        return tensor, KeySpec(tensor_id, name, layout, pieces, version, beside)

    def _cut(self, layout: Layout, tensor_id: int) -> Pieces:
        cut = cut_tensor(
            layout.nbytes,
            partition_bytes=layout.partition_bytes,
            placement=self._placement,
            tensor_id=tensor_id,
            is_whole=layout.rule.wants_whole,
        )
        return tuple((piece.nbytes, self._numbers[piece.owner]) for piece in cut)

    def _announce(self, keys: DeclareKeys | ForgetKeys) -> Answers:
        self._batches += 1
        if self._owners:
            self._unready[keys.request_id] = set(self._owners)
        return [(peer, keys) for peer in self._owners.values()]

    def _poison(self, tensor: _Tensor, kind: str, message: str) -> Answers:
        """Make a tensor unusable, unless it is, and tell those who declared it before."""
        if tensor.poison is not None:
            return []
        tensor.poison = (kind, message)
        event = TensorPoisoned(tensor.tensor_id, tensor.name, message)
        return [(self._peers[rank], event) for rank in self._present(tensor)]

    def _present(self, tensor: _Tensor) -> list[int]:
        """List the ranks that declared a tensor and have not left."""
        return [rank for rank in sorted(self._peers) if tensor.agreed >> rank & 1]

    def _settle(self) -> Answers:
        """Answer every declaration whose outcome is known."""
        out: Answers = []
        still: list[_Waiting] = []
        for item in self._waiting:
            outcome = self._outcome(item)
            if outcome is None:
                still.append(item)
            else:
                out.append((item.peer, outcome))
        self._waiting = still
        return out

    def _outcome(self, item: _Waiting) -> Declared | Done | Failed | None:
        poisons = [tensor.poison for tensor in item.tensors if tensor.poison is not None]
        if poisons:
            lines = [message for _, message in poisons[:MAX_POISON_LINES]]
            if len(poisons) > MAX_POISON_LINES:
                lines.append(f"and {len(poisons) - MAX_POISON_LINES} more tensors")
            return Failed(item.request, poisons[0][0], "\n".join(lines))
        if not item.batches.isdisjoint(self._unready):
            return None
        if item.is_farewell:
            return Done(item.request)
        return Declared(
            item.request,
            tuple(
                DeclaredTensor(tensor.tensor_id, tensor.pieces, tensor.version)
                for tensor in item.tensors
            ),
        )

    def _late_text(self, item: _Waiting) -> str:
        if item.early is not None:
            wanted = join_names([repr(name) for name, _ in item.early.tensors])
            return (
                f"declaring {wanted} timed out after {item.timeout_s:g} s; no validator has "
                "declared them; do they make the same HeldParameters?"
            )
        owners = sorted(set().union(*(self._unready.get(batch, ()) for batch in item.batches)))
        names = [repr(tensor.name) for tensor in item.tensors]
        what = "forgetting" if item.is_farewell else "declaring"
        missing = join_names([f"server {self._numbers.index(owner)}" for owner in owners])
        return (
            f"{what} {join_names(names)} timed out after {item.timeout_s:g} s; "
            f"not ready: {missing}; raise FASTPS_OP_TIMEOUT_S if they are only slow"
        )

    def _mismatch_text(self, tensor: _Tensor, rank: int, layout: Layout) -> str:
        if rank in self._present(tensor):
            return (
                f"tensor {tensor.name!r} was declared before as {_full_side(tensor.layout)}, "
                f"and worker {rank} now declares {_full_side(layout)}: give it another name, or "
                "prefix=, or forget() it"
            )
        first = (tensor.agreed & -tensor.agreed).bit_length() - 1
        others = self._names_text(self._present(tensor) or [first])
        ours = layout.parts or ((tensor.name, layout.dtype, layout.shape),)
        theirs = tensor.layout.parts or ((tensor.name, tensor.layout.dtype, tensor.layout.shape),)
        if ours != theirs and (layout.parts or tensor.layout.parts):
            return _parts_text(ours, f"worker {rank}", theirs, others)
        cure = _UPDATES_CURE if layout.updates != tensor.layout.updates else ""
        return (
            f"tensor {tensor.name!r} differs between workers: worker {rank} declared "
            f"{_full_side(layout)}, but {others} declared {_full_side(tensor.layout)}{cure}"
        )

    def _names_text(self, ranks: Sequence[int]) -> str:
        """Name workers, and validators, which have the numbers after them."""
        n = self._n_workers
        return join_names([f"worker {i}" if i < n else f"validator {i - n}" for i in ranks])


def _parts_text(parts: Parts, who: str, others: Parts, them: str) -> str:
    """Word the first difference between lists of tensors that travel together."""
    ours, theirs = next(pair for pair in zip_longest(parts, others) if pair[0] != pair[1])
    name = (ours or theirs)[0]
    return (
        f"tensor {name!r}, of those that travel together, differs between workers: {who} has "
        f"{_part_side(name, ours)}, but {them} has {_part_side(name, theirs)}: give all workers "
        "the same tensors, in the same order"
    )


def _part_side(name: str, part: tuple[str, int, tuple[int, ...]] | None) -> str:
    if part is None:
        return "no such tensor there"
    its, dtype, shape = part
    return f"{its!r}, " * (its != name) + f"{DType(dtype).name.lower()} of shape {shape}"


def _judged_by(asked: Declare) -> Iterator[str]:
    """List the names of a batch whose values validators give."""
    judged = {
        number for number, one in enumerate(asked.layouts) if one.givers is Givers.VALIDATORS
    }
    return (name for name, number in (asked.tensors if judged else ()) if number in judged)


def _side(layout: Layout) -> str:
    return f"{DType(layout.dtype).name.lower()} of shape {layout.shape}"


def _full_side(layout: Layout) -> str:
    return (
        f"{_side(layout)} in partitions of at most {layout.partition_bytes} bytes sent as chunks "
        f"of {layout.chunk_bytes} under {layout.policy.name} (staleness {layout.staleness}), "
        f"{layout.coding}"
        + (f", {layout.rule}" if layout.rule.has_meaning() else "")
        + (f", {layout.compensation}" if layout.compensation.strength else "")
        + (f", {layout.gathering}" if layout.policy is Policy.DEADLINE_ROUNDS else "")
        + (f", of updates that are {layout.updates}" if layout.givers is Givers.VALIDATORS else "")
    )
