# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_lost.py do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from programs_lost import repeated

import fastps.torch as fps
from fastps.collectives.group import Group
from fastps.errors import FastPSError


def sparse(world: Group, array: np.ndarray, out: np.ndarray) -> None:
    """Add sparse tensors, some of whose rows several workers have."""
    places = torch.arange(world.rank, 40_000, 3)[None] // 2
    rows = torch.ones(places.shape[1], 8)
    fps.allreduce(torch.sparse_coo_tensor(places, rows, (20_000, 8)), op=fps.Sum)


def backend(world: Group, array: np.ndarray, out: np.ndarray) -> None:
    """Do what torch's own functions start."""
    if not dist.is_initialized():
        dist.init_process_group("fastps")
    here, there = torch.from_numpy(array), torch.from_numpy(out)
    try:
        dist.all_reduce(here)
        dist.all_gather_into_tensor(there, here)
        dist.reduce_scatter_tensor(here, there)
        dist.all_to_all_single(torch.empty_like(there), there)
    except RuntimeError as error:
        raise error if isinstance(error, FastPSError) else FastPSError(str(error)) from error


def repeat(*, kind: str) -> dict[str, Any]:
    """Do it again and again, until somebody is lost."""
    torch.set_num_threads(1)
    return repeated({"sparse": sparse, "backend": backend}[kind], kind)
