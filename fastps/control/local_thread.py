# SPDX-License-Identifier: Apache-2.0
"""What a thread of another process of this machine does, as the kernel knows it.

Where many processes share a processor, a thread may get none for seconds. It is silent then, and
yet not stopped. A thread is found by the process and the beginning of its name, so that a process
of another namespace with the same number is not taken for it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PULSE, BEATS = "fastps:pulse", "fastps:beats"  # the threads that members and schedulers beat by


def state_of(pid: int, thread: str) -> str:
    """Return the kernel's letter for the state of a thread, empty if there is none."""
    path = stat_of(pid, thread)
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").rpartition(")")[2].split()[0] if path else ""
    return ""


def stat_of(pid: int, thread: str) -> Path | None:
    """Return the kernel's file about a thread; None if there is none."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text("utf-8", "replace").partition("(")[2].startswith(thread):
                return path
    return None
