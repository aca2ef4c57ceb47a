# SPDX-License-Identifier: Apache-2.0
"""distributed(): an optax transformation that steps with averages; trees of one worker for all.

Knows optax by the form of its transformations alone: a named tuple of init and update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastps.frameworks.array_exchange import AsynchronousSteps, broadcast_in_place
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, check_op
from fastps.frameworks.jax.async_training import step_apart
from fastps.frameworks.jax.sums import names_of, push_pull_finish, push_pull_start
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op


def distributed(
    optimizer: Any,
    *,
    op: Op = Average,
    compression: Any = None,
    prefix: str = "Gradient",
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
    asynchronous: bool = False,
    staleness: float | None = None,
) -> Any:
    """Make an optax transformation step with gradients averaged (or summed) over all workers.

    optimizer: an optax.GradientTransformation; one of the same type comes back, whose state is
    the optimizer's own. Its update() may be compiled: then every bucket of gradients leaves when
    it is there, and the rest of the program that does not need the averages goes on.
    compression, bucket_bytes, process_set: of push_pull(). Give a second optimizer whose
    gradients have the same paths another prefix. For several passes per step wrap the result in
    optax.MultiSteps, which calls it once per step.
    asynchronous: gradients stay here, and servers add up what each worker's updates change, as for
    fastps.ServerParameters, whose staleness it takes; update() is given the parameters then, and
    gives what leads from them to what servers hold. Of the rest only prefix counts.
    TypeError for what is no transformation; ValueError for terms that do not go together.
    """
    if not asynchronous and staleness is not None:
        raise ValueError("a staleness is for asynchronous training: give asynchronous=True too")
    if asynchronous and compression is not None:
        raise ValueError("asynchronous training does not compress: changes are added for good")
    average = check_op(op) is Average
    update = getattr(optimizer, "update", None)
    if update is None or not hasattr(optimizer, "_replace"):
        raise TypeError(
            f"an optax transformation is needed, not {type(optimizer).__name__}: for example "
            "distributed(optax.sgd(0.1))"
        )

    if asynchronous:
        steps = AsynchronousSteps(f"{prefix} apart.", staleness)
        return optimizer._replace(update=step_apart(update, steps))

    def step(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        started = push_pull_start(
            gradients, prefix, average=average, compression=compression,
            bucket_bytes=bucket_bytes, process_set=process_set,
        )  # fmt: skip
        return update(push_pull_finish(started), state, params, **extra)

    return optimizer._replace(update=step)


def broadcast_parameters(tree: Any, root_rank: int = 0, prefix: str = "Parameter") -> Any:
    """Return every worker the root's pytree: parameters, or the state of an optimizer.

    Arrays travel in one submit for each dtype, and other leaves as broadcast_object() carries
    them. Shapes and dtypes are the same on all workers (MismatchError). Not under jit. Blocks.
    """
    session = current.current()
    leaves, structure = jax.tree.flatten(tree)
    names = names_of(tree, prefix)
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
    copies = {i: np.array(leaf) for i, leaf in enumerate(leaves) if is_array[i]}
    broadcast_in_place(list(copies.values()), [names[i] for i in copies], root_rank)
    others = [leaf for leaf, it in zip(leaves, is_array, strict=True) if not it]
    if others:
        others = session.broadcast_object(others, root_rank, f"{prefix} others")
    rest = iter(others)
    found = [jnp.asarray(copies[i]) if it else next(rest) for i, it in enumerate(is_array)]
    return jax.tree.unflatten(structure, found)
