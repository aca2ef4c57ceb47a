# SPDX-License-Identifier: Apache-2.0
"""A save: each worker writes its share, and rank 0 completes the checkpoint when all have.

The copy is made in the call. The rest happens on two threads: one writes, the other talks to the
other workers. All go through the same rounds of words:

1. agree: who saves what, under which name; rank 0 has made the folder
2. pulse: written, still writing, or failed; repeated until all have written, or one has failed
3. collect: the digests of all pieces
4. outcome: rank 0 has written the manifest and renamed the folder, or could not

An error in one is an error in all of them: `wait()` names the worker. In an elastic job a round is
made again after a loss. Up to the third a lost worker takes its share along, so all others give
the checkpoint up; after it the next rank 0 completes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastps.checkpoint import folders
from fastps.checkpoint.folders import Saved
from fastps.checkpoint.formats import (
    File,
    Manifest,
    Stored,
    file_name,
    read_manifest,
    write_manifest,
)
from fastps.checkpoint.shares import Piece, share_of
from fastps.checkpoint.snapshot import Snapshot
from fastps.checkpoint.team import Team, first_error
from fastps.checkpoint.trees import Kind, Parts, Shard, Tensor, take_apart
from fastps.errors import CheckpointError, StallError, ViewChangedError
from fastps.files import Folder, open_folder, text_of
from fastps.native.condition import Flag
from fastps.session import current
from fastps.session.view import Hold
from fastps.types import checked_seconds

_log = logging.getLogger(__name__)
PULSE_S = 1.0  # between words to the others while a file is being written
STOP_S = 60.0  # for a chunk that is on its way to a slow disk when another worker has failed
_NICE = 10  # of the thread that writes: what trains comes first
_TEAM = "fastps checkpoint save"
_THREADS = (
    "fastps-checkpoint"  # not "fastps:": a new view does not wait for them, they wait for it
)


class SaveHandle:
    """A save under way; wait() for it, or let the next one do so."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._ended = Flag()
        self._error: BaseException | None = None
        self._path: Path | None = None

    def poll(self) -> bool:
        """Return whether it has ended."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete on the disk, and return its folder.

        Raises CheckpointError on all workers if one could not save, ViewChangedError if a worker
        was lost and the job goes on, PeerLostError if it does not, and StallError after timeout_s.
        """
        if not self._ended.wait(None if timeout_s is None else checked_seconds(timeout_s)):
            raise StallError(f"the checkpoint of step {self.step} is not complete yet")
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def wait_ended(self) -> None:
        """Wait until it has ended, well or not."""
        self._ended.wait()

    def end(self, path: Path | None, error: BaseException | None) -> None:
        """Note how it ended."""
        self._path, self._error = path, error
        self._ended.set()


class SaveRequest(NamedTuple):
    """What save_async() was asked for."""

    folder: Path
    step: int
    keep: int | None


class _Turns:
    """The saves of this process, of which one is under way at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: SaveHandle | None = None

    def finish(self) -> None:
        """Wait until the last save has ended, well or not."""
        if self.last is not None:
            self.last.wait_ended()


_turns = _Turns()


def start(
    state: Any, folder: str | os.PathLike[str], step: int, own: Any, keep: int | None,
    kinds: Sequence[Kind],
) -> SaveHandle:  # fmt: skip
    """Copy a state and start to save it; see fastps.checkpoint.save_async()."""
    request = SaveRequest(Path(os.path.abspath(folder)), operator.index(step), keep)
    if request.step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")
    if keep is not None and operator.index(keep) < 1:
        raise ValueError(f"keep must be 1 or more, or None to keep all, got {keep}")
    if current.is_initialized() and current.known().expected is not None:
        raise CheckpointError(
            "this worker waits to join a running job, and has no values of that job to save yet; "
            "save within the function of elastic.run, which is where it joins"
        )
    with _turns.lock:
        if _turns.last is None:
            current.wait_before_leaving(_turns.finish)
        _turns.finish()
        saver = _Saver(request, state, own, kinds)
        _turns.last = saver.handle
        saver.start()
        return saver.handle


class _Writing:
    """The thread that writes this worker's file."""

    def __init__(self, folder: Folder, name: str, snapshot: Snapshot) -> None:
        self._folder, self._name, self._snapshot = folder, name, snapshot
        self.cancelled = Flag()
        self.error = ""
        self.found: tuple[File, list[str]] | None = None
        self.thread = threading.Thread(target=self._run, name=f"{_THREADS}-write")
        self.thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self.found = folders.write_share(
                self._folder, self._name, self._snapshot, self.cancelled
            )
        except Exception as error:
            self.error = _text_of(error)

    def pulse(self) -> dict[str, Any]:
        """Return after a while, or when it has ended, what to tell others."""
        self.thread.join(PULSE_S)
        return {"is_written": self.found is not None, "error": self.error}


