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

EPILOG = """\
examples:
  fastps-run -np 2 -s 2 python train.py --epochs 3
      two copies of train.py, their gradients summed by two servers
  fastps-run python train.py
      one worker, no server: for a first try and for debugging
  fastps-run -np 4 -s 2 --output-dir logs python train.py
      the same lines on the terminal, and one file per process and stream in logs/
  fastps-run -np 2 -s 1 --dry-run python train.py
      print what would be started, with the environment (secrets masked), and stop
  fastps-run -np 2 -s 2 --env FASTPS_PARTITION_BYTES=1048576 python train.py
      one more setting for every process; docs/env.md lists them all

how many servers: each server adds up a share of the gradients. One per two workers is a good
start on one machine; the workers wait least when -s equals -np and there are cores for all.

what happens at the end: when every worker ends with code 0, servers and scheduler are told to
end, and fastps-run returns 0. When one process fails, all are ended, and the last lines printed
name the first that failed, how it ended, and what it last wrote to stderr. The exit code is that
process's code, or 128 + the signal that ended it; 124 after --timeout; 127 for a command that
does not exist. Ctrl-C goes to the workers; a second Ctrl-C ends everything at once.

All processes run on this machine; starting processes on other machines is not supported.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What one run of fastps-run was asked to do; docs at the options of `make_parser`."""

    command: tuple[str, ...]
    workers: int = 1
    servers: int = 0
    job_id: str = ""
    is_dry_run: bool = False
    output_dir: pathlib.Path | None = None
    log_level: str = "WARNING"
    timeout_s: float | None = None
    start_timeout_s: float | None = None
    grace_s: float = 5.0
    server_threads: int | None = None
    io_threads: int | None = None
    has_token_file: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    colour: str = "auto"


def parse(arguments: Sequence[str]) -> Options:
    """Make Options of the words after `fastps-run`; SystemExit(2) with the reason if wrong."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if found.hosts is not None:
        parser.error(
            "-H is not supported: all processes run on this machine. On several machines start "
            "fastps-server and your program by hand; docs/env.md names the settings"
        )
    if not command:
        parser.error("no command given; try: fastps-run -np 2 -s 2 python train.py")
    if command[0].endswith(".py"):
        parser.error(f"a command is expected, not a script; try: python {command[0]}")
    if found.workers > 1 and found.servers == 0:
        parser.error("several workers need at least one server to add up gradients; try: -s 1")
    servers = default_servers(found.workers) if found.servers is None else found.servers
    return _options(found, command=tuple(command), servers=servers)


def default_servers(workers: int) -> int:
    """Give the number of servers when the user names none: one per two workers, none for one."""
    return 0 if workers == 1 else (workers + 1) // 2


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is the manual of the command."""
    parser = argparse.ArgumentParser(
        prog="fastps-run",
        usage="fastps-run [-np N] [-s N] [options] command [arguments ...]",
        description="Run a training program as several processes on this machine, with servers "
        "that add up their gradients.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(parser.add_argument_group("how many"))
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
        "-np", "--workers", type=_Count(1), default=1, metavar="N",
        help="worker processes, each a copy of the command (default 1)",
    )  # fmt: skip
    group.add_argument(
        "-s", "--servers", type=_Count(0), default=None, metavar="N",
        help="server processes (default: half the workers, rounded up; none for one worker)",
    )  # fmt: skip
    group.add_argument("-H", "--hosts", default=None, help=argparse.SUPPRESS)
    group.add_argument(
        "--dry-run", action="store_true",
        help="print commands and environment, secrets masked, and start nothing",
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
        "--server-threads", type=_Count(0), default=None, metavar="N",
        help="threads of each server that sum large partitions (FASTPS_ENGINE_THREADS)",
    )  # fmt: skip
    group.add_argument(
        "--io-threads", type=_Count(1), default=None, metavar="N",
        help="threads of each process that move bytes (FASTPS_IO_THREADS)",
    )  # fmt: skip
    group.add_argument(
        "--env", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="set a variable for every process; may be given several times",
    )  # fmt: skip
    group.add_argument("--job-id", default="", metavar="ID", help="name of the job (default: new)")
    group.add_argument(
        "--token-file", action="store_true",
        help="hand the job's secret token on in a file that only you can read (mode 0600) "
        "instead of the environment",
    )  # fmt: skip


def _options(found: argparse.Namespace, *, command: tuple[str, ...], servers: int) -> Options:
    return Options(
        command=command,
        workers=found.workers,
        servers=servers,
        job_id=found.job_id,
        is_dry_run=found.dry_run,
        output_dir=found.output_dir,
        log_level=found.log_level,
        timeout_s=found.timeout,
        start_timeout_s=found.start_timeout,
        grace_s=found.grace,
        server_threads=found.server_threads,
        io_threads=found.io_threads,
        has_token_file=found.token_file,
        environment=tuple(found.env),
        colour=found.colour,
    )


class _Count:
    """Parse a whole number with a lower bound."""

    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self._least <= int(text) <= 4096:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {self._least} to 4096"
            )
        return int(text)


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
    return name, value
