# SPDX-License-Identifier: Apache-2.0
"""A job among actors of Ray: scheduler and servers are its own actors, workers are the user's.

Only the process that made the job and the scheduler have the job's token; every other process gets
a token of its own. Tokens travel as arguments of calls between Ray's processes, never in an
environment or a command that others can read. Where a job has to be encrypted, they leave a node
only by Ray's TLS. Every wait has a deadline. Threads: the caller's; a server has the main thread
of its actor.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import fastps
from fastps.config import DAY_S, child_environment, load, process_environment
from fastps.config.token import enter_environment, leave_environment
from fastps.control.scheduler_thread import HostedScheduler
from fastps.errors import ConfigError, FastPSError, ShutdownError, StallError
from fastps.security.tokens import Token
from fastps.server.server import Server
from fastps.transport.encryption import check_carried

TOKEN_BYTES = 32
TIMEOUT_S = 60.0
END_S = 10.0  # for processes that were asked to end
WATCH_S = 60.0  # start_watch_s: no reports of missing workers while they load data
LOOK_S = 0.1  # interval of checks whether the servers have joined
PATIENCE = {"start_timeout_s": DAY_S}  # workers may load data for long before they call init()
# Settings that differ between the processes of a job, or that the job sets.
OF_THE_JOB = ("token", "token_file", "role", "rank", "size", "num_servers", "scheduler_host",
              "scheduler_port", "job_id")  # fmt: skip


Call = Callable[..., Any]  # f(rank, function, *arguments) returns a reference to Ray's result


class Job:
    """A job of `size` workers that exist already, until close(); a context manager.

    tell: runs a function, with arguments, in the process of a rank, and returns Ray's reference.
    servers: processes that only add, each an actor with resources_per_server (1 CPU); a placement
    group spreads them over the nodes. settings: of fastps.init(), for all processes.
    Blocks until the servers run and the workers have their settings, up to timeout_s seconds for
    each. ConfigError for settings; StallError if the cluster has no room or a worker is busy.
    """

    def __init__(
        self,
        size: int,
        tell: Call,
        *,
        servers: int = 0,
        resources_per_server: Mapping[str, float] | None = None,
        settings: Mapping[str, object] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        common = dict(settings or {})
        if wrong := sorted({*common} & {*OF_THE_JOB}):
            raise ConfigError(
                f"settings has {wrong[0]!r}, which the job sets by itself: leave it out"
            )
        self.size = size
        self._call = tell
        self._needs = dict(resources_per_server or {"CPU": 1})
        self._token = Token(secrets.token_hex(TOKEN_BYTES).encode())
        self._settings: dict[str, object] = common | {
            "size": size, "num_servers": servers, "job_id": f"ray-{secrets.token_hex(4)}",
        }  # fmt: skip
        self._variables: list[str] = []  # environment variables that the workers have got
        self._group: Any = None
        self._actors: list[Any] = []
        self._served: list[Any] = []  # references to the ends of the servers
        try:
            self._start(servers, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let workers leave, and end servers and scheduler; idempotent. Blocks up to 30 s."""
        self._dismiss_workers()
        actors, self._actors = self._actors, []
        _wait([one.close.remote() for one in actors[:1]])  # the scheduler, which ends the servers
        _wait(self._served)
        for actor in actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def __enter__(self) -> Job:
        """Return the job."""
        return self

    def __exit__(self, *reason: object) -> None:
        """End the job."""
        self.close()

    # ---- starting ----

    def _start(self, servers: int, deadline: float, timeout_s: float) -> None:
        config = load(self._settings | {"role": "scheduler", "token": "0" * TOKEN_BYTES})
        if len(ray.nodes()) > 1 and process_environment().get("RAY_USE_TLS") != "1":
            check_carried(config, by="Ray", cure="set RAY_USE_TLS=1 and Ray's certificates")
        self._make_room(servers, timeout_s)
        scheduler = self._actor(_Scheduler, 0, num_cpus=0)
        secret = self._token.secret.decode()
        settings = self._settings | {"role": "scheduler", "token": secret}
        host, port = _get(scheduler.begin.remote(settings), timeout_s)
        self._settings |= {"scheduler_host": host, "scheduler_port": port}
        for rank in range(servers):
            actor = self._actor(_Server, rank, **_as_options(self._needs))
            self._served.append(actor.serve.remote(self._member("server", rank) | PATIENCE))
        self._wait_until_joined(scheduler, deadline, timeout_s)
        self._configure_workers(timeout_s)

    def _make_room(self, servers: int, timeout_s: float) -> None:
        """Reserve the resources of the servers, on different nodes if possible."""
        if not servers:
            return
        self._group = placement_group([self._needs] * servers, strategy="SPREAD")
        if not self._group.wait(timeout_s):
            raise StallError(
                f"the cluster has no room for {servers} servers with {self._needs} each within "
                f"{timeout_s:g} s, only {ray.available_resources()}: use fewer servers, or less "
                "for each of them or for the workers"
            )

    def _actor(self, kind: type[Any], bundle: int, **options: Any) -> Any:
        """Start an actor in a bundle of its own; the scheduler shares that of the first server."""
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
        actor = ray.remote(kind).options(**options).remote()
        self._actors.append(actor)
        return actor

    def _wait_until_joined(self, scheduler: Any, deadline: float, timeout_s: float) -> None:
        """Wait for the servers; raise the error of one that has ended."""
        while (joined := _get(scheduler.members.remote(), timeout_s)) < len(self._served):
            ended, _ = ray.wait(self._served, timeout=LOOK_S)
            ray.get(ended)
            if time.monotonic() > deadline:
                raise StallError(
                    f"only {joined} of {len(self._served)} servers have joined within "
                    f"{timeout_s:g} s: see `ray status`, or allow more by timeout_s"
                )

    def _member(self, role: str, rank: int) -> dict[str, object]:
        """Return the settings of one process, with its own token."""
        own = self._token.own(role, rank).text()
        return self._settings | {"role": role, "rank": rank, "token": own}

    # ---- the workers ----

    def _configure_workers(self, timeout_s: float) -> None:
        """Set the environment variables by which init() of each worker finds the job."""
        every = [child_environment(self._member("worker", rank)) for rank in range(self.size)]
        self._variables = list(every[0])
        references = [self._call(rank, enter_environment, one) for rank, one in enumerate(every)]
        done, late = ray.wait(references, num_returns=self.size, timeout=timeout_s)
        ray.get(done)
        if late:
            busy = ", ".join(str(references.index(one)) for one in late)
            raise StallError(
                f"workers {busy} did not answer within {timeout_s:g} s: make actors a job when "
                "they are idle"
            )

    def _dismiss_workers(self) -> None:
        """Let the workers leave that are alive and idle."""
        variables, self._variables = self._variables, []
        references = []
        for rank in range(self.size if variables else 0):
            with contextlib.suppress(ray.exceptions.RayError):
                references.append(self._call(rank, leave, variables))
        _wait(references)


