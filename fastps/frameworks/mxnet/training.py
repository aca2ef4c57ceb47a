# SPDX-License-Identifier: Apache-2.0
"""The optimizer and Gluon's trainer whose gradients are averages; broadcasts of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import mxnet as mx

from fastps.contract.compression import Choice
from fastps.frameworks.array_exchange import ArrayExchange, Terms, spec_of
from fastps.frameworks.gradient_round import BUCKET_BYTES
from fastps.frameworks.mxnet.engine import array_over
from fastps.frameworks.mxnet.sums import (
    add_in_place,
    broadcast_arrays,
    push_bucket,
    push_step,
)
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.worker.handle import Array

_PLACED = ("float16", "float32", "float64")  # MXNet accepts foreign memory for these


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer that averages each gradient over all workers, in place, before it updates.

    For Module and for programs that call update(); with Gluon use DistributedTrainer.
    compression: of fastps.push_pull(); the optimizer's rescale_grad then multiplies gradients
    before they are compressed, instead of after. prefix: another one for a second optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        compression: Choice = None,
        prefix: str = "gradient_",
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Wrap an optimizer of MXNet's."""
        self._optimizer = optimizer
        self._prefix = prefix
        self._terms = Terms(compression=compression, process_set=process_set)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the optimizer."""
        if name == "_optimizer":  # while the wrapper is unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def create_state(self, index: int, weight: Any) -> Any:
        """Create the optimizer's state of a weight."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """Create the optimizer's state of a weight of half precision."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients, and update the weights; returns at once."""
        with self._averaged(index, grad):
            self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradients, and update weights of half precision; returns at once."""
        with self._averaged(index, grad):
            self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the optimizer."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Set factors of the learning rate for some weights."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Set factors of the weight decay for some weights."""
        self._optimizer.set_wd_mult(args_wd_mult)

    @contextmanager
    def _averaged(self, index: Any, grad: Any) -> Iterator[None]:
        """Average the gradients; the optimizer updates with the averages in this context."""
        current.check_not_elastic("DistributedOptimizer of MXNet", "use DistributedTrainer")
        rescale = self._optimizer.rescale_grad
        is_scaled = self._terms.compression is not None and rescale != 1.0
        several = isinstance(index, list | tuple)
        for place, one in zip(*((index, grad) if several else ([index], [grad])), strict=True):
            if is_scaled:
                one *= rescale
            add_in_place(one, f"{self._prefix}{place}", self._terms, priority=-place)
        if is_scaled:
            self._optimizer.rescale_grad = 1.0
        try:
            yield
        finally:
            self._optimizer.rescale_grad = rescale


class _Placed:
    """The gradients of parameters, in memory that workers share, in buckets."""

    def __init__(
        self, params: Sequence[Any], names: Sequence[str], terms: Terms, label: str
    ) -> None:
        specs = [
            spec_of(name, param.shape, param.dtype)
            for name, param in zip(names, params, strict=True)
        ]
        self._params = params
        self._exchange = ArrayExchange(specs, terms, label=label)
        self._memory: list[list[Array] | None] = [None for _ in self._exchange.plan]
        self._arrays: list[list[Any]] = [[] for _ in self._exchange.plan]

    def push(self, factor: float = 1.0) -> None:
        """Start the sums of all buckets, of gradients times a factor; front layers go first."""
        if factor != 1.0:
            for param in self._params:
                param._grad[0] *= factor
        if current.current().is_elastic:
            for number in range(len(self._arrays)):
                self._place(number)
            push_step(self._exchange, self._arrays, self._memory)
            return
        for number in reversed(range(len(self._arrays))):
            self._place(number)
            first = self._exchange.plan[number][0]
            push_bucket(self._exchange, number, self._arrays[number], self._memory[number], -first)

    def _place(self, number: int) -> None:
        """Move gradients into the bucket's memory, unless they are there already."""
        params = [self._params[i] for i in self._exchange.plan[number]]
        arrays = self._arrays[number]
        if arrays and all(p._grad[0] is a for p, a in zip(params, arrays, strict=True)):
            return
        memory = self._exchange.memory(number)
        if all(str(one.dtype) in _PLACED and one.size for one in memory):
            for param, one in zip(params, memory, strict=True):
                _move_gradient(param, array_over(one))
            self._memory[number] = memory
        self._arrays[number] = [param._grad[0] for param in params]


