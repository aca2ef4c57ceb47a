# SPDX-License-Identifier: Apache-2.0
"""When Numba is loaded, and where compiled kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastps.files import open_private
from fastps.reduce import cache
from fastps.reduce.__main__ import main
from fastps.reduce.machine_code import Code

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
COLD_S, WARM_S = 4.0, 0.1  # of processor time, over fastps; measured 0.4 to 2.2, and 0.002
TRIES = 5  # another machine's guests only make it longer

LIGHT = "import sys, fastps.reduce; assert 'numba' not in sys.modules; import fastps.types"
SUM = """
import ctypes, logging, sys, time
import fastps
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
started = time.process_time()
from fastps.reduce import sum_kernel
from fastps.types import DType
kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_void_p)
function = kind(sum_kernel(DType.INT32))
print("seconds", time.process_time() - started)
a, b, out = ((ctypes.c_int32 * 100)(*[value] * 100) for value in (3, 4, 0))
table = (ctypes.c_void_p * 2)(ctypes.addressof(a), ctypes.addressof(b))
assert function(table, 2, out, 100, ctypes.byref(ctypes.c_int64(1))) == 1
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
CODE = Code(bytes(range(64)), 8)
COMMAND = "from fastps.reduce.__main__ import main; main(['int32'])"


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
    finish(cold)
    assert "int32 " in finish(command)
    assert (tmp_path / "fastps").stat().st_mode & 0o777 == 0o700
    text = finish(start(SUM + LIGHT, tmp_path))
    assert "int32 loaded in" in text
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file()]  # no drafts are left


@pytest.mark.alone
def test_a_kernel_costs_little_cold_and_next_to_nothing_warm(tmp_path):
    def seconds(home: Path) -> float:
        return float(finish(start(SUM, home)).split("seconds ")[1])

    homes = [tmp_path / str(i) for i in range(TRIES)]
    for home in homes:
        home.mkdir()
    assert any(seconds(home) < COLD_S for home in homes)
    assert any(seconds(homes[0]) < WARM_S for _ in range(TRIES))


def test_one_of_several_compiles_and_a_dead_one_s_draft_is_no_obstacle(tmp_path):
    finish(start(SUM, tmp_path))
    (entry,) = tmp_path.rglob("sum_int32")
    entry.rename(entry.with_name("sum_int32.draft"))  # as one leaves it that is killed
    texts = [finish(one) for one in [start(SUM, tmp_path) for _ in range(4)]]
    assert sum("compiled in" in text for text in texts) == 1
    assert [path.name for path in entry.parent.iterdir()] == ["sum_int32"]


def test_who_is_stopped_with_the_lock_holds_nobody_up_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.05)
    monkeypatch.setattr(cache, "_root", lambda: tmp_path)
    with cache.Draft("reduce", "sum_int32") as first, cache.Draft("reduce", "sum_int32") as second:
        second.keep(CODE)
        assert cache.read("reduce", "sum_int32") is None
        first.keep(CODE)
    assert cache.read("reduce", "sum_int32") == CODE
    assert not caplog.records


def test_code_for_a_named_processor_serves_on_every_host(monkeypatch):
    """So a cache filled on one host serves in a virtual machine or on a cluster's older nodes."""
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    find = cache._generation.__wrapped__

    def generations() -> set[str]:
        found = set()
        for processor in ("one", "another"):
            monkeypatch.setattr(cache, "_processor", lambda told=processor: told)
            found.add(find("reduce"))
        return found

    assert len(generations()) == 2
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert len(generations()) == 2
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    assert len(generations()) == 1


def test_a_damaged_entry_is_thrown_away(tmp_path):
    finish(start(SUM, tmp_path))
    (entry,) = tmp_path.rglob("sum_int32")
    whole = entry.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1] + b"?", b""):
        entry.write_bytes(damaged)
        text = finish(start(SUM, tmp_path))
        assert "is damaged and is compiled again" in text
        assert "compiled in" in text
        assert entry.read_bytes() == whole  # kept again, and the same


def give_away(path: Path) -> None:
    """Let a path belong to somebody else, as only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root gives things away")
    os.chown(path, 12345, 12345, follow_symlinks=False)


def nothing(path: Path) -> None:
    """Leave it as it is."""


def open_to(mode: int) -> Callable[[Path], None]:
    """Change the mode of a directory."""
    return lambda path: path.chmod(mode)


UNSAFE = {
    "a parent that all can write to": (open_to(0o777), nothing),
    "a parent that a group can write to": (open_to(0o770), nothing),
    "a parent of somebody else": (give_away, nothing),
    "open to others": (nothing, open_to(0o777)),
    "to be read by others": (nothing, open_to(0o755)),
    "somebody else's": (nothing, give_away),
    "somebody else's in a sticky one": (open_to(0o1777), give_away),
}


def make_place(tmp_path: Path, kind: str) -> Path:
    """Make a directory whose parent is wrong, or which is wrong itself."""
    place = tmp_path / "parent" / "home" / "fastps"
    place.mkdir(parents=True, mode=0o700)
    of_parent, of_place = UNSAFE[kind]
    of_place(place)
    of_parent(tmp_path / "parent")
    return place


@pytest.mark.parametrize("kind", UNSAFE)
def test_what_others_can_change_is_not_opened(tmp_path, kind):
    with pytest.raises(PermissionError, match=r"not yours alone|others can change"):
        open_private(make_place(tmp_path, kind))


@pytest.mark.parametrize("kind", list(UNSAFE)[:4])
def test_no_code_is_run_from_what_others_can_change(tmp_path, kind):
    place = make_place(tmp_path, kind)
    text = finish(start(SUM, place.parent))
    assert "kernels are not cached in" in text
    assert "compiled in" in text
    assert not list(place.iterdir())


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "fastps").write_text("in the way")
    assert "kernels are not cached in" in finish(start(SUM, tmp_path))


def test_a_directory_is_made_for_us_alone_also_behind_links_of_ours(tmp_path):
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "link").symlink_to("sticky/../sticky")
    (tmp_path / "again").symlink_to(tmp_path / "link")
    folder = open_private(tmp_path / "again" / "new" / "fastps")
    made = tmp_path / "sticky" / "new" / "fastps"
    assert os.path.samestat(os.fstat(folder), made.stat())
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent)] == [0o700] * 2
    os.close(folder)


def test_links_of_others_and_links_in_a_circle_are_not_followed(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too many symbolic links"):
        open_private(tmp_path / "circle" / "fastps")
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "theirs").symlink_to(tmp_path)
    give_away(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="link theirs"):
        open_private(tmp_path / "theirs" / "fastps")


def test_a_directory_that_was_swapped_is_not_looked_at_again(tmp_path):
    """The place is held by its descriptor: what has its name later does not count."""
    finish(start(SUM, tmp_path))
    swap = f"""
import os
from fastps.reduce import cache
cache._root()
os.rename({str(tmp_path)!r} + "/fastps", {str(tmp_path)!r} + "/moved")
os.mkdir({str(tmp_path)!r} + "/fastps")
"""
    assert "int32 loaded in" in finish(start(swap + SUM, tmp_path))
    assert not list((tmp_path / "fastps").iterdir())


def test_command_names_the_known_types(capsys):
    with pytest.raises(SystemExit):
        main(["float23"])
    message = capsys.readouterr().err
    assert "float23" in message
    assert "bfloat16" in message
