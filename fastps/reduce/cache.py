# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept between processes.

One directory per kernel: <cache_dir>/numba-<version>/<digest>/<dtype>, where the digest covers
the source of kernels.py, the element table and the processor. So whatever is in a directory was
made from this very source for this very processor: two processes may fill it at the same time,
hosts of different kinds may share a home, and a new release never meets an old entry. (Numba's
own index would allow all three to mix: it writes index and code in two steps.)

Loading an entry runs code, so the directory must belong to this user and be closed to others;
otherwise, or when it cannot be written, a temporary directory serves for this process alone.
Called under library.py's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import inspect
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.registry import cpu_target

from fastps import config, types
from fastps.reduce import kernels
from fastps.types import DType

_log = logging.getLogger(__name__)
_settings: Any = numba.config  # has no type hints


def load_sum(dtype: DType) -> Any:
    """Load the sum kernel of one element type from the cache, or compile and keep it."""
    place = _root() / _generation() / dtype.name.lower()
    try:
        with _numba_cache_at(place):
            return kernels.compile_sum(dtype, is_cached=True)
    except Exception as error:  # a damaged entry may raise anything; a full disk OSError
        _log.warning("kernel cache %s is not usable (%r); compiling without it", place, error)
        shutil.rmtree(place, ignore_errors=True)
        return kernels.compile_sum(dtype, is_cached=False)


def is_private(directory: Path) -> bool:
    """Tell whether a directory is this user's own, closed to writing by others, and writable."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_own and is_closed and os.access(directory, os.W_OK | os.X_OK)


@functools.cache
def _root() -> Path:
    """Make the cache directory, or a temporary one that goes with this process."""
    wanted = config.cache_dir()
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _log.info("cannot make %s: %s", wanted, error)
    if is_private(wanted):
        return wanted
    _log.warning("%s is not a private writable directory; kernels are not kept", wanted)
    spare = Path(tempfile.mkdtemp(prefix="fastps-kernels-"))
    atexit.register(shutil.rmtree, spare, ignore_errors=True)
    return spare


@functools.cache
def _generation() -> Path:
    """Name everything the machine code depends on apart from the element type."""
    digest = hashlib.sha256()
    for module in (kernels, types):
        digest.update(Path(inspect.getfile(module)).read_bytes())
    digest.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    return Path(f"numba-{numba.__version__}") / digest.hexdigest()[:16]


@contextlib.contextmanager
def _numba_cache_at(place: Path) -> Iterator[None]:
    """Point Numba's cache at a directory for as long as one kernel is compiled."""
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(place)
    try:
        yield
    finally:
        _settings.CACHE_DIR = before
