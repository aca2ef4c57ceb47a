# SPDX-License-Identifier: Apache-2.0
"""Measure what tuning finds, next to the defaults and to the best static setting of a grid.

    python tools/bench/tuning.py [--rate 200mbit] [--delay-ms 0] [--mb 8] [--rounds 5]
    python tools/bench/tuning.py --loopback

One job of two workers and two servers: a model is trained with FASTPS_AUTOTUNE until that is over;
then every setting of the grid is measured, and the defaults, what was tuned and the
best three of the grid take turns, --rounds of them. Each layer sleeps --layer-ms going back, as
one that waits for a device: the processor has little to do, so the figures hold on a busy
machine, too. The last lines say medians and the ratios of the medians, and of the fixed credit of
512 KiB to that which follows the links.

Needs root: tools/netlab.py makes the hosts, and tools/delay.py, in front of each server, delays
each way by --delay-ms. --loopback needs neither.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly

ROOT = Path(__file__).parents[2]
BEHIND = Path(__file__).with_name("_delayed_server.py")
HOSTS, PORT, DATA_PORT, LIMIT_S = 4, 7600, 7700, 1200
SMALL, WIDTH = 24, 96
Setting: TypeAlias = tuple[int, int, int]  # credit, partition, bucket
DEFAULTS: Setting = (0, 4096000, 1 << 20)
FIXED: Setting = (512 << 10, 4096000, 1 << 20)  # credit that does not follow
GRID: tuple[Setting, ...] = tuple(
    itertools.product((0, 512 << 10, 2 << 20, 8 << 20), (1 << 20, 4096000, 16 << 20),
                      (256 << 10, 1 << 20, 4 << 20))
)  # fmt: skip


# ---- one worker


def make_model(nbytes: float, layer_s: float) -> Any:
    """Make a chain: two large layers and many small ones between them."""
    import torch  # noqa: PLC0415  # the driver needs none

    class Wait(torch.autograd.Function):
        """Take as long as a layer on a device."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(layer_s)
            return gradient

    class Layer(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return torch.tanh(Wait.apply(super().forward(x)))

    large = max(int(nbytes / 2 / 4 / WIDTH), WIDTH)
    small = [Layer(WIDTH, WIDTH) for _ in range(SMALL)]
    return torch.nn.Sequential(
        Layer(WIDTH, large), torch.nn.Linear(large, WIDTH), *small, torch.nn.Linear(WIDTH, 10)
    )


class Trainer:
    """A model in training whose settings can be given, as tuning gives them."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch  # noqa: PLC0415

        import fastps.torch as fps  # noqa: PLC0415
        from fastps.session.current import current  # noqa: PLC0415

        self._fps, self._session = fps, current()
        torch.manual_seed(0)
        self._model = make_model(options.mb * 1e6, options.layer_ms / 1e3)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.001)
        self._optimizer: Any = fps.DistributedOptimizer(optimizer, self._model.named_parameters())
        self._inputs = torch.ones(4, WIDTH)
        self.counts: dict[str, float] = {}

    def step(self) -> float:
        """Train once; give the seconds."""
        began = time.perf_counter()
        self._model(self._inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began

    def tune(self) -> Setting:
        """Train until tuning is over."""
        while not self.counts.get("autotune_is_over"):
            self.step()
            self.counts = self._session.statistics()
        names = ("credit_bytes", "partition_bytes", "bucket_bytes")
        first, second, third = (int(self.counts[f"autotune_{name}"]) for name in names)
        return first, second, third

    def measure(self, setting: Setting, steps: int) -> float:
        """Give the median step with a setting, all workers together."""
        from fastps.session.autotune import Layout  # noqa: PLC0415

        self._session.connections.set_credit(setting[0])
        self._optimizer._exchange.lay_out(Layout(*setting[1:]))
        self._fps.barrier()
        self.step()
        return statistics.median(self.step() for _ in range(steps))


def work(options: argparse.Namespace) -> None:
    """Do what one worker does; rank 0 writes what it found."""
    import torch  # noqa: PLC0415

    import fastps  # noqa: PLC0415
    import fastps.torch as fps  # noqa: PLC0415

    torch.set_num_threads(1)
    fps.init()
    trainer = Trainer(options)
    began, tuned, trials = time.perf_counter(), DEFAULTS, 0.0
    if not options.credit_alone:
        tuned = trainer.tune()
        trials = trainer.counts["autotune_trials"]
    tuning_s = time.perf_counter() - began
    grid = {each: float("inf") for each in (DEFAULTS, *(() if options.credit_alone else GRID))}
    for _ in range(options.grid_turns):
        for each in grid:
            grid[each] = min(grid[each], trainer.measure(each, options.steps))
    best = sorted(grid, key=lambda each: grid[each])[:3]
    best = list(fastps.broadcast_object(best))  # all measure the same
    finalists = list(dict.fromkeys(map(tuple, (DEFAULTS, FIXED, tuned, *best))))
    found: dict[Any, list[float]] = {each: [] for each in finalists}
    for _ in range(options.rounds):
        for each in finalists:
            found[each].append(trainer.measure(each, options.steps))
    if fps.rank() == 0:
        result = {
            "tuned": tuned, "trials": trials, "tuning_s": tuning_s, "best": best,
            "seconds": [[each, seconds] for each, seconds in found.items()],
        }  # fmt: skip
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    fps.shutdown()


# ---- the driver


def start(lab: Any, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the job's processes; give rank 0's."""
    scheduler_host = "127.0.0.1" if lab is None else lab.address(0)
    settings = {
        "FASTPS_TOKEN": secrets.token_hex(32), "FASTPS_SIZE": "2", "FASTPS_NUM_SERVERS": "2",
        "FASTPS_SCHEDULER_HOST": scheduler_host, "FASTPS_SCHEDULER_PORT": str(PORT),
        "FASTPS_LINGER_S": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "FASTPS_AUTOTUNE": str(int(not options.credit_alone)),
        "FASTPS_AUTOTUNE_STEPS": str(options.steps),
        "FASTPS_SHARED_MEMORY": "0", "FASTPS_COLOCATE": "off",
    }  # fmt: skip
    server = [sys.executable, "-m", "fastps.server.main"]
    worker = [sys.executable, __file__, "--work", *sys.argv[1:]]

    def run(host: int, argv: Sequence[str], output: Any = None, **own: str) -> Any:
        environment = {**os.environ, **settings, **own}
        if lab is None:
            return subprocess.Popen(argv, env=environment, stdout=output, text=True)
        return lab.popen(host, argv, env=environment, stdout=output, text=True)

    run(0, [*server, "--role", "scheduler"])
    for host in (2, 3):
        own: dict[str, str] = {}
        if options.delay_ms:
            words = [lab.address(host), str(DATA_PORT), "127.0.0.1", str(options.delay_ms)]
            run(host, [sys.executable, str(ROOT / "tools" / "delay.py"), *words])
            server = [sys.executable, str(BEHIND), lab.address(host)]
            own = {"FASTPS_PORT": str(DATA_PORT), "FASTPS_HOST": "127.0.0.1"}
        run(host, server, **own)
    run(1, worker, FASTPS_RANK="1")
    first: subprocess.Popen[str] = run(0, worker, subprocess.PIPE, FASTPS_RANK="0")
    return first


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the table and the ratios."""
    seconds = {tuple(each): statistics.median(some) for each, some in result["seconds"]}
    tuned = tuple(result["tuned"])
    kind = "loopback" if options.loopback else f"{options.rate}, {options.delay_ms:g} ms each way"
    effort = f"{result['trials']:.0f} trials in {result['tuning_s']:.0f} s"
    print(f"{kind}, {options.mb:g} MB, load {os.getloadavg()[0]:.1f}; {effort}")
    grid = {setting: s for setting, s in seconds.items() if list(setting) in result["best"]}
    for setting, middle in seconds.items():
        words = [("defaults", DEFAULTS), ("fixed", FIXED), ("tuned", tuned)]
        names = [word for word, each in words if each == setting]
        names += ["grid"] if setting in grid else []
        print(f"  {1e3 * middle:8.1f} ms  {setting}  {' '.join(names)}")
    print(
        f"  tuned / best of grid {seconds[tuned] / min(grid.values()):.3f}, "
        f"tuned / defaults {seconds[tuned] / seconds[DEFAULTS]:.3f}, "
        f"follows / fixed {seconds[DEFAULTS] / seconds[FIXED]:.3f}"
    )


def drive(options: argparse.Namespace) -> int:
    """Run the job and print what came out."""
    from tools.netlab import NetLab, ended_by_signals, missing  # noqa: PLC0415

    if not options.loopback and (lack := missing()):
        sys.stderr.write(f"no make-believe hosts here: {lack}\n")
        return 2
    with ended_by_signals(), contextlib.ExitStack() as stack:
        lab = None
        if not options.loopback:
            lab = stack.enter_context(NetLab(hosts=HOSTS, rate=options.rate, cc="cubic"))
        first = start(lab, options)
        out, _ = first.communicate(timeout=LIMIT_S)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if first.returncode or not lines:
        sys.stderr.write(f"the job ended with {first.returncode}\n{out}\n")
        return 1
    report(json.loads(lines[-1]), options)
    return 0


@ends_quietly
def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--mb", type=float, default=8.0, help="of the model")
    parser.add_argument("--layer-ms", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=3, help="of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--credit-alone", action="store_true",
                        help="compare credit that follows with a fixed one")  # fmt: skip
    parser.add_argument("--grid-turns", type=int, default=1)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loopback and options.delay_ms:
        parser.error("--delay-ms needs make-believe hosts")
    if options.work:
        work(options)
        return 0
    return drive(options)


if __name__ == "__main__":
    sys.exit(main())
