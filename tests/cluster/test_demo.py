# SPDX-License-Identifier: Apache-2.0
"""The demonstration trains, measures and proves; and its proofs can fail."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from fork_server import FORKING_PYTHON, forking

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280
RUN = [str(FORKING_PYTHON), "-m", "fastps.launch.run"]
# What a worker runs when every part of the program but one is right.
SPOILED = """
import runpy, sys
import fastps.torch as fps
fps.broadcast_parameters = lambda *_, **__: None
sys.argv = ["train_digits.py", "--epochs", "1", "--model", "mlp"]
runpy.run_path("examples/train_digits.py", run_name="__main__")
"""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=forking(kept),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def recipe_of_demo() -> list[str]:
    """Give the command that `make demo` ends with, for this interpreter."""
    makefile = (ROOT / "Makefile").read_text()
    line = re.search(r"^demo:.*\n\t(.*)$", makefile, re.MULTILINE)[1]
    words = shlex.split(line.replace("$(RUN)", str(FORKING_PYTHON)))
    assert words[0] == ".venv/bin/fastps-run"
    return [*RUN, *words[1:]]


@pytest.mark.timeout(LIMIT_S + 20)
def test_demo_trains_and_proves():
    result = run(recipe_of_demo())
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    shown = dict(line.strip().split("  ", 1) for line in lines if line.startswith("  "))
    assert float(shown["test accuracy"].split()[0]) >= 95
    assert shown["workers"] == "2"
    assert shown["weights on all workers"].startswith("bitwise equal")
    assert shown["one process alone"].startswith("equal")
    moved_mb = float(shown["moved per worker"].split()[0])
    gradients_mb = 2 * 4 * weights_of_cnn() * steps_of(shown["training"]) / 1e6
    assert gradients_mb < moved_mb < 1.1 * gradients_mb
    assert any(re.match(r"step +1/", line) for line in lines)


def weights_of_cnn() -> int:
    """Count the weights of the demonstration's network by hand."""
    return (9 * 16 + 16) + (9 * 16 * 32 + 32) + (512 * 128 + 128) + (128 * 10 + 10)


def steps_of(text: str) -> int:
    return int(text.split()[0])


@pytest.mark.timeout(LIMIT_S + 20)
def test_demo_fails_when_workers_begin_with_unequal_weights():
    words = ["-np", "2", "-s", "1", "--env", "FASTPS_CHECK_WEIGHTS=0"]
    result = run([*RUN, *words, str(FORKING_PYTHON), "-c", SPOILED])
    assert result.returncode == 1
    assert "DIFFERENT, sha256" in result.stdout


@pytest.mark.timeout(LIMIT_S + 20)
def test_graphs_train_as_well_as_all_reduce(tmp_path):
    picture = tmp_path / "digits.png"
    program = [str(FORKING_PYTHON), "examples/decentralized.py", "--seeds", "1", "--epochs", "20"]
    result = run([*RUN, "-np", "4", "-s", "0", *program, "--plot", str(picture)])
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"worst +9\d\.\d\d$", result.stdout, re.MULTILINE)) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
