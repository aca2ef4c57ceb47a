# SPDX-License-Identifier: Apache-2.0
"""When Numba is loaded, and where compiled kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastps.reduce.__main__ import main
from fastps.reduce.cache import is_private

PATHS = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent)))
CPU_LIMIT_S = 4.0  # processor time, so that a loaded machine changes little; measured 0.4 to 0.9

LIGHT = "import sys, fastps.reduce; assert 'numba' not in sys.modules; import fastps.types"
SUM = """
import ctypes, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
started = time.process_time()
from fastps.reduce import sum_kernel
from fastps.types import DType
kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_int64)
function = kind(sum_kernel(DType.INT32))
print("seconds", time.process_time() - started)
a, b, out = ((ctypes.c_int32 * 100)(*[value] * 100) for value in (3, 4, 0))
table = (ctypes.c_void_p * 2)(ctypes.addressof(a), ctypes.addressof(b))
assert function(table, 2, out, 100, 1) == 1
assert list(out) == [7] * 100
"""
PORTABLE = """
import test_reduce_sum as test
from fastps.reduce import kernels
from fastps.types import DType
assert kernels.FORMS[DType.FLOAT16] is kernels._PORTABLE_HALF
test.test_every_half_with_every_neighbour_in_size(DType.FLOAT16)
test.test_halves_are_rounded_once(DType.FLOAT16)
print("same")
"""
COMMAND = "from fastps.reduce.__main__ import main; main(['int32'])"
SPARE = "import tempfile; tempfile.tempdir = {home!r}"
LIST = """
import pathlib
print("spare", len(list(pathlib.Path(tempfile.gettempdir()).glob("fastps-kernels-*"))))
"""


def start(code: str, home: Path, **variables: str) -> subprocess.Popen[str]:
    """Run a program in a process whose kernel cache is below `home`."""
    environment = {**os.environ, **variables, "XDG_CACHE_HOME": str(home), "PYTHONPATH": PATHS}
    environment.pop("NUMBA_CACHE_DIR", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a program and give what it wrote."""
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    return text


def test_importing_reduce_does_not_import_numba(tmp_path):
    finish(start(LIGHT, tmp_path))
    assert not list(tmp_path.iterdir())


def test_float16_on_a_processor_without_its_instructions(tmp_path):
    """Every value with every kind of neighbour; a missing instruction would end the process."""
    process = start(PORTABLE, tmp_path, NUMBA_CPU_NAME="x86-64-v2", NUMBA_CPU_FEATURES="")
    assert "same" in finish(process)


def test_two_processes_fill_a_cold_cache_and_a_third_finds_it_warm(tmp_path):
    cold, command = start(SUM, tmp_path), start(COMMAND, tmp_path)
    assert float(finish(cold).split("seconds ")[1]) < CPU_LIMIT_S
    assert "int32 " in finish(command)
    assert (tmp_path / "fastps").stat().st_mode & 0o777 == 0o700
    text = finish(start(SUM, tmp_path))
    assert "int32 loaded in" in text
    assert float(text.split("seconds ")[1]) < CPU_LIMIT_S


def test_a_damaged_entry_is_thrown_away(tmp_path):
    finish(start(SUM, tmp_path))
    (entry,) = tmp_path.rglob("*.nbc")
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    text = finish(start(SUM, tmp_path))
    assert "is not usable" in text
    assert "compiled in" in text
    assert not list(tmp_path.rglob("*.nbc"))  # so the next process fills it again


@pytest.mark.parametrize("kind", ["open to others", "a file"])
def test_an_unsafe_directory_is_not_used(tmp_path, kind):
    place = tmp_path / "fastps"
    if kind == "a file":
        place.write_text("in the way")
    else:
        place.mkdir()
        place.chmod(0o777)
    text = finish(start(SPARE.format(home=str(tmp_path)) + SUM + LIST, tmp_path))
    assert "is not a private writable directory" in text
    assert "spare 1" in text
    assert not list(tmp_path.glob("fastps-kernels-*"))  # gone with the process
    assert place.is_file() or not list(place.iterdir())


def test_private_means_own_closed_and_a_directory(tmp_path):
    assert is_private(tmp_path) == (tmp_path.stat().st_mode & 0o022 == 0)
    tmp_path.chmod(0o700)
    assert is_private(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not is_private(tmp_path / "link")
    assert not is_private(tmp_path / "absent")
    tmp_path.chmod(0o720)
    assert not is_private(tmp_path)
    tmp_path.chmod(0o700)


def test_command_names_the_known_types(capsys):
    with pytest.raises(SystemExit):
        main(["float23"])
    message = capsys.readouterr().err
    assert "float23" in message
    assert "bfloat16" in message
