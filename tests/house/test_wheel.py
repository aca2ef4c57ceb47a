# SPDX-License-Identifier: Apache-2.0
"""A wheel for everybody's Linux: built, looked at, installed where nothing of this folder is."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from house_source import ROOT

pytest.importorskip("auditwheel")
pytestmark = pytest.mark.alone  # a build takes all processors, which others need to be in time

NOT_IN_A_CHECKOUT = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
LIMIT_S = 560  # two processors take two minutes to compile everything
PROGRAM = """
import numpy as np, fastps
assert "venv" in fastps.__file__, fastps.__file__
fastps.init()
total = fastps.push_pull(np.full(1000, fastps.rank() + 1.0, np.float32), "x", average=False)
assert (total == 3).all()
fastps.shutdown()
print("summed by", fastps.__version__)
"""


def run(*command: object, folder: Path = ROOT, path: str = "") -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, text=True, timeout=LIMIT_S, check=False,
        env=kept | {"PATH": f"{path}:{kept['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def tool():
    """Give the names of the program that builds wheels."""
    return runpy.run_path(str(ROOT / "tools/wheels.py"))


@pytest.fixture(scope="module")
def newest(tool):
    """Give the newest Python that has its headers here: who builds for it builds for any."""
    return tool["find_pythons"]()[-1]


@pytest.fixture(scope="module")
def wheel(newest, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "tools/wheels.py", "--python", newest, "--to", folder)
    return next(folder.glob("*.whl"))


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_wheel_is_portable_small_and_links_nothing_that_is_not_everywhere(wheel, tool):
    said = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert "manylinux" in wheel.name
    assert "ibverbs" not in said
    with zipfile.ZipFile(wheel) as archive:
        times = {entry.date_time[:5] for entry in archive.infolist()}  # to minutes: zip has halves
        expected = os.environ.get("SOURCE_DATE_EPOCH") or tool["commit_time"]()
        assert times == {time.gmtime(int(expected))[:5]}
        extensions = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    modules = list((ROOT / "fastps").rglob("*.pyx"))
    assert len(extensions) in (len(modules), len(modules) - 1)  # without verbs' headers, one less
    assert not [code for code in extensions if b"\0.symtab\0" in code], "not stripped"
    assert sum(map(len, extensions)) < 4e6
    folders = [str(folder).encode() for folder in (ROOT, Path.home(), tempfile.gettempdir())]
    assert not [code for code in extensions if any(folder in code for folder in folders)], folders


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_wheel_works_in_a_fresh_environment_with_what_pip_gives_it(newest, wheel, tmp_path):
    home, program = tmp_path / "venv", tmp_path / "program.py"
    run(newest, "-m", "venv", home)
    run(home / "bin/pip", "install", "-q", *os.environ.get("PIP_FLAGS", "").split(), wheel)
    # A wheel has what this checkout has, which depends on the headers of libibverbs.
    verbs = find_spec("fastps.transport.rdma._verbs")
    program.write_text(PROGRAM if verbs is None else f"import {verbs.name}\n{PROGRAM}")
    path, words = str(home / "bin"), ("fastps-run", "-np", "2")
    assert "no torch" in run("fastps", "doctor", folder=tmp_path, path=path)
    said = run(*words, "python", "-W", "error", program, folder=tmp_path, path=path)
    assert said.count("summed by") == 2
    # In a checkout, whose sources are not compiled, no command takes them for what is installed.
    shutil.copytree(ROOT / "fastps", tmp_path / "checkout/fastps", ignore=NOT_IN_A_CHECKOUT)
    links = ("-s", "1", "--env", "FASTPS_SHARED_MEMORY=0", "python", program)
    here = {"folder": tmp_path / "checkout", "path": path}
    assert run(*words, *links, **here).count("summed by") == 2
    assert run("fastps", "doctor", **here).count(": works\n") == 2
    assert "FASTPS_TRANSPORT=auto" in run("fastps", "config", "--explain", **here)
