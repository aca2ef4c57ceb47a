# SPDX-License-Identifier: Apache-2.0
"""ZenoPS for Gluon: workers step by themselves, and validators judge their updates.

Servers hold the parameters; fastps.HeldParameters and fastps.Validator do the rest. Parameters are
named by their places, for Gluon's own names depend on the other layers of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mxnet as mx
import numpy as np

import fastps
from fastps.algorithms.validated_steps import ValidatedSteps, training
from fastps.worker.handle import Array


class _Steps(ValidatedSteps):
    """Exchanges the updates of Gluon's parameters."""

    def _read(self, own: Any) -> Array:
        return _read(own)

    def _write(self, own: Any, value: Array) -> None:
        _write(own, value)

    def _is_narrow(self, own: Any) -> bool:
        return bool(np.dtype(own.dtype) == np.float16)


class ValidatedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon.Trainer of a worker, whose steps count as far as its validator accepts them.

    Takes over the servers' parameters at once, and blocks until all workers and validators do. All
    shapes must be known (ValueError). After every local_steps steps the update goes to the
    validator, and the parameters become those of the servers. optimizer, optimizer_params: of
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
            raise ValueError(f"local_steps must be an integer >= 1, got {local_steps!r}")
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._steps = _Steps(_trained(self._params), sync_every=local_steps, **options)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Step; after the last of local_steps wait for the validator's verdict."""
        super().step(batch_size, ignore_stale_grad)
        self._steps.advance()


def validator_of(
    params: Any, rule: Any, steps: Callable[[], Any] | None = None, **options: Any
) -> fastps.Validator:
    """Return the fastps.Validator of the updates that ValidatedTrainers of the same net push.

    Blocks. params: net.collect_params(), the first values of the servers. rule, options: of
    fastps.Validator. steps: f() trains the net on the validator's own data, from its current
    values.
    """
    mine = _trained(params.values())
    train = training(list(mine.values()), steps, read=_read, write=_write)
    begin = {name: _read(own) for name, own in mine.items()}
    return fastps.Validator(begin, rule, train, **options)


def _trained(params: Iterable[Any]) -> dict[str, Any]:
    """Return the parameters that are trained, by place; ValueError if a shape is not known."""
    mine = [param for param in params if param.grad_req != "null"]
    unknown = [param.name for param in mine if param._data is None]
    if unknown:
        raise ValueError(f"the shape of {unknown[0]!r} is not known yet: call the net once before")
    return {str(place): param for place, param in enumerate(mine)}


def _read(own: Any) -> Array:
    """Return a copy of a parameter, of float16 as float32, so that small changes add up."""
    value: Array = own.data().asnumpy()
    return value.astype(np.float32) if value.dtype == np.float16 else value


def _write(own: Any, value: Array) -> None:
    own.set_data(mx.nd.array(value, dtype=own.dtype))
