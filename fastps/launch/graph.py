# SPDX-License-Identifier: Apache-2.0
"""The command `fastps graph`: properties of a graph of workers, in numbers and as a picture.

Threads: none.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastps import topology
from fastps.errors import ConfigError
from fastps.topology import Topology, Turn

BY_MACHINES = {
    "inner-outer-ring": topology.inner_outer_ring_graph,
    "inner-outer-exp2": topology.inner_outer_exp2_graph,
}
TOLERANCE = 1e-6
MANY_EDGES = 64  # a picture with more edges shows no weights, which would be unreadable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("graph", choices=[*topology.GRAPHS, *BY_MACHINES])
    parser.add_argument("-n", "--size", type=int, required=True, help="number of workers")
    parser.add_argument("--local-size", type=int, default=1, help="workers of each machine")
    parser.add_argument("--png", type=Path, help="also draw the graph into this file")


def run(parsed: argparse.Namespace) -> None:
    """Print the properties of a graph, and draw it. Raises ConfigError."""
    try:
        graph = make(parsed.graph, parsed.size, parsed.local_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = list(findings(graph))
    for what, how in rows:
        sys.stdout.write(f"{what + ':':24}{how}\n")
    if parsed.png is not None:
        words = "\n".join(f"{what}: {how}" for what, how in rows)
        draw(graph, f"{parsed.graph}\n{words}", parsed.png)


def make(name: str, size: int, local_size: int) -> Topology:
    """Return a graph by its name on the command line."""
    if name in BY_MACHINES:
        return BY_MACHINES[name](size, local_size)
    return topology.GRAPHS[name](size)


def findings(graph: Topology) -> Iterator[tuple[str, str]]:
    """Yield the properties of a graph as (name, value)."""
    yield "workers", str(graph.size)
    yield "out-neighbors of each", _range([len(graph.out_neighbors(r)) for r in _ranks(graph)])
    weights = [graph.receive_weights(rank)[1].values() for rank in _ranks(graph)]
    yield "weights", _range([round(one, 6) for one in itertools.chain(*weights)] or [0])
    yield "own weight", _range([round(graph.receive_weights(r)[0], 6) for r in _ranks(graph)])
    yield "spectral gap", f"{topology.spectral_gap(graph):.6g}"
    ways = (("all neighbors", itertools.repeat(graph)), ("one peer", one_peer_rounds(graph)))
    for name, rounds in ways:
        count = topology.rounds_to_consensus(rounds, TOLERANCE)
        how = "never the average" if count is None else f"{count} to {TOLERANCE:g} of the average"
        yield f"rounds, {name}", how


def one_peer_rounds(graph: Topology) -> Iterator[Topology]:
    """Yield the graphs of rounds in which each worker sends to one neighbour."""
    workers = [topology.one_peer(graph, rank) for rank in _ranks(graph)]
    first: dict[tuple[str, ...], Topology] = {}  # they repeat
    while True:
        turns: list[Turn] = [next(one) for one in workers]
        key = tuple(map(str, turns))
        if key not in first:
            first[key] = topology.round_of(turns)
        yield first[key]


def draw(graph: Topology, title: str, path: Path) -> None:
    """Write a picture, workers on a circle; the suffix says which kind. Raises ConfigError."""
    try:
        make_figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'fastps[graph]'") from error
    figure = make_figure(figsize=(7.0, 8.0), layout="constrained")
    axes = figure.subplots()
    places = [_place(rank, graph.size) for rank in _ranks(graph)]
    for source, target in itertools.permutations(_ranks(graph), 2):
        if graph.weights[source, target]:
            _arrow(axes, graph, source, target, places)
    box = {"boxstyle": "circle", "facecolor": "#56B4E9"}
    for rank, place in enumerate(places):
        axes.text(*place, str(rank), ha="center", va="center", fontsize=9, bbox=box)
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.set_axis_off()
    axes.set_title(title, fontsize=8, loc="left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write {path}: {error}; give --png a file name like graph.png in a folder "
            "that you can write"
        ) from error


def _arrow(
    axes: Any, graph: Topology, source: int, target: int, places: Sequence[tuple[float, float]]
) -> None:
    """Draw an edge, bent so that the opposite one stays visible, with its weight near its end."""
    (x, y), (u, v) = places[source], places[target]
    style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.1", "shrinkA": 12, "shrinkB": 12}
    axes.annotate("", xy=(u, v), xytext=(x, y), arrowprops={**style, "color": "#999999"})
    if (graph.weights != 0).sum() - graph.size <= MANY_EDGES:
        words = f"{graph.weights[source, target]:.3g}"
        axes.text(0.3 * x + 0.7 * u, 0.3 * y + 0.7 * v, words, fontsize=6, color="#D55E00")


def _place(rank: int, size: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / size
    return math.sin(angle), math.cos(angle)


def _ranks(graph: Topology) -> range:
    return range(graph.size)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
