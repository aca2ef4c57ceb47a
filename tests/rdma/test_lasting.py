# SPDX-License-Identifier: Apache-2.0
"""Buffers that a server keeps for peers that write without asking; over plain links here."""

from __future__ import annotations

import pytest
import rdma_net  # noqa: F401  (makes the conformance suite importable)
import test_push_pull as engines
from transport_nets import wait_until


@pytest.mark.parametrize("kind", ["tcp4", "inproc", "colocated"])
@pytest.mark.parametrize("limit_bytes", [0, 100_000, 1 << 30])
def test_sums_are_right_and_every_buffer_comes_back(kind, limit_bytes):
    cluster = engines.Cluster(kind, io_threads=2, lasting_bytes=limit_bytes)
    try:
        kept = [pool.statistics().loans for pool in cluster.pools]
        assert engines.run(cluster, [1, -1, 1]) == []
        # a tensor without elements keeps its buffers from one round to the next
        spare = sum(kept) + 2 * engines.N_WORKERS
        wait_until(lambda: sum(p.statistics().loans for p in cluster.pools) <= spare, "the end")
        few = engines.N_SERVERS * limit_bytes // 4000  # smaller ones are not kept
        assert sum(kept) <= few
        assert sum(kept) > (90 if limit_bytes == 1 << 30 else 0) - (limit_bytes == 0)
    finally:
        cluster.close()  # checks that nothing is lent any more
