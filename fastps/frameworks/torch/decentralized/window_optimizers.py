# SPDX-License-Identifier: Apache-2.0
"""Optimizers that mix models by windows: nobody waits for a neighbour's step.

Ways of optimizer.py whose mixing is a put, a get or an accumulate. Parameters of one type
travel together, as a flat copy in memory that neighbours reach, which is a window. Threads: as
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fastps.errors import PeerLostError
from fastps.frameworks.torch.decentralized.optimizer import (
    AdaptWithCombine,
    DecentralizedOptimizer,
    Models,
    Parameters,
    Way,
    adopt_with,
    bucketed,
)
from fastps.frameworks.torch.ops.tensors import make_room, tensor_over, wire_dtype, write_over
from fastps.graph.survivor_weights import redirected
from fastps.graph.weights import Targets
from fastps.ops.neighbors import lost_ranks
from fastps.session.current import current
from fastps.worker.handle import Waitable


class OneSidedOptimizer(Protocol):
    """What the functions below add to an optimizer besides DecentralizedOptimizer."""

    dst_weights: Targets | None
    force_barrier: bool

    def unregister_window(self) -> None:
        """Free its windows; all workers call it."""


class Pool:
    """Some tensors of one type as one flat tensor, over which there is a window.

    moves: forward passes change them, while what they were before travels.
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
            raise ValueError(f"window {name!r} is there already: give another window_prefix")

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor with its piece of a flat one."""
        start = 0
        for one in self.tensors:
            yield one.detach(), flat[start : start + one.numel()].view_as(one)
            start += one.numel()

    def gather(self) -> None:
        """Copy the tensors into the window's own value."""
        for one, piece in self.parts(self.flat):
            piece.copy_(one)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy a flat tensor into the tensors."""
        for one, piece in self.parts(flat):
            write_over(one, piece)

    def mix(self) -> None:
        """Mix with what is in the buffers of neighbours that are left, as the graph weighs them.

        What has been done to the tensors since gather() comes on top.
        """
        changes = []
        if self._moves:
            changes = [one - piece for one, piece in self.parts(self.flat)]
        table = current().groups.windows
        own, weights = table.weights_of_those_left(self.name)
        table.update(
            self.name, own, weights, None, resets=False, is_locked=False, has_p=False
        ).wait()
        self.scatter(self.flat)
        for one, change in zip(self.tensors, changes, strict=self._moves):
            one.detach().add_(change)


def _pools(way: Way, *, zero_init: bool) -> list[Pool]:
    """Make windows of the parameters, and of buffers if those are to be averaged."""
    return [
        Pool(bucket, f"{way.name}{kind}{i}", zero_init=zero_init, moves=bool(kind))
        for kind, tensors in (("", way.parameters), ("buffers", way.buffers))
        for i, bucket in enumerate(_bucketed_by_type(tensors))
    ]


def _bucketed_by_type(tensors: Parameters) -> Iterator[list[torch.Tensor]]:
    for dtype in dict.fromkeys(one.dtype for one in tensors):
        yield from bucketed([one for one in tensors if one.dtype is dtype])


def _barrier(way: Way) -> None:
    if not way.optimizer.force_barrier:  # type: ignore[attr-defined]
        return
    groups, name = current().groups, f"{way.name}barrier"
    if current().config.goes_on:
        groups.agreed(name).finish()
    else:
        groups.world.barrier(name=name).wait()


class Flights:
    """Puts or gets under way; where the job goes on without the lost, one for each neighbour.

    So whoever is lost takes nothing with it that another one was to get.
    """

    def __init__(self) -> None:
        self._flights: list[tuple[int | None, Waitable]] = []

    def start(
        self, begin: Callable[[Targets], Waitable], given: Targets | None, known: Sequence[int]
    ) -> None:
        """Start for neighbours: those given, or all known; begin: for some of them."""
        weights = weights_of(known if given is None else given)
        if not current().config.goes_on:
            self._flights.append((None, begin(weights)))
            return
        for peer in left_of(weights):
            self._flights.append((peer, begin({peer: weights[peer]})))

    def wait(self) -> list[int]:
        """Wait for all; give the neighbours that have not got it, as they are lost."""
        flights, self._flights = self._flights, []
        missed = []
        for peer, flight in flights:
            try:
                flight.wait()
            except PeerLostError:
                if peer is None:
                    raise
                missed.append(peer)
        return missed


def weights_of(given: Targets) -> dict[int, float]:
    """Return the factor of each neighbour; a list has 1 for all."""
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)


def left_of(ranks: Iterable[int]) -> list[int]:
    """List those that are not lost."""
    lost = lost_ranks()
    return [rank for rank in ranks if rank not in lost]


class WinPut(AdaptWithCombine):
    """Put, mix what is there, step: x <- A(x, last puts of neighbours) - opt(g).

    A put travels while forward and backward run. Neighbours' values may be older, never torn.
    """

    def mixed(self) -> Parameters:
        """Leave the mixer idle: windows mix."""
        return ()

    mixed_after = mixed

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Make windows; all workers are here."""
        super().watch(models)
        self.pools = _pools(self, zero_init=False)
        self.flights = Flights()

    def send(self) -> None:
        """Start to put the parameters into neighbours' buffers."""
        for pool in self.pools:
            pool.gather()
            targets = current().groups.windows.find(pool.name).window.targets
            self.flights.start(partial(self._put, pool), self.optimizer.dst_weights, targets)

    def _put(self, pool: Pool, weights: Targets) -> Waitable:
        return current().groups.windows.put(
            pool.array, pool.name, adds=False, self_weight=None, dst_weights=weights,
            is_locked=False, is_waited=False, has_p=False,
        )  # fmt: skip

    def receive(self) -> None:
        """Mix with what neighbours have put last."""
        self.flights.wait()
        _barrier(self)
        for pool in self.pools:
            pool.mix()
        _barrier(self)


