# SPDX-License-Identifier: Apache-2.0
"""What MXNet 1.9.1 needs of NumPy. Must not import MXNet."""

from __future__ import annotations

import numpy as np

_ALIASES = {"bool": bool, "int": int, "float": float, "object": object, "str": str}


def compat() -> None:
    """Restore in NumPy 1.24 to 1.26 the names that MXNet 1.9.1 uses; before `import mxnet`.

    They are those of Python's own types, for all of the process. ImportError with NumPy 2, which
    lacks more than names.
    """
    if int(np.__version__.partition(".")[0]) >= 2:
        raise ImportError(
            f"MXNet 1.9.1 does not work with NumPy {np.__version__}: pip install 'numpy<2'"
        )
    for name, kind in _ALIASES.items():
        if name not in vars(np):
            setattr(np, name, kind)
