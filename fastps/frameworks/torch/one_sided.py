# SPDX-License-Identifier: Apache-2.0
"""Optimizers that mix models by windows: nobody waits for a neighbour's step.

Ways of decentralized.py whose mixing is a put, a get or an accumulate. Parameters of one type
travel together, as a flat copy in memory that neighbours reach, which is a window. Threads: as
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fastps.current import current
from fastps.flights import Flight
from fastps.frameworks.torch.decentralized import (
    AdaptWithCombine,
    DecentralizedOptimizer,
    Models,
    Parameters,
    Way,
    adopt_with,
    bucketed,
)
from fastps.frameworks.torch.tensors import make_room, tensor_over, wire_dtype
from fastps.graph.weights import Targets


class OneSidedOptimizer(Protocol):
    """What the functions below add to an optimizer besides DecentralizedOptimizer."""

    dst_weights: Targets | None
    force_barrier: bool

    def unregister_window(self) -> None:
        """Free its windows; all workers call it."""


class Pool:
    """Some parameters of one type as one flat tensor, over which there is a window."""

    def __init__(self, tensors: Parameters, name: str, *, zero_init: bool) -> None:
        self.tensors, self.name = tensors, name
        dtype = tensors[0].dtype
        code = wire_dtype(dtype, name)
        self.array = make_room(current(), sum(one.numel() for one in tensors), code)
        self.flat = tensor_over(self.array, dtype)
        self.gather()
        table = current().groups.windows
        if not table.create(self.array, name, zero_init=zero_init, dtype=code, user=self.flat):
            raise ValueError(f"window {name!r} is there already: give another window_prefix")

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter with its piece of a flat tensor."""
        start = 0
        for one in self.tensors:
            yield one.detach(), flat[start : start + one.numel()].view_as(one)
            start += one.numel()

    def gather(self) -> None:
        """Copy the parameters into the window's own value."""
        for one, piece in self.parts(self.flat):
            piece.copy_(one)

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        for one, piece in self.parts(flat):
            one.copy_(piece)


def _pools(way: Way, *, zero_init: bool) -> list[Pool]:
    types = dict.fromkeys(one.dtype for one in way.parameters)
    buckets = [
        bucket for dtype in types
        for bucket in bucketed([one for one in way.parameters if one.dtype is dtype])
    ]  # fmt: skip
    return [
        Pool(bucket, f"{way.name}{i}", zero_init=zero_init) for i, bucket in enumerate(buckets)
    ]


def _barrier(way: Way) -> None:
    if way.optimizer.force_barrier:  # type: ignore[attr-defined]
        current().groups.world.barrier(name=f"{way.name}barrier").wait()


class WinPut(AdaptWithCombine):
    """Put, mix what is there, step: x <- A(x, last puts of neighbours) - opt(g).

    A put travels while forward and backward run. Neighbours' values may be older, never torn.
    """

    def mixed(self) -> Parameters:
        """Leave the mixer idle: windows mix."""
        return ()

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Make windows; all workers are here."""
        super().watch(models)
        self.pools = _pools(self, zero_init=False)
        self._flights: list[Flight] = []

    def send(self) -> None:
        """Begin to put, or to get."""
        for pool in self.pools:
            pool.gather()
        self._flights = [self.start(pool) for pool in self.pools]

    def start(self, pool: Pool) -> Flight:
        """Begin to put the parameters into neighbours' buffers."""
        return current().groups.windows.put(
            pool.array, pool.name, adds=False, self_weight=None,
            dst_weights=self.optimizer.dst_weights, is_locked=False, is_waited=False, has_p=False,
        )  # fmt: skip

    def receive(self) -> None:
        """Mix with what neighbours have put last."""
        while self._flights:
            self._flights.pop().wait()
        _barrier(self)
        for pool in self.pools:
            current().groups.windows.update(
                pool.name, None, None, None, resets=False, is_locked=False, has_p=False
            ).wait()
            pool.scatter(pool.flat)
        _barrier(self)


class PullGet(WinPut):
    """The same, but each gets its neighbours' parameters: x <- A(x, neighbours') - opt(g)."""

    def send(self) -> None:
        """Show the parameters under our mutex, and begin to get the neighbours'."""
        for pool in self.pools:
            with current().groups.windows.mutex(pool.name, for_self=True, ranks=None):
                pool.gather()
        _barrier(self)
        self._flights = [self.start(pool) for pool in self.pools]

    def start(self, pool: Pool) -> Flight:
        """Begin to get neighbours' parameters, when they do not write them."""
        return current().groups.windows.get(
            pool.name, self.optimizer.src_weights, is_locked=True, is_waited=False
        )


