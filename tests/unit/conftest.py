# SPDX-License-Identifier: Apache-2.0
"""What holds for every unit test: no C thread outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aids.faces import threads_alive


@pytest.fixture(autouse=True)
def no_core_threads_left(nothing_left_behind: None) -> Iterator[None]:
    """Fail a test that leaves a thread of fastps._core alive."""
    before = threads_alive()
    yield
    assert threads_alive() == before
