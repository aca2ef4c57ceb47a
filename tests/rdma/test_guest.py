# SPDX-License-Identifier: Apache-2.0
"""Everything that needs an RDMA device, in guests that have one: tools/rdma-vm.

Skipped only where the guest cannot be had: without root to install Debian's packages, or not on
Debian for amd64. RDMA_VM_GUEST=1 says that this is the guest; then there is nothing to start.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from rdma_guest import GUEST_TIMEOUT_S, PYTEST, SETUP_TIMEOUT_S, native_or_pyverbs, run_in_guest

LEAST_OF_IB_WRITE_BW = 0.7  # some 1.3 here, 1.5 with more rounds
AT_ONCE = 2  # guests, of one processor each
# The last one harms the device.
PARTS = ("conformance", "peers", "rdma", "windows", "promises", "trouble")
LINKS = tuple(f"tests/rdma/guest_{name}.py" for name in PARTS)
# The pyverbs data path is the same protocol under the GIL: what could differ, and little more.
PYVERBS_TESTS = (
    "payload_arrives or leaks or work_request or withdrawn or breaks or goes_down or is_void "
    "or opens_nothing or at_once or taken_away or removed"
)
SUMS = "(native or pyverbs) and (broadcast or lanes or order or again)"
NATIVE = native_or_pyverbs()
# by name: data path and arguments of pytest; the longest first
PROGRAMS = {
    "conformance and faults": (NATIVE, LINKS),
    "whole jobs": (NATIVE, ("tests/rdma/guest_jobs.py",)),
    "the pyverbs data path": ("pyverbs", (*LINKS, "-k", PYVERBS_TESTS)),
    "codecs and windows": (NATIVE, ("tests/rdma/guest_coded.py",)),
    "sums of engines and stores": (NATIVE, ("tests/rdma/guest_push_pull.py", "-k", SUMS)),
}


@pytest.fixture(scope="module")
def outputs(
    request: pytest.FixtureRequest, python_path: str, with_kernels: tuple[str, ...]
) -> Iterator[dict[str, Future[str]]]:
    """Run the chosen programs, each in a guest of its own; give what they write."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [name for name in PROGRAMS if any(s and s.params.get("name") == name for s in specs)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {}
        for name in chosen:
            data_path, arguments = PROGRAMS[name]
            command = (*with_kernels, *PYTEST, *arguments)
            futures[name] = pool.submit(
                run_in_guest, python_path, data_path, *command, options=("-p", "1")
            )
        yield futures


@pytest.mark.timeout(SETUP_TIMEOUT_S + len(PROGRAMS) * GUEST_TIMEOUT_S)
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_guest(outputs, name):
    assert "passed" in outputs[name].result()


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_the_benchmark(python_path):
    """Alone: by now the guests above have ended."""
    command = (sys.executable, "tools/bench/rdma.py", "--runs", "1", "--rounds", "3")
    options = ("--round-trips", "50", "--keys", "2", "--paths", f"{NATIVE},tcp")
    text = run_in_guest(python_path, NATIVE, *command, *options)
    print(text)
    assert f"{NATIVE} / tcp: " in text
    found = re.search(rf"{NATIVE} / ib_write_bw: ([0-9.]+)", text)
    assert found, text
    if NATIVE == "native":  # what the GIL costs the other one depends on too much
        assert float(found[1]) >= LEAST_OF_IB_WRITE_BW, text
