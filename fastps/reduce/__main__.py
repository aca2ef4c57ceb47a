# SPDX-License-Identifier: Apache-2.0
"""Fill the kernel cache: ``python -m fastps.reduce [name ...]``, for images and installers."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from fastps.config.closed_pipe import ends_quietly
from fastps.reduce import CODECS, warm, warm_codec
from fastps.types import DType


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Compile kernels of element types, all by default, or of codecs; log how long each took."""
    dtypes = [code.name.lower() for code in DType]
    names = (*dtypes, *CODECS)
    parser = argparse.ArgumentParser(prog="python -m fastps.reduce", description=main.__doc__)
    parser.add_argument(
        "name", nargs="*",
        help=f"kernels to compile, of {', '.join(names)}; default: all element types",
    )  # fmt: skip
    chosen = parser.parse_args(arguments).name or dtypes
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"unknown kernels {', '.join(unknown)}; use some of {', '.join(names)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm(DType[name.upper()] for name in chosen if name in dtypes)
    for name in chosen:
        if name in CODECS:
            warm_codec(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
