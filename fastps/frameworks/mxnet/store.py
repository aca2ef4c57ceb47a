# SPDX-License-Identifier: Apache-2.0
"""The KVStore "fastps", and init()."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx

import fastps
from fastps.contract.codec import Coding
from fastps.contract.compression import Choice, coding_of
from fastps.errors import ConfigError
from fastps.frameworks import horovod
from fastps.frameworks.array_exchange import Terms
from fastps.frameworks.gradient_round import Sum
from fastps.frameworks.mxnet.sums import add_in_place, broadcast_arrays
from fastps.session import current

_KEY = "kvstore"  # prefix of names


@mx.kvstore.KVStoreBase.register
class FastPS(mx.kvstore.KVStoreBase):  # type: ignore[misc]
    """The store of gluon.Trainer(..., kvstore="fastps"): sums over all workers, in MXNet's engine.

    Gradients are summed, not averaged, as with MXNet's dist_sync; so step() needs the batch size
    of all workers together. Workers update the parameters. A process may have one such trainer;
    for more use DistributedTrainer.
    """

    def __init__(self) -> None:
        """Join the job, if the process has not joined it."""
        fastps.init()
        current.check_not_elastic(
            'the KVStore "fastps"', "use fastps.mxnet.DistributedTrainer instead of gluon.Trainer"
        )
        self._terms = Terms(Sum)

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
        add_in_place(outs[0], f"{_KEY}.{key}", self._terms, priority=priority)
        for one in outs[1:]:
            one[:] = outs[0]

    def set_gradient_compression(self, compression_params: Choice) -> None:
        """Set the compression_params of gluon.Trainer, the same as those of DistributedTrainer.

        With onebit without scaling the first pushpull() raises ConfigError.
        """
        choice = compression_params and partial(_codec_of, compression_params)
        self._terms = Terms(Sum, choice)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: workers run the optimizers."""
        return False

    @property
    def type(self) -> str:
        """A name with "dist" and "sync", which MXNet looks for."""
        return "dist_sync_fastps"

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return fastps.rank()

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return fastps.size()


def _codec_of(choice: Choice, name: str) -> Coding | None:
    """Return the codec of a key; ConfigError for one that must come after step()'s division."""
    coding = coding_of(choice, name)
    if coding is not None and not coding.keeps_scale:
        raise ConfigError(
            f"the compression of {name!r} is {coding}, and step() would divide its signs by the "
            "batch size: pass scaling=True, or use fastps.mxnet.DistributedTrainer"
        )
    return coding


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _create_kvstore(kvstore: Any, *rest: Any) -> Any:
    """Create the store for one device too, for which MXNet ignores names without "dist"."""
    return _create_original(FastPS() if kvstore == "fastps" else kvstore, *rest)


_create_original = mx.gluon.trainer._create_kvstore
mx.gluon.trainer._create_kvstore = _create_kvstore


def init(comm: Any = None, process_sets: Any = None, **settings: object) -> None:
    """Join the job; importing this function registered the KVStore "fastps" with MXNet.

    comm, process_sets: of fastps.torch.init(), as Horovod has them. settings: of fastps.init().
    """
    horovod.init(comm, process_sets, **settings)
