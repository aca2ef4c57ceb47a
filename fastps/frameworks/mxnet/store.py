# SPDX-License-Identifier: Apache-2.0
"""The KVStore by the name "fastps", and the beginning and end of a job."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx

import fastps
from fastps.contract.codec import Coding
from fastps.contract.compression import Choice, coding_of
from fastps.errors import ConfigError
from fastps.frameworks import horovod
from fastps.frameworks.gradient_round import Sum
from fastps.frameworks.mxnet.sums import add_in_place, broadcast_arrays

_KEY = "kvstore"  # where names begin


@mx.kvstore.KVStoreBase.register
class FastPS(mx.kvstore.KVStoreBase):  # type: ignore[misc]
    """What gluon.Trainer(..., kvstore="fastps") uses: sums over all workers, in MXNet's engine.

    As with MXNet's dist_sync gradients are summed, not averaged, so step() wants the batch size of
    all workers together. Parameters are updated by the workers. One trainer in a process; for more
    see DistributedTrainer.
    """

    def __init__(self) -> None:
        """Join the job, if that was not done."""
        fastps.init()
        self._compression: Choice = None

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write worker 0's value into out; blocks."""
        found = value.copy()
        broadcast_arrays([found], [f"{_KEY}.{key}.begin"], 0)
        for one in _listed(out):
            one[:] = found

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum a value over the devices and workers, into out or itself; returns at once."""
        values = _listed(value)
        outs = values if out is None else _listed(out)
        if len(values) > 1 or outs[0] is not values[0]:
            outs[0][:] = mx.nd.add_n(*[one.as_in_context(outs[0].context) for one in values])
        add_in_place(
            outs[0], f"{_KEY}.{key}", op=Sum, compression=self._compression, priority=priority
        )
        for one in outs[1:]:
            one[:] = outs[0]

    def set_gradient_compression(self, compression_params: Choice) -> None:
        """Take the compression_params of gluon.Trainer, which are those of DistributedTrainer.

        Not onebit without scaling: the first pushpull() raises ConfigError.
        """
        self._compression = compression_params and partial(_codec_of, compression_params)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: optimizers are run by workers."""
        return False

    @property
    def type(self) -> str:
        """What MXNet looks for in a store's name: dist and sync."""
        return "dist_sync_fastps"

    @property
    def rank(self) -> int:
        """This worker's number."""
        return fastps.rank()

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return fastps.size()


def _codec_of(choice: Choice, name: str) -> Coding | None:
    """Return the codec of a key; ConfigError for one that has to come after step()'s division."""
    coding = coding_of(choice, name)
    if coding is not None and not coding.keeps_scale:
        raise ConfigError(
            f"{name!r} is {coding}, and step() would divide these signs by the batch size: give "
            "scaling=True, or use fastps.mxnet.DistributedTrainer"
        )
    return coding


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _create_kvstore(kvstore: Any, *rest: Any) -> Any:
    """Make the store also for one device, where MXNet leaves out all whose name lacks "dist"."""
    return _create_original(FastPS() if kvstore == "fastps" else kvstore, *rest)


_create_original = mx.gluon.trainer._create_kvstore
mx.gluon.trainer._create_kvstore = _create_kvstore


def init(comm: Any = None, process_sets: Any = None, **settings: object) -> None:
    """Join the job; MXNet knows the KVStore "fastps" from now on.

    comm, process_sets: of fastps.torch.init(), as Horovod has them. settings: of fastps.init().
    """
    horovod.init(comm, process_sets, **settings)
