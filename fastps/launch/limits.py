# SPDX-License-Identifier: Apache-2.0
"""What the machine gives the launcher: descriptors, standard streams, and memory until it is out.

Looks before the start, so that a limit is named once and at once; decides nothing later.
"""

from __future__ import annotations

import os
import pathlib
import resource
import sys

from fastps.errors import FastPSError
from fastps.launch.layout import Layout

OWN_DESCRIPTORS = 40  # of the interpreter, the event loops and what a worker opens itself
PER_CHILD, PER_MEMBER = 3, 3  # pipes and a moment's more; control connection, pulse, a newcomer
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
    """Lead standard streams that are closed nowhere: another file would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    nowhere = pathlib.Path(os.devnull)
    sys.stdout = sys.stdout or nowhere.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nowhere.open("w", encoding="utf-8")


def provide_descriptors(layout: Layout, *, n_children: int) -> None:
    """Raise the soft limit of open files to what the job needs; StartError where it is too low."""
    members = layout.size + layout.num_servers
    here = PER_MEMBER * members if layout.has_scheduler else 0
    need = OWN_DESCRIPTORS + PER_CHILD * n_children + here
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise StartError(
            f"too few open files are allowed: {hard}, and this job needs {need} on this machine; "
            f"raise the limit (`ulimit -n {need}`, LimitNOFILE of a service)",
            exit_code=2,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def memory_kills(own: pathlib.Path = OWN_GROUPS, root: pathlib.Path = CONTROL_GROUPS) -> int:
    """Count what the kernel has killed for lack of memory in our control group; 0 if unknown."""
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
