# SPDX-License-Identifier: Apache-2.0
"""What the first use of very many names costs workers that share memory."""

from __future__ import annotations

import programs_many_names
import pytest
from job import WAIT_S, run_job

FEW, MANY = 5_000, 30_000  # more than the ring of shared memory has room for
MOST_BYTES = 8192  # a name, with its result; it was 11 KB while each side had a page of its own


@pytest.mark.timeout(5 * WAIT_S)
def test_the_cost_of_a_name_stays_the_same():
    """Processor time, whose share a loaded machine may halve, grows as the number of names."""
    few, many = (
        run_job(
            programs_many_names.first_uses,
            servers=0,
            timeout_s=2 * WAIT_S,
            arguments={"count": count},
        )
        for count in (FEW, MANY)
    )
    for (spent, _), (spent_before, _) in zip(many, few, strict=True):
        assert spent < 3 * MANY / FEW * spent_before
    assert max(nbytes for _, nbytes in many) < MOST_BYTES
