# SPDX-License-Identifier: Apache-2.0
"""All names of the plugin that need MXNet; fastps.mxnet imports this when one is used."""

from __future__ import annotations

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
    "DistributedOptimizer",
    "DistributedTrainer",
    "FastPS",
    "ValidatedTrainer",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "push_pull",
    "reducescatter",
    "validator_of",
]
