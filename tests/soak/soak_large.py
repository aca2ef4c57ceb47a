# SPDX-License-Identifier: Apache-2.0
"""Arrays of more bytes than 32 bits count go through every way: make soak.

FASTPS_SOAK_GIGABYTES: how large, for a shorter look.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import programs_large
from job import run_job

GIGABYTES = float(os.environ.get("FASTPS_SOAK_GIGABYTES", "5"))
TIMEOUT_S = 2400.0
WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "sockets": {"FASTPS_SHARED_MEMORY": "0"},
}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("way", WAYS)
def test_five_gigabytes(way):
    run_job(
        programs_large.five_gigabytes, workers=2, servers=0, timeout_s=TIMEOUT_S,
        environment=WAYS[way] | {"FASTPS_OP_TIMEOUT_S": "1200"},
        arguments={"gigabytes": GIGABYTES},
    )  # fmt: skip
