# SPDX-License-Identifier: Apache-2.0
"""How workers that another launcher started come together: rank 0 hosts the scheduler.

Its address and a fresh token are one text on a `Board` that only this job's processes can read;
where a job has a token already it stays where it is. Knows no launcher: see foreign_launch.py.
Every wait ends at the start timeout. Threads: rank 0 has the scheduler's, and that of its board.
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
from fastps.errors import ConfigError
from fastps.transport import sockets
from fastps.transport.interfaces import own_address

_TOKEN_BYTES = 32
_LOOPBACK = "127.0.0.1"


class Board(Protocol):
    """Where rank 0 leaves one text for the processes of its job, and for nobody else."""

    def post(self, text: str) -> None:
        """Leave the text; it stays until clear()."""

    def read(self, *, timeout_s: float) -> str:
        """Wait for the text; TransportTimeout or ConfigError say what to do where none comes."""

    def clear(self) -> None:
        """Take the text away: all who were to read it have."""


def host(
    config: Config, board: Board, *, at: str, is_one_machine: bool
) -> tuple[dict[str, object], Callable[[], None]]:
    """Host the job's scheduler and tell the others; give how to join, and what ends it.

    config: of the worker of rank 0. at: an address of this machine, or one to which the way leads
    over the network of the job. Others are told too why that cannot be.
    """
    token = config.token or secrets.token_hex(_TOKEN_BYTES)
    told = {} if config.token or config.token_file else {"token": token}
    try:
        settings = _scheduler_config(
            dataclasses.replace(config, token=config.token or told.get("token", "")),
            at, is_one_machine=is_one_machine,
        )  # fmt: skip
        hosted = HostedScheduler(settings)
    except Exception as error:
        board.post(json.dumps({"error": str(error)}))
        raise
    hosted.start()
    where, port = hosted.address
    job: dict[str, object] = {"scheduler_host": where, "scheduler_port": port, **told}
    board.post(json.dumps(job))

    def close() -> None:
        atexit.unregister(close)
        hosted.close(settings.shutdown_timeout_s)

    atexit.register(close)  # before the session's: it runs after that
    return job, close


def find(board: Board, *, timeout_s: float) -> dict[str, object]:
    """Wait until rank 0 has told how to join, and give that; ConfigError if it could not host."""
    job: Mapping[str, object] = json.loads(board.read(timeout_s=timeout_s))
    if "error" in job:
        raise ConfigError(f"rank 0 could not host the job's scheduler: {job['error']}")
    known = ("scheduler_host", "scheduler_port", "token")
    return {name: job[name] for name in known if name in job}


def _scheduler_config(config: Config, at: str, *, is_one_machine: bool) -> Config:
    """Choose where to listen: on the loopback if no other machine can be meant."""
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
            f"{at} leads to the loopback on its own machine, where other machines cannot come; "
            "set FASTPS_HOST or FASTPS_INTERFACE for rank 0"
        )
    return dataclasses.replace(settings, host=address)
