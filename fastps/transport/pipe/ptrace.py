# SPDX-License-Identifier: Apache-2.0
"""Whom a worker lets reach into its memory where Yama (kernel.yama.ptrace_scope=1) restricts it.

Yama takes one process, whose descendants may: the launcher, whose descendants are this machine's
workers, and never anybody. Knows nothing of pipes. Threads: any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def choose_root(launcher: int, ancestors: Sequence[int]) -> int:
    """Choose the process whose descendants may; 0: there is none. Pure.

    launcher: fastps-run by its own word, 0 without one. ancestors: from the parent on. A launcher
    that is none of them is a number of another pid namespace, here a stranger's; then it is the
    parent, as under other launchers. From process 1 everybody descends.
    """
    root = launcher if launcher in ancestors else next(iter(ancestors), 0)
    return root if root > 1 else 0


def list_ancestors() -> list[int]:
    """List the processes from this one's parent up, as far as they are to be seen."""
    found: list[int] = []
    parent = os.getppid()
    with contextlib.suppress(OSError):  # of others, where /proc hides them
        while parent > 0:
            found.append(parent)
            stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
    return found