class PushSum(Way):
    """Stochastic gradient push: x <- P (x - opt(g(z))), w <- P w, z = x / w.

    The parameters are z. P is column-stochastic: a worker keeps and sends shares of what it has,
    and needs not know who sends to it. Assran, Loizou, Ballas and Rabbat, "Stochastic gradient
    push for distributed deep learning", ICML 2019, algorithm 1.
    """

    def mixed(self) -> Parameters:
        """Leave the mixer idle: windows mix."""
        return ()

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Begin with x = z and w = 1; all workers are here."""
        self.pools = _pools(self, zero_init=True)
        self._z = [pool.flat.clone() for pool in self.pools]

    def shares(self) -> tuple[float, Targets]:
        """Give what a worker keeps, and what it sends to whom."""
        own, targets = self.optimizer.self_weight, self.optimizer.dst_weights
        if targets is None:
            targets = current().groups.windows.find(self.pools[0].name).window.targets
        if not isinstance(targets, Mapping):
            ranks = list(targets)
            targets = dict.fromkeys(ranks, 1 / (len(ranks) + 1))
        given = dict(targets)
        return 1.0 - sum(given.values()) if own is None else own, given

    def mixed_step(self) -> None:
        """Step, push shares of x and w, add up what came."""
        self.optimizer.step_of()
        if not self.pools:
            return
        own, targets = self.shares()
        table = current().groups.windows
        flights = []
        for pool, z in zip(self.pools, self._z, strict=True):
            x = pool.flat.clone()
            pool.gather()
            pool.flat.sub_(z).add_(x)  # what the steps since the last mixing have done to z
            flights.append(
                table.put(pool.array, pool.name, adds=True, self_weight=own, dst_weights=targets,
                          is_locked=False, is_waited=False, has_p=True)
            )  # fmt: skip
        for flight in flights:
            flight.wait()
        _barrier(self)
        for pool, z in zip(self.pools, self._z, strict=True):
            window = table.find(pool.name).window
            ones = dict.fromkeys(window.sources, 1.0)
            table.update(
                pool.name, 1.0, ones, None, resets=True, is_locked=False, has_p=True
            ).wait()
            z.copy_(pool.flat).div_(window.p)
            pool.scatter(z)
        _barrier(self)


# ---- what users call ----


def DistributedWinPutOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> DecentralizedOptimizer:
    """Put parameters to neighbours while forward and backward run; mix with what is there; step.

    All workers call it: it makes windows on the graph of set_topology(). Attributes that may be
    changed at every iteration, by each worker alone: dst_weights (ranks, or rank: factor; some of
    the out-neighbours), force_barrier (False: nobody waits). unregister_window() frees the
    windows; all workers call it. num_steps_per_communication: as in
    DistributedAdaptWithCombineOptimizer(). Give a second optimizer another window_prefix.
    """
    return _one_sided(WinPut, optimizer, model, num_steps_per_communication, window_prefix)


def DistributedPullGetOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> DecentralizedOptimizer:
    """Get neighbours' parameters while forward and backward run; mix; step.

    src_weights (ranks, or rank: factor; some of the in-neighbours) in the place of dst_weights;
    otherwise as DistributedWinPutOptimizer().
    """
    return _one_sided(PullGet, optimizer, model, num_steps_per_communication, window_prefix)


def DistributedPushSumOptimizer(
    optimizer: torch.optim.Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> DecentralizedOptimizer:
    """Step, push shares of the model and of P to neighbours, add up and divide.

    Right also on directed graphs where nobody knows who sends to it. self_weight and dst_weights
    sum to 1: by default, and for a list of k ranks, all get 1 / (k + 1); with a dict of
    dst_weights alone the worker keeps the rest. force_barrier is True at first: all mix in step,
    as the recursion says; False: nobody waits, and what is late counts in the next round.
    Otherwise as DistributedWinPutOptimizer().
    """
    found = _one_sided(PushSum, optimizer, model, num_steps_per_communication, window_prefix)
    vars(found)["force_barrier"] = True
    return found


def _one_sided(
    way: type[Way], optimizer: Any, model: Models, passes: int, window_prefix: str | None
) -> DecentralizedOptimizer:
    found = adopt_with(
        optimizer, way, model, num_steps_per_communication=passes, prefix=window_prefix or ""
    )
    pools: list[Pool] = found._way.pools  # type: ignore[attr-defined]

    def unregister_window() -> None:
        for pool in pools:
            current().groups.windows.free(pool.name)

    vars(found).update(force_barrier=False, unregister_window=unregister_window)
    return found
