# SPDX-License-Identifier: Apache-2.0
"""How tests on the host prepare and use guests with RDMA devices: tools/rdma-vm."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastps.types import DType

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tools" / "rdma-vm"
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
SETUP_TIMEOUT_S = 240.0
GUEST_TIMEOUT_S = 540.0  # a minute or two on an idle machine
TESTS = ROOT / "tests"
# Plugins, and what conftest.py files share, are of no use in a guest, and take seconds to import.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--noconftest", "--durations=5"),
    *("-p", "no:cacheprovider", "-p", "pytest_timeout"),
)
# What guests need: the codecs are those of guest_coded.py.
KERNELS = (*(code.name.lower() for code in DType), "onebit", "topk", "int4")
# Kernels for nearly any CPU, so that a cache filled on the host serves in a guest. Not for every
# CPU: without SSE4.1 those of integers call floor(), and what calls a library is not kept.
GENERIC = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": ""}


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


def set_up(site: Path) -> str:
    """Prepare the guest; give the PYTHONPATH with which Python finds pyverbs in it.

    site: an empty folder. Skips the test where there is no guest, and within one.
    """
    if os.environ.get("RDMA_VM_GUEST"):
        pytest.skip("this is the guest")
    status, text = run((str(MACHINE / "setup.sh"),), SETUP_TIMEOUT_S)
    if status:
        pytest.skip(f"no guest with an RDMA device: {text.strip()[-300:]}")
    (site / "pyverbs").symlink_to(PYVERBS)
    compile_sources()
    return f"{ROOT}:{TESTS}:{site}"


def compile_sources() -> None:
    """Compile here what guests import, whatever the environment says: there it takes seconds."""
    settings = ALONE | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": f"{ROOT}:{TESTS}"}
    guests = map(str, sorted(TESTS.glob("rdma/guest_*.py")))
    for command in (
        (sys.executable, "-m", "compileall", "-q", str(ROOT / "fastps"), str(TESTS)),
        (*PYTEST, "--collect-only", *guests),  # pytest compiles tests in a way of its own
    ):
        status, text = run(command, SETUP_TIMEOUT_S, **settings)
        assert status == 0, text


def fill_cache(folder: Path) -> tuple[str, ...]:
    """Compile the kernels here, since it takes minutes in a guest; give how to run with them."""
    settings = GENERIC | {"XDG_CACHE_HOME": str(folder)}

    def fill(names: tuple[str, ...]) -> None:
        command = (sys.executable, "-m", "fastps.reduce", *names)
        status, text = run(command, SETUP_TIMEOUT_S, **settings)
        assert status == 0, text
        assert "not cached" not in text, text

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, (KERNELS[::2], KERNELS[1::2])))
    return ("env", *(f"{name}={value}" for name, value in settings.items()))


def native_or_pyverbs() -> str:
    """Name the data path that a user of this build gets."""
    found = list((ROOT / "fastps" / "transport" / "rdma").glob("_verbs.*.so"))
    return "native" if found else "pyverbs"


def run_in_guest(
    python_path: str, data_path: str, *command: str, options: tuple[str, ...] = ()
) -> str:
    """Run a command in the guest; fail with its output unless it succeeds.

    options: more of run.py, such as a number of machines.
    """
    start = (str(MACHINE / "run.py"), "-t", str(GUEST_TIMEOUT_S), *options, "--")
    status, text = run(
        (*start, *command),
        GUEST_TIMEOUT_S + 30,
        PYTHONPATH=python_path,
        PYTHONDONTWRITEBYTECODE="1",
        **ALONE,
        FASTPS_TEST_DATA_PATH=data_path,
    )
    assert status == 0, text
    return text
