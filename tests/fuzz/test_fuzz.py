# SPDX-License-Identifier: Apache-2.0
"""Each target takes the same inputs in each run; with FUZZ_SECONDS, others for so long."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("FUZZ_SECONDS", "0"))


@pytest.mark.timeout(SECONDS + 600)
def test_no_input_is_taken_wrongly():
    how = ["--rounds", "1"]
    if SECONDS:
        how = ["--seconds", str(SECONDS), "--seed", str(secrets.randbits(30))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *how], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=SECONDS + 600, check=False,
    )  # fmt: skip
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout
