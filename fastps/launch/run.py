# SPDX-License-Identifier: Apache-2.0
"""Entry point of fastps-run: choose token and ports, start the parts, return the exit code.

Makes what the job needs and no part owns: the job's name and token, and the listening sockets of
the scheduler. They are bound before any process starts, so that the port is known and cannot be
taken. Runs in the main thread of a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fastps.config import Config, load, process_environment
from fastps.config.closed_pipe import ends_quietly
from fastps.config.token import TOKEN_RECIPE, hide_token, hold_token
from fastps.errors import ConfigError, FastPSError
from fastps.files import open_folder, text_of
from fastps.launch import timeline
from fastps.launch.allocation import spread
from fastps.launch.cause import Cause
from fastps.launch.exit_report import (
    EXIT_SETTINGS,
    make_screen,
    run_again,
    show_end,
    wants_live,
)
from fastps.launch.job import Job, SignalInbox, no_reader
from fastps.launch.leader import lead
from fastps.launch.limits import StartError, hold_standard_streams, provide_descriptors
from fastps.launch.messenger import Messenger
from fastps.launch.options import Options, parse
from fastps.launch.output import Screen, Stream
from fastps.launch.plan import (
    Identity,
    ProcessSpec,
    choose_job_id,
    choose_secret,
    goes_on,
    inherited_environment,
    make_plan,
    scheduler_environment,
)
from fastps.launch.processes import (
    Child,
    become_subreaper,
    give_terminal,
    open_stream,
)
from fastps.launch.progress_line import ForwardedLine, LiveLine
from fastps.launch.respawn import Respawn
from fastps.launch.scheduler import SchedulerProcess
from fastps.launch.scheduler_process import LaunchedScheduler
from fastps.launch.secrets import Handout
from fastps.launch.torch_names import KeptPort, port_beside
from fastps.transport import sockets

_TOKEN_BYTES = 32
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class SchedulerSetup:
    """What the scheduler needs: its settings, and the bound sockets of its port."""

    settings: Config
    listeners: list[socket.socket]


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    hold_standard_streams()
    options = parse(sys.argv[1:] if arguments is None else arguments)
    environment = process_environment()
    hide_token()
    try:
        options = spread(options, environment)
    except ConfigError as error:
        make_screen(options, environment).report(str(error), is_alarm=True)
        return EXIT_SETTINGS
    if options.hosts or options.host_script:
        return lead(options, environment=environment)
    return launch(options, environment=environment)


def launch(
    options: Options,
    *,
    environment: Mapping[str, str],
    server_command: Sequence[str] = (),
) -> int:
    """Run this machine's share of a job and return the exit code; only in the main thread.

    server_command: starts a server in place of this fastps's own command. Blocks until every
    process has ended.
    """
    with _commit_directory(options, environment) as complete:
        return _launch(complete, environment, server_command)


@contextlib.contextmanager
def _commit_directory(options: Options, environment: Mapping[str, str]) -> Iterator[Options]:
    """Yield the options with a temporary directory for elastic commits, unless the user names one.

    If none can be made the options stay as they are, and the first commit reports it.
    """
    with contextlib.ExitStack() as stack:
        is_given = "FASTPS_COMMIT_DIR" in {**environment, **dict(options.environment)}
        if options.restarts and not options.is_dry_run and not is_given:
            with contextlib.suppress(OSError):
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastps-commits-"))
                setting = ("FASTPS_COMMIT_DIR", made)
                options = dataclasses.replace(options, environment=(*options.environment, setting))
        yield options


def _launch(
    options: Options, environment: Mapping[str, str], server_command: Sequence[str]
) -> int:
    screen = make_screen(options, environment)
    inherited = inherited_environment(environment)
    identity = _identity(options, environment)
    plan_of = functools.partial(
        make_plan,
        options,
        cpus=len(os.sched_getaffinity(0)),
        inherited=inherited,
        server_command=server_command,
    )
    try:
        if options.is_dry_run:
            return _dry_run(options, identity, plan_of)
        if identity.secret is not None and identity.secret[0] == "FASTPS_TOKEN":
            identity = dataclasses.replace(identity, secret=hold_token(identity.secret[1]))
        identity, setup = prepare(options, identity, inherited, report=screen.report)
        handout = Handout(_token_of(options, identity, inherited))
    except FastPSError as error:
        screen.report(str(error), is_alarm=True)
        return EXIT_SETTINGS
    except KeyboardInterrupt:  # while a host name is resolved; nothing is started yet
        return 128 + signal.SIGINT
    # signals go to the inbox until the end: an exception of a handler could get lost
    with _kept_master(options, identity, screen) as identity, SignalInbox() as inbox:
        cause = run_plan(
            options, handout.hand_out(plan_of(identity)), screen, inbox, inherited, setup
        )

        def run() -> Cause | None:
            fresh, new_setup = prepare(options, identity, inherited, report=screen.report)
            plan = handout.hand_out(plan_of(fresh))  # with a new port
            return run_plan(options, plan, screen, inbox, inherited, new_setup)

        cause = run_again(run, cause, screen, inbox, options.restarts)
        if options.timeline is not None:
            make_timeline(screen, options.timeline, is_whole=not options.layout.is_spread)
        return show_end(screen, inbox, cause, options)


def run_plan(
    options: Options,
    plan: Sequence[ProcessSpec],
    screen: Screen,
    inbox: SignalInbox,
    inherited: Mapping[str, str],
    setup: SchedulerSetup | None,
    *,
    on_cause: Callable[[Cause], None] = lambda _: None,
    forward_paces: Callable[[list[list[float]]], None] | None = None,
) -> Cause | None:
    """Start the parts of a plan, the scheduler last, and watch them to their end.

    forward_paces: takes this machine's share of the live line, if the leader shows it.
    """
    try:
        provide_descriptors(options.layout, n_children=len(plan))
    except StartError as error:
        refusal = Cause(str(error), error.exit_code)
        on_cause(refusal)
        return refusal
    become_subreaper()
    messenger = Messenger(options, inherited, plan)
    job = Job(
        screen,
        inbox,
        grace_s=options.grace_s,
        timeout_s=options.timeout_s,
        is_spread=options.is_open,
        goes_on=goes_on(options, inherited),
        on_end=messenger.report_end,
        on_cause=on_cause,
    )
    try:
        folder = open_folder(options.output_dir) if options.output_dir else None
        if options.timeline is not None:
            timeline.clear(options.timeline)

        def start(spec: ProcessSpec) -> Child:
            return Child(spec, inherited=inherited, screen=screen, output_dir=folder)

        job.replace_by(Respawn(options.respawn, plan, start, screen).replace)
        for spec in plan:
            child = start(spec)
            job.add(child)
            if options.log_level in ("DEBUG", "INFO"):
                screen.report(f"{spec.name} is pid {child.pid}")
        if setup is not None:
            scheduler = _begin_scheduler(options, setup, job, messenger, functools.partial(
                open_stream, screen, "scheduler", rank=0, output_dir=folder, is_error=True
            ))  # fmt: skip
            if options.log_level in ("DEBUG", "INFO"):
                screen.report(f"scheduler is pid {scheduler.pid}")
        elif options.layout.is_spread:
            job.add_cause_listener(messenger.listen_for_cause())
        is_shown_here = forward_paces is None
        if options.layout.needs_scheduler and wants_live(options, is_shown_here=is_shown_here):
            job_id = plan[0].environment["FASTPS_JOB_ID"]
            line = ForwardedLine(job_id, forward_paces) if forward_paces else LiveLine(job_id)
            job.show_live(line)
    except StartError as error:
        job.set_cause(Cause(str(error), error.exit_code))
    except ConfigError as error:
        job.set_cause(Cause(str(error), EXIT_SETTINGS))
    except BrokenPipeError:
        job.set_cause(no_reader())
    except OSError as error:  # of the output files
        job.set_cause(Cause(text_of(error), 1))
    cause = job.run()
    if messenger.scheduler is not None:
        messenger.scheduler.stop_listening()
    if not options.layout.needs_scheduler:
        give_terminal(os.getpgrp())
    messenger.close()
    return cause


def make_timeline(screen: Screen, target: pathlib.Path, *, is_whole: bool) -> None:
    """Merge the traces of the processes, however they ended."""
    try:
        screen.report(timeline.describe(target, timeline.collect(target, is_whole=is_whole)))
    except FastPSError as error:
        screen.report(str(error), is_alarm=True)


def _begin_scheduler(
    options: Options, setup: SchedulerSetup, job: Job, messenger: Messenger,
    open_log: Callable[..., Stream],
) -> SchedulerProcess:  # fmt: skip
    """Start the scheduler of a job, and another one in place of one that dies, if it may.

    open_log: opens the stream of its log; start: of ProcessSpec.
    """

    def start(term: int, dead: SchedulerProcess | None = None) -> SchedulerProcess:
        log = open_log(start=max(term, 1))
        messenger.scheduler = made = _start_scheduler(options, setup, log, term, dead)
        return made

    is_followed = setup.settings.is_elastic and not setup.settings.replay
    job.add_scheduler(scheduler := start(int(is_followed)))
    job.follow_by(lambda dead: start(dead.term + 1, dead))
    return scheduler


def _start_scheduler(
    options: Options, setup: SchedulerSetup, stderr: Stream, term: int,
    before: SchedulerProcess | None = None,
) -> SchedulerProcess:  # fmt: skip
    layout = options.layout
    here = len(layout.worker_ranks) + len(layout.server_ranks)
    work = LaunchedScheduler(
        setup.settings,
        setup.listeners,
        others=layout.size + layout.num_servers - here,
        patience_s=options.grace_s / 2,  # so that it ends in order within the grace
        machines=layout.places(),
        term=term,
    )
    return SchedulerProcess(work, stderr=stderr, before=before)


def _identity(options: Options, environment: Mapping[str, str]) -> Identity:
    """Choose name and token; on one machine the scheduler's port is chosen later."""
    address = None
    if options.is_open:
        address = (options.scheduler_host, options.scheduler_port)
    elif options.layout.needs_scheduler:
        address = (_LOOPBACK, 0)
    return Identity(
        choose_job_id(options, environment, new_id=f"job-{secrets.token_hex(4)}"),
        choose_secret(options, environment, new_token=secrets.token_hex(_TOKEN_BYTES)),
        address,
        _master(options),
    )


