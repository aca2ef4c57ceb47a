# SPDX-License-Identifier: Apache-2.0
"""Everything that needs an RDMA device, in a guest that has one: tools/rdma-vm.

Skipped only where the guest cannot be had: without root to install Debian's packages, or not on
Debian for amd64. RDMA_VM_GUEST=1 says that this is the guest; then there is nothing to start.
"""

from __future__ import annotations

import sys

import pytest
from rdma_guest import GUEST_TIMEOUT_S, PYTEST, SETUP_TIMEOUT_S, native_or_pyverbs, run_in_guest

PARTS = ("conformance", "rdma", "windows", "promises", "trouble")  # the last harms the device
LINKS = tuple(f"tests/rdma/guest_{name}.py" for name in PARTS)
# The pyverbs data path is the same protocol under the GIL: what could differ, and little more.
PYVERBS_TESTS = (
    "payload_arrives or leaks or work_request or withdrawn or breaks or goes_down or is_void "
    "or opens_nothing or at_once or taken_away"
)


@pytest.mark.timeout(SETUP_TIMEOUT_S + GUEST_TIMEOUT_S + 60)
def test_conformance_and_faults(python_path):
    text = run_in_guest(python_path, native_or_pyverbs(), *PYTEST, *LINKS)
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_the_pyverbs_data_path(python_path):
    text = run_in_guest(python_path, "pyverbs", *PYTEST, *LINKS, "-k", PYVERBS_TESTS)
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_routes_by_rdma_cm(python_path):
    text = run_in_guest(python_path, native_or_pyverbs(), *PYTEST, "tests/rdma/guest_cm.py")
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_sums_of_engines_and_stores(python_path):
    text = run_in_guest(
        python_path,
        native_or_pyverbs(),
        *PYTEST,
        "tests/rdma/guest_push_pull.py",
        "-k",
        "(native or pyverbs) and (broadcast or lanes or order)",
    )
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_whole_jobs(python_path, with_kernels):
    text = run_in_guest(
        python_path, native_or_pyverbs(), *with_kernels, *PYTEST, "tests/rdma/guest_jobs.py"
    )
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_the_benchmark(python_path):
    command = (sys.executable, "tools/bench/rdma.py", "--runs", "1", "--rounds", "3")
    paths = f"{native_or_pyverbs()},tcp"
    options = ("--round-trips", "50", "--keys", "2", "--paths", paths)
    text = run_in_guest(python_path, native_or_pyverbs(), *command, *options)
    print(text)
    assert "/ tcp: " in text
