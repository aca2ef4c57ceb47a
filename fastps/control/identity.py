# SPDX-License-Identifier: Apache-2.0
"""Which machine a process is on, as it tells the others.

Decides two names: which processes reach each other by Unix sockets, and which can share memory.
Reads the kernel's boot id and network namespace; starts nothing.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fastps.config import Config

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
NETWORK_FILE = Path("/proc/self/ns/net")
APART = "#"  # what follows tells apart processes of one machine that cannot share memory
RANDOM_BYTES = 8


def host_id() -> str:
    """Name the kernel and the network namespace; abstract Unix sockets reach no further."""
    return f"{_boot_id()}/{_network_namespace()}"


def machine_name(config: Config, *, is_shared: bool) -> str:
    """Name the machine as configured, else by its host id; a process alone if not is_shared."""
    name = config.machine or host_id()
    return name if is_shared else f"{name}{APART}{os.getpid()}-{secrets.token_hex(RANDOM_BYTES)}"


def host_of(machine: str) -> str:
    """Return the name of the machine that processes share whether or not they share memory."""
    return machine.partition(APART)[0]


def _boot_id() -> str:
    """Return what tells machines apart even where their names are equal."""
    try:
        return BOOT_ID_FILE.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return os.uname().nodename


def _network_namespace() -> int:
    try:
        return NETWORK_FILE.stat().st_ino
    except OSError:
        return 0
