# SPDX-License-Identifier: Apache-2.0
"""Measure what averaging gradients adds to a training step, next to torch's DDP over gloo.

    python tools/bench/train_torch.py [--models mlp,wide,many] [--workers 2] [--runs 5]

Systems, each a team of processes on this machine, one thread per process:
  local      no exchange: the step itself
  gloo       torch.nn.parallel.DistributedDataParallel over gloo
  backend    the same over torch's backend "fastps"
  fsdp-gloo, fsdp-backend            torch's FSDP2 over the two
  fsdp-none  FSDP2 over a backend that sends nothing: what it adds itself
  ddp        fastps.torch.DistributedDataParallel
  optimizer  fastps.torch.DistributedOptimizer
Models: mlp 0.27 M parameters, wide 25 M in few large tensors, many 200 layers of small tensors.

The systems take turns in every round, because machines are noisy. A team's step is the mean over
its processes of their median step. added = step - local step of the same round, for FSDP2 over a
backend the step of fsdp-none where that is measured; ratio = added / gloo's added of the same
round, of FSDP2 over gloo for FSDP2; columns give medians over rounds, in ms. Before and after, all
processes of a team must hold bitwise equal weights, and all teams nearly the same.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly
from tools.bench import _common
from tools.bench._driven import Commands, Driven, settings_of

PEER = Path(__file__).with_name("_train_peer.py")
MODELS = ("mlp", "wide", "many")
STEPS = {"mlp": 100, "wide": 6, "many": 40}  # of one turn
WARM_UP = {"mlp": 30, "wide": 3, "many": 10}
FASTPS = ("ddp", "optimizer")
ALONE = ("local", "fsdp-none")  # nobody sends anything, and weights differ
OTHERS = (*ALONE, "gloo", "backend", "fsdp-gloo", "fsdp-backend")
AGAINST = {"fsdp-gloo": "fsdp-gloo", "fsdp-backend": "fsdp-gloo"}  # the others: gloo
NEARLY = 1e-5  # of the length of all weights


class Team(Driven):
    """The processes of one system."""

    def __init__(
        self, name: str, workers: int, servers: int, settings: Sequence[str], launch: Sequence[str]
    ) -> None:
        self.system, _, own = name.partition(":")
        super().__init__(
            name, self.commands(workers, servers, launch), workers=workers,
            settings={"OMP_NUM_THREADS": "1", **settings_of(*settings, *own.split("+"))},
        )  # fmt: skip

    def commands(self, workers: int, servers: int, launch: Sequence[str]) -> Commands:
        """Give the commands of all processes, each with settings of its own."""
        peer, is_job = self.peer()
        if is_job:
            options = ["-np", str(workers), "-s", str(servers), *launch]
            return [([sys.executable, "-m", "fastps.launch.run", *options, *peer], {})]
        return [(peer, {"RANK": str(rank)}) for rank in range(workers)]

    def peer(self) -> tuple[list[str], bool]:
        """Give the command of one process, and whether fastps-run starts it."""
        if self.system not in (*FASTPS, *OTHERS):
            raise SystemExit(f"no system is called {self.system!r}")
        return [sys.executable, str(PEER), self.system], self.system in FASTPS

    def step_seconds(self, model: str, steps: int) -> float:
        """Train and give the mean over the processes of their median step."""
        answers = self.ask(op="time", model=model, steps=steps)
        return statistics.mean(statistics.median(answer["seconds"]) for answer in answers)


@contextlib.contextmanager
def teams(options: argparse.Namespace) -> Iterator[list[Team]]:
    """Start the systems; end them whatever happens."""
    how = (options.workers, options.servers, options.settings, options.launch.split())
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Team(name, *how)))
            for name in options.systems.split(",")
        ]


def check(systems: Sequence[Team], model: str) -> int:
    """Stop the benchmark if weights are not what they must be; give the number of parameters."""
    lengths: dict[str, float] = {}
    parameters = 0
    for team in systems:
        answers = team.ask(op="describe", model=model)
        parameters = answers[0]["parameters"]
        if team.system in ALONE:
            continue
        if len({answer["digest"] for answer in answers}) > 1:
            raise SystemExit(f"{team.name}: the workers' weights of {model} differ")
        lengths[team.name] = answers[0]["length"]
    if lengths and max(lengths.values()) - min(lengths.values()) > NEARLY * max(lengths.values()):
        raise SystemExit(f"the systems' weights of {model} differ: lengths {lengths}")
    return parameters


def measure(
    systems: Sequence[Team], model: str, runs: int, steps: int | None
) -> tuple[int, dict[str, list[float]]]:
    """Take turns: parameters of the model, and per system the seconds of a step in each round."""
    check(systems, model)
    for team in systems:
        team.step_seconds(model, WARM_UP[model])
    found: dict[str, list[float]] = {team.name: [] for team in systems}
    for _ in range(runs):
        for team in systems:
            found[team.name].append(team.step_seconds(model, steps or STEPS[model]))
    parameters = check(systems, model)
    for team in systems:
        team.ask(op="forget", model=model)
    return parameters, found


def add_rows(
    report: _common.Report, model: str, parameters: int, found: dict[str, list[float]]
) -> None:
    """Add one row per system: its step, what it adds, and the ratio of that to gloo's."""
    bare = dict.fromkeys(AGAINST, found.get("fsdp-none", found.get("local")))
    added = {
        name: [1e3 * (mine - base) for mine, base in zip(times, without, strict=True)]
        for name, times in found.items()
        if (without := bare.get(name, found.get("local"))) is not None
    }
    for name, times in found.items():
        ratios = [
            mine / theirs
            for mine, theirs in zip(
                added.get(name, []), added.get(AGAINST.get(name, "gloo"), []), strict=False
            )
            if theirs > 0
        ]
        report.add(
            name,
            [1e3 * seconds for seconds in times],
            model=model,
            parameters=parameters,
            added=statistics.median(added[name]) if added else float("nan"),
            ratio=statistics.median(ratios) if ratios else float("nan"),
            best_ratio=min(ratios, default=float("nan")),
            worst_ratio=max(ratios, default=float("nan")),
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workers", type=_common.positive, default=2)
    parser.add_argument("--servers", type=int, default=1, help="for fastps-run -s")
    parser.add_argument(
        "--systems",
        default="local,gloo,ddp,optimizer",
        help="ddp:FASTPS_SHARED_MEMORY=0+FASTPS_SPIN_US=0 adds a variant with settings",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of all systems, for example FASTPS_SHARED_MEMORY=0",
    )
    parser.add_argument("--launch", default="", help="more options for fastps-run")
    parser.add_argument("--steps", type=_common.positive, help="steps of one turn")
    _common.add_options(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.models.split(",")) - set(MODELS):
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    return options


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    report = _common.Report("train_torch", unit="ms")
    report.conditions |= {
        "workers": options.workers,
        "servers": options.servers,
        "settings": options.settings,
    }
    with teams(options) as systems:
        for model in options.models.split(","):
            add_rows(report, model, *measure(systems, model, options.runs, options.steps))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
