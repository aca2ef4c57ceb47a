# SPDX-License-Identifier: Apache-2.0
"""A million operations, under names that are forgotten or none, keep memory flat: make soak.

FASTPS_SOAK_NAMES: how many names each way uses, for a shorter look.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[1] / "cluster"
sys.path.insert(0, str(CLUSTER))

import programs_forget  # noqa: E402
import programs_sets  # noqa: E402
from job import Job, run_job  # noqa: E402
from test_collectives import WAYS as ROUTES  # noqa: E402
from test_forget import SMALL, WAYS  # noqa: E402

NAMES = int(os.environ.get("FASTPS_SOAK_NAMES", "1000000"))
BATCH = 500
WARM = 20  # batches; allocators and interpreters have what they keep by then
TIMEOUT_S = 3600.0
MAX_GROWTH_BYTES = 4 << 20  # of a process: four bytes for each name


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("way", ["shared", "apart", "joint", "machines"])
def test_memory_stays_flat(way):
    workers, servers, environment, each = WAYS[way]
    with Job(
        programs_forget.cycles,
        workers=workers,
        servers=servers,
        arguments={"batches": WARM + NAMES // BATCH, "batch": BATCH, "warm": WARM},
        environment=SMALL | environment,
        each=each,
    ) as job:
        apart = [*job.servers, job.scheduler]
        job.workers[0].wait_line("WARM", timeout_s=TIMEOUT_S)
        before = [programs_forget.memory_of(process.pid) for process in apart]
        job.workers[0].wait_line("LAST", timeout_s=TIMEOUT_S)
        after = [programs_forget.memory_of(process.pid) for process in apart]
        results = job.results(TIMEOUT_S)
        job.end_in_order()
    grown = {
        process.spec.name: new - old
        for process, old, new in zip(apart, before, after, strict=True)
    }
    for rank, (warm, end) in enumerate(results):
        assert warm[0] == end[0]
        assert end[1] - warm[1] < 2 * BATCH, "Python objects"
        grown[f"worker {rank}"] = end[2] - warm[2]
    sys.stderr.write(f"\n{way}: bytes more after {NAMES} names: {grown}\n")
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_operations_without_a_name_keep_memory_flat(way):
    found = run_job(
        programs_sets.nameless, workers=2, servers=0, timeout_s=TIMEOUT_S, environment=ROUTES[way],
        arguments={"operations": NAMES, "warm": 20_000},
    )  # fmt: skip
    grown = [end - warm for warm, end in found]
    sys.stderr.write(f"\n{way}: bytes more after {NAMES} operations without a name: {grown}\n")
    assert max(grown) < MAX_GROWTH_BYTES, grown
