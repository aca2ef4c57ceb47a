# SPDX-License-Identifier: Apache-2.0
"""Cases for torch.distributed's backend "fastps"; every rank of a job runs them, in their order.

Each rank writes FOLDER/RANK.json: what became of each case, "" for well. After a failure the ranks
may be out of step, so the rest is not run.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fastps.torch as fps

CASES = []
# From 2.14 on torch keeps our Work inside one of its own, with wait() and get_future() alone.
IS_GROUP = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)


def case(function):
    """Add a case to the list."""
    CASES.append(function)
    return function


def refused(call, *arguments) -> str:
    """Give the text of the error that a call raises."""
    try:
        call(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error).lower()
    raise AssertionError("not refused")


def run(folder: Path, wanted: Collection[str]) -> int:
    """Run the cases of these names, or all; give the exit code."""
    torch.set_num_threads(1)
    dist.init_process_group("fastps", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    results = {}
    for function in CASES:
        if wanted and function.__name__ not in wanted:
            continue
        try:
            function(rank, size)
            results[function.__name__] = ""
        except Exception:
            results[function.__name__] = traceback.format_exc()
            break
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if any(results.values()):
        print(*results.values(), flush=True)
        os._exit(1)
    dist.destroy_process_group()
    assert not fps.is_initialized()
    return 0
