# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine: open files, standard streams, and kills for lack of memory.

Open files are checked before the start, so that a limit that is too low is one clear error.
"""

from __future__ import annotations

import os
import pathlib
import resource
import sys

from fastps.errors import FastPSError
from fastps.launch.layout import Layout

OWN_DESCRIPTORS = 40  # of the interpreter, an event loop and the process's own files
# In the launcher: pipes and one spare. In the scheduler: control connection, pulse, one half open.
PER_CHILD, PER_MEMBER = 3, 3
CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
_COUNTER = "oom_kill"


class StartError(FastPSError):
    """A command could not be started; `exit_code` is what a shell would return."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        """Carry the shell's exit code with the message."""
        super().__init__(message)
        self.exit_code = exit_code


def hold_standard_streams() -> None:
    """Open closed standard streams on /dev/null: else another file would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    nowhere = pathlib.Path(os.devnull)
    sys.stdout = sys.stdout or nowhere.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nowhere.open("w", encoding="utf-8")


def provide_descriptors(layout: Layout, *, n_children: int) -> None:
    """Raise the soft limit of open files as far as the job needs; StartError if it cannot be."""
    members = layout.size + layout.num_servers
    of_scheduler = PER_MEMBER * members if layout.has_scheduler else 0
    need = OWN_DESCRIPTORS + max(PER_CHILD * (n_children + layout.has_scheduler), of_scheduler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise StartError(
            f"this job needs {need} open files on this machine, but the limit is {hard}; raise it "
            f"(`ulimit -n {need}`, or LimitNOFILE of a service)",
            exit_code=2,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def memory_kills(own: pathlib.Path = OWN_GROUPS, root: pathlib.Path = CONTROL_GROUPS) -> int:
    """Return how often the kernel killed for lack of memory in our cgroup; 0 if unknown."""
    try:
        for line in own.read_text("ascii", "replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                return _count(root / path.lstrip("/") / "memory.events")
            if "memory" in controllers.split(","):
                return _count(root / "memory" / path.lstrip("/") / "memory.oom_control")
    except (OSError, ValueError):
        pass
    return 0


def _count(table: pathlib.Path) -> int:
    words = (line.split() for line in table.read_text("ascii", "replace").splitlines())
    return next((int(pair[1]) for pair in words if pair[:1] == [_COUNTER]), 0)
