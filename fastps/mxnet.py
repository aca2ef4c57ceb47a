# SPDX-License-Identifier: Apache-2.0
"""fastps for MXNet 1.9. Only re-exports names; the first that needs MXNet imports it.

import fastps.mxnet as fps

fps.compat()  # where NumPy is 1.24 or newer, before `import mxnet`
fps.init()
trainer = fps.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})
with mx.autograd.record():
    loss = loss_of(model(images), labels)
loss.backward()
trainer.step(len(images))  # averages of all workers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastps import (
    BAND,
    BOR,
    BXOR,
    Adasum,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    forget,
    global_process_set,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from fastps.frameworks.built_features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from fastps.frameworks.gradient_round import (
    Average,
    Sum,
)
from fastps.frameworks.horovod import (
    HorovodInternalError,
    cross_rank,
    cross_size,
    start_timeline,
    stop_timeline,
)
from fastps.frameworks.mxnet.aliases import (
    compat,
)
from fastps.ops.neighbors import is_homogeneous

if TYPE_CHECKING:
    from fastps.frameworks.mxnet.store import FastPS, init
    from fastps.frameworks.mxnet.sums import (
        allgather,
        allreduce,
        allreduce_,
        alltoall,
        broadcast,
        broadcast_,
        byteps_declare_tensor,
        byteps_push_pull,
        grouped_allgather,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_reducescatter,
        push_pull,
        reducescatter,
    )
    from fastps.frameworks.mxnet.training import (
        DistributedOptimizer,
        DistributedTrainer,
        broadcast_parameters,
    )
    from fastps.frameworks.mxnet.validated import ValidatedTrainer, validator_of

__all__ = [
    "BAND",
    "BOR",
    "BXOR",
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "FastPS",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "ValidatedTrainer",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "ccl_built",
    "compat",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "forget",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "push_pull",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "validator_of",
]


def __getattr__(name: str) -> Any:
    """Return a name that needs MXNet, which is imported now."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from fastps.frameworks.mxnet import (  # noqa: PLC0415  (after compat())
        store,
        sums,
        training,
        validated,
    )

    home = next(one for one in (store, sums, training, validated) if hasattr(one, name))
    found = globals()[name] = getattr(home, name)
    return found
