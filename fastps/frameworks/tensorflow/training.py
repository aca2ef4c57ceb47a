# SPDX-License-Identifier: Apache-2.0
"""The gradient tape whose gradients are averages, and broadcasts of variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import Terms, broadcast_in_place
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, check_op
from fastps.frameworks.tensorflow.sums import add_all, add_slices, as_it_is
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op


@as_it_is
def exchange_gradients(
    gradients: Sequence[Any],
    *,
    op: Op = Average,
    compression: Choice = None,
    prefix: str = "Gradient",
    sparse_as_dense: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return averages or sums of gradients over all workers, named by their places.

    None stays None. The same places must be None, sparse and dense on all workers.
    """
    terms = Terms(check_op(op), compression, bucket_bytes, process_set)
    return add_gradients(gradients, prefix, terms, sparse_as_dense=sparse_as_dense)


@as_it_is
def add_gradients(
    gradients: Sequence[Any], prefix: str, terms: Terms, *, sparse_as_dense: bool
) -> list[Any]:
    """Do exchange_gradients()."""
    found = list(gradients)
    sparse = [i for i, one in enumerate(found) if isinstance(one, tf.IndexedSlices)]
    if sparse_as_dense:
        for place in sparse:
            found[place] = tf.convert_to_tensor(found[place])
        sparse = []
    dense = [i for i, one in enumerate(found) if one is not None and i not in sparse]
    added = add_all(
        [found[i] for i in dense], [f"{prefix}.{i}" for i in dense], terms, label=prefix
    )
    for place, one in zip(dense, added, strict=True):
        found[place] = one
    last = added[-1:]  # the order of operations in a graph of tf.compat.v1
    for place in sparse:
        with tf.control_dependencies(last):
            one = add_slices(found[place], f"{prefix}.{place}", terms)
        found[place], last = one, [one.values]
    return found


class DistributedGradientTape:
    """A tf.GradientTape whose gradient() gives averages (or sums) over all workers.

    tape: the tf.GradientTape, whose other attributes this object has too. op, compression,
    prefix, sparse_as_dense, bucket_bytes, process_set: of exchange_gradients(). A second tape of
    one step needs another prefix. Within a tf.function the sums start as gradients become ready,
    those of the back layers first.
    """

    def __init__(self, tape: Any, **options: Any) -> None:
        """Wrap a tape; ValueError for another op than Average and Sum."""
        check_op(options.get("op", Average))
        self._tape = tape
        self._options = options
        self._local: set[int] = set()  # of sources, by id
        self._local_scale = 1.0

    def __enter__(self) -> DistributedGradientTape:
        """Start to record."""
        self._tape.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        """End recording."""
        self._tape.__exit__(*reason)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the tape."""
        return getattr(self._tape, name)

    @as_it_is
    def gradient(self, target: Any, sources: Any, **options: Any) -> Any:
        """Return the gradients of target, as tf.GradientTape does, averaged; blocks."""
        found = self._tape.gradient(target, sources, **options)
        flat, local = tf.nest.flatten(found), self._places_of_local(sources)
        shared = [place for place in range(len(flat)) if place not in local]
        added = exchange_gradients([flat[place] for place in shared], **self._options)
        for place, one in zip(shared, added, strict=True):
            flat[place] = one
        for place in local:
            if flat[place] is not None and self._local_scale != 1.0:
                flat[place] *= self._local_scale
        return tf.nest.pack_sequence_as(found, flat)

    def _places_of_local(self, sources: Any) -> set[int]:
        flat = tf.nest.flatten(sources) if self._local else ()
        return {place for place, one in enumerate(flat) if id(one) in self._local}


class PartialDistributedGradientTape(DistributedGradientTape):
    """A DistributedGradientTape that does not exchange the gradients of some layers or variables.

    local_layers: a layer of Keras, or several. scale_local_gradients: divide their gradients by
    the number of workers, as Horovod does. options: of DistributedGradientTape.
    """

    def __init__(
        self,
        tape: Any,
        local_layers: Any = (),
        *,
        scale_local_gradients: bool = True,
        **options: Any,
    ) -> None:
        """Wrap a tape."""
        super().__init__(tape, **options)
        if scale_local_gradients:
            self._local_scale = 1.0 / options.get("process_set", global_process_set).size()
        layers = local_layers if isinstance(local_layers, Iterable) else [local_layers]
        for layer in layers:
            for variable in layer.trainable_weights:
                self.register_local_source(variable)

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of a variable from the exchange."""
        self._local.add(id(source))


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, prefix: str = "Variable"
) -> None:
    """Overwrite variables on all workers with those of the root, in one submit for each dtype.

    variables: tf.Variable or Keras's, in the same order everywhere. Blocks; not in tf.function.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_variables() cannot run within tf.function: call it before, or use "
            "broadcast_()"
        )
    if hasattr(variables, "assign"):
        raise TypeError(
            "broadcast_variables() takes a list of variables, got one: put it into a list"
        )
    listed = list(variables)
    arrays = [np.array(one.numpy()) for one in listed]
    names = [f"{prefix}.{place}" for place in range(len(listed))]
    broadcast_in_place(arrays, names, root_rank)
    for one, array in zip(listed, arrays, strict=True):
        one.assign(array)
