# SPDX-License-Identifier: Apache-2.0
"""Run the program that measures as one worker on each host of a lab, without a launcher."""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.netlab import NetLab, ended_by_signals, missing

ROOT = Path(__file__).parents[2]
SCHEDULER = [sys.executable, "-m", "fastps.server.main", "--role", "scheduler"]
SCHEDULER_PORT = 7600  # of a lab's host its ports are all free


def environment_of(size: int, host: str) -> dict[str, str]:
    """Give what the workers of a job without a launcher need."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FASTPS_SIZE": str(size),
        "FASTPS_NUM_SERVERS": "0",
        "FASTPS_SCHEDULER_HOST": host,
        "FASTPS_SCHEDULER_PORT": str(SCHEDULER_PORT),
        "FASTPS_TOKEN": secrets.token_hex(32),
        "FASTPS_JOB_ID": "bench",
    }


def on_hosts(hosts: int, rate: str, worker: list[str], validators: int = 0) -> int:
    """Run a command as a worker on each host of a lab; give the sum of their exit codes.

    validators: so many of them are. BENCH_BYTES_PER_S tells them what a link carries each way.
    Blocks.
    """
    if lack := missing():
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {lack}")
    started: list[subprocess.Popen[bytes]] = []
    with ended_by_signals(), NetLab(hosts=hosts, rate=rate, cc="cubic") as lab:
        environment = environment_of(hosts - validators, lab.address(0)) | {
            "FASTPS_NUM_VALIDATORS": str(validators),
            "GLOO_SOCKET_IFNAME": "eth0",
            "BENCH_BYTES_PER_S": str(lab.bytes_per_s),
        }
        for number, command in enumerate([SCHEDULER, *[worker] * hosts]):
            host = max(number - 1, 0)
            own = environment | {"FASTPS_HOST": lab.address(host)}
            if host >= hosts - validators:
                own["FASTPS_ROLE"] = "validator"
            started.append(lab.popen(host, command, env=own))
        codes = [process.wait() for process in started[1:]]
    started[0].wait()  # the lab has ended it
    return sum(codes)


def on_each_host(
    parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace], None], *, rate: str
) -> int:
    """Read the command line, and do the work on each host of a lab; give the exit code.

    The program runs itself there with --worker. rate: of the links, by default.
    """
    parser.add_argument("--hosts", type=int, default=4, help="workers (%(default)s)")
    parser.add_argument("--rate", default=rate, help="of the links (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    return on_hosts(options.hosts, options.rate, [sys.executable, *sys.argv, "--worker"])
