# SPDX-License-Identifier: Apache-2.0
"""Which processes may access a worker's memory under Yama (kernel.yama.ptrace_scope=1).

Yama takes one process, whose descendants get access: the launcher, whose descendants are the
workers of this machine. Access for all processes is never granted. Knows nothing of pipes.
Threads: any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def choose_root(launcher: int, ancestors: Sequence[int]) -> int:
    """Choose the process whose descendants get access; 0: there is none. Pure.

    launcher: the process id that fastps-run told its workers, 0 without fastps-run. ancestors:
    from the parent on. A launcher that is no ancestor has an id of another pid namespace; then the
    parent is chosen, as under other launchers. Process 1 is never chosen: all descend from it.
    """
    root = launcher if launcher in ancestors else next(iter(ancestors), 0)
    return root if root > 1 else 0


def list_ancestors() -> list[int]:
    """List the ancestors of this process from the parent on, as far as /proc shows them."""
    found: list[int] = []
    parent = os.getppid()
    with contextlib.suppress(OSError):  # /proc may hide processes of other users
        while parent > 0:
            found.append(parent)
            stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
    return found
