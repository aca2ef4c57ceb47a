# SPDX-License-Identifier: Apache-2.0
"""Optimizers that mix models by one-sided windows, without waiting for a neighbour's step.

Algorithms of optimizer.py whose mixing is a put, a get or an accumulate. Parameters of one dtype
are copied side by side into one flat tensor, over which there is a window. Threads: as in
optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastps.errors import PeerLostError
from fastps.frameworks.torch.decentralized.optimizer import (
    AdaptWithCombine,
    Algorithm,
    DecentralizedOptimizer,
    Models,
    Parameters,
    adopt,
    bucketed,
)
from fastps.frameworks.torch.ops.tensors import make_room, tensor_over, wire_dtype, write_over
from fastps.graph.survivor_weights import redirected
from fastps.graph.weights import Targets
from fastps.ops.neighbors import lost_ranks
from fastps.session.current import current
from fastps.worker.handle import Waitable


class FlatWindow:
    """Tensors of one dtype, copied side by side into a flat tensor, and the window over it.

    moves: whether forward passes change the tensors while their earlier values travel.
    """

    def __init__(
        self, tensors: Parameters, name: str, *, zero_init: bool, moves: bool = False
    ) -> None:
        self.tensors, self.name = tensors, name
        self._moves = moves
        dtype = tensors[0].dtype
        code = wire_dtype(dtype, name)
        self.array = make_room(current(), sum(one.numel() for one in tensors), code)
        self.flat = tensor_over(self.array, dtype)
        self.gather()
        table = current().groups.windows
        if not table.create(self.array, name, zero_init=zero_init, dtype=code, user=self.flat):
            raise ValueError(f"window {name!r} exists already: pass another window_prefix")

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor with its part of a flat one."""
        start = 0
        for one in self.tensors:
            yield one.detach(), flat[start : start + one.numel()].view_as(one)
            start += one.numel()

    def gather(self) -> None:
        """Copy the tensors into the window's value."""
        for one, piece in self.parts(self.flat):
            piece.copy_(one)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy a flat tensor into the tensors."""
        for one, piece in self.parts(flat):
            write_over(one, piece)

    def mix(self) -> None:
        """Average with the buffers of surviving neighbours by the graph's weights.

        Changes of the tensors since gather() are added to the result.
        """
        changes = []
        if self._moves:
            changes = [one - piece.to(one.device) for one, piece in self.parts(self.flat)]
        table = current().groups.windows
        own, weights = table.weights_of_those_left(self.name)
        table.update(
            self.name, own, weights, None, resets=False, is_locked=False, has_p=False
        ).wait()
        self.scatter(self.flat)
        for one, change in zip(self.tensors, changes, strict=self._moves):
            one.detach().add_(change)


class PendingTransfers:
    """Puts or gets under way; where the job goes on without lost workers, one per neighbour.

    Separate transfers keep a lost neighbour from failing those of the others.
    """

    def __init__(self) -> None:
        self._handles: list[tuple[int | None, Waitable]] = []

    def start(
        self, begin: Callable[[Targets], Waitable], given: Targets | None, known: Sequence[int]
    ) -> None:
        """Start for the given neighbours, or all known; begin: starts for some of them."""
        weights = weights_of(known if given is None else given)
        if not current().config.goes_on:
            self._handles.append((None, begin(weights)))
            return
        for peer in survivors_of(weights):
            self._handles.append((peer, begin({peer: weights[peer]})))

    def wait(self) -> list[int]:
        """Wait for all, and return the neighbours that were lost before they had it."""
        handles, self._handles = self._handles, []
        missed = []
        for peer, handle in handles:
            try:
                handle.wait()
            except PeerLostError:
                if peer is None:
                    raise
                missed.append(peer)
        return missed


def weights_of(given: Targets) -> dict[int, float]:
    """Return the factor of each neighbour; 1 for each of a list."""
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)


def survivors_of(ranks: Iterable[int]) -> list[int]:
    """List the ranks that are not lost."""
    lost = lost_ranks()
    return [rank for rank in ranks if rank not in lost]


class WindowAlgorithm(Algorithm):
    """The windows of an optimizer's parameters, and of buffers if those are averaged."""

    zero_init = False

    def mixed_tensors(self) -> Parameters:
        """Return nothing for the mixers: windows mix."""
        return ()

    mixed_buffers = mixed_tensors

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Create the windows; all workers call it."""
        super().watch(models)
        self.windows = [
            FlatWindow(bucket, f"{self.name}{kind}{i}", zero_init=self.zero_init, moves=bool(kind))
            for kind, tensors in (("", self.parameters), ("buffers", self.buffers))
            for i, bucket in enumerate(_bucketed_by_type(tensors))
        ]

    def barrier(self) -> None:
        """Wait for all workers, where force_barrier asks for it."""
        if not self.optimizer.force_barrier:  # type: ignore[attr-defined]
            return
        groups, name = current().groups, f"{self.name}barrier"
        if current().config.goes_on:
            groups.agreed(name).finish()
        else:
            groups.world.barrier(name=name).wait()


def _bucketed_by_type(tensors: Parameters) -> Iterator[list[torch.Tensor]]:
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        yield from bucketed([one for one in tensors if one.dtype is dtype])


class WinPut(WindowAlgorithm, AdaptWithCombine):
    """Put, mix with the buffers, step: x <- A(x, last puts of neighbours) - opt(g).

    A put travels while forward and backward run. Neighbours' values may be older, never torn.
    """

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Create the windows; all workers call it."""
        super().watch(models)
        self.transfers = PendingTransfers()

    def send(self) -> None:
        """Start to put the parameters into neighbours' buffers."""
        for window in self.windows:
            window.gather()
            targets = current().groups.windows.find(window.name).window.targets
            put = partial(_put, window, adds=False)
            self.transfers.start(put, self.optimizer.dst_weights, targets)

    def receive(self) -> None:
        """Mix with the last puts of neighbours."""
        self.transfers.wait()
        self.barrier()
        for window in self.windows:
            window.mix()
        self.barrier()


