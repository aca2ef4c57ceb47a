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

from test_torch_backend import HERE, JOB_S, environ, torchrun  # noqa: E402

PROGRAM = HERE / "programs_trainers.py"


def fastps_run(size: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program as `size` workers, each of which the trainers take for one alone."""
    command = [
        sys.executable, "-m", "fastps.launch.run", "-np", str(size),
        "--env", "WORLD_SIZE=1", "--env", "LOCAL_RANK=-1",
        sys.executable, str(PROGRAM), str(folder),
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_S, check=False, env=environ()
    )


@pytest.mark.timeout(JOB_S)
def test_trainers_make_the_weights_of_one_process(tmp_path):
    """Two ranks with halves of each batch, and one with whole ones, at the same time."""
    folders = [tmp_path / "alone", tmp_path / "together"]
    for folder in folders:
        folder.mkdir()
    with subprocess.Popen(
        [sys.executable, PROGRAM, folders[0]], env=environ(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as alone:  # fmt: skip
        jobs = [torchrun(2, str(PROGRAM), str(folders[1])), fastps_run(2, folders[1])]
        said = alone.communicate(timeout=JOB_S)[0]
    assert alone.returncode == 0, said
    for job in jobs:
        assert job.returncode == 0, job.stdout + job.stderr
    for path in folders[0].glob("*.npz"):
        want, got = np.load(path), np.load(folders[1] / path.name)
        for key in want:
            np.testing.assert_allclose(
                got[key], want[key], atol=1e-4, err_msg=f"{path.name} {key}"
            )
    assert len(list(folders[1].glob("*.npz"))) == 5
