# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for Keras 3: apply() on averages, with any back end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras

from fastps.contract.compression import Choice, coding_of, is_own
from fastps.frameworks.array_exchange import AsynchronousSteps, Terms
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, check_op, check_passes
from fastps.frameworks.keras.variables import exchange_gradients, step_apart
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    op: Op = Average,
    compression: Choice = None,
    prefix: str = "Gradient",
    sparse_as_dense: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    asynchronous: bool = False,
    staleness: float | None = None,
) -> Any:
    """Make a Keras optimizer step with gradients averaged (or summed) over all workers.

    Return a new optimizer, of a subclass of the given one's, with its name and configuration. Its
    apply() exchanges first, so model.compile(), fit() and training loops need no change. Saved
    models contain the original optimizer. Compile with jit_compile=False if the back end is
    TensorFlow. name: of the new optimizer. op, compression, bucket_bytes, process_set: of
    fastps.torch's. sparse_as_dense: tf.IndexedSlices travel with all their zeros. Gradients are
    named by prefix and place: a second model needs another prefix. backward_passes_per_step: so
    many gradients are accumulated, by Keras's gradient_accumulation_steps, and their mean travels;
    with JAX, every gradient does.
    asynchronous: gradients stay local, and servers add the changes of each worker's steps, as for
    fastps.ServerParameters, which explains staleness. TypeError if optimizer is not a Keras
    optimizer, ValueError if it is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer must be a Keras optimizer, not {type(optimizer).__name__}")
    base = type(optimizer)
    if hasattr(base, "is_distributed"):
        raise ValueError("the optimizer is a DistributedOptimizer already: use it as it is")
    _check_scale(optimizer, compression)
    terms = Terms(check_op(op), compression, bucket_bytes, process_set)
    steps = AsynchronousSteps(f"{prefix} apart.", staleness) if asynchronous else None
    config = dict(optimizer.get_config()) | ({} if name is None else {"name": name})
    if check_passes(backward_passes_per_step) > 1:
        config["gradient_accumulation_steps"] = backward_passes_per_step
    is_late = bool(config.get("gradient_accumulation_steps"))

    exchange = partial(
        exchange_gradients, prefix=prefix, terms=terms, sparse_as_dense=sparse_as_dense
    )

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Average the gradients, and apply them."""
        return base.apply(self, exchange(grads), trainable_variables)

    def clip(self: Any, grads: Any) -> Any:
        """Average the accumulated gradients, and clip them."""
        return base._clip_gradients(self, exchange(grads))

    if steps is not None:
        body: dict[str, Any] = {"apply": _apply_apart(base, steps)}
    else:
        body = {"_clip_gradients": clip} if is_late else {"apply": apply}
    body |= {"__doc__": base.__doc__, "__module__": base.__module__, "is_distributed": True}
    kind: Any = type(base.__name__, (base,), body)
    return kind.from_config(config)


def _check_scale(optimizer: Any, compression: Choice) -> None:
    """Raise ValueError for a loss scale, which a codec of signs drops and the optimizer undoes."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    coding = None if callable(compression) and not is_own(compression) else coding_of(compression)
    if coding is not None and not coding.keeps_scale:
        raise ValueError(
            f"the compression is {coding}, and LossScaleOptimizer would divide the signs by its "
            "scale: pass scaling=True, or LossScaleOptimizer(DistributedOptimizer(optimizer))"
        )


def _apply_apart(base: Any, steps: AsynchronousSteps) -> Any:
    """Return the method apply() of an optimizer that steps by itself, and pushes its changes."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply this worker's gradients, push the changes, and take what the servers hold."""
        listed = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if listed is None else listed
        return step_apart(steps, variables, lambda: base.apply(self, grads, listed))

    return apply


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a saved model, with its optimizer as a DistributedOptimizer.

    custom_optimizers: the program's own classes. custom_objects: of keras.models.load_model().
    options: of DistributedOptimizer(). The optimizer's state is kept.
    """
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects=own | dict(custom_objects or {}))
    optimizer = model.optimizer
    if optimizer is None or hasattr(optimizer, "is_distributed"):
        return model
    wrapped = DistributedOptimizer(optimizer, **options)
    wrapped.build(model.trainable_variables)
    for new, old in zip(wrapped.variables, optimizer.variables, strict=True):
        new.assign(old)
    model.optimizer = wrapped
    return model
