# SPDX-License-Identifier: Apache-2.0
"""fastps for JAX. Only re-exports names.

    import fastps.jax as fps

    fps.init()
    params = fps.broadcast_parameters(params)
    optimizer = fps.distributed(optax.adam(1e-3))  # updates are of averaged gradients
    state = optimizer.init(params)

All of it works within jit; jax.distributed is not needed.
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
from fastps.frameworks.gradient_round import (
    Average,
    Sum,
)
from fastps.frameworks.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_object,
    reducescatter,
)
from fastps.frameworks.jax.optimizer import (
    broadcast_parameters,
    distributed,
)
from fastps.frameworks.jax.sums import (
    InFlight,
    push_pull,
    push_pull_finish,
    push_pull_start,
)

__all__ = [
    "BAND",
    "BOR",
    "BXOR",
    "Adasum",
    "Average",
    "Compression",
    "InFlight",
    "Max",
    "Min",
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
    "broadcast_object",
    "broadcast_parameters",
    "distributed",
    "forget",
    "global_process_set",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "push_pull",
    "push_pull_finish",
    "push_pull_start",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
