# SPDX-License-Identifier: Apache-2.0
"""fastps for PyTorch. Only hands names on.

    import fastps.torch as fps

    fps.init()
    fps.broadcast_parameters(model.state_dict())
    optimizer = fps.DistributedOptimizer(optimizer, model.named_parameters())
    for inputs, labels in this_rank_s_batches:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()  # gradients leave while it runs
        optimizer.step()  # waits for their averages

To clip or unscale gradients call optimizer.synchronize() first. Where the optimizer is to stay
as it is, model = fps.DistributedDataParallel(model) does the same as torch's class of that name.
"""

from __future__ import annotations

from fastps import (
    barrier,
    forget,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from fastps.frameworks._adapter import (
    Average,
    Sum,
)
from fastps.frameworks.torch.broadcast import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fastps.frameworks.torch.compression import Compression
from fastps.frameworks.torch.ops import (
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    synchronize,
)
from fastps.frameworks.torch.optimizer import DistributedOptimizer
from fastps.frameworks.torch.parallel import DistributedDataParallel

__all__ = [
    "Average",
    "Compression",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Sum",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "forget",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
