# SPDX-License-Identifier: Apache-2.0
"""The command line of fastps-run: words to a frozen `Options`, and the help that teaches.

Decides what a user may ask for; starts nothing and reads no environment. Everything after the
first word that is not an option belongs to the user's command and is never looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from fastps.config.versions import ShowVersion
from fastps.config.words import add_words, count, number, word
from fastps.launch.foreign_flags import (
    ADVICE,
    HOSTFILE,
    INTERFACES,
    MACHINES_TOO,
    PER_MACHINE,
    RANK_TOO,
    add_advice,
    field_of,
    left_out,
    timeline_of,
)
from fastps.launch.hosts import (
    Host,
    check_all_have_work,
    parse_hostfile,
    parse_hosts,
    place,
    share,
)
from fastps.launch.layout import Layout, make_layout

HOW_MANY, MACHINES = "how many", "several machines"  # titles in the help
_NOT_OPTIONS = ("command", "workers", "servers", "validators", "machines", "machine_rank",
                "host_list", "hostfile", "total")  # fmt: skip
EPILOG = """\
one machine:
  fastps-run -np 4 python train.py --epochs 3
      four copies of train.py, which add up their gradients in shared memory; no server needed
  fastps-run python train.py
      one worker: for a first try and for debugging; it reads your terminal, so breakpoint() works
  fastps-run -np 4 --dry-run python train.py
      print what would be started, with the environment (secrets masked), and stop
  fastps-run -np 4 --output-dir logs python train.py
      the same lines on the terminal, and one file per process and stream in logs/
  fastps-run -np 4 --timeline job.json python train.py
      where the time goes, for ui.perfetto.dev or chrome://tracing
  fastps-run -np 4 --env FASTPS_PARTITION_BYTES=1048576 python train.py
      one more setting for every process; docs/env.md lists them all

one machine with servers, as on a network, over TCP:
  fastps-run -np 2 -s 2 --env FASTPS_SHARED_MEMORY=0 python train.py
      two workers, their gradients added up by two server processes

several machines by one command, over ssh, which must get in without a question (ssh-copy-id), with
the same folder and the same Python on all; the token goes through ssh's standard input:
  fastps-run -H a:4,b:4,c:0+1 python train.py
      four workers on a and on b, and one server on c, which only adds; lines come as [b worker 5],
      and what ends one machine's share ends all
  fastps-run --hostfile hosts python train.py
      the same from a file with a line for each host, such as `a slots=4`
  fastps-run -np 4 python train.py
      within salloc or sbatch of several nodes: four on each of them, started by srun

