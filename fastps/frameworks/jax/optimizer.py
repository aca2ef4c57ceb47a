# SPDX-License-Identifier: Apache-2.0
"""distributed(): an optax transformation that steps with averages; broadcasts of pytrees.

Knows optax only by the form of its transformations: a named tuple of init and update.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastps.frameworks.array_exchange import AsynchronousSteps, Terms, broadcast_in_place
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, check_op
from fastps.frameworks.jax.async_training import step_apart
from fastps.frameworks.jax.sums import names_of, push_pull_finish, start_tree
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

    optimizer: an optax.GradientTransformation; the result has its type and its state. update()
    may be compiled: every bucket of gradients leaves when it is ready, and the program goes on
    until it needs the averages. compression, bucket_bytes, process_set: of push_pull(). A second
    optimizer whose gradients have the same paths needs another prefix. For several passes per
    step wrap the result in optax.MultiSteps, which calls it once per step.
    asynchronous: gradients stay local, and servers add the updates of each worker, as for
    fastps.ServerParameters, which explains staleness. update() then needs the parameters, and
    returns the difference from them to those of the servers. Only prefix counts then.
    TypeError if optimizer is not a transformation; ValueError for arguments that exclude each
    other.
    """
    if not asynchronous and staleness is not None:
        raise ValueError(f"staleness={staleness!r} has no meaning without asynchronous=True")
    if asynchronous and compression is not None:
        raise ValueError(
            f"asynchronous=True does not compress, got compression={compression!r}: leave it out"
        )
    terms = Terms(check_op(op), compression, bucket_bytes, process_set)
    update = getattr(optimizer, "update", None)
    if update is None or not hasattr(optimizer, "_replace"):
        raise TypeError(
            f"optimizer must be an optax transformation, not {type(optimizer).__name__}: for "
            "example distributed(optax.sgd(0.1))"
        )

    if asynchronous:
        steps = AsynchronousSteps(f"{prefix} apart.", staleness)
        return optimizer._replace(update=step_apart(update, steps))

    def step(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        averages = push_pull_finish(start_tree(gradients, prefix, terms))
        return update(averages, state, params, **extra)

    return optimizer._replace(update=step)


def broadcast_parameters(tree: Any, root_rank: int = 0, prefix: str = "Parameter") -> Any:
    """Return the root's pytree on all workers: parameters, or the state of an optimizer.

    Arrays travel in one submit for each dtype, other leaves as those of broadcast_object().
    MismatchError where shapes or dtypes differ between workers. Not under jit. Blocks.
    """
    session = current.current()
    root = session.root_of(root_rank)
    leaves, structure = jax.tree.flatten(tree)
    names = names_of(tree, prefix)
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
    copies = {i: np.array(leaf) for i, leaf in enumerate(leaves) if is_array[i]}
    broadcast_in_place(list(copies.values()), [names[i] for i in copies], root)
    others = [leaf for leaf, it in zip(leaves, is_array, strict=True) if not it]
    if others:
        others = session.broadcast_object(others, root, f"{prefix} others")
    rest = iter(others)
    found = [jnp.asarray(copies[i]) if it else next(rest) for i, it in enumerate(is_array)]
    return jax.tree.unflatten(structure, found)
