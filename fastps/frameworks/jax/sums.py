# SPDX-License-Identifier: Apache-2.0
"""push_pull of pytrees, at once or as a start and a finish, under every transformation of JAX.

A tree is one exchange: its leaves are named by their paths, small ones travel side by side, and
priorities fall along the tree. A compiled program calls the exchange with XLA's own memory.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastps.frameworks.array_exchange import ArrayExchange, Arrays, Spec, Terms, spec_of
from fastps.frameworks.gradient_round import BUCKET_BYTES, check_name, of_gradient, op_of
from fastps.frameworks.jax.calls import call, is_native, shapes_of
from fastps.session.process_sets import ProcessSet, global_process_set

TOKEN = jax.ShapeDtypeStruct((), np.int8)  # an empty value by which one call waits for another


@dataclass(frozen=True)
class How:
    """How the leaves of a tree are added; programs are compiled for it, so it is hashable."""

    label: str  # the name of the tree
    names: tuple[str, ...]  # of the leaves
    key: Hashable  # of the terms
    terms: Terms = field(compare=False)


class Plan:
    """The exchanges of one list of leaves: one for each device of this process."""

    def __init__(self, how: How, specs: Sequence[Spec], *, is_copied: bool) -> None:
        self._how = how
        self._specs = specs
        self._is_copied = is_copied
        self._on: dict[int, ArrayExchange] = {}
        self.buckets = self.on(0).plan  # places of the leaves in each bucket

    def on(self, device: int) -> ArrayExchange:
        """Return the exchange of a device with the devices of its number in other processes."""
        if device not in self._on:
            mark = f"@{device}" if device else ""
            self._on[device] = ArrayExchange(
                [spec._replace(name=spec.name + mark) for spec in self._specs],
                self._how.terms,
                label=self._how.label + mark,
                is_copied=self._is_copied,
            )
        return self._on[device]

    def add(self, device: int, inputs: Arrays, outputs: Arrays) -> None:
        """Add all leaves at once."""
        self.on(device).add(inputs, outputs)

    def start(self, bucket: int, device: int, inputs: Arrays, outputs: Arrays) -> None:
        """Start the sum of a bucket, whose memory XLA may use again when this returns."""
        self.on(device).start(bucket, inputs)

    def finish(self, bucket: int, device: int, inputs: Arrays, outputs: Arrays) -> None:
        """Wait for all buckets, and write the results of one."""
        self.on(device).end()
        self.on(device).take(bucket, outputs)

    def take(self, bucket: int, device: int, inputs: Arrays, outputs: Arrays) -> None:
        """Write the results of another bucket."""
        self.on(device).take(bucket, outputs)


@functools.cache
def plan_of(how: How, specs: tuple[Spec, ...], *, is_copied: bool = False) -> Plan:
    """Return the plan for leaves, the same one for the same arguments in all programs."""
    return Plan(how, specs, is_copied=is_copied)


def _specs(how: How, leaves: Sequence[Any]) -> tuple[Spec, ...]:
    return tuple(
        spec_of(name, leaf.shape, leaf.dtype) for name, leaf in zip(how.names, leaves, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0)
def _add_now(how: How, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    specs = _specs(how, leaves)
    plan = plan_of(how, specs)
    key = ("add", how, specs)
    return tuple(call(key, lambda: plan.add, leaves, shapes_of(leaves), is_pure=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add(how: How, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _add_now(how, leaves)
    return found


def _forward(how: How, leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], None]:
    return _add(how, leaves), None


def _backward(how: How, _: None, gradients: tuple[Any, ...]) -> tuple[tuple[Any, ...]]:
    """Add the gradients of the results, under names of their own; integers have none to add."""
    floats = [i for i, one in enumerate(gradients) if one.dtype != jax.dtypes.float0]
    names = tuple(of_gradient(how.names[i]) for i in floats)
    back = replace(how, label=of_gradient(how.label), names=names)
    added = iter(_add(back, tuple(gradients[i] for i in floats)))
    return (tuple(next(added) if i in floats else one for i, one in enumerate(gradients)),)


_add.defvjp(_forward, _backward)


def push_pull(
    tree: Any,
    name: str,
    *,
    average: bool = True,
    compression: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Average (or sum) every array of a pytree over all workers.

    name: the same on all workers, for one operation at a time; a leaf's name is it and the leaf's
    path. compression: of fastps.push_pull(). Works under jit, grad, scan, cond, jax.checkpoint,
    vmap (one after the other) and shard_map, where the devices of one number in all processes add
    among themselves. Its gradient is the push_pull of the results' gradients, under
    '<name>.gradient'. Blocks the program at that point. A compiled program leaves it out if
    nothing needs the result: let all workers need it, or none. Errors arrive as
    jax.errors.JaxRuntimeError with the text of fastps, or as ValueError from a compiled function
    that has run before.
    """
    terms = Terms(op_of(average), compression, bucket_bytes, process_set)
    leaves, structure, how = _flatten(tree, name, terms)
    return jax.tree.unflatten(structure, _add(how, tuple(leaves)) if leaves else ())


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class InFlight:
    """A tree in flight, from push_pull_start() to push_pull_finish(); opaque."""

    begun: Sequence[
        Any
    ]  # a token for each bucket; the leaves where XLA's memory is not on the host
    how: How
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    structure: Any

    def tree_flatten(self) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """Return what JAX sees, and the rest."""
        return self.begun, (self.how, self.shapes, self.structure)

    @classmethod
    def tree_unflatten(cls, terms: tuple[Any, ...], begun: Sequence[Any]) -> InFlight:
        """Undo tree_flatten()."""
        return cls(begun, *terms)


