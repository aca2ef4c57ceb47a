# SPDX-License-Identifier: Apache-2.0
"""Workers die, and with FASTPS_ON_LOSS=reweight the others go on without them."""

from __future__ import annotations

import random
import signal
import time

import programs_survivors
import pytest
from job import Job

LIMIT_S = 2.0  # between a death and the end of the operation that needed the dead one
WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "tcp": {"FASTPS_UNIX_SOCKETS": "0"},
}
REWEIGHT = {"FASTPS_ON_LOSS": "reweight"}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("workers", "way", "graph", "n_dead"),
    [
        (4, "memory", "one peer", 1), (4, "tcp", "ring", 2), (8, "memory", "static", 2),
        (8, "tcp", "one peer", 2), (4, "memory", "full", 3),
    ],
)  # fmt: skip
def test_the_others_go_on_at_whatever_moment_some_die(workers, way, graph, n_dead):
    seed = time.time_ns() % 100_000
    print("seed", seed)
    chance = random.Random(seed)
    dead = chance.sample(range(workers), n_dead)
    deaths = {str(rank): chance.uniform(0.0, 0.5) for rank in dead}
    arguments = {"steps": 300, "graph": graph, "deaths": deaths}
    with Job(programs_survivors.mixes, workers=workers, servers=0, arguments=arguments,
             environment=WAYS[way] | REWEIGHT) as job:  # fmt: skip
        left = [worker for worker in job.workers if worker.spec.rank not in dead]
        found = [worker.result() for worker in left]
        for rank in dead:
            assert job.workers[rank].wait() == -signal.SIGKILL
        assert all(one["lost"] == sorted(dead) for one in found), found
        assert max(one["slowest"] for one in found) < LIMIT_S, found
        values = [one["value"] for one in found]
        if graph != "ring":  # whose survivors may be two pieces
            assert max(values) - min(values) < 1e-6, values
        job.end_in_order()
