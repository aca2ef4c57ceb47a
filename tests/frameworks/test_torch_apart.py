# SPDX-License-Identifier: Apache-2.0
"""Workers of fastps-run that train with torch and never join their job have failed, others not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from harness import clean_environ

LIMIT_S = 200
MAKE = "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)"
GLOO = f"{MAKE}; import torch.distributed as dist; dist.init_process_group('gloo', STORE)"
HELPER = f"""{MAKE}; import fastps, subprocess, sys; fastps.init()
subprocess.check_call([sys.executable, '-c', '''{MAKE}'''])"""


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("program", "code", "is_said"),
    [
        (MAKE, 1, True),
        (GLOO, 0, False),  # a group of torch's own, met without fastps
        (HELPER, 0, False),  # what a worker starts is no worker
    ],
)
def test_who_trains_alone_has_failed(tmp_path, program, code, is_said):
    store = f"'file://{tmp_path}/store', rank=int(os.environ['RANK']), world_size=2"
    job = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "2", "--start-timeout", "150",
         sys.executable, "-c", "import os; " + program.replace("STORE", store)],
        env=clean_environ() | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert job.returncode == code, job.stderr
    assert ("without having been in one job" in job.stderr) == is_said, job.stderr
    assert ("never in one job together" in job.stderr) == is_said, job.stderr
