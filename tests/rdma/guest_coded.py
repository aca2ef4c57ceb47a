# SPDX-License-Identifier: Apache-2.0
"""Codecs, operations among neighbours and windows of whole jobs over RDMA, where a device is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guest_jobs import JOB_TIMEOUT_S, RDMA, ROOT
from job import run_workers

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import fastps
{body}
"""
CODECS = """
import programs_compression as programs
wanted = "onebit all", "topk all", "int4"
programs.GRID = {name: programs.GRID[name] for name in wanted}
programs.STEPS = 3
report(programs.grid())
"""
NEIGHBORS = """
import programs_coded as programs
fastps.init(min_compress_bytes=0)
me, n = fastps.rank(), fastps.size()
programs.CODINGS = {name: programs.CODINGS[name] for name in ("onebit", "topk", "int4")}
programs.follows_the_recursion(me, n)
report(fastps.statistics()["work_requests"])
"""
PLAIN = """
import os
os.environ["FASTPS_MACHINE"] = "machine " + os.environ["FASTPS_RANK"]
import programs_graph as programs
programs.SIZES = (0, 1, 9_001, 100_003)
fastps.init()
me, n = fastps.rank(), fastps.size()
for part in (programs.dynamic, programs.in_flight, programs.gathered, programs.gossip):
    part(me, n)
fastps.barrier()
fastps.shutdown()
report(programs.hierarchy())
"""
WINDOWS = """
import programs_windows as programs
report(programs.everything())
"""
WRITES = """
import numpy as np
fastps.init()
me, found = fastps.rank(), []
for nbytes in (1 << 20, 20 << 20):
    array = np.full(nbytes // 4, me + 1, np.float32)
    fastps.win_create(array, str(nbytes), zero_init=True)
    fastps.barrier()
    before = fastps.statistics()["announced"]
    fastps.win_put(array, str(nbytes))
    found.append(fastps.statistics()["announced"] - before)
    fastps.barrier()
    assert np.all(fastps.win_update(str(nbytes)) == 1.5)
    fastps.barrier()
    fastps.win_free(str(nbytes))
fastps.shutdown()
report(found)
"""


def run(body: str, folder: Path, **options: Any) -> tuple[Any, ...]:
    """Run a body in two workers; give what they report."""
    script = SCRIPT.format(folder=str(ROOT / "tests" / "cluster"), body=body)
    environ = RDMA | {"FASTPS_SHARED_MEMORY": "0", "FASTPS_PARTITION_BYTES": "131072"}
    result = run_workers(script, folder, timeout_s=JOB_TIMEOUT_S, environ=environ, **options)
    return result.check().reports


@pytest.mark.timeout(200)
def test_servers_sum_what_is_encoded(tmp_path):
    (one,), (other,) = run(CODECS, tmp_path, servers=1)  # the first one compares with NumPy
    assert list(one) == ["onebit all", "topk all", "int4"]
    assert one == other


@pytest.mark.timeout(200)
def test_neighbors_mix_what_is_encoded(tmp_path):
    for (requests,) in run(NEIGHBORS, tmp_path, servers=0):
        assert requests > 0


@pytest.mark.timeout(200)
def test_neighbors_and_machines_mix_beside_a_server(tmp_path):
    found = run(PLAIN, tmp_path, servers=1)
    assert found == (([0, 2],), ([1, 2],))


@pytest.mark.timeout(200)
def test_windows(tmp_path):
    assert run(WINDOWS, tmp_path, servers=0) == (("done",), ("done",))


@pytest.mark.timeout(100)
def test_a_put_is_one_write(tmp_path):
    """Up to 16 MiB: each is announced, and no byte is looked at before the last has come."""
    assert run(WRITES, tmp_path, servers=0) == (([1, 2],), ([1, 2],))
