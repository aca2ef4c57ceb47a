# SPDX-License-Identifier: Apache-2.0
"""Which processes make one job, with which words and variables: pure.

Turns `Options` into a list of `ProcessSpec`, in the order of starting: scheduler, servers,
workers. Starts nothing, reads nothing. Invariant: `environment` holds only what the launcher adds
to the variables a process inherits, and secrets appear in no rendered text.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence

from fastps.launch.options import Options
from fastps.launch.output import name_of

SERVER_COMMAND = (sys.executable, "-m", "fastps.server.main")
# A value of these must not reach the children from the caller's environment: each process needs
# its own, or the launcher gives a new one.
NOT_INHERITED = ("FASTPS_TOKEN", "FASTPS_TOKEN_FILE", "FASTPS_PORT", "FASTPS_ROLE", "FASTPS_RANK")
_SECRETS = ("FASTPS_TOKEN",)
_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Where the scheduler listens: a port that is held, and the descriptor that holds it."""

    port: int
    fd: int


@dataclasses.dataclass(frozen=True)
class Identity:
    """What the processes of one job have in common: its name and the way to its secret."""

    job_id: str
    secret: tuple[str, str]  # FASTPS_TOKEN and the token, or FASTPS_TOKEN_FILE and a path


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """One process to start."""

    role: str
    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherited_fd: int | None = None

    @property
    def name(self) -> str:
        """Give the name the process is shown under."""
        return name_of(self.role, self.rank)

    def render(self) -> str:
        """Give the process as a line for a shell, secrets masked."""
        settings = [
            f"{name}={'***' if name in _SECRETS else shlex.quote(value)}"
            for name, value in sorted(self.environment.items())
        ]
        return " ".join([*settings, shlex.join(self.argv)])


def needs_scheduler(options: Options) -> bool:
    """Tell whether the job has anybody to meet; one worker alone has not."""
    return options.workers > 1 or options.servers > 0


def make_plan(
    options: Options,
    identity: Identity,
    *,
    rendezvous: Rendezvous | None,
    cpus: int,
    inherited: Mapping[str, str],
    server_command: Sequence[str] = SERVER_COMMAND,
) -> tuple[ProcessSpec, ...]:
    """List the processes of a job; rendezvous is None when there is no scheduler.

    inherited: the caller's variables, looked at only to leave the user's own choices alone.
    """
    common = _common(options, identity, rendezvous=rendezvous)
    plan: list[ProcessSpec] = []
    if rendezvous is not None:
        words = ("--role", "scheduler", "--listen-fd", str(rendezvous.fd))
        environment = {**common, "FASTPS_ROLE": "scheduler"}
        argv = (*server_command, *words)
        plan.append(ProcessSpec("scheduler", 0, argv, environment, rendezvous.fd))
    for rank in range(options.servers):
        environment = {**common, "FASTPS_ROLE": "server", "FASTPS_RANK": str(rank)}
        plan.append(ProcessSpec("server", rank, tuple(server_command), environment))
    for rank in range(options.workers):
        environment = common | _worker(options, rank, cpus=cpus, inherited=inherited)
        plan.append(ProcessSpec("worker", rank, options.command, environment))
    return tuple(plan)


def _common(
    options: Options, identity: Identity, *, rendezvous: Rendezvous | None
) -> dict[str, str]:
    settings = {
        "FASTPS_JOB_ID": identity.job_id,
        "FASTPS_SIZE": str(options.workers),
        "FASTPS_NUM_SERVERS": str(options.servers),
        "FASTPS_LOG_LEVEL": options.log_level,
        "PYTHONUNBUFFERED": "1",
        identity.secret[0]: identity.secret[1],
    }
    if rendezvous is not None:
        settings["FASTPS_SCHEDULER_HOST"] = _HOST
        settings["FASTPS_SCHEDULER_PORT"] = str(rendezvous.port)
    optional = {
        "FASTPS_START_TIMEOUT_S": options.start_timeout_s,
        "FASTPS_ENGINE_THREADS": options.server_threads,
        "FASTPS_IO_THREADS": options.io_threads,
    }
    settings.update({name: f"{value:g}" for name, value in optional.items() if value is not None})
    return settings | dict(options.environment)


def _worker(
    options: Options, rank: int, *, cpus: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    settings = {
        "FASTPS_ROLE": "worker",
        "FASTPS_RANK": str(rank),
        "FASTPS_LOCAL_RANK": str(rank),
        "FASTPS_LOCAL_SIZE": str(options.workers),
    }
    is_users_choice = "OMP_NUM_THREADS" in {**inherited, **dict(options.environment)}
    if options.workers > 1 and not is_users_choice:
        settings["OMP_NUM_THREADS"] = str(max(1, cpus // options.workers))
    return settings
