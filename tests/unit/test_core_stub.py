# SPDX-License-Identifier: Apache-2.0
"""The hand-written stub, the status table and the documentation agree with the C module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aids import faces
from fastps import _core, errors

ROOT = Path(__file__).parents[2]
ALLOWED = ROOT / "tools" / "stubtest.txt"


def test_stub_equals_module():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy.stubtest", "fastps._core"]
    options = [
        "--mypy-config-file",
        "setup.cfg",
        "--allowlist",
        str(ALLOWED),
        "--ignore-unused-allowlist",
    ]
    done = subprocess.run(
        command + options, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_status_codes_map_to_errors():
    codes = faces.status_codes()
    assert codes.pop("OK") == 0
    assert sorted(codes.values()) == sorted(errors.STATUS_ERRORS)
    assert errors.STATUS_ERRORS[codes["E_TIMEOUT"]] is errors.StallError
    assert errors.STATUS_ERRORS[codes["E_LINK_TIMEOUT"]] is errors.TransportTimeout
    assert errors.STATUS_ERRORS[codes["E_PEER_LOST"]] is errors.PeerLostError


@pytest.mark.parametrize("name", _core.__all__)
def test_public_names_are_documented(name):
    text = getattr(_core, name).__doc__
    assert text.splitlines()[0].endswith(".")


def test_theory_of_operation_opens_the_module():
    assert "Theory of operation" in _core.__doc__


def test_release_builds_have_no_counters():
    counters = _core.debug_counters()
    assert counters == {} or {"queues", "threads", "loans"} <= set(counters)