several machines, each with a command of its own: make a secret token once, copy it to all of them
(it must keep mode 0600), then run it on each, with its own number; machine 0 is the one of
--scheduler-host:
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
that ended it; 124 after --timeout; 127 for a command that does not exist; 2 for wrong settings; 1
where several workers end well that trained, or asked to join, and never were in one job together.
Ctrl-C goes to the workers; a second Ctrl-C ends everything at once. SIGUSR1, SIGUSR2 and SIGALRM,
such as SLURM's --signal=B:USR1@60, go to the workers on all machines and end nothing here.
"""
TOKEN_RECIPE = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)"


_seconds = number("a positive number of seconds", float, 1e-6, 1e9)


def _counts(text: str) -> tuple[int, ...]:
    """Parse one count, or one for each machine."""
    return tuple(map(count(0, 4096), text.split(",")))


def _judges(text: str) -> tuple[int, ...]:
    """Parse numbers of validators, which -v is of here and not in bfrun and horovodrun."""
    try:
        return _counts(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}: -v says how many validators; -v alone, or --version, gives the version"
        ) from None


def _interface(text: str) -> tuple[str, str]:
    if "," in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: one name, or a network as 10.0.0.0/24 that is on all machines"
        )
    return "FASTPS_INTERFACE", text


def _timeline(text: str) -> pathlib.Path:
    return _file(timeline_of(text))


def _file(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, and a file is to be written")
    return path


def _setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not is_set or not name or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    if name == "FASTPS_TOKEN":
        raise argparse.ArgumentTypeError("a command line can be read by all; use --token-file")
    return name, value


# fmt: off
@dataclasses.dataclass(frozen=True)
class Options:
    """What one run of fastps-run was asked to do."""

    command: tuple[str, ...]
    layout: Layout = dataclasses.field(default_factory=Layout)
    is_dry_run: bool = word(HOW_MANY, "--dry-run", False, bool, "",
        "print commands and environment, secrets masked, and start nothing")
    on_loss: str | None = word(HOW_MANY, "--on-loss", None, str, "WHAT",
        "fail or reweight: end the job when a worker fails (default), or let the others, who "
        "average with neighbors or train what servers hold, go on without it (FASTPS_ON_LOSS)",
        choices=("fail", "reweight"))
    scheduler_host: str = word(MACHINES, "--scheduler-host --master-addr --master_addr", "",
        str, "HOST",
        "name or address of machine 0, the same on all machines (-H finds one)")
    scheduler_port: int = word(MACHINES, "--scheduler-port --master-port --master_port", 0,
        count(1, 65535), "PORT",
        "a port that is free on machine 0, the same on all machines (-H finds one)")
    hosts: tuple[Host, ...] = ()
    is_placed: bool = True  # the user has said which machines
    is_counted: bool = True  # the user has said how many workers
    has_srun: bool = False  # the hosts are nodes of our allocation
    ssh_port: int | None = word(MACHINES, "--ssh-port -p", None, count(1, 65535), "PORT",
        "port of the ssh servers of -H")
    ssh_identity: pathlib.Path | None = word(MACHINES, "--ssh-identity-file", None, pathlib.Path,  # noqa: RUF009
        "FILE", "private key that ssh shall use for -H")
    ssh_args: str = word(MACHINES, "--ssh-args", "", str, "WORDS",
        "more words for ssh, as one, e.g. --ssh-args='-F my_config'")
    remote_python: str = word(MACHINES, "--remote-python", "", str, "PATH",
        "the Python of the hosts of -H (default: this one's path)")
    job_id: str = word(MACHINES, "--job-id", "", str, "ID",
        "name of the job, the same on all machines (default: made from the port)")
    token_file: pathlib.Path | None = word(MACHINES, "--token-file", None, pathlib.Path, "FILE",  # noqa: RUF009
        "file of mode 0600 with the job's secret token, the same on all machines; else several "
        "machines take it from FASTPS_TOKEN, and one machine makes a new one, which workers in "
        "containers of their own cannot read")
    timeout_s: float | None = word("time limits", "--timeout", None, _seconds, "S",
        "end the whole job with code 124 after so many seconds (default: no limit)")
    has_gdb: bool = word(HOW_MANY, "--gdb", False, bool, "",
        "run the workers under gdb, which shows where one crashed (FASTPS_ENABLE_GDB)")
    restarts: int = word(HOW_MANY, "--restarts", 0, count(0, 1000000), "N",
        "start the whole job again when a process of it fails, up to so many times, after 1 s, "
        "2 s, 4 s and so on; the program goes on from its own checkpoint, or from what "
        "elastic training has committed (one machine, or -H with FASTPS_COMMIT_DIR)")
    start_timeout_s: float | None = word("time limits", "--start-timeout", None, _seconds, "S",
        "how long processes wait for each other at the start (FASTPS_START_TIMEOUT_S)")
    grace_s: float = word("time limits", "--grace", 5.0, _seconds, "S",
        "seconds between SIGTERM and SIGKILL when processes are ended (default 5); also for what "
        "ended workers leave, such as an uploader, which gets SIGTERM a second after them")
    output_dir: pathlib.Path | None = word("output", "--output-dir", None, pathlib.Path, "DIR",  # noqa: RUF009
        "also write DIR/worker-0.stdout, DIR/worker-0.stderr, DIR/server-0.stdout ...")
    timeline: pathlib.Path | None = word("output", "--timeline", None, _file, "FILE",  # noqa: RUF009
        "write a timeline of every stage of the job, for ui.perfetto.dev or chrome://tracing")
    has_no_live: bool = word("output", "--no-live", False, bool, "",
        "show no line about the pace of the job on a terminal; `fastps top` tells more")
    log_level: str = word("output", "--log-level", "", str.upper, "LEVEL",
        "DEBUG, INFO, WARNING, ERROR or CRITICAL, for every process (default: FASTPS_LOG_LEVEL, "
        "else WARNING)",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    colour: str = word("output", "--colour", "auto", str, "WHEN",
        "auto, always or never: colour the names in front of lines (default auto: on a terminal)",
        choices=("auto", "always", "never"))
    server_threads: int | None = word("settings", "--server-threads", None, count(0, 4096), "N",
        "threads of each server that sum large partitions (FASTPS_ENGINE_THREADS)")
    io_threads: int | None = word("settings", "--io-threads", None, count(1, 4096), "N",
        "threads of each process that move bytes (FASTPS_IO_THREADS)")
    environment: tuple[tuple[str, str], ...] = word("settings", "--env", (), _setting,
        "NAME=VALUE", "set a variable for every process; may be given several times",
        action="append")
    # fmt: on


def parse(arguments: Sequence[str]) -> Options:
    """Make Options of the words after `fastps-run`; SystemExit(2) with the reason if wrong."""
    parser = make_parser()
    is_version = list(arguments) == ["-v"]  # as bfrun has it; with a number it is of validators
    found = vars(parser.parse_args(["--version"] if is_version else arguments))
    for sentence in left_out(found):
        sys.stderr.write(f"{parser.prog}: {sentence}\n")
    for flag, advice in ADVICE.items():
        if found.pop(field_of(flag), None) is not None:
            parser.error(f"{flag} is not needed here: {advice}")
    command, workers, servers, judges, machines, machine, listed, hostfile, total = map(
        found.pop, _NOT_OPTIONS
    )
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        parser.error("no command given; try: fastps-run -np 2 python train.py")
    if command[0].endswith(".py"):
        parser.error(f"a command is expected, not a script; try: python {command[0]}")
    try:
        hosts = _hosts(listed, hostfile)
        if hosts:
            _check_alone(machines, machine, hosts)
            layout = place(hosts, workers, servers, judges, total=total)
            hosts = hosts[: len(layout.workers)]
            check_all_have_work(layout, hosts)
            layout = dataclasses.replace(layout, names=tuple(host.address for host in hosts))
        else:
            workers = share(total, workers, machines or 1) if total is not None else workers
            counts = (workers or (1,), servers or (0,), judges or (0,))
            layout = make_layout(*counts, machines=machines, machine=machine)
    except ValueError as error:
        parser.error(str(error))
    is_placed = bool(hosts) or machine is not None or machines is not None or layout.is_spread
    found |= {"hosts": hosts, "is_placed": is_placed, "is_counted": workers is not None}
    options = Options(command=tuple(command), layout=layout, **found)
    if hosts:
        return options
    if layout.is_spread and options.restarts:
        parser.error("--restarts is for one machine; let what starts the launchers restart them")
    if layout.is_spread and not (options.scheduler_host and options.scheduler_port):
        parser.error(
            "several machines need --scheduler-host, an address of machine 0 that the others can "
            "reach, and --scheduler-port, a free port there, the same on all machines; "
            "example: --scheduler-host 10.0.0.1 --scheduler-port 7654"
        )
    return options


def _hosts(listed: str | None, hostfile: pathlib.Path | None) -> tuple[Host, ...]:
    """Read -H or --hostfile; ValueError says what is wrong with it."""
    if listed is not None and hostfile is not None:
        raise ValueError("-H and --hostfile both name the hosts: give one of them")
    if listed is not None:
        return parse_hosts(listed)
    if hostfile is None:
        return ()
    try:
        return parse_hostfile(hostfile.read_text("utf-8"), str(hostfile))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--hostfile {hostfile} cannot be read: {error}") from None


def _check_alone(machines: int | None, machine: int | None, hosts: Sequence[Host]) -> None:
    if machine is not None:
        raise ValueError(
            "-H starts all machines from here; --machine-rank is for one command on each: leave "
            "one of them out"
        )
    if machines not in (None, len(hosts)):
        raise ValueError(f"--machines {machines}, but there are {len(hosts)} hosts: leave it out")


def _add_others_words(group: argparse._ArgumentGroup) -> None:
    """Add words of other launchers that mean something here; --help does not list them."""
    group.add_argument("--verbose", dest="log_level", action="store_const", const="INFO",
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    group.add_argument("--timeline-filename", dest="timeline", type=_timeline,
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    group.add_argument(*INTERFACES, dest="environment", type=_interface, action="append",
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; its help is the manual of the command."""
    parser = argparse.ArgumentParser(
        prog="fastps-run",
        usage="fastps-run [-np N] [-s N] [options] command [arguments ...]",
        description="Run a training program as several processes that add up their gradients:\n"
        "on this machine, on several over ssh, or on several when started on each.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion)
    # what becomes the layout
    here, all_of_them = parser.add_argument_group(HOW_MANY), parser.add_argument_group(MACHINES)
    here.add_argument(
        "-np", "--workers", *PER_MACHINE, type=_counts, default=None, metavar="N",
        help="worker processes of each machine, copies of the command (default 1); a list such "
        "as 4,4,2 has one number for each machine",
    )  # fmt: skip
    here.add_argument(
        "-s", "--servers", type=_counts, default=None, metavar="N",
        help="server processes of each machine, or a list (default 0)",
    )  # fmt: skip
    here.add_argument(
        "-v", "--validators", type=_judges, default=None, metavar="N",
        help="validators of each machine, or a list (default 0): trusted copies of the command, "
        "which judge what workers send (docs/byzantine.md)",
    )  # fmt: skip
    here.add_argument(
        "-n", "--num-proc", dest="total", type=count(1, 4096), default=None, metavar="N",
        help="worker processes of the whole job, for mpirun's and horovodrun's users",
    )  # fmt: skip
    add_advice(here)
    _add_others_words(here)
    all_of_them.add_argument(
        "-H", "--hosts", "--host", dest="host_list", default=None, metavar="LIST",
        help="start the job on these machines by ssh: a:4,b:4,c:0+1 is HOST:WORKERS, or "
        "HOST:WORKERS+SERVERS; also user@host and [fd00::1]:4",
    )  # fmt: skip
    all_of_them.add_argument(
        *HOSTFILE, dest="hostfile", type=pathlib.Path, default=None, metavar="FILE",
        help="the same from a file with a host on each line: a slots=4, or a:4",
    )  # fmt: skip
    all_of_them.add_argument(
        "--machines", *MACHINES_TOO, type=count(1, 4096), default=None, metavar="N",
        help="number of machines (default: as many as the lists of -np and -s have numbers)",
    )  # fmt: skip
    all_of_them.add_argument(
        "--machine-rank", *RANK_TOO, type=count(0, 4095), default=None, metavar="N",
        help="number of this machine, from 0; machine 0 has the scheduler",
    )  # fmt: skip
    add_words(parser, Options)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the worker's program and its arguments, e.g. python train.py --lr 0.1",
    )
    return parser
