# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_many_names.py do: tensors by the ten thousand, all new."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import fastps


def resident_bytes() -> int:
    """Return the memory of this process, with what it shares."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def first_uses(count: int) -> list[float]:
    """Return seconds of processor time, and bytes a name, of the first use of so many at once."""
    fastps.init()
    me, n = fastps.rank(), fastps.size()
    fastps.push_pull(np.ones(4, np.float32), "warm")
    arrays = [np.full(4, me + 1.0, np.float32) for _ in range(count)]
    names = [f"layer{i}.weight" for i in range(count)]
    resident, began = resident_bytes(), time.process_time()
    made = fastps.push_pull(arrays, names, average=False)
    spent, used = time.process_time() - began, resident_bytes() - resident
    assert all((one == n * (n + 1) / 2).all() for one in made)
    again = fastps.push_pull(arrays, names, average=False)
    assert all((one == n * (n + 1) / 2).all() for one in again)
    fastps.shutdown()
    return [spent, used / count]
