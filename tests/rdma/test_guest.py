# SPDX-License-Identifier: Apache-2.0
"""Everything that needs an RDMA device, in a guest that has one: tools/rdma-vm.

Skipped only where the guest cannot be had: without root to install Debian's packages, or not on
Debian for amd64. FASTPS_RDMA_GUEST=1 says that this is the guest; then there is nothing to start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tools" / "rdma-vm"
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
SETUP_TIMEOUT_S = 240.0
GUEST_TIMEOUT_S = 540.0  # a minute or two on an idle machine
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5")
# The pyverbs data path is the same protocol under the GIL: what could differ, and little more.
PYVERBS_TESTS = (
    "payload_arrives or leaks or work_request or withdrawn or breaks or goes_down or is_void "
    "or opens_nothing or at_once"
)
LINKS = (
    "tests/rdma/guest_conformance.py",
    "tests/rdma/guest_rdma.py",
    "tests/rdma/guest_windows.py",
)


def run(command: tuple[str, ...], timeout_s: float, **environment: str) -> tuple[int, str]:
    """Run a command; give its status and all that it wrote."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare the guest; give the PYTHONPATH with which Python finds pyverbs in it."""
    if os.environ.get("FASTPS_RDMA_GUEST"):
        pytest.skip("this is the guest")
    status, text = run((str(MACHINE / "setup.sh"),), SETUP_TIMEOUT_S)
    if status:
        pytest.skip(f"no guest with an RDMA device: {text.strip()[-300:]}")
    site = tmp_path_factory.mktemp("site")
    (site / "pyverbs").symlink_to(PYVERBS)
    return f"{ROOT}:{site}"


def native_or_pyverbs() -> str:
    """Name the data path that a user of this build gets."""
    found = list((ROOT / "fastps" / "transport").glob("_rdma_verbs.*.so"))
    return "native" if found else "pyverbs"


def run_in_guest(python_path: str, data_path: str, *command: str) -> str:
    """Run a command in the guest; fail with its output unless it succeeds."""
    start = (str(MACHINE / "run.py"), "-t", str(GUEST_TIMEOUT_S), "--")
    status, text = run(
        (*start, *command),
        GUEST_TIMEOUT_S + 30,
        PYTHONPATH=python_path,
        PYTHONDONTWRITEBYTECODE="1",
        FASTPS_TEST_DATA_PATH=data_path,
    )
    assert status == 0, text
    return text


@pytest.mark.timeout(SETUP_TIMEOUT_S + GUEST_TIMEOUT_S + 60)
def test_conformance_and_faults(python_path):
    text = run_in_guest(python_path, native_or_pyverbs(), *PYTEST, *LINKS)
    assert "passed" in text


@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_the_pyverbs_data_path(python_path):
    text = run_in_guest(python_path, "pyverbs", *PYTEST, *LINKS, "-k", PYVERBS_TESTS)
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
def test_whole_jobs(python_path, tmp_path):
    """Kernels come from a cache filled here, for any CPU: compiling takes minutes in a guest."""
    generic = {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    status, text = run((sys.executable, "-m", "fastps.reduce"), SETUP_TIMEOUT_S, **generic)
    assert status == 0, text
    environ = [f"{name}={value}" for name, value in generic.items()]
    text = run_in_guest(
        python_path,
        native_or_pyverbs(),
        "env",
        *environ,
        *PYTEST,
        "tests/rdma/guest_jobs.py",
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
