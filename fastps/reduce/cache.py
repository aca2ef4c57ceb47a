# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept between processes.

One directory per kernel: <cache_dir>/numba-<version>/<digest>/<op>_<dtype>, where the digest
covers the source of kernels, the element table and the processor. So whatever is in a directory
was made from this very source for this very processor: two processes may fill it at the same time,
hosts of different kinds may share a home, and a new release never meets an old entry. (Numba's own
index would allow all three to mix: it writes index and code in two steps.)

Loading an entry runs code, so nobody else may be able to put one there or to swap a directory on
the way there; otherwise, or when it cannot be written, nothing is kept. Called under library.py's
lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import inspect
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
from numba.core.registry import cpu_target

from fastps import config, types
from fastps.reduce import kernels
from fastps.types import DType, ReduceOp

_log = logging.getLogger(__name__)
_settings: Any = numba.config  # has no type hints
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_STEPS = 256  # names on a path; links may lead in a circle


def load_kernel(op: ReduceOp, dtype: DType) -> Any:
    """Load the sum, or so, of one element type from the cache, or compile and keep it."""
    if op is ReduceOp.TRIMMED_MEAN:
        return _load_robust("trimmed_mean", dtype)
    compile_it = functools.partial(kernels.compile_kernel, op, dtype)
    return _load(f"{op.name}_{dtype.name}".lower(), compile_it, (kernels, types))


def load_distances(dtype: DType) -> Any:
    """Load the kernel of square distances between arrays, as load_kernel() does."""
    return _load_robust("square_distances", dtype)


def load_robust(what: str, dtype: DType) -> Any:
    """Load a kernel of robust.py by its name, as load_kernel() does."""
    return _load_robust(what, dtype)


def load_ordered(kind: str, dtype: DType, n: int, trim: int) -> Any:
    """Load what a rule makes of n sources, as load_kernel() does; see ordered.py."""
    from fastps.reduce import ordered, robust  # noqa: PLC0415

    compile_it = functools.partial(ordered.compile_ordered, kind, dtype, n, trim)
    name = f"{kind}_{n}_{trim}_{dtype.name}".lower()
    return _load(name, compile_it, (kernels, robust, ordered, types))


def _load_robust(what: str, dtype: DType) -> Any:
    from fastps.reduce import robust  # noqa: PLC0415  (few jobs need it)

    compile_it = functools.partial(getattr(robust, f"compile_{what}"), dtype)
    return _load(f"{what}_{dtype.name}".lower(), compile_it, (kernels, robust, types))


def load_codec(verb: str, what: str, does: bool) -> Any:
    """Load a kernel of a codec, as load_kernel() does; see codec.kernels.compile_codec()."""
    from fastps.reduce.codec import kernels as codec  # noqa: PLC0415  (most jobs need none)
    from fastps.reduce.codec import words  # noqa: PLC0415

    sources: tuple[ModuleType, ...] = (kernels, codec, words, types)
    compile_it = functools.partial(codec.compile_codec, verb, what, does)
    if what.startswith("byteps_"):
        from fastps.reduce.codec import byteps  # noqa: PLC0415  (fewer still)

        sources = (*sources, byteps)
        compile_it = functools.partial(byteps.compile_codec, verb, what, does)
    return _load(f"{verb}_{what}_{does:d}", compile_it, sources)


def _load(name: str, compile_it: Callable[..., Any], sources: tuple[ModuleType, ...]) -> Any:
    root = _root()
    if root is None:
        return compile_it(is_cached=False)
    place = root / _generation(sources) / name
    try:
        with _numba_cache_at(place):
            return compile_it(is_cached=True)
    except Exception as error:  # a damaged entry may raise anything; a full disk OSError
        _log.warning(
            "kernel cache %s is not usable (%r); compiling without it", config.cache_dir(), error
        )
        shutil.rmtree(place, ignore_errors=True)
        return compile_it(is_cached=False)


@functools.cache
def _root() -> Path | None:
    """Hold the cache directory open for good; its path is by descriptor, so nobody can swap it."""
    wanted = config.cache_dir()
    try:
        return Path(f"/proc/self/fd/{open_private(wanted)}")
    except OSError as error:
        _log.warning("kernels are not kept in %s: %s", wanted, error.strerror or error)
        return None


def open_private(path: Path) -> int:
    """Open an absolute directory, made if missing, that nobody else can have put anything into.

    On the way to it everything, links too, must belong to this user or root, and directories be
    closed to writing by others or sticky; the last one must be this user's alone. Raises OSError.
    """
    names = list(reversed(path.parts))
    folder = os.open(names.pop(), _PLACE)
    try:
        for _ in range(MAX_STEPS):
            _check(folder, is_last=not names)
            if not names:
                return folder
            former, folder = folder, _step(folder, names)
            os.close(former)
        raise OSError(errno.ELOOP, "too many symbolic links")
    except OSError:
        os.close(folder)
        raise


def _check(folder: int, *, is_last: bool) -> None:
    status = os.fstat(folder)
    is_closed = not status.st_mode & 0o022 or status.st_mode & stat.S_ISVTX
    is_own = status.st_uid == os.geteuid()
    if is_last and not (is_own and not status.st_mode & 0o077):
        raise PermissionError(errno.EPERM, f"{_name(folder)} is not yours alone (mode 0700)")
    if not (is_closed and (is_own or status.st_uid == 0)):
        raise PermissionError(errno.EPERM, f"others can change what is in {_name(folder)}")


def _step(folder: int, names: list[str]) -> int:
    """Open what the last of names leads to; a link puts its target's names in its place."""
    name = names.pop()
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(name, 0o700, dir_fd=folder)
        return os.open(name, _PLACE, dir_fd=folder)
    if not stat.S_ISLNK(status.st_mode):
        return os.open(name, _PLACE, dir_fd=folder)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"the link {name} in {_name(folder)} is not yours")
    names.extend(reversed(Path(os.readlink(name, dir_fd=folder)).parts))
    return os.dup(folder)


def _name(folder: int) -> str:
    return os.readlink(f"/proc/self/fd/{folder}")


@functools.cache
def _generation(sources: tuple[ModuleType, ...]) -> Path:
    """Name everything the machine code depends on apart from what it is asked to be."""
    digest = hashlib.sha256()
    for module in sources:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    digest.update(repr(cpu_target.target_context.codegen().magic_tuple()).encode())
    return Path(f"numba-{numba.__version__}") / digest.hexdigest()[:16]


@contextlib.contextmanager
def _numba_cache_at(place: Path) -> Iterator[None]:
    """Point Numba's cache at a directory, and nowhere else, while one kernel is compiled."""
    place.mkdir(parents=True, exist_ok=True)
    before = _settings.CACHE_DIR, getattr(_settings, "CACHE_LOCATOR_CLASSES", "")
    _settings.CACHE_DIR, _settings.CACHE_LOCATOR_CLASSES = str(place), "UserProvidedCacheLocator"
    try:
        yield
    finally:
        _settings.CACHE_DIR, _settings.CACHE_LOCATOR_CLASSES = before
