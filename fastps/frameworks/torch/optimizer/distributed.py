# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer and CrossBarrier: which of the ways to step an optimizer is to get.

Gradients are averaged while backward runs, and step() waits for them (synchronous.py) or does
not (cross_barrier.py); they are applied one step later (pipesgd.py); or servers hold the
parameters (server_held.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

from fastps.algorithms.server_parameters import Compensating
from fastps.contract.rule import Choice as Rule
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average
from fastps.frameworks.torch.gradients.exchange import GradientExchange, Views
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


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressing = Compression.none, backward_passes_per_step: int = 1,
    op: Op = Average, *, prefix: str = "Gradient.", gradient_views: Views = "auto",
    bucket_bytes: int = BUCKET_BYTES, process_set: ProcessSet = global_process_set,
    sparse_as_dense: bool = False, finish_in_backward: bool = False,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None,
    asynchronous: bool | None = None, staleness: float | None = None, pipesgd_warmup_iter: int = 0,
    cross_barrier: bool = False, rule: Rule = None, delay_compensation: Compensating | None = None,
) -> Stepping:  # fmt: skip
    """Make an optimizer step with gradients that are averaged (or summed) over all workers.

    The same object comes back, its class replaced by a subclass of it: state, options, learning
    rate schedulers and isinstance() keep working.
    named_parameters: usually model.named_parameters(); must name every parameter of the
    optimizer. Without it names are made of group and place. Give a second optimizer whose names
    are the same another prefix. backward_passes_per_step: gradients of so many backward passes
    are summed (not divided, as in Horovod and BytePS: scale the loss to get a mean) and then
    sent once. Gradients of parameters that a rank did not use count as zero, and p.grad is
    zero rather than None after a step.
    compression: as for push_pull(); error feedback follows the first group's learning rate.
    bucket_bytes: gradients of at most 64 KiB travel together, up to so many bytes; 0 sends each
    by itself. gradient_views: True lets p.grad be part of memory that is sent and received in
    place; False leaves it where autograd puts it; "auto" makes views of large gradients where
    workers share memory, and of those in buckets. A view is written anew by the next backward
    pass, so clone a gradient that you want to keep. The values are the same in all cases.
    op: Average or Sum; with Adasum each worker takes a step by itself and the steps are added, as
    in Horovod; of the rest only compression, prefix and process_set count then.
    process_set: who exchanges gradients; workers outside may call it too, and step by themselves.
    sparse_as_dense: let sparse gradients travel with all their zeros; otherwise as rows. They
    are dense then, except for SparseAdam, which gets the rows that are not 0.
    finish_in_backward: let backward() return when the gradients are complete, for programs that
    clip them out of reach; one pass, or backward_passes_per_step, then makes all of a step.
    gradient_predivide_factor (only with Average, else ValueError), num_groups and groups of
    Horovod are accepted and not needed.
    asynchronous, staleness, delay_compensation: let servers hold the parameters and each worker
    step at its own pace (docs/async.md); of the rest only names and prefix count then.
    staleness=1 without asynchronous applies averages one step later, PipeSGD, except for the first
    pipesgd_warmup_iter steps; cross_barrier lets step() not wait: see CrossBarrier().
    rule: of fastps.push_pull(), in place of the average (docs/byzantine.md), of each bucket.
    All ranks must call it alike, else MismatchError, here or at the first step. Blocks.
    """
    _check(optimizer, op, gradient_predivide_factor)
    named = synchronous.named(optimizer, named_parameters)
    if _is_async(asynchronous, staleness, op, compression, process_set, delay_compensation, rule):
        return held.adopt(optimizer, named[0], staleness, prefix, delay_compensation)
    if process_set is not global_process_set and not checked_set(process_set).included():
        return adopt(optimizer, OutsideOptimizer, "Outside")
    if op is Op.ADASUM:
        return adasum.adopt(optimizer, compressor_of(compression), prefix, process_set)
    options = _Options(compression, op, prefix, gradient_views, bucket_bytes,
                       backward_passes_per_step, process_set, sparse_as_dense, rule)  # fmt: skip
    if staleness == 1:
        return _pipelined(optimizer, options, named, pipesgd_warmup_iter)
    if cross_barrier:
        return _crossed(optimizer, options, named)
    exchange = (EarlyExchange if finish_in_backward else GradientExchange)(**options._asdict())
    return synchronous.adopt(optimizer, exchange, *named)


