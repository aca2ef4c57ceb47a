# SPDX-License-Identifier: Apache-2.0
"""What rank 0 says of the job it has joined: who is in it, by which way bytes go, and why.

Words only; current.py says them, once for a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastps.config import versions
from fastps.errors import ConfigError
from fastps.security import ciphers
from fastps.transport import shm

if TYPE_CHECKING:
    from fastps.config import Config
    from fastps.session.connections import Connections


def describe(config: Config, connections: Connections) -> str:
    """Return it in two lines."""
    job = connections.job
    apart = len(job.members) - job.size
    joint = 0 if job.is_local else len(job.owners) - apart
    who = [count(job.n_workers, "worker")]
    who += [count(job.validators, "validator")] if job.validators else []
    who += [count(apart, "server")] if apart else []
    where = "validators" if job.validators else "workers"
    who += [f"{count(joint, 'server')} in {where}"] if joint else []
    machines = count(len({item.host_id for item in job.members}), "machine")
    encryption = "" if config.encrypt == "off" else f"; encryption: {_encryption(config)}"
    return (
        f"{versions.describe()}: {', '.join(who)} on {machines}\n"
        f"transport: {connections.describe_links()}; shared memory: {_memory(config, connections)}"
        f"{encryption}"
    )


def count(number: int, what: str) -> str:
    """Count things in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _encryption(config: Config) -> str:
    """Return mode, cipher of this machine and library; a peer without AES has the other cipher."""
    try:
        library = ciphers.load()
    except ConfigError:
        return f"{config.encrypt}, but nothing is encrypted: no libcrypto"
    return f"{config.encrypt}, {ciphers.best_kind().label} by {library}"


def _memory(config: Config, connections: Connections) -> str:
    """Return whether workers of a machine share memory, or why not."""
    job = connections.job
    if any(len(ranks) > 1 for ranks in job.machines):
        return "between workers of a machine"
    if not config.shared_memory:
        return "off (FASTPS_SHARED_MEMORY=0)"
    if config.num_validators:
        return "off (validators: whoever may lie shares none)"
    if config.goes_on and config.num_servers:
        return "off (FASTPS_ON_LOSS=reweight with servers: whoever may die shares none)"
    if reason := shm.can_share(config.shared_memory_bytes):
        return f"off ({reason})"
    return "not needed, one worker on each machine"
