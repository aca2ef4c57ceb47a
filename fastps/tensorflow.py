# SPDX-License-Identifier: Apache-2.0
"""fastps for TensorFlow 2. Only hands names on.

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
from fastps.frameworks.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_object,
    reducescatter,
)
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
    broadcast_variables,
    exchange_gradients,
)

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
    "Max",
    "Min",
    "MirroredStrategy",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "exchange_gradients",
    "forget",
    "global_process_set",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
