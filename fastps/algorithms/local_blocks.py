# SPDX-License-Identifier: Apache-2.0
"""What local steps share, with rounds or without: blocks, who sends which, and what comes of it.

A worker's change of a block is counted from a base. What it sends makes the next values; what it
leaves out stays in its own values, on top of what is agreed then: counted from that, it is sent
with what comes next (error reset of CSER; Xie, Zheng, Koyejo, Gupta, Li and Lin, NeurIPS 2020);
counted from what the worker has, it never is, as ZenoPS's code has it. Knows tensors only as
something with `[...]`. All of it runs in the thread that steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastps.worker.handle import Array

Reset: TypeAlias = Literal["kept", "literal"]


@dataclass(frozen=True)
class ParticipationSchedule:
    """Who leaves what out of an exchange, and what becomes of it; the same on all workers."""

    participation: float = 1.0
    sparsity: float = 0.0
    error_reset: Reset = "kept"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse lots that cannot be. Raises ValueError."""
        if not (0 < self.participation <= 1 and 0 <= self.sparsity < 1):
            raise ValueError(
                f"participation={self.participation} is above 0 and at most 1, and "
                f"sparsity={self.sparsity} 0 to below 1"
            )
        if self.error_reset not in ("kept", "literal") or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"error_reset={self.error_reset!r} is 'kept' or 'literal', and seed={self.seed} a "
                "number of 64 bits"
            )

    @property
    def skips(self) -> bool:
        """Return whether something may be left out."""
        return self.participation < 1 or self.sparsity > 0

    def draw(self, size: int, fragment: int, exchange: int, n: int) -> np.ndarray[Any, Any]:
        """Draw who sends which of n tensors in an exchange of a fragment: bool[size, n].

        A counter and no state, so all workers know it of each other and in any order.
        """
        counter = [0, fragment, exchange, 0]
        lots = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
        drawn = lots.random((size, n + 1))
        found: np.ndarray[Any, Any] = (drawn[:, :1] < self.participation) & (
            drawn[:, 1:] >= self.sparsity
        )
        return found


@dataclass
class Block:
    """One tensor: what the worker trains, what all agreed on, and where its change travels.

    agreed: float32 for halves; without rounds, what came from servers last. base: what changes
    are counted from; agreed itself, unless an error reset is literal. rounding: of halves, by how
    much own is more than what it stands for, which is no change of the worker's; None: by nothing.
    value: where servers hold it, what came from them. lane: which of its fragment's rooms `change`
    and `value` are views of.
    """

    own: Any
    agreed: Any
    base: Any = None
    rounding: Any = None
    change: Any = None
    value: Any = None
    lane: int = 0


def is_narrow(block: Block) -> bool:
    """Return whether what is agreed is rounded where the worker trains it: halves."""
    return bool(block.own.dtype != block.agreed.dtype)


class Blocks(ABC):
    """What is done to blocks; subclasses know what a tensor is."""

    _subtract: ClassVar[Callable[..., Any]]
    _clone: ClassVar[Callable[..., Any]]
    _packed: ClassVar[Callable[..., Any]]  # copies an array into what checkpoints may hold

    @abstractmethod
    def _widen(self, own: Any) -> Any:
        """Copy a tensor, so wide that small changes of it add up."""

    def _give_back(self, block: Block, last: Any, keep: float, reset: Reset) -> None:
        """Copy what is agreed now to the worker.

        last: what was, of a tensor that it did not send: its own change stays on top. keep: the
        share of its own that it keeps of others.
        """
        if last is None:
            block.base = block.agreed
            self._take(block, keep)
            return
        last -= block.agreed
        if is_narrow(block):
            self._put(block, self._whole(block) - last)
        else:
            own = block.own
            own -= last
        if reset == "literal":
            block.base = self._whole(block)

    def _take(self, block: Block, keep: float) -> None:
        """Copy what is agreed to the worker; keep: the share of its own that it keeps."""
        own, agreed = block.own, block.agreed
        if keep and own.dtype == agreed.dtype:  # where it lies: new memory costs more than passes
            own -= agreed
            own *= keep
            own += agreed
            return
        self._put(block, agreed + keep * (self._exact(block) - agreed) if keep else agreed)

    def _exact(self, block: Block) -> Any:
        """Return what the worker trains to read: itself, or, of halves, a copy as _whole()."""
        return self._whole(block) if is_narrow(block) else block.own

    def _whole(self, block: Block) -> Any:
        """Copy what the worker trains, as wide as what is agreed, and not rounded by _put()."""
        whole = self._widen(block.own)
        if block.rounding is not None:
            whole -= block.rounding
        return whole

    def _put(self, block: Block, value: Any) -> None:
        """Copy a value to the worker, also one that its type has to round."""
        block.own[...] = value
        if is_narrow(block):
            block.rounding = self._widen(block.own) - value


class ArrayBlocks(Blocks):
    """Blocks of NumPy arrays."""

    _subtract = staticmethod(np.subtract)
    _clone = staticmethod(np.copy)
    _packed = staticmethod(np.copy)

    def _widen(self, own: Array) -> Array:
        return np.array(own, np.float32 if own.dtype == np.float16 else own.dtype, order="C")
