# SPDX-License-Identifier: Apache-2.0
"""What tests on the host share: a guest that is ready, and kernels for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rdma_guest import fill_cache, set_up


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what starts virtual machines alone: their clocks go wrong without a processor."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "python_path" in item.fixturenames:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare the guest; give the PYTHONPATH with which Python finds pyverbs in it."""
    return set_up(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def with_kernels(python_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Give the beginning of a command that finds compiled kernels in a guest."""
    return fill_cache(tmp_path_factory.mktemp("kernels"))
