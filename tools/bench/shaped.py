# SPDX-License-Identifier: Apache-2.0
"""Compare push_pull with torch gloo on hosts whose links are slow: who wastes bandwidth?

    python tools/bench/shaped.py [--hosts 4] [--servers 4] [--rate 200mbit] [--sizes 64M]
    python tools/bench/shaped.py --servers 0,1,2,3,4 --json shaped.jsonl
    python tools/simulate.py check shaped.jsonl

Needs root: tools/netlab.py makes the hosts. Each worker and each server has a host of its own;
the scheduler shares host 0. With fewer servers than workers' hosts every worker serves as well
(--colocate). gloo runs on the workers' hosts. The systems take turns in every round; every size
ends with a checked sum. Each number of servers has a lab of its own. Columns:

bound   time over the least that the links allow. M is the tensor, n the workers, k the servers,
        B the payload a link carries one way, 0.956 of its rate: of each 1514-byte frame, 1448
        are payload. Servers apart: M/B, or n M / k B if that is more. With servers beside
        workers, the optimum of Jiang et al. (OSDI 2020): 2n(n-1) M / (n^2 + kn - 2k) B. Push,
        then pull is twice that; a ring needs 2 (n - 1) / n M/B.
gloo    time over gloo's of the same round.
worker, server
        bytes on the busiest direction of such a link over what the bound assumes, with the
        frame's headers. 1 is ideal; more is acknowledgements, retransmissions and control.
drops   packets that the links' queues dropped, per iteration, over all links.

--variant adds fastps once more with other settings, to compare in one run:
    --variant small:FASTPS_CHUNK_BYTES=131072,FASTPS_CREDIT_BYTES=0
BENCH_COMPRESSION names a compression, with its k after a colon:
    --variant onebit:BENCH_COMPRESSION=onebit --variant topk:BENCH_COMPRESSION=topk:0.01
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from fastps.config.closed_pipe import ends_quietly
from tools.bench import _common
from tools.bench.push_pull import format_size, parse_size
from tools.netlab import PAYLOAD_SHARE, NetLab, Traffic, ended_by_signals, missing

PEER = Path(__file__).with_name("_shaped_peer.py")
ROOT = Path(__file__).parents[2]
SCHEDULER_PORT = 7600  # of the first job; the hosts' ports are all free
GLOO_PORT = 7500
START_S = 120
TURN_S = 600
END_S = 20
LINGER_S = "0.5"  # the jobs begin no second generation
# No host talks to itself: sockets keep the congestion control that the route gives them.
NO_CONGESTION = ""
ITERATIONS = 3
EXTRA_TURNS = 2  # the peer warms up once and checks once in every turn
FOREIGN = ("FASTPS_", "DMLC_", "BYTEPS_", "BENCH_", "MASTER_")


@dataclass(frozen=True)
class Shape:
    """Which hosts of the lab do what: workers first, then servers; do workers serve too?"""

    workers: int
    servers: int
    is_colocated: bool = False

    @property
    def hosts(self) -> int:
        """Count the hosts."""
        return self.workers + self.servers

    @property
    def own_share(self) -> float:
        """Give the part of a tensor that a worker's host sums."""
        n, k = self.workers, self.servers
        if not self.is_colocated or k >= n:
            return 0.0
        return (n - k) / (n * n + k * n - 2 * k)

    def worker_bytes(self, nbytes: int) -> float:
        """Give what a worker's host sends of a tensor, and receives."""
        pushed = nbytes * (1 - self.own_share)
        return pushed + (self.workers - 1) * self.own_share * nbytes

    def server_bytes(self, nbytes: int) -> float:
        """Give what each server's host receives of a tensor that is large, and sends."""
        if not self.servers:
            return 0.0
        apart = nbytes * (1 - self.workers * self.own_share)
        return apart * self.workers / self.servers

    def bound_s(self, nbytes: int, bytes_per_s: float) -> float:
        """Give the time below which no link can move its bytes."""
        return max(self.worker_bytes(nbytes), self.server_bytes(nbytes)) / bytes_per_s


def make_shape(workers: int, servers: int, colocate: str) -> Shape:
    """Decide as the library does whether workers serve: auto, on or off."""
    is_colocated = colocate == "on" or (colocate == "auto" and servers < workers)
    if not servers and not is_colocated:
        raise SystemExit("shaped: no servers, and none beside workers: nothing could sum")
    return Shape(workers, servers, is_colocated and workers > 1)


@dataclass(frozen=True)
class Turn:
    """What one system did in one turn."""

    seconds: list[float]
    traffic: list[Traffic]  # of every host, warm-up and check included
    iterations: int


