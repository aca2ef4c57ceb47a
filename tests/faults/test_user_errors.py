# SPDX-License-Identifier: Apache-2.0
"""A user's error in one worker is what all others, the scheduler and the launcher name."""

from __future__ import annotations

import os
import subprocess
import sys

from harness import clean_environ

PROGRAM = """
import numpy as np
import fastps

fastps.init()
x = np.ones(1000, np.float32)
fastps.push_pull(x, "w")
if fastps.rank() == 1:
    raise ValueError("batch 7 is empty")
fastps.push_pull(x, "w")
"""


def test_an_error_of_one_worker_is_named_by_all(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "fastps.launch.run", "-np", "3", sys.executable, str(path)],
        env=clean_environ() | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "worker 1 (" in lines[-1], done.stdout  # whoever was seen to end first says so
    assert "Its last output: " in lines[-1], done.stdout
    assert lines[-1].endswith("ValueError: batch 7 is empty"), done.stdout
    others = [line for line in lines if "PeerLostError" in line]
    assert all("its program ended with ValueError: batch 7 is empty" in line for line in others)
    assert "crashed" not in done.stdout, done.stdout
    assert done.stdout.count("Traceback") <= 3, done.stdout
    assert "fastps/session/session.py" not in done.stdout, done.stdout
