# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for Keras 3: apply() on averages, with whatever back end there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from fastps.contract.compression import Choice, coding_of, is_own
from fastps.frameworks.array_exchange import AsynchronousSteps
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, check_op, check_passes
from fastps.frameworks.keras.variables import exchange_of_backend, step_apart
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
    apply() exchanges first, so model.compile(), fit() and loops of one's own stay as they are;
    what is saved is the optimizer alone. Compile with jit_compile=False where the
    back end is TensorFlow. name: the new optimizer's. op, compression, bucket_bytes, process_set:
    of fastps.torch's. sparse_as_dense: tf.IndexedSlices travel with all their zeros. Gradients
    are named by prefix and place: give a second model another prefix. backward_passes_per_step:
    gradients are accumulated so often, by Keras's gradient_accumulation_steps, and the mean
    travels; with JAX, every gradient does.
    asynchronous: gradients stay here, and servers add up what each worker's steps change, as for
    fastps.ServerParameters, whose staleness it takes. TypeError for what is no Keras optimizer,
    ValueError for one that is distributed already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer must be a Keras optimizer, not {type(optimizer).__name__}")
    base = type(optimizer)
    if hasattr(base, "is_distributed"):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    _check_scale(optimizer, compression)
    options: dict[str, Any] = {
        "op": check_op(op), "compression": compression, "prefix": prefix,
        "sparse_as_dense": sparse_as_dense, "bucket_bytes": bucket_bytes,
        "process_set": process_set,
    }  # fmt: skip
    steps = AsynchronousSteps(f"{prefix} apart.", staleness) if asynchronous else None
    config = dict(optimizer.get_config()) | ({} if name is None else {"name": name})
    if check_passes(backward_passes_per_step) > 1:
        config["gradient_accumulation_steps"] = backward_passes_per_step
    is_late = bool(config.get("gradient_accumulation_steps"))
    if steps is None:
        words = {"_clip_gradients" if is_late else "apply": _exchanging(base, is_late, options)}
    else:
        words = {"apply": _apart(base, steps)}
    words |= {"__doc__": base.__doc__, "__module__": base.__module__, "is_distributed": True}
    kind: Any = type(base.__name__, (base,), words)
    return kind.from_config(config)


def _check_scale(optimizer: Any, compression: Choice) -> None:
    """Refuse a loss scale, which the optimizer would undo after a codec has dropped it."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    coding = None if callable(compression) and not is_own(compression) else coding_of(compression)
    if coding is not None and not coding.keeps_scale:
        raise ValueError(
            f"gradients are {coding}, and LossScaleOptimizer would divide the signs by its scale: "
            "give scaling=True, or LossScaleOptimizer(DistributedOptimizer(inner optimizer))"
        )


def _exchanging(base: Any, is_late: bool, options: Mapping[str, Any]) -> Any:
    """Return the method that exchanges: of what was accumulated, or of all gradients."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Average the gradients, and apply them."""
        found = exchange_of_backend()(list(grads), **options)
        return base.apply(self, found, trainable_variables)

    def clip(self: Any, grads: Any) -> Any:
        """Average the accumulated gradients, and clip them."""
        return base._clip_gradients(self, exchange_of_backend()(list(grads), **options))

    return clip if is_late else apply


def _apart(base: Any, steps: AsynchronousSteps) -> Any:
    """Return the method that steps by itself, and lets servers add that up."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply this worker's gradients, and take what servers hold then."""
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given
        return step_apart(steps, variables, lambda: base.apply(self, grads, given))

    return apply


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a model that was saved with any optimizer, distributed or not, and distribute that.

    custom_optimizers: classes of one's own. custom_objects: of keras.models.load_model(). options:
    of DistributedOptimizer(). The optimizer's state is kept.
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
