# SPDX-License-Identifier: Apache-2.0
"""Each target takes the same inputs in each run; with FUZZ_SECONDS, others for so long."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from . import driver
from .target import Target

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


class Late(Target):
    """It takes longer to open than it is run."""

    name = "late"
    per_round = 1

    def open(self) -> None:
        threading.Event().wait(0.5)

    def seeds(self) -> list[bytes]:
        return [b""]

    def run(self, data: bytes) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_target_has_its_time_though_it_is_long_to_open():
    outcome = driver.fuzz(Late(), seed=1, seconds=0.2)
    assert outcome.inputs > 0
    assert outcome.seconds >= 0.2


class Broken(Target):
    """It takes its seeds in all wrong ways there are."""

    name = "broken"
    per_round = 1

    def seeds(self) -> list[bytes]:
        return [b"fine", b"crash", b"raise", b"memory", b"hang", b"fine"]

    def run(self, data: bytes) -> None:
        if data == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == b"raise":
            raise KeyError(data)
        if data == b"memory":
            bytes(2 * driver.MOST_MEMORY)
        if data == b"hang":
            threading.Event().wait(60)


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_what_is_taken_wrongly_is_found(monkeypatch, tmp_path):
    # A sanitizer takes a second to make a GiB of memory.
    monkeypatch.setattr(driver, "HANG_S", 5.0 if driver.is_sanitized() else 1.0)
    target = Broken()
    outcome = driver.fuzz(target, seed=1, inputs=6)
    assert outcome.inputs == 6
    found = {one.number: where for where, one in outcome.findings.items()}
    assert "exit code -11" in found[1]
    assert found[2].startswith("KeyError at test_fuzz.py")
    assert driver.is_sanitized() or found[3].startswith("MemoryError at test_fuzz.py")
    assert "did not end" in found[4]
    paths = outcome.save(tmp_path, target.seeds())
    assert {path.read_bytes() for path in paths} <= set(target.seeds()[1:5])
