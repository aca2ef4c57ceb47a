# SPDX-License-Identifier: Apache-2.0
"""Know every system by name: how its processes are started, with which settings, and if they can.

A system is written `name` or `name:VAR=x+VAR2=y`, where the variables are set for its processes.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.peers._places import Places

PEER = Path(__file__).with_name("_peer.py")
INSTALL = "python tools/bench/peers/install.py"
TCP = {"FASTPS_UNIX_SOCKETS": "0"}
LOCAL = {"FASTPS_SHARED_MEMORY": "1", "FASTPS_UNIX_SOCKETS": "1"}
APART = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "1", "FASTPS_COLOCATE": "off"}
COLOCATED = {**APART, "FASTPS_COLOCATE": "on"}
# Workers' threads of oneCCL would spin against the caller; without them the caller does the work.
ONECCL = {
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_LOG_LEVEL": "error",
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_WORKER_OFFLOAD": "0",
}
MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none")
MPI_TCP = ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Kind:
    """What all spellings of one name share.

    peer: which class of _peer.py runs it. needs: gloo, openmpi, oneccl or fastps. servers: whether
    fastps gets servers of its own. options: more arguments for mpirun.
    """

    peer: str
    needs: str
    settings: Mapping[str, str]
    has_servers: bool = False
    options: Sequence[str] = ()


KINDS = {
    "gloo": Kind("gloo", "gloo", {}),
    "mpi": Kind("mpi", "openmpi", AS_ROOT),
    "mpi-tcp": Kind("mpi", "openmpi", AS_ROOT, options=MPI_TCP),
    "oneccl": Kind("oneccl", "oneccl", {**ONECCL, "CCL_ATL_SHM": "1"}),
    "oneccl-tcp": Kind(
        "oneccl",
        "oneccl",
        {**ONECCL, "CCL_ATL_SHM": "0", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"},
    ),
    "registered": Kind("registered", "fastps", LOCAL),
    "private": Kind("fastps", "fastps", LOCAL),
    "colocated": Kind("fastps", "fastps", COLOCATED),
    "colocated-tcp": Kind("fastps", "fastps", {**COLOCATED, **TCP}),
    "apart": Kind("fastps", "fastps", APART, has_servers=True),
    "apart-tcp": Kind("fastps", "fastps", {**APART, **TCP}, has_servers=True),
}


@dataclass(frozen=True)
class System:
    """One spelling: its label, its kind, and the settings added by hand."""

    label: str
    kind: Kind
    extra: Mapping[str, str]

    def environment(self, places: Places) -> dict[str, str]:
        """Give the variables of its processes."""
        found = {**self.kind.settings, **self.extra}
        if self.kind.needs == "openmpi":
            paths = [str(places.mpi4py), os.environ.get("PYTHONPATH", "")]
            found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.kind.needs == "oneccl":
            found["BENCH_ONECCL"] = str(places.oneccl)
            found.setdefault("CCL_OFI_LIBRARY_PATH", ctypes.util.find_library("fabric") or "")
        return found

    def commands(
        self, size: int, servers: int, launch: Sequence[str] = ()
    ) -> list[tuple[list[str], dict[str, str]]]:
        """Give the commands that start its processes, each with variables of its own."""
        peer = [sys.executable, str(PEER), self.kind.peer]
        if self.kind.needs == "fastps":
            number = servers if self.kind.has_servers else 0
            run = [sys.executable, "-m", "fastps.launch.run", "-np", str(size), "-s", str(number)]
            return [([*run, *launch, *peer], {})]
        if self.kind.needs == "openmpi":
            return [([*MPIRUN, "-np", str(size), *self.kind.options, *peer], {})]
        return [(peer, {"RANK": str(rank)}) for rank in range(size)]

    def missing(self, places: Places) -> str:
        """Say what is not installed and which command cures it; "" if nothing."""
        needs = self.kind.needs
        if needs == "gloo" and importlib.util.find_spec("torch") is None:
            return f"torch is not installed; run: {sys.executable} -m pip install torch"
        if needs == "openmpi" and not (shutil.which("mpirun") and places.mpi4py.is_dir()):
            return f"not installed; run: {INSTALL} openmpi"
        if needs == "oneccl" and not (
            ctypes.util.find_library("fabric") and places.oneccl.exists()
        ):
            return f"not installed; run: {INSTALL} oneccl"
        return ""


def parse_system(text: str) -> System:
    """Read `name` or `name:VAR=x+VAR2=y`."""
    name, colon, settings = text.partition(":")
    if name not in KINDS:
        raise ValueError(f"{name!r} is no system; there are {', '.join(KINDS)}")
    extra = {}
    for item in settings.split("+") if colon else []:
        variable, equals, value = item.partition("=")
        if not variable or not equals:
            raise ValueError(f"{item!r} in {text!r} is not VAR=value")
        extra[variable] = value
    return System(text, KINDS[name], extra)


def parse_systems(text: str) -> list[System]:
    """Read systems with commas between them, each once; `all` stands for every name."""
    names = [*KINDS] if text == "all" else text.split(",")
    if len(set(names)) < len(names):
        raise ValueError(f"a system is named twice in {text!r}")
    return [parse_system(name) for name in names]
