# SPDX-License-Identifier: Apache-2.0
"""Choose how a case is simulated, and compare simulations with measurements.

A case is a cluster, a network and what it sums; `rows` of results are plain dictionaries, which
the command prints as a table or as JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench.push_pull import parse_size
from tools.netlab import MIN_QUEUE_BYTES, parse_rate
from tools.simulator import exact, ring, symmetric
from tools.simulator.models import Schedule, step_s
from tools.simulator.plan import (
    Cluster,
    Network,
    Outcome,
    Tensor,
    optimum_s,
    ring_bound_s,
)

MODES = ("auto", "exact", "symmetric")
MAX_EXACT_FRAMES = 250_000  # some seconds
TOLERANCE = 0.1  # of a simulated time against the measured one
LATENCY_S = 60e-6  # of a small frame through two hosts of the lab and its bridge


def count_frames(tensors: Sequence[Tensor], cluster: Cluster) -> int:
    """Count the frames of an exact simulation, to servers and back."""
    frames = sum(-(-tensor.nbytes // cluster.chunk) for tensor in tensors)
    return 2 * frames * cluster.machines


def simulate(
    tensors: Sequence[Tensor], cluster: Cluster, network: Network, mode: str
) -> tuple[Outcome, str]:
    """Simulate sums over servers; give the mode too, which auto takes by the work it would be."""
    if mode == "auto":
        is_small = count_frames(tensors, cluster) <= MAX_EXACT_FRAMES
        mode = "exact" if is_small else "symmetric"
    simulator = exact if mode == "exact" else symmetric
    return simulator.simulate(tensors, cluster, network), mode


def step_row(
    plan: Schedule, cluster: Cluster, network: Network, *, overlap: str, mode: str
) -> dict[str, Any]:
    """Simulate a training step over servers."""
    outcome, mode = simulate(plan.tensors, cluster, network, mode)
    nbytes = sum(tensor.nbytes for tensor in plan.tensors)
    bound_s = optimum_s(nbytes, cluster, network)
    row = _row(plan, outcome, overlap, bound_s)
    kind = "servers beside and apart" if cluster.is_colocated else "servers apart"
    machine = {"system": kind, "machines": cluster.machines, "servers": cluster.servers}
    return {**machine, **row, "mode": mode, "loans": outcome.loans}


def ring_row(
    plan: Schedule, cluster: Cluster, network: Network, *, overlap: str, bucket_bytes: int
) -> dict[str, Any]:
    """Simulate a training step over rings."""
    outcome = ring.simulate(plan.tensors, cluster, network, bucket_bytes=bucket_bytes)
    nbytes = sum(tensor.nbytes for tensor in plan.tensors)
    row = _row(plan, outcome, overlap, ring_bound_s(nbytes, cluster.machines, network))
    return {"system": "ring all-reduce", "machines": cluster.machines, "servers": "", **row}


def peer_row(
    plan: Schedule, cluster: Cluster, network: Network, *, overlap: str
) -> dict[str, Any]:
    """Simulate a training step in which each machine averages its model with one other's."""
    outcome = ring.simulate(
        plan.tensors, cluster, network, bucket_bytes=ring.PEER_BUCKET_BYTES, has_ring=False
    )
    nbytes = sum(tensor.nbytes for tensor in plan.tensors)
    row = _row(plan, outcome, overlap, nbytes / network.bytes_per_s)
    return {"system": "one peer", "machines": cluster.machines, "servers": "", **row}


def _row(plan: Schedule, outcome: Outcome, overlap: str, bound_s: float) -> dict[str, Any]:
    took_s = step_s(plan, outcome.done_s, overlap)
    return {
        "bound_ms": bound_s * 1e3,
        "sums_end_ms": outcome.end_s * 1e3,
        "step_ms": took_s * 1e3,
        "efficiency": plan.compute_s / took_s,
    }


def tensor_row(nbytes: int, cluster: Cluster, network: Network, *, mode: str) -> dict[str, Any]:
    """Simulate the sum of one tensor."""
    outcome, mode = simulate([Tensor(nbytes)], cluster, network, mode)
    bound_s = optimum_s(nbytes, cluster, network)
    ring_s = ring_bound_s(nbytes, cluster.machines, network)
    return {
        "bytes": nbytes,
        "workers": cluster.machines,
        "servers": cluster.servers,
        "beside": "yes" if cluster.is_colocated else "no",
        "ms": outcome.end_s * 1e3,
        "bound_ms": bound_s * 1e3,
        "bound": outcome.end_s / bound_s if bound_s else 0.0,
        "ring": outcome.end_s / ring_s if ring_s else 0.0,
        "worker": outcome.sent_bytes["worker"] / max(nbytes, 1),
        "server": outcome.sent_bytes["server"] / max(nbytes, 1),
        "mode": mode,
    }


# ---- against measurements


def lab_network(rate: str, queue_ms: float) -> Network:
    """Describe the links of a lab of tools/netlab.py."""
    bps = parse_rate(rate)
    queue_s = max(queue_ms / 1e3, MIN_QUEUE_BYTES * 8 / bps)
    return Network(bps, latency_s=LATENCY_S, queue_s=queue_s)


def measured_cluster(line: dict[str, Any]) -> Cluster:
    """Describe the cluster of one line of tools/bench/shaped.py."""
    settings = dict(pair.split("=", 1) for pair in line.get("settings", "").split(",") if pair)
    cluster = Cluster(
        line["workers"], line["servers"], is_colocated=bool(line.get("colocated", False))
    )
    known = {
        "FASTPS_CHUNK_BYTES": "chunk_bytes",
        "FASTPS_CREDIT_BYTES": "credit_bytes",
        "FASTPS_PARTITION_BYTES": "partition_bytes",
    }
    numbers: dict[str, int] = {
        field: int(settings[name])
        for name, field in known.items()
        if int(settings.get(name, 0))  # 0 is the default
    }
    return replace(cluster, **numbers)  # type: ignore[arg-type]


def check_rows(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Simulate each case that fastps measured; several lines of one case give their median."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("bench") == "shaped" and line.get("name") != "gloo":
            names = ("name", "workers", "servers", "colocated", "rate", "queue_ms", "size")
            cases.setdefault(tuple(line.get(name) for name in names), []).append(line)
    for found in cases.values():
        line = found[0]
        measured_ms = statistics.median(one["median"] for one in found)
        cluster, network = measured_cluster(line), lab_network(line["rate"], line["queue_ms"])
        outcome, _ = simulate([Tensor(parse_size(line["size"]))], cluster, network, "exact")
        ratio = outcome.end_s * 1e3 / measured_ms
        yield {
            "case": line["name"],
            "workers": cluster.machines,
            "servers": cluster.servers,
            "beside": "yes" if cluster.is_colocated else "no",
            "rate": line["rate"],
            "size": line["size"],
            "measured_ms": measured_ms,
            "simulated_ms": outcome.end_s * 1e3,
            "ratio": ratio,
            "is_near": abs(ratio - 1) <= TOLERANCE,
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; ValueError names the line that is none."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON line: {error}") from error
    return lines
