# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with op=Adasum: each worker steps by itself, and Adasum adds the steps.

So Adasum combines the optimizers' updates, not gradients, as in Horovod. Blocks within step().
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastps.collectives.adasum import adasum
from fastps.frameworks.torch.ops.compression import Compressor
from fastps.frameworks.torch.ops.tensors import (
    check_tensor,
    sendable,
    tensor_over,
    view_of,
    wire_dtype,
)
from fastps.frameworks.torch.optimizer.step_common import adopt as adopted
from fastps.session.process_sets import ProcessSet


class AdasumOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer(op=Adasum) adds to an optimizer's class."""

    _compression: Compressor
    _label: str
    _process_set: ProcessSet

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, and replace it by the Adasum of all workers' steps; blocks."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)
        with torch.no_grad():
            steps = [p - old for p, old in zip(parameters, before, strict=True)]
            for p, old, step in zip(parameters, before, self._sum(steps), strict=True):
                p.copy_(old + step)
        return loss

    def synchronize(self) -> None:
        """Do nothing: gradients stay this worker's own."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Refuse, as Horovod does."""
        raise AssertionError(
            "op=Adasum does not support skip_synchronize(): step() combines the workers' steps"
        )

    def _sum(self, steps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the Adasum of each tensor, those of one dtype in one exchange."""
        packed = [self._compression.compress(step) for step in steps]
        wires = [sendable(check_tensor(wire, self._label)) for wire, _ in packed]
        found = list(wires)
        for dtype in dict.fromkeys(wire.dtype for wire in wires):
            places = [place for place, wire in enumerate(wires) if wire.dtype is dtype]
            arrays = [view_of(wires[place]) for place in places]
            sums = adasum(
                arrays, wire_dtype(dtype, self._label), self._process_set.group(),
                f"{self._label}{dtype}",
            )  # fmt: skip
            for place, array in zip(places, sums, strict=True):
                found[place] = tensor_over(array, dtype).to(packed[place][0].device)
        return [
            self._compression.decompress(one, context)
            for one, (_, context) in zip(found, packed, strict=True)
        ]


def adopt(
    optimizer: torch.optim.Optimizer, compression: Compressor, prefix: str, process_set: ProcessSet
) -> AdasumOptimizer:
    """Make the optimizer combine its steps with those of the other workers."""
    return adopted(
        optimizer, AdasumOptimizer, "Adasum",
        _compression=compression, _label=f"{prefix}adasum.", _process_set=process_set,
    )  # fmt: skip
