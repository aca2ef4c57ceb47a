# SPDX-License-Identifier: Apache-2.0
"""The names of the machine that a process announces to the others.

Decides two names: equal host ids mean that processes reach each other by Unix sockets, equal
machine names that they can share memory. Reads the kernel's boot id, network namespace and process
namespace.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fastps.config import Config

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
NETWORK_FILE = Path("/proc/self/ns/net")
PROCESSES_FILE = Path("/proc/self/ns/pid")
APART = "#"  # begins a suffix that distinguishes processes which cannot share memory
RANDOM_BYTES = 8


def host_id() -> str:
    """Return a name of the kernel and network namespace, the reach of abstract Unix sockets."""
    return f"{_boot_id()}/{_number_of(NETWORK_FILE)}"


def machine_name(config: Config, *, is_shared: bool) -> str:
    """Return the configured machine name, else the host id; unique to us if not is_shared.

    In elastic jobs, workers of several process namespaces share no memory: a survivor ends a
    stopped worker of its machine by its process id, which is another process's elsewhere.
    """
    name = config.machine or host_id()
    if config.is_elastic and is_shared:
        return f"{name}{APART}{_number_of(PROCESSES_FILE)}"
    return name if is_shared else f"{name}{APART}{os.getpid()}-{secrets.token_hex(RANDOM_BYTES)}"


def host_of(machine: str) -> str:
    """Return the machine name that processes have in common, whether or not they share memory."""
    return machine.partition(APART)[0]


def _boot_id() -> str:
    """Return the kernel's boot id, which differs even between machines of equal names."""
    try:
        return BOOT_ID_FILE.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return os.uname().nodename


def _number_of(namespace: Path) -> int:
    try:
        return namespace.stat().st_ino
    except OSError:
        return 0
