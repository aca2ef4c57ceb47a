# SPDX-License-Identifier: Apache-2.0
"""Run one function of a file as the program of a worker: FILE FUNCTION JSON-KEYWORDS.

Its return value is printed as one line, RESULT and JSON. Programs import `mark` from here.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def mark(*words: object) -> None:
    """Print a line for the test that watches this process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def now() -> float:
    """Give the time on the clock that all processes of the machine share."""
    return time.monotonic()


def main() -> None:
    """Run the function."""
    file, function, keywords = sys.argv[1:]
    sys.path[:0] = [str(Path(file).parent), str(Path(__file__).parent)]
    module = importlib.import_module(Path(file).stem)
    result = getattr(module, function)(**json.loads(keywords))
    mark("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
