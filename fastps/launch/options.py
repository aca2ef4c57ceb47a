# SPDX-License-Identifier: Apache-2.0
"""The command line of fastps-run: parse arguments into a frozen `Options`; the help text.

Decides what a user may ask for; starts nothing and reads no environment. Everything after the
first argument that is not an option belongs to the user's command and is not parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from fastps.config import MAX_PROCESSES, nearest
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
    remove_ignored,
    timeline_of,
)
from fastps.launch.hosts import (
    Host,
    check_all_have_work,
    parse_hostfile,
    parse_hosts,
    place,
    split_evenly,
)
from fastps.launch.layout import Layout, make_layout

FIRST_OF_OTHERS = 1 << 15  # rank from which workers are that join jobs of other launchers

HOW_MANY, MACHINES = "how many", "several machines"  # titles in the help
_NOT_OPTIONS = ("command", "workers", "servers", "validators", "machines", "machine_rank",
                "host_list", "hostfile", "total")  # fmt: skip
EPILOG = """\
one machine:
  fastps-run -np 4 python train.py --epochs 3
      four copies of train.py that sum their gradients in shared memory; no server is needed
  fastps-run python train.py
      one worker, to debug with: it reads your terminal, so breakpoint() works
  fastps-run -np 4 --dry-run python train.py
      print commands and environment (secrets masked), and start nothing
  fastps-run -np 4 --output-dir logs python train.py
      also write the output of each process and stream into a file in logs/
  fastps-run -np 4 --timeline job.json python train.py
      record where the time goes, for ui.perfetto.dev or chrome://tracing
  fastps-run -np 4 --env FASTPS_PARTITION_BYTES=1048576 python train.py
      set a variable for every process; docs/env.md lists all settings

one machine with servers, over TCP as on a network:
  fastps-run -np 2 -s 2 --env FASTPS_SHARED_MEMORY=0 python train.py
      two workers and two server processes that sum their gradients

several machines from one command, over ssh. ssh must log in without a password (ssh-copy-id), and
all machines need the same folder and the same Python; the token goes through ssh's standard input:
  fastps-run -H a:4,b:4,c:0+1 python train.py
      four workers on a, four on b, and one server on c; output lines are marked [b worker 5], and
      a failure on one machine ends the job on all
  fastps-run --hostfile hosts python train.py
      the same, from a file with one line per host, such as `a slots=4`
  fastps-run -np 4 python train.py
      within salloc or sbatch of several nodes: four workers on each node, started by srun

several machines, with one command on each. Make a secret token once, copy it to all machines (it
must keep mode 0600), then run the command on each with its own --machine-rank; machine 0 is the
one of --scheduler-host:
  (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > job.token)
  fastps-run --machines 2 --machine-rank 0 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4 python train.py
  fastps-run --machines 2 --machine-rank 1 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4 python train.py
      four workers on each; one worker of each machine also serves a share of the gradients

with a CPU machine: a list has one number per machine. Two machines have four workers each, and
the third one has a server, which relieves the network of the other two; on the third machine:
  fastps-run --machine-rank 2 --scheduler-host 10.0.0.1 --scheduler-port 7654 \\
      --token-file job.token -np 4,4,0 -s 0,0,1 python train.py