def _move_gradient(param: Any, place: Any) -> None:
    """Move a parameter's gradient, with its values, to another NDArray."""
    data = param.data()
    place[:] = param._grad[0]
    is_fresh = data._fresh_grad
    param._grad = [place]
    mx.autograd.mark_variables([data], param._grad, param.grad_req)
    data._fresh_grad = is_fresh


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A gluon.Trainer that averages gradients over all workers; step(batch_size of this worker).

    All workers get the parameters of root_rank: here, which blocks, or when they are made. Sums
    are operations of MXNet's engine: step() returns before they are done, and sums of the back
    layers overlap with the gradients of the front layers. compression_params: BytePS's
    {"compressor": "onebit", "ef": "vanilla", "momentum": "nesterov", ...}, or another compression
    of fastps.push_pull(); a momentum there replaces the optimizer's. With a compression, step()
    divides gradients by the batch size, in place, before they are compressed, as BytePS does.
    allreduce_grads() does not, so update() divides afterwards. prefix: another one for a second
    trainer. Gradients move into memory that workers share; TypeError for sparse ones, or on
    several devices.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        root_rank: int = 0,
        compression_params: Choice = None,
        *,
        prefix: str = "Gradient",
        bucket_bytes: int = BUCKET_BYTES,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
        own_params = dict(optimizer_params or {})
        compression = _with_momentum(compression_params, own_params)
        super().__init__(params, optimizer, own_params or None, kvstore=None)
        if process_set is not global_process_set:
            current.check_not_elastic("process_set=", "leave it out")
        self._prefix = prefix
        self._terms = Terms(
            compression=compression, bucket_bytes=bucket_bytes, process_set=process_set
        )
        self._scale: float  # of gluon.Trainer: the rescale_grad that the optimizer came with
        self._placed: _Placed | None = None
        self._factor = 1.0  # of gradients, before they are compressed
        mine = {str(place): param for place, param in enumerate(self._params)}
        broadcast_parameters(mine, root_rank, prefix=f"Parameter of {prefix}.")

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average gradients and update parameters; batch_size: of this worker."""
        if self._terms.compression is None:
            super().step(batch_size, ignore_stale_grad)
            return
        scale = self._scale
        self._factor, self._scale = scale / batch_size, batch_size  # which leaves a factor of 1
        try:
            super().step(batch_size, ignore_stale_grad)
        finally:
            self._factor, self._scale = 1.0, scale

    def _allreduce_grads(self) -> None:
        """Start to average all gradients; called by step()."""
        if self._placed is None:
            self._placed = self._begin()
        self._placed.push(self._factor)

    def _begin(self) -> _Placed:
        places = [i for i, param in enumerate(self._params) if param.grad_req != "null"]
        params = [self._params[i] for i in places]
        for param in params:
            _check_gradient(param)
        names = [f"{self._prefix}.{i}" for i in places]
        return _Placed(params, names, self._terms, self._prefix)


def _check_gradient(param: Any) -> None:
    """Raise TypeError for a parameter whose gradient is sparse, or on several devices."""
    if param._grad_stype != "default":
        raise TypeError(
            f"the gradient of {param.name!r} is {param._grad_stype}: make the layer without "
            "sparse_grad=True"
        )
    if len(param.list_ctx()) > 1:
        raise TypeError(
            f"{param.name!r} is on {len(param.list_ctx())} devices: start a worker for each"
        )


def _with_momentum(compression: Choice, optimizer_params: dict[str, Any]) -> Choice:
    """Move an optimizer's momentum to a compression that has one, as BytePS does."""
    if not isinstance(compression, Mapping) or not compression.get("momentum"):
        return compression
    if "momentum" not in optimizer_params:
        return compression
    return {**compression, "mu": optimizer_params.pop("momentum")}


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str = "Parameter.") -> None:
    """Overwrite parameters on all workers with those of the root, in one submit; blocks.

    params: a dict of NDArrays or of Gluon's Parameters, or a ParameterDict. Parameters whose shape
    is not known yet are overwritten when they are made, by all workers in the same order.
    """
    if not isinstance(params, Mapping | mx.gluon.ParameterDict):
        raise TypeError(
            f"params must be a dict of arrays or parameters, not {type(params).__name__}: for "
            "example net.collect_params()"
        )
    arrays, names = [], []
    for name, param in sorted(params.items()):
        if isinstance(param, mx.gluon.Parameter) and param._data is None:
            _broadcast_when_made(param, f"{prefix}{name}", root_rank)
            continue
        arrays.append(param.data() if isinstance(param, mx.gluon.Parameter) else param)
        names.append(f"{prefix}{name}")
    if arrays:
        broadcast_arrays(arrays, names, root_rank)


def _broadcast_when_made(param: Any, name: str, root_rank: int) -> None:
    """Overwrite a parameter with the root's values when it gets its shape."""
    make = param._init_impl

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(*args, **options)
        vars(self).pop("_init_impl", None)  # once: it may be made again
        broadcast_arrays([self.data()], [name], root_rank)

    param._init_impl = MethodType(made, param)
