# SPDX-License-Identifier: Apache-2.0
"""Give each process of a job a token of its own, derived from the job's token.

The job's token stays with the launcher. Derived tokens are held in memory files of the launcher,
one per process, as long as it lives. `python -m fastps.launch.secrets ROLE RANK` prints one, for a
machine that must not have the job's token. Used from the launcher's main thread.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from fastps.config import load
from fastps.config.token import drop_token, hold_token
from fastps.errors import ConfigError
from fastps.launch.plan import ProcessSpec
from fastps.security.tokens import ROLES, Token, parse

TOKEN_NAMES = ("FASTPS_TOKEN", "FASTPS_TOKEN_FILE")


class Handout:
    """The tokens of a job's processes; a restart gets the same ones."""

    def __init__(self, secret: bytes) -> None:
        """Hold the launcher's secret: the job's token, the token of one member, or nothing."""
        token = parse(secret)
        self._job = None if token.is_own or not secret else token
        self._held: dict[Token, tuple[str, str]] = {}

    def hand_out(self, plan: Sequence[ProcessSpec]) -> tuple[ProcessSpec, ...]:
        """Return the processes, each with its own token if the launcher has the job's token."""
        if self._job is None:
            return tuple(plan)
        return tuple(self._with_own(spec, self._job) for spec in plan)

    def close(self) -> None:
        """Drop all tokens, so that no process can join with them any more; idempotent."""
        for _, value in self._held.values():
            drop_token(value)
        self._held.clear()

    def _with_own(self, spec: ProcessSpec, job: Token) -> ProcessSpec:
        own = job.own(spec.role, spec.rank)
        if own not in self._held:
            self._held[own] = hold_token(own.text())
        name, value = self._held[own]
        rest = {key: it for key, it in spec.environment.items() if key not in TOKEN_NAMES}
        return dataclasses.replace(spec, environment=rest | {name: value})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the token of one member, made from FASTPS_TOKEN_FILE; return the exit status."""
    role, rank, *_ = [*(sys.argv[1:] if arguments is None else arguments), "", ""]
    try:
        job = parse(load().token_bytes())
        if job.is_own or role not in ROLES or not rank.isdecimal():
            raise ConfigError(
                f"give a role ({', '.join(ROLES)}) and a rank, and set FASTPS_TOKEN_FILE to a "
                "file with the job's token"
            )
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{job.own(role, int(rank)).text()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
