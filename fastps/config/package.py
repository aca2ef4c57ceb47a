# SPDX-License-Identifier: Apache-2.0
"""Path of this package; importing it raises ImportError where nothing was compiled."""

from __future__ import annotations

import importlib.util
import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _check_compiled() -> None:
    """Raise ImportError where sources without compiled modules hide the installed package.

    Else an import would fail deep inside, in some of a job's processes.
    """
    if importlib.util.find_spec("fastps._core") is None:
        folder = os.path.dirname(PACKAGE)
        raise ImportError(
            f"{folder} has the sources of fastps without compiled modules, and hides an installed "
            "fastps: work in another directory, or compile them in place with python setup.py "
            "build_ext --inplace"
        )


_check_compiled()
