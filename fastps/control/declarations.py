# SPDX-License-Identifier: Apache-2.0
"""The tensors of one generation: ids, pieces, and whether all workers mean the same by a name.

Decides the id, the pieces and their servers of each tensor, runs the job's only Placement, and
compares what each worker declares with what the first one declared. Pure: time is an argument,
answers are returned as (peer, message) pairs. Knows nothing of connections.
Invariants: a declaration is answered exactly once, when every server holds all its keys or when
that has become impossible; a poisoned tensor stays poisoned for the generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fastps.config import Config
from fastps.control.collectives import Answers, join_names, workers_text
from fastps.control.protocol import (
    Declare,
    Declared,
    DeclaredTensor,
    DeclareKeys,
    Failed,
    KeySpec,
    Pieces,
    TensorPoisoned,
    TensorSpec,
)
from fastps.errors import ConfigError
from fastps.partition import MAX_TENSORS, Placement, check_tensor, cut_tensor
from fastps.types import DType

MAX_POISON_LINES = 4  # tensors named in one MismatchError; the rest are counted


@dataclass
class _Tensor:
    """One name; `first_rank` declared `spec`, `peers` maps ranks that agreed to their peers."""

    tensor_id: int
    spec: TensorSpec
    pieces: Pieces
    first_rank: int
    batch: int  # DeclareKeys that servers must acknowledge
    peers: dict[int, int] = field(default_factory=dict)
    poison: tuple[str, str] | None = None  # kind and message


@dataclass(frozen=True)
class _Waiting:
    """A declaration that waits for servers."""

    rank: int
    peer: int
    asked: Declare
    deadline: float


class Declarations:
    """The tensor table of one generation."""

    def __init__(
        self, config: Config, *, servers: Sequence[int], weights: Sequence[int] = ()
    ) -> None:
        """Place keys on the servers whose peer numbers and weights are given by index.

        Without servers tensors are cut all the same; then the owner, 0, means nothing.
        """
        self._servers = tuple(servers)
        self._placement = Placement(
            tuple(weights) or (1,) * max(len(servers), 1),
            config.key_hash,
            built_in_hash_coef=config.built_in_hash_coef,
        )
        self._tensors: dict[str, _Tensor] = {}
        self._unready: dict[int, set[int]] = {}  # batch -> server indices that have not answered
        self._batches = 0
        self._waiting: list[_Waiting] = []

    def declare(self, rank: int, peer: int, asked: Declare, now: float) -> Answers:
        """Take a batch of a worker; answer it now or when the servers are ready."""
        refusal = self._refuse(asked)
        if refusal is not None:
            return [(peer, Failed(asked.request, "config", refusal))]
        out: Answers = []
        new: list[KeySpec] = []
        for spec in asked.specs:
            tensor = self._tensors.get(spec.name)
            if tensor is None:
                tensor = self._add(rank, spec)
                new.append(_key_spec(tensor))
            elif tensor.poison is None and not _same(tensor.spec, spec):
                out += self._poison(tensor, "mismatch", _mismatch_text(tensor, rank, spec))
            tensor.peers[rank] = peer
        if new:
            out += self._announce(tuple(new))
        self._waiting.append(_Waiting(rank, peer, asked, now + asked.timeout_s))
        return out + self._settle()

    def keys_ready(self, server: int, batch: int) -> Answers:
        """Note that a server holds the keys of a batch."""
        unready = self._unready.get(batch)
        if unready is None or server not in unready:
            return []
        unready.discard(server)
        if unready:
            return []
        del self._unready[batch]
        return self._settle()

    def keys_failed(self, server: int, batch: int, message: str) -> Answers:
        """Poison the tensors of a batch that a server cannot hold."""
        out: Answers = []
        for tensor in self._tensors.values():
            if tensor.batch == batch and tensor.poison is None:
                text = f"tensor {tensor.spec.name!r}: server {server} cannot hold it: {message}"
                out += self._poison(tensor, "error", text)
        return out + self.keys_ready(server, batch) + self._settle()

    def remove(self, rank: int) -> None:
        """Forget a worker that left: nothing is sent to it any more."""
        self._waiting = [waiting for waiting in self._waiting if waiting.rank != rank]
        for tensor in self._tensors.values():
            tensor.peers.pop(rank, None)

    def fail_all(self, kind: str, message: str) -> Answers:
        """End every declaration that waits with the same error."""
        ended, self._waiting = self._waiting, []
        return [(item.peer, Failed(item.asked.request, kind, message)) for item in ended]

    def expire(self, now: float) -> Answers:
        """End the declarations that have waited too long."""
        late = [item for item in self._waiting if item.deadline <= now]
        self._waiting = [item for item in self._waiting if item.deadline > now]
        return [
            (item.peer, Failed(item.asked.request, "stall", self._late_text(item)))
            for item in late
        ]

    def next_deadline(self) -> float | None:
        """Give the time when expire() has something to do."""
        return min((item.deadline for item in self._waiting), default=None)

    def waiting(self) -> Iterator[tuple[int, int]]:
        """List (peer, request) of everybody who waits."""
        for item in self._waiting:
            yield item.peer, item.asked.request

    def _refuse(self, asked: Declare) -> str | None:
        """Check a whole batch before any of it takes effect."""
        if len(self._tensors) + len(asked.specs) > MAX_TENSORS:
            return f"more than {MAX_TENSORS} tensors are declared"
        for spec in asked.specs:
            if spec.dtype not in DType.__members__.values():
                return f"tensor {spec.name!r}: dtype code {spec.dtype} is unknown"
            expected = math.prod(spec.shape) * DType(spec.dtype).itemsize
            if spec.nbytes != expected:
                return (
                    f"tensor {spec.name!r}: {_side(spec)} has {expected} bytes, not {spec.nbytes}"
                )
            try:
                check_tensor(
                    spec.nbytes,
                    partition_bytes=spec.partition_bytes,
                    n_owners=len(self._placement.owners),
                )
            except ConfigError as error:
                return f"tensor {spec.name!r}: {error}"
        return None

    def _add(self, rank: int, spec: TensorSpec) -> _Tensor:
        tensor_id = len(self._tensors)
        cut = cut_tensor(
            spec.nbytes,
            partition_bytes=spec.partition_bytes,
            placement=self._placement,
            tensor_id=tensor_id,
        )
        pieces = tuple((piece.nbytes, piece.owner) for piece in cut)
        tensor = _Tensor(tensor_id, spec, pieces, rank, self._batches)
        self._tensors[spec.name] = tensor
        return tensor

    def _announce(self, keys: tuple[KeySpec, ...]) -> Answers:
        batch = self._batches
        self._batches += 1
        if not self._servers:
            return []
        self._unready[batch] = set(range(len(self._servers)))
        return [(server, DeclareKeys(batch, keys)) for server in self._servers]

    def _poison(self, tensor: _Tensor, kind: str, message: str) -> Answers:
        """Make a tensor unusable and tell those who declared it before."""
        tensor.poison = (kind, message)
        event = TensorPoisoned(tensor.tensor_id, tensor.spec.name, message)
        return [(peer, event) for peer in tensor.peers.values()]

    def _settle(self) -> Answers:
        """Answer every declaration whose outcome is known."""
        out: Answers = []
        still: list[_Waiting] = []
        for item in self._waiting:
            outcome = self._outcome(item.asked)
            if outcome is None:
                still.append(item)
            else:
                out.append((item.peer, outcome))
        self._waiting = still
        return out

    def _outcome(self, asked: Declare) -> Declared | Failed | None:
        tensors = [self._tensors[spec.name] for spec in asked.specs]
        poisons = [tensor.poison for tensor in tensors if tensor.poison is not None]
        if poisons:
            lines = [message for _, message in poisons[:MAX_POISON_LINES]]
            if len(poisons) > MAX_POISON_LINES:
                lines.append(f"and {len(poisons) - MAX_POISON_LINES} more tensors")
            return Failed(asked.request, poisons[0][0], "\n".join(lines))
        if any(tensor.batch in self._unready for tensor in tensors):
            return None
        return Declared(
            asked.request, tuple(DeclaredTensor(item.tensor_id, item.pieces) for item in tensors)
        )

    def _late_text(self, item: _Waiting) -> str:
        batches = {self._tensors[spec.name].batch for spec in item.asked.specs}
        servers = sorted(set().union(*(self._unready.get(batch, set()) for batch in batches)))
        names = [repr(spec.name) for spec in item.asked.specs]
        missing = join_names([f"server {index}" for index in servers])
        return (
            f"declaring {join_names(names)} timed out after {item.asked.timeout_s:g} s; "
            f"not ready: {missing}; raise FASTPS_OP_TIMEOUT_S if they are only slow"
        )


def _same(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.dtype, one.shape, one.partition_bytes, one.chunk_bytes) == (
        other.dtype,
        other.shape,
        other.partition_bytes,
        other.chunk_bytes,
    )


def _key_spec(tensor: _Tensor) -> KeySpec:
    spec = tensor.spec
    return KeySpec(tensor.tensor_id, spec.name, spec.dtype, spec.chunk_bytes, tensor.pieces)


def _side(spec: TensorSpec) -> str:
    return f"{DType(spec.dtype).name.lower()} of shape {spec.shape}"


def _full_side(spec: TensorSpec) -> str:
    return (
        f"{_side(spec)} in partitions of at most {spec.partition_bytes} bytes "
        f"sent as chunks of {spec.chunk_bytes}"
    )


def _mismatch_text(tensor: _Tensor, rank: int, spec: TensorSpec) -> str:
    others = workers_text(sorted(tensor.peers) or [tensor.first_rank])
    return (
        f"tensor {spec.name!r} differs between workers: worker {rank} declared "
        f"{_full_side(spec)}, but {others} declared {_full_side(tensor.spec)}"
    )
