# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: backward() returns when the gradients are averaged over all workers.

The exchange starts gradients as they become ready, as for DistributedOptimizer. Here it also needs
the end of a backward pass: hooks on the outputs of forward(), which run at the start of the pass,
ask the autograd engine for a callback at its end. So a pass that re-enters the engine (a
checkpoint) ends once, and torch.autograd.grad(), which accumulates nothing, sends nothing. Where
outputs take no hooks (unknown classes) a round begins with the first gradient instead. Under
compiled autograd (see backward_end.py) all gradients are sent at the end of the pass.

An instance runs in one thread at a time, the one that runs forward and backward.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from fastps.contract.rule import Choice as Rule
from fastps.errors import FastPSError
from fastps.frameworks.gradient_round import BUCKET_BYTES, Average, shortened
from fastps.frameworks.torch.gradients.backward_end import call_at_the_end
from fastps.frameworks.torch.gradients.exchange import GradientExchange, Views
from fastps.frameworks.torch.gradients.exchange_kinds import kind_of
from fastps.frameworks.torch.gradients.module_buffers import BufferSync
from fastps.frameworks.torch.gradients.no_compile import opaque, seen_as
from fastps.frameworks.torch.ops.broadcast import broadcast_parameters
from fastps.frameworks.torch.ops.compression import Compressing, Compression
from fastps.session import current
from fastps.session.process_sets import ProcessSet, global_process_set
from fastps.types import Op

if TYPE_CHECKING:
    from fastps.session.session import Session

Device: TypeAlias = int | str | torch.device
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
M = TypeVar("M", bound=torch.nn.Module, covariant=True)