class _Saver:
    """One save of this worker."""

    def __init__(self, request: SaveRequest, state: Any, own: Any, kinds: Sequence[Kind]) -> None:
        """Copy what this worker writes. What is wrong with it, all hear of."""
        self._request = request
        self.handle = SaveHandle(request.step)
        self._team = Team(_TEAM)
        self._share, self._size = self._team.rank, self._team.size
        self._failure: Exception | None = None
        self._state = self._own = Parts(b"", [], [])
        self._snapshot: Snapshot | None = None
        self._saved: Saved | None = None
        self._is_complete = False
        try:
            self._copy(state, own, kinds)
        except Exception as error:
            if self._size == 1:
                raise
            self._failure = error

    def _copy(self, state: Any, own: Any, kinds: Sequence[Kind]) -> None:
        self._state = take_apart(state, kinds)
        taken = [tensor.name for tensor in self._state.tensors]
        self._own = take_apart(own, kinds, f"own.{self._share}", taken)
        tensors, values = self._tensors, [*self._state.values, *self._own.values]
        first = len(self._state.tensors)
        pieces = [
            *share_of(self._state.tensors, self._share, self._size),
            *_parts_of(self._state.values, 0),
            *(_whole(first + place, one) for place, one in enumerate(self._own.tensors)),
        ]
        if any(tensor.is_sharded for tensor in self._own.tensors):
            raise TypeError("own= must not hold a Shard; put it into the state")
        self._snapshot = Snapshot(tensors, values, pieces, kinds)
        self._state = self._state._replace(values=[])  # which training goes on to change
        self._own = self._own._replace(values=[])

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._state.tensors, *self._own.tensors]

    def start(self) -> None:
        """Start the thread that saves, with the workers of now."""
        self._hold = Hold()
        threading.Thread(target=self._run, name=_THREADS).start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._save()
        except BaseException as found:
            error = found
            _log.warning("%s", found)
        finally:
            if self._snapshot is not None:
                self._snapshot.free()
            self._hold.end()
            path = self._request.folder / self._saved.name if self._saved else None
            self.handle.end(path if self._is_complete else None, error)

    def _save(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                folder, failure = None, ""
                if self._share == 0:
                    folder, failure = self._begin(stack)
                replies = self._exchange(self._hello(failure))
                self._check(replies)
                if self._saved is None:
                    self._saved = Saved(*replies[0]["saved"])
                self._finish(self._exchange(self._write(stack, folder)))
            except BaseException:
                self._give_up()
                raise

    # ---- agree

    def _begin(self, stack: contextlib.ExitStack) -> tuple[Folder | None, str]:
        """Make the folder of the checkpoint; return the one that it is in, or why not."""
        if self._failure is not None:
            return None, ""
        try:
            folder = stack.enter_context(folders.locked(self._request.folder))
            self._saved = folders.start_draft(folder, self._request.step)
        except OSError as error:
            return None, text_of(error)
        return folder, ""

    def _hello(self, failure: str) -> dict[str, Any]:
        told = failure or (_text_of(self._failure) if self._failure else "")
        form = hashlib.sha256(repr(self._state.tensors).encode()).hexdigest()
        return {
            "share": self._share, "size": self._size, "step": self._request.step, "form": form,
            "saved": None if self._saved is None else tuple(self._saved), "error": told,
        }  # fmt: skip

    def _check(self, replies: Sequence[dict[str, Any]]) -> None:
        """Raise the same on all workers where they do not save the same together."""
        self._raise_failure(replies)
        steps = {reply["step"]: reply["share"] for reply in replies}
        if len(steps) > 1:
            words = ", ".join(f"worker {share} step {step}" for step, share in steps.items())
            raise CheckpointError(self._words(f"workers save different steps: {words}"))
        forms = [reply["form"] for reply in replies]
        odd = next((at for at, form in enumerate(forms) if form != forms[0]), None)
        if odd is not None:
            raise CheckpointError(
                self._words(
                    f"the states of workers 0 and {odd} have different tensors; what only one "
                    "worker has belongs into own=, and parts of a tensor into Shard()"
                )
            )

    def _raise_failure(self, replies: Sequence[dict[str, Any]]) -> None:
        self._check_shares(replies)
        if self._failure is not None:
            raise self._failure
        if error := first_error(replies):
            share = next(reply["share"] for reply in replies if reply.get("error"))
            raise CheckpointError(self._words(f"worker {share}: {error}"))

    def _check_shares(self, replies: Sequence[dict[str, Any]]) -> None:
        """Raise ViewChangedError on all workers if one was lost, and its share with it."""
        shares = [reply["share"] for reply in replies]
        if shares != list(range(self._size)) or any(
            one.get("size") != self._size for one in replies
        ):
            raise ViewChangedError(
                self._words("a worker was lost with its share") + " Save again."
            )

    def _exchange(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        return self._team.exchange({"share": self._share, "size": self._size, **words})

    # ---- write

    def _write(self, stack: contextlib.ExitStack, folder: Folder | None) -> dict[str, Any]:
        """Write this worker's file, and wait until all have; return the digests."""
        snapshot, saved = self._snapshot, self._saved
        assert snapshot is not None
        assert saved is not None
        writing = None
        error = ""
        try:
            parent = folder or stack.enter_context(
                open_folder(self._request.folder, is_made=False)
            )
            draft = stack.enter_context(parent.subfolder(folders.draft_of(saved)))
            writing = _Writing(draft, file_name(self._share, self._size), snapshot)
        except FileNotFoundError as found:
            error = f"{text_of(found)}; all workers need to see the same folder"
        except OSError as found:
            error = text_of(found)
        try:
            self._await_all(writing, error)
        finally:
            if writing is not None:
                writing.cancelled.set()
                writing.thread.join(STOP_S)
        assert writing is not None
        assert writing.found is not None
        file, digests = writing.found
        pieces = [
            (*piece, at, digest)
            for piece, at, digest in zip(snapshot.stored, snapshot.places, digests, strict=True)
        ]
        return {
            "file": tuple(file), "pieces": pieces, "own": self._own.plain,
            "own_tensors": [tuple(one) for one in self._own.tensors],
        }  # fmt: skip

    def _await_all(self, writing: _Writing | None, error: str) -> None:
        while True:
            told = {"is_written": False, "error": error} if writing is None else writing.pulse()
            replies = self._exchange(told)
            self._raise_failure(replies)
            if all(reply.get("is_written") for reply in replies):
                return

    # ---- complete

    def _finish(self, results: Sequence[dict[str, Any]]) -> None:
        """Let rank 0 complete the checkpoint, and take its word for it."""
        self._check_shares(results)
        while True:
            self._team.look()
            error = self._complete(results) if self._team.is_lead else ""
            with contextlib.suppress(ViewChangedError):
                replies = self._team.exchange_once({"share": self._share, "error": error})
                break
        if (error := replies[0].get("error", "its rank 0 gave up")) != "":
            raise CheckpointError(self._words(error))
        self._is_complete = True
        if self._team.is_lead and self._request.keep is not None:
            folders.keep_newest(self._request.folder, self._request.keep)

    def _complete(self, results: Sequence[dict[str, Any]]) -> str:
        """Write the manifest and rename the folder; return why not."""
        saved = self._saved
        assert saved is not None
        try:
            with open_folder(self._request.folder, is_made=False) as folder:
                if not folder.has(saved.name):
                    data = write_manifest(self._manifest(results))
                    read_manifest(data)
                    folders.complete(folder, saved, data)
        except ValueError as error:
            return f"{error}; Shards must cover their tensor once"
        except Exception as error:
            return _text_of(error)
        return ""

    def _manifest(self, results: Sequence[dict[str, Any]]) -> Manifest:
        tensors, own, first_own, stored = [*self._state.tensors], [], [], []
        n_shared = len(tensors)
        for share, result in enumerate(results):
            first = len(tensors)
            first_own.append(first)
            own.append(result["own"])
            tensors += [_tensor(one) for one in result["own_tensors"]]
            for number, offsets, shape, at, digest in result["pieces"]:
                place = number if number < n_shared else first + number - n_shared
                stored.append(Stored(Piece(place, offsets, shape), share, at, digest))
        files = [File(*result["file"]) for result in results]
        return Manifest(
            self._request.step, self._state.plain, own, first_own, tensors, files, stored
        )

    # ---- give up

    def _give_up(self) -> None:
        """Remove what was written, once nobody writes any more."""
        with contextlib.suppress(Exception):
            self._team.exchange_once({"share": self._share})
        if self._saved is not None and self._team.is_lead:
            with (
                contextlib.suppress(OSError),
                open_folder(self._request.folder, is_made=False) as folder,
            ):
                folders.discard(folder, self._saved)

    def _words(self, why: str) -> str:
        return (
            f"step {self._request.step} was not saved in {self._request.folder}: {why}. "
            "Checkpoints from before are still there."
        )


def _parts_of(values: Sequence[Any], first: int) -> Iterator[Piece]:
    for place, value in enumerate(values):
        if isinstance(value, Shard):
            shape = tuple(map(int, value.array.shape))
            yield Piece(first + place, value.offsets, shape)


def _whole(number: int, tensor: Tensor) -> Piece:
    return Piece(number, (0,) * len(tensor.shape), tensor.shape)


def _tensor(words: Sequence[Any]) -> Tensor:
    name, dtype, shape, kind, is_sharded = words
    return Tensor(name, dtype, tuple(shape), kind, is_sharded)


def _text_of(error: Exception) -> str:
    if isinstance(error, OSError):
        return text_of(error)
    return str(error) if isinstance(error, TypeError | CheckpointError) else repr(error)
