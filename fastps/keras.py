# SPDX-License-Identifier: Apache-2.0
"""fastps for Keras 3, with TensorFlow, JAX or PyTorch below. Only hands names on.

import fastps.keras as fps

fps.init()
model.compile(optimizer=fps.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
model.fit(..., callbacks=[fps.callbacks.BroadcastGlobalVariablesCallback()],
          verbose=2 if fps.rank() == 0 else 0)
"""

from __future__ import annotations

from fastps import (
    Compression,
    ProcessSet,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    global_process_set,
    init,
    is_initialized,
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
from fastps.frameworks.keras import (
    callbacks,
)
from fastps.frameworks.keras.optimizer import (
    DistributedOptimizer,
    load_model,
)
from fastps.frameworks.keras.variables import (
    broadcast_variables,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "global_process_set",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
