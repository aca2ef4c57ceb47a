# SPDX-License-Identifier: Apache-2.0
"""Faults happen to whole jobs: their harness is that of tests/cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
