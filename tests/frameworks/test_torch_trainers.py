# SPDX-License-Identifier: Apache-2.0
"""Lightning, Accelerate and transformers train on fastps as one process does alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
for name in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(name)

from test_torch_backend import FORKING_PYTHON, HERE, JOB_S, environ, torchrun  # noqa: E402

PROGRAM = HERE / "programs_trainers.py"

# With these the trainers take each worker for one alone, and leave gradients to us.
APART = ("--env", "WORLD_SIZE=1", "--env", "LOCAL_RANK=-1")


def fastps_run(size: int, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the program as `size` workers."""
    command = [
        str(FORKING_PYTHON), "-m", "fastps.launch.run", "-np", str(size), *options,
        str(FORKING_PYTHON), str(PROGRAM), str(folder),
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_S, check=False, env=environ()
    )


@pytest.mark.timeout(2 * JOB_S)
def test_trainers_make_the_weights_of_one_process(tmp_path):
    """Two ranks with halves of each batch, and one with whole ones, at the same time."""
    folders = [tmp_path / "alone", tmp_path / "together", tmp_path / "under fastps-run"]
    for folder in folders:
        folder.mkdir()
    with subprocess.Popen(
        [sys.executable, PROGRAM, folders[0]], env=environ(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as alone:  # fmt: skip
        jobs = [
            torchrun(2, str(PROGRAM), str(folders[1])),
            fastps_run(2, folders[1], *APART),
            fastps_run(2, folders[2]),
        ]
        said = alone.communicate(timeout=JOB_S)[0]
    assert alone.returncode == 0, said
    for job in jobs:
        assert job.returncode == 0, job.stdout + job.stderr
    for folder in folders[1:]:
        for path in folder.glob("*.npz"):
            want, got = np.load(folders[0] / path.name), np.load(path)
            for key in want:
                np.testing.assert_allclose(
                    got[key], want[key], atol=1e-4, err_msg=f"{path.name} {key}"
                )
    assert [len(list(folder.glob("*.npz"))) for folder in folders] == [5, 5, 3]