@contextlib.contextmanager
def _kept_master(options: Options, identity: Identity, screen: Screen) -> Iterator[Identity]:
    """Reserve MASTER_PORT if rank 0 is on this machine, and put it into the identity."""
    if identity.master is None or 0 not in options.layout.worker_ranks:
        yield identity
        return
    host, wanted = identity.master
    try:
        port = KeptPort(wanted)
    except OSError as error:
        screen.report(
            f"cannot reserve port {wanted} of this machine, the MASTER_PORT for tools of PyTorch "
            f"({error.strerror}); if the program needs it, set another one, the same on all "
            "machines: --env MASTER_PORT=N"
        )
        yield identity
        return
    with contextlib.closing(port):
        yield dataclasses.replace(identity, master=(host, port.number))


def _master(options: Options) -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT, the same for all launchers; port 0: chosen later."""
    if not options.layout.is_spread:
        return _LOOPBACK, 0
    is_known = options.layout.workers[0] > 0  # else the address of rank 0's machine is unknown
    return (options.scheduler_host, port_beside(options.scheduler_port)) if is_known else None


def prepare(
    options: Options,
    identity: Identity,
    inherited: Mapping[str, str],
    *,
    report: Callable[[str], None],
) -> tuple[Identity, SchedulerSetup | None]:
    """Check the settings and bind the scheduler's port. Raises ConfigError.

    report: takes a line for the user if this has to wait, for the start timeout at most.
    """
    if identity.scheduler is None:
        return identity, None
    settings = load(environ={**inherited, **scheduler_environment(options, identity)})
    _check_token(settings, is_missing=identity.secret is None)
    if not options.layout.has_scheduler:
        return identity, None
    host, port = identity.scheduler
    host = settings.host if settings.host and options.is_open else host
    listeners = _listen(host, port, timeout_s=settings.start_timeout_s, report=report)
    if options.is_open:
        _check_reach(host, [str(sock.getsockname()[0]) for sock in listeners])
    port = listeners[0].getsockname()[1]
    identity = dataclasses.replace(identity, scheduler=(identity.scheduler[0], port))
    return identity, SchedulerSetup(settings, listeners)


def _listen(
    host: str, port: int, *, timeout_s: float, report: Callable[[str], None]
) -> list[socket.socket]:
    """Listen on a host name of this machine, which the name service may not know yet."""
    has_reported = False
    failure = ConfigError(f"there was no time to resolve {host!r}; raise --start-timeout")
    for _ in sockets.attempts(time.monotonic() + timeout_s):
        try:
            return sockets.listen(host, port, port_setting="--scheduler-port")
        except ConfigError as error:
            if not isinstance(error.__cause__, socket.gaierror):
                raise
            failure = error
        if not has_reported:
            has_reported = True
            report(f"{failure}. Retrying for up to {timeout_s:g} s")
    raise failure


def _token_of(options: Options, identity: Identity, inherited: Mapping[str, str]) -> bytes:
    """Return the launcher's token; nothing for a job without a scheduler."""
    if identity.scheduler is None:
        return b""
    return load(environ={**inherited, **scheduler_environment(options, identity)}).token_bytes()


