# SPDX-License-Identifier: Apache-2.0
"""fastps for Keras 3, with TensorFlow, JAX or PyTorch below. Only re-exports names.

import fastps.keras as fps

fps.init()
model.compile(optimizer=fps.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
model.fit(..., callbacks=[fps.callbacks.BroadcastGlobalVariablesCallback()],
          verbose=2 if fps.rank() == 0 else 0)
"""

from __future__ import annotations

from fastps import (
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
from fastps.frameworks.keras import (
    callbacks,
    elastic,
)
from fastps.frameworks.keras.optimizer import (
    DistributedOptimizer,
    load_model,
)
from fastps.frameworks.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from fastps.frameworks.keras.variables import (
    broadcast_variables,
)
from fastps.ops.neighbors import is_homogeneous

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