how a job ends: when every worker ends with code 0, servers and scheduler end, and fastps-run
returns 0. With several machines, the launchers of machine 0 and of machines with servers wait for
the workers of the others. When one process fails, all others are ended, on other machines as soon
as they next wait for it. The last line names the process that failed first, how it ended, and the
last line it wrote to stderr. The exit code is that process's code, or 128 + the signal that ended
it; 124 after --timeout; 127 for a command that does not exist; 2 for wrong settings; 1 if several
workers end with code 0 but never joined one job, although they trained or tried to join.
Ctrl-C goes to the workers; a second Ctrl-C ends everything at once. SIGUSR1, SIGUSR2 and SIGALRM,
such as SLURM's --signal=B:USR1@60, are forwarded to the workers on all machines.
"""


_seconds = number("a positive number of seconds", float, 1e-6, 1e9)


def _counts(text: str) -> tuple[int, ...]:
    """Parse one count, or a list with one for each machine."""
    return tuple(map(count(0, 4096), text.split(",")))


def _validators(text: str) -> tuple[int, ...]:
    """Parse numbers of validators; in bfrun and horovodrun -v has another meaning."""
    try:
        return _counts(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; -v is the number of validators, -v alone or --version shows the version"
        ) from None


def _interface(text: str) -> tuple[str, str]:
    if "," in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} names several networks; give one interface, or one network that all "
            "machines have, such as 10.0.0.0/24"
        )
    return "FASTPS_INTERFACE", text


def _file(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    return path


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT; give the address of the job's scheduler, such as "
            "10.0.0.1:7654"
        )
    return host.strip("[]"), int(port)


def _setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not is_set or not name or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE; write a variable like --env OMP_NUM_THREADS=1"
        )
    if name == "FASTPS_TOKEN":
        raise argparse.ArgumentTypeError(
            "other users can read a token on a command line; use --token-file"
        )
    return name, value


# fmt: off
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one run of fastps-run."""

    command: tuple[str, ...]
    layout: Layout = dataclasses.field(default_factory=Layout)
    is_dry_run: bool = word(HOW_MANY, "--dry-run", False, bool, "",
        "print commands and environment (secrets masked), and start nothing")
    on_loss: str | None = word(HOW_MANY, "--on-loss", None, str, "WHAT",
        "fail (default): end the job when a worker fails; reweight: let the others continue, if "
        "they average with neighbors or train parameters of servers (FASTPS_ON_LOSS)",
        choices=("fail", "reweight"))
    elastic_min: int | None = word(HOW_MANY, "--min --min-np", None, count(1, 65536), "N",
        "go on with the others when workers or servers are lost, as long as N workers are left "
        "(FASTPS_ELASTIC_MIN; default: a loss ends the job)")
    elastic_max: int | None = word(HOW_MANY, "--max --max-np", None, count(1, 65536), "N",
        "with --min: let workers join the running job, up to N (FASTPS_ELASTIC_MAX; default: "
        "nobody joins)")
    respawn: int = word(HOW_MANY, "--respawn", 0, count(0, 1000000), "N",
        "with --min: start a worker instead of each lost one, up to N times on each machine; it "
        "joins at the next commit() of elastic.run")
    spares: int = word(HOW_MANY, "--spares", 0, count(0, 4096), "N",
        "with --min: start N more workers on each machine, which warm up and wait until one is "
        "lost; they join at the next commit() of elastic.run")
    view_log: str | None = word(HOW_MANY, "--view-log", None, str, "FILE",
        "with --min: write a line for each loss, which says who contributed to what "
        "(FASTPS_VIEW_LOG)")
    replay: str | None = word(HOW_MANY, "--replay", None, str, "FILE",
        "with --min: make a job again from its --view-log, with the same losses and the same bits "
        "(FASTPS_REPLAY)")
    scheduler_host: str = word(MACHINES, "--scheduler-host --master-addr --master_addr", "",
        str, "HOST",
        "name or address of machine 0, the same on all machines (chosen automatically with -H)")
    scheduler_port: int = word(MACHINES, "--scheduler-port --master-port --master_port", 0,
        count(1, 65535), "PORT",
        "a free port of machine 0, the same on all machines (chosen automatically with -H)")
    join: tuple[str, int] | None = word(MACHINES, "--join", None, _address, "HOST:PORT",
        "start workers that join a running job of --max: the address of its scheduler; they need "
        "its --token-file, and its --job-id if it has one")
    host_script: str = word(MACHINES, "--host-discovery-script", "", str, "SCRIPT",
        "with --min and --max: run the job by ssh on the hosts that the script lists, a line "
        "such as a:4 for each; it runs each second, workers join on new hosts, and leave those "
        "that have vanished")
    hosts: tuple[Host, ...] = ()
    n_at_start: int = 0  # least number of workers with which a job of host_script begins
    is_placed: bool = True  # the user has named the machines
    is_counted: bool = True  # the user has given a number of workers
    has_srun: bool = False  # the hosts are nodes of our SLURM allocation
    ssh_port: int | None = word(MACHINES, "--ssh-port -p", None, count(1, 65535), "PORT",
        "port of the ssh servers of -H")
    ssh_identity: pathlib.Path | None = word(MACHINES, "--ssh-identity-file", None, pathlib.Path,  # noqa: RUF009
        "FILE", "private key of ssh for -H")
    ssh_args: str = word(MACHINES, "--ssh-args", "", str, "WORDS",
        "more arguments for ssh, as one word, such as --ssh-args='-F my_config'")
    remote_python: str = word(MACHINES, "--remote-python", "", str, "PATH",
        "path of Python on the hosts of -H (default: the path of this one)")
    job_id: str = word(MACHINES, "--job-id", "", str, "ID",
        "name of the job, the same on all machines (default: made from the port)")
    token_file: pathlib.Path | None = word(MACHINES, "--token-file", None, pathlib.Path, "FILE",  # noqa: RUF009
        "file of mode 0600 with the job's secret token, the same on all machines (default: "
        "FASTPS_TOKEN on several machines, a new token on one); workers in containers of their "
        "own need such a file")
    timeout_s: float | None = word("time limits", "--timeout", None, _seconds, "S",
        "end the whole job with code 124 after so many seconds (default: no limit)")
    has_gdb: bool = word(HOW_MANY, "--gdb", False, bool, "",
        "run the workers under gdb, which shows where one crashed (FASTPS_ENABLE_GDB)")
    restarts: int = word(HOW_MANY, "--restarts", 0, count(0, 1000000), "N",
        "start the whole job again when a process fails, up to N times, after 1 s, 2 s, 4 s and "
        "so on; the program continues from its own checkpoint, or from the last commit of elastic "
        "training (one machine, or -H with FASTPS_COMMIT_DIR)")
    start_timeout_s: float | None = word("time limits", "--start-timeout", None, _seconds, "S",
        "how long processes wait for each other at the start (FASTPS_START_TIMEOUT_S)")
    grace_s: float = word("time limits", "--grace", 5.0, _seconds, "S",
        "seconds between SIGTERM and SIGKILL when processes are ended (default 5); also for "
        "processes that workers leave, such as an uploader, which get SIGTERM a second later")
    output_dir: pathlib.Path | None = word("output", "--output-dir", None, pathlib.Path, "DIR",  # noqa: RUF009
        "also write DIR/worker-0.stdout, DIR/worker-0.stderr, DIR/server-0.stdout ...")
    timeline: pathlib.Path | None = word("output", "--timeline", None, _file, "FILE",  # noqa: RUF009
        "write a timeline of every stage of the job, for ui.perfetto.dev or chrome://tracing")
    has_no_live: bool = word("output", "--no-live", False, bool, "",
        "do not show the job's pace in the last line of a terminal; `fastps top` shows more")
    log_level: str = word("output", "--log-level", "", str.upper, "LEVEL",
        "DEBUG, INFO, WARNING, ERROR or CRITICAL, for every process (default: FASTPS_LOG_LEVEL, "
        "else WARNING)",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    colour: str = word("output", "--colour", "auto", str, "WHEN",
        "auto, always or never: colour the names in front of lines (default auto: on a terminal)",
        choices=("auto", "always", "never"))
    encrypt: str = word("settings", "--encrypt", "", str, "WHEN",
        "auto, on, integrity or off: encrypt TCP between machines, or all of it (FASTPS_ENCRYPT)",
        choices=("auto", "on", "integrity", "off"))
    server_threads: int | None = word("settings", "--server-threads", None, count(0, 4096), "N",
        "threads of each server that sum large partitions (FASTPS_ENGINE_THREADS)")
    io_threads: int | None = word("settings", "--io-threads", None, count(1, 4096), "N",
        "threads of each process that send and receive (FASTPS_IO_THREADS)")
    environment: tuple[tuple[str, str], ...] = word("settings", "--env", (), _setting,
        "NAME=VALUE", "set a variable for every process; may be repeated",
        action="append")
    # fmt: on

    @property
    def is_open(self) -> bool:
        """Return whether processes of other machines are, or may come to be, in the job."""
        is_named = bool(self.elastic_max and self.scheduler_host and self.scheduler_port)
        return self.layout.is_spread or is_named or bool(self.host_script)


def parse(arguments: Sequence[str]) -> Options:
    """Parse the arguments of `fastps-run`; SystemExit(2) with the reason if they are wrong."""
    parser = make_parser()
    is_version = list(arguments) == ["-v"]  # as in bfrun; -v N is a number of validators
    parsed, unknown = parser.parse_known_args(["--version"] if is_version else arguments)
    if unknown:
        known = re.findall(r"--[a-z][\w-]+", parser.format_help())
        parser.error(f"unknown arguments: {' '.join(unknown)}{nearest(unknown[0], known)}")
    found = vars(parsed)
    for sentence in remove_ignored(found):
        sys.stderr.write(f"{parser.prog}: {sentence}\n")
    for flag, advice in ADVICE.items():
        if found.pop(field_of(flag), None) is not None:
            parser.error(f"{flag} is not needed here: {advice}")
    command, workers, servers, validators, machines, machine, listed, hostfile, total = map(
        found.pop, _NOT_OPTIONS
    )
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        parser.error("no command given; try: fastps-run -np 2 python train.py")
    if command[0].endswith(".py"):
        parser.error(f"give a command, not a script; try: fastps-run python {command[0]}")
    try:
        hosts = _hosts(listed, hostfile)
        if total is not None and workers is not None:
            raise ValueError(
                "-np is the number of workers of each machine and -n of the whole job; give one "
                "of them"
            )
        if found.get("host_script"):
            others = (hosts, machines, machine, servers, validators)
            _check_discovery(found, is_alone=all(one in (None, ()) for one in others))
        if hosts:
            _check_alone(machines, machine, hosts)
            layout = place(hosts, workers, servers, validators, total=total)
            hosts = hosts[: len(layout.workers)]
            check_all_have_work(layout, hosts)
            layout = dataclasses.replace(layout, names=tuple(host.address for host in hosts))
        else:
            if total is not None and not found.get("host_script"):
                workers = split_evenly(total, machines or 1)
            counts = (workers or (1,), servers or (0,), validators or (0,))
            layout = make_layout(*counts, machines=machines, machine=machine)
        if found.get("join"):
            layout = _joining(layout, found, is_placed=bool(hosts) or machine is not None)
    except ValueError as error:
        parser.error(str(error))
    is_placed = bool(hosts) or machine is not None or machines is not None or layout.is_spread
    found |= {"hosts": hosts, "is_placed": is_placed, "is_counted": workers is not None}
    if found.get("host_script"):
        found |= {"is_placed": True, "n_at_start": max(total or found["elastic_min"], 2)}
    options = Options(command=tuple(command), layout=layout, **found)
    if options.spares:
        _check_spares(options, parser)
    if hosts or options.host_script:
        return options
    if layout.is_spread and options.restarts:
        parser.error(
            "--restarts works on one machine or with -H; here restart fastps-run on all machines"
        )
    if layout.is_spread and not (options.scheduler_host and options.scheduler_port):
        parser.error(
            "several machines need --scheduler-host, an address of machine 0 that the others can "
            "reach, and --scheduler-port, a free port there, the same on all machines; "
            "example: --scheduler-host 10.0.0.1 --scheduler-port 7654"
        )
    return options


def _check_discovery(found: dict[str, Any], *, is_alone: bool) -> None:
    if not is_alone:
        raise ValueError(
            "--host-discovery-script lists the hosts and their numbers of workers; leave out -s, "
            "-v, -H, --hostfile, --machines and --machine-rank"
        )
    if not (found.get("elastic_min") and found.get("elastic_max")):
        raise ValueError(
            "--host-discovery-script needs --min and --max, the least and the largest number of "
            "workers, since hosts come and go"
        )
    for name in ("join", "spares", "is_dry_run"):
        if found.get(name):
            raise ValueError(
                f"--{name.removeprefix('is_').replace('_', '-')} does not go with "
                "--host-discovery-script, whose hosts are not known before; leave it out (workers "
                "beyond --max wait as spares)"
            )


def _check_spares(options: Options, parser: argparse.ArgumentParser) -> None:
    n_workers, most = options.layout.size, options.elastic_max
    if options.join is not None:
        parser.error("--spares is for the command that starts the job; with --join give -np N: "
                     "those that find --max workers wait as spares too")  # fmt: skip
    if options.elastic_min is None:
        parser.error("--spares needs --min, since a loss ends other jobs; add --min N, the number "
                     "of workers with which training goes on")  # fmt: skip
    if not options.layout.needs_scheduler:
        parser.error("--spares needs a job of two or more workers; raise -np")
    if most is not None and most > n_workers:
        parser.error(
            f"--max {most} lets more than the {n_workers} workers of the start train, so that "
            "spares would not wait; leave --max out, or start as many workers as that"
        )


def joining_layout(n_workers: int) -> Layout:
    """Lay out workers of one machine that join a job elsewhere.

    A rank has a token, which lets one process in at a time: these have ranks that no other has.
    """
    first = FIRST_OF_OTHERS + secrets.randbelow(MAX_PROCESSES - FIRST_OF_OTHERS - n_workers)
    return Layout((0, n_workers), (0, 0), 1, (0, 0), first=first)


def _joining(layout: Layout, found: dict[str, Any], *, is_placed: bool) -> Layout:
    """Lay out workers of this machine that join a job elsewhere. Raises ValueError."""
    if is_placed or layout.is_spread or layout.num_servers or layout.num_validators:
        raise ValueError(
            "--join starts workers of this machine alone; give -np N, and neither servers nor "
            "other machines"
        )
    found["scheduler_host"], found["scheduler_port"] = found["join"]
    return joining_layout(layout.size)


def _hosts(listed: str | None, hostfile: pathlib.Path | None) -> tuple[Host, ...]:
    """Parse -H or --hostfile. Raises ValueError with a sentence for the user."""
    if listed is not None and hostfile is not None:
        raise ValueError("-H and --hostfile both name the hosts; give one of them")
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
            "-H starts all machines from here; --machine-rank is for one command on each; leave "
            "one of them out"
        )
    if machines not in (None, len(hosts)):
        raise ValueError(f"--machines {machines}, but there are {len(hosts)} hosts; leave it out")


