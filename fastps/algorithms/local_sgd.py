# SPDX-License-Identifier: Apache-2.0
"""LocalSGD of NumPy arrays, with any optimizer of the user's. See local_sgd_base.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fastps.algorithms.local_blocks import ArrayBlocks, Block, Reset
from fastps.algorithms.local_sgd_base import LocalSteps, Terms
from fastps.algorithms.outer import Outer
from fastps.contract.compression import Choice
from fastps.contract.rule import Choice as Rule
from fastps.session.current import current
from fastps.types import DType, dtype_of
from fastps.worker.handle import Array


class LocalSGD(ArrayBlocks, LocalSteps):
    """Train arrays with local steps, and exchange their changes every sync_every steps."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        outer: Outer | None = None,
        *,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        keep: float | None = None,
        participation: float = 1.0,
        sparsity: float = 0.0,
        error_reset: Reset = "kept",
        seed: int = 0,
        deadline_s: float | None = None,
        outer_on: Literal["workers", "servers"] = "workers",
        compression: Choice = None,
        rule: Rule = None,
        prefix: str = "",
    ) -> None:
        """Take rank 0's arrays as the agreed values on all workers; blocks.

        parameters: C-contiguous arrays of floats by name, of the same shapes on all workers;
        written by step(). outer: of fastps.outer; None averages. The other keywords are those of
        fastps.torch.LocalSGD. Raises ValueError, TypeError, and what push_pull() does.
        """
        keep = (0.5 if delay else 0.0) if keep is None else keep
        terms = Terms(
            sync_every=sync_every, fragments=fragments, delay=delay, keep=keep,
            participation=participation, sparsity=sparsity, error_reset=error_reset, seed=seed,
            deadline_s=deadline_s, outer_on=outer_on,
        )  # fmt: skip
        super().__init__(
            list(parameters.items()), terms, compression=compression, rule=rule,
            prefix=f"{prefix}LocalSGD", outer=outer,
        )  # fmt: skip
        self.outer = Outer() if outer is None else outer
        blocks = [block for one in self._fragments for block in one.blocks]
        self._places = {id(block): place for place, block in enumerate(blocks)}

    def step(self) -> None:
        """Count a step that was done on the arrays; see advance()."""
        self.advance()

    def _check(self, named: Sequence[tuple[str, Array]]) -> None:
        for name, array in named:
            if array.dtype.kind != "f":
                raise TypeError(
                    f"array {name!r} is {array.dtype}, and LocalSGD needs floats: use np.float32, "
                    "or leave the array out"
                )

    def _seed(self, named: Sequence[tuple[str, Array]]) -> None:
        arrays, names = [array for _, array in named], [name for name, _ in named]
        current().broadcast_async(arrays, 0, names).wait()

    def _code(self, agreed: Array) -> DType:
        return dtype_of(agreed.dtype)

    def _over(self, array: Array, agreed: Array) -> Array:
        return array.reshape(agreed.shape)

    def _outer_step(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.outer.step(self._places[id(block)], block.agreed, block.change)

    def _outer_optimizer(self) -> Outer:
        return self.outer