_TWICE = (
    "one backward pass reaches the parameter several times, as through a checkpoint that "
    "re-enters autograd: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class BackwardExchange(GradientExchange):
    """Make a round of each backward pass that goes through the outputs of forward().

    is_armed: whether the backward pass of the last forward pass will be a round.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(cure=_TWICE, **options)
        self.is_armed = False
        self._is_unhooked = False  # the last outputs had no tensor to put a hook on
        self._is_begun = False
        self._has_traced = False  # a compiled graph has computed gradients of this round

    def can_share_with(self, other: GradientExchange) -> bool:
        """Return whether the other is one of these, with no round begun."""
        return isinstance(other, BackwardExchange) and not other._is_begun

    def expect(self, outputs: Any) -> None:
        """Make the backward pass through these outputs of forward() a round."""
        tensors = [leaf for leaf in _leaves_of(outputs) if leaf.grad_fn is not None]
        self.is_armed, self._is_unhooked = True, not tensors
        for tensor in tensors:
            tensor.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def prepare_for_backward(self, outputs: Any) -> None:
        """Make the next backward pass a round, even if its forward pass was in no_sync()."""
        self.expect(outputs)
        self._is_unhooked = False

    def check_ended(self) -> None:
        """Raise FastPSError when the last backward pass ended before its round did."""
        if self._is_begun:
            names = shortened(self.round.names_in_flight())
            raise FastPSError(
                "the last backward() failed before its end, and gradients may be in flight "
                f"({names or 'none of this worker'}), while other workers wait for the rest: end "
                "the job, or call synchronize() to send the present gradients and end the step"
            )

    def complete(self) -> None:
        """End the round of a backward pass that failed; does nothing without one."""
        if self._is_begun:
            self.finish()
            self._reset()

    def _is_round(self) -> bool:
        """Return whether this backward pass is a round; otherwise it only accumulates."""
        if self.is_armed:
            self._begin()
        return self._is_begun

    def on_traced_gradient(self, index: int) -> None:
        """Note a gradient in a compiled graph, to be sent at the end, without a graph break.

        The first gradient of a round, and all with op=Sum, do break the graph.
        """
        if self._sums is not None or (self.is_armed and not self._is_begun):
            self._on_single_gradient(index)
        elif self._is_begun:
            self._has_traced = True

    @opaque
    def _on_single_gradient(self, index: int) -> None:
        self.on_hook(index)

    @property
    def _hook_function(self) -> Callable[..., None]:
        return _arrive

    @opaque
    def _on_output(self, gradient: torch.Tensor) -> None:
        with self._turn or nullcontext():
            self._begin()

    def _begin(self) -> None:
        if not self._is_begun:
            call_at_the_end(self._send_rest)
            self._is_begun = True

    def _send_rest(self) -> None:
        """Send gradients that did not arrive; called after the whole backward pass.

        The calls that wait are queued behind. So all modules of a backward pass have asked, and
        have sent, before one of them waits: their order may differ between workers.
        """
        if self.round.has_arrivals or self._has_traced:
            self.ask_about_sparse()
            call_at_the_end(self._send_asked)
        else:
            self._is_begun = False  # torch.autograd.grad(); a backward() may still come

    def _send_asked(self) -> None:
        self.send_missing()
        call_at_the_end(self._end)

    def _end(self) -> None:
        self.wait()
        self._reset()
        current.current().steps.mark()

    def _reset(self) -> None:
        self.round.reopen()
        self._is_begun = self._has_traced = False
        self.is_armed = self._is_unhooked


def _arrive_traced(exchange: weakref.ref[BackwardExchange], index: int, _: torch.Tensor) -> None:
    """Pass a gradient on to its exchange, in a graph that compiled autograd has made."""
    alive = exchange()
    if alive is not None:
        alive.on_traced_gradient(index)


@seen_as(_arrive_traced)
def _arrive(exchange: weakref.ref[BackwardExchange], index: int, _: torch.Tensor) -> None:
    """Pass a gradient on to its exchange; apart from arrive(), which Dynamo may compile."""
    alive = exchange()
    if alive is not None:
        alive.on_hook(index)


class _ModuleSnapshot:
    """The submodules and parameters of a wrapped module, to notice when one is replaced."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self._holder = holder
        self._known = set(holder["module"].parameters())
        self._note()

    def are_same(self) -> bool:
        """Return whether no part was added, removed or replaced; FastPSError for new parameters.

        Returns False once for a change, then True. Takes 40 us for 200 layers.
        """
        if sum(map(len, self._views)) == len(self._parts) and all(
            map(is_, itertools.chain.from_iterable(self._views), self._parts)
        ):
            return True
        module = self._holder["module"]
        _check_kinds(module)
        added = [name for name, p in module.named_parameters() if p not in self._known]
        if added:
            raise FastPSError(
                f"{shortened(added)} came into the module after it was wrapped, so the gradient "
                "is not averaged: change the module before, or wrap it again and give a new "
                "optimizer its parameters (load_state_dict() without assign=True copies)"
            )
        self._note()
        return False

    def _note(self) -> None:
        """Remember every part, and views of the dictionaries that show later changes."""
        self._views = [self._holder.values()]
        for part in self._holder["module"].modules():
            self._views += [part._parameters.values(), part._modules.values()]
        self._parts = list(itertools.chain.from_iterable(self._views))


class _Forward(Protocol[P, R]):
    """A module, by the types of its forward()."""

    def forward(self, *args: P.args, **options: P.kwargs) -> R: ...


class DistributedDataParallel(torch.nn.Module, Generic[M]):
    """Average a module's gradients over all workers during backward(); any optimizer will do.

    All ranks take over rank 0's parameters and buffers at construction. When backward() returns,
    p.grad holds the average. Gradients of parameters that a rank did not use count as zero, and
    p.grad is zero rather than None then (find_unused_parameters is accepted and not needed).
    broadcast_buffers: before each forward pass in training mode all ranks take over rank 0's
    buffers. compression, op, rule, gradient_views, bucket_bytes, sparse_as_dense and process_set,
    whose first member replaces rank 0, are those of DistributedOptimizer. Torch's names
    bucket_cap_mb (bucket_bytes in MiB) and gradient_as_bucket_view (gradient_views=True) mean the
    same, and static_graph is accepted and not needed. device_ids and output_device may name the
    device that the module is on; inputs are not moved there. Gradients accumulate over several
    backward passes as without this class, with no_sync() at the cost of one exchange.

    The next forward pass raises FastPSError if the module has new parameters (a layer was
    replaced, load_state_dict(assign=True)): wrap it again then. Use fastps.torch.SyncBatchNorm
    instead of torch's.

    All ranks build their instances in the same order, or give each a `prefix`, and run the same
    number of backward passes; each must reach at least one parameter. backward() raises errors
    such as PeerLostError. Wrap again after shutdown(). A deep copy, such as AveragedModel makes,
    exchanges nothing: it is for evaluation.

    It counts as an instance of torch's class, so that Accelerate, transformers and torch's
    checkpoints find the wrapped module (.module). require_backward_grad_sync is False in
    no_sync(); programs may set it before a forward pass.
    """

    module: M
    require_backward_grad_sync = True
    require_forward_param_sync = True  # Accelerate sets it, and calls reducer
    _is_copy = False

    def __init__(
        self,
        module: M,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        compression: Compressing = Compression.none,
        op: Op = Average,
        prefix: str | None = None,
        gradient_views: Views = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        static_graph: bool = False,
        rule: Rule = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch module, not {type(module).__name__}")
        _check_kinds(module)
        _check_devices(module, device_ids, output_device)
        lazy = [n for n, p in module.named_parameters() if torch.nn.parameter.is_lazy(p)]
        if lazy:
            raise ValueError(
                f"lazy parameters have no shape yet ({shortened(lazy)}): run one forward pass "
                "before wrapping"
            )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        prefix = _next_prefix(process_set) if prefix is None else prefix
        self._exchange = kind_of(BackwardExchange)(
            compression=compression,
            op=op,
            prefix=f"{prefix}Gradient.",
            gradient_views=gradient_as_bucket_view or gradient_views,
            bucket_bytes=bucket_bytes if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20)),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            rule=rule,
        )
        self._prefix = prefix
        self._process_set = process_set
        self._buffers_kind = _buffers_kind()
        self._buffer_sync = self._buffers_kind(module, prefix, process_set)
        named: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
        self._exchange.watch([p for _, p in named], [name for name, _ in named])
        if self._exchange.can_lay_out:
            current.current().steps.offer(self._exchange)
        self._buffer_sync.check_alike()
        broadcast_parameters(named, process_set.first, f"{prefix}Parameter.", process_set)
        self._buffer_sync.synchronize()
        self._snapshot = _ModuleSnapshot(self._modules)

    if TYPE_CHECKING:  # calls have the types of the module's own

        def __call__(
            self: DistributedDataParallel[_Forward[P, R]],  # type: ignore[type-var]
            *args: P.args,
            **options: P.kwargs,
        ) -> R: ...

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module; the backward pass through what it returns averages the gradients."""
        if self._is_copy:
            return self._evaluate(*inputs, **options)
        is_round = torch.is_grad_enabled() and self.require_backward_grad_sync
        if is_round and torch._C._current_graph_task_id() == -1:  # not within backward()
            self._exchange.check_ended()
            self._exchange.check_in_charge()
            if not self._snapshot.are_same():
                self._buffer_sync = self._buffers_kind(
                    self.module, self._prefix, self._process_set
                )
            if self.broadcast_buffers and self.training:
                self._buffer_sync.synchronize()
        outputs = self.module(*inputs, **options)
        if is_round:
            self._exchange.expect(outputs)
        elif torch.is_grad_enabled():
            self._exchange.is_armed = False
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the backward passes of forward passes in this context.

        The backward pass of the first forward pass outside averages the sum.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def reducer(self) -> BackwardExchange:
        """Return an object with prepare_for_backward(), as torch's reducer."""
        return self._exchange

    def synchronize(self) -> None:
        """Complete the step after backward() has failed: send present gradients, and wait.

        Does nothing otherwise. Other workers get zeros for gradients that this one lacks.
        """
        self._exchange.complete()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a wrapper of a copied module, which exchanges nothing.

        It is unknown whether all workers make the copy, and whether it will be trained.
        """
        copied = type(self).__new__(type(self))
        torch.nn.Module.__init__(copied)
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        copied._is_copy = True
        return copied.train(self.training)

    def _evaluate(self, *inputs: Any, **options: Any) -> Any:
        """Run the module of a copy."""
        if torch.is_grad_enabled() and self.training:
            raise FastPSError(
                "this copy of a DistributedDataParallel averages no gradients: wrap its .module "
                "to train it, or call eval() or use torch.no_grad()"
            )
        return self.module(*inputs, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled."""
        raise TypeError("a DistributedDataParallel cannot be pickled; save its state_dict()")


