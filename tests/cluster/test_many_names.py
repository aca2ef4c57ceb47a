# SPDX-License-Identifier: Apache-2.0
"""What the first use of very many names costs workers that share memory."""

from __future__ import annotations

import programs_many_names
import pytest
from job import WAIT_S, run_job

FEW, MANY = 5_000, 30_000  # more than the ring of shared memory has room for
# Of a name with its result, which is 150 bytes: its object and records are 0.6 KB, its places in
# tables and in shared memory the rest, and over sockets what the joint server keeps of it.
WAYS = {"memory": ("1", 1536), "sockets": ("0", 4608)}


@pytest.mark.timeout(5 * WAIT_S)
@pytest.mark.parametrize("way", WAYS)
def test_the_cost_of_a_name_stays_the_same(way):
    """Processor time, whose share a loaded machine may halve, grows as the number of names."""
    is_shared, most_bytes = WAYS[way]
    few, many = (
        run_job(
            programs_many_names.first_uses,
            servers=0,
            timeout_s=2 * WAIT_S,
            environment={"FASTPS_SHARED_MEMORY": is_shared},
            arguments={"count": count},
        )
        for count in (FEW, MANY)
    )
    for (spent, _), (spent_before, _) in zip(many, few, strict=True):
        assert spent < 3 * MANY / FEW * spent_before
    assert max(nbytes for _, nbytes in many) < most_bytes
