# SPDX-License-Identifier: Apache-2.0
"""The command `fastps completion`: print the lines by which a shell completes `fastps`.

The shell asks `fastps` itself with each TAB, so the answer always fits what is installed.
Threads: none.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from fastps.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
COMPLETED = ("fastps",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the lines")


def run(parsed: argparse.Namespace) -> None:
    """Print the lines. Raises ConfigError where argcomplete is missing."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError as error:
        raise ConfigError("completion needs argcomplete: pip install 'fastps[cli]'") from error
    sys.stdout.write(argcomplete.shellcode(list(COMPLETED), shell=parsed.shell) + "\n")
