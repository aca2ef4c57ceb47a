# SPDX-License-Identifier: Apache-2.0
"""The command line of fastps-run: words to a frozen `Options`, and the help that teaches.

Decides what a user may ask for; starts nothing and reads no environment. Everything after the
first word that is not an option belongs to the user's command and is never looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from fastps.launch.layout import Layout, make_layout

MAX_PER_MACHINE = 4096  # processes of one role
MAX_THREADS = 4096
EPILOG = """\
one machine:
  fastps-run -np 4 python train.py --epochs 3
      four copies of train.py, which add up their gradients in shared memory; no server needed
  fastps-run python train.py
      one worker: for a first try and for debugging
  fastps-run -np 4 --dry-run python train.py
      print what would be started, with the environment (secrets masked), and stop
  fastps-run -np 4 --output-dir logs python train.py
      the same lines on the terminal, and one file per process and stream in logs/
  fastps-run -np 4 --env FASTPS_PARTITION_BYTES=1048576 python train.py
      one more setting for every process; docs/env.md lists them all

one machine with servers, as on a network, over TCP:
  fastps-run -np 2 -s 2 --env FASTPS_SHARED_MEMORY=0 python train.py
      two workers, their gradients added up by two server processes

several machines: make a secret token once, copy it to all of them (it must keep mode 0600), then
run the same command on each, with its own number; machine 0 is the one of --scheduler-host:
  (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)
  fastps-run --machines 2 --machine-rank 0 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4 python train.py
  fastps-run --machines 2 --machine-rank 1 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4 python train.py
      four workers on each; one worker of each machine also adds up a share of the gradients

with a CPU machine: a list has one number for each machine. Two machines with four workers, and a
third one that only adds, which takes much of the traffic off the other two; on the third:
  fastps-run --machine-rank 2 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4,4,0 -s 0,0,1 python train.py

