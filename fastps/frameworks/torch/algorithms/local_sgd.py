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
    check_on_cpu,
    check_tensor,
    submit_broadcast,
    submit_push_pull,
    tensor_over,
    view_of,
    wire_dtype,
    write_over,
)
from fastps.session.current import current, in_one_scope
from fastps.types import DType
from fastps.worker.handle import Array


class LocalSGD(TensorBlocks, LocalSteps, InnerSteps):
    """Train with local steps, and exchange their changes every sync_every steps."""

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
        """Take rank 0's parameters as the agreed ones on all workers; blocks.

        model: its trainable parameters are exchanged. inner: any optimizer of them; its state
        stays on the worker. outer: a fresh optimizer of the same parameters; it gets the agreed
        parameters instead, and its gradient is the average, over the workers, of agreed minus own.
        None averages the models; DiLoCo is torch.optim.SGD(model.parameters(), lr=0.7,
        momentum=0.9, nesterov=True). sync_every: H, steps from one exchange of a parameter to the
        next. fragments: the number of parts of the model; one is sent every H / fragments steps.
        delay: steps from sending a fragment to applying the result; less than H. keep: the share
        of its own parameters that a worker keeps then; by default 0, and 0.5 with a delay, whose
        steps would be lost (alpha of Streaming DiLoCo).
        participation: probability with which a worker takes part in an exchange, sparsity: with
        which it leaves a tensor out; drawn from counters and seed. The average is over the workers
        that send. error_reset: "kept" sends later what was left out, "literal" never. compression,
        rule: of fastps.push_pull(); a rule sees each fragment (with sparsity, each tensor) by
        itself, and buffers. average_buffers: average floating-point buffers that are saved with
        the model, with the first fragment.
        outer_on: "servers" makes servers hold the agreed parameters and the outer optimizer, which
        is then of fastps.outer. deadline_s does so too, and ends an exchange so many seconds after
        the first worker's part arrived. Parts of late workers count in the next exchange, and only
        synchronize() averages buffers. prefix: a second model needs another one.
        All workers call it with the same options. Raises ValueError, TypeError, and what
        push_pull() does.
        """
        keep = (0.5 if delay else 0.0) if keep is None else keep
        terms = Terms(
            sync_every=sync_every, fragments=fragments, delay=delay, keep=keep,
            participation=participation, sparsity=sparsity, error_reset=error_reset, seed=seed,
            deadline_s=deadline_s, outer_on=outer_on,
        )  # fmt: skip
        unwrapped.stop(current())
        self.inner, self._model, self._has_buffers = inner, model, average_buffers
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        with torch.no_grad():
            super().__init__(
                named, terms, compression=choice_of(compression), rule=rule,
                prefix=f"{prefix}LocalSGD", outer=outer,
            )  # fmt: skip
        self.outer = None if isinstance(outer, Outer) else self._adopt(outer)
        if self.outer is None and not terms.is_on_servers:
            raise TypeError(
                f"outer={type(outer).__name__} of fastps.outer needs outer_on='servers': pass "
                "that, or an optimizer of torch.optim"
            )

    def _adopt(self, outer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """Replace the outer optimizer's parameters by the agreed ones."""
        agreed = {block.own: block.agreed for one in self._fragments for block in one.blocks}
        if outer is None:
            return torch.optim.SGD(agreed.values(), lr=1.0)
        if outer.state:
            raise ValueError("the outer optimizer has stepped already: pass a new one")
        given = [one for group in outer.param_groups for one in group["params"]]
        if set(given) != set(agreed):
            raise ValueError(
                "the outer optimizer has other parameters than the trainable ones of the model: "
                "make it of model.parameters()"
            )
        for group in outer.param_groups:
            group["params"] = [agreed[one] for one in group["params"]]
        return outer

    # ---- steps ----

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that other code did, as a GradScaler; all workers count the same steps.

        Starts to send the fragment whose turn it is, and applies the one that is due to the model;
        blocks until the latter has arrived.
        """
        super().advance()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange all changes now, so that all workers have the same model; blocks.

        For the end of training, or before a test. All workers call it after the same number of
        steps. Fragments that all workers have just exchanged are not sent again.
        """
        super().synchronize()

    # ---- of torch ----

    def _check(self, named: Sequence[tuple[str, Any]]) -> None:
        for name, one in named:
            check_on_cpu(check_tensor(one, name), name, "LocalSGD")
        if current().config.goes_on and self._averaged():
            raise ConfigError(
                f"buffer {self._averaged()[0][0]!r} is averaged over all workers, which "
                "FASTPS_ON_LOSS=reweight does not support: pass average_buffers=False"
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

    def _over(self, array: Array, agreed: torch.Tensor) -> torch.Tensor:
        return tensor_over(array, agreed.dtype).view(agreed.shape)

    def _take(self, block: Block, keep: float) -> None:
        if keep and block.own.dtype == block.agreed.dtype:
            block.own.lerp_(block.agreed, 1.0 - keep)  # one pass instead of three
            return
        super()._take(block, keep)

    def _outer_step(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.agreed.grad = block.change
        assert self.outer is not None
        self.outer.step()
        for block in blocks:
            block.agreed.grad = None

    def _outer_optimizer(self) -> Any:
        return self._servers if self.outer is None else self.outer

    def _averaged(self) -> list[tuple[str, torch.Tensor]]:
        """List the buffers that are averaged."""
        saved = self._model.state_dict().keys()
        return [
            (name, one)
            for name, one in self._model.named_buffers()
            if self._has_buffers and one.is_floating_point() and name in saved
        ]

    def _average_buffers(self) -> None:
        named = self._averaged()
        whole = [one.detach().contiguous() for _, one in named]
        with in_one_scope(current()) as scope:
            started = submit_push_pull(
                current(),
                [view_of(one) for one in whole],
                [wire_dtype(one.dtype, name) for name, one in named],
                [f"{self._prefix}.{name}" for name, _ in named],
                average=True,
                priorities=[0] * len(named),
                rule=self._how["rule"],
                **scope,
            )
        for handle, _ in started:
            handle.wait()
        for (_, one), found in zip(named, whole, strict=True):
            write_over(one, found)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, without the model's own; waits for fragments.

        It includes the state of this worker's codecs (error feedback, momentum), and rank 0's that
        of the servers' codecs. With error feedback all workers call it after the same number of
        steps. Each worker saves its own, because the states of inner optimizers differ.
        """
        return super().state_dict() | {"inner": self.inner.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict(), besides loading the model. ValueError for another model."""
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])
