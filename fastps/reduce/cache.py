# SPDX-License-Identifier: Apache-2.0
"""Cache machine code of kernels between processes.

One file per kernel: <cache_dir>/code-<digest>/<name>, where the digest covers the sources that
make it, Numba's version and the processor. So a directory only has code of this source for this
processor: hosts of different kinds may share a home, and a new release never reads an old entry.
Of processes that lack the same kernel at the same time one compiles it, and the others wait a
while. Nothing here imports Numba.

Loading an entry runs code, so other users must not be able to write one or to swap a directory on
its path; otherwise, or where the directory cannot be written, nothing is cached. A file has a
digest of its own, which shows damage. Called under library.py's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path

from fastps import config
from fastps.files import open_private
from fastps.reduce.machine_code import Code

_log = logging.getLogger(__name__)
PATIENCE_S = 10.0  # for a process that compiles the same kernel: 0.5 s on an idle machine
LOOK_S = 0.01

HERE = Path(__file__).parent
SHARED = ("kernels.py", "compiler.py", "machine_code.py", "../types.py")
CODECS = ("codec/kernels.py", "codec/words.py", "codec/scratch.py", "../contract/codec.py")
SOURCES = {  # of each family of kernels, besides
    "reduce": (),
    "robust": ("robust.py",),
    "ordered": ("robust.py", "combine_kernels.py"),
    "codec": CODECS,
    "byteps": (*CODECS, "codec/byteps.py"),
    "pairs": (*CODECS, "codec/pairs.py"),
    "sparse": (*CODECS, "codec/sparse.py"),
}
WHO = ("vendor_id", "cpu family", "model", "stepping", "flags")  # of /proc/cpuinfo
ANY_PROCESSOR = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")  # where both name another than this one
CPU_BYTES = 8192  # which the first processor's lines do not exceed


def read(family: str, name: str) -> Code | None:
    """Return the cached code of a kernel; None: there is none, or it is damaged."""
    root = _root()
    if root is None:
        return None
    place = root / _generation(family) / name
    try:
        return Code.unpack(place.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning(
            "kernel %s in %s is damaged and is compiled again: %s", name, config.cache_dir(), error
        )
        with contextlib.suppress(OSError):
            place.unlink()
        return None


class Draft:
    """A kernel about to be cached: a file that one process at a time has locked.

    Leaving the context removes the file if it was not kept. Where there is no cache, or the lock
    takes too long, keep() does nothing.
    """

    def __init__(self, family: str, name: str) -> None:
        root = _root()
        self.name = name
        self._place = None if root is None else root / _generation(family) / name
        self._file = -1

    def __enter__(self) -> Draft:
        if self._place is None:
            return self
        try:
            self._place.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._lock()
        except OSError as error:
            _log.warning("kernel %s cannot be cached: %s", self.name, error.strerror)
            self._close()
        return self

    def keep(self, code: Code) -> None:
        """Keep the machine code; concurrent readers find all of it or nothing."""
        if self._file < 0 or self._place is None:
            return
        try:
            os.ftruncate(self._file, 0)  # of a process that died
            os.write(self._file, code.pack())
            os.replace(self._path, self._place)
        except OSError as error:
            _log.warning("kernel %s is not cached: %s", self.name, error.strerror)

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # the next process finds the kernel, or compiles it
        self._close()

    @property
    def _path(self) -> str:
        return f"{self._place}.draft"

    def _lock(self) -> None:
        """Wait for the lock; give the file up after PATIENCE_S. No system call has a deadline."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(LOOK_S)
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@functools.cache
def _root() -> Path | None:
    """Return the cache directory by an open descriptor, so that it cannot be swapped."""
    if platform.machine() != "x86_64":  # machine_code.py links no other: each process compiles
        return None
    wanted = config.cache_dir()
    try:
        return Path(f"/proc/self/fd/{open_private(wanted)}")
    except OSError as error:
        _log.warning(
            "kernels are not cached in %s and are compiled in each process: %s; set "
            "XDG_CACHE_HOME to a private directory", wanted, error.strerror or error,
        )  # fmt: skip
        return None


@functools.cache
def _generation(family: str) -> str:
    """Return the directory's name: a digest of all that machine code depends on."""
    digest = hashlib.sha256()
    for name in (*SHARED, *SOURCES[family]):
        digest.update((HERE / name).read_bytes())
    for package in ("numba", "llvmlite"):
        found = find_spec(package)
        version = "" if found is None else str(found.origin).replace("__init__", "_version")
        digest.update(Path(version).read_bytes() if version else b"")
    environment = config.process_environment()
    settings = {name: value for name, value in environment.items() if name.startswith("NUMBA_")}
    digest.update(repr(sorted(settings.items())).encode())
    digest.update(platform.machine().encode())
    if not settings.keys() >= set(ANY_PROCESSOR):
        digest.update(_processor().encode())
    return f"code-{digest.hexdigest()[:16]}"


def _processor() -> str:
    """Return the processor's identity and features."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(CPU_BYTES).split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.split("\t")[0].strip(" :") in WHO]
    return "\n".join(told)
