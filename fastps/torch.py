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
    BAND,
    BOR,
    BXOR,
    Adasum,
    Max,
    Min,
    ProcessSet,
    Product,
    add_process_set,
    allgather_object,
    barrier,
    forget,
    global_process_set,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from fastps.frameworks._adapter import (
    Average,
    Sum,
)
from fastps.frameworks.torch.backend import register as _register
from fastps.frameworks.torch.batchnorm import SyncBatchNorm
from fastps.frameworks.torch.broadcast import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fastps.frameworks.torch.built import (
    cuda_built,
    gloo_built,
    mpi_built,
    mpi_threads_supported,
    nccl_built,
)
from fastps.frameworks.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    receive,
    receive_async,
    reducescatter,
    reducescatter_async,
    send,
    send_async,
    sparse_allreduce_async,
)
from fastps.frameworks.torch.comm_hook import comm_hook
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
    "BAND",
    "BOR",
    "BXOR",
    "Adasum",
    "Average",
    "Compression",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "comm_hook",
    "cuda_built",
    "declare",
    "forget",
    "global_process_set",
    "gloo_built",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "receive",
    "receive_async",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "send",
    "send_async",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

_register()  # init_process_group("fastps")
