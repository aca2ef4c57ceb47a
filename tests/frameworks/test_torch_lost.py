# SPDX-License-Identifier: Apache-2.0
"""A worker that is killed in the middle of an operation on tensors is named on all others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import programs_torch_lost
from job import Job, check_told

WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "unix": {"FASTPS_SHARED_MEMORY": "0"},
    "tcp": {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "0"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sparse", "backend"])
def test_killed_in_the_middle_of_an_operation(kind, way):
    each = {("worker", 1): {"FASTPS_FAULT": "link_send@60:kill"}}
    with Job(
        programs_torch_lost.repeat, workers=3, servers=0, arguments={"kind": kind},
        environment=WAYS[way], each=each,
    ) as job:  # fmt: skip
        check_told(job, job.workers[1], (0, 2), "worker 1")
