# SPDX-License-Identifier: Apache-2.0
"""BlueFog's own tests, as programs of its users: what the workers of test_bluefog.py do."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import fastps
import fastps.bluefog.torch as bf
from fastps.bluefog.common import topology_util

SHAPES = [(23,) * dims for dims in (1, 2, 3)]
FLOATS = [torch.float32, torch.float64, torch.float16]
GRAPHS = [
    topology_util.ExponentialTwoGraph, topology_util.MeshGrid2DGraph,
    *(lambda n, style=style: topology_util.RingGraph(n, style) for style in (0, 1, 2)),
    *(lambda n, center=center: topology_util.StarGraph(n, center) for center in (0, 1)),
]  # fmt: skip


def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def close(found: torch.Tensor, value: float) -> None:
    eps = 1e-2 if found.dtype is torch.float16 else 1e-5
    assert (found.double() - value).abs().max() < eps, (found, value)


def table() -> str:
    """Go through the operations that BlueFog's tests go through, with their shapes and values."""
    bf.init()
    torch.set_num_threads(1)
    me, n = bf.rank(), bf.size()
    after, before = (me + 1) % n, (me - 1) % n
    assert topology_util.IsTopologyEquivalent(
        bf.load_topology(), topology_util.ExponentialGraph(n)
    )
    assert isinstance(bf.load_topology(), nx.DiGraph)
    matrix = nx.to_numpy_array(bf.load_topology())
    np.testing.assert_allclose(matrix[matrix > 0], 1 / 3)  # four workers
    for shape, dtype in itertools.product(SHAPES, FLOATS):
        x = filled(shape, me, dtype)
        close(bf.allreduce(x, average=True), (n - 1) / 2)
        close(bf.allreduce(x, average=False), n * (n - 1) / 2)
        close(bf.broadcast(x, 1), 1)
        close(bf.neighbor_allreduce(x), np.mean([me, *bf.in_neighbor_ranks()]))
        moved = bf.neighbor_allreduce(
            x, self_weight=0.0, src_weights={before: 1.0}, dst_weights=[after]
        )
        close(moved, before)
        sources = bf.in_neighbor_ranks()
        scaled = bf.neighbor_allreduce(
            x, self_weight=0.5, src_weights=dict.fromkeys(sources, 1.0),
            dst_weights=dict.fromkeys(bf.out_neighbor_ranks(), 0.5), enable_topo_check=True,
        )  # fmt: skip
        close(scaled, 0.5 * (me + sum(sources)))
        assert x.eq(me).all()
        close(bf.pair_gossip(x, me ^ 1, 0.25, 0.75), 0.25 * me + 0.75 * (me ^ 1))
        bf.allreduce_(x)
        close(x, (n - 1) / 2)
    rows = [17, 32, 81, 12, 15, 23, 22]
    found = bf.allgather(filled((rows[me % 7], 23), me, torch.float32))
    assert found[:, 0].tolist() == [i for i in range(n) for _ in range(rows[i % 7])]
    order = np.random.default_rng(me).permutation([i for i in range(n) if i != me]).tolist()
    found = bf.neighbor_allgather(
        filled((rows[me], 2), me, torch.float32), src_ranks=order, dst_ranks=order
    )
    assert found[:, 0].tolist() == [i for i in order for _ in range(rows[i])]
    handles = [bf.neighbor_allreduce_nonblocking(filled((5,), me + k, torch.float32))
               for k in range(50)]  # fmt: skip
    mean = np.mean([me, *bf.in_neighbor_ranks()])
    for k, handle in enumerate(handles):
        close(bf.synchronize(handle), mean + k)
        assert bf.poll(handle)
    for make in GRAPHS:
        assert bf.set_topology(make(n))
        close(bf.neighbor_allreduce(filled((23,), me, torch.float32)),
              np.mean([me, *bf.in_neighbor_ranks()]))  # fmt: skip
    bf.set_topology(topology_util.StarGraph(n), is_weighted=True)
    found = bf.neighbor_allreduce(filled((23,), me, torch.float32))
    close(found, me * (1 - 1 / n) if me else (n - 1) / 2)
    assert bf.is_topo_weighted()
    senders = topology_util.InferSourceFromDestinationRanks([after])
    assert senders == [before]
    receivers, weights = topology_util.InferDestinationFromSourceRanks([before], True)
    assert receivers == [after]
    assert np.array_equal(weights, nx.to_numpy_array(topology_util.RingGraph(n, 2)))
    bf.suspend()
    with pytest.raises(fastps.FastPSError, match="suspended"):
        bf.allreduce(torch.ones(3))
    bf.resume()
    bf.barrier()
    bf.shutdown()
    return "done"