def _check_reach(host: str, bound: Sequence[str]) -> None:
    """Raise ConfigError if the host name resolves to loopback, as /etc/hosts often has it."""
    is_meant = host == "localhost" or sockets.is_loopback(host)
    if not is_meant and all(map(sockets.is_loopback, bound)):
        raise ConfigError(
            f"--scheduler-host {host} resolves to {', '.join(bound)} on this machine, which other "
            "machines cannot reach; give an address that they can reach, or set FASTPS_HOST to it "
            "here"
        )


def _check_token(settings: Config, *, is_missing: bool) -> None:
    try:
        settings.token_bytes()
    except ConfigError as error:
        if not is_missing:
            raise
        raise ConfigError(
            "several machines need a secret token, the same on all of them. Make one with: "
            f"{TOKEN_RECIPE}; copy the file to every machine and add --token-file job.token, or "
            "set FASTPS_TOKEN"
        ) from error


def _dry_run(
    options: Options, identity: Identity, plan_of: Callable[[Identity], Sequence[ProcessSpec]]
) -> int:
    """Print the processes of the job; values that are chosen at the start are shown as zero."""
    if not options.layout.is_spread:
        identity = dataclasses.replace(identity, job_id=options.job_id or "job-00000000")
    lines = [_describe_meeting(options, identity)]
    if options.layout.is_spread:
        lines.append(f"# {options.layout.describe()}")
        if identity.secret is None:
            lines.append(f"# the job needs a token; make one with: {TOKEN_RECIPE}")
    for spec in plan_of(identity):
        lines += [f"# {spec.name}", spec.render()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _describe_meeting(options: Options, identity: Identity) -> str:
    """Return where the scheduler runs, as a comment."""
    if identity.scheduler is None:
        return "# a single worker: no scheduler; the job id is chosen at the start"
    where = sockets.join_address(*identity.scheduler)
    if not options.layout.is_spread:
        return (
            "# scheduler: a process of fastps-run; job id, token and its port are chosen at the "
            "start"
        )
    if options.layout.has_scheduler:
        return f"# scheduler: a process of this fastps-run, at {where}"
    return f"# scheduler: a process of fastps-run on machine 0, at {where}"


if __name__ == "__main__":
    sys.exit(main())
