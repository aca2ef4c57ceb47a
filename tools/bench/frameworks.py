# SPDX-License-Identifier: Apache-2.0
"""Measure what averaging gradients adds to a step in each framework, next to PyTorch.

    make test-frameworks   # makes .venvs/
    python tools/bench/frameworks.py [--frameworks torch,tensorflow,jax] [--runs 5]

Each framework trains the same models (wide: 25 M parameters in 12 tensors; many: 400 small
tensors) by plain SGD, two teams each: one of processes that do not know of each other, and one
that averages; one thread computes per process. torch runs in the environment of this command,
every other one in .venvs/NAME, keras with TensorFlow below it (keras:KERAS_BACKEND=jax: JAX).

Two frameworks bring an exchange of their own: tensorflow-mwms is TensorFlow's
MultiWorkerMirroredStrategy, mxnet-dist MXNet's dist_sync store with one server. Name one first,
and the ratio is fastps's to it:

    python tools/bench/frameworks.py --frameworks mxnet-dist,mxnet

The teams take turns in every round. added = step - the same framework's step without an exchange
in the same round; ratio = added / PyTorch's added in the same round; columns give medians over
rounds, in ms. exposed: the share of the time with bytes under way in which the program waited for
them, as the timeline shows it (fastps.statistics(); the warm-up counts). Before and after, all
processes of a team must hold bitwise equal weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly
from tools.bench import _common, train_torch
from tools.bench._driven import Commands, free_port

PEER = Path(__file__).with_name("_framework_peer.py")
VENVS = Path(__file__).parents[2] / ".venvs"
MODELS = ("wide", "many")
LOCAL = "-local"
RIVALS = ("tensorflow-mwms", "mxnet-dist")
ALONE = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "NPROC": "1",  # of XLA's threads
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Team(train_torch.Team):
    """The processes of one framework, with or without an exchange."""

    def commands(self, workers: int, servers: int, launch: Sequence[str]) -> Commands:
        """Give the commands of all processes; MXNet's store wants two more than its workers."""
        if self.system not in RIVALS:
            return super().commands(workers, servers, launch)
        ports = [free_port() for _ in range(workers)]
        made = [(self.peer()[0], rival_settings(rank, ports)) for rank in range(workers)]
        if self.system == "mxnet-dist":
            run = [python_of("mxnet"), "-c", "import mxnet"]
            base = rival_settings(0, ports)
            made += [(run, base | {"DMLC_ROLE": role}) for role in ("scheduler", "server")]
        return made

    def peer(self) -> tuple[list[str], bool]:
        """Give the command of one process, and whether fastps-run starts it."""
        name = self.system.removesuffix(LOCAL)
        is_local = self.system != name
        command = [python_of(name), str(PEER), name, *(["local"] if is_local else [])]
        return command, not is_local


def python_of(system: str) -> str:
    """Give the interpreter that has a system's framework."""
    name = system.partition("-")[0]
    return sys.executable if name == "torch" else str(VENVS / name / "bin" / "python")


def rival_settings(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Give what the frameworks' own exchanges want to know: one port for each worker."""
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    return {
        "RANK": str(rank), "TF_CONFIG": json.dumps(task),
        "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": str(len(ports)), "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(ports[0]),
    }  # fmt: skip


def local_of(name: str) -> str:
    """Give the name of the team of the same framework without an exchange."""
    plain, colon, own = name.partition(":")
    return f"{plain.partition('-')[0]}{LOCAL}{colon}{own}"


@contextlib.contextmanager
def teams(options: argparse.Namespace) -> Iterator[list[Team]]:
    """Start two teams for each framework; end them whatever happens."""
    settings = [f"{name}={value}" for name, value in ALONE.items()] + options.settings
    names = options.frameworks.split(",")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Team(system, options.workers, 0, settings, ())))
            for system in dict.fromkeys(one for name in names for one in (local_of(name), name))
        ]


def measure(
    systems: Sequence[Team], model: str, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Take turns: the seconds of a step of each system in each round, and what it waited for."""
    for team in systems:
        team.step_seconds(model, train_torch.WARM_UP[model])
    found: dict[str, list[float]] = {team.name: [] for team in systems}
    for _ in range(options.runs):
        for team in systems:
            steps = options.steps or train_torch.STEPS[model]
            found[team.name].append(team.step_seconds(model, steps))
    exposed = {}
    for team in systems:
        answers = team.ask(op="describe", model=model)
        exposed[team.name] = statistics.median(answer["exposed"] for answer in answers)
        if LOCAL not in team.name and len({answer["digest"] for answer in answers}) > 1:
            raise SystemExit(f"{team.name}: the workers' weights of {model} differ")
        team.ask(op="forget", model=model)
    return found, exposed


def add_rows(
    report: _common.Report,
    model: str,
    found: dict[str, list[float]],
    exposed: dict[str, float],
) -> None:
    """Add one row per framework: its step, what it adds, and the ratio of that to the first's."""
    names = [name for name in found if LOCAL not in name]
    added = {}
    for name in names:
        local = found[local_of(name)]
        added[name] = [1e3 * (a - b) for a, b in zip(found[name], local, strict=True)]
    for name in names:
        pairs = zip(added[name], added[names[0]], strict=True)
        ratios = [mine / base for mine, base in pairs if base > 0]
        report.add(
            name, [1e3 * one for one in found[name]], model=model,
            added=statistics.median(added[name]),
            ratio=statistics.median(ratios) if ratios else float("nan"),
            best_ratio=min(ratios, default=float("nan")),
            worst_ratio=max(ratios, default=float("nan")), exposed=exposed[name],
        )  # fmt: skip


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--frameworks", default="torch,tensorflow,jax", help="the first is base")
    parser.add_argument("--workers", type=_common.positive, default=2)
    parser.add_argument("--steps", type=_common.positive, help="steps of one turn")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE"
    )
    _common.add_options(parser)
    options = parser.parse_args(arguments)
    report = _common.Report("frameworks", unit="ms")
    report.conditions |= {"workers": options.workers, "settings": options.settings}
    with teams(options) as systems:
        for model in options.models.split(","):
            add_rows(report, model, *measure(systems, model, options))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
