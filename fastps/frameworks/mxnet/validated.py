# SPDX-License-Identifier: Apache-2.0
"""ZenoPS for Gluon: workers step by themselves, and validators judge what that has changed.

Servers hold the parameters; fastps.HeldParameters and fastps.Validator do the rest. Parameters are
named by their places: Gluon's own names count what a process has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx

import fastps
from fastps.worker.handle import Array


class ValidatedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon.Trainer of a worker, whose steps count as far as its validator accepts them.

    Takes servers' parameters over at once, which blocks until all workers and validators do: all
    shapes must be known (ValueError). After every local_steps steps what they have changed goes to
    the validator, and the parameters are what servers hold then. optimizer, optimizer_params: of
    gluon.Trainer. options: asynchronous, among, prefix of fastps.HeldParameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        local_steps: int = 1,
        **options: Any,
    ) -> None:
        if isinstance(local_steps, bool) or local_steps < 1:
            raise ValueError(f"local_steps must be an integer from 1, not {local_steps!r}")
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._mine = _trained(self._params)
        self._local_steps = local_steps
        self._count = 0
        self._held = fastps.HeldParameters(_arrays_of(self._mine), **options)
        _write(self._mine, self._held.arrays)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Step by itself; after the last of local_steps wait for what validators make of it."""
        super().step(batch_size, ignore_stale_grad)
        self._count += 1
        if self._count % self._local_steps == 0:
            self._exchange()

    def _exchange(self) -> None:
        held, now = self._held, _arrays_of(self._mine).values()
        held.push([new - old for new, old in zip(now, held.arrays, strict=True)])
        if held.is_asynchronous:
            held.pull(unjudged=0)
        else:
            held.pull(stamp=held.stamp + 1)
        _write(self._mine, held.arrays)


def validator_of(
    params: Any, rule: Any, steps: Callable[[], Any] | None = None, **options: Any
) -> fastps.Validator:
    """Make the fastps.Validator of what ValidatedTrainers of the same net push; blocks.

    params: net.collect_params(), whose values servers hold at first. rule, options: of
    fastps.Validator. steps: f() trains the net on data of our own, from values that are in it.
    """
    mine = _trained(list(params.values()))

    def train(arrays: Sequence[Array]) -> None:
        _write(mine, arrays)
        if steps is not None:
            steps()
        for array, new in zip(arrays, _arrays_of(mine).values(), strict=True):
            array[...] = new

    return fastps.Validator(_arrays_of(mine), rule, train if steps else None, **options)


def _trained(params: Sequence[Any]) -> list[Any]:
    mine = [param for param in params if param.grad_req != "null"]
    unknown = [param.name for param in mine if param._data is None]
    if unknown:
        raise ValueError(f"call the net once before: the shape of {unknown[0]!r} is not known yet")
    return mine


def _arrays_of(params: Sequence[Any]) -> dict[str, Array]:
    return {str(place): param.data().asnumpy() for place, param in enumerate(params)}


def _write(params: Sequence[Any], arrays: Sequence[Array]) -> None:
    for param, array in zip(params, arrays, strict=True):
        param.set_data(mx.nd.array(array, dtype=array.dtype))
