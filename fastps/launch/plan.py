# SPDX-License-Identifier: Apache-2.0
"""The processes of one job, with their command lines and environment: pure.

Turns `Options` into a list of `ProcessSpec` in the order of starting (servers, workers,
validators), and returns the environment of the scheduler. Starts nothing, reads nothing.
Invariants: `environment` holds only what the launcher adds to the inherited variables, and
rendered text contains no secrets.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

from fastps.config import load
from fastps.config.versions import command_of
from fastps.launch.options import Options
from fastps.launch.output import name_of
from fastps.launch.timeline import variables
from fastps.launch.torch_names import NAMES, OUTER_PREFIX, worker_variables

SERVER_MODULE = "fastps.server.main"
# The children must not inherit these: each process gets its own value, or the launcher a new one.
NOT_INHERITED = ("FASTPS_TOKEN", "FASTPS_TOKEN_FILE", "FASTPS_PORT", "FASTPS_ROLE", "FASTPS_RANK",
                 *NAMES)  # fmt: skip
# Commands for gdb: run the program and end with its code, or show where a signal stopped it and
# end as a shell does. A command that does not apply fails, and gdb runs the next one.
GDB = ("set confirm off", "run", "quit $_exitcode", "bt", "quit 128 + $_exitsignal",
       "quit 128 + $_siginfo.si_signo")  # fmt: skip
JOINS = {"FASTPS_ELASTIC_JOIN": "1"}  # what a worker that joins a running job has set
_GDB = ("FASTPS_ENABLE_GDB", "BYTEPS_ENABLE_GDB")
_SECRET = re.compile("token|secret|passw|pwd|credential|auth|key", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Identity:
    """What the processes of one job have in common: its name, its secret, its addresses."""

    job_id: str
    secret: tuple[str, str] | None  # FASTPS_TOKEN and the token, or FASTPS_TOKEN_FILE and a path
    scheduler: tuple[str, int] | None  # host and port; None for a single worker
    master: tuple[str, int] | None = None  # rank 0's host and a port reserved for it


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One process to start."""

    role: str
    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    has_stdin: bool = False  # the launcher's standard input; else /dev/null
    start: int = 1  # how often one of this name was started, this time included

    @property
    def name(self) -> str:
        """Return the name the process is shown under."""
        return name_of(self.role, self.rank)

    def render(self) -> str:
        """Return the process as a line for a shell, with secrets masked."""
        settings = [
            f"{name}={'***' if _is_secret(name) else shlex.quote(value)}"
            for name, value in sorted(self.environment.items())
        ]
        return " ".join([*settings, shlex.join(self.argv)])


def _is_secret(name: str) -> bool:
    """Return whether a value must not be shown; the only secret setting is FASTPS_TOKEN."""
    is_ours = name.startswith("FASTPS_")
    return name == "FASTPS_TOKEN" if is_ours else bool(_SECRET.search(name))


def make_plan(
    options: Options,
    identity: Identity,
    *,
    cpus: int,
    inherited: Mapping[str, str],
    server_command: Sequence[str] = (),
) -> tuple[ProcessSpec, ...]:
    """List the processes of a job on this machine.

    inherited: the caller's environment, read only to respect the user's own choices.
    server_command: starts a server in place of this fastps's own command.
    """
    server_command = tuple(server_command) or command_of(SERVER_MODULE)
    common = _common(options, identity)
    if options.timeline is not None:
        given = {**inherited, **dict(options.environment)}
        common = variables(options.timeline, given) | common
    plan: list[ProcessSpec] = []
    for rank in options.layout.server_ranks:
        environment = {**common, "FASTPS_ROLE": "server", "FASTPS_RANK": str(rank)}
        plan.append(ProcessSpec("server", rank, server_command, environment))
    command = _under_gdb(options, {**inherited, **dict(options.environment)})
    ranks = options.layout.worker_ranks
    spares = options.layout.spare_ranks(options.spares)
    for local_rank, rank in enumerate((*ranks, *spares)):
        environment = (
            worker_variables(options.layout, rank, local_rank, identity.master)
            | {name: value for name, value in options.environment if name in NAMES}
            | common
            | _worker(options, rank, local_rank, cpus=cpus, inherited=inherited)
            | (JOINS if rank in spares else {})
        )
        is_alone = not options.layout.needs_scheduler
        plan.append(ProcessSpec("worker", rank, command, environment, has_stdin=is_alone))
    for rank in options.layout.validator_ranks:
        environment = {**common, "FASTPS_ROLE": "validator", "FASTPS_RANK": str(rank)}
        plan.append(ProcessSpec("validator", rank, command, environment))
    return tuple(plan)


