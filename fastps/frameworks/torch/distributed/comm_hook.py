# SPDX-License-Identifier: Apache-2.0
"""A communication hook for torch's own DistributedDataParallel.

Its buckets then travel as fastps tensors, through servers or shared memory, whatever the backend
of its process group is. Called by the thread that runs backward().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fastps.config import load
from fastps.errors import ConfigError
from fastps.frameworks.torch.distributed.work import Completer, Operation
from fastps.frameworks.torch.ops.compression import (
    Compressing,
    Compression,
    WireCodec,
    compressor_of,
)
from fastps.frameworks.torch.ops.tensors import (
    check_on_cpu,
    check_tensor,
    free_name,
    submit_push_pull,
    view_of,
    wire_dtype,
)
from fastps.session import current

Hook: TypeAlias = Callable[[object, Any], "torch.futures.Future[torch.Tensor]"]


def comm_hook(name: str = "ddp", *, compression: Compressing = Compression.none) -> Hook:
    """Return a hook for DistributedDataParallel.register_comm_hook(None, hook).

    Gradients are averaged over all workers of the job. name: a different one for each model.
    compression: as for push_pull(). Buckets of earlier layers have the higher priority. backward()
    raises TypeError for a sparse gradient, and ConfigError under torch's "python_reducer", which
    has no buckets.
    """
    if current.is_initialized():
        current.check_not_elastic(
            "torch's DistributedDataParallel", "use fastps.torch.DistributedDataParallel"
        )
    completer, timeout_s = Completer(), load({}).op_timeout_s
    compressor = compressor_of(compression)
    options = {"compression": compressor.choice} if isinstance(compressor, WireCodec) else {}

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if isinstance(bucket, tuple):
            raise ConfigError(
                f'comm_hook("{name}") needs buckets, but torch passes single gradients with '
                'torch._dynamo.config.optimize_ddp = "python_reducer": leave the hook out, or use '
                "fastps.torch.DistributedOptimizer"
            )
        gradients, index = bucket.buffer(), bucket.index()
        label = f"{name}.{index}"
        check_tensor(gradients, label)
        check_on_cpu(gradients, label, "comm_hook()")
        sent, context = compressor.compress(gradients)
        operation = _start(sent, label, priority=index, **options)
        return completer.future(operation, timeout_s, lambda: compressor.decompress(sent, context))

    hook.__annotations__.clear()  # torch compares them with its own, and these are text
    return hook


def _start(tensor: torch.Tensor, label: str, *, priority: int, **options: Any) -> Operation:
    code, session = wire_dtype(tensor.dtype, label), current.current()
    name = free_name(session, label, tuple(tensor.shape), code)  # torch lays buckets out anew
    started = submit_push_pull(
        session, [view_of(tensor)], [code], [name], average=True, priorities=[priority], **options
    )
    return Operation([handle for handle, _ in started], written=[tensor])
