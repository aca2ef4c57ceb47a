# SPDX-License-Identifier: Apache-2.0
"""The tensors of one generation: ids, pieces, and whether all workers declare them alike.

Decides the id, the pieces and the servers of each tensor, runs the job's only Placement, and
compares each worker's declaration with the first one. Pure: time is an argument, answers are
returned as (peer, message) pairs. Knows nothing of connections.
For tensors whose values come from validators, the validators' declaration is authoritative:
workers wait for it, and a worker that declares something else is refused alone.
A name that all workers forget is free when every server has dropped its keys. Its id is used
again, with increasing versions, when every worker has reported that it dropped the tensor too.
Invariants: a declaration is answered exactly once, when every server holds all its keys or when
that has become impossible. A poisoned tensor stays poisoned for the generation. So does one that
a server has not dropped in time: it is unknown which servers still hold it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

REFUSED = "declarations"  # kind of refusal: a worker's declaration differs from the validators'
_UPDATES_CURE = (
    ": give all HeldParameters and Validators of it the same compression=, and all processes the "
    "same FASTPS_MIN_COMPRESS_BYTES"
)
_SAME_CURE = "; build the same model and call the same operations on all workers"
_EARLY = -1  # a batch that no server has: declarations that wait for the validators
MAX_KEPT = 256  # layouts and cuts that are shared
MAX_POISON_LINES = 4  # tensors named in one MismatchError; the rest are counted
MAX_FULL_TEXTS = 64  # mismatches of one worker that are described in full
MAX_UNRELEASED = 1024  # forgotten batches that some worker has not dropped; older ids rest
MAX_WAITING = 64  # requests of one worker at once: threads that declare
# Of names that one worker alone has declared: it may be ahead of others by all that a job has.
MAX_ALONE = 1 << 18
MAX_ALONE_BYTES = 256 << 20
NAME_BYTES = 512  # that a name takes beside its text
PART_BYTES = 256  # and a part of a layout
MAX_VERSION = 1 << 31  # an id with more is not used again: versions have 32 bits
_ITEMSIZES = {int(code): code.itemsize for code in DType}


log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=MAX_KEPT)
def _shared(value: Any) -> Any:
    """Return an equal value that is in use: many names have few layouts and cuts."""
    return value


class _Tensor(msgspec.Struct, gc=False):
    """One tensor; small, since there may be hundreds of thousands of them."""

    name: str
    layout: Layout
    pieces: Pieces
    tensor_id: int
    version: int  # the last one of earlier tensors with this id
    batch: int  # DeclareKeys that servers must acknowledge
    agreed: int = 0  # bit r: rank r declared it so
    poison: tuple[str, str] | None = None  # kind and message


@dataclass(frozen=True)
class _Pending:
    """A request that waits for servers: a declaration, or one to forget tensors."""

    rank: int
    peer: int
    request: int
    timeout_s: float
    deadline: float
    tensors: tuple[_Tensor, ...]
    batches: frozenset[int]
    is_forget: bool = False
    early: Declare | None = None  # of a worker that waits for the validators' declaration


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
        """Place keys on the owners (peers by member number) according to their weights, in order.

        Without owners tensors are cut all the same, and owner 0 has no meaning. refused: counts
        refused declarations of workers, by kind.
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
        # ids that servers have dropped, and the requests of workers that have not yet
        self._unreleased: list[tuple[list[tuple[int, int]], list[_Pending]]] = []
        self._free_ids: list[tuple[int, int]] = []  # with the last version of each
        self._n_ids = 0
        self._n_pieces = 0
        self._peers: dict[int, int] = {}  # by rank, of the workers that have declared
        self._unready: dict[int, set[int]] = {}  # batch -> owners that have not answered
        self._batches = 0
        self._waiting: list[_Pending] = []
        self._n_workers = config.size
        self._n_programs = config.n_programs
        self._alone: Counter[int] = Counter()  # names that one worker alone has declared, by rank
        self._alone_bytes: Counter[int] = Counter()
        self._n_mismatches: Counter[int] = Counter()  # by rank
        self._validated: set[str] = set()  # names that validators have declared
        self._refused = {} if refused is None else refused

    def declare(self, rank: int, peer: int, asked: Declare, now: float) -> Answers:
        """Handle a batch of a worker; answer it now, or when the servers are ready."""
        layouts = [layout if layout.parts else _shared(layout) for layout in asked.layouts]
        refusal = self._refuse_waiting(rank) or self._refuse(rank, asked, layouts)
        if refusal is not None:
            return [(peer, Failed(asked.request, "config", refusal))]
        if rank < self._n_workers and (wrong := self._contradiction(rank, asked)):
            return [(peer, Failed(asked.request, "mismatch", wrong))]
        if rank < self._n_workers and any(
            name not in self._validated for name in _validated_names(asked)
        ):
            self._wait_for_validators(rank, peer, asked, now)
            return []
        out = self._claim_for_validators(asked) if rank >= self._n_workers else []
        new: list[KeySpec] = []
        tensors: list[_Tensor] = []
        for name, number in asked.tensors:
            tensor = self._tensors.get(name)
            if tensor is None:
                tensor, keys = self._add(name, layouts[number])
                new.append(keys)
                self._count_alone(rank, tensor, 1)
            else:
                if tensor.layout != layouts[number]:
                    out += self._poison_differing(tensor, rank, layouts[number])
                if tensor.agreed != 1 << rank:
                    self._end_alone(tensor)
            tensor.agreed |= 1 << rank
            tensors.append(tensor)
        self._peers[rank] = peer
        if new:
            out += self._announce(DeclareKeys.of(self._batches, new))
        batches = frozenset(tensor.batch for tensor in tensors)
        deadline = now + asked.timeout_s
        self._waiting.append(
            _Pending(rank, peer, asked.request, asked.timeout_s, deadline, tuple(tensors), batches)
        )
        return out + self._answer_ready() + (self._resume() if rank >= self._n_workers else [])

    def _poison_differing(self, tensor: _Tensor, rank: int, layout: Layout) -> Answers:
        """Poison a tensor that a worker declares otherwise than others have."""
        if tensor.poison is not None:
            return []
        self._n_mismatches[rank] += 1
        if self._n_mismatches[rank] > MAX_FULL_TEXTS:
            others = self._names_text(self._present(tensor))
            text = f"tensor {tensor.name!r}: worker {rank} declares it otherwise than {others}"
        else:
            text = self._mismatch_text(tensor, rank, layout)
        return self._poison(tensor, "mismatch", text)

    # ---- what one worker alone has declared ----

    def _count_alone(self, rank: int, tensor: _Tensor, sign: int) -> None:
        self._alone[rank] += sign
        self._alone_bytes[rank] += sign * _charge(tensor.name, tensor.layout)

    def _end_alone(self, tensor: _Tensor) -> None:
        """Note that a name is no more what one worker alone has declared, if it was."""
        if tensor.agreed.bit_count() == 1:
            self._count_alone(tensor.agreed.bit_length() - 1, tensor, -1)

    def _refuse_alone(self, rank: int, n_new: int, n_bytes: int) -> str:
        """Return why a worker cannot declare so many names that nobody else has declared."""
        if self._n_programs == 1 or rank >= self._n_workers or not n_new:
            return ""
        n_names, nbytes = self._alone[rank] + n_new, self._alone_bytes[rank] + n_bytes
        if n_names <= MAX_ALONE and nbytes <= MAX_ALONE_BYTES:
            return ""
        return (
            f"worker {rank} declares {n_names} names of {nbytes >> 20} MiB that no other worker "
            f"has declared; at most {MAX_ALONE}, of {MAX_ALONE_BYTES >> 20} MiB, may wait for the "
            "others: declare the same names on all workers"
        )

    def _refuse_waiting(self, rank: int) -> str:
        if sum(item.rank == rank for item in self._waiting) < MAX_WAITING:
            return ""
        return f"worker {rank} waits for {MAX_WAITING} declarations already; declare fewer at once"

    # ---- names of validators ----

    def _contradiction(self, rank: int, asked: Declare) -> str:
        """Return the text about a worker's declaration that contradicts the validators'."""
        for name, number in asked.tensors if self._validated else ():
            layout = asked.layouts[number]
            if name in self._validated and self._tensors[name].layout != layout:
                text = self._mismatch_text(self._tensors[name], rank, layout)
                count = self._refused[REFUSED] = self._refused.get(REFUSED, 0) + 1
                log.warning("refused a declaration (%d so far): %s", count, text)
                return text
        return ""

    def _wait_for_validators(self, rank: int, peer: int, asked: Declare, now: float) -> None:
        self._unready[_EARLY] = set()
        self._waiting.append(
            _Pending(rank, peer, asked.request, asked.timeout_s, now + asked.timeout_s, (),
                     frozenset([_EARLY]), early=asked)
        )  # fmt: skip

    def _claim_for_validators(self, asked: Declare) -> Answers:
        """Reserve names for validators, also those that workers have declared before."""
        out: Answers = []
        for name in _validated_names(asked):
            if name not in self._validated:
                self._validated.add(name)
                tensor = self._tensors.pop(name, None)
                if tensor is not None:
                    self._end_alone(tensor)
                    text = (
                        f"tensor {name!r} belongs to the validators, which have declared it; "
                        "workers must use another name"
                    )
                    out += self._poison(tensor, "mismatch", text)
        return out

    def _resume(self) -> Answers:
        """Handle the declarations that waited for validators, with their old deadlines."""
        early = [item for item in self._waiting if item.early is not None]
        self._waiting = [item for item in self._waiting if item.early is None]
        out: Answers = []
        for item in early:
            assert item.early is not None
            out += self.declare(item.rank, item.peer, item.early, item.deadline - item.timeout_s)
        return out

    def keys_ready(self, owner: int, batch: int) -> Answers:
        """Record that an owner holds the keys of a batch."""
        unready = self._unready.get(batch, {-1})  # no owner, for a batch that was never sent
        unready.discard(owner)
        if unready:
            return []
        del self._unready[batch]
        self._remove_forgotten(batch)
        return self._answer_ready()

    def keys_failed(self, owner: int, batch: int, message: str) -> Answers:
        """Poison the tensors of a batch that an owner cannot hold."""
        out: Answers = []
        server = f"server {self._numbers.index(owner)}"
        what = "forget" if batch in self._leaving else "hold"
        for tensor in self._tensors.values():
            if tensor.batch == batch:
                text = f"tensor {tensor.name!r}: {server} cannot {what} it: {message}"
                out += self._poison(tensor, "error", text)
        return out + self.keys_ready(owner, batch) + self._answer_ready()

    def forget(self, asked: Mapping[int, Entry]) -> Answers:
        """Forget tensors, as all workers have asked; answer when all servers have dropped them."""
        lasts = [dict(it.asked.tensors) for it in asked.values() if isinstance(it.asked, Forget)]
        why = self._refuse_forget(lasts[0])  # all workers gave the same names
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
                _Pending(rank, entry.peer, entry.asked.request, timeout_s,
                         entry.deadline + timeout_s, tensors, frozenset([batch]), is_forget=True)
            )  # fmt: skip
        out = self._announce(ForgetKeys(batch, tuple(one.tensor_id for one in tensors)))
        if batch not in self._unready:
            self._remove_forgotten(batch)
        return out + self._answer_ready()

    def poison_of(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return kind and text of the error why some of these names can never be forgotten."""
        for name in names:
            tensor = self._tensors.get(name)
            if tensor is not None and tensor.poison is not None:
                kind, text = tensor.poison
                return kind, f"tensor {name!r} cannot be forgotten: {text}"
        return None

    def dropped(self, peer: int, request: int) -> None:
        """Record that a worker has dropped the tensors of a request to forget."""
        self._release_ids(lambda item: (item.peer, item.request) == (peer, request))

    def remove(self, rank: int) -> None:
        """Remove a worker that left; nothing is sent to it any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.rank != rank]
        self._peers.pop(rank, None)
        self._release_ids(lambda item: item.rank == rank)

    def fail_all(self, kind: str, message: str) -> Answers:
        """End every waiting request with the same error."""
        ended, self._waiting = self._waiting, []
        return [(item.peer, Failed(item.request, kind, message)) for item in ended]

    def expire(self, now: float) -> Answers:
        """End the requests whose deadline has passed."""
        late = [item for item in self._waiting if item.deadline <= now]
        self._waiting = [item for item in self._waiting if item.deadline > now]
        out: Answers = []
        for item in late:
            text = self._late_text(item)
            for tensor in item.tensors if item.is_forget else ():
                out += self._poison(tensor, "stall", text)  # some server may have dropped it
            out.append((item.peer, Failed(item.request, "stall", text)))
        return out + (self._answer_ready() if late else [])

    def next_deadline(self) -> float | None:
        """Return the time when expire() has something to do."""
        return min((item.deadline for item in self._waiting), default=None)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """List (peer, request) of all waiting workers."""
        for item in self._waiting:
            yield item.peer, item.request

    def _refuse_forget(self, names: Mapping[str, int]) -> str | None:
        for name in names:
            tensor = self._tensors.get(name)
            if tensor is None or tensor.batch in self._unready:
                return f"tensor {name!r} is not declared and cannot be forgotten"
        return None

    def _remove_forgotten(self, batch: int) -> None:
        """Free the names of a batch that every server has dropped; its ids are freed later."""
        ids: list[tuple[int, int]] = []
        usable = [item for item in self._leaving.pop(batch, ()) if item[0].poison is None]
        for tensor, version in usable:
            del self._tensors[tensor.name]
            self._end_alone(tensor)
            self._validated.discard(tensor.name)
            for nbytes, owner in tensor.pieces:
                self._placement.add_load(self._numbers.index(owner), -nbytes)
            self._n_pieces -= len(tensor.pieces)
            ids.append((tensor.tensor_id, max(version, tensor.version)))
        holders = [item for item in self._waiting if item.is_forget and batch in item.batches]
        self._unreleased.append(([item for item in ids if item[1] < MAX_VERSION], holders))
        del self._unreleased[:-MAX_UNRELEASED]

    def _release_ids(self, has_dropped: Callable[[_Pending], bool]) -> None:
        """Free the ids that no worker holds any more."""
        for ids, holders in self._unreleased:
            holders[:] = [item for item in holders if not has_dropped(item)]
            self._free_ids += [] if holders else ids
        self._unreleased = [one for one in self._unreleased if one[1]]

    def _refuse(self, rank: int, asked: Declare, layouts: Sequence[Layout]) -> str | None:
        """Check a whole batch before any of it takes effect."""
        n_pieces = self._n_pieces
        n_new = n_bytes = 0
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
                    n_new += 1
                    n_bytes += _charge(name, layouts[number])
            except ConfigError as error:
                return f"tensor {name!r}: {error}"
        if text := self._refuse_alone(rank, n_new, n_bytes):
            return text
        if n_pieces <= MAX_PIECES:
            return None
        return (
            f"{len(asked.tensors)} tensors from {asked.tensors[0][0]!r} on, with earlier ones, "
            f"need up to {n_pieces} partitions; a job may have {MAX_PIECES}: raise "
            "FASTPS_PARTITION_BYTES, or declare fewer tensors"
        )

    def _check(self, layout: Layout) -> None:
        """Raise ConfigError if no tensor can have a layout."""
        itemsize = _ITEMSIZES.get(layout.dtype)
        if itemsize is None:
            raise ConfigError(f"dtype code {layout.dtype} is unknown")
        nbytes = math.prod(layout.shape) * itemsize
        if layout.nbytes != nbytes:
            raise ConfigError(f"{_describe(layout)} has {nbytes} bytes, not {layout.nbytes}")
        try:
            layout.coding.check()
            layout.updates.check()
            layout.rule.check()
            layout.gathering.check()
        except ValueError as error:
            raise ConfigError(f"{error}") from None

    def _is_new(self, name: str, layout: Layout) -> bool:
        """Return whether a name adds a tensor to the job. Raises ConfigError."""
        known = self._tensors.get(name)
        if known is not None and known.batch in self._leaving:
            raise ConfigError("it is being forgotten")
        if known is None and layout.policy is Policy.CODEC_STATE:
            self._check_kept(layout)
        return known is None

    def _count_pieces(self, layout: Layout) -> int:
        """Return the most pieces that a new tensor may have; ConfigError if they are too many."""
        cut = {"partition_bytes": layout.partition_bytes}
        check_tensor(layout.nbytes, n_owners=len(self._placement.owners), **cut)
        return most_pieces(layout.nbytes, placement=self._placement, **cut)

    def _check_kept(self, layout: Layout) -> None:
        """Raise ConfigError unless the codecs of the other tensor have state of this layout."""
        other = self._tensors.get(layout.beside)
        if other is None:
            raise ConfigError(f"there is no tensor {layout.beside!r} with codec state")
        theirs = other.layout
        if not (theirs.coding.has(Option.FEEDBACK) and theirs.policy is Policy.SUM
                and (math.prod(theirs.shape),) == layout.shape
                and layout.dtype == DType.FLOAT32):  # fmt: skip
            raise ConfigError(
                f"the codecs of tensor {layout.beside!r} have no state of {_describe(layout)}"
            )

    def _pieces_beside(self, other: _Tensor) -> Pieces:
        """Cut the codec state of a tensor, float32, like that tensor, and add its load."""
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
        """Make a tensor unusable, unless it is, and notify the workers that declared it."""
        if tensor.poison is not None:
            return []
        tensor.poison = (kind, message)
        event = TensorPoisoned(tensor.tensor_id, tensor.name, message)
        return [(self._peers[rank], event) for rank in self._present(tensor)]

    def _present(self, tensor: _Tensor) -> list[int]:
        """List the ranks that declared a tensor and have not left."""
        return [rank for rank in sorted(self._peers) if tensor.agreed >> rank & 1]

    def _answer_ready(self) -> Answers:
        """Answer every request whose outcome is known."""
        out: Answers = []
        still: list[_Pending] = []
        for item in self._waiting:
            outcome = self._outcome(item)
            if outcome is None:
                still.append(item)
            else:
                out.append((item.peer, outcome))
        self._waiting = still
        return out

    def _outcome(self, item: _Pending) -> Declared | Done | Failed | None:
        poisons = [tensor.poison for tensor in item.tensors if tensor.poison is not None]
        if poisons:
            lines = [message for _, message in poisons[:MAX_POISON_LINES]]
            if len(poisons) > MAX_POISON_LINES:
                lines.append(f"and {len(poisons) - MAX_POISON_LINES} more tensors")
            return Failed(item.request, poisons[0][0], "\n".join(lines))
        if not item.batches.isdisjoint(self._unready):
            return None
        if item.is_forget:
            return Done(item.request)
        return Declared(
            item.request,
            tuple(
                DeclaredTensor(tensor.tensor_id, tensor.pieces, tensor.version)
                for tensor in item.tensors
            ),
        )

    def _late_text(self, item: _Pending) -> str:
        if item.early is not None:
            wanted = join_names([repr(name) for name, _ in item.early.tensors])
            return (
                f"declaring {wanted} timed out after {item.timeout_s:g} s; no validator has "
                "declared them; create the same HeldParameters on validators and workers"
            )
        owners = sorted(set().union(*(self._unready.get(batch, ()) for batch in item.batches)))
        names = [repr(tensor.name) for tensor in item.tensors]
        what = "forgetting" if item.is_forget else "declaring"
        missing = join_names([f"server {self._numbers.index(owner)}" for owner in owners])
        return (
            f"{what} {join_names(names)} timed out after {item.timeout_s:g} s; "
            f"not ready: {missing}; raise FASTPS_OP_TIMEOUT_S if they are only slow"
        )

    def _mismatch_text(self, tensor: _Tensor, rank: int, layout: Layout) -> str:
        is_one_array = (layout.dtype, layout.shape) == (tensor.layout.dtype, tensor.layout.shape)
        describe = _describe_fully if is_one_array else _describe
        if rank in self._present(tensor):
            return (
                f"tensor {tensor.name!r} was declared before as {describe(tensor.layout)}, "
                f"and worker {rank} now declares {describe(layout)}; use another name or "
                "prefix=, or forget() it first"
            )
        first = (tensor.agreed & -tensor.agreed).bit_length() - 1
        others = self._names_text(self._present(tensor) or [first])
        ours = layout.parts or ((tensor.name, layout.dtype, layout.shape),)
        theirs = tensor.layout.parts or ((tensor.name, tensor.layout.dtype, tensor.layout.shape),)
        if ours != theirs and (layout.parts or tensor.layout.parts):
            return _parts_text(ours, f"worker {rank}", theirs, others)
        cure = _UPDATES_CURE if layout.updates != tensor.layout.updates else _SAME_CURE
        return (
            f"tensor {tensor.name!r} differs between workers: worker {rank} declared "
            f"{describe(layout)}, but {others} declared {describe(tensor.layout)}{cure}"
        )

    def _names_text(self, ranks: Sequence[int]) -> str:
        """Return the names of workers, and of validators, whose numbers come after them."""
        n = self._n_workers
        return join_names([f"worker {i}" if i < n else f"validator {i - n}" for i in ranks])