class _Options(NamedTuple):
    """What an exchange is told."""

    compression: Compressing
    op: Op
    prefix: str
    gradient_views: Views
    bucket_bytes: int
    passes: int
    process_set: ProcessSet
    sparse_as_dense: bool = False
    rule: Rule = None


def _pipelined(
    optimizer: torch.optim.Optimizer, options: _Options, named: Named, warmup: int
) -> PipelinedOptimizer:
    words = options._asdict()
    del words["gradient_views"]
    if options.op is not Average:
        raise ValueError("staleness=1 applies averages: give op=Average")
    state = synchronous.watch(optimizer, pipesgd.PipelinedExchange(**words), *named)
    return pipesgd.adopt(optimizer, state, warmup)


def _crossed(
    optimizer: torch.optim.Optimizer, options: _Options, named: Named, **more: Any
) -> CrossBarrierOptimizer:
    if options.op is not Average:
        raise ValueError("cross_barrier steps with averages: give op=Average")
    exchange = cross_barrier.CrossingExchange(cure=cross_barrier.ONE_PASS, **options._asdict())
    return cross_barrier.cross(optimizer, exchange, *named, **more)


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
    is stepped when its average is there and somebody wants it. Results are bitwise those of
    DistributedOptimizer, for every optimizer of torch but LBFGS (ValueError), and for others that
    treat each parameter by itself. Whoever uses a parameter, in a forward pass or out of it, gets
    the stepped one; what waits for all are the optimizer's state_dict(), settle() and
    model.zero_grad(), so call optimizer.zero_grad(). GradScaler and hooks on the step work, and
    wait for all too; a closure, synchronize() and skip_synchronize(), which clipping by norm
    needs, are refused with FastPSError. clip_value limits each element of the averages, as
    torch.nn.utils.clip_grad_value_() would. The other options are those of DistributedOptimizer,
    which may have been called for the optimizer before.

    num_steps: step() waits for all from this one on, which ends the training. Before shutdown()
    call settle() if there were fewer. All ranks must call it alike, else MismatchError. Blocks.
    Source: Y. Peng et al., ByteScheduler, SOSP 2019, sections 3 and 5.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch module, not {type(model).__name__}")
    if isinstance(optimizer, SynchronizedOptimizer):
        optimizer = synchronous.undo(optimizer)
    _check(optimizer, Average, 1.0)
    options = _Options(
        compression, Average, prefix, gradient_views, bucket_bytes, backward_passes_per_step,
        process_set,
    )  # fmt: skip
    named = synchronous.named(optimizer, named_parameters or model.named_parameters())
    crossed = _crossed(optimizer, options, named, clip_value=clip_value, num_steps=num_steps)
    cross_barrier.watch_layers(model, crossed)
    return crossed


def _check(optimizer: object, op: Op, predivide_factor: float) -> None:
    """Refuse what DistributedOptimizer() cannot be given."""
    if isinstance(optimizer, Stepping):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    if predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor divides an average: give op=Average")


def _is_async(
    wanted: bool | None, staleness: float | None, op: Op, compression: Compressing,
    who: ProcessSet, compensation: Compensating | None, rule: Rule,
) -> bool:  # fmt: skip
    """Return whether servers are to hold the parameters; refuse what cannot be together."""
    is_async = current.current().config.enable_async if wanted is None else wanted
    if rule is not None and (is_async or op is not Average):
        raise ValueError("a rule stands for the average of a step: no other op, not asynchronous")
    if not is_async and staleness not in (None, 0, 1):
        raise ValueError(
            "staleness bounds asynchronous training: give asynchronous=True too; or 0 or 1 for "
            "PipeSGD"
        )
    if not is_async and compensation is not None:
        raise ValueError("delay_compensation is for asynchronous=True")
    if is_async and (op is not Average or who is not global_process_set):
        raise ValueError("asynchronous training adds the steps of all workers: give no op or set")
    if is_async and compression is not Compression.none:
        raise ValueError("asynchronous training does not compress: changes are added for good")
    return is_async