def push_pull_start(
    tree: Any,
    name: str,
    *,
    average: bool = True,
    compression: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
) -> InFlight:
    """Start push_pull(); the program computes on until push_pull_finish().

    Each bucket leaves as soon as its arrays are ready. Start and finish belong into one compiled
    function. It is for gradients, and has none of its own.
    """
    return start_tree(tree, name, Terms(op_of(average), compression, bucket_bytes, process_set))


def start_tree(tree: Any, name: str, terms: Terms) -> InFlight:
    """Do push_pull_start()."""
    leaves, structure, how = _flatten(tree, name, terms)
    shapes = tuple(shapes_of(leaves))
    if not is_native():
        return InFlight(leaves, how, shapes, structure)
    specs = _specs(how, leaves)
    plan = plan_of(how, specs, is_copied=True)
    begun = []
    for number, places in enumerate(plan.buckets):
        make = functools.partial(functools.partial, plan.start, number)
        some = [leaves[i] for i in places]
        begun += call(("start", number, how, specs), make, some, [TOKEN], is_pure=True)
    return InFlight(begun, how, shapes, structure)


def push_pull_finish(started: InFlight) -> Any:
    """Wait for the sums that push_pull_start() began, and return the tree of results."""
    if not isinstance(started, InFlight):
        raise TypeError(
            "push_pull_finish() takes the result of push_pull_start(), not "
            f"{type(started).__name__}"
        )
    how, begun = started.how, tuple(started.begun)
    if is_native():
        return jax.tree.unflatten(started.structure, _finish_now(how, started.shapes, begun))
    return jax.tree.unflatten(started.structure, _add_now(how, begun))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finish_now(
    how: How, shapes: tuple[jax.ShapeDtypeStruct, ...], begun: tuple[Any, ...]
) -> list[Any]:
    """Wait for all buckets, then take their results one after the other, the last layers' first.

    XLA allocates the results of all calls that could be next. In this order it can step with the
    results of one bucket before it needs memory for those of another.
    """
    specs = _specs(how, shapes)
    plan = plan_of(how, specs, is_copied=True)
    tokens, run = list(begun), plan.finish
    found: list[Any] = [None] * len(shapes)
    for number, places in reversed(list(enumerate(plan.buckets))):
        make = functools.partial(functools.partial, run, number)
        results = [*(shapes[i] for i in places), TOKEN]
        *some, token = call(("finish", number, how, specs), make, tokens, results, is_pure=True)
        tokens, run = [token], plan.take
        for place, one in zip(places, some, strict=True):
            found[place] = one
    return found


def names_of(tree: Any, name: str) -> tuple[str, ...]:
    """Name the leaves of a tree by their paths."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return tuple(name + jax.tree_util.keystr(path) for path in paths)


def _flatten(tree: Any, name: str, terms: Terms) -> tuple[list[Any], Any, How]:
    """Return leaves, structure, and how the leaves are added."""
    label = check_name(name, "push_pull")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    return leaves, structure, How(label, names_of(tree, label), terms.key, terms)