# A virtual subclass: a real one would need torch's reducer.
torch.nn.parallel.DistributedDataParallel.register(DistributedDataParallel)

_instances: weakref.WeakKeyDictionary[Session, Counter[ProcessSet]] = weakref.WeakKeyDictionary()


def _next_prefix(process_set: ProcessSet) -> str:
    """Return a prefix with the instance's number among those of its process set."""
    counts = _instances.setdefault(current.current(), Counter())
    counts[process_set] += 1
    return f"DDP{counts[process_set] - 1}."


def _buffers_kind() -> type[BufferSync]:
    """Return the class that copies buffers; another in an elastic job."""
    if not current.current().is_elastic:
        return BufferSync
    from fastps.frameworks.torch.gradients.elastic_step import ElasticBuffers  # noqa: PLC0415

    return ElasticBuffers


def _check_kinds(module: torch.nn.Module) -> None:
    """Raise ValueError for a module with a part that communicates by itself."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'!r} is a DistributedDataParallel already, so gradients "
                "would be averaged twice: wrap only the plain module (its .module)"
            )
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"{name or 'the module'!r} is torch's SyncBatchNorm, which does not train on the "
                "CPU: use fastps.torch.SyncBatchNorm.convert_sync_batchnorm(module)"
            )


def _check_devices(
    module: torch.nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None
) -> None:
    """Raise ValueError for another device than the one that the whole module is on."""
    given = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    places = {parameter.device for parameter in module.parameters()}
    if not all(_is_device(one, place) for one in given for place in places):
        raise ValueError(
            f"{device_ids=} and {output_device=} must name the one device of the module, whose "
            f"parameters are on {', '.join(sorted(map(str, places)))}: leave both out, or move "
            "the module before"
        )


def _is_device(given: Device, device: torch.device) -> bool:
    if isinstance(given, int):
        return device.type != "cpu" and given == device.index
    wanted = torch.device(given)
    return wanted.type == device.type and wanted.index in (None, device.index)


def _leaves_of(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and dataclasses."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves_of(getattr(leaf, field.name))