def _under_gdb(options: Options, given: Mapping[str, str]) -> tuple[str, ...]:
    """Return a worker's command, under gdb if that is asked for."""
    is_set = load({}, {name: given[name] for name in _GDB if name in given}).enable_gdb
    if not (options.has_gdb or is_set):
        return options.command
    words = [word for line in GDB for word in ("-ex", line)]
    return ("gdb", "-quiet", "-batch", *words, "--args", *options.command)


def scheduler_environment(options: Options, identity: Identity) -> dict[str, str]:
    """Return the environment of the scheduler."""
    return {**_common(options, identity), "FASTPS_ROLE": "scheduler"}


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables that processes of the job inherit."""
    return {
        name: value
        for name, value in environment.items()
        if name not in NOT_INHERITED and not name.startswith(OUTER_PREFIX)
    }


def goes_on(options: Options, inherited: Mapping[str, str]) -> bool:
    """Return whether the other workers continue when a worker fails."""
    given = {**inherited, **_on_loss(options), **dict(options.environment)}
    is_elastic = given.get("FASTPS_ELASTIC_MIN", "").strip() not in ("", "0")
    return is_elastic or given.get("FASTPS_ON_LOSS", "").strip() == "reweight"


def choose_secret(
    options: Options, environment: Mapping[str, str], *, new_token: str
) -> tuple[str, str] | None:
    """Return the variable with the job's token, and its value: the user's, else a new token.

    On several machines the launcher cannot make a new one: None when the user gave none.
    """
    given = {**environment, **dict(options.environment)} if options.is_open else {}
    if options.token_file is not None:
        return "FASTPS_TOKEN_FILE", str(options.token_file)
    for name in ("FASTPS_TOKEN", "FASTPS_TOKEN_FILE"):
        if given.get(name):
            return name, given[name]
    return None if options.is_open else ("FASTPS_TOKEN", new_token)


def choose_job_id(options: Options, environment: Mapping[str, str], *, new_id: str) -> str:
    """Return the job's name: the user's, else a new one, or on several machines the port's."""
    if options.job_id or not options.is_open:
        return options.job_id or new_id
    return environment.get("FASTPS_JOB_ID") or f"job-{options.scheduler_port}"


def _common(options: Options, identity: Identity) -> dict[str, str]:
    settings = {
        "FASTPS_JOB_ID": identity.job_id,
        "FASTPS_SIZE": str(options.layout.size),
        "FASTPS_NUM_SERVERS": str(options.layout.num_servers),
        "PYTHONUNBUFFERED": "1",
    }
    if options.layout.num_validators:
        settings["FASTPS_NUM_VALIDATORS"] = str(options.layout.num_validators)
    if options.log_level:
        settings["FASTPS_LOG_LEVEL"] = options.log_level
    if options.encrypt:
        settings["FASTPS_ENCRYPT"] = options.encrypt
    if identity.secret is not None:
        settings[identity.secret[0]] = identity.secret[1]
    if identity.scheduler is not None:
        settings["FASTPS_SCHEDULER_HOST"] = identity.scheduler[0]
        settings["FASTPS_SCHEDULER_PORT"] = str(identity.scheduler[1])
    optional = {
        "FASTPS_START_TIMEOUT_S": options.start_timeout_s,
        "FASTPS_ENGINE_THREADS": options.server_threads,
        "FASTPS_IO_THREADS": options.io_threads,
    }
    settings |= _on_loss(options)
    settings.update({name: f"{value:g}" for name, value in optional.items() if value is not None})
    return settings | {
        name: value
        for name, value in options.environment
        if name not in NAMES  # only workers get these
    }


def _on_loss(options: Options) -> dict[str, str]:
    given = {
        "FASTPS_ON_LOSS": options.on_loss, "FASTPS_ELASTIC_MIN": options.elastic_min,
        "FASTPS_VIEW_LOG": options.view_log, "FASTPS_REPLAY": options.replay,
        "FASTPS_ELASTIC_MAX": options.elastic_max,
    }  # fmt: skip
    if options.elastic_max is None and (options.respawn or options.spares):
        given["FASTPS_ELASTIC_MAX"] = options.layout.size
    if options.join is not None:
        given |= {"FASTPS_ELASTIC_JOIN": 1, "FASTPS_ELASTIC_MIN": options.elastic_min or 1}
    return {name: str(value) for name, value in given.items() if value is not None}


def _worker(
    options: Options, rank: int, local_rank: int, *, cpus: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    ranks = options.layout.worker_ranks
    settings = {
        "FASTPS_ROLE": "worker",
        "FASTPS_RANK": str(rank),
        "FASTPS_LOCAL_RANK": str(local_rank),
        "FASTPS_LOCAL_SIZE": str(len(ranks)),
    }
    is_users_choice = "OMP_NUM_THREADS" in {**inherited, **dict(options.environment)}
    if len(ranks) > 1 and not is_users_choice:
        settings["OMP_NUM_THREADS"] = str(max(1, cpus // len(ranks)))
    return settings
