# SPDX-License-Identifier: Apache-2.0
"""Where install.py puts the systems and run.py finds them."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).parents[3] / "build" / "peers"


@dataclass(frozen=True)
class Places:
    """The folder of the installed systems and what lies in it."""

    folder: Path

    @property
    def mpi4py(self) -> Path:
        """Give the folder to import mpi4py from."""
        return self.folder / "mpi4py"

    @property
    def oneccl(self) -> Path:
        """Give the library that holds oneCCL and our shim."""
        return self.folder / "liboneccl_shim.so"

    @property
    def versions_file(self) -> Path:
        """Give the file that names the versions installed."""
        return self.folder / "versions.json"

    def versions(self) -> dict[str, str]:
        """Read the versions of what is installed."""
        try:
            return dict(json.loads(self.versions_file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the folder."""
    parser.add_argument(
        "--folder",
        type=lambda text: Path(text).resolve(),
        default=DEFAULT_FOLDER,
        help="where the systems are installed (default build/peers of the project)",
    )
