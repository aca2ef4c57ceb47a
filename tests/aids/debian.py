# SPDX-License-Identifier: Apache-2.0
"""Programs of Debian's packages that a few tests use: installed by root, else a reason to skip."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_LOCK = Path(tempfile.gettempdir()) / f"fastps-tests-apt-{os.getuid()}"
_INSTALL = ("apt-get", "install", "-y", "-qq", "--no-install-recommends")
_PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # users have no sbin in theirs


def require(program: str, *packages: str) -> str:
    """Return the path of a program; skip the test where it is missing and cannot be installed.

    Root installs the packages, one process at a time. Where apt knows none of them, its lists
    are fetched first.
    """
    if (found := shutil.which(program, path=_PLACES)) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with _LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install = (*_INSTALL, *packages)
            if subprocess.run(install, env=environ, check=False).returncode:
                subprocess.run(("apt-get", "update", "-qq"), check=False)
                subprocess.run(install, env=environ, check=False)
    if (found := shutil.which(program, path=_PLACES)) is None:
        pytest.skip(f"no {program}: run as root: apt-get install {' '.join(packages)}")
    return found
