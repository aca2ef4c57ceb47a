# SPDX-License-Identifier: Apache-2.0
"""Shared memory, stage, colocated and separate servers give the same bits, in rank order."""

from __future__ import annotations

from job import run_workers

SCRIPT = """
import hashlib
import sys
import numpy as np
import fastps
fastps.init()
rng = np.random.default_rng(11)  # all draw everybody's values, and keep their own
digests = []
for step, count in enumerate([1, 1000, 70_001, 900_003]):
    for dtype in ("float32", "float16", "float64", "int32"):
        values = [(rng.standard_normal(count) * 100).astype(dtype) for _ in range(fastps.size())]
        array = fastps.empty(count, dtype) if WAY == "registered" else np.empty(count, dtype)
        array[:] = values[fastps.rank()]
        fastps.push_pull(array, f"{dtype}.{count}", average=step % 2 == 0, out=array)
        digests.append(hashlib.sha256(array.tobytes()).hexdigest())
        if dtype in ("float32", "int32"):  # added one by one, as NumPy does it
            total = values[0].copy()
            for value in values[1:]:
                total += value
            if step % 2:
                assert (total == array).all(), (dtype, count)
counts = fastps.statistics()
report([digests, counts["bytes_registered"], counts["bytes_staged"], counts["bytes_over_links"]])
fastps.shutdown()
"""
WAYS = {  # servers and settings; which of the three counters must have grown
    "registered": (0, {"FASTPS_SHARED_MEMORY": "1"}, (True, False, False)),
    "private": (0, {"FASTPS_SHARED_MEMORY": "1"}, (False, True, False)),
    "colocated": (0, {}, (False, False, True)),
    "colocated tcp": (0, {"FASTPS_UNIX_SOCKETS": "0"}, (False, False, True)),
    "apart": (2, {"FASTPS_COLOCATE": "off"}, (False, False, True)),
}


def test_every_way_gives_the_same_bits(tmp_path):
    seen = {}
    for way, (servers, environ, grown) in WAYS.items():
        folder = tmp_path / way.replace(" ", "_")
        folder.mkdir()
        result = run_workers(
            SCRIPT.replace("WAY", repr(way)), folder, workers=3, servers=servers, environ=environ
        ).check()
        for ((digests, *counts),) in result.reports:
            assert tuple(count > 0 for count in counts) == grown, (way, counts)
            seen.setdefault(way, digests)
            assert digests == seen[way], way
    assert all(digests == seen["registered"] for digests in seen.values())