def _add_synonyms(group: argparse._ArgumentGroup) -> None:
    """Add synonyms from other launchers; --help does not list them."""
    group.add_argument("--verbose", dest="log_level", action="store_const", const="INFO",
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    group.add_argument("--timeline-filename", dest="timeline",
                      type=lambda text: _file(timeline_of(text)),
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    group.add_argument(*INTERFACES, dest="environment", type=_interface, action="append",
                      default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the manual of the command."""
    parser = argparse.ArgumentParser(
        prog="fastps-run",
        usage="fastps-run [-np N] [-s N] [options] command [arguments ...]",
        description="Run a training program as several processes that sum their gradients:\n"
        "on this machine, on several over ssh, or with one command on each of several.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=ShowVersion)
    # arguments that become the layout
    here, all_of_them = parser.add_argument_group(HOW_MANY), parser.add_argument_group(MACHINES)
    here.add_argument(
        "-np", "--workers", *PER_MACHINE, type=_counts, default=None, metavar="N",
        help="worker processes per machine, each a copy of the command (default 1); a list such "
        "as 4,4,2 has one number for each machine",
    )  # fmt: skip
    here.add_argument(
        "-s", "--servers", type=_counts, default=None, metavar="N",
        help="server processes per machine, or a list (default 0)",
    )  # fmt: skip
    here.add_argument(
        "-v", "--validators", type=_validators, default=None, metavar="N",
        help="validators per machine, or a list (default 0): trusted copies of the command that "
        "judge what workers send (docs/byzantine.md)",
    )  # fmt: skip
    here.add_argument(
        "-n", "--num-proc", dest="total", type=count(1, 4096), default=None, metavar="N",
        help="worker processes of the whole job, as with mpirun and horovodrun",
    )  # fmt: skip
    add_advice(here)
    _add_synonyms(here)
    all_of_them.add_argument(
        "-H", "--hosts", "--host", dest="host_list", default=None, metavar="LIST",
        help="start the job on these machines by ssh: a:4,b:4,c:0+1 is HOST:WORKERS, or "
        "HOST:WORKERS+SERVERS; also user@host and [fd00::1]:4",
    )  # fmt: skip
    all_of_them.add_argument(
        *HOSTFILE, dest="hostfile", type=pathlib.Path, default=None, metavar="FILE",
        help="read the hosts from a file with one per line: a slots=4, or a:4",
    )  # fmt: skip
    all_of_them.add_argument(
        "--machines", *MACHINES_TOO, type=count(1, 4096), default=None, metavar="N",
        help="number of machines (default: the length of the lists of -np and -s)",
    )  # fmt: skip
    all_of_them.add_argument(
        "--machine-rank", *RANK_TOO, type=count(0, 4095), default=None, metavar="N",
        help="number of this machine, from 0; machine 0 has the scheduler",
    )  # fmt: skip
    add_words(parser, Options)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the worker's program and its arguments, such as python train.py --lr 0.1",
    )
    return parser
