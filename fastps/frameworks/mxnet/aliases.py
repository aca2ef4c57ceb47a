# SPDX-License-Identifier: Apache-2.0
"""NumPy's old names, which MXNet 1.9.1 needs. Must not import MXNet."""

from __future__ import annotations

import numpy as np

_ALIASES = {"bool": bool, "int": int, "float": float, "object": object, "str": str}


def compat() -> None:
    """Restore names of Python's types in NumPy 1.24 to 1.26, for MXNet 1.9.1; before its import.

    This affects the whole process. ImportError with NumPy 2, which lacks more than names.
    """
    if int(np.__version__.partition(".")[0]) >= 2:
        raise ImportError(
            f"MXNet 1.9.1 does not work with NumPy {np.__version__}: pip install 'numpy<2'"
        )
    for name, kind in _ALIASES.items():
        if name not in vars(np):
            setattr(np, name, kind)
