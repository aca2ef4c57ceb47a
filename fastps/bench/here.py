# SPDX-License-Identifier: Apache-2.0
"""Measure inside a job that the user started: worker 0 leads, every worker obeys.

Commands travel from worker 0 to all through fastps itself. The floor is that of the job: plain
copies when one machine holds it, plain sockets between machines when several do. An error on any
worker ends the job: workers that are at different places cannot go on together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fastps
from fastps.bench.member import Member
from fastps.config import Config

STOP = {"op": "stop"}


class Here:
    """This job as a runner; of use on worker 0 only."""

    def __init__(self, name: str, member: Member) -> None:
        self.name = name
        self._member = member

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Let every worker obey; give worker 0's answer, which speaks for all."""
        _tell(command)
        return [self._member.obey(command)]

    def close(self) -> None:
        """Leave the job to the other runners that share it."""


def is_in_job(config: Config) -> bool:
    """Tell whether the environment makes this process part of a job."""
    return config.rank is not None or bool(config.scheduler_host)


def follow(member: Member) -> None:
    """Obey worker 0 until it stops."""
    while (command := fastps.broadcast_object(None, 0, name="fastps.bench")) != STOP:
        member.obey(command)


def stop() -> None:
    """Let the other workers end."""
    _tell(STOP)


def _tell(command: Mapping[str, Any]) -> None:
    fastps.broadcast_object(dict(command), 0, name="fastps.bench")
