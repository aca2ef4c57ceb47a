# SPDX-License-Identifier: Apache-2.0
"""A tf.distribute.MirroredStrategy whose replicas add with those of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import fastps
from fastps.frameworks.gradient_round import Average, Sum
from fastps.frameworks.tensorflow.training import exchange_gradients


class CrossDeviceOps(tf.distribute.ReductionToOneDevice):  # type: ignore[misc]
    """What MirroredStrategy(cross_device_ops=) takes: sums of the replicas of all workers.

    Replicas of a worker add on its first device, workers add these sums, small ones side by side,
    and all replicas get what comes. Means are of means: all workers have as many replicas.
    options: of exchange_gradients(); prefix: another one for a second strategy.
    """

    def __init__(self, *, prefix: str = "Mirrored", **options: Any) -> None:
        """Note how workers add."""
        super().__init__()
        self._prefix = prefix
        self._options = options

    @property
    def _num_between_graph_workers(self) -> int:
        """How many workers there are; with one TensorFlow leaves a lone replica's value be."""
        return fastps.size()

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Reduce one value; called by TensorFlow."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any
    ) -> list[Any]:
        """Reduce several values; called by TensorFlow."""
        inside = super().reduce_implementation
        sums = [
            _first(inside(reduce_op, value, destinations, options))
            for value, destinations in value_destination_pairs
        ]
        op = Sum if reduce_op == tf.distribute.ReduceOp.SUM else Average
        found = exchange_gradients(sums, op=op, prefix=self._prefix, **self._options)
        pairs = zip(found, value_destination_pairs, strict=True)
        return [self.broadcast(one, destinations) for one, (_, destinations) in pairs]


def _first(value: Any) -> Any:
    """Return the value of the first replica, which all have."""
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


def MirroredStrategy(devices: Sequence[str] | None = None, **options: Any) -> Any:
    """Return a tf.distribute.MirroredStrategy of these devices that adds with all workers.

    options: of CrossDeviceOps. Variables are each worker's own until broadcast_variables().
    """
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=CrossDeviceOps(**options))