def machines() -> str:
    """Do what is hierarchical, with two workers on a machine."""
    bf.init()
    me, n = bf.rank(), bf.size()
    assert (bf.machine_size(), bf.machine_rank()) == (n // 2, me // 2)
    assert (bf.local_size(), bf.local_rank()) == (2, me % 2)
    assert bf.is_homogeneous()
    x = torch.full((23, 23), float(me))
    close(bf.allreduce(x, is_hierarchical_local=True), me // 2 * 2 + 0.5)
    bf.set_machine_topology(topology_util.ExponentialGraph(n // 2))
    mine = [bf.machine_rank(), *bf.in_neighbor_machine_ranks()]
    close(bf.hierarchical_neighbor_allreduce(x), np.mean([2 * one + 0.5 for one in mine]))
    after, before = ((bf.machine_rank() + step) % (n // 2) for step in (1, -1))
    moved = bf.hierarchical_neighbor_allreduce(
        x, self_weight=0.0, src_machine_weights={before: 0.5}, dst_machine_weights={after: 2.0}
    )
    close(moved, 2 * before + 0.5)
    turns = topology_util.GetExp2DynamicSendRecvMachineRanks(n, 2, me, bf.local_rank())
    assert next(turns) == ([after], [before])
    bf.barrier()
    bf.shutdown()
    return "done"


def consensus() -> float:
    """Average by changing edges until all agree, as BlueFog's example does; give the error."""
    bf.init(topology_util.ExponentialTwoGraph)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(bf.rank()), dtype=torch.double)
    mean = bf.allreduce(x, average=True)
    turns = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    for _ in range(50):
        to_ranks, from_ranks = next(turns)
        share = 1 / (len(from_ranks) + 1)
        x = bf.neighbor_allreduce(
            x, name="x", self_weight=share, src_weights=dict.fromkeys(from_ranks, share),
            dst_weights=to_ranks, enable_topo_check=False,
        )  # fmt: skip
    error = float((x - mean).norm() / mean.norm())
    bf.barrier()
    bf.shutdown()
    return error


def regression() -> dict[str, float]:
    """Train a linear model with noise as BlueFog's test does; give the error over the noise."""
    bf.init()
    torch.set_num_threads(1)
    me, n = bf.rank(), bf.size()
    kinds, found = bf.CommunicationType, {}
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + me)
    truth = torch.randn(16, 3, generator=shared)
    inputs = torch.randn(1024, 16, generator=own)
    labels = inputs @ truth + 1e-5 * torch.randn(1024, 3, generator=own)
    wraps = {
        f"{style} {kind.name}": (wrap, kind)
        for style, wrap in (("atc", bf.DistributedAdaptThenCombineOptimizer),
                            ("awc", bf.DistributedAdaptWithCombineOptimizer))
        for kind in (kinds.neighbor_allreduce, kinds.allreduce, kinds.empty)
        if style == "atc" or kind is kinds.neighbor_allreduce
    }  # fmt: skip
    wraps["gradients"] = (bf.DistributedGradientAllreduceOptimizer, None)
    for name, (wrap, kind) in wraps.items():
        model = nn.Sequential(nn.Linear(16, 3, bias=False))
        bf.broadcast_parameters(model.state_dict(), root_rank=0)
        adam = torch.optim.Adam(model.parameters(), lr=0.01 * n)
        bf.broadcast_optimizer_state(adam, root_rank=0)
        optimizer = wrap(adam, model, *([kind] if kind else []))
        for _ in range(50):
            for first in range(0, 1024, 128):
                optimizer.zero_grad()
                some = slice(first, first + 128)
                nn.functional.mse_loss(model(inputs[some]), labels[some]).backward()
                optimizer.step()
        with torch.no_grad():
            found[name] = float((model(inputs) - labels).square().mean()) / 1e-10
        bf.allreduce_parameters(model.state_dict())
    bf.barrier()
    bf.shutdown()
    return found


def own_ways() -> list[str]:
    """Call what BlueFog's programs call by their own habits; give the warnings of optimizers."""
    bf.init()
    torch.set_num_threads(1)
    me, n = bf.rank(), bf.size()
    assert bf.topology_util.RingGraph is bf.RingGraph is topology_util.RingGraph
    assert bf.IsTopologyEquivalent(bf.load_topology(), bf.ExponentialGraph(size=n, base=2))
    assert bf.InferSourceFromDestinationRanks(dst_ranks=[(me + 1) % n]) == [(me - 1) % n]
    turns = topology_util.GetInnerOuterExpo2DynamicSendRecvRanks(
        world_size=n, local_size=n, self_rank=me
    )
    assert len(next(turns)) == 2
    for size in (3, 4):  # no names, and others the second time
        some = [torch.full((size,), float(me)), torch.full((size,), 2.0 * me)]
        bf.broadcast_parameters(some, root_rank=1)
        assert [float(one[0]) for one in some] == [1, 2]
        some[0].fill_(me)
        bf.allreduce_parameters(some)
        close(some[0], (n - 1) / 2)
    assert bf.win_wait(3) is False
    assert bf.win_poll(None) is False
    with pytest.raises(ValueError, match="3 is not a handle"):
        bf.synchronize(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = [_two_passes(wrap) for wrap in (
            bf.DistributedAdaptThenCombineOptimizer, bf.DistributedAdaptWithCombineOptimizer,
            bf.DistributedGradientAllreduceOptimizer, bf.DistributedWinPutOptimizer)]  # fmt: skip
    for found in steps[:3]:  # all gradients count; but for puts, which come when they come
        close(found, -0.2 * (n / 2 + 1))
    bf.barrier()
    bf.shutdown()
    return [str(one.message) for one in said]


def _two_passes(wrap: Any) -> torch.Tensor:
    """Make two backward passes, and as many where the optimizer expects one; twice."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.turn_on_timeline()
    for _ in range(2):
        optimizer.zero_grad()
        for extra in range(2):
            inputs = torch.full((1, 2), bf.rank() + 1.0 + extra, dtype=torch.double)
            (model(inputs).sum() / 2).backward()
        optimizer.step()
    optimizer.turn_off_timeline()
    bf.barrier()
    return bf.allreduce(model.weight.detach())


def shown() -> bool:
    """Do what a timeline shows."""
    bf.init()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bf.DistributedGradientAllreduceOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model
    )
    optimizer.turn_on_timeline()
    with bf.timeline_context("outer", "LOAD"), fastps.span("inside", "of it"):
        is_on = bf.timeline_start_activity("x", "PREPARE")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert bf.timeline_end_activity("x") is is_on
    assert bf.timeline_end_activity("x") is False
    bf.shutdown()
    return is_on
