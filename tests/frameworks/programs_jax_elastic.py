# SPDX-License-Identifier: Apache-2.0
"""What workers of an elastic job do with JAX: steps that tell who took part in them."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from run_program import mark

import fastps
import fastps.jax as fps


def steps(*, count: int = 24) -> dict[str, Any]:
    """Sum trees, at once and under jit; return by step which bits of workers each array has."""
    me = int(os.environ["FASTPS_RANK"])
    fastps.init(elastic=fastps.Elastic(min=1))
    mark("READY")
    value = float(1 << me)
    tree = {
        "a": jnp.full((300, 300), value), "b": [jnp.full(3, value), jnp.full(5, 1 << me)],
        "c": jnp.full((200, 200), value),
    }  # fmt: skip

    @jax.jit
    def later(tree: Any) -> Any:
        return fps.push_pull_finish(fps.push_pull_start(tree, "later", average=False))

    found = []
    for step in range(count):
        sums = later(tree) if step % 2 else fps.push_pull(tree, "now", average=False)
        found.append(
            sorted({float(one) for leaf in jax.tree.leaves(sums) for one in np.ravel(leaf)})
        )
        mark("STEP", step)
    fastps.shutdown()
    return {"found": found}
