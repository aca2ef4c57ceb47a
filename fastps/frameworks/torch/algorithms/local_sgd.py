# SPDX-License-Identifier: Apache-2.0
"""LocalSGD of PyTorch: any inner optimizer, any outer one of torch.optim.

See algorithms/local_sgd_base.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fastps.algorithms.local_blocks import Block, Reset
from fastps.algorithms.local_sgd_base import LocalSteps, Terms
from fastps.algorithms.outer import Outer
from fastps.contract.rule import Choice as Rule
from fastps.errors import ConfigError
from fastps.frameworks.torch.algorithms.inner_steps import InnerSteps, TensorBlocks
from fastps.frameworks.torch.gradients import unwrapped
from fastps.frameworks.torch.ops.compression import Compressing, choice_of
from fastps.frameworks.torch.ops.tensors import (
    check_tensor,
    submit_broadcast,
    submit_push_pull,
    tensor_over,
    view_of,
    wire_dtype,
    write_over,
)
from fastps.session.current import current
from fastps.types import DType
from fastps.worker.handle import Array


class LocalSGD(TensorBlocks, LocalSteps, InnerSteps):
    """Train with steps of one's own, and exchange what they changed every so many steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | Outer | None = None,
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
        compression: Compressing = None,
        rule: Rule = None,
        average_buffers: bool = True,
        prefix: str = "",
    ) -> None:
        """Take rank 0's parameters on all workers, and keep them as what is agreed; blocks.

        model: its parameters that train are exchanged. inner: any optimizer of them; its state
        stays each worker's own. outer: an optimizer of the same parameters that has not stepped
        yet; it is handed the agreed ones in their place, and its gradient is the average, over
        the workers, of agreed minus own. None averages the models; DiLoCo is torch.optim.SGD(
        model.parameters(), lr=0.7, momentum=0.9, nesterov=True). sync_every: H, steps from one
        exchange of a parameter to the next. fragments: in how many parts the model leaves, one
        every H / fragments steps. delay: steps from when a fragment leaves until it is put into
        the model; less than H. keep: which share of its own parameters a worker keeps then; by
        default 0, and 0.5 with a delay, whose steps would be lost (alpha of Streaming DiLoCo).
        participation: probability with which a worker takes part in an exchange, sparsity: with
        which it leaves a tensor out of it; drawn by counters from seed; the average is over those
        that send. error_reset: "kept" sends later what was left out, "literal" never. compression,
        rule: of fastps.push_pull(); rules see each fragment (with sparsity, tensor) by itself, and
        buffers. average_buffers: of floats that are saved with the model, with the first fragment.
        outer_on: "servers" lets these hold what is agreed, and the outer optimizer, which is then
        of fastps.outer; deadline_s does so too, and ends an exchange so many seconds after the
        first worker's part of it came, without the late, whose part counts in the next one;
        buffers are then averaged by synchronize() alone. prefix: another one for a second model.
        All workers call it alike. Raises ValueError, TypeError, and what push_pull() does.
        """
        keep = (0.5 if delay else 0.0) if keep is None else keep
        terms = Terms(
            sync_every, fragments, delay, keep, participation, sparsity, error_reset, seed,
            deadline_s, outer_on,
        )  # fmt: skip
        unwrapped.stop(current())
        self.inner, self._model, self._average_buffers = inner, model, average_buffers
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        with torch.no_grad():
            super().__init__(
                named, terms, compression=choice_of(compression), rule=rule,
                prefix=f"{prefix}LocalSGD", outer=outer,
            )  # fmt: skip
        self.outer = None if isinstance(outer, Outer) else self._adopt(outer)
        if self.outer is None and not terms.is_gathered:
            raise TypeError(f"{outer} is for servers: say outer_on='servers', or give torch's")

    def _adopt(self, outer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """Hand the outer optimizer the agreed parameters in place of the model's."""
        agreed = {block.own: block.agreed for one in self._fragments for block in one.blocks}
        if outer is None:
            return torch.optim.SGD(agreed.values(), lr=1.0)
        if outer.state:
            raise ValueError("the outer optimizer has stepped already; give a new one")
        given = [one for group in outer.param_groups for one in group["params"]]
        if set(given) != set(agreed):
            raise ValueError(
                "the outer optimizer has other parameters than those of the model that train; "
                "make it of model.parameters()"
            )
        for group in outer.param_groups:
            group["params"] = [agreed[one] for one in group["params"]]
        return outer

    # ---- steps ----

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that somebody else did, say a GradScaler; all workers count alike.

        Begins to send the fragment whose turn it is, without waiting, and puts into the model the
        one that is due; blocks for that one until it is there.
        """
        super().advance()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange now what has changed, so that all workers have the same model; blocks.

        For the end of training, or before a test. All workers call it after as many steps. What
        has just been exchanged by all is not sent again.
        """
        super().synchronize()

    # ---- what is torch's ----

    def _check(self, named: Sequence[tuple[str, Any]]) -> None:
        for name, one in named:
            check_tensor(one, name)
        if current().config.goes_on and self._averaged():
            raise ConfigError(
                f"{self._averaged()[0][0]!r} is averaged over all workers, and "
                "FASTPS_ON_LOSS=reweight goes on without some: say average_buffers=False"
            )

    def _seed(self, named: Sequence[tuple[str, Any]]) -> None:
        tensors = [one.detach() for _, one in named]
        whole = [one.contiguous() for one in tensors]
        for handle in submit_broadcast(current(), whole, [name for name, _ in named], 0):
            handle.wait()
        for tensor, values in zip(tensors, whole, strict=True):
            tensor.copy_(values)

    def _code(self, agreed: torch.Tensor) -> DType:
        return wire_dtype(agreed.dtype, self._prefix)

    def _over(self, room: Array, agreed: torch.Tensor) -> torch.Tensor:
        return tensor_over(room, agreed.dtype).view(agreed.shape)

    def _take(self, block: Block, keep: float) -> None:
        if keep and block.own.dtype == block.agreed.dtype:
            block.own.lerp_(block.agreed, 1.0 - keep)  # one pass in place of three
            return
        super()._take(block, keep)

    def _improve(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.agreed.grad = block.change
        assert self.outer is not None
        self.outer.step()
        for block in blocks:
            block.agreed.grad = None

    def _outer_state(self) -> Any:
        keeper = self._gathered if self.outer is None else self.outer
        assert keeper is not None
        return keeper.state_dict()

    def _load_outer(self, state: Any) -> None:
        keeper = self._gathered if self.outer is None else self.outer
        assert keeper is not None
        keeper.load_state_dict(state)

    def _averaged(self) -> list[tuple[str, torch.Tensor]]:
        """List the buffers that are averaged."""
        saved = self._model.state_dict().keys()
        return [
            (name, one)
            for name, one in self._model.named_buffers()
            if self._average_buffers and one.is_floating_point() and name in saved
        ]

    def _mix_rest(self) -> None:
        named = self._averaged()
        whole = [one.detach().contiguous() for _, one in named]
        for handle, _ in submit_push_pull(
            current(),
            [view_of(one) for one in whole],
            [wire_dtype(one.dtype, name) for name, one in named],
            [f"{self._prefix}.{name}" for name, _ in named],
            average=True,
            priorities=[0] * len(named),
            rule=self._how["rule"],
        ):
            handle.wait()
        for (_, one), found in zip(named, whole, strict=True):
            write_over(one, found)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on, but the model's own state; waits for fragments.

        With it goes what this worker's codecs keep (error feedback, momentum), and with rank 0's
        what those of servers keep: with error feedback all workers call it after as many steps.
        Each worker saves its own: the states of inner optimizers differ.
        """
        return super().state_dict() | {"inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict(); the model's own state is loaded besides. ValueError else."""
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])
