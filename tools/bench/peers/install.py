# SPDX-License-Identifier: Apache-2.0
"""Install systems that fastps is compared with, in a folder of their own.

    python tools/bench/peers/install.py [openmpi] [oneccl] [--folder build/peers]

Libraries of the system come from Debian's packages (apt-get, as root); wheels from PyPI go into
the folder, never into the environment that runs this. oneCCL has a C++ interface only, so a shim
is compiled against the static library of its wheel. Running it again does it anew.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench.peers import _places

MPI4PY = "mpi4py>=4.1"  # its wheels find the MPI library when imported
ONECCL = "oneccl-devel==2022.2.*"
ONECCL_PARTS = ("/data/include/", "/data/lib/ccl/cpu/lib/libccl.a")  # of 900 MB the 25 needed
ONECCL_SOURCE = Path(__file__).with_name("oneccl_shim.cpp")
OPENMPI_PACKAGES = ("openmpi-bin",)
ONECCL_PACKAGES = ("libfabric1", "libhwloc15", "g++")


def run(*command: str, **environment: str) -> None:
    """Run a command, shown first; end the program if it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(command, env={**os.environ, **environment}, timeout=1200, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with code {done.returncode}")


def install_packages(names: Sequence[str]) -> None:
    """Install Debian packages, or say who can."""
    if shutil.which("apt-get") is None:
        raise SystemExit(f"no apt-get here; install what Debian has as: {' '.join(names)}")
    if os.geteuid() != 0:
        raise SystemExit(f"run as root first: apt-get install {' '.join(names)}")
    quiet = ("-y", "-q", "--no-install-recommends")
    run("apt-get", "-q", "update", DEBIAN_FRONTEND="noninteractive")
    run("apt-get", "install", *quiet, *names, DEBIAN_FRONTEND="noninteractive")


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    quiet = ("--disable-pip-version-check", "--no-deps", "-q")
    run(sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:])


def install_openmpi(places: _places.Places) -> dict[str, str]:
    """Install Open MPI and mpi4py; give their versions."""
    if shutil.which("mpirun") is None:
        install_packages(OPENMPI_PACKAGES)
    shutil.rmtree(places.mpi4py, ignore_errors=True)
    pip("install", "--target", str(places.mpi4py), MPI4PY)
    said = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    if "(Open MPI)" not in said:
        raise SystemExit(f"the first mpirun in PATH is not Open MPI's: {said.splitlines()[0]}")
    wheel = next(places.mpi4py.glob("mpi4py-*.dist-info")).name
    return {"openmpi": said.split()[3], "mpi4py": wheel.split("-")[1].removesuffix(".dist")}


def install_oneccl(places: _places.Places) -> dict[str, str]:
    """Unpack the static library and compile the shim; give the version."""
    missing = [name for name in ("fabric", "hwloc") if ctypes.util.find_library(name) is None]
    if missing or shutil.which("g++") is None:
        install_packages(ONECCL_PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--dest", folder, ONECCL)
        wheel = next(Path(folder).glob("oneccl_devel-*.whl"))
        data = unpack(wheel, Path(folder))
        places.oneccl.parent.mkdir(parents=True, exist_ok=True)
        compile_shim(data, places.oneccl)
        return {"oneccl": wheel.name.split("-")[1]}


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack headers and library of oneccl-devel; give the folder that holds them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if any(part in name for part in ONECCL_PARTS)]
        archive.extractall(folder, names)
    return next(folder.glob("*.data")) / "data"


def compile_shim(data: Path, target: Path) -> None:
    """Link the shim with oneCCL into one library that needs hwloc, and at run time libfabric."""
    run(
        "g++",
        *("-O2", "-std=c++17", "-fPIC", "-shared", "-Wl,-z,defs"),
        f"-I{data / 'include'}",
        str(ONECCL_SOURCE),
        str(data / "lib" / "ccl" / "cpu" / "lib" / "libccl.a"),
        *(f"-l:{ctypes.util.find_library('hwloc')}", "-ldl", "-lpthread"),
        *("-o", str(target)),
    )


INSTALLERS: dict[str, Callable[[_places.Places], dict[str, str]]] = {
    "openmpi": install_openmpi,
    "oneccl": install_oneccl,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what the command line names, by default everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="openmpi|oneccl", help="default: both")
    _places.add_option(parser)
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(INSTALLERS))
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(INSTALLERS)}")
    places = _places.Places(options.folder)
    places.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or INSTALLERS:
        versions = places.versions() | INSTALLERS[name](places)
        places.versions_file.write_text(json.dumps(versions) + "\n", encoding="utf-8")
    print(f"installed in {places.folder}: {places.versions()}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head -1` ends it quietly
    sys.exit(main())
