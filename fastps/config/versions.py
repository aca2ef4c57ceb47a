# SPDX-License-Identifier: Apache-2.0
"""Installed versions of this library, of Python and of other distributions.

Also the command that runs a module of this library in another process. Reads the metadata of
distributions and imports none: a framework takes seconds to import, and a broken one cannot be
imported. Threads: none.
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
    """Return the version in a checkout that is in Python's path and was never installed."""
    import configparser  # noqa: PLC0415  (rarely needed)

    sources = configparser.ConfigParser()
    sources.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    return sources.get("metadata", "version", fallback=UNKNOWN)


def command_of(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this fastps.

    -P leaves the working directory out of Python's path: it may be a checkout with sources of
    fastps that are not compiled. Not where this fastps itself is from there.
    """
    home = Path(__file__).resolve().parents[2]
    is_here = False  # also where the working directory is gone
    with contextlib.suppress(OSError):
        is_here = os.path.samestat(os.stat("."), os.stat(home))
    return sys.executable, *(() if is_here else ("-P",)), "-m", module


def describe() -> str:
    """Return the line of versions that a bug report needs."""
    python, numpy = platform.python_version(), version_of("numpy")
    return f"fastps {version_of('fastps')} (Python {python}, NumPy {numpy})"


class ShowVersion(argparse.Action):
    """The option --version of every command: print one line and end with code 0."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        """Take no value, and store none."""
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs=0,
            default=argparse.SUPPRESS,
            help="print the versions and exit",
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and end."""
        sys.stdout.write(f"{describe()}\n")
        parser.exit()
