# SPDX-License-Identifier: Apache-2.0
"""Fuzzers: each gives one parser inputs that no fastps writes, and sees how it refuses them.

`python -m tests.fuzz --seconds 60` shares the time out over all targets; `--help` has the rest.
An input is a function of target, seed and number, so each can be made again: valid messages first,
which the code itself makes, then changed ones. A target passes where the outcome is a result or an
error that it names. Everything else is a finding: another exception, a crash, no end, or more
memory than any such input is worth. Start with target.py and driver.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for _folder in ("", "unit", "conformance"):  # whose drivers and fleets targets use
    if str(TESTS / _folder) not in sys.path:
        sys.path.append(str(TESTS / _folder))