class PullGet(WinPut):
    """As WinPut, but each gets its neighbours' parameters: x <- A(x, neighbours') - opt(g)."""

    def send(self) -> None:
        """Copy the parameters into the window under its mutex, and start to get neighbours'."""
        for window in self.windows:
            with current().groups.windows.mutex(window.name, for_self=True, ranks=None):
                window.gather()
        self.barrier()
        for window in self.windows:
            sources = current().groups.windows.find(window.name).window.sources
            get = partial(current().groups.windows.get, window.name, is_locked=True,
                          is_waited=False)  # fmt: skip
            self.transfers.start(get, self.optimizer.src_weights, sources)


class PushSum(WindowAlgorithm):
    """Stochastic gradient push: x <- P (x - opt(g(z))), w <- P w, z = x / w.

    The parameters are z. P is column-stochastic: a worker keeps one share of x and sends the
    others, and needs not know who sends to it. Assran, Loizou, Ballas and Rabbat, "Stochastic
    gradient push for distributed deep learning", ICML 2019, algorithm 1. Where the job goes on
    without lost workers, a share that one of them did not get is kept.
    """

    zero_init = True

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with x = z and w = 1; all workers call it."""
        super().watch(models)
        self._z = [window.flat.clone() for window in self.windows]

    def shares(self) -> tuple[float, dict[int, float]]:
        """Return the share that this worker keeps, and that of each surviving target."""
        own, targets = self.optimizer.self_weight, self.optimizer.dst_weights
        if targets is None:
            targets = current().groups.windows.find(self.windows[0].name).window.targets
        if not isinstance(targets, Mapping):
            ranks = list(targets)
            targets = dict.fromkeys(ranks, 1 / (len(ranks) + 1))
        total = sum(targets.values())
        own = 1.0 - total if own is None else own
        left = survivors_of(targets)
        if not left:
            return own + total, {}
        kept, sent = redirected(own, targets, [rank for rank in targets if rank not in left])
        return own if kept is None else kept, weights_of(sent or {})

    def mixed_step(self) -> None:
        """Step, push shares of x and w, and add up what has come."""
        self.optimizer.step_of()
        if not self.windows:
            return
        own, targets = self.shares()
        table, all_transfers = current().groups.windows, []
        for window, z in zip(self.windows, self._z, strict=True):
            x = window.flat.clone()
            window.gather()
            window.flat.sub_(z).add_(x)  # x plus the steps since the last mixing
            transfers = PendingTransfers()
            transfers.start(partial(_put, window, adds=True), targets, ())
            all_transfers.append(transfers)
        for window, transfers in zip(self.windows, all_transfers, strict=True):
            missed = transfers.wait()
            kept = own + sum(targets[peer] for peer in missed)
            _put(window, {}, adds=True, self_weight=kept).wait()
        self.barrier()
        for window, z in zip(self.windows, self._z, strict=True):
            state = table.find(window.name).window
            ones = dict.fromkeys(survivors_of(state.sources), 1.0)
            table.update(
                window.name, 1.0, ones, None, resets=True, is_locked=False, has_p=True
            ).wait()
            z.copy_(window.flat).div_(state.p)
            window.scatter(z)
        self.barrier()


def _put(
    window: FlatWindow, weights: Targets, *, adds: bool, self_weight: float | None = None
) -> Waitable:
    """Start to put a window's value, or to add shares of it and of P."""
    return current().groups.windows.put(
        window.array, window.name, adds=adds, self_weight=self_weight, dst_weights=weights,
        is_locked=False, is_waited=False, has_p=adds,
    )  # fmt: skip


