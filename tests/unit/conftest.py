# SPDX-License-Identifier: Apache-2.0
"""What holds for every unit test: no C thread outlives it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_core_threads_left(nothing_left_behind: None) -> Iterator[None]:
    """Fail a test that leaves a thread of fastps._core alive."""
    core = sys.modules.get("fastps._core")
    before = core.threads_alive() if core is not None else 0
    yield
    core = sys.modules.get("fastps._core")
    assert core is None or core.threads_alive() == before