class _Scheduler:
    """The actor of the scheduler."""

    def begin(self, settings: dict[str, object]) -> tuple[str, int]:
        """Start the scheduler, and return its address."""
        own = {
            "scheduler_host": ray.util.get_node_ip_address(), "scheduler_port": 0,
            "linger_s": DAY_S, "start_watch_s": WATCH_S,
        }  # fmt: skip
        self._hosted = HostedScheduler(load(own | settings | PATIENCE))
        self._hosted.start()
        return self._hosted.address

    def members(self) -> int:
        """Return the number of members that have joined."""
        return self._hosted.members

    def close(self) -> None:
        """End the job for all members."""
        self._hosted.close(0)


class _Server:
    """The actor of a server."""

    def serve(self, settings: dict[str, object]) -> int:
        """Serve until the job ends; return the exit status."""
        try:
            return Server(load(settings)).run()
        except ShutdownError:  # the job ended before it began
            return 0


def _as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as options of a Ray actor."""
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {known[name]: value for name, value in resources.items() if name in known}
    rest = {name: value for name, value in resources.items() if name not in known}
    return options | {"resources": rest}


def _get(reference: Any, timeout_s: float) -> Any:
    """Return an answer of the scheduler; StallError after timeout_s."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise StallError(
            f"Ray has not started the job's scheduler within {timeout_s:g} s: see `ray status`, "
            "or allow more by timeout_s"
        ) from error


def _wait(references: Sequence[Any]) -> None:
    """Wait for calls to end, successful or not, up to END_S."""
    if references:
        ray.wait(list(references), num_returns=len(references), timeout=END_S)


# ---- in the workers


def leave(variables: Sequence[str]) -> None:
    """Leave the job, if this process has joined it, and remove its environment variables."""
    with contextlib.suppress(FastPSError):
        fastps.shutdown()
    leave_environment(variables)


# ---- actors of the user


def start(actors: Sequence[Any], **terms: Any) -> Job:
    """Make actors of Ray the workers of a job, by rank; each may call fastps.init() then.

    terms: of Job. Blocks until scheduler and servers run and all actors have their settings; a
    busy actor gets them after its current call. Close the job when its workers are done with it.
    Raises the errors of Job.
    """

    def call(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        return actors[rank].__ray_call__.remote(_call, function, *arguments)

    return Job(len(actors), call, **terms)


def _call(actor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
