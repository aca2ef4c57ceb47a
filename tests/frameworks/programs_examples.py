# SPDX-License-Identifier: Apache-2.0
"""Run examples one after the other in the processes of one job: to start one is what costs time.

    fastps-run -np 2 python programs_examples.py FOLDER EXAMPLE [EXAMPLE ...]

An example is a file's name and its words, with {folder} for FOLDER.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

folder = sys.argv[1]
for line in sys.argv[2:]:
    name, *words = shlex.split(line.format(folder=folder))
    sys.argv = [name, *words]
    print(f"== {name}", flush=True)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
