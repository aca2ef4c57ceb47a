# SPDX-License-Identifier: Apache-2.0
"""Compression over whole jobs: bit for bit what workers and servers do in NumPy."""

from __future__ import annotations

import programs_compression as programs
import pytest
from job import run_job

SMALL = {"FASTPS_PARTITION_BYTES": "131072", "FASTPS_CHUNK_BYTES": "16384"}
KINDS = {
    "one worker": {"workers": 1, "servers": 1},
    "tcp": {"workers": 4, "servers": 2, "environment": {"FASTPS_UNIX_SOCKETS": "0"}},
    "machines": {
        "workers": 3, "servers": 1, "environment": {"FASTPS_SHARED_MEMORY": "1"},
        "each": {("worker", 2): {"FASTPS_SHARED_MEMORY": "0"}},
    },
    "joint": {
        "workers": 3, "servers": 0,
        "environment": {"FASTPS_ENGINE_THREADS": "2", "FASTPS_CODEC_THREADS": "3"},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_the_formulas(kind):
    options = KINDS[kind]
    environment = SMALL | {"FASTPS_FORCE_DISTRIBUTED": "1"} | options.get("environment", {})
    found = run_job(programs.grid, **options | {"environment": environment})
    assert list(found[0]) == list(programs.GRID)
    assert found == [found[0]] * options["workers"]


def test_faces():
    assert run_job(programs.faces, workers=2, servers=1) == ["done"] * 2
