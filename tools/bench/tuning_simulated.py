# SPDX-License-Identifier: Apache-2.0
"""Let the autotuner's search tune simulated steps, next to the best of the whole grid.

    python tools/bench/tuning_simulated.py [--model resnet50] [--rates 10gbit,40gbit,100gbit]

Two machines with a worker each and two servers apart, or --hosts and --servers. Credit of a link
and size of partitions are searched from 512 KiB and 4096000 bytes on, what a link has that does
not follow; every frame is simulated (docs/simulator.md).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))  # the queue's face is there

from fastps.config.closed_pipe import ends_quietly
from fastps.session.autotune import CREDITS, PARTITIONS
from fastps.session.autotune_search import Knob, Search, Setting
from fastps.transport.tcp import REMOTE_CREDIT_BYTES
from tools.netlab import parse_rate
from tools.simulator import cases, models
from tools.simulator.plan import PARTITION_BYTES, Cluster, Network


class Steps:
    """Simulated steps of a model, each setting once."""

    def __init__(self, options: argparse.Namespace, rate: str) -> None:
        self._options = options
        model = models.make(options.model)
        self._plan = models.schedule(
            model,
            compute_s=model.compute_ms / 1e3,
            element_bytes=model.element_bytes,
            overlap=options.overlap,
        )
        self._network = Network(parse_rate(rate), latency_s=options.latency_us * 1e-6)
        self._found: dict[Setting, float] = {}

    def seconds(self, setting: Setting) -> float:
        """Give the time of a step with a credit and a size of partitions."""
        if setting not in self._found:
            cluster = Cluster(
                self._options.hosts, self._options.servers,
                credit_bytes=setting[0], partition_bytes=setting[1],
            )  # fmt: skip
            row = cases.step_row(
                self._plan, cluster, self._network, mode="exact", overlap=self._options.overlap
            )
            self._found[setting] = row["step_ms"] / 1e3
        return self._found[setting]


def tune(steps: Steps) -> Search:
    """Search until it is over."""
    search = Search(
        (
            Knob("credit_bytes", CREDITS, REMOTE_CREDIT_BYTES),
            Knob("partition_bytes", PARTITIONS, PARTITION_BYTES),
        )
    )
    while not search.is_over:
        search.measured(steps.seconds(search.setting))
    return search


@ends_quietly
def main() -> int:
    """Read the command line and simulate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=sorted(models.MODELS), default="resnet50")
    parser.add_argument("--rates", default="10gbit,40gbit,100gbit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--overlap", choices=models.OVERLAPS, default="none")
    parser.add_argument("--latency-us", type=float, default=100.0)
    options = parser.parse_args()
    for rate in options.rates.split(","):
        began, steps = time.perf_counter(), Steps(options, rate)
        search = tune(steps)
        tuned, start = steps.seconds(search.setting), steps.seconds(search.start)
        best = min(map(steps.seconds, itertools.product(CREDITS, PARTITIONS)))
        print(
            f"{rate}: {search.trials} trials, {search.setting}, tuned / best of grid "
            f"{tuned / best:.3f}, tuned / start {tuned / start:.3f} "
            f"({1e3 * tuned:.1f} ms; {time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
