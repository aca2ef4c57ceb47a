# SPDX-License-Identifier: Apache-2.0
"""fastps for TensorFlow 2. Only re-exports names; those that need Keras import it.

    import fastps.tensorflow as fps

    fps.init()
    fps.broadcast_variables(model.variables)
    with fps.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(model(images), labels)
    gradients = tape.gradient(loss, model.trainable_variables)  # averages of all workers
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

For model.fit() see fastps.keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    init,
    start_timeline,
    stop_timeline,
)
from fastps.frameworks.tensorflow import elastic
from fastps.frameworks.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_object_fn,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from fastps.frameworks.tensorflow.compression import Compression
from fastps.frameworks.tensorflow.optimizer import (
    DistributedOptimizer,
)
from fastps.frameworks.tensorflow.sessions import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
)
from fastps.frameworks.tensorflow.strategy import (
    CrossDeviceOps,
    MirroredStrategy,
)
from fastps.frameworks.tensorflow.sums import (
    push_pull,
)
from fastps.frameworks.tensorflow.training import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    broadcast_variables,
    exchange_gradients,
)
from fastps.ops.neighbors import is_homogeneous

if TYPE_CHECKING:
    from fastps.frameworks.tensorflow.batchnorm import SyncBatchNormalization

__all__ = [
    "BAND",
    "BOR",
    "BXOR",
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "CrossDeviceOps",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "MirroredStrategy",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "exchange_gradients",
    "forget",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "push_pull",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Return a name that needs Keras, which is imported now."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    from fastps.frameworks.tensorflow.batchnorm import SyncBatchNormalization  # noqa: PLC0415

    return SyncBatchNormalization