# ---- what users call ----


def DistributedWinPutOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    *,
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Put parameters to neighbours during forward and backward; mix with their last puts; step.

    All workers call it: it creates windows on the graph of set_topology(). Attributes that each
    worker may change at every iteration: dst_weights (ranks, or rank: factor; some of the
    out-neighbours), force_barrier (False: nobody waits). unregister_window() frees the windows;
    all workers call it. num_steps_per_communication: as in DistributedAdaptWithCombineOptimizer().
    A second optimizer needs another window_prefix. average_buffers: put the models' floating-point
    buffers too; changes by forward passes are added to the result. With on_loss="reweight" lost
    workers are left out.
    """
    return _one_sided(WinPut, optimizer, model, num_steps_per_communication, window_prefix,
                      average_buffers=average_buffers)  # fmt: skip


def DistributedPullGetOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    *,
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Get neighbours' parameters during forward and backward; mix; step.

    Has src_weights (ranks, or rank: factor; some of the in-neighbours) instead of dst_weights.
    Otherwise as DistributedWinPutOptimizer().
    """
    return _one_sided(PullGet, optimizer, model, num_steps_per_communication, window_prefix,
                      average_buffers=average_buffers)  # fmt: skip


def DistributedPushSumOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    *,
    average_buffers: bool = False,
) -> DecentralizedOptimizer:
    """Step, push shares of the model and of P to neighbours, add up and divide.

    Correct also on directed graphs where workers do not know who sends to them. self_weight and
    dst_weights sum to 1: by default, and for a list of k ranks, all get 1 / (k + 1); with a dict
    of dst_weights alone the worker keeps the rest. force_barrier is True at first: all workers mix
    in lockstep. With False nobody waits, and a late share counts in the next round. Otherwise as
    DistributedWinPutOptimizer().
    """
    found = _one_sided(PushSum, optimizer, model, num_steps_per_communication, window_prefix,
                      average_buffers=average_buffers)  # fmt: skip
    vars(found)["force_barrier"] = True
    return found


def _one_sided(
    algorithm: type[WindowAlgorithm], optimizer: Any, model: Models, passes: int,
    window_prefix: str | None, *, average_buffers: bool,
) -> DecentralizedOptimizer:  # fmt: skip
    found = adopt(
        optimizer, algorithm, model, num_steps_per_communication=passes,
        prefix=window_prefix or "", average_buffers=average_buffers,
    )  # fmt: skip
    windows: list[FlatWindow] = found._algorithm.windows  # type: ignore[attr-defined]

    def unregister_window() -> None:
        for window in windows:
            current().groups.windows.free(window.name)

    vars(found).update(force_barrier=False, unregister_window=unregister_window)
    return found
