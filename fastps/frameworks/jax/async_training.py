# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training within compiled programs: push changes, take what the servers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastps.frameworks.array_exchange import Arrays, AsynchronousSteps
from fastps.frameworks.jax.calls import call, shapes_of


def exchange_apart(
    steps: AsynchronousSteps, before: Sequence[Any], changes: Sequence[Any]
) -> list[Any]:
    """Push the changes of a step to the servers, and return what they hold then."""
    count = len(before)

    def write(_: int, inputs: Arrays, outputs: Arrays) -> None:
        arrays = [inputs[place] for place in range(len(inputs))]
        held = steps.exchange(arrays[:count], arrays[count:])
        for place, one in enumerate(held):
            np.copyto(outputs[place], one)

    key = ("apart", steps, count)
    return call(key, lambda: write, [*before, *changes], shapes_of(before))


def step_apart(update: Callable[..., Any], steps: AsynchronousSteps) -> Callable[..., Any]:
    """Make an optax update() return the difference from its parameters to those of the servers."""

    def step(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise TypeError(
                "asynchronous=True needs the parameters: call update(gradients, state, params)"
            )
        updates, state = update(gradients, state, params, **extra)
        leaves, structure = jax.tree.flatten(params)
        before = [jnp.asarray(leaf) for leaf in leaves]
        changes = [
            jnp.asarray(one, old.dtype)
            for one, old in zip(jax.tree.leaves(updates), before, strict=True)
        ]
        held = exchange_apart(steps, before, changes) if before else []
        differences = [new - old for new, old in zip(held, before, strict=True)]
        return jax.tree.unflatten(structure, differences), state

    return step
