# SPDX-License-Identifier: Apache-2.0
"""A job among actors of Ray: its scheduler and servers are actors, its workers somebody else's.

The job's token stays with whoever made the job, and with the scheduler; every other process gets
its own. Tokens travel as arguments of calls between Ray's processes, never in an environment or a
command that others can read. Every wait has a deadline. Threads: the caller's; a server has the
main thread of its actor.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import fastps
from fastps.config import DAY_S, child_environment, load
from fastps.config.token import enter_environment, leave_environment
from fastps.control.scheduler_thread import HostedScheduler
from fastps.errors import ConfigError, FastPSError, ShutdownError, StallError
from fastps.security.tokens import Token
from fastps.server.server import Server

TOKEN_BYTES = 32
TIMEOUT_S = 60.0
END_S = 10.0  # for those who are told to end
WATCH_S = 60.0  # as start_watch_s: while workers load data nobody need be told of them
LOOK_S = 0.1  # how often it is looked whether the servers have joined
PATIENCE = {"start_timeout_s": DAY_S}  # workers may load data for long before they call init()
# What each process of a job has of its own.
OF_THE_JOB = ("token", "token_file", "role", "rank", "size", "num_servers", "scheduler_host",
              "scheduler_port", "job_id")  # fmt: skip


Tell = Callable[..., Any]  # of a rank, a function and its arguments: the promise of its result


class Job:
    """A job of `size` workers that are there already, until close(); a context.

    tell: runs a function, with arguments, in the process of a rank, and gives Ray's promise.
    servers: processes that only add, each an actor with resources_per_server (1 CPU); a placement
    group spreads them over the nodes. settings: of fastps.init(), for all processes.
    Blocks until servers are there and workers were told, up to timeout_s seconds for each. Raises
    ConfigError for settings, and StallError where the cluster has no room or a worker is busy.
    """

    def __init__(
        self,
        size: int,
        tell: Tell,
        *,
        servers: int = 0,
        resources_per_server: Mapping[str, float] | None = None,
        settings: Mapping[str, object] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        given = dict(settings or {})
        if wrong := sorted({*given} & {*OF_THE_JOB}):
            raise ConfigError(f"settings has {wrong[0]!r}, which the job sets by itself")
        self.size = size
        self._tell = tell
        self._needs = dict(resources_per_server or {"CPU": 1})
        self._token = Token(secrets.token_hex(TOKEN_BYTES).encode())
        self._settings: dict[str, object] = given | {
            "size": size, "num_servers": servers, "job_id": f"ray-{secrets.token_hex(4)}",
        }  # fmt: skip
        self._told: list[str] = []  # the variables of the workers
        self._group: Any = None
        self._actors: list[Any] = []
        self._served: list[Any] = []
        try:
            self._start(servers, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let workers leave, and end servers and scheduler; idempotent. Blocks up to 30 s."""
        self._let_go()
        actors, self._actors = self._actors, []
        _wait([one.close.remote() for one in actors[:1]])  # the scheduler, who tells the servers
        _wait(self._served)
        for actor in actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def __enter__(self) -> Job:
        """Be a context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the job."""
        self.close()

    # ---- starting ----

    def _start(self, servers: int, deadline: float, timeout_s: float) -> None:
        load(self._settings | {"role": "scheduler", "token": "0" * TOKEN_BYTES})  # or ConfigError
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
        self._tell_workers(timeout_s)

    def _make_room(self, servers: int, timeout_s: float) -> None:
        """Reserve what the servers need, apart from each other where that can be."""
        if not servers:
            return
        self._group = placement_group([self._needs] * servers, strategy="SPREAD")
        if not self._group.wait(timeout_s):
            raise StallError(
                f"the cluster has no room for {servers} servers with {self._needs} each within "
                f"{timeout_s:g} s: it has {ray.available_resources()} left; take fewer servers, "
                "less for each, or leave the workers less"
            )

    def _actor(self, kind: type[Any], bundle: int, **options: Any) -> Any:
        """Start an actor in a place of its own; the scheduler is beside the first server."""
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
        actor = ray.remote(kind).options(**options).remote()
        self._actors.append(actor)
        return actor

    def _wait_until_joined(self, scheduler: Any, deadline: float, timeout_s: float) -> None:
        """Wait for the servers; raise what one of them ended with."""
        while (joined := _get(scheduler.members.remote(), timeout_s)) < len(self._served):
            ended, _ = ray.wait(self._served, timeout=LOOK_S)
            ray.get(ended)
            if time.monotonic() > deadline:
                raise StallError(
                    f"{joined} of {len(self._served)} servers have joined within {timeout_s:g} s"
                )

    def _member(self, role: str, rank: int) -> dict[str, object]:
        """Return the settings of one process, its own token among them."""
        own = self._token.own(role, rank).text()
        return self._settings | {"role": role, "rank": rank, "token": own}

    # ---- the workers ----

    def _tell_workers(self, timeout_s: float) -> None:
        """Let init() of each worker find the job."""
        every = [child_environment(self._member("worker", rank)) for rank in range(self.size)]
        self._told = list(every[0])
        promises = [self._tell(rank, enter_environment, one) for rank, one in enumerate(every)]
        done, late = ray.wait(promises, num_returns=self.size, timeout=timeout_s)
        ray.get(done)
        if late:
            busy = ", ".join(str(promises.index(one)) for one in late)
            raise StallError(
                f"workers {busy} did not answer within {timeout_s:g} s: make actors a job when "
                "they are idle"
            )

    def _let_go(self) -> None:
        """Have the workers leave that are alive and not at work."""
        told, self._told = self._told, []
        promises = []
        for rank in range(self.size if told else 0):
            with contextlib.suppress(ray.exceptions.RayError):
                promises.append(self._tell(rank, leave, told))
        _wait(promises)