@dataclass(frozen=True)
class System:
    """A system to measure: fastps with settings, or gloo."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_fastps(self) -> bool:
        """Tell fastps from gloo."""
        return self.name != "gloo"

    @property
    def written(self) -> str:
        """Write the settings as one word."""
        return ",".join(f"{key}={value}" for key, value in self.settings.items())

    def __hash__(self) -> int:
        """Hash by name: a run has each once."""
        return hash(self.name)


class Team:
    """The processes of one system on the hosts of a lab, obeying over Unix sockets."""

    def __init__(self, lab: NetLab, shape: Shape, system: System, *, number: int) -> None:
        """Start them; `files` talk to the workers by rank. number: of this team in the lab."""
        self.lab, self.shape, self.system, self.name = lab, shape, system, system.name
        self._folder = tempfile.TemporaryDirectory(prefix="fastps-shaped-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[Any] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._driver = str(Path(self._folder.name) / "driver")
            self._listener.bind(self._driver)
            self._listener.listen(shape.workers)
            self._listener.settimeout(START_S)
            self._start(system, number)
            self._files = self._accept()
        except BaseException:
            self.close()
            raise

    def _start(self, system: System, number: int) -> None:
        common = self._environment(system, number)
        server = [sys.executable, "-m", "fastps.server.main"]
        if system.is_fastps:
            self._popen(0, [*server, "--role", "scheduler"], common)
            for host in range(self.shape.workers, self.shape.hosts):
                self._popen(host, server, common)
        peer = [sys.executable, str(PEER), "fastps" if system.is_fastps else "gloo"]
        for rank in range(self.shape.workers):
            self._popen(rank, peer, {**common, "RANK": str(rank)})

    def _environment(self, system: System, number: int) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        mine = {
            "PYTHONPATH": str(ROOT),
            "BENCH_DRIVER": self._driver,
            "BENCH_INTERFACE": "eth0",
            "WORLD_SIZE": str(self.shape.workers),
        }
        if not system.is_fastps:
            own = {"MASTER_ADDR": self.lab.address(0), "MASTER_PORT": str(GLOO_PORT)}
            return kept | mine | own
        return (
            kept
            | mine
            | {
                "FASTPS_SIZE": str(self.shape.workers),
                "FASTPS_NUM_SERVERS": str(self.shape.servers),
                "FASTPS_COLOCATE": "on" if self.shape.is_colocated else "off",
                "FASTPS_SCHEDULER_HOST": self.lab.address(0),
                "FASTPS_SCHEDULER_PORT": str(SCHEDULER_PORT + number),
                "FASTPS_TOKEN": secrets.token_hex(32),
                "FASTPS_JOB_ID": f"shaped-{number}",
                "FASTPS_LINGER_S": LINGER_S,
                "FASTPS_SAME_HOST_CONGESTION": NO_CONGESTION,
                **system.settings,
            }
        )

    def _popen(self, host: int, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        own = {"FASTPS_HOST": self.lab.address(host)} if "FASTPS_SIZE" in environment else {}
        process = self.lab.popen(
            host, argv, env={**environment, **own}, stdin=subprocess.DEVNULL, cwd="/"
        )
        self._processes.append(process)

    def _accept(self) -> list[Any]:
        files = {}
        for _ in range(self.shape.workers):
            sock, _ = self._listener.accept()
            sock.settimeout(TURN_S)
            file = sock.makefile("rw", encoding="utf-8")
            sock.close()  # the file holds it open
            files[json.loads(file.readline())["rank"]] = file
        return [files[rank] for rank in sorted(files)]

    def reduce(self, nbytes: int, iterations: int = ITERATIONS) -> Turn:
        """Let all workers reduce a tensor some times; SystemExit when a sum is wrong."""
        before = self.lab.traffic()
        command = {"nbytes": nbytes, "iterations": iterations}
        for file in self._files:
            file.write(json.dumps(command) + "\n")
            file.flush()
        answers = [json.loads(file.readline()) for file in self._files]
        if not all(answer["is_right"] for answer in answers):
            raise SystemExit(f"{self.name}: wrong sum at {nbytes} bytes")
        after = self.lab.traffic()
        slowest = [max(each) for each in zip(*(a["seconds"] for a in answers), strict=True)]
        traffic = [new.since(old) for new, old in zip(after, before, strict=True)]
        return Turn(slowest, traffic, iterations + EXTRA_TURNS)

    def close(self) -> None:
        """Hang up; end what does not end by itself."""
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self._listener.close()
        deadline = time.monotonic() + (END_S if self._files else 0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def teams(lab: NetLab, shape: Shape, systems: Sequence[System]) -> Iterator[list[Team]]:
    """Start the systems; end them whatever happens."""
    with contextlib.ExitStack() as stack:
        started = []
        for number, system in enumerate(systems):
            team = Team(lab, shape, system, number=number)
            stack.callback(team.close)
            started.append(team)
        yield started


def link_shares(turns: Sequence[Turn], shape: Shape, nbytes: int) -> tuple[float, float]:
    """Give bytes over theory for the busiest worker link and server link, as medians."""

    def share(hosts: range, theory: float) -> float:
        return statistics.median(
            max(max(turn.traffic[h].sent, turn.traffic[h].received) for h in hosts)
            / (theory / PAYLOAD_SHARE * turn.iterations)
            for turn in turns
        )

    workers, servers = range(shape.workers), range(shape.workers, shape.hosts)
    return (
        share(workers, shape.worker_bytes(nbytes)),
        share(servers, shape.server_bytes(nbytes)) if servers else math.nan,
    )


def add_rows(
    report: _common.Report, lab: NetLab, shape: Shape, nbytes: int, found: dict[System, list[Turn]]
) -> None:
    """Add one row per system."""
    bound_s = shape.bound_s(nbytes, lab.bytes_per_s)
    gloo = next((system for system in found if not system.is_fastps), None)
    base = [statistics.median(turn.seconds) for turn in found[gloo]] if gloo else []
    for system, turns in found.items():
        times = [statistics.median(turn.seconds) for turn in turns]
        worker, server = link_shares(turns, shape, nbytes)
        ratios = [mine / gloo for mine, gloo in zip(times, base, strict=False)]
        drops = [sum(t.drops_sent + t.drops_received for t in u.traffic) for u in turns]
        has_servers = system.is_fastps and shape.servers > 0
        report.add(
            system.name,
            [1e3 * seconds for seconds in times],
            servers=shape.servers,
            colocated=shape.is_colocated,
            size=format_size(nbytes),
            bound=statistics.median(times) / bound_s,
            gloo=statistics.median(ratios) if ratios else float("nan"),
            worker=worker,
            server=server if has_servers else "",
            drops=statistics.median(drops) / turns[0].iterations,
            **({"settings": system.written} if system.settings else {}),
        )


def parse_variant(text: str) -> System:
    """Read NAME:KEY=VALUE,... as a system."""
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not all(middle for _, middle, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:FASTPS_KEY=VALUE,...")
    return System(name, {key: value for key, _, value in pairs})


def parse_counts(text: str) -> list[int]:
    """Read 0,1,2 as whole numbers."""
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0,1,2")
    return counts


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", "--workers", type=_common.positive, default=4, metavar="N",
                        dest="workers", help="workers, each on a host of its own")  # fmt: skip
    parser.add_argument("--servers", type=parse_counts, default=[4], metavar="K[,K]",
                        help="servers on hosts of their own, e.g. 0,1,2,3,4")  # fmt: skip
    parser.add_argument("--colocate", choices=("auto", "on", "off"), default="auto",
                        help="auto: workers serve too where K < N")  # fmt: skip
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--cc", default="cubic", help="congestion control; empty: the machine's")
    parser.add_argument("--queue-ms", type=float, default=20.0, help="queue of every link")
    parser.add_argument("--sizes", default="64M")
    parser.add_argument("--systems", default="fastps,gloo")
    parser.add_argument("--iterations", type=_common.positive, default=ITERATIONS)
    parser.add_argument("--variant", type=parse_variant, action="append", default=[])
    _common.add_options(parser)
    return parser


def measure(
    report: _common.Report, shape: Shape, systems: Sequence[System], options: argparse.Namespace
) -> None:
    """Measure all systems and sizes in one lab."""
    lab = NetLab(hosts=shape.hosts, rate=options.rate, cc=options.cc, queue_ms=options.queue_ms)
    with lab, teams(lab, shape, systems) as started:
        for nbytes in map(parse_size, options.sizes.split(",")):
            found: dict[System, list[Turn]] = {team.system: [] for team in started}
            for _ in range(options.runs):
                for team in started:
                    found[team.system].append(team.reduce(nbytes, options.iterations))
            add_rows(report, lab, shape, nbytes, found)


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = make_parser().parse_args(arguments)
    if lack := missing():
        sys.stderr.write(f"shaped: {lack}\n")
        return 2
    systems = [System(name) for name in options.systems.split(",") if name] + options.variant
    report = _common.Report("shaped", unit="ms")
    report.conditions |= {
        "workers": options.workers, "rate": options.rate,
        "congestion": options.cc, "queue_ms": options.queue_ms,
    }  # fmt: skip
    shapes = [make_shape(options.workers, count, options.colocate) for count in options.servers]
    with ended_by_signals():
        for shape in shapes:
            measure(report, shape, systems, options)
    report.finish(options.json)
    control = options.cc or "the machine's congestion control"
    print(
        f"{options.workers} workers, each worker and each server on a host of its own; "
        f"{options.rate}, {control}, queues of {options.queue_ms:g} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
