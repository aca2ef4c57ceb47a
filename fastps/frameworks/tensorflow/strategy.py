# SPDX-License-Identifier: Apache-2.0
"""A tf.distribute.MirroredStrategy whose sums are over the replicas of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import fastps
from fastps.frameworks.gradient_round import Average, Sum
from fastps.frameworks.tensorflow.training import exchange_gradients


class CrossDeviceOps(tf.distribute.ReductionToOneDevice):  # type: ignore[misc]
    """Sums over the replicas of all workers, for MirroredStrategy(cross_device_ops=).

    The replicas of a worker are summed on its first device; these sums are added over the workers,
    and all replicas get the result. Means are means of means, so all workers need the same number
    of replicas. options: of exchange_gradients(); prefix: another one for a second strategy.
    """

    def __init__(self, *, prefix: str = "Mirrored", **options: Any) -> None:
        """Set the options of the exchange."""
        super().__init__()
        self._prefix = prefix
        self._options = options

    @property
    def _num_between_graph_workers(self) -> int:
        """The number of workers; TensorFlow skips the sum of one replica if it is 1."""
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
    """Return the value of the first replica; all replicas have the same."""
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


def MirroredStrategy(devices: Sequence[str] | None = None, **options: Any) -> Any:
    """Return a tf.distribute.MirroredStrategy of these devices that adds over all workers.

    options: of CrossDeviceOps. broadcast_variables() gives all workers the same variables.
    """
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=CrossDeviceOps(**options))
