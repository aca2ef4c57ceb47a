# SPDX-License-Identifier: Apache-2.0
"""Neighbour averaging with codecs over whole jobs, against all workers in NumPy."""

from __future__ import annotations

import programs_coded
import pytest
from job import run_job
from test_collectives import WAYS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("workers", "way"), [(4, "memory"), (3, "tcp")])
def test_neighbors_mix_what_they_decode(workers, way):
    found = run_job(
        programs_coded.everything, workers=workers, servers=0, environment=WAYS[way],
        timeout_s=200.0,
    )  # fmt: skip
    assert found == ["done"] * workers
