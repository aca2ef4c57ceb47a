# SPDX-License-Identifier: Apache-2.0
"""What a wheel and a source archive hold: everything to run, to compile against, to build."""

from __future__ import annotations

import configparser
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from house_source import PACKAGE, ROOT

ONE_MODULE = "fastps.transport._link"  # one extension stands for all: the others take minutes
BUILT = (".so", ".c", ".html", ".pyc")
NEEDED = ["msgspec", "numba", "numpy"]
FOR_DEVELOPERS = {"demo", "docs", "wheel", "release", "sbom", "test"}


@pytest.fixture(scope="module")
def release():
    """Give the names of the program that checks releases."""
    sys.path.insert(0, str(ROOT / "tools"))
    return runpy.run_path(str(ROOT / "tools/release.py"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Build a wheel and a source archive of a clean copy; give the folder with both."""
    folder = tmp_path_factory.mktemp("packaging")
    build(folder, folder / "source")
    return folder


def committed() -> set[str]:
    """List what a commit of this tree would have."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: what is built into an archive is what git knows")
    listed = ("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).exists()}


def build(folder: Path, source: Path, *words: str) -> None:
    """Copy what a commit has to a new folder, and build it into another."""
    for name in committed():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *words, "--outdir", folder, source],
        env={**os.environ, "FASTPS_ONLY": ONE_MODULE, "SOURCE_DATE_EPOCH": "1700000000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def sources(*suffixes: str) -> set[str]:
    """List the package's files with one of the suffixes, relative to the root."""
    return {
        path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.suffix in suffixes
    }


def in_wheel(folder: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


@pytest.mark.timeout(300)
def test_wheel_holds_the_package_and_nothing_else(archives):
    names = set(in_wheel(archives))
    expected = sources(".py", ".pyi", ".pxd") | {"fastps/py.typed"}
    extensions = {name for name in names if name.endswith(".so")}
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - extensions - metadata == expected
    assert [name.split(".")[0] for name in extensions] == [ONE_MODULE.replace(".", "/")]
    assert any(name.endswith("/LICENSE") for name in metadata)


@pytest.mark.timeout(300)
def test_wheel_offers_the_commands_and_asks_for_little(archives):
    files = in_wheel(archives)
    points = next(text for name, text in files.items() if name.endswith("entry_points.txt"))
    assert b"fastps-run = fastps.launch.run:main" in points
    assert b"fastps-server = fastps.server.main:main" in points
    text = next(text for name, text in files.items() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(text.decode())
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == NEEDED
    assert metadata["License"] == "Apache-2.0"


@pytest.mark.timeout(300)
def test_source_archive_has_the_files_of_the_commit_and_nothing_built(archives, release):
    archive = next(archives.glob("*.tar.gz"))
    files = {name for name in committed() if not name.startswith(release["NOT_PUBLISHED"])}
    assert release["archive_faults"](archive, files) == []
    assert not {name for name in files if name.endswith(BUILT)}
    first, *others = sorted(files)
    assert "has besides the commit: " + first in release["archive_faults"](archive, {*others})[0]
    assert "lacks: new.pyx;" in release["archive_faults"](archive, {*files, "new.pyx"})[0]


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ("## 1.0.0\n\n- Faster.\n\n## 0.2.0\n- x\n", "", None),
        ("## Unreleased\n\n## 1.0.0\n- Faster.\n", "", None),
        ("## 1.0.0 (2027-01-05)\n- Faster.\n", "", None),
        ("## 1.0.0\n- Faster.\n", " M setup.py\n", "the tree is dirty"),
        ("## Unreleased\n- y\n## 1.0.0\n- x\n", "", "lines under '## Unreleased'"),
        ("## 1.0.0\n\n## 0.2.0\n- x\n", "", "no section '## 1.0.0'"),
        ("## 0.2.0\n- x\n", "", "no section '## 1.0.0'"),
    ],
)
def test_a_release_says_what_is_missing(release, changes, status, reason):
    reasons = release["not_ready"]("1.0.0", changes, status)
    assert len(reasons) == (reason is not None), reasons
    assert reason is None or reason in reasons[0]


@pytest.mark.timeout(300)
def test_a_wheel_of_the_same_sources_has_the_same_bytes(archives, tmp_path):
    """tools/wheels.py says the time; test_wheel.py looks for paths in all extensions."""
    build(tmp_path, tmp_path / "in/another/folder", "--wheel")
    (first,), (second,) = archives.glob("*.whl"), tmp_path.glob("*.whl")
    differing = {
        name for name, data in in_wheel(tmp_path).items() if in_wheel(archives).get(name) != data
    }
    assert not differing
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.timeout(300)
def test_a_wheel_names_no_folder_of_this_machine(archives):
    """Neither by the compiler, nor where the loader looks for libraries."""
    code = next(data for name, data in in_wheel(archives).items() if name.endswith(".so"))
    folders = {str(ROOT), str(archives), sys.prefix, sys.base_prefix} - {"/usr"}
    assert not [folder for folder in folders if folder.encode() in code]


def test_users_get_ranges_without_a_highest_version():
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    lists = {"": parsed["options"]["install_requires"], **parsed["options.extras_require"]}
    for extra in lists.keys() - FOR_DEVELOPERS:
        for line in lists[extra].split():
            assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+", line), f"{extra}: {line}"


def test_each_package_that_all_users_get_has_a_reason():
    lines = (ROOT / "setup.cfg").read_text().partition("install_requires =\n")[2].splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith(" "))
    assert [line.strip()[:2] == "# " for line in lines[:end]] == [True, False] * len(NEEDED)


def test_the_list_of_what_is_installed_has_all_packages():
    listed = ROOT / "out" / "sbom.json"
    if not listed.exists():
        pytest.skip("no list: make sbom")
    found = json.loads(listed.read_text())
    names = {part["name"]: part["bom-ref"] for part in found["components"]}
    assert found["bomFormat"] == "CycloneDX"
    assert {"fastps", *NEEDED, "llvmlite"} <= names.keys()
    needs = {one["ref"]: one.get("dependsOn", ()) for one in found["dependencies"]}
    assert {names[name] for name in NEEDED} <= set(needs[names["fastps"]])
