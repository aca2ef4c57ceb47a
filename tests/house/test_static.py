# SPDX-License-Identifier: Apache-2.0
"""Linters and type checkers are clean; tools/check holds their commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from house_source import ROOT

LIMIT_S = 570


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "check", ["ruff", "format", "mypy", "pyright", "stubs", "cython", "spelling"]
)
def test_static_check_is_clean(check):
    result = subprocess.run(
        [ROOT / "tools" / "check", check],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "No module named" in result.stdout and result.returncode:
        pytest.fail(f"install what this check needs: pip install .[test]\n{result.stdout}")
    assert result.returncode == 0, f"run: tools/check {check}\n{result.stdout}"


def test_an_unknown_check_is_refused():
    result = subprocess.run(
        [ROOT / "tools" / "check", "nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "there are: ruff format" in result.stderr
