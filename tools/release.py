# SPDX-License-Identifier: Apache-2.0
"""Check a release: the tree before it is built, the archives in dist/ afterwards.

    python tools/release.py ready     # is everything committed, and in CHANGELOG.md?
    python tools/release.py check     # is what tools/wheels.py built complete?

Both exit with 1 and the reasons if not. `check` needs `fastps[release]` (twine and
check-wheel-contents), and uploads nothing. Each wheel is installed in an empty environment, where
two workers must sum an array. Wheels are built from the source archive, so they show that it
suffices. PIP_FLAGS is handed to pip.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

from wheels import ROOT, call, find_pythons

NOT_PUBLISHED = (".ci/", ".gitignore")
MADE_BY_THE_BUILD = re.compile(r"PKG-INFO|fastps\.egg-info/.*")
TAG = "import sys; print('cp%d%d' % sys.version_info[:2])"
PROGRAM = """
import numpy as np, fastps
fastps.init()
total = fastps.push_pull(np.full(1000, fastps.rank() + 1.0, np.float32), "x", average=False)
assert (total == 3).all(), total
fastps.shutdown()
"""


def version() -> str:
    """Return the version in setup.cfg."""
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed["metadata"]["version"]


def tracked() -> set[str]:
    """Return the files of the commit that belong into a source archive."""
    names = call("git", "-C", ROOT, "ls-files").splitlines()
    return {name for name in names if not name.startswith(NOT_PUBLISHED)}


def sections(changes: str) -> dict[str, str]:
    """Return the text of each section of CHANGELOG.md by its title."""
    parts = re.split(r"^## (.+)\n", changes, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {title.split()[0]: text.strip() for title, text in pairs}


def not_ready(wanted: str, changes: str, status: str) -> list[str]:
    """Return why a version cannot be released, from CHANGELOG.md and `git status --porcelain`."""
    found, reasons = sections(changes), []
    if status:
        reasons.append(f"the tree is dirty; commit or remove:\n{status.rstrip()}")
    if not found.get(wanted):
        reasons.append(
            f"CHANGELOG.md has no section '## {wanted}', the version in setup.cfg; it has "
            f"{', '.join(found) or 'none'}; rename '## Unreleased' after reading its lines"
        )
    if found.get("Unreleased"):
        reasons.append(
            f"CHANGELOG.md has lines under '## Unreleased', which {wanted} contains too; "
            f"move them to '## {wanted}', or raise the version in setup.cfg"
        )
    return reasons


def archive_faults(archive: Path, expected: set[str]) -> list[str]:
    """Return how the files of a source archive differ from those of the commit."""
    with tarfile.open(archive) as opened:
        names = {one.name.partition("/")[2] for one in opened.getmembers() if one.isfile()}
    surplus = {one for one in names - expected if not MADE_BY_THE_BUILD.fullmatch(one)}
    return [
        f"{archive.name} {verb}: {', '.join(sorted(wrong))}; mend MANIFEST.in"
        for verb, wrong in (("lacks", expected - names), ("has besides the commit", surplus))
        if wrong
    ]


def sum_with(wheel: Path, python: str) -> None:
    """Install a wheel in an empty environment, and let two workers sum an array there."""
    with tempfile.TemporaryDirectory() as scratch:
        home, program = Path(scratch, "venv"), Path(scratch, "program.py")
        program.write_text(PROGRAM)
        call(python, "-m", "venv", home)
        pip = (home / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
        call(*pip, *os.environ.get("PIP_FLAGS", "").split(), wheel)
        call(home / "bin/fastps-run", "-np", 2, "--timeout", 120, home / "bin/python", program,
             cwd=scratch)  # fmt: skip


def check(folder: Path) -> None:
    """Check the archives of a folder; write their digests, or end with what is wrong."""
    archive, wheels = folder / f"fastps-{version()}.tar.gz", sorted(folder.glob("*.whl"))
    strange = [one.name for one in wheels if not one.name.startswith(f"fastps-{version()}-")]
    if strange or not wheels or not archive.exists():
        sys.exit(f"{folder} must hold {archive.name} and its wheels, got {strange or wheels}")
    if faults := archive_faults(archive, tracked()):
        sys.exit("\n".join(faults))
    call(sys.executable, "-m", "twine", "check", "--strict", archive, *wheels)
    call(sys.executable, "-m", "check_wheel_contents", *wheels)
    pythons = {call(one, "-c", TAG).strip(): one for one in find_pythons()}
    for wheel in wheels:
        python = pythons.get(wheel.name.split("-")[2])
        if python is None:
            sys.exit(f"no Python here runs {wheel.name}; got {', '.join(pythons)}")
        sum_with(wheel, python)
        print(f"  {wheel.name}: two workers summed with it", flush=True)
    files = {one.name: one.read_bytes() for one in (archive, *wheels)}
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    (folder / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def main() -> None:
    """Check what the command line names."""
    what = sys.argv[1:]
    if what == ["ready"]:
        changes = (ROOT / "CHANGELOG.md").read_text()
        status = call("git", "-C", ROOT, "status", "--porcelain")
        if reasons := not_ready(version(), changes, status):
            sys.exit("\n".join(f"{number}. {one}" for number, one in enumerate(reasons, 1)))
    elif what == ["check"]:
        check(ROOT / "dist")
    else:
        sys.exit(f"expected 'ready' or 'check', got {' '.join(what) or 'nothing'}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
