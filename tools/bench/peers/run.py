# SPDX-License-Identifier: Apache-2.0
"""Compare fastps on one machine with gloo, Open MPI and oneCCL, in one run.

    python tools/bench/peers/install.py                 # Open MPI, oneCCL; gloo comes with torch
    python tools/bench/peers/run.py [--np 2] [--sizes 4K,64K,1M,4M,16M,64M,100x4K] [--json PATH]

Each system is a team of --np processes that sum float32 arrays in place. The teams take turns in
every round, those not at work sleep; ratios are taken within a round, because machines are noisy.
Every turn starts with a sum of which all elements are checked; a wrong one ends the run.

gloo           torch.distributed, over loopback TCP
mpi, mpi-tcp   Open MPI through mpi4py: in shared memory; over loopback TCP alone
oneccl, -tcp   oneCCL through a shim in C++: in shared memory; over loopback TCP alone
registered     fastps in shared memory, arrays made by fastps.empty
private        fastps in shared memory, arrays in private memory
colocated      fastps as on separate machines, each worker serving a share; -tcp: no Unix sockets
apart          fastps as on separate machines, servers on further ones; -tcp: no Unix sockets

A setting is compared as in apart:FASTPS_CHUNK_BYTES=262144+FASTPS_SPIN_US=0; it works for every
system: mpi:OMPI_MCA_mpi_yield_when_idle=1.

Columns: ms is the median over rounds of the median iteration at rank 0, min that of the best
round; GB_s is tensor bytes / t; ratio is t over gloo's t of the same round, median and best;
cpu_s_GB is CPU seconds of all processes of the system per GB of tensor; mem_MB is the most memory
of all of them, a page shared by m processes counted 1/m in each (so libraries that other systems
use too count in part); n is iterations in a turn. A turn ends after --budget seconds even if it
has few iterations (three at least): processes that spin are slow where they are more than the
cores. 100x4K is one call where the system has one (fastps; gloo: all_reduce_coalesced), else all
are started before the first is waited for (oneCCL), or one follows the other (MPI).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from fastps.config.closed_pipe import ends_quietly
from tools.bench import _common
from tools.bench.peers import _peer, _places
from tools.bench.peers._systems import System, parse_systems
from tools.bench.peers._team import Team, TeamError, Turn, UnavailableError, Work
from tools.bench.push_pull import format_size, parse_size

BASE = "gloo"
TURN_BYTES = 640 << 20  # how much one system moves in one turn, at most
MAX_ITERATIONS = 1000
KEEP_BYTES = 16 << 20  # arrays above this are dropped after each turn, or many teams fill memory
IDLE_CORES = 0.02  # a team that uses more while others are measured is named
COLUMNS = ("name", "size", "ms", "min", "GB_s", "ratio", "best_ratio", "cpu_s_GB", "mem_MB", "n")
LOCAL_PEERS = ("registered", "private")


def parse_work(text: str) -> Work:
    """Read 64M as one tensor, 100x4K as many in one call."""
    count, times, size = text.rpartition("x")
    try:
        work = Work(parse_size(size), int(count) if times else 1)
    except (ValueError, IndexError):
        raise ValueError(f"{text!r} is not a size such as 4K, 64M or 100x4K") from None
    if work.nbytes < 4 or work.nbytes % 4 or work.count < 1:
        raise ValueError(f"{text!r} is not a number of whole float32 values")
    return work


def parse_works(text: str) -> list[Work]:
    """Read sizes with commas between them."""
    return [parse_work(part) for part in text.split(",")]


def format_work(work: Work) -> str:
    """Write 64M or 100x4K."""
    size = format_size(work.nbytes)
    return size if work.count == 1 else f"{work.count}x{size}"


@dataclass(frozen=True)
class Limits:
    """How long a turn may be and how many rounds there are."""

    runs: int
    budget_s: float

    def iterations(self, work: Work) -> int:
        """Choose how many iterations one turn has at most."""
        return max(3, min(MAX_ITERATIONS, TURN_BYTES // work.total))


class Group:
    """The teams of one run; a team that fails leaves, the others go on."""

    def __init__(self, say: Callable[[str], object] = print) -> None:
        self.teams: list[Team] = []
        self.has_failed = False
        self.say = say

    def start(self, systems: Sequence[System], places: _places.Places, **how: Any) -> None:
        """Start what is installed; say what is not and which command installs it."""
        for system in systems:
            missing = system.missing(places)
            if missing:
                self.say(f"skipped {system.label}: {missing}")
                continue
            try:
                self.teams.append(Team(system, places, **how))
            except UnavailableError as error:
                self.say(f"skipped {system.label}: {error}")
            except TeamError as error:
                self.has_failed = True
                self.say(f"skipped {system.label}: {error}")

    def leave(self, team: Team, error: TeamError) -> None:
        """Go on without a team."""
        self.has_failed = True
        self.say(f"dropped {team.label}: {error}")
        self.teams.remove(team)
        team.close(is_patient=False)

    def close(self) -> None:
        """End all teams."""
        for team in self.teams:
            team.close()

    def turn(self, team: Team, work: Work, number: int, limits: Limits) -> Turn:
        """Let one team work: check, then time; watch that the others sleep."""
        seed = number * work.count
        is_right, memory = team.check(work, seed)
        if not is_right:
            raise SystemExit(f"{team.label}: wrong sum of {format_work(work)}, round {number}")
        others = [other for other in self.teams if other is not team]
        before = [other.cpu_seconds() for other in others]
        began = time.monotonic()
        found = team.time(work, budget_s=limits.budget_s, most=limits.iterations(work))
        for other, cpu_s in zip(others, before, strict=True):
            other.idle_cpu_s += other.cpu_seconds() - cpu_s
            other.idle_wall_s += time.monotonic() - began
        found.memory = max(memory, team.memory())
        return found

    def measure(self, work: Work, limits: Limits) -> dict[str, list[Turn]]:
        """Take turns, in each round another team first; one turn per team and round."""
        found: dict[str, list[Turn]] = {team.label: [] for team in self.teams}
        for number in range(limits.runs):
            first = number % len(self.teams) if self.teams else 0
            for team in [*self.teams[first:], *self.teams[:first]]:
                try:
                    found[team.label].append(self.turn(team, work, number, limits))
                    if work.total > KEEP_BYTES or number == limits.runs - 1:
                        team.forget(work)
                except TeamError as error:
                    self.leave(team, error)
                    del found[team.label]
        return found


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Make a group and end it whatever happens."""
    made = Group()
    try:
        yield made
    finally:
        made.close()


