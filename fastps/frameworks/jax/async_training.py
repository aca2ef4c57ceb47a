# SPDX-License-Identifier: Apache-2.0
"""Steps that servers add up, within compiled programs: changes leave, what is held comes back."""

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
    """Send servers what a step has changed, and return what they hold then."""
    count = len(before)

    def write(_: int, inputs: Arrays, outputs: Arrays) -> None:
        arrays = [inputs[place] for place in range(len(inputs))]
        held = steps.exchange(arrays[:count], arrays[count:])
        for place, one in enumerate(held):
            np.copyto(outputs[place], one)

    key = ("apart", steps, count)
    return call(key, lambda: write, [*before, *changes], shapes_of(before))


def step_apart(update: Callable[..., Any], steps: AsynchronousSteps) -> Callable[..., Any]:
    """Make an optax update() give what leads from its parameters to what servers hold then."""

    def step(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if params is None:
            raise TypeError("servers hold the parameters: update(gradients, state, params)")
        updates, state = update(gradients, state, params, **extra)
        leaves, structure = jax.tree.flatten(params)
        before = [jnp.asarray(leaf) for leaf in leaves]
        changes = [
            jnp.asarray(one, old.dtype)
            for one, old in zip(jax.tree.leaves(updates), before, strict=True)
        ]
        held = exchange_apart(steps, before, changes) if before else []
        moved = [new - old for new, old in zip(held, before, strict=True)]
        return jax.tree.unflatten(structure, moved), state

    return step
