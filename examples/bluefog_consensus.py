# SPDX-License-Identifier: Apache-2.0
"""A script for BlueFog: the shape of its pytorch_average_consensus.py, two import lines changed.

Workers average random vectors with their neighbours, or by push-sum through windows. In push-sum
no worker waits for another, and P is the share of the whole that a worker has.

fastps-run -np 4 -s 0 python examples/bluefog_consensus.py --enable-dynamic-topology
"""

import argparse

import torch

import fastps.bluefog.torch as bf  # was: import bluefog.torch as bf
from fastps.bluefog.common import topology_util  # was: from bluefog.common import topology_util

parser = argparse.ArgumentParser(description="Average consensus")
parser.add_argument("--data-size", type=int, default=100_000)
parser.add_argument("--max-iters", type=int, default=200)
parser.add_argument(
    "--virtual-topology", default="expo2",
    choices=["expo2", "expo3", "expo4", "ring", "mesh", "star", "full", "InnerOuterExpo2"],
)  # fmt: skip
parser.add_argument("--asynchronous-mode", action="store_true")
parser.add_argument("--enable-dynamic-topology", action="store_true")
parser.add_argument("--seed", type=int, default=2020)
parser.add_argument("--tolerance", type=float, default=1e-6)


def choose_topology(name):
    n = bf.size()
    graphs = {
        "expo2": lambda: (topology_util.ExponentialTwoGraph(n), False),
        "expo3": lambda: (topology_util.ExponentialGraph(n, base=3), False),
        "expo4": lambda: (topology_util.ExponentialGraph(n, base=4), False),
        "ring": lambda: (topology_util.RingGraph(n, connect_style=1), False),
        "mesh": lambda: (topology_util.MeshGrid2DGraph(n), True),
        "star": lambda: (topology_util.StarGraph(n), True),
        "full": lambda: (topology_util.FullyConnectedGraph(n), False),
        "InnerOuterExpo2": lambda: (
            topology_util.InnerOuterExp2Graph(n, local_size=bf.local_size()), False
        ),
    }  # fmt: skip
    topology, is_weighted = graphs[name]()
    assert bf.set_topology(topology, is_weighted=is_weighted)


def error_of(x, mean):
    return float(torch.norm(x - mean, p=2) / torch.norm(mean, p=2))


def mix(x):
    """Average with all neighbors, or with one at a time."""
    weights = {}
    if args.enable_dynamic_topology:
        rounds = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    for _ in range(args.max_iters):
        if args.enable_dynamic_topology:
            to_ranks, from_ranks = next(rounds)
            share = 1 / (len(from_ranks) + 1)
            weights = {
                "self_weight": share, "src_weights": dict.fromkeys(from_ranks, share),
                "dst_weights": to_ranks,
            }  # fmt: skip
        x = bf.neighbor_allreduce(x, name="x", enable_topo_check=False, **weights)
    return x


def push_sum(x):
    """Give shares of x and of P away, to all out-neighbors or one at a time; divide by P."""
    neighbors = bf.out_neighbor_ranks()
    bf.turn_on_win_ops_with_associated_p()
    assert bf.win_create(x, name="x", zero_init=True)
    for turn in range(args.max_iters):
        if turn % 10 == 0:
            bf.barrier()  # no worker ends before the others have begun
        to_ranks = neighbors
        if args.enable_dynamic_topology:
            to_ranks = [neighbors[turn % len(neighbors)]]
        share = 1 / (len(to_ranks) + 1)
        bf.neighbor_win_accumulate(
            x, name="x", self_weight=share, dst_weights=dict.fromkeys(to_ranks, share),
            require_mutex=True,
        )  # fmt: skip
        bf.win_update_then_collect(name="x")
    bf.barrier()
    bf.win_update_then_collect(name="x")  # the updates of others since then
    p = bf.win_associated_p(name="x")
    mean_p = bf.allreduce(torch.tensor([p], dtype=torch.double), average=True).item()
    if bf.rank() == 0:
        print(f"mean of P: {mean_p:.12f}", flush=True)
    assert abs(mean_p - 1) < 1e-9, "P is created or lost"
    bf.turn_off_win_ops_with_associated_p()
    found = x / p
    bf.win_free(name="x")
    return found


args = parser.parse_args()
bf.init()
choose_topology(args.virtual_topology)
torch.manual_seed(args.seed * (bf.rank() + 1))
x = torch.randn(args.data_size, dtype=torch.double)
mean = bf.allreduce(x, average=True)
first = error_of(x, mean)
x = push_sum(x) if args.asynchronous_mode else mix(x)
last = error_of(x, mean)
print(f"rank {bf.rank()}: consensus error {first:.3g} at first, {last:.3g} at last", flush=True)
assert last < args.tolerance, f"{last} is not below {args.tolerance}"
bf.barrier()
bf.shutdown()
