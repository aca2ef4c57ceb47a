# SPDX-License-Identifier: Apache-2.0
"""The operations as users of NumPy call them, over whole jobs."""

from __future__ import annotations

import programs_faces
import pytest
from job import run_job


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), (3, 1)])
def test_operations_equal_numpy(workers, servers):
    found = run_job(programs_faces.everything, workers=workers, servers=servers)
    assert found == ["done"] * workers


def test_adasum_is_what_its_definition_says():
    assert run_job(programs_faces.adasum, workers=4, servers=0) == ["done"] * 4
