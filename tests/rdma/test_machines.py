# SPDX-License-Identifier: Apache-2.0
"""Jobs across machines that have RDMA devices, or not, in one network: tools/rdma-vm.

Skipped where test_guest.py is.
"""

from __future__ import annotations

import sys

import pytest
from rdma_guest import GUEST_TIMEOUT_S, PYTEST, SETUP_TIMEOUT_S, native_or_pyverbs, run_in_guest

MACHINES = 3
WITHOUT = 2  # the machine without a device
OPTIONS = ("--machines", str(MACHINES), "--without-rdma", str(WITHOUT))
HAND = "tests/rdma/machine_hand.py"


@pytest.mark.timeout(SETUP_TIMEOUT_S + GUEST_TIMEOUT_S + 60)
def test_jobs_across_machines(python_path, with_kernels):
    hand = (sys.executable, HAND, str(MACHINES))
    test = (*PYTEST, "tests/rdma/guest_machines.py")
    text = run_in_guest(
        python_path, native_or_pyverbs(), *with_kernels, *hand, *test, options=OPTIONS
    )
    print(text)
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_machines_end_with_the_first_status_that_is_not_zero(python_path):
    """Each line says whose it is; only whole ones are shown."""
    script = "printf 'this is %s' $(hostname); sleep 0.2; echo ' of two'; exit ${RDMA_VM_MACHINE}0"
    options = ("--machines", "2", "--without-rdma", "0")
    with pytest.raises(AssertionError) as raised:
        run_in_guest(python_path, "", "bash", "-c", script, options=options)
    lines = str(raised.value).splitlines()
    assert {"0: this is machine-0 of two", "1: this is machine-1 of two"} <= set(lines)


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_a_machine_that_ends_without_a_word_is_named(python_path):
    script = (
        "echo why >/dev/ttyS0; [ $RDMA_VM_MACHINE = 0 ] && sleep 999; echo b >/proc/sysrq-trigger"
    )
    options = ("--machines", "2", "--without-rdma", "0", "--without-rdma", "1")
    with pytest.raises(AssertionError) as raised:
        run_in_guest(python_path, "", "bash", "-c", script, options=options)
    *console, last = str(raised.value).splitlines()
    assert last == "run.py: guest 1 ended without a status, its emulator with 0"
    assert "why" in console