what happens at the end: when every worker ends with code 0, servers and scheduler end, and
fastps-run returns 0; with several machines, the launchers of machine 0 and of those with servers
wait for the workers of the others. When one process fails, all are ended, on other machines as
soon as they next wait for it, and the last lines printed name the first that failed, how it
ended, and what it last wrote to stderr. The exit code is that process's code, or 128 + the signal
that ended it; 124 after --timeout; 127 for a command that does not exist; 2 for wrong settings.
Ctrl-C goes to the workers; a second Ctrl-C ends everything at once.
"""
TOKEN_RECIPE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)"


@dataclasses.dataclass(frozen=True)
class Options:
    """What one run of fastps-run was asked to do; docs at the options of `make_parser`."""

    command: tuple[str, ...]
    layout: Layout = dataclasses.field(default_factory=Layout)
    scheduler_host: str = ""
    scheduler_port: int = 0
    job_id: str = ""
    is_dry_run: bool = False
    output_dir: pathlib.Path | None = None
    log_level: str = "WARNING"
    timeout_s: float | None = None
    start_timeout_s: float | None = None
    grace_s: float = 5.0
    server_threads: int | None = None
    io_threads: int | None = None
    token_file: pathlib.Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    colour: str = "auto"


def parse(arguments: Sequence[str]) -> Options:
    """Make Options of the words after `fastps-run`; SystemExit(2) with the reason if wrong."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if found.hosts is not None:
        parser.error(
            "-H is not supported: run fastps-run on every machine, with its --machine-rank; "
            "fastps-run --help has examples"
        )
    if not command:
        parser.error("no command given; try: fastps-run -np 2 python train.py")
    if command[0].endswith(".py"):
        parser.error(f"a command is expected, not a script; try: python {command[0]}")
    try:
        layout = make_layout(
            found.workers, found.servers, machines=found.machines, machine=found.machine_rank
        )
    except ValueError as error:
        parser.error(str(error))
    if layout.is_spread and not (found.scheduler_host and found.scheduler_port):
        parser.error(
            "several machines need --scheduler-host, an address of machine 0 that the others can "
            "reach, and --scheduler-port, a free port there, the same on all machines; "
            "example: --scheduler-host 10.0.0.1 --scheduler-port 7654"
        )
    return _options(found, command=tuple(command), layout=layout)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is the manual of the command."""
    parser = argparse.ArgumentParser(
        prog="fastps-run",
        usage="fastps-run [-np N] [-s N] [options] command [arguments ...]",
        description="Run a training program as several processes that add up their gradients:\n"
        "on this machine, or on several when started on each of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(parser.add_argument_group("how many"))
    _add_machines(parser.add_argument_group("several machines"))
    _add_limits(parser.add_argument_group("time limits"))
    _add_output(parser.add_argument_group("output"))
    _add_settings(parser.add_argument_group("settings"))
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the worker's program and its arguments, e.g. python train.py --lr 0.1",
    )
    return parser


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-np", "--workers", type=_counts, default=(1,), metavar="N",
        help="worker processes of each machine, copies of the command (default 1); a list such "
        "as 4,4,2 has one number for each machine",
    )  # fmt: skip
    group.add_argument(
        "-s", "--servers", type=_counts, default=(0,), metavar="N",
        help="server processes of each machine, or a list (default 0)",
    )  # fmt: skip
    group.add_argument("-H", "--hosts", default=None, help=argparse.SUPPRESS)
    group.add_argument(
        "--dry-run", action="store_true",
        help="print commands and environment, secrets masked, and start nothing",
    )  # fmt: skip


def _add_machines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--machines", type=_Count(1, 4096), default=None, metavar="N",
        help="number of machines (default: as many as the lists of -np and -s have numbers)",
    )  # fmt: skip
    group.add_argument(
        "--machine-rank", type=_Count(0, 4095), default=None, metavar="N",
        help="number of this machine, from 0; machine 0 has the scheduler",
    )  # fmt: skip
    group.add_argument(
        "--scheduler-host", default="", metavar="HOST",
        help="name or address of machine 0, the same on all machines",
    )  # fmt: skip
    group.add_argument(
        "--scheduler-port", type=_Count(1, 65535), default=0, metavar="PORT",
        help="a port that is free on machine 0, the same on all machines",
    )  # fmt: skip
    group.add_argument(
        "--job-id", default="", metavar="ID",
        help="name of the job, the same on all machines (default: made from the port)",
    )  # fmt: skip
    group.add_argument(
        "--token-file", type=pathlib.Path, default=None, metavar="FILE",
        help="file of mode 0600 with the job's secret token, the same on all machines; else "
        "several machines take it from FASTPS_TOKEN, and one machine makes a new one, which "
        "workers in containers of their own cannot read",
    )  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--timeout", type=_seconds, default=None, metavar="S",
        help="end the whole job with code 124 after so many seconds (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--start-timeout", type=_seconds, default=None, metavar="S",
        help="how long processes wait for each other at the start (FASTPS_START_TIMEOUT_S)",
    )  # fmt: skip
    group.add_argument(
        "--grace", type=_seconds, default=5.0, metavar="S",
        help="seconds between SIGTERM and SIGKILL when processes are ended (default 5)",
    )  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", type=pathlib.Path, default=None, metavar="DIR",
        help="also write DIR/worker-0.stdout, DIR/worker-0.stderr, DIR/server-0.stdout ...",
    )  # fmt: skip
    group.add_argument(
        "--log-level", default="WARNING", type=str.upper, metavar="LEVEL",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        help="DEBUG, INFO, WARNING, ERROR or CRITICAL, for every process (default WARNING)",
    )  # fmt: skip
    group.add_argument(
        "--colour", choices=("auto", "always", "never"), default="auto",
        help="colour the names in front of lines (default auto: on a terminal)",
    )  # fmt: skip


def _add_settings(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--server-threads", type=_Count(0, MAX_THREADS), default=None, metavar="N",
        help="threads of each server that sum large partitions (FASTPS_ENGINE_THREADS)",
    )  # fmt: skip
    group.add_argument(
        "--io-threads", type=_Count(1, MAX_THREADS), default=None, metavar="N",
        help="threads of each process that move bytes (FASTPS_IO_THREADS)",
    )  # fmt: skip
    group.add_argument(
        "--env", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="set a variable for every process; may be given several times",
    )  # fmt: skip


def _options(found: argparse.Namespace, *, command: tuple[str, ...], layout: Layout) -> Options:
    return Options(
        command=command,
        layout=layout,
        scheduler_host=found.scheduler_host,
        scheduler_port=found.scheduler_port,
        job_id=found.job_id,
        is_dry_run=found.dry_run,
        output_dir=found.output_dir,
        log_level=found.log_level,
        timeout_s=found.timeout,
        start_timeout_s=found.start_timeout,
        grace_s=found.grace,
        server_threads=found.server_threads,
        io_threads=found.io_threads,
        token_file=found.token_file,
        environment=tuple(found.env),
        colour=found.colour,
    )


class _Count:
    """Parse a whole number with bounds."""

    def __init__(self, least: int, most: int) -> None:
        self._bounds = (least, most)

    def __call__(self, text: str) -> int:
        least, most = self._bounds
        if not (text.isdecimal() and text.isascii() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)


def _counts(text: str) -> tuple[int, ...]:
    """Parse one count, or one for each machine."""
    return tuple(map(_Count(0, MAX_PER_MACHINE), text.split(",")))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not is_set or not name or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    if name == "FASTPS_TOKEN":
        raise argparse.ArgumentTypeError("a command line can be read by all; use --token-file")
    return name, value