class PullGet(WinPut):
    """The same, but each gets its neighbours' parameters: x <- A(x, neighbours') - opt(g)."""

    def send(self) -> None:
        """Show the parameters under our mutex; get neighbours', when they do not write them."""
        for pool in self.pools:
            with current().groups.windows.mutex(pool.name, for_self=True, ranks=None):
                pool.gather()
        _barrier(self)
        for pool in self.pools:
            sources = current().groups.windows.find(pool.name).window.sources
            self.flights.start(partial(_get, pool), self.optimizer.src_weights, sources)


def _get(pool: Pool, weights: Targets) -> Waitable:
    return current().groups.windows.get(pool.name, weights, is_locked=True, is_waited=False)


class PushSum(Way):
    """Stochastic gradient push: x <- P (x - opt(g(z))), w <- P w, z = x / w.

    The parameters are z. P is column-stochastic: a worker keeps and sends shares of what it has,
    and needs not know who sends to it. Assran, Loizou, Ballas and Rabbat, "Stochastic gradient
    push for distributed deep learning", ICML 2019, algorithm 1. Where the job goes on without the
    lost, a share that one of them did not get is kept.
    """

    def mixed(self) -> Parameters:
        """Leave the mixer idle: windows mix."""
        return ()

    mixed_after = mixed

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Start with x = z and w = 1; all workers are here."""
        self.pools = _pools(self, zero_init=True)
        self._z = [pool.flat.clone() for pool in self.pools]

    def shares(self) -> tuple[float, dict[int, float]]:
        """Return what a worker keeps, and what it sends to whom of those that are left."""
        own, targets = self.optimizer.self_weight, self.optimizer.dst_weights
        if targets is None:
            targets = current().groups.windows.find(self.pools[0].name).window.targets
        if not isinstance(targets, Mapping):
            ranks = list(targets)
            targets = dict.fromkeys(ranks, 1 / (len(ranks) + 1))
        total = sum(targets.values())
        own = 1.0 - total if own is None else own
        left = left_of(targets)
        if not left:
            return own + total, {}
        kept, sent = redirected(own, targets, [rank for rank in targets if rank not in left])
        return own if kept is None else kept, weights_of(sent or {})

    def mixed_step(self) -> None:
        """Step, push shares of x and w, add up what came."""
        self.optimizer.step_of()
        if not self.pools:
            return
        own, targets = self.shares()
        table, flights = current().groups.windows, []
        for pool, z in zip(self.pools, self._z, strict=True):
            x = pool.flat.clone()
            pool.gather()
            pool.flat.sub_(z).add_(x)  # what the steps since the last mixing have done to z
            flights.append(Flights())
            flights[-1].start(partial(_push, pool), targets, ())
        for pool, some in zip(self.pools, flights, strict=True):
            missed = some.wait()
            kept = own + sum(targets[peer] for peer in missed)
            _push(pool, {}, self_weight=kept).wait()
        _barrier(self)
        for pool, z in zip(self.pools, self._z, strict=True):
            window = table.find(pool.name).window
            ones = dict.fromkeys(left_of(window.sources), 1.0)
            table.update(
                pool.name, 1.0, ones, None, resets=True, is_locked=False, has_p=True
            ).wait()
            z.copy_(pool.flat).div_(window.p)
            pool.scatter(z)
        _barrier(self)


def _push(pool: Pool, shares: Targets, self_weight: float | None = None) -> Waitable:
    return current().groups.windows.put(
        pool.array, pool.name, adds=True, self_weight=self_weight, dst_weights=shares,
        is_locked=False, is_waited=False, has_p=True,
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
    """Put parameters to neighbours while forward and backward run; mix with what is there; step.

    All workers call it: it makes windows on the graph of set_topology(). Attributes that may be
    changed at every iteration, by each worker alone: dst_weights (ranks, or rank: factor; some of
    the out-neighbours), force_barrier (False: nobody waits). unregister_window() frees the
    windows; all workers call it. num_steps_per_communication: as in
    DistributedAdaptWithCombineOptimizer(). Give a second optimizer another window_prefix.
    average_buffers: put the models' buffers of floats too; what forward passes do to them counts
    on top. Where on_loss="reweight" goes on without the lost, they are left out.
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
    """Get neighbours' parameters while forward and backward run; mix; step.

    src_weights (ranks, or rank: factor; some of the in-neighbours) in place of dst_weights;
    otherwise as DistributedWinPutOptimizer().
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

    Right also on directed graphs where nobody knows who sends to it. self_weight and dst_weights
    sum to 1: by default, and for a list of k ranks, all get 1 / (k + 1); with a dict of
    dst_weights alone the worker keeps the rest. force_barrier is True at first: all mix in step,
    as the recursion says; False: nobody waits, and what is late counts in the next round.
    Otherwise as DistributedWinPutOptimizer().
    """
    found = _one_sided(PushSum, optimizer, model, num_steps_per_communication, window_prefix,
                      average_buffers=average_buffers)  # fmt: skip
    vars(found)["force_barrier"] = True
    return found


def _one_sided(
    way: type[Way], optimizer: Any, model: Models, passes: int, window_prefix: str | None, *,
    average_buffers: bool,
) -> DecentralizedOptimizer:  # fmt: skip
    found = adopt_with(
        optimizer, way, model, num_steps_per_communication=passes, prefix=window_prefix or "",
        average_buffers=average_buffers,
    )  # fmt: skip
    pools: list[Pool] = found._way.pools  # type: ignore[attr-defined]

    def unregister_window() -> None:
        for pool in pools:
            current().groups.windows.free(pool.name)

    vars(found).update(force_barrier=False, unregister_window=unregister_window)
    return found
