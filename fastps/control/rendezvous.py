# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of workers that another launcher started: rank 0 hosts the scheduler.

Rank 0 posts the scheduler's address and a new token as one text on a `Board` that only processes
of this job can read. A token that the job has already is not posted. Knows no launcher: see
foreign_launch.py. Every wait ends at the start timeout. Threads: rank 0 has those of the scheduler
and of its board.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

from fastps.config import DAY_S, Config
from fastps.control.scheduler_thread import HostedScheduler
from fastps.errors import ConfigError, ProtocolError
from fastps.transport import sockets
from fastps.transport.encryption import check_carried
from fastps.transport.interfaces import own_address

_TOKEN_BYTES = 32
_LOOPBACK = "127.0.0.1"
OWN_PLACE = (
    "give each job its own MASTER_PORT, or its own FASTPS_JOB_ID, the same for all its ranks"
)


class Board(Protocol):
    """A place for one text of rank 0 that only the processes of its job can read."""

    def post(self, text: str) -> None:
        """Post the text; it stays until clear()."""

    def read(self, *, timeout_s: float) -> str:
        """Wait for the text. Raises TransportTimeout or ConfigError, with advice."""

    def clear(self) -> None:
        """Remove the text, which all processes have read."""


def host(
    config: Config, board: Board, *, at: str, is_one_machine: bool, program: str = ""
) -> tuple[dict[str, object], Callable[[], None]]:
    """Host the job's scheduler and post its address; return how to join, and what ends it.

    config: of rank 0. at: an address of this machine, or one that is routed over the network of
    the job. program: what find() compares. An error is posted too, so that the other ranks raise
    it.
    """
    token = config.token or secrets.token_hex(_TOKEN_BYTES)
    posted = {} if config.token or config.token_file else {"token": token}
    try:
        if not is_one_machine:
            check_posted(config, posted)
        settings = _scheduler_config(
            dataclasses.replace(config, token=config.token or posted.get("token", "")),
            at, is_one_machine=is_one_machine,
        )  # fmt: skip
        hosted = HostedScheduler(settings)
    except Exception as error:
        board.post(json.dumps({"error": str(error)}))
        raise
    hosted.start()
    where, port = hosted.address
    job: dict[str, object] = {"scheduler_host": where, "scheduler_port": port, **posted}
    words = job | {"program": program}
    board.post(json.dumps(words))

    def close() -> None:
        atexit.unregister(close)
        hosted.close(settings.shutdown_timeout_s)

    atexit.register(close)  # before the session's: it runs after that
    return job, close


def check_posted(config: Config, job: Mapping[str, object]) -> None:
    """Raise ConfigError for a token that others could read, where nothing may leave in clear."""
    if "token" in job:
        cure = "set FASTPS_TOKEN_FILE to a file with the same token on all machines"
        check_carried(config, by="the launcher", cure=cure)


def find(
    config: Config, board: Board, *, is_one_machine: bool, program: str = ""
) -> dict[str, object]:
    """Wait until rank 0 has posted how to join, and return that; ConfigError if it failed.

    program: the name of this process's program; ConfigError if rank 0 runs another one.
    """
    try:
        job = json.loads(board.read(timeout_s=config.start_timeout_s))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what rank 0 has posted is malformed: {error}") from error
    if not isinstance(job, dict):
        raise ProtocolError("what rank 0 has posted is malformed: it is not an object")
    if "error" in job:
        raise ConfigError(f"rank 0 could not host the job's scheduler: {job['error']}")
    if "begun" in job:
        raise ConfigError(
            f"the job of process {job['begun']} has this meeting place, and began with all its "
            f"ranks: two jobs use one MASTER_PORT or run; {OWN_PLACE}"
        )
    if not is_one_machine:
        check_posted(config, job)
    theirs = job.get("program", "")
    if program and theirs and program != theirs:
        raise ConfigError(
            f"rank 0 runs {theirs!r}, this process {program!r}: two jobs use one MASTER_PORT; "
            f"{OWN_PLACE}"
        )
    known = ("scheduler_host", "scheduler_port", "token")
    return {name: job[name] for name in known if name in job}


def _scheduler_config(config: Config, at: str, *, is_one_machine: bool) -> Config:
    """Return the scheduler's settings; it listens on loopback if the job has one machine."""
    settings = dataclasses.replace(
        config, role="scheduler", rank=None, scheduler_host=at, scheduler_port=0,
        linger_s=DAY_S,  # init() may be called again as long as rank 0 lives
    )  # fmt: skip
    if is_one_machine and not (config.host or config.interface):
        return dataclasses.replace(settings, scheduler_host=_LOOPBACK, host=_LOOPBACK)
    address = own_address(settings)
    is_meant = at == "localhost" or sockets.is_loopback(at)
    if sockets.is_loopback(address) and not is_meant:
        raise ConfigError(
            f"{at} resolves to the loopback on its own machine, which other machines cannot "
            "reach; set FASTPS_HOST or FASTPS_INTERFACE for rank 0"
        )
    return dataclasses.replace(settings, host=address)