def _charge(name: str, layout: Layout) -> int:
    """Return about how many bytes a name takes here."""
    parts = sum(len(part[0]) + PART_BYTES for part in layout.parts) if layout.parts else 0
    return len(name) + NAME_BYTES + parts


def _parts_text(parts: Parts, who: str, others: Parts, them: str) -> str:
    """Return the text about the first difference between lists of tensors sent together."""
    ours, theirs = next(pair for pair in zip_longest(parts, others) if pair[0] != pair[1])
    name = (ours or theirs)[0]
    return (
        f"tensor {name!r}, of those that travel together, differs between workers: {who} has "
        f"{_describe_part(name, ours)}, but {them} has {_describe_part(name, theirs)}; give all "
        "workers the same tensors, in the same order"
    )


def _describe_part(name: str, part: tuple[str, int, tuple[int, ...]] | None) -> str:
    if part is None:
        return "no such tensor there"
    its, dtype, shape = part
    return f"{its!r}, " * (its != name) + f"{DType(dtype).name.lower()} of shape {shape}"


def _validated_names(asked: Declare) -> Iterator[str]:
    """Return the names of a batch whose values come from validators."""
    validated = {
        number for number, one in enumerate(asked.layouts) if one.givers is Givers.VALIDATORS
    }
    return (name for name, number in (asked.tensors if validated else ()) if number in validated)


def _describe(layout: Layout) -> str:
    return f"{DType(layout.dtype).name.lower()} of shape {layout.shape}"


def _describe_fully(layout: Layout) -> str:
    return (
        f"{_describe(layout)} in partitions of at most {layout.partition_bytes} bytes sent as "
        f"chunks of {layout.chunk_bytes} under {layout.policy.name} "
        f"(staleness {layout.staleness}), {layout.coding}"
        + (f", {layout.rule}" if layout.rule.has_meaning() else "")
        + (f", {layout.compensation}" if layout.compensation.strength else "")
        + (f", {layout.gathering}" if layout.policy is Policy.DEADLINE_ROUNDS else "")
        + (f", of updates that are {layout.updates}" if layout.givers is Givers.VALIDATORS else "")
    )
