# SPDX-License-Identifier: Apache-2.0
"""What depends on Keras's back end: how gradients are exchanged, and how variables are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from fastps.frameworks.array_exchange import (
    AsynchronousSteps,
    Exchanges,
    broadcast_in_place,
    spec_of,
)
from fastps.frameworks.gradient_round import Average

Exchange = Callable[..., list[Any]]

exchanges = Exchanges()


def exchange_of_backend() -> Exchange:
    """Return f(gradients, prefix=, op=, ...), which averages gradients, None among them."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from fastps.frameworks.tensorflow.training import exchange_gradients  # noqa: PLC0415

        return exchange_gradients
    return _with_jax if name == "jax" else _on_host


def _with_jax(gradients: Sequence[Any], *, prefix: str, op: Any = Average, **options: Any) -> Any:
    """Average within the compiled step."""
    from fastps.frameworks.jax.sums import push_pull_finish, push_pull_start  # noqa: PLC0415

    options.pop("sparse_as_dense", None)
    average = op is Average
    started = push_pull_start(list(gradients), prefix, average=average, **options)
    return push_pull_finish(started)


def _on_host(gradients: Sequence[Any], *, prefix: str, op: Any = Average, **options: Any) -> Any:
    """Average in place, in the gradients' own memory; torch's tensors, contiguous or not."""
    options.pop("sparse_as_dense", None)
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
        exchanges.get(specs, label=prefix, op=op, **options).add(arrays, arrays)
    return found


def step_apart(steps: AsynchronousSteps, variables: Sequence[Any], step: Callable[[], Any]) -> Any:
    """Step, give servers what that has changed of variables, and these what servers hold then."""
    before = [keras.ops.copy(one) for one in variables]
    found = step()
    changes = [one - old for one, old in zip(variables, before, strict=True)]
    for one, held in zip(variables, _held(steps, before, changes), strict=True):
        one.assign(held)
    return found


def _held(steps: AsynchronousSteps, before: list[Any], changes: list[Any]) -> list[Any]:
    """Call for what servers hold, within a compiled step too."""
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
    """Return what a variable holds as an array; Keras's own way warns with NumPy 2."""
    inner = getattr(variable, "value", None)
    value = variable if inner is None or callable(inner) else inner
    if hasattr(value, "detach"):
        return value.detach().numpy()
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def is_seed(variable: Any) -> bool:
    """Return whether it is the state of a random layer, which is each worker's own."""
    return str(getattr(variable, "name", "")).startswith("seed_generator_state")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, prefix: str = "Variable"
) -> None:
    """Overwrite Keras's variables on all workers with those of the root; one submit per dtype.

    Blocks; not within a compiled step. Seeds of random layers stay each worker's own.
    """
    listed = [one for one in variables if not is_seed(one)]
    arrays = [np.array(host_of(one)) for one in listed]
    broadcast_in_place(arrays, [f"{prefix}.{i}" for i in range(len(arrays))], root_rank)
    for variable, array in zip(listed, arrays, strict=True):
        variable.assign(array)
