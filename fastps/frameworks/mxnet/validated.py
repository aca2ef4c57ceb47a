# SPDX-License-Identifier: Apache-2.0
"""ZenoPS for Gluon: workers step by themselves, and validators judge what that has changed.

Servers hold the parameters; fastps.HeldParameters and fastps.Validator do the rest. Parameters are
named by their places: Gluon's own names count what a process has made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

import fastps
from fastps.algorithms.validated_steps import ValidatedSteps, training
from fastps.worker.handle import Array


class _Steps(ValidatedSteps):
    """Exchanges what the steps of Gluon's parameters change."""

    def _read(self, own: Any) -> Array:
        return _read(own)

    def _write(self, own: Any, value: Array) -> None:
        _write(own, value)

    def _is_narrow(self, own: Any) -> bool:
        return bool(np.dtype(own.dtype) == np.float16)


class ValidatedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon.Trainer of a worker, whose steps count as far as its validator accepts them.

    Takes servers' parameters over at once, which blocks until all workers and validators do: all
    shapes must be known (ValueError). After every local_steps steps what they have changed goes to
    the validator, and the parameters are what servers hold then. optimizer, optimizer_params: of
    gluon.Trainer. options: of fastps.ValidatedSteps, participation and sparsity among them.
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
        mine = _named(_trained(self._params))
        self._steps = _Steps(mine, sync_every=local_steps, **options)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Step by itself; after the last of local_steps wait for what validators make of it."""
        super().step(batch_size, ignore_stale_grad)
        self._steps.advance()


def validator_of(
    params: Any, rule: Any, steps: Callable[[], Any] | None = None, **options: Any
) -> fastps.Validator:
    """Make the fastps.Validator of what ValidatedTrainers of the same net push; blocks.

    params: net.collect_params(), whose values servers hold at first. rule, options: of
    fastps.Validator. steps: f() trains the net on data of our own, from values that are in it.
    """
    mine = _named(_trained(list(params.values())))
    train = training(list(mine.values()), steps, read=_read, write=_write)
    begin = {name: _read(own) for name, own in mine.items()}
    return fastps.Validator(begin, rule, train, **options)


def _trained(params: Sequence[Any]) -> list[Any]:
    mine = [param for param in params if param.grad_req != "null"]
    unknown = [param.name for param in mine if param._data is None]
    if unknown:
        raise ValueError(f"call the net once before: the shape of {unknown[0]!r} is not known yet")
    return mine


def _named(params: Sequence[Any]) -> dict[str, Any]:
    return {str(place): param for place, param in enumerate(params)}


def _read(own: Any) -> Array:
    """Copy a parameter; halves become float32, so that small changes of them add up."""
    value: Array = own.data().asnumpy()
    return value.astype(np.float32) if value.dtype == np.float16 else value


def _write(own: Any, value: Array) -> None:
    own.set_data(mx.nd.array(value, dtype=own.dtype))
