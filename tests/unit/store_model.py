# SPDX-License-Identifier: Apache-2.0
"""What Sum does, in plain Python: one key, events in, frames out. The oracle of _rounds.pyx.

What may follow what in a round is read from the table that the store itself goes by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from reduce_oracle import expected

from aids.wire import FrameFlag, FrameKind
from fastps.server._policies import TRANSITIONS, RoundEvent, RoundState
from fastps.types import DType

OK, PEER_LOST, MISMATCH = 0, -3, -5


@dataclass(frozen=True)
class Op:
    """What a pusher says it wants from a round; all pushers must say the same."""

    flags: FrameFlag = FrameFlag(0)  # noqa: RUF009
    root: int = 0  # machine that pushes a broadcast


@dataclass(frozen=True, order=True)
class Frame:
    """What a pusher is to receive; the subject of an ERROR is its culprit."""

    kind: int
    version: int
    offset: int
    payload: bytes = b""
    flags: int = 0
    priority: int = 0
    status: int = 0
    subject: int = 0


@dataclass
class Contribution:
    """What one machine gave to a round."""

    payload: bytes | None  # None: a PULL
    wants_result: bool
    flags: FrameFlag
    cursor: int = 0


@dataclass
class Round:
    """One version of the key."""

    op: Op
    arrived: list[int]
    contributions: dict[int, Contribution] = field(default_factory=dict)
    done: int = 0
    abstained: int = 0
    status: int = OK
    culprit: int = 0


class KeyModel:
    """One key of a store; take() gives the frames that pushers must get, by rank.

    pushers: by machine, the rank that speaks for it. lenders: ranks whose memory is only lent.
    quorum: how many of them have to push.
    """

    def __init__(
        self,
        *,
        n_workers: int,
        pushers: tuple[int, ...],
        lenders: frozenset[int] = frozenset(),
        nbytes: int,
        chunk_bytes: int,
        quorum: int,
    ) -> None:
        self.n_workers, self.pushers, self.lenders = n_workers, pushers, lenders
        self.nbytes, self.chunk_bytes = nbytes, chunk_bytes
        self.n_chunks = max(1, -(-nbytes // chunk_bytes))
        self.quorum = quorum
        self.rounds: dict[int, Round] = {}
        self.states = [RoundState.IDLE, RoundState.IDLE]  # by slot
        self.gone: set[int] = set()
        self.failed = self.summed = 0
        self.out: list[tuple[int, Frame]] = []

    def is_busy(self) -> bool:
        """Tell whether a round is open, or who is there has more to push to one of the last."""
        return RoundState.OPEN in self.states or any(
            self._lacks_bytes(round_)
            for version, round_ in self.rounds.items()
            if version + 2 not in self.rounds
        )

    def has_laggards(self) -> bool:
        """Tell whether somebody who is there has more to push to a round that was replaced.

        The store does not wait for these when it forgets.
        """
        return any(
            self._lacks_bytes(round_)
            for version, round_ in self.rounds.items()
            if version + 2 in self.rounds
        )

    def _lacks_bytes(self, round_: Round) -> bool:
        return any(
            contribution.payload is not None
            and contribution.cursor < self.nbytes
            and rank not in self.gone
            for rank, contribution in round_.contributions.items()
        )

    def take(self) -> list[tuple[int, Frame]]:
        """Give the frames that were sent since the last call."""
        out, self.out = self.out, []
        return out

    def join(self, rank: int, version: int, op: Op, contribution: Contribution) -> None:
        """Let a pusher's first frame of a round arrive; the payload comes by chunk()."""
        if version not in self.rounds:
            self.rounds[version] = Round(op, [0] * self.n_chunks)
            assert self._step(version, RoundEvent.BEGIN)
        round_ = self.rounds[version]
        round_.contributions[rank] = contribution
        newer = self.rounds.get(version + 2)
        if newer is not None:
            self._admit_late_frame(rank, version)
        elif self._is(version, RoundState.FAILED):
            self._error(rank, version, round_.status, round_.culprit)
        elif round_.op != op or self._lacks_quorum(round_, contribution):
            self._fail(version, MISMATCH, rank)
        else:
            self._blame(version)
        if contribution.payload is None:
            for chunk in range(self.n_chunks):
                self._arrive(version, chunk)

    def _is(self, version: int, state: RoundState) -> bool:
        return self.states[version & 1] == state and version + 2 not in self.rounds

    def _step(self, version: int, event: RoundEvent) -> bool:
        """Move a round on; False: the event means nothing in its state."""
        state = TRANSITIONS.get((self.states[version & 1], event))
        if state is None:
            return False
        self.states[version & 1] = state
        return True

    def _lacks_quorum(self, round_: Round, contribution: Contribution) -> bool:
        if contribution.payload is not None or round_.op.flags & FrameFlag.BROADCAST:
            return False
        round_.abstained += 1
        return len(self.pushers) - round_.abstained < self.quorum

    def _admit_late_frame(self, rank: int, version: int) -> None:
        """Answer a pusher whose round failed so long ago that its slot is in use again."""
        before = max(v for v in self.rounds if v % 2 == version % 2) - 2
        failed = self.rounds[before]
        self._error(rank, version, failed.status, failed.culprit)

    def chunk(self, rank: int, version: int) -> None:
        """Let the next chunk of a pusher arrive."""
        contribution = self.rounds[version].contributions[rank]
        index = contribution.cursor // self.chunk_bytes
        contribution.cursor = min(contribution.cursor + self.chunk_bytes, self.nbytes)
        self._arrive(version, index)

    def leave(self, rank: int) -> None:
        """Let the link of a worker end."""
        self.gone.add(rank)
        for version in self.rounds:
            if self._is(version, RoundState.OPEN):
                self._blame(version)

    def _arrive(self, version: int, chunk: int) -> None:
        round_ = self.rounds[version]
        round_.arrived[chunk] += 1
        if round_.arrived[chunk] < len(self.pushers) or not self._is(version, RoundState.OPEN):
            return
        round_.done += 1
        begin = chunk * self.chunk_bytes
        sources = [
            np.frombuffer(contribution.payload[begin : begin + self.chunk_bytes], np.float32)
            for contribution in map(round_.contributions.__getitem__, self.pushers)
            if contribution.payload is not None
        ]
        if not sources:
            self._fail(version, MISMATCH, 0)
            return
        divisor = self.n_workers if round_.op.flags & FrameFlag.AVERAGE else 1
        is_summed = len(sources) > 1 or divisor > 1
        self.summed += is_summed and sources[0].size > 0
        if round_.done == self.n_chunks:
            assert self._step(version, RoundEvent.LAST_SUM)
        result = expected(DType.FLOAT32, sources, divisor) if is_summed else sources[0]
        self._results(version, begin, result.tobytes())

    def _results(self, version: int, begin: int, payload: bytes) -> None:
        round_ = self.rounds[version]
        kind, flags = FrameKind.RESULT, round_.op.flags
        for rank, contribution in round_.contributions.items():
            if contribution.wants_result:
                self.out.append((rank, Frame(kind, version, begin, payload, flags)))
            elif round_.done == self.n_chunks:
                self.out.append((rank, Frame(kind, version, 0, b"", flags | FrameFlag.NO_RESULT)))

    def _blame(self, version: int) -> None:
        contributions = self.rounds[version].contributions
        for rank in self.pushers:
            if rank in self.gone and not self._stays(rank, contributions.get(rank)):
                self._fail(version, PEER_LOST, rank)
                return

    def _stays(self, rank: int, contribution: Contribution | None) -> bool:
        """Tell whether a pusher's contribution is whole and does not leave with it."""
        if contribution is None or contribution.payload is None:
            return contribution is not None
        is_lent = rank in self.lenders and contribution.cursor > 0
        return contribution.cursor == self.nbytes and not is_lent

    def _fail(self, version: int, status: int, culprit: int) -> None:
        round_ = self.rounds[version]
        if not self._step(version, RoundEvent.FAIL):
            return
        self.failed += 1
        round_.status, round_.culprit = status, culprit
        for rank in round_.contributions:
            self._error(rank, version, status, culprit)

    def _error(self, rank: int, version: int, status: int, culprit: int) -> None:
        frame = Frame(FrameKind.ERROR, version, 0, flags=0, status=status, subject=culprit)
        self.out.append((rank, frame))
