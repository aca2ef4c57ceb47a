# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: which there are, and how one becomes complete, or goes.

Each checkpoint is a folder in it, `step-STEP.NUMBER`: the numbers count the saves, so the last
one is the newest, also after training went back to an earlier step. It is written under another
name, `.step-STEP.NUMBER`, with the manifest last. All files and the folder are on the disk (fsync)
before it gets its name. So a folder of that name is complete, whenever the machine stops, and
nothing in it is written again. Threads: one at a time; one job at a time writes (flock).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastps.checkpoint.formats import MANIFEST, File, digest_of
from fastps.checkpoint.snapshot import Snapshot
from fastps.errors import CheckpointError
from fastps.files import Folder, open_folder, text_of
from fastps.native.condition import Flag

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d+)\.(\d+)")
_DRAFT = re.compile(r"\.step-\d+\.\d+")
CHUNK_BYTES = 32 << 20  # digested and written at once, without the GIL
SYNC_BYTES = 64 << 20  # written before they are sent to the disk: others find room for theirs


class Saved(NamedTuple):
    """A complete checkpoint."""

    number: int
    step: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"step-{self.step}.{self.number}"


def list_saved(folder: Folder) -> list[Saved]:
    """List the complete checkpoints, the oldest first."""
    found = [match for name in folder.names() if (match := _NAME.fullmatch(name))]
    return sorted(Saved(int(match[2]), int(match[1])) for match in found)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Folder]:
    """Open a folder to write in, made if missing; OSError if another job writes in it."""
    with open_folder(path) as folder:
        try:
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(
                error.errno, "another job writes checkpoints in it: name another folder", str(path)
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # but some file systems have no locks
        yield folder


def start_draft(folder: Folder, step: int) -> Saved:
    """Make the folder of the next checkpoint, under its name of before; old drafts go."""
    for name in folder.names():
        if _DRAFT.fullmatch(name):
            folder.remove_folder(name)
    saved = list_saved(folder)
    found = Saved(saved[-1].number + 1 if saved else 1, step)
    folder.subfolder(draft_of(found), is_made=True).close()
    return found


def draft_of(saved: Saved) -> str:
    """Return the name of a checkpoint's folder before it is complete."""
    return f".{saved.name}"


def write_share(
    folder: Folder, name: str, snapshot: Snapshot, cancelled: Flag
) -> tuple[File, list[str]]:
    """Write a worker's file; return what it is, and the digest of each piece.

    Raises OSError, and CheckpointError if cancelled is set meanwhile.
    """
    descriptor = folder.make(name)
    try:
        write_all(descriptor, memoryview(snapshot.header))
        digests, unsynced = [], 0
        for data in snapshot.pieces():
            digest = hashlib.sha256()
            for start in range(0, len(data), CHUNK_BYTES):
                if cancelled.is_set():
                    raise CheckpointError("another worker could not save its share")
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk.data)
                write_all(descriptor, chunk.data)
                unsynced += len(chunk)
                if unsynced >= SYNC_BYTES:
                    os.fdatasync(descriptor)
                    unsynced = 0
            digests.append(digest.hexdigest())
        os.fsync(descriptor)
    except OSError as error:
        if error.filename is None:
            error.filename = str(folder.path / name)
        raise
    finally:
        os.close(descriptor)
    header = snapshot.header
    nbytes = len(header) + snapshot.nbytes
    return File(name, nbytes, len(header), digest_of(header)), digests


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes, however many the kernel takes at once."""
    while len(data):
        data = data[os.write(descriptor, data) :]


def complete(folder: Folder, saved: Saved, manifest: bytes) -> None:
    """Write the manifest, and give the checkpoint its name."""
    with folder.subfolder(draft_of(saved)) as inside:
        descriptor = inside.make(MANIFEST)
        try:
            write_all(descriptor, memoryview(manifest))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        inside.sync()
    folder.rename(draft_of(saved), saved.name)
    folder.sync()


def discard(folder: Folder, saved: Saved) -> None:
    """Remove what was written of a checkpoint that will not be complete."""
    with contextlib.suppress(OSError):
        folder.remove_folder(draft_of(saved))


def keep_newest(path: Path, keep: int) -> None:
    """Remove older complete checkpoints; keep: how many stay. Those that cannot go stay too."""
    try:
        with open_folder(path, is_made=False) as folder:
            for old in list_saved(folder)[:-keep]:
                folder.rename(old.name, draft_of(old))  # so it is never there in part
                folder.remove_folder(draft_of(old))
    except OSError as error:
        _log.warning("an old checkpoint could not be removed: %s", text_of(error))
