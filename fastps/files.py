# SPDX-License-Identifier: Apache-2.0
"""Open the files and folders that a job makes or reads, so that no other user can swap them.

Timelines, traces, commits, checkpoints, meeting files, logs of processes, the token and compiled
kernels all come through here. A folder is opened once, checked by its descriptor, and held; its
files are named relative to that descriptor. A new file is made with O_EXCL and mode 0600. A file
that is read is opened without waiting and without following a link, and must be a regular file
that only this user or root can write. Every error is an OSError whose text says what to do.

Knows no setting and no format. Threads: any; an object serves one at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

MAX_STEPS = 256  # names on a path; links may lead in a circle
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHERS_WRITE, _OTHERS = 0o022, 0o077


class Folder:
    """A folder that is held by a descriptor, until close()."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """Take over a descriptor; path: the name for people."""
        self._descriptor = descriptor
        self.path = path

    @property
    def descriptor(self) -> int:
        """Return the open descriptor; OSError after close(): -1 names the working folder."""
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the folder was closed: open it again", str(self.path))
        return self._descriptor

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def names(self) -> list[str]:
        """List the names in the folder, sorted."""
        return sorted(os.listdir(self.descriptor))

    def has(self, name: str) -> bool:
        """Return whether the folder has a file, folder or link of that name."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def make(self, name: str, *, flags: int = os.O_WRONLY) -> int:
        """Make a file of mode 0600 and return its descriptor; what had the name is removed."""
        self.remove(name)
        return os.open(name, flags | _NEW, 0o600, dir_fd=self.descriptor)

    def read(self, name: str, *, is_private: bool = False) -> BufferedReader:
        """Open a file to read. is_private: others must not be able to read it either."""
        return _open_checked(self.path / name, name, self.descriptor, is_private=is_private)

    @contextlib.contextmanager
    def replace(self, name: str) -> Iterator[BinaryIO]:
        """Yield a new file, which replaces what has the name when the context ends well.

        A file of another user, and what is not a regular file, is not replaced.
        """
        draft = f".{name}.{secrets.token_hex(8)}"
        self._check_replaced(name)
        descriptor = os.open(draft, os.O_WRONLY | _NEW, 0o600, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                yield file
            self._check_replaced(name)
            self.rename(draft, name)
        except BaseException:
            self.remove(draft)  # free its bytes: the disk may be full
            raise

    def subfolder(self, name: str, *, is_made: bool = False) -> Folder:
        """Open a folder in it, checked as by open_folder(); is_made: make it first."""
        if is_made:
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        path = self.path / name
        return _checked_folder(Folder(os.open(name, _FOLDER, dir_fd=self.descriptor), path))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and the files in it; does nothing if it is not there."""
        with contextlib.suppress(FileNotFoundError), self.subfolder(name) as folder:
            for inside in folder.names():
                folder.remove(inside)
            os.rmdir(name, dir_fd=self.descriptor)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, over another file if there is one, or a folder."""
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Write the names to disk, not only the contents of the files."""
        os.fsync(self.descriptor)

    def _check_replaced(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(
                    errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / name)
                )
            _check_regular(found, self.path / name)
            _check_owner(found, self.path / name)


def open_folder(path: Path, *, is_made: bool = True) -> Folder:
    """Open a folder of this user or root that no other user can write.

    is_made: make it if missing, and those above it, with mode 0700. The last name must not be a
    link.
    """
    if is_made:
        make_folders(path)
    return _checked_folder(_open_folder(path))


def open_shared(path: Path) -> Folder:
    """Open a folder in which other users may have files too, such as /tmp."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Folder(descriptor, path)


def make_folders(path: Path) -> None:
    """Make a folder, and those above it, where they are missing, with mode 0700."""
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, 0o700)


def read_file(path: Path) -> BufferedReader:
    """Open a file to read that a user names by any path, links included.

    Never waits for the writer of a pipe. The caller checks owner and mode.
    """
    descriptor = os.open(path, _READ)
    try:
        _check_regular(os.fstat(descriptor), path)
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def text_of(error: OSError) -> str:
    """Return an error's file and what is wrong with it, without its number."""
    if error.filename is None or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _open_folder(path: Path) -> Folder:
    try:
        return Folder(os.open(path, _FOLDER), path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise OSError(
                errno.ELOOP, f"it is a link: name the folder itself, {path.resolve()}", str(path)
            ) from error
        raise


def _checked_folder(folder: Folder) -> Folder:
    path = folder.path
    try:
        status = os.fstat(folder.descriptor)
        _check_owner(status, path)
        if _is_writable_by_others(status):
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(
                errno.EPERM,
                f"other users can write to it (mode {mode:04o}): name a folder in it that does "
                f"not exist yet, or run `chmod go-w {path}`",
                str(path),
            )
    except OSError:
        folder.close()
        raise
    return folder


def _open_checked(path: Path, name: str, folder: int, *, is_private: bool) -> BufferedReader:
    try:
        descriptor = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise OSError(error.errno, "it is not a regular file: remove it", str(path)) from error
        raise
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        _check_owner(status, path)
        mode = stat.S_IMODE(status.st_mode)
        if is_private and mode & _OTHERS:
            raise PermissionError(
                errno.EPERM, f"other users can use it (mode {mode:04o}): remove it", str(path)
            )
        if _is_writable_by_others(status):
            raise PermissionError(
                errno.EPERM,
                f"other users can write to it (mode {mode:04o}): run `chmod go-w {path}` if "
                "you trust what it holds, or remove it",
                str(path),
            )
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file: name another", str(path))


def _check_owner(status: os.stat_result, path: Path) -> None:
    own = os.geteuid()
    if status.st_uid not in (own, 0):
        raise PermissionError(
            errno.EPERM,
            f"it belongs to user {status.st_uid}; it must belong to user {own} or root: name "
            "another that does not exist yet",
            str(path),
        )


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether other users may write; a group of the owner's number is the owner's own."""
    is_own_group = status.st_gid == status.st_uid
    return bool(status.st_mode & (stat.S_IWOTH if is_own_group else _OTHERS_WRITE))


# ---- folders of code that is run


def open_private(path: Path) -> int:
    """Open an absolute directory, made if missing, into which no other user can have written.

    On the path all directories and links must belong to this user or root, and others must not be
    able to write to a directory unless it is sticky. The last one must be private. Raises OSError.
    """
    names = list(reversed(path.parts))
    folder = os.open(names.pop(), _PLACE)
    try:
        for _ in range(MAX_STEPS):
            _check_step(folder, is_last=not names)
            if not names:
                return folder
            former, folder = folder, _step(folder, names)
            os.close(former)
        raise OSError(errno.ELOOP, "too many symbolic links")
    except OSError:
        os.close(folder)
        raise


def _check_step(folder: int, *, is_last: bool) -> None:
    status = os.fstat(folder)
    is_closed = not status.st_mode & _OTHERS_WRITE or status.st_mode & stat.S_ISVTX
    is_own = status.st_uid == os.geteuid()
    if is_last and not (is_own and not status.st_mode & _OTHERS):
        raise PermissionError(errno.EPERM, f"{_name(folder)} is not yours alone (mode 0700)")
    if not (is_closed and (is_own or status.st_uid == 0)):
        raise PermissionError(errno.EPERM, f"others can change what is in {_name(folder)}")


def _step(folder: int, names: list[str]) -> int:
    """Open the directory of the last name; a link is replaced by the names of its target."""
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
