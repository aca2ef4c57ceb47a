# SPDX-License-Identifier: Apache-2.0
"""Which versions are installed: of this library, of Python, of what it stands on and beside.

Also how to run a module of it in another process.

Reads what the installation says of itself and imports nothing of it: to look at a framework costs
seconds, and what is broken may not be importable. Threads: none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, "unknown" where none is."""
    from importlib import metadata  # noqa: PLC0415  (as much time as all of `import fastps`)

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _version_of_sources() if distribution == "fastps" else UNKNOWN


def _version_of_sources() -> str:
    """Read what a checkout says that was put into Python's path and never installed."""
    import configparser  # noqa: PLC0415  (rarely needed)

    sources = configparser.ConfigParser()
    sources.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    return sources.get("metadata", "version", fallback=UNKNOWN)


def command_of(module: str) -> tuple[str, ...]:
    """Return the words that run a module of this very fastps.

    The present folder is left out of where Python looks, since in a checkout it has the sources
    of fastps and perhaps nothing compiled; unless this fastps itself is from there.
    """
    home = Path(__file__).resolve().parents[2]
    is_here = False  # where the present folder is gone
    with contextlib.suppress(OSError):
        is_here = os.path.samestat(os.stat("."), os.stat(home))
    return sys.executable, *(() if is_here else ("-P",)), "-m", module


def describe() -> str:
    """Return in one line what matters in a report of a defect."""
    python, numpy = platform.python_version(), version_of("numpy")
    return f"fastps {version_of('fastps')} (Python {python}, NumPy {numpy})"


class ShowVersion(argparse.Action):
    """The option --version of every command: print one line and end with code 0."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        """Take no value and leave none in what was parsed."""
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs=0,
            default=argparse.SUPPRESS,
            help="tell the versions and end",
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and end."""
        sys.stdout.write(f"{describe()}\n")
        parser.exit()
