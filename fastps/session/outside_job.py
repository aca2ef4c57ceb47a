# SPDX-License-Identifier: Apache-2.0
"""Notice that a worker of fastps-run trains without its job, and say so when it ends.

Evidence is a session of fewer workers than fastps-run has started, or an optimizer of torch in a
process that joined neither that job nor a group of torch.distributed. The launcher reads the line
and makes the job a failure; a program that does not train is not spoken of. One thread.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

WORDS = b"without having been in one job with the others"  # for the launcher
_seen: set[int] = set()  # sizes of the sessions of this process


def watch(size: int = 0) -> None:
    """Look at the end of a worker of several; size: of a session that has begun."""
    if _launched_size() > 1:
        _seen.update([size] if size else [])
        atexit.unregister(_say)
        atexit.register(_say)


def _launched_size() -> int:
    """Return how many workers fastps-run started with this process; 0 under anything else."""
    told = _environment()
    is_worker = "FASTPS_LAUNCHER_PID" in told and told.get("FASTPS_ROLE") == "worker"
    size = told.get("FASTPS_SIZE", "") if is_worker else ""
    return int(size) if size.isdecimal() else 0


def _environment() -> dict[str, str]:
    from fastps.config import process_environment  # noqa: PLC0415  (fastps is imported fast)

    return process_environment()


def _say() -> None:
    """Say that this worker trained alone, if it did."""
    size = _launched_size()
    has_failed = hasattr(sys, "last_value")  # an exception is the cause, and is shown
    if has_failed or size <= max(_seen, default=0) or not _is_worker():
        return
    if not _seen and not _has_trained(sys.modules.get("torch")):
        return
    sys.stderr.write(
        f"[fastps] worker {_environment().get('FASTPS_RANK')} of {size} ends {WORDS.decode()}\n"
    )
    sys.stderr.flush()


def _is_worker() -> bool:
    """Return whether this is what fastps-run started, maybe in a shell, and no helper of that."""
    leader = os.getpgrp()
    try:
        program = os.path.basename(os.readlink(f"/proc/{leader}/exe"))
    except OSError:
        return False
    return leader == os.getpid() or not program.startswith("python")


def _has_trained(torch: Any) -> bool:
    """Return whether an optimizer was made, and no group of processes by torch."""
    if torch is None or not hasattr(torch, "optim"):
        return False
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    if getattr(groups, "_default_pg_init_method", None) is not None:  # stays when a group ends
        return False
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        if hasattr(kind.step, "hooked"):  # as torch marks the class of the first one that is made
            return True
        kinds += kind.__subclasses__()
    return False
