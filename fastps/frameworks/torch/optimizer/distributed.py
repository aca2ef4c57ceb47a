# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer and CrossBarrier: check options, and choose the class of the optimizer.

Gradients are averaged while backward runs, and step() waits for them (synchronous.py) or does
not (cross_barrier.py); or averages are applied one step later (pipesgd.py); or steps are combined
(adasum.py); or servers hold the parameters (server_held.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from fastps.algorithms.server_parameters import Compensating
from fastps.contract.rule import Choice as Rule
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average
from fastps.frameworks.torch.gradients.exchange import GradientExchange, Views
from fastps.frameworks.torch.gradients.exchange_kinds import kind_of
from fastps.frameworks.torch.ops.compression import Compressing, Compression, compressor_of
from fastps.frameworks.torch.optimizer import adasum, cross_barrier, pipesgd, synchronous
from fastps.frameworks.torch.optimizer import server_held as held
from fastps.frameworks.torch.optimizer.adasum import AdasumOptimizer
from fastps.frameworks.torch.optimizer.cross_barrier import CrossBarrierOptimizer
from fastps.frameworks.torch.optimizer.pipesgd import PipelinedOptimizer
from fastps.frameworks.torch.optimizer.server_held import AsynchronousOptimizer
from fastps.frameworks.torch.optimizer.step_common import OutsideOptimizer, adopt
from fastps.frameworks.torch.optimizer.synchronous import EarlyExchange, SynchronizedOptimizer
from fastps.session import current
from fastps.session.process_sets import ProcessSet, checked_set, global_process_set
from fastps.types import Op

Named: TypeAlias = tuple[list[str], dict[torch.Tensor, str] | None]
Stepping: TypeAlias = (
    SynchronizedOptimizer
    | PipelinedOptimizer
    | AdasumOptimizer
    | AsynchronousOptimizer
    | OutsideOptimizer
)

Wrapped = TypeVar("Wrapped", bound=torch.optim.Optimizer)


@runtime_checkable
class SynchronizingOptimizer(Protocol):
    """What DistributedOptimizer() adds to the methods of an optimizer."""

    def synchronize(self) -> None:
        """Wait until every gradient holds the sum or average over all workers."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Make step() use the gradients as they are, as after synchronize()."""


def DistributedOptimizer(
    optimizer: Wrapped,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none, backward_passes_per_step: int = 1,
    op: Op = Average, *, prefix: str = "Gradient.", gradient_views: Views = "auto",
    bucket_bytes: int = BUCKET_BYTES, process_set: ProcessSet = global_process_set,
    sparse_as_dense: bool = False, finish_in_backward: bool = False,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    asynchronous: bool | None = None, staleness: float | None = None, pipesgd_warmup_iter: int = 0,
    cross_barrier: bool = False, rule: Rule = None, delay_compensation: Compensating | None = None,
) -> Wrapped:  # fmt: skip
    """Make an optimizer step with gradients that are averaged (or summed) over all workers.

    Returns the same object, its class replaced by a subclass: state, options, learning rate
    schedulers and isinstance() keep working. Type checkers see the class that it had, and after
    `assert isinstance(optimizer, SynchronizingOptimizer)` the methods of that one too.
    named_parameters: usually model.named_parameters(); must name every parameter of the
    optimizer. By default parameters are named by group and place. A second optimizer with the
    same names needs another prefix. backward_passes_per_step: gradients of so many backward passes
    are summed (not divided, as in Horovod and BytePS: scale the loss to get a mean) and then
    sent once. Gradients of parameters that a rank did not use count as zero, and p.grad is
    zero rather than None after a step.
    compression: as for push_pull(); error feedback follows the first group's learning rate.
    bucket_bytes: gradients of at most 64 KiB travel together, up to so many bytes; 0 sends each
    by itself. gradient_views: True lets p.grad be part of memory that is sent and received in
    place; False leaves it where autograd puts it; "auto" makes views of large gradients where
    workers share memory, and of those in buckets. A view is overwritten by the next backward
    pass, so clone a gradient that you want to keep. The values are the same in all cases.
    op: Average or Sum. With Adasum each worker takes a step by itself and the steps are added, as
    in Horovod; then only compression, prefix and process_set count of the other options.
    process_set: the workers that exchange gradients; others may call it too, and step alone.
    sparse_as_dense: send sparse gradients with all their zeros; by default they travel as rows.
    p.grad is dense then, except for SparseAdam, which gets the rows that are not 0.
    finish_in_backward: backward() returns when the gradients are complete, for programs that clip
    them without the optimizer. One pass, or backward_passes_per_step, must then be a whole step.
    gradient_predivide_factor (only with Average, else ValueError), num_groups and groups of
    Horovod are accepted and not needed.
    asynchronous, staleness, delay_compensation: servers hold the parameters and each worker steps
    at its own pace (docs/async.md); then only names and prefix count of the other options.
    staleness=1 without asynchronous applies averages one step later (PipeSGD), except in the first
    pipesgd_warmup_iter steps. cross_barrier: step() does not wait, see CrossBarrier().
    rule: replaces the average of each bucket (docs/byzantine.md), as in fastps.push_pull().
    All ranks must pass the same options, else MismatchError, here or at the first step. Blocks.
    """
    _check(optimizer, op, gradient_predivide_factor)
    named = synchronous.named(optimizer, named_parameters)
    if _is_async(asynchronous, staleness, op, compression, process_set, delay_compensation, rule):
        held.adopt(optimizer, named[0], staleness, prefix, delay_compensation)
        return optimizer
    if process_set is not global_process_set:
        current.check_not_elastic("process_set=", "leave it out")
    if process_set is not global_process_set and not checked_set(process_set).included():
        adopt(optimizer, OutsideOptimizer, "Outside")
        return optimizer
    if op is Op.ADASUM:
        current.check_not_elastic("op=Adasum", "use op=Average")
        adasum.adopt(optimizer, compressor_of(compression), prefix, process_set)
        return optimizer
    options: dict[str, Any] = {
        "compression": compression, "op": op, "prefix": prefix, "bucket_bytes": bucket_bytes,
        "passes": backward_passes_per_step, "process_set": process_set,
        "sparse_as_dense": sparse_as_dense, "rule": rule,
    }  # fmt: skip
    if (staleness == 1 or cross_barrier) and op is not Average:
        which = "staleness=1" if staleness == 1 else "cross_barrier=True"
        raise ValueError(f"{which} needs op=Average, got {op}")
    if staleness == 1:
        state = synchronous.watch(optimizer, kind_of(pipesgd.PipelinedExchange)(**options), *named)
        pipesgd.adopt(optimizer, state, pipesgd_warmup_iter)
        return optimizer
    options["gradient_views"] = gradient_views
    if cross_barrier:
        _without_barrier(optimizer, options, named)
        return optimizer
    kind = EarlyExchange if finish_in_backward else GradientExchange
    exchange = kind_of(kind)(**options)
    synchronous.adopt(optimizer, exchange, *named)
    return optimizer


def _without_barrier(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], named: Named, **more: Any
) -> CrossBarrierOptimizer:
    kind = kind_of(cross_barrier.CrossBarrierExchange)
    exchange = kind(cure=cross_barrier.ONE_PASS, **options)
    return cross_barrier.adopt(optimizer, exchange, *named, **more)


