# SPDX-License-Identifier: Apache-2.0
"""Measure what rare exchanges cost on slow links: speed with LocalSGD beside that without any.

    python tools/bench/slow_links.py --hosts 4 --rate 10mbit --sync-every 30

Needs root: tools/netlab.py makes hosts with links of that rate, one worker on each, with a server
in it. A model of 25 million parameters is trained with AdamW, by LocalSGD with Nesterov outside,
in fragments that arrive while the next steps are done, as int4 of 11 levels with error feedback;
and without any exchange. Both take turns for --sync-every steps each, in the same processes, and
each turn begins where no fragment is under way, so all that leaves in a turn arrives in it; the
first turn of both is not counted. Printed: median seconds of a step of both, the share of the
speed that is kept, and the bytes that left a host in a turn over what its link can carry in it;
then how long a fragment's bytes need on a link, which should be less than the steps of --delay
take. Then the processor time of all workers and servers, alone over that of both: where workers
have fewer processors than they need, that share can be kept, and the load of other programs is
not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastps
import fastps.torch as fps
from fastps.config.closed_pipe import ends_quietly
from tools.bench._hosts import on_each_host

WIDTH, LAYERS = 2048, 6  # 25.2 million parameters
SECONDS, CPU, SENT = range(3)  # of what measure() gives


def train(model: torch.nn.Sequential, step: Callable[[], object], batch: int, steps: int) -> float:
    """Give the seconds that so many steps take."""
    x = torch.randn(batch, model[0].in_features)
    began = time.perf_counter()
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
        step()
    return time.perf_counter() - began


def phase_of(options: argparse.Namespace) -> int:
    """Count the steps to where no fragment is under way; ValueError where one always is."""
    apart = options.sync_every // options.fragments
    if not options.delay < apart:
        raise ValueError(f"--delay {options.delay} is not below the {apart} steps of a fragment")
    return apart - 1


def bytes_sent() -> float:
    """Give the bytes that left this host by its link, a server's in the same process too."""
    lines = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return float(sum(int(rest.split()[8]) for name, rest in lines if name.strip() != "lo"))


def measure(
    model: torch.nn.Sequential, step: Callable[[], object], options: argparse.Namespace
) -> list[float]:
    """Take a turn with all workers; give its seconds here, and their CPU seconds and bytes."""
    fps.barrier()
    before = [time.process_time(), bytes_sent()]
    seconds = train(model, step, options.batch, options.sync_every)
    fps.barrier()  # what a server still does for others is in its processor time
    after = [time.process_time(), bytes_sent()]
    used = torch.tensor([b - a for a, b in zip(before, after, strict=True)], dtype=torch.float64)
    return [seconds, *fps.push_pull(used, name="used", average=False).tolist()]


def work(options: argparse.Namespace) -> None:
    """Take turns on all workers."""
    torch.set_num_threads(1)
    fps.init(min_compress_bytes=0)
    layers = [torch.nn.Linear(options.width, options.width) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.Tanh())))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    local = fps.LocalSGD(
        model, inner,
        torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
        sync_every=options.sync_every, fragments=options.fragments, delay=options.delay,
        compression=fastps.Compression.int4(11, ef="vanilla"),
    )  # fmt: skip
    for _ in range(phase_of(options)):
        train(model, local.step, options.batch, 1)
    rate = float(os.environ["BENCH_BYTES_PER_S"])
    turns = []
    for turn in range(options.rounds + 1):
        alone = measure(model, inner.step, options)
        ours = measure(model, local.step, options)
        turns += [(ours, alone)] * bool(turn)
    if fps.rank() == 0:
        steps, used = ([[one[i] for one in turn] for turn in turns] for i in (SECONDS, CPU))
        both = [statistics.median(c) / options.sync_every for c in zip(*steps, strict=True)]
        kept, possible = (
            statistics.median(alone / ours for ours, alone in pairs) for pairs in (steps, used)
        )
        sent = turns[-1][0][SENT] / (rate * options.hosts * turns[-1][0][SECONDS])
        least = turns[-1][0][SENT] / (rate * options.hosts * options.fragments)
        print(f"step {both[0]:.3f} s, alone {both[1]:.3f} s: {100 * kept:.1f} % of the speed, "
              f"{100 * sent:.0f} % of the link; a fragment's bytes need {least:.1f} s, "
              f"{options.delay} steps take {options.delay * both[1]:.1f} s; "
              f"by processor time {100 * possible:.1f} %",
              flush=True)  # fmt: skip
    fps.shutdown()


@ends_quietly
def main() -> int:
    """Make the hosts and start a worker on each; or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync-every", type=int, default=30, help="H (%(default)s)")
    parser.add_argument("--fragments", type=int, default=3, help="parts (%(default)s)")
    parser.add_argument("--delay", type=int, default=8, help="steps (%(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a layer (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns (%(default)s)")
    return on_each_host(parser, work, rate="10mbit")


if __name__ == "__main__":
    sys.exit(main())
