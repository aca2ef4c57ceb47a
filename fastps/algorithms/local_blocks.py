# SPDX-License-Identifier: Apache-2.0
"""What local SGD shares, with rounds or without: blocks, participation, and error reset.

A worker's change of a block is its difference from a base. Changes that it sends make the next
agreed values; a change that it leaves out stays in its own values, on top of the agreed ones. If
the base is then the agreed values, the change is sent with the next one (error reset of CSER; Xie,
Zheng, Koyejo, Gupta, Li and Lin, NeurIPS 2020). If the base is the worker's own values, it is
never sent, as in ZenoPS's code. Knows tensors only as something with `[...]`. All of it runs in
the thread that steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastps.worker.handle import Array

Reset: TypeAlias = Literal["kept", "literal"]


@dataclass(frozen=True, kw_only=True)
class ParticipationSchedule:
    """Which worker leaves which tensor out of an exchange; the same on all workers."""

    participation: float = 1.0
    sparsity: float = 0.0
    error_reset: Reset = "kept"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for options out of range."""
        if not (0 < self.participation <= 1 and 0 <= self.sparsity < 1):
            raise ValueError(
                "participation must be > 0 and <= 1, and sparsity >= 0 and < 1, got "
                f"participation={self.participation} and sparsity={self.sparsity}"
            )
        if self.error_reset not in ("kept", "literal") or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                "error_reset must be 'kept' or 'literal', and seed >= 0 and < 2**64, got "
                f"error_reset={self.error_reset!r} and seed={self.seed}"
            )

    @property
    def skips(self) -> bool:
        """Return whether tensors may be left out."""
        return self.participation < 1 or self.sparsity > 0

    def draw(self, size: int, fragment: int, exchange: int, n: int) -> np.ndarray[Any, Any]:
        """Draw which worker sends which of n tensors in an exchange of a fragment: bool[size, n].

        Drawn from a counter, without state, so all workers know it of each other in any order.
        """
        counter = [0, fragment, exchange, 0]
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
        drawn = generator.random((size, n + 1))
        found: np.ndarray[Any, Any] = (drawn[:, :1] < self.participation) & (
            drawn[:, 1:] >= self.sparsity
        )
        return found

    def sent_by(self, rank: int, size: int, exchange: int, n: int) -> list[bool]:
        """Return which of n tensors a worker sends in an exchange of all of them."""
        if not self.skips:
            return [True] * n
        return [bool(one) for one in self.draw(size, 0, exchange, n)[rank]]


@dataclass
class Block:
    """One tensor: the worker's own values, the agreed ones, and the memory of its change.

    agreed: float32 for halves; without rounds, the last values from servers. base: the values that
    changes are differences from; `agreed` itself, unless error_reset is "literal". rounding: of
    halves, by how much rounding made `own` larger, which is no change by the worker; None: 0.
    value: if servers hold the agreed values, the last ones from them. lane: the buffer of its
    fragment that `change` and `value` are views of.
    """

    own: Any
    agreed: Any
    base: Any = None
    rounding: Any = None
    change: Any = None
    value: Any = None
    lane: int = 0


def is_narrow(block: Block) -> bool:
    """Return whether the worker trains a half type, to which agreed values are rounded."""
    return bool(block.own.dtype != block.agreed.dtype)


class Blocks(ABC):
    """Operations on blocks; subclasses know the type of tensors."""

    _subtract: ClassVar[Callable[..., Any]]
    _clone: ClassVar[Callable[..., Any]]
    _packed: ClassVar[Callable[..., Any]]  # copies an array into a type for checkpoints

    @abstractmethod
    def _widen(self, own: Any) -> Any:
        """Copy a tensor, halves as float32, so that small changes add up."""

    def _give_back(self, block: Block, last: Any, keep: float, reset: Reset) -> None:
        """Copy the new agreed values to the worker.

        last: the agreed values before, for a tensor that the worker did not send; its own change
        then stays on top. keep: for other tensors, the share of its own values that it keeps.
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
        """Copy the agreed values to the worker; keep: the share of its own that it keeps."""
        own, agreed = block.own, block.agreed
        if keep and own.dtype == agreed.dtype:  # in place: new memory costs more than passes
            own -= agreed
            own *= keep
            own += agreed
            return
        self._put(block, agreed + keep * (self._exact(block) - agreed) if keep else agreed)

    def _exact(self, block: Block) -> Any:
        """Return the worker's values to read: the tensor itself, or for halves _whole()."""
        return self._whole(block) if is_narrow(block) else block.own

    def _whole(self, block: Block) -> Any:
        """Copy the worker's values in the type of the agreed ones, without _put()'s rounding."""
        whole = self._widen(block.own)
        if block.rounding is not None:
            whole -= block.rounding
        return whole

    def _put(self, block: Block, value: Any) -> None:
        """Copy a value to the worker, and remember its rounding if the type is narrower."""
        block.own[...] = value
        if is_narrow(block):
            block.rounding = self._widen(block.own) - value


def widened(own: Array) -> Array:
    """Copy an array, halves as float32, so that small changes add up."""
    return np.array(own, np.float32 if own.dtype == np.float16 else own.dtype, order="C")


class ArrayBlocks(Blocks):
    """Blocks of NumPy arrays."""

    _subtract = staticmethod(np.subtract)
    _clone = staticmethod(np.copy)
    _packed = staticmethod(np.copy)

    def _widen(self, own: Array) -> Array:
        return widened(own)
