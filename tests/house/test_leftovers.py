# SPDX-License-Identifier: Apache-2.0
"""The fixture that looks for leftovers finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from house_source import ROOT

HEAD = "import os, socket, threading\nkept = []\n"
CASES = {
    "clean": "def test_it():\n    socket.socket().close()\n",
    "socket": "def test_it():\n    kept.append(socket.socket())\n",
    "thread": (
        "def test_it():\n"
        "    stop = threading.Event()\n"
        "    thread = threading.Thread(target=stop.wait, args=(60,), daemon=True)\n"
        "    thread.name = 'fastps:push:0'\n"
        "    kept.append(stop)\n"
        "    thread.start()\n"
    ),
    "descriptors": "def test_it():\n    kept.extend(os.dup(0) for _ in range(20))\n",
}
EXPECTED = {
    "socket": "left behind: sockets ['socket:",
    "thread": "left behind: threads ['fastps:push:0']",
    "descriptors": "left 20 descriptors open",
}


def run_in(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run one test file beside a copy of our conftest, with a short wait for threads."""
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    folder.mkdir()
    (folder / "conftest.py").write_text(conftest.replace("SETTLE_S = 5.0", "SETTLE_S = 0.2"))
    (folder / "test_case.py").write_text(HEAD + body)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_case.py"],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("case", EXPECTED)
def test_leftovers_fail_the_test(tmp_path, case):
    result = run_in(tmp_path / "unit", CASES[case])
    assert result.returncode == 1, result.stdout
    assert EXPECTED[case] in result.stdout


def test_a_clean_test_passes(tmp_path):
    result = run_in(tmp_path / "unit", CASES["clean"])
    assert result.returncode == 0, result.stdout


def test_other_folders_are_not_watched(tmp_path):
    result = run_in(tmp_path / "frameworks", CASES["descriptors"])
    assert result.returncode == 0, result.stdout
