# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_policies.py do."""

from __future__ import annotations

import numpy as np

import fastps
from fastps.contract.contract import ANY_STALENESS, Policy
from fastps.errors import ConfigError, MismatchError
from fastps.session import current
from fastps.types import DType

COUNT = 50_003
STEPS = (31, 7, 3)


def delta(rank: int, step: int) -> np.ndarray:
    """Make what a worker pushes."""
    return np.random.default_rng([rank, step]).integers(-1000, 1000, COUNT)


def accumulate(staleness: int) -> int:
    """Push as often as this worker likes; in the end all see the sum of everything."""
    fastps.init()
    terms = {"policy": Policy.ACCUMULATE, "staleness": staleness}
    current.current().declare([("a", (COUNT,), DType.INT64)], **terms)
    rank, size = fastps.rank(), fastps.size()
    for step in range(STEPS[rank] if staleness == ANY_STALENESS else STEPS[0]):
        fastps.push_pull(delta(rank, step), "a", average=False)
    fastps.barrier()
    seen = fastps.push_pull(np.zeros(COUNT, np.int64), "a", average=False)
    steps = STEPS if staleness == ANY_STALENESS else (STEPS[0],) * size
    total = sum(delta(other, n) for other in range(size) for n in range(steps[other]))
    assert np.array_equal(seen, total)
    return int(seen.sum())


def disagree() -> str:
    """Declare one name with two policies."""
    fastps.init()
    policy = Policy.ACCUMULATE if fastps.rank() else Policy.SUM
    try:
        current.current().declare([("a", (4,), DType.INT64)], policy=policy)
        fastps.push_pull(np.zeros(4, np.int64), "a")
    except MismatchError as error:
        return str(error)
    return ""


def without_servers() -> str:
    """Ask for a policy that only servers have."""
    fastps.init()
    try:
        current.current().declare([("a", (4,), DType.INT64)], policy=Policy.ACCUMULATE)
    except ConfigError as error:
        return str(error)
    return ""
