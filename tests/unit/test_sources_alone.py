# SPDX-License-Identifier: Apache-2.0
"""Sources that nobody has compiled say at once that they hide what is installed."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fastps.config import versions

# An editable installation finds the compiled parts of a package wherever that is.
PLAIN = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
PACKAGE = Path(__file__).parents[2] / "fastps"


def test_sources_without_compiled_parts_say_what_to_do(tmp_path):
    left_out = shutil.ignore_patterns("*.so", "*.c", "*.pyx", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "fastps", ignore=left_out)
    for name in ("fastps", "fastps.config", "fastps.launch.run"):
        done = subprocess.run(
            [sys.executable, "-c", PLAIN + f"import {name}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert f"{tmp_path} has the sources of fastps without compiled modules" in last, last
        assert "build_ext --inplace" in last


def test_sources_that_are_not_installed_know_their_version(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    sources = configparser.ConfigParser()
    sources.read(PACKAGE.parent / "setup.cfg")
    assert versions.version_of("fastps") == sources["metadata"]["version"]
    assert versions.version_of("numpy") == versions.UNKNOWN
