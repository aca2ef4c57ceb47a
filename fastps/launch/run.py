# SPDX-License-Identifier: Apache-2.0
"""Entry point of fastps-run: make the token, hold the port, start the processes, return the code.

Everything that the job needs and no child owns is made here and freed here: the listening socket
of the scheduler (handed on by descriptor, so that its port is known and held before anybody looks
for it) and the token's file. Runs in the main thread of a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from fastps.config import process_environment
from fastps.launch.job import Cause, Job, SignalInbox, report
from fastps.launch.options import Options, parse
from fastps.launch.output import Screen
from fastps.launch.plan import (
    SERVER_COMMAND,
    Identity,
    ProcessSpec,
    Rendezvous,
    make_plan,
    needs_scheduler,
)
from fastps.launch.processes import Child, StartError, become_subreaper

_TOKEN_BYTES = 32
_BACKLOG = 512  # processes that join before the scheduler runs wait here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return launch(options, environment=process_environment())


def launch(
    options: Options,
    *,
    environment: Mapping[str, str],
    server_command: Sequence[str] = SERVER_COMMAND,
) -> int:
    """Run one job and give its exit code; only in the main thread of a process of its own.

    server_command stands for the server program. Blocks until every process has ended.
    """
    screen = _screen(options, environment)
    with contextlib.ExitStack() as stack:
        if options.is_dry_run:
            _print_plan(_dry_plan(options, environment, server_command))
            return 0
        identity = _identity(options, stack)
        held = stack.enter_context(_listen()) if needs_scheduler(options) else None
        plan = make_plan(
            options,
            identity,
            rendezvous=_rendezvous(held),
            cpus=len(os.sched_getaffinity(0)),
            inherited=environment,
            server_command=server_command,
        )
        cause = _run(options, plan, screen=screen, environment=environment, held=held)
    if cause is None:
        return 0
    with _without_reader():
        report(screen, cause, output_dir=options.output_dir)
    return cause.exit_code


def _run(
    options: Options,
    plan: Sequence[ProcessSpec],
    *,
    screen: Screen,
    environment: Mapping[str, str],
    held: socket.socket | None,
) -> Cause | None:
    """Start the processes of a plan and watch them to their end."""
    become_subreaper()
    with SignalInbox() as inbox:
        job = Job(screen, inbox, grace_s=options.grace_s, timeout_s=options.timeout_s)
        try:
            if options.output_dir is not None:
                options.output_dir.mkdir(parents=True, exist_ok=True)
            for spec in plan:
                child = Child(
                    spec, inherited=environment, screen=screen, output_dir=options.output_dir
                )
                job.add(child)
                if options.log_level in ("DEBUG", "INFO"):
                    screen.say(f"{spec.name} is pid {child.pid}")
        except StartError as error:
            job.abandon(Cause(str(error), error.exit_code))
        except OSError as error:  # of the output files
            job.abandon(Cause(str(error), 1))
        if held is not None:
            held.close()
        return job.run()


@contextlib.contextmanager
def _without_reader() -> Iterator[None]:
    """Let the interpreter end quietly when the reader of our output is gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.dup2(nothing, sys.stderr.fileno())


def _identity(options: Options, stack: contextlib.ExitStack) -> Identity:
    job_id = options.job_id or f"job-{secrets.token_hex(4)}"
    token = secrets.token_hex(_TOKEN_BYTES)
    if not options.has_token_file:
        return Identity(job_id, ("FASTPS_TOKEN", token))
    path = stack.enter_context(_token_file(token))
    return Identity(job_id, ("FASTPS_TOKEN_FILE", str(path)))


@contextlib.contextmanager
def _token_file(token: str) -> Iterator[pathlib.Path]:
    """Write the token where only this user can read it; remove it at the end."""
    descriptor, name = tempfile.mkstemp(prefix="fastps-token-")  # made with mode 0600
    path = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _listen() -> socket.socket:
    """Bind the scheduler's port: the kernel chooses one, and nobody else can take it."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind(("127.0.0.1", 0))
    held.listen(_BACKLOG)
    return held


def _rendezvous(held: socket.socket | None) -> Rendezvous | None:
    if held is None:
        return None
    return Rendezvous(port=held.getsockname()[1], fd=held.fileno())


def _dry_plan(
    options: Options, environment: Mapping[str, str], server_command: Sequence[str]
) -> tuple[ProcessSpec, ...]:
    """Make the plan with values that are only known at a real start left at zero."""
    name = "FASTPS_TOKEN_FILE" if options.has_token_file else "FASTPS_TOKEN"
    return make_plan(
        options,
        Identity(options.job_id or "job-00000000", (name, "fastps-token-00000000")),
        rendezvous=Rendezvous(port=0, fd=0) if needs_scheduler(options) else None,
        cpus=len(os.sched_getaffinity(0)),
        inherited=environment,
        server_command=server_command,
    )


def _print_plan(plan: Sequence[ProcessSpec]) -> None:
    sys.stdout.write("# job id, token, port and descriptor are chosen at the start\n")
    for spec in plan:
        sys.stdout.write(f"# {spec.name}\n{spec.render()}\n")


def _screen(options: Options, environment: Mapping[str, str]) -> Screen:
    wants = options.colour == "always" or (
        options.colour == "auto" and sys.stdout.isatty() and not environment.get("NO_COLOR")
    )
    return Screen(sys.stdout.buffer, sys.stderr.buffer, has_colour=wants)


if __name__ == "__main__":
    sys.exit(main())
