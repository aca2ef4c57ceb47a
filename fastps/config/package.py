# SPDX-License-Identifier: Apache-2.0
"""Where this package stands; importing it raises ImportError where nothing was compiled."""

from __future__ import annotations

import importlib.util
import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _check_compiled() -> None:
    """Raise ImportError where mere sources, in the working directory say, hide what is installed.

    So that nobody finds out by an import that fails deep inside, in some of a job's processes.
    """
    if importlib.util.find_spec("fastps._core") is None:
        folder = os.path.dirname(PACKAGE)
        raise ImportError(
            f"{folder} has the sources of fastps without what is compiled of them, and hides a "
            "fastps that is installed: work in another directory, or compile them where they are, "
            "with python setup.py build_ext --inplace"
        )


_check_compiled()
