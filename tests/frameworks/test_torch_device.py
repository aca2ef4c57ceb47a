# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device, that of tests/aids/device.cpp, give the bits of tensors on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import programs_torch_device as programs  # noqa: E402
from job import run_job  # noqa: E402

from aids import device  # noqa: E402

CASES = Path(__file__).with_name("device_cases.py")


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return device.build_or_skip()


def test_cases_in_one_process(request: pytest.FixtureRequest) -> None:
    profile = request.config.getoption("--hypothesis-profile")
    options = [f"--hypothesis-profile={profile}"] if profile else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        str(CASES),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]


@pytest.mark.parametrize("servers", [0, 1])
def test_training_on_a_device_gives_the_parameters_of_the_cpu(servers: int) -> None:
    assert run_job(programs.train_everywhere, workers=2, servers=servers) == ["done"] * 2


def test_faces_on_a_device_give_the_values_of_the_cpu() -> None:
    assert run_job(programs.other_faces, workers=2, servers=1) == ["done"] * 2
