# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own tests for backends with two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frameworks"))

import test_torch_suite


@pytest.mark.timeout(test_torch_suite.SUITE_S + 60)
def test_with_two_ranks():
    test_torch_suite.test_torch_s_own_tests(2)
