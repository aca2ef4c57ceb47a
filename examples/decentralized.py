# SPDX-License-Identifier: Apache-2.0
"""Train a classifier of handwritten digits by averaging models with neighbours, and compare.

    fastps-run -np 8 -s 0 python examples/decentralized.py --seeds 5 --plot digits.png

Each worker has its own part of the data: dealt out evenly or, with --skew, sorted by label, so
that it knows one or two digits. At the end the models are averaged, and rank 0 prints the held-out
accuracy: the mean over seeds, and the worst. The exit code is 1 if a graph is more than a point
below all-reduce; this threshold was written before the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fastps.torch as fps
from fastps import topology

TEST_SHARE = 0.2
ALL = "all-reduce"
POINTS = 1.0  # how far below all-reduce the mean of a graph may be

Turns = Iterator[topology.Turn]
Part = tuple[torch.Tensor, torch.Tensor]


def load(seed: int, rank: int, size: int, *, is_skewed: bool) -> tuple[Part, Part]:
    """Give this worker's images and labels, and those for the test."""
    raw = load_digits()
    order = np.random.default_rng(seed).permutation(len(raw.target))
    held_out, rest = np.split(order, [int(TEST_SHARE * len(order))])
    if is_skewed:
        rest = rest[np.argsort(raw.target[rest], kind="stable")]
        own = np.array_split(rest, size)[rank]
    else:
        own = rest[rank::size]
    images = torch.tensor(raw.images / 16.0, dtype=torch.float32).flatten(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    return (images[own], labels[own]), (images[held_out], labels[held_out])


def make_model(seed: int) -> nn.Module:
    """Make an untrained network, the same on all workers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def one_peer(optimizer: Any, turns: Turns) -> None:
    """Mix with the next peer only."""
    sends, receives = next(turns)
    share = 1 / (len(receives) + 1)
    optimizer.self_weight, optimizer.dst_weights = share, sends
    optimizer.src_weights = dict.fromkeys(receives, share)


def ways(size: int) -> dict[str, tuple[topology.Topology, Callable[[Any, Turns], None] | None]]:
    """Give the graphs, and what is done before each step."""
    exponential = topology.exponential_graph(size)
    return {
        ALL: (exponential, None),
        "exponential, one peer": (exponential, one_peer),
        "exponential": (exponential, None),
        "ring": (topology.ring_graph(size), None),
    }


def train(name: str, seed: int, options: argparse.Namespace) -> float:
    """Train all workers in one of the ways, and give the accuracy of their average in per cent."""
    rank, size = fps.rank(), fps.size()
    (images, labels), (test_images, test_labels) = load(seed, rank, size, is_skewed=options.skew)
    graph, prepare = ways(size)[name]
    fps.set_topology(graph)
    model = make_model(seed)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.rate)
    if name == ALL:
        optimizer = fps.DistributedOptimizer(
            optimizer, model.named_parameters(), prefix=f"{name} {seed}."
        )
    else:
        optimizer = fps.DistributedAdaptThenCombineOptimizer(
            optimizer, model, prefix=f"{name} {seed}."
        )
    turns = topology.one_peer(graph, rank)
    steps = options.epochs * (len(load_digits().target) // (size * options.batch))
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        for group in optimizer.param_groups:  # a falling rate removes the bias
            group["lr"] = options.rate * (1 - step / steps)
        if prepare is not None:
            prepare(optimizer, turns)
        some = torch.randint(len(labels), (options.batch,), generator=chance)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
    fps.average_parameters(model.state_dict())
    with torch.no_grad():
        return float((model(test_images).argmax(1) == test_labels).double().mean() * 100)


def draw(found: dict[str, list[float]], path: Path, title: str) -> None:
    """Draw the accuracy of every seed, a row for each way."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only where it is wanted)

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for row, values in enumerate(found.values()):
        axes.plot(values, [row] * len(values), "o", color="#0072B2", alpha=0.6)
        axes.plot(np.mean(values), row, "|", color="#D55E00", markersize=18)
    axes.set_yticks(range(len(found)), list(found))
    axes.set(xlabel="per cent of held-out digits, one dot for each seed, bar: mean", title=title)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Run all ways with all seeds; give the exit code."""
    parser = argparse.ArgumentParser(description="Compare graphs with all-reduce on digits.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--skew", action="store_true", help="sort the data by label")
    parser.add_argument("--plot", type=Path, help="draw the accuracies into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fps.init()
    size, rank = fps.size(), fps.rank()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = {name: [train(name, seed, options) for seed in seeds] for name in ways(size)}
    fps.barrier()
    fps.shutdown()
    floor = np.mean(found[ALL]) - POINTS
    if rank == 0:
        kind = "sorted by label" if options.skew else "dealt out evenly"
        sys.stdout.write(f"{size} workers, seeds {seeds[0]} to {seeds[-1]}, data {kind}\n")
        for name, values in found.items():
            sys.stdout.write(f"{name:24}{np.mean(values):6.2f}  worst {min(values):6.2f}\n")
        if options.plot:
            draw(found, options.plot, f"{size} workers, data {kind}")
    return int(any(np.mean(values) < floor for values in found.values()))


if __name__ == "__main__":
    sys.exit(main())