def CrossBarrier(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int | None = 10**6,
    *,
    clip_value: float | None = None,
    prefix: str = "Gradient.",
    gradient_views: Views = "auto",
    bucket_bytes: int = BUCKET_BYTES,
    process_set: ProcessSet = global_process_set,
) -> CrossBarrierOptimizer:
    """Make an optimizer whose step() does not wait: each layer waits for its own parameters only.

    The gradients travel while the next forward pass runs, front layers first, and each parameter
    is stepped when its average has arrived and it is used. Results are bitwise those of
    DistributedOptimizer, for every optimizer of torch except LBFGS (ValueError), and for others
    that treat each parameter by itself. Code that uses a parameter, in a forward pass or outside,
    gets the stepped one. The optimizer's state_dict() and settle(), and model.zero_grad(), wait
    for all, so call optimizer.zero_grad(). GradScaler and hooks on the step work, and wait for all
    too. A closure, synchronize() and skip_synchronize(), which clipping by norm needs, raise
    FastPSError. clip_value limits each element of the averages, as
    torch.nn.utils.clip_grad_value_() would. The other options are those of DistributedOptimizer,
    which may have been called for the optimizer before.

    num_steps: from this step on, which ends the training, step() waits for all. Call settle()
    before shutdown() if there were fewer. All ranks must pass the same options, else
    MismatchError. Blocks.
    Source: Y. Peng et al., ByteScheduler, SOSP 2019, sections 3 and 5.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch module, not {type(model).__name__}")
    if isinstance(optimizer, SynchronizedOptimizer):
        optimizer = synchronous.undo(optimizer)
    _check(optimizer, Average, 1.0)
    options: dict[str, Any] = {
        "compression": compression, "op": Average, "prefix": prefix,
        "gradient_views": gradient_views, "bucket_bytes": bucket_bytes,
        "passes": backward_passes_per_step, "process_set": process_set,
    }  # fmt: skip
    named = synchronous.named(optimizer, named_parameters or model.named_parameters())
    found = _without_barrier(optimizer, options, named, clip_value=clip_value, num_steps=num_steps)
    cross_barrier.watch_layers(model, found)
    return found


def _check(optimizer: object, op: Op, predivide_factor: float) -> None:
    """Raise ValueError or TypeError for an optimizer that cannot be distributed."""
    if isinstance(optimizer, Stepping):
        raise ValueError(
            "the optimizer is a DistributedOptimizer already: call DistributedOptimizer() once, "
            "for a plain torch optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    if predivide_factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={predivide_factor} needs op=Average, got {op}"
        )


def _is_async(
    wanted: bool | None, staleness: float | None, op: Op, compression: Compressing,
    who: ProcessSet, compensation: Compensating | None, rule: Rule,
) -> bool:  # fmt: skip
    """Return whether servers hold the parameters; ValueError for options that conflict."""
    is_async = current.current().config.enable_async if wanted is None else wanted
    if rule is not None and (is_async or op is not Average):
        raise ValueError(
            f"rule= replaces the average of synchronous steps, got op={op} and "
            f"asynchronous={is_async}: leave rule= or the other option out"
        )
    if not is_async and staleness not in (None, 0, 1):
        raise ValueError(
            f"staleness={staleness} needs asynchronous=True; without it, staleness is 0, or 1 for "
            "PipeSGD"
        )
    if not is_async and compensation is not None:
        raise ValueError(
            f"delay_compensation={compensation} needs asynchronous=True: pass that too, or "
            "leave delay_compensation out"
        )
    if is_async and (op is not Average or who is not global_process_set):
        raise ValueError("asynchronous=True does not support op= or process_set=: remove them")
    if is_async and compression is not Compression.none:
        raise ValueError(
            "asynchronous=True does not support compression=: remove it, or use "
            "fastps.ServerParameters(compression=...)"
        )
    return is_async
