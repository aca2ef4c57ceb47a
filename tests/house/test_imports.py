# SPDX-License-Identifier: Apache-2.0
"""What an import brings along: nothing that the module does not use, and little time."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from test_layers import FLOORS

HEAVY = ("numba", "llvmlite", "msgspec", "asyncio", "socket", "concurrent.futures")
BELOW = ("session.session", "session.connections", "session.server_links", "control", "transport",
         "server", "reduce", "_core", "worker._engine", "worker._plan",
         "frameworks", "collectives.objects")  # fmt: skip
ROOMS = tuple(f"fastps.{name}" for name in BELOW)
GROUND = sorted(
    name for name, floor in FLOORS.items()
    if floor <= 1 and name != "fastps.topology"
)  # fmt: skip
MOST_OF_NUMPY = 1.75  # 1.2 to 1.5 were measured, idle and busy; Numba or a framework makes it 4
RUNS = 9


def modules_after(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def loaded(modules: set[str], names: tuple[str, ...]) -> set[str]:
    """List the modules that are one of the names, or lie below it."""
    return {item for item in modules if any(f"{item}.".startswith(f"{name}.") for name in names)}


@pytest.mark.parametrize("module", ["fastps", *GROUND])
def test_the_ground_floor_imports_nothing_from_above(module):
    assert loaded(modules_after(f"import {module}"), (*HEAVY, *ROOMS)) == set()


def test_a_job_of_one_worker_imports_no_link_and_no_kernel():
    program = "import fastps, numpy\nfastps.init(size=1, num_servers=0)\n"
    found = modules_after(program + "fastps.push_pull(numpy.ones(3), 'w'); fastps.shutdown()")
    assert "fastps.session.session" in found
    assert (
        loaded(
            found,
            ("numba", "llvmlite", "fastps.session.connections", "fastps.session.server_links"),
        )
        == set()
    )


def test_a_worker_that_only_sends_imports_no_kernel():
    found = modules_after("import fastps.session.connections")
    assert loaded(found, ("numba", "llvmlite", "fastps.server")) == set()


def test_public_names_are_there_without_more_imports():
    program = (
        "import fastps\n"
        "from fastps import push_pull, Handle, init\n"
        "assert set(fastps.__all__) <= set(dir(fastps))\n"
        "assert all(hasattr(fastps, name) for name in fastps.__all__)\n"
        "import typing\n"
        "assert typing.get_type_hints(fastps.push_pull_async)['return'].__origin__ is Handle\n"
    )
    assert "fastps.session.session" not in modules_after(program)


def seconds_of(program: str, cache: Path) -> float:
    """Measure the processor time of a new interpreter, which other processes do not prolong.

    cache: where it keeps what it has compiled, also where the environment says not to.
    """
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.alone
def test_importing_fastps_costs_little_over_numpy(tmp_path):
    seconds_of("import fastps", tmp_path)  # compiles it
    pairs = [
        (seconds_of("import numpy", tmp_path), seconds_of("import fastps", tmp_path))
        for _ in range(RUNS)
    ]
    leasts = [min(times) for times in zip(*pairs, strict=True)]  # others only make it more
    assert leasts[1] < MOST_OF_NUMPY * leasts[0], leasts
