# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all workers together; imports Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastps.frameworks.gradient_round import Sum
from fastps.frameworks.tensorflow.collectives import allreduce
from fastps.session.process_sets import ProcessSet, global_process_set


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras's BatchNormalization over all workers, or those of process_set, on TensorFlow.

    Batches may have different sizes. In training it blocks twice for the other workers, which run
    the same model: for the mean, and for the variance. options: of BatchNormalization.
    """

    def __init__(self, *, process_set: ProcessSet = global_process_set, **options: Any) -> None:
        """Set the process set; RuntimeError if Keras does not run on TensorFlow."""
        if tf.keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "SyncBatchNormalization needs Keras on TensorFlow, not on "
                f"{tf.keras.backend.backend()}: set KERAS_BACKEND=tensorflow"
            )
        super().__init__(**options)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance of all batches; called by Keras in training."""
        mean, variance = super()._moments(inputs, mask)
        if self._process_set.size() == 1:
            return mean, variance
        number = self._count(inputs, mask, mean.dtype)
        whole = self._sum(tf.concat([mean * number, [number]], 0))
        count = whole[-1]
        whole_mean = whole[:-1] / count
        squares = self._sum((variance + (mean - whole_mean) ** 2) * number)
        return whole_mean, squares / count

    def _sum(self, value: Any) -> Any:
        return allreduce(value, op=Sum, process_set=self._process_set)

    def _count(self, inputs: Any, mask: Any, dtype: Any) -> Any:
        """Return the number of elements of this batch in each channel's mean."""
        if mask is None:
            return tf.cast(tf.size(inputs), dtype) / tf.cast(tf.shape(inputs)[self.axis], dtype)
        places = tf.cast(mask, dtype)
        while places.shape.rank < inputs.shape.rank:
            places = places[..., None]
        sizes = tf.shape(inputs)
        axis = self.axis % inputs.shape.rank
        one_channel = tf.concat([sizes[:axis], [1], sizes[axis + 1 :]], 0)
        return tf.reduce_sum(tf.broadcast_to(places, one_channel))
