# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for the optimizers of Keras 3 and of tf.compat.v1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastps.frameworks.gradient_round import Average, check_op, check_passes
from fastps.frameworks.tensorflow.sessions import SessionOptimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    *,
    backward_passes_per_step: int = 1,
    asynchronous: bool = False,
    **options: Any,
) -> Any:
    """Make an optimizer step with gradients averaged over all workers.

    optimizer: of Keras 3, for which this is fastps.keras.DistributedOptimizer() with all its
    options; or of tf.compat.v1.train, whose compute_gradients() then returns averages. For the
    latter use_locking is the optimizer's, options are those of exchange_gradients(), and
    backward_passes_per_step and asynchronous raise ValueError. TypeError for another optimizer.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if check_passes(backward_passes_per_step) > 1 or asynchronous:
            raise ValueError(
                "backward_passes_per_step and asynchronous are not for optimizers of "
                f"tf.compat.v1, got {type(optimizer).__name__}: use one of tf.keras.optimizers"
            )
        check_op(options.get("op", Average))
        return SessionOptimizer(optimizer, name, use_locking, **options)
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise TypeError(
            "optimizer must be one of Keras 3 or tf.compat.v1.train, not "
            f"{type(optimizer).__name__}; tf.keras.optimizers.legacy are Keras 2's, which this "
            "TensorFlow does not have"
        )
    from fastps.frameworks.keras.optimizer import DistributedOptimizer as wrap  # noqa: PLC0415

    return wrap(
        optimizer, name, backward_passes_per_step=backward_passes_per_step,
        asynchronous=asynchronous, **options,
    )  # fmt: skip
