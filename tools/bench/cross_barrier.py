# SPDX-License-Identifier: Apache-2.0
"""Measure what CrossBarrier saves of a step on slow links, next to DistributedOptimizer.

    python tools/bench/cross_barrier.py [--rate 100mbit] [--rounds 5] [--steps 12] [--large 8]

Needs root: tools/netlab.py makes four hosts, two workers and two servers. The model is a chain of
small layers and a last one of --large MB. Each small layer sleeps --layer-ms going forward and
twice that going back, as one that waits for a device: the processor has little to do, so the
figures hold on a busy machine, too. The optimizers take turns; the last line says the median of
the ratios of one round, for the large model and one whose layers are all small.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly

ROOT = Path(__file__).parents[2]
HOSTS, PORT, LIMIT_S = 4, 7600, 580
LAYERS, WIDTH = 6, 128


def make_model(large_mb: float, layer_s: float) -> Any:
    """Make the chain of layers."""
    import torch  # noqa: PLC0415  # the driver needs none

    from tools.bench._waiting import Layer  # noqa: PLC0415

    last = max(int(large_mb * 1e6 / 4 / WIDTH), 10)
    layers = [Layer(WIDTH, WIDTH, layer_s) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, last, bias=False))


def turn(model: Any, optimizer: Any, steps: int) -> float:
    """Give the seconds of one step of several, with the last one's end."""
    import torch  # noqa: PLC0415

    inputs = torch.ones(4, WIDTH)
    began = time.perf_counter()
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()  # whoever did not wait does so now
    return (time.perf_counter() - began) / steps


def work(options: argparse.Namespace) -> None:
    """Do what one worker does; rank 0 prints a line for each round."""
    import torch  # noqa: PLC0415

    import fastps.torch as fps  # noqa: PLC0415

    torch.set_num_threads(1)
    fps.init()
    for kind, large in (("large", options.large), ("small", 0.05)):
        systems = {}
        for way in ("plain", "crossed"):
            torch.manual_seed(0)
            model = make_model(large, options.layer_ms / 1e3)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            if way == "plain":
                optimizer = fps.DistributedOptimizer(
                    optimizer, model.named_parameters(), prefix=f"{kind}.{way}."
                )
            else:
                optimizer = fps.CrossBarrier(model, optimizer, prefix=f"{kind}.{way}.")
            systems[way] = model, optimizer
            turn(model, optimizer, 2)
        for _ in range(options.rounds):
            found = {}
            for way, (model, optimizer) in systems.items():
                fps.barrier()
                found[way] = turn(model, optimizer, options.steps)
            if fps.rank() == 0:
                sys.stdout.write(json.dumps({"kind": kind, **found}) + "\n")
                sys.stdout.flush()
        plain, crossed = (systems[way][0].state_dict() for way in ("plain", "crossed"))
        assert all(torch.equal(plain[name], crossed[name]) for name in plain), "not the same bits"
    fps.shutdown()


def drive(options: argparse.Namespace) -> int:
    """Run the job on make-believe hosts and print what came out."""
    from tools.netlab import NetLab, missing  # noqa: PLC0415

    if lack := missing():
        sys.stderr.write(f"no make-believe hosts here: {lack}\n")
        return 2
    with NetLab(hosts=HOSTS, rate=options.rate, cc="cubic") as lab:
        settings = {
            "FASTPS_TOKEN": secrets.token_hex(32), "FASTPS_SIZE": "2", "FASTPS_NUM_SERVERS": "2",
            "FASTPS_SCHEDULER_HOST": lab.address(0), "FASTPS_SCHEDULER_PORT": str(PORT),
            "FASTPS_LINGER_S": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        environment = {**os.environ, **settings}
        server = [sys.executable, "-m", "fastps.server.main"]
        worker = [sys.executable, __file__, "--work", *sys.argv[1:]]
        scheduler = [*server, "--role", "scheduler"]
        others = [
            lab.popen(host, argv, env={**environment, "FASTPS_RANK": rank})
            for host, argv, rank in ((0, scheduler, ""), (2, server, ""), (3, server, ""),
                                     (1, worker, "1"))
        ]  # fmt: skip
        first_environment = {**environment, "FASTPS_RANK": "0"}
        first = lab.popen(0, worker, env=first_environment, stdout=subprocess.PIPE, text=True)
        out, _ = first.communicate(timeout=LIMIT_S)
        for process in others:
            process.wait(30)
    rounds = [json.loads(line) for line in out.splitlines()]
    for kind in ("large", "small"):
        some = [one for one in rounds if one["kind"] == kind]
        ratio = statistics.median(one["crossed"] / one["plain"] for one in some)
        plain, crossed = (statistics.median(one[w] for one in some) for w in ("plain", "crossed"))
        sys.stdout.write(
            f"{kind}: plain {1e3 * plain:.0f} ms, crossed {1e3 * crossed:.0f} ms, "
            f"ratio {ratio:.3f}\n"
        )
    return first.returncode


@ends_quietly
def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--large", type=float, default=8.0, help="MB of the last layer")
    parser.add_argument("--layer-ms", type=float, default=30.0)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    return drive(options)


if __name__ == "__main__":
    sys.exit(main())
