# SPDX-License-Identifier: Apache-2.0
"""The parts that depend on Keras's back end: exchange of gradients, access to variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from fastps.frameworks.array_exchange import (
    AsynchronousSteps,
    Terms,
    broadcast_in_place,
    exchange_of,
    spec_of,
)


def exchange_gradients(
    gradients: Sequence[Any], prefix: str, terms: Terms, *, sparse_as_dense: bool
) -> list[Any]:
    """Return averages or sums of gradients over all workers; None stays None."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from fastps.frameworks.tensorflow import training  # noqa: PLC0415

        return training.add_gradients(gradients, prefix, terms, sparse_as_dense=sparse_as_dense)
    if name == "jax":
        from fastps.frameworks.jax import sums  # noqa: PLC0415

        found: list[Any] = sums.push_pull_finish(sums.start_tree(list(gradients), prefix, terms))
        return found
    return _exchange_torch(gradients, prefix, terms)


def _exchange_torch(gradients: Sequence[Any], prefix: str, terms: Terms) -> list[Any]:
    """Add PyTorch's tensors in their own memory, if they are contiguous."""
    found = list(gradients)
    places = [i for i, one in enumerate(found) if one is not None]
    for place in places:
        found[place] = found[place].detach().contiguous()
    arrays = [found[i].numpy() for i in places]
    specs = [
        spec_of(f"{prefix}.{i}", one.shape, one.dtype)
        for i, one in zip(places, arrays, strict=True)
    ]
    if specs:
        exchange_of("keras", specs, terms, label=prefix).add(arrays, arrays)
    return found


def step_apart(steps: AsynchronousSteps, variables: Sequence[Any], step: Callable[[], Any]) -> Any:
    """Step, push the changes of variables to the servers, and set them to what servers hold."""
    before = [keras.ops.copy(one) for one in variables]
    found = step()
    changes = [one - old for one, old in zip(variables, before, strict=True)]
    for one, held in zip(variables, _exchange_changes(steps, before, changes), strict=True):
        one.assign(held)
    return found


def _exchange_changes(
    steps: AsynchronousSteps, before: list[Any], changes: list[Any]
) -> list[Any]:
    """Push changes and return what servers hold then; within a compiled step too."""
    count, name = len(before), keras.backend.backend()
    if name == "tensorflow":
        from fastps.frameworks.tensorflow.calls import call  # noqa: PLC0415

        def run(*arrays: Any) -> list[Any]:
            return steps.exchange(arrays[:count], arrays[count:])

        kinds, shapes = [one.dtype for one in before], [one.shape for one in before]
        return call(("apart", id(steps)), run, [*before, *changes], kinds, shapes)
    if name == "jax":
        from fastps.frameworks.jax.async_training import exchange_apart  # noqa: PLC0415

        return exchange_apart(steps, before, changes)
    arrays = [one.detach().numpy() for one in (*before, *changes)]
    return steps.exchange(arrays[:count], arrays[count:])


def host_of(variable: Any) -> Any:
    """Return the value of a variable as an array; Keras's own conversion warns with NumPy 2."""
    inner = getattr(variable, "value", None)
    value = variable if inner is None or callable(inner) else inner
    if hasattr(value, "detach"):
        return value.detach().numpy()
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a random layer, which workers do not share."""
    return str(getattr(variable, "name", "")).startswith("seed_generator_state")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, prefix: str = "Variable"
) -> None:
    """Overwrite Keras's variables on all workers with those of the root; one submit per dtype.

    Blocks; not within a compiled step. Seeds of random layers stay as they are.
    """
    listed = [one for one in variables if not is_seed(one)]
    arrays = [np.array(host_of(one)) for one in listed]
    broadcast_in_place(arrays, [f"{prefix}.{i}" for i in range(len(arrays))], root_rank)
    for variable, array in zip(listed, arrays, strict=True):
        variable.assign(array)
