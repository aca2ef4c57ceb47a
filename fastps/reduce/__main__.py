# SPDX-License-Identifier: Apache-2.0
"""Fill the kernel cache: ``python -m fastps.reduce [dtype ...]``, for images and installers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from fastps.reduce import warm
from fastps.types import DType


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the named kernels, or all of them, and say how long each took."""
    names = [code.name.lower() for code in DType]
    parser = argparse.ArgumentParser(prog="python -m fastps.reduce", description=main.__doc__)
    parser.add_argument("dtype", nargs="*", help=f"one of {', '.join(names)}; all by default")
    chosen = parser.parse_args(arguments).dtype or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"unknown dtype {', '.join(unknown)}; use {', '.join(names)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm(DType[name.upper()] for name in chosen)


if __name__ == "__main__":
    main()
