# SPDX-License-Identifier: Apache-2.0
"""The command fastps-server: one summation server, or the scheduler of a job.

Turns options into settings, sets up logging and signals, and runs the role. A validator's program
replaces this one. Threads: fastps:log writes what is logged.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastps import _core, config
from fastps.config.closed_pipe import ends_quietly
from fastps.config.token import hide_token
from fastps.config.versions import ShowVersion
from fastps.control.scheduler import Scheduler, serve
from fastps.errors import ConfigError, FastPSError
from fastps.server.logs import logging_to_reader
from fastps.telemetry.status import StatusService
from fastps.transport.sockets import inherit

OUR_ROLES = ("server", "scheduler")
ROLES = (*OUR_ROLES, "validator")
EPILOG = """\
A job has one scheduler, some servers and some workers; all need the same token. By hand:

  export FASTPS_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
  export FASTPS_SIZE=2 FASTPS_NUM_SERVERS=1
  export FASTPS_SCHEDULER_HOST=127.0.0.1 FASTPS_SCHEDULER_PORT=7654
  fastps-server --role scheduler &
  fastps-server &
  python train.py &  python train.py

On one machine `fastps-run -np 2 -s 1 python train.py` does all of this. A validator runs the
workers' program, which is given here or started with FASTPS_ROLE=validator; everybody then needs
FASTPS_NUM_VALIDATORS, and validators FASTPS_RANK (or DMLC_NUM_VALIDATOR, DMLC_VALIDATOR_ID):

  $ fastps-server --role validator -- python train.py

Every option has an
environment variable, FASTPS_ and the option's name; docs/env.md lists them all, with the names
of BytePS and torchrun that work too. A server ends when the job is over, when a process of the
job is lost (exit status 1), or in order after SIGTERM.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; missing options come from the environment."""
    parser = argparse.ArgumentParser(
        prog="fastps-server",
        description="Sum gradients for the workers of one job, be its scheduler, or start a "
        "validator's program.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--role", choices=ROLES, help="default: FASTPS_ROLE or DMLC_ROLE, else server")
    add("--scheduler-host", metavar="HOST", help="host of the scheduler, or where it listens")
    add("--scheduler-port", metavar="PORT", help="port of the scheduler")
    add("--interface", metavar="NAME", help="interface, network (CIDR) or address to listen on")
    add("--host", metavar="ADDRESS", help="own address to listen on and to publish")
    add("--port", metavar="PORT", help="own data port; default 0: a free one")
    add("--size", metavar="N", help="number of workers (scheduler)")
    add("--num-servers", metavar="N", help="number of servers (scheduler)")
    add("--engine-threads", metavar="N", help="threads that sum; 0: the I/O threads sum")
    add("--io-threads", metavar="N", help="threads that read and write the links")
    add("--cpus", metavar="LIST", help="CPUs to pin our threads to, like 0-3,8")
    add("--numa-node", metavar="NODE", help="NUMA node to take memory from; -1: any")
    add("--token-file", metavar="FILE", help="file of mode 0600 with the job token")
    add("--start-timeout-s", metavar="SECONDS", help="how long to wait for other members")
    add("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING (default) or ERROR")
    add("--version", action=ShowVersion)
    add("--listen-fd", metavar="FD", type=int, help=argparse.SUPPRESS)
    add("command", nargs="*", metavar="COMMAND", help="after --: the program of a validator")
    return parser


def load_config(arguments: argparse.Namespace) -> config.Config:
    """Return the settings: options first, then the environment."""
    given = _options(arguments)
    role = given.setdefault("role", config.role_given() or "server")
    if role not in ROLES:
        raise ConfigError(
            f"fastps-server runs the roles {', '.join(ROLES)}, and FASTPS_ROLE or DMLC_ROLE is "
            f"{role!r}; start the training script in its place, or give --role"
        )
    if arguments.command and role != "validator":
        raise ConfigError(
            f"a {role} runs no program, and {arguments.command[0]!r} was given; only a validator "
            "runs one: `fastps-server --role validator -- python train.py`"
        )
    return config.load(given)


def _options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the settings among the options."""
    no_settings = ("listen_fd", "command")
    return {
        name: value
        for name, value in vars(arguments).items()
        if value is not None and name not in no_settings
    }


def run_program(arguments: argparse.Namespace, settings: config.Config) -> NoReturn:
    """Replace this process by a validator's program, with the options in its environment."""
    command = arguments.command
    if not command:
        raise ConfigError(
            "a validator runs the workers' program, and no command was given; use "
            "`fastps-server --role validator -- python train.py`"
        )
    if not settings.num_validators:
        raise ConfigError(
            "a validator needs FASTPS_NUM_VALIDATORS or DMLC_NUM_VALIDATOR, which is 0; set it to "
            "the number of validators in every process of the job"
        )
    given = {f"FASTPS_{name.upper()}": value for name, value in _options(arguments).items()}
    environment = config.process_environment() | given | {"FASTPS_ROLE": "validator"}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise ConfigError(
            f"{command[0]!r} cannot be started: {error.strerror}; check its path"
        ) from error


def run_server(settings: config.Config) -> int:
    """Run a server until its job is over; SIGTERM and SIGINT end it in order."""
    # imported here: a scheduler needs neither kernels nor a store
    from fastps.server.server import Server  # noqa: PLC0415

    server = Server(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    return server.run()


def _status_of(
    settings: config.Config, scheduler: Scheduler
) -> contextlib.AbstractContextManager[object]:
    return contextlib.closing(StatusService.of_scheduler(settings, scheduler.numbers))


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0 in order, 1 for a lost peer, 2 for bad settings.

    For a validator it does not return: its program replaces this process.
    """
    parsed = make_parser().parse_args(arguments)
    try:
        settings = load_config(parsed)
        if settings.role == "validator":
            run_program(parsed, settings)
        hide_token()
        _core.arm_fault(settings.fault)
        with logging_to_reader(sys.stderr.fileno(), settings.log_level, role=settings.role):
            if settings.role == "scheduler":
                return serve(
                    settings,
                    listeners=inherit(parsed.listen_fd),
                    beside=functools.partial(_status_of, settings),
                )
            return run_server(settings)
    except FastPSError as error:
        sys.stderr.write(f"fastps-server: {type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