def rows_of(work: Work, found: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """Make one row per system: time, bandwidth, ratio to gloo of the same round, CPU, memory."""
    base = [turn.median_s for turn in found.get(BASE, [])]
    return [row_of(work, label, turns, base) for label, turns in found.items() if turns]


def row_of(work: Work, label: str, turns: Sequence[Turn], base: Sequence[float]) -> dict[str, Any]:
    """Make the row of one system; base: gloo's seconds by round, or none."""
    times = [turn.median_s for turn in turns]
    ratios = [mine / theirs for mine, theirs in zip(times, base, strict=False)]
    summary = _common.summarize([1e3 * seconds for seconds in times])
    names = sorted({name for turn in turns for name in turn.ways})
    return {
        "name": label,
        "size": format_work(work),
        "nbytes": work.total,
        "ms": summary.median,
        "min": summary.min,
        "max": summary.max,
        "GB_s": work.total / statistics.median(times) / 1e9,
        "ratio": statistics.median(ratios) if ratios else math.nan,
        "best_ratio": min(ratios, default=math.nan),
        "cpu_s_GB": statistics.median(turn.cpu_per_gb(work) for turn in turns),
        "mem_MB": round(max(turn.memory for turn in turns) / 1e6),
        "n": round(statistics.median(len(turn.seconds) for turn in turns)),
        "rounds": len(turns),
        "rounds_ms": [1e3 * seconds for seconds in times],
        "other_cores": sum(t.other_cpu_s for t in turns) / sum(t.wall_s for t in turns),
        **{name: statistics.median(turn.ways[name] for turn in turns) for name in names},
    }


def format_matrix(rows: Sequence[dict[str, Any]], field: str) -> str:
    """Lay out one field of all rows: a line per system, a column per size."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["name"], {field: row["name"], **dict.fromkeys(sizes, "-")})
        line[row["size"]] = row[field]
    return _common.format_table(list(lines.values()))


def remarks(teams: Sequence[Team], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say what a reader of the figures must know: teams that did not sleep, ways not meant."""
    found = []
    for team in teams:
        cores = team.idle_cpu_s / team.idle_wall_s if team.idle_wall_s else 0.0
        if cores > IDLE_CORES:
            found.append(f"{team.label} used {cores:.2f} cores while others were measured")
    for row in rows:
        kind = row["name"].partition(":")[0]
        if kind in LOCAL_PEERS and row.get("bytes_over_links"):
            found.append(f"{row['name']} at {row['size']} sent bytes over links")
        if kind == "registered" and row.get("bytes_staged"):
            found.append(f"registered at {row['size']} copied bytes that should be shared")
    return found


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Describe machine, versions and options of this run."""
    found = _common.conditions()
    found["versions"] |= _places.Places(options.folder).versions()
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii")
    return {
        **found,
        "np": options.np,
        "servers": options.servers,
        "congestion": control.strip(),
        "budget_s": options.budget,
        "machine": platform.machine(),
    }


def write_json(path: Path, rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> None:
    """Append one line per row, each with the conditions of the run."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            line = {"bench": "peers", "unit": "ms", **row, **found}
            file.write(json.dumps({k: None if v != v else v for k, v in line.items()}) + "\n")


def headline(found: dict[str, Any]) -> str:
    """Describe the run in one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['np']} processes on {found['cpu']}, {found['cpus']} CPUs, "
        f"kernel {found['kernel']}, load {found['load_average']:.1f},\n"
        f"congestion control {found['congestion']} (fastps sets its own on loopback), "
        f"python {found['python']},\n{versions}, commit {found['commit']}"
    )


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show what a parser of ours says."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--np", type=_common.positive, default=2, help="processes (default 2)")
    made.add_argument(
        "--sizes",
        type=checked(parse_works),
        default="4K,64K,1M,4M,16M,64M,100x4K",
        help="with commas between them; 100x4K is 100 tensors in one call (default %(default)s)",
    )
    made.add_argument(
        "--systems",
        type=checked(parse_systems),
        default="all",
        help="with commas between them (default all)",
    )
    made.add_argument(
        "--servers", type=_common.positive, default=2, help="servers of `apart` (default 2)"
    )
    made.add_argument(
        "--budget",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="after so long a turn ends, though never before three iterations (default 2)",
    )
    made.add_argument("--launch", default="", help="more options for fastps-run")
    _places.add_option(made)
    _common.add_options(made)
    return made


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a system that is installed failed."""
    made = parser()
    options = made.parse_args(arguments)
    if options.np > _peer.MOST_PROCESSES:
        made.error(f"--np: sums are exact for at most {_peer.MOST_PROCESSES} processes")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # end the teams too
    places, limits = _places.Places(options.folder), Limits(options.runs, options.budget)
    found, began, rows = conditions(options), time.monotonic(), []
    how = {"size": options.np, "servers": options.servers, "launch": options.launch.split()}
    print(headline(found), flush=True)
    with group() as teams:
        teams.start(options.systems, places, **how)
        starts = {team.label: round(team.memory_at_start / 1e6) for team in teams.teams}
        for work in options.sizes:
            measured = rows_of(work, teams.measure(work, limits))
            rows += measured
            if measured:
                print(_common.format_table([{c: row[c] for c in COLUMNS} for row in measured]))
                print(flush=True)
            if options.json:
                write_json(options.json, measured, {**found, "memory_at_start_MB": starts})
        notes = remarks(teams.teams, rows)
    for field in ("ms", "ratio", "cpu_s_GB", "mem_MB") if rows else ():
        print(format_matrix(rows, field), end="\n\n")
    print("memory at start (MB):", ", ".join(f"{name} {mb}" for name, mb in starts.items()))
    print(*notes, sep="\n", end="\n" if notes else "")
    load = os.getloadavg()[0]
    print(f"{limits.runs} rounds, {time.monotonic() - began:.0f} s, load at the end {load:.1f}")
    return 1 if teams.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
