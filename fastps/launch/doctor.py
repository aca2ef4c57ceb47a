# SPDX-License-Identifier: Apache-2.0
"""The command `fastps`: `fastps doctor` tells what this machine offers to a job.

Looks, and changes nothing, but for --link-pyverbs, which makes one symbolic link. `fastps graph`
stands in graph.py, `fastps timeline` in timeline.py. Threads: none.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastps import config
from fastps.errors import FastPSError
from fastps.launch import graph, timeline
from fastps.transport import rdma, shm, sockets

CPU_TABLE = Path("/proc/cpuinfo")
CPU_FEATURES = ("avx2", "f16c", "fma", "avx512f", "avx512_bf16", "asimd", "sve", "bf16")
MIB = 1 << 20


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(prog="fastps", description="Look after fastps.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="tell what this machine offers to a job")
    doctor.add_argument(
        "--link-pyverbs",
        action="store_true",
        help="let this Python import the distribution's pyverbs, by one symbolic link",
    )
    doctor.set_defaults(run=examine)
    shown = commands.add_parser("graph", help="tell and draw what a graph of workers is worth")
    graph.add_options(shown)
    shown.set_defaults(run=graph.run)
    merged = commands.add_parser("timeline", help="merge what the processes of a job traced")
    timeline.add_options(merged)
    merged.set_defaults(run=timeline.run)
    return parser


def examine(parsed: argparse.Namespace) -> None:
    """Print what there is; raises FastPSError."""
    if parsed.link_pyverbs:
        sys.stdout.write(f"linked {rdma.link_pyverbs()}\n")
    for what, how in findings(config.load()):
        sys.stdout.write(f"{what + ':':17}{how}\n")


def findings(settings: config.Config) -> Iterator[tuple[str, str]]:
    """Yield (what, how it is) of everything that decides how a job runs here."""
    yield "CPUs", f"{len(os.sched_getaffinity(0))} for this process; {cpu_features()}"
    yield "shared memory", shm.can_share() or "works between workers of this machine"
    yield "Unix sockets", _unix_sockets()
    yield "RDMA", _rdma(settings)
    yield "lockable memory", _memory_limit()
    yield "transport", f"FASTPS_TRANSPORT={settings.transport}"


def cpu_features(table: Path = CPU_TABLE) -> str:
    """List the features of the CPU that the sums use, in words."""
    try:
        lines = table.read_text("ascii", "replace").splitlines()
    except OSError:
        return "features unknown"
    words: set[str] = set()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            words.update(flags.split())
    return " ".join(name for name in CPU_FEATURES if name in words) or "no vector features known"


def _unix_sockets() -> str:
    try:
        sock, _ = sockets.listen_unix()
    except (OSError, FastPSError) as error:
        return f"cannot be used: {error}"
    sock.close()
    return "work between processes of this machine"


def _rdma(settings: config.Config) -> str:
    """Say what there is, and whether it carries anything."""
    found = rdma.probe(settings)
    if not found.is_usable:
        return found.describe()
    why = rdma.try_out(settings)
    result = f"but it does not reach itself: {why}" if why else "it reaches itself"
    return f"{found.describe()}; {result}"


def _memory_limit() -> str:
    """Say how much a device may pin."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or rdma.may_lock():
        return "without limit"
    return f"{limit // MIB} MiB (`ulimit -l`); RDMA needs as much as all tensors have"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; give the exit status: 0, or 2 when something is wrong."""
    parsed = make_parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except FastPSError as error:
        sys.stderr.write(f"fastps: {type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
