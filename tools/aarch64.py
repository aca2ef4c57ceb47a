# SPDX-License-Identifier: Apache-2.0
"""Cross-build a wheel for aarch64, and let two emulated workers of it and a server sum an array.

    python tools/aarch64.py [--to FOLDER]

Needs Debian's packages debootstrap, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user,
and root for debootstrap. Headers and an interpreter of that machine come from Debian 12, so the
Python that runs this must be 3.11 too. It needs `fastps[wheel]` and a built fastps, whose
fastps-run starts the emulated workers. The system is kept in build/aarch64 (420 MB). PIP_FLAGS is
handed to pip.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from pathlib import Path

from wheels import ROOT, call, commit_time, tag, unpack_sources

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "python3,python3-dev,libpython3.11-dev"
MIRROR = "http://deb.debian.org/debian"
NAME = "_sysconfigdata__aarch64-linux-gnu"
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")
NEEDED = ("numpy", "numba", "msgspec")
PROGRAM = """
import platform, numpy as np, fastps
fastps.init()
total = fastps.push_pull(np.full(1000, fastps.rank() + 1.0, np.float32), "x", average=False)
assert (total == 3).all(), total
fastps.shutdown()
print("summed on", platform.machine())
"""


def make_system(folder: Path) -> Path:
    """Unpack Debian 12 for arm64, whose programs the emulator runs; once."""
    system = folder / "system"
    if not (folder / "made").exists():
        shutil.rmtree(system, ignore_errors=True)
        what = ("--foreign", "--arch=arm64", "--variant=minbase", f"--include={PACKAGES}")
        call("debootstrap", *what, "bookworm", system, MIRROR)
        for package in sorted(system.glob("var/cache/apt/archives/*.deb")):
            call("dpkg-deb", "-x", package, system)
        (folder / "made").touch()
    return system


def cross_build(source: Path, system: Path, folder: Path) -> Path:
    """Build a wheel with the cross-compiler; return its path."""
    settings = folder / "settings"
    settings.mkdir()
    shutil.copy(system / "usr/lib/python3.11" / f"{NAME}.py", settings)
    headers = (system / "usr/include/python3.11", system / "usr/include")
    foreign = {
        "PYTHONPATH": str(settings),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "_PYTHON_SYSCONFIGDATA_NAME": NAME,
        # Before the headers of this machine's Python; -O2 and -g are what Debian says.
        "CFLAGS": " ".join(f"-I{one}" for one in headers),
    }
    how = ("--wheel", "--no-isolation", "--outdir", folder / "raw", source)
    call(sys.executable, "-m", "build", *how, env=os.environ | foreign)
    return next((folder / "raw").glob("*-linux_aarch64.whl"))


def sum_emulated(wheel: Path, system: Path, folder: Path) -> str:
    """Let two emulated workers sum an array; return what they printed."""
    pip = ("download", "-q", "--disable-pip-version-check", "--only-binary=:all:")
    platforms = [f"--platform={one}" for one in PLATFORMS]
    flags = os.environ.get("PIP_FLAGS", "").split()
    where = ("--python-version=3.11", "-d", folder / "wheels", *NEEDED)
    call(sys.executable, "-m", "pip", *pip, *flags, *platforms, *where)
    for one in (wheel, *(folder / "wheels").glob("*.whl")):
        zipfile.ZipFile(one).extractall(folder / "site")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    # The server is one of this machine: in an emulator Numba compiles for minutes. Emulated
    # processes may be silent for long.
    slow = ("--env", "FASTPS_LEASE_S=60", "--env", "FASTPS_START_TIMEOUT_S=300",
            "--env", "FASTPS_SHARED_MEMORY=0")  # fmt: skip
    run = (Path(sys.executable).parent / "fastps-run", "-np", 2, "-s", 1, *slow, "--timeout", 400)
    emulator = (EMULATOR, "-L", system, "-E", f"PYTHONPATH={folder / 'site'}")
    return call(*run, *emulator, system / "usr/bin/python3.11", program)


def main() -> None:
    """Build and try one wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="where the wheel goes")
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"needs Python 3.11, as Debian 12 has, got {sys.version.split()[0]}; set PYTHON")
    missing = [one for one in ("debootstrap", COMPILER, EMULATOR) if not shutil.which(one)]
    if missing:
        sys.exit(
            f"missing: {', '.join(missing)}; run as root: apt-get install debootstrap "
            "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        )
    os.environ.setdefault("SOURCE_DATE_EPOCH", commit_time())
    os.umask(0o022)
    options.to.mkdir(parents=True, exist_ok=True)
    kept = ROOT / "build" / "aarch64"
    kept.mkdir(parents=True, exist_ok=True)
    system = make_system(kept)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = tag(cross_build(unpack_sources(folder, options.to), system, folder), options.to)
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        print(sum_emulated(wheel, system, folder), end="")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
