# SPDX-License-Identifier: Apache-2.0
"""Compare push_pull with torch gloo and plain sockets, in one run on this machine.

    python tools/bench/push_pull.py [--sizes 4K,64K,1M,4M,16M,64M] [--servers 2] [--runs 5]

Two processes per system, float32, loopback TCP, sums checked in every round. The systems take
turns in every round and ratios are taken within a round, because machines are noisy. Columns:
median is over rounds of the median iteration, in ms; alg is tensor bytes / t; ratio is t over
gloo's t of the same round; cpu is seconds of all processes of the system per GB of tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # last: fastps may be installed elsewhere

from fastps.config.closed_pipe import ends_quietly
from fastps.config.versions import command_of
from tools.bench import _common
from tools.bench._driven import Commands, Driven, settings_of

PEER = Path(__file__).with_name("_peer.py")
SUFFIXES = {"K": 1 << 10, "M": 1 << 20}
TICKS = os.sysconf("SC_CLK_TCK")
ROUND_BYTES = 640 << 20  # how much one system moves per size and round, at most
MAX_ITERATIONS = 200
MANY = 100  # tensors of 4 KB in one call


def parse_size(text: str) -> int:
    """Read 4K or 64M as bytes; ValueError for what is neither."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in SUFFIXES else (text, "")
    if not number.isdecimal():
        raise ValueError(f"{text!r} is no number of bytes; such are 4096, 4K and 64M")
    return int(number) * SUFFIXES.get(unit, 1)


def format_size(nbytes: int) -> str:
    """Write bytes as 4K or 64M."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{suffix}"
    return str(nbytes)


class Team(Driven):
    """The two processes of one system."""

    def __init__(self, name: str, servers: int, arguments: Sequence[str] = ()) -> None:
        self.system, _, settings = name.partition(":")
        self.mark = secrets.token_hex(8)
        own = {"BENCH_MARK": self.mark, **settings_of(*settings.split("+"))}
        super().__init__(
            name, commands_of(self.system, servers, arguments), workers=2, settings=own
        )

    def check(self, **work: int) -> None:
        """Stop the benchmark if a sum is wrong."""
        if not all(answer["is_right"] for answer in self.ask(op="check", **work)):
            raise SystemExit(f"{self.name}: wrong sum for {work}")

    def time(self, iterations: int, **work: int) -> tuple[float, float]:
        """Give median seconds of an iteration at rank 0, and CPU seconds of one iteration."""
        before = self.cpu_seconds()
        seconds = self.ask(op="time", iterations=iterations, **work)[0]["seconds"]
        return statistics.median(seconds), (self.cpu_seconds() - before) / iterations

    def cpu_seconds(self) -> float:
        """Add the user and system time of every process with our mark in its environment."""
        needle = f"BENCH_MARK={self.mark}".encode()
        total = 0.0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes():
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    total += (int(fields[11]) + int(fields[12])) / TICKS
        return total


def commands_of(system: str, servers: int, arguments: Sequence[str]) -> Commands:
    """Give the commands of the processes of a system, each with settings of its own."""
    peer = [sys.executable, str(PEER), system]
    if system == "fastps":
        launch = [*command_of("fastps.launch.run"), "-np", "2", "-s", str(servers)]
        return [([*launch, *arguments, *peer], {})]
    return [(peer, {"RANK": str(rank)}) for rank in range(2)]


@contextlib.contextmanager
def teams(names: Sequence[str], servers: int, arguments: Sequence[str]) -> Iterator[list[Team]]:
    """Start the systems; end them whatever happens."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Team(name, servers, arguments)))
            for name in names
        ]


def iterations_of(nbytes: int) -> int:
    """Choose how many iterations one turn has."""
    return max(3, min(MAX_ITERATIONS, ROUND_BYTES // nbytes))


def measure(
    systems: Sequence[Team], nbytes: int, count: int, runs: int
) -> dict[str, list[tuple[float, float]]]:
    """Take turns: per system a list of (median seconds, CPU seconds per GB), one per round."""
    found: dict[str, list[tuple[float, float]]] = {team.name: [] for team in systems}
    iterations = iterations_of(nbytes * count)
    for _ in range(runs):
        for team in systems:
            team.check(nbytes=nbytes, count=count)
            seconds, cpu = team.time(iterations, nbytes=nbytes, count=count)
            found[team.name].append((seconds, cpu / (nbytes * count / 1e9)))
    for team in systems:
        team.ask(op="forget", nbytes=nbytes, count=count)
    return found


def add_rows(
    report: _common.Report, label: str, nbytes: int, found: dict[str, list[tuple[float, float]]]
) -> None:
    """Add one row per system: time, bandwidth, ratio to gloo of the same round, CPU."""
    base = [seconds for seconds, _ in found.get("gloo", [])]
    for name, rounds in found.items():
        times = [seconds for seconds, _ in rounds]
        ratios = [mine / theirs for mine, theirs in zip(times, base, strict=False)]
        report.add(
            name,
            [1e3 * seconds for seconds in times],
            size=label,
            alg_GB_s=nbytes / statistics.median(times) / 1e9,
            ratio=statistics.median(ratios) if ratios else float("nan"),
            best_ratio=min(ratios, default=float("nan")),
            cpu_s_GB=statistics.median(cpu for _, cpu in rounds),
        )


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="4K,64K,1M,4M,16M,64M")
    parser.add_argument("--servers", type=_common.positive, default=2)
    parser.add_argument(
        "--systems",
        default="fastps,gloo,sockets",
        help="fastps:FASTPS_CHUNK_BYTES=262144+FASTPS_SPIN_US=0 compares settings",
    )
    parser.add_argument("--launch", default="", help="more options for fastps-run")
    _common.add_options(parser)
    options = parser.parse_args(arguments)
    report = _common.Report("push_pull", unit="ms")
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    report.conditions |= {"workers": 2, "servers": options.servers, "congestion": control}
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    with teams(options.systems.split(","), options.servers, options.launch.split()) as systems:
        for nbytes in sizes:
            add_rows(
                report, format_size(nbytes), nbytes, measure(systems, nbytes, 1, options.runs)
            )
        add_rows(report, f"{MANY}x4K", MANY << 12, measure(systems, 4 << 10, MANY, options.runs))
        for team in systems:
            if team.system == "fastps":
                seconds = team.ask(op="start", iterations=1000)[0]["seconds"]
                report.add("fastps start", [1e3 * value for value in seconds], size="4K")
    report.finish(options.json)
    print(
        f"2 workers, {options.servers} servers, congestion control {control} "
        f"(fastps sets cubic on loopback)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
