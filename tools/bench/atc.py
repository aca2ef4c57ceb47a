# SPDX-License-Identifier: Apache-2.0
"""Measure how much of its communication adapt-then-combine hides on slow links.

    python tools/bench/atc.py --hosts 4 --rate 200mbit

Needs root: tools/netlab.py makes hosts with links of that rate, one worker on each, no servers. A
model of 25 million parameters is a chain of layers, each of which sleeps going forward and twice
as long going back, as one that waits for a device, so that backward takes as long as its bytes
need on a link. Three optimizers take turns in the same processes: adapt-then-combine with one peer
of an exponential graph in each step, all-reduced gradients, and adapt-then-combine that mixes
nothing.

M is the model, B the payload a link carries one way. The last has the step `alone`. Communication
can begin with the first bucket that backward has ready, so no step with one peer is shorter than
`bound`, the larger of alone and (forward + first bucket + M/B). hidden is the share of what the
bound allows to hide: (alone + M/B - step) / (alone + M/B - bound).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps.torch as fps
from fastps import topology
from fastps.config.closed_pipe import ends_quietly
from fastps.frameworks.torch.decentralized.optimizer import bucketed
from tools.bench._hosts import on_each_host
from tools.bench._waiting import Layer

WIDTH, LAYERS = 1024, 24  # 25.2 million parameters


def make_model(layer_s: float) -> torch.nn.Sequential:
    """Make the chain of layers, the same on all workers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(WIDTH, WIDTH, layer_s) for _ in range(LAYERS)))


def make_systems(layer_s: float) -> dict[str, tuple[torch.nn.Module, Any]]:
    """Make a model for each optimizer."""
    systems: dict[str, tuple[torch.nn.Module, Any]] = {}
    for way in ("one peer", "all-reduce", "alone"):
        model = make_model(layer_s)
        inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        optimizer: Any
        if way == "all-reduce":
            optimizer = fps.DistributedOptimizer(inner, model.named_parameters(), prefix=way)
        else:
            kind = "empty" if way == "alone" else "neighbor_allreduce"
            optimizer = fps.DistributedAdaptThenCombineOptimizer(
                inner, model, getattr(fps.CommunicationType, kind), prefix=way
            )
        systems[way] = model, optimizer
    return systems


def turn(system: tuple[torch.nn.Module, Any], steps: int, peers: Any) -> float:
    """Give the seconds of one step of several."""
    model, optimizer = system
    x = torch.ones(4, WIDTH)
    fps.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        if peers is not None:
            sends, receives = next(peers)
            optimizer.self_weight = share = 1 / (len(receives) + 1)
            optimizer.src_weights = dict.fromkeys(receives, share)
            optimizer.dst_weights = sends
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fps.barrier()
    return (time.perf_counter() - began) / steps


def work(options: argparse.Namespace) -> None:
    """Take turns on all workers; rank 0 prints what came out."""
    torch.set_num_threads(1)
    fps.init()
    rate = float(os.environ["BENCH_BYTES_PER_S"])
    nbytes = 4 * sum(one.numel() for one in make_model(0).parameters())
    layer_s = nbytes / rate / (2 * LAYERS)
    systems = make_systems(layer_s)
    first = next(iter(bucketed(list(systems["one peer"][0].parameters()))))
    ready_s = layer_s * LAYERS + 2 * layer_s * -(-4 * sum(p.numel() for p in first) // (
        4 * WIDTH * WIDTH))  # fmt: skip
    graph = topology.exponential_graph(fps.size())
    peers = topology.one_peer(graph, fps.rank())
    fps.set_topology(graph)
    rounds: list[dict[str, float]] = []
    for count in range(options.rounds + 1):
        found = {
            way: turn(system, options.steps, peers if way == "one peer" else None)
            for way, system in systems.items()
        }
        rounds += [found] * bool(count)
    if fps.rank() == 0:
        report(rounds, nbytes / rate, ready_s)
    fps.shutdown()


def report(rounds: list[dict[str, float]], transfer_s: float, ready_s: float) -> None:
    """Print medians over the rounds."""
    middle = {way: statistics.median(one[way] for one in rounds) for way in rounds[0]}

    def bound(alone: float) -> float:
        return max(alone, ready_s + transfer_s)

    hidden = []
    for one in rounds:
        both = one["alone"] + transfer_s
        hidden.append((both - one["one peer"]) / (both - bound(one["alone"])))
    sys.stdout.write(
        f"M/B {transfer_s:.2f} s, alone {middle['alone']:.2f} s, "
        f"bound {bound(middle['alone']):.2f} s; step with one peer {middle['one peer']:.2f} s, "
        f"all-reduced {middle['all-reduce']:.2f} s; "
        f"hidden {statistics.median(hidden):.3f} of what the bound allows "
        f"({min(hidden):.3f} to {max(hidden):.3f})\n"
    )


@ends_quietly
def main() -> int:
    """Make the hosts and start a worker on each; or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (%(default)s)")
    return on_each_host(parser, work, rate="200mbit")


if __name__ == "__main__":
    sys.exit(main())
