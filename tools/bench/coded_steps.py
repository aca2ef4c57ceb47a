# SPDX-License-Identifier: Apache-2.0
"""Measure training steps on slow links with each compression, beside what they cannot fall below.

    python tools/bench/coded_steps.py --hosts 4 --rate 200mbit

Needs root: tools/netlab.py makes hosts with links of that rate, one worker on each with a server
in it. A model of 25 million parameters is a chain of layers, each of which sleeps going forward
and twice as long going back, as one that waits for a device; a step takes --compute seconds
without an exchange. Gradients are averaged without a barrier between steps (CrossBarrier), as they
are and by each compression with error feedback, all in turns in the same processes.

alone is the step without an exchange, wire what the bytes need on a link each way, 2 (n - 1) / n
of what one worker encodes; over is the step over the larger of the two, as measured in its own
round (least and most of the rounds in brackets). A first step has nothing to wait for and a last
one nothing to wait beside it: few steps in a turn make them longer.
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

import fastps
import fastps.torch as fps
from fastps.config.closed_pipe import ends_quietly
from tools.bench._hosts import on_each_host
from tools.bench._waiting import Layer

WIDTH, LAYERS = 1024, 24  # 25.2 million parameters
ALONE = "alone"
# What an element becomes on the wire, in bytes; heads and indices are in it.
BYTES = {"none": 4.0, "fp16": 2.0, "int8": 4 * 0.2539, "onebit": 4 * 0.0313, "topk": 4 * 0.02}


def compression_of(kind: str) -> Any:
    """Make a compression by its name, with error feedback."""
    if kind == "none":
        return fastps.Compression.none
    make = getattr(fastps.Compression, kind)
    return make(0.01, ef="vanilla") if kind == "topk" else make(ef="vanilla")


def make_system(kind: str, layer_s: float) -> tuple[torch.nn.Module, Any]:
    """Make a model and its optimizer, the same on all workers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer(WIDTH, WIDTH, layer_s) for _ in range(LAYERS)))
    inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if kind == ALONE:
        return model, inner
    compression = compression_of(kind)
    return model, fps.DistributedOptimizer(
        inner, model.named_parameters(), compression, prefix=f"{kind}.", cross_barrier=True
    )


def turn(system: tuple[torch.nn.Module, Any], steps: int) -> float:
    """Give the seconds of one step of several, with the last one's end."""
    model, optimizer = system
    x = torch.ones(4, WIDTH)
    fps.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()  # whoever did not wait does so now
    return (time.perf_counter() - began) / steps


def work(options: argparse.Namespace) -> None:
    """Take turns on all workers; rank 0 prints what came out."""
    torch.set_num_threads(1)
    fps.init()
    kinds = [ALONE, *options.kinds.split(",")]
    systems = {kind: make_system(kind, options.compute / (3 * LAYERS)) for kind in kinds}
    rounds = []
    for count in range(options.rounds + 1):
        found = {kind: turn(system, options.steps) for kind, system in systems.items()}
        rounds += [found] * bool(count)
    if fps.rank() == 0:
        rate = float(os.environ["BENCH_BYTES_PER_S"])
        elements = sum(one.numel() for one in systems[ALONE][0].parameters())
        for kind in kinds[1:]:
            wire_s = 2 * (1 - 1 / fps.size()) * elements * BYTES[kind] / rate
            report(kind, rounds, wire_s)
    fps.shutdown()


def report(kind: str, rounds: list[dict[str, float]], wire_s: float) -> None:
    """Print medians over the rounds."""
    over = [one[kind] / max(one[ALONE], wire_s) for one in rounds]
    step, alone = (statistics.median(one[what] for one in rounds) for what in (kind, ALONE))
    sys.stdout.write(
        f"{kind}: step {step:.2f} s, alone {alone:.2f} s, wire {wire_s:.2f} s, "
        f"over {statistics.median(over):.3f} ({min(over):.3f}, {max(over):.3f})\n"
    )
    sys.stdout.flush()


@ends_quietly
def main() -> int:
    """Make the hosts and start a worker on each; or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compute", type=float, default=1.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--kinds", default=",".join(BYTES), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a turn (%(default)s)")
    return on_each_host(parser, work, rate="200mbit")


if __name__ == "__main__":
    sys.exit(main())