class _Scheduler:
    """The actor that brings the others together."""

    def begin(self, settings: dict[str, object]) -> tuple[str, int]:
        """Serve, and give the address."""
        here = ray.util.get_node_ip_address()
        where = {"scheduler_host": here, "scheduler_port": 0, "linger_s": DAY_S}
        where |= {"start_watch_s": WATCH_S}
        self._hosted = HostedScheduler(load(where | settings | PATIENCE))
        self._hosted.start()
        return self._hosted.address

    def members(self) -> int:
        """Count who has joined."""
        return self._hosted.members

    def close(self) -> None:
        """Tell all that the job is over."""
        self._hosted.close(0)


class _Server:
    """An actor that adds."""

    def serve(self, settings: dict[str, object]) -> int:
        """Serve until the job is over; give the exit status."""
        try:
            return Server(load(settings)).run()
        except ShutdownError:  # the job was over before it began
            return 0


def _as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return what an actor needs, as Ray wants to be told."""
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {known[name]: value for name, value in resources.items() if name in known}
    rest = {name: value for name, value in resources.items() if name not in known}
    return options | {"resources": rest}


def _get(promise: Any, timeout_s: float) -> Any:
    """Wait for an answer of the scheduler."""
    try:
        return ray.get(promise, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise StallError(
            f"Ray has not started the job's scheduler within {timeout_s:g} s; see `ray status`"
        ) from error


def _wait(promises: Sequence[Any]) -> None:
    """Wait for an end, well or not, but not for long."""
    if promises:
        ray.wait(list(promises), num_returns=len(promises), timeout=END_S)


# ---- in the workers


def leave(variables: Sequence[str]) -> None:
    """Leave the job that this process has joined, if it has, and forget what it was told."""
    with contextlib.suppress(FastPSError):
        fastps.shutdown()
    leave_environment(variables)


# ---- actors of the user


def start(actors: Sequence[Any], **terms: Any) -> Job:
    """Make actors of Ray the workers of a job, by rank: each may call fastps.init().

    terms: of Job. Blocks until scheduler and servers are there and all actors know; one that is
    at work hears of it when that is done. Close the job when its workers are done with it. Raises
    as Job does.
    """

    def tell(rank: int, function: Callable[..., Any], *words: Any) -> Any:
        return actors[rank].__ray_call__.remote(_call, function, *words)

    return Job(len(actors), tell, **terms)


def _call(actor: Any, function: Callable[..., Any], *words: Any) -> Any:
    return function(*words)
