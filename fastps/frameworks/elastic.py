# SPDX-License-Identifier: Apache-2.0
"""Training that continues when workers are lost: Horovod's elastic.

    state = fps.elastic.TorchState(model, optimizer, epoch=0)

    @fps.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(state)

Programs look as they do for Horovod ("Elastic Horovod"), and continue in one of two ways:

- By default a lost worker ends the job, and `fastps-run --restarts N` starts all workers again.
  Rank 0 then reads its last commit, all ranks take it over, and train() continues.
- In an elastic job (`fastps-run --min N`) the survivors continue in the same processes. Where they
  cannot finish an operation without the lost worker, run() restores the last commit, and calls
  train() again. A loss that cost nothing has reset callbacks called by the next commit().
  Newcomers join at a commit(), and all call train() again with the present values.

Decides what a commit contains and when it is read. A setting (FASTPS_COMMIT_DIR) decides where it
is, and each framework how tensors are copied and sent. Threads: the one that trains. All ranks
call run(), commit(), check_host_updates(), sync() and reset callbacks alike.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from fastps.control.declared import pack_spec, unpack_spec
from fastps.errors import ConfigError, FastPSError
from fastps.files import open_folder
from fastps.frameworks import saved_states
from fastps.frameworks.array_exchange import broadcast_in_place
from fastps.frameworks.elastic_views import (
    Members,
    News,
    Parcel,
    exchange_news,
    lost_errors,
    members_of,
    take_over,
)
from fastps.session import current
from fastps.session.regroup import leaving_on_sigterm
from fastps.worker.handle import Array

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="State")
_runs = itertools.count(1)  # numbers of run(); a restarted program has the same ones


class HostsUpdatedInterrupt(RuntimeError):
    """Ends a function of elastic.run, which calls it again with the present values.

    commit() and check_host_updates() raise it in an elastic job where a loss needs that, and
    where newcomers join.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        """Note whether all workers have the same values already."""
        super().__init__("the workers have changed, and elastic.run calls its function again")
        self.skip_sync = skip_sync


class State(ABC):
    """Values that are the same on all workers, and are committed together.

    They are attributes of the state, and may be set.
    """

    def __init__(self, **values: Any) -> None:
        """Take the values; they are the first commit."""
        self._values = values
        for name in values:
            if hasattr(type(self), name) or name.startswith("_"):
                kind = type(self).__name__
                raise ValueError(f"{kind} has a {name!r} of its own: use another name")
        self._callbacks: list[Callable[[], object]] = []
        self._path: Path | None = None
        self._has_warned = self._is_running = self._has_said_busy = False
        self._number = 0  # of the run
        self._members: Members = ()  # as of the last agreement, in an elastic job
        self._saved = self._copies()

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name."""
        values = self.__dict__.get("_values", {})
        if name not in values:
            held = ", ".join(values)
            raise AttributeError(f"this state has no {name!r}; it holds {held}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the value of a name that the state has; set an ordinary attribute for others."""
        values = self.__dict__.get("_values", {})
        if name in values:
            values[name] = value
        else:
            object.__setattr__(self, name, value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions that all ranks call when training continues after a loss or a join.

        Rank 0's values are taken over after that, so all have the learning rate that it sets.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Save the current values: in memory, and on rank 0 in the job's directory.

        Copies all values, so rare commits cost less. TypeError for a value that cannot be saved.
        In an elastic job it does check_host_updates() before.
        """
        self.check_host_updates()
        self.save()

    def check_host_updates(self) -> None:
        """Let training follow a loss or a join in an elastic job; does nothing in others.

        After a loss that cost no step, all workers call the reset callbacks, take over rank 0's
        present values, and go on. HostsUpdatedInterrupt instead, within elastic.run, where the
        state holds an ElasticSampler, or another worker continues from its last commit: the
        function begins again. Newcomers join here within elastic.run, while no operation is in
        flight; then it begins again too. Workers leave here as well (fastps.leave()), and raise
        SystemExit. All workers call this together; blocks.
        """
        session = current.current()
        if not session.is_elastic:
            return
        self._members = self._members or members_of(session)
        news = self._exchange_news(is_here=True)
        while news.is_awaited and not news.is_busy:
            if session.regroup(news.view):  # type: ignore[attr-defined]
                raise HostsUpdatedInterrupt
            news = self._exchange_news(is_here=True)  # after a loss, or they have gone
        if news.is_awaited:
            self._say_busy()
        if not (news.has_failed or news.is_changed):
            return
        if self._is_running and (news.has_failed or self._samplers()):
            raise HostsUpdatedInterrupt
        self._reset_in_views()
        self.sync()

    def _say_busy(self) -> None:
        """Log, once and on rank 0, why newcomers cannot join."""
        if not self._has_said_busy and current.current().rank == 0:
            self._has_said_busy = True
            _log.warning(
                "workers wait to join or leave this job, and cannot at this commit(): call it "
                "within the first function of elastic.run, when all operations before it were "
                "waited for and no checkpoint is being saved"
            )

    def save(self) -> None:
        """Do what commit() does, without check_host_updates()."""
        self._saved = self._copies()
        self._store()

    def _store(self) -> None:
        """Write the last commit to the disk, where there is a place for it."""
        if self._path is not None:
            self._write(self._path, self._saved)
        elif not self._has_warned and current.current().rank == 0:
            self._has_warned = True
            if current.current().is_elastic:
                return
            _log.warning(
                "commits are only in memory, so a restarted job begins anew: set "
                "FASTPS_COMMIT_DIR to a directory (on one machine fastps-run --restarts N does), "
                "and commit within a function of elastic.run"
            )

    def restore(self) -> None:
        """Undo the changes since the last commit, on this rank."""
        self._put_all(self._saved)

    def sync(self) -> None:
        """Take over rank 0's values; all ranks call this together; blocks."""
        if current.current().is_elastic:
            self._sync_in_views()
            return
        self._saved = self._of_root(self._copies() if current.current().rank == 0 else None)
        self.restore()

    # ---- of a framework ----

    @abstractmethod
    def _copy(self, value: Any) -> Any:
        """Return a copy of a value, in the form that commits have."""

    @abstractmethod
    def _put(self, name: str, value: Any, kept: Any) -> Any:
        """Return the value to hold: the value, overwritten with the copy, or the copy itself."""

    @abstractmethod
    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's copies on all ranks; saved: None on other ranks; blocks."""

    @abstractmethod
    def _take_apart(self, saved: dict[str, Any]) -> Parcel:
        """Return copies as a plain value, and the bytes of tensors."""

    @abstractmethod
    def _put_together(self, plain: Any, tensors: list[Any]) -> dict[str, Any]:
        """Undo _take_apart()."""

    @abstractmethod
    def _room(self, about: Any) -> tuple[Any, memoryview]:
        """Return an uninitialised tensor by its description, and its bytes."""

    def _write(self, path: Path, saved: dict[str, Any]) -> None:
        plain, described, tensors = self._take_apart(saved)
        saved_states.write(path, plain, described or (), tensors)

    def _read(self, path: Path) -> dict[str, Any]:
        return self._put_together(*saved_states.read(path, self._room))

    # ---- starts and restarts ----

    def _copies(self) -> dict[str, Any]:
        return {name: self._copy(value) for name, value in self._values.items()}

    def _put_all(self, saved: dict[str, Any]) -> None:
        for name, kept in saved.items():
            self._values[name] = self._put(name, self._values[name], kept)

    def _begin(self, number: int) -> None:
        """Continue from the commit of the run of that number, or begin."""
        self._number, now = number, current.current()
        if now.expected is not None:
            self._join_others(now)
            return
        if now.is_elastic:
            if self._sync_in_views(is_first=True):
                self._reset_in_views()
                self.sync()
            return
        is_there = self._is_there()
        was_there = now.broadcast_object(is_there, 0, "elastic")
        if was_there and self._path is not None:
            self._load(self._path)
        if was_there:
            self.on_reset()
        self.sync()

    def _join_others(self, session: Any) -> None:
        """Join a job that runs, as a newcomer; ends the process in order if the job is over."""
        session.enter()
        self._reset_in_views()
        self.sync()

    def _is_there(self) -> bool:
        """Find the place of commits, on rank 0; return whether there is one."""
        now = current.current()
        if now.rank == 0 and now.config.commit_dir:
            self._path = _place(now.config.commit_dir, self._number)
        return self._path is not None and saved_states.exists(self._path)

    def _load(self, path: Path) -> None:
        """Take the values of the last commit on the disk."""
        saved = self._read(path)
        if saved.keys() != self._values.keys():
            raise ConfigError(
                f"{path} holds {sorted(saved)}, this program {sorted(self._values)}, so "
                "another program wrote it: set FASTPS_COMMIT_DIR to an empty directory"
            )
        self._put_all(saved)

    # ---- losses in an elastic job ----

    def _samplers(self) -> list[Any]:
        """Return the values that distribute indices over the workers."""
        return [one for one in self._values.values() if hasattr(one, "distribute_over")]

    def _exchange_news(self, *, has_failed: bool = False, is_here: bool = False) -> News:
        """Return what any worker knows. is_here: newcomers may join if nothing is in flight."""
        session: Any = current.current()
        is_free = is_here and self._is_running and self._number == 1 and session.is_at_boundary
        is_changed = members_of(session) != self._members
        is_awaited = session.n_newcomers > 0 or session.is_leaving
        news = News(has_failed, is_changed, is_awaited, not is_free)
        return exchange_news(session, news)

    def _sync_in_views(self, *, is_first: bool = False) -> bool:
        """Take over the values of the first worker that is left.

        is_first: those of a commit on the disk, if there is one; returns whether there was.
        """
        session: Any = current.current()
        is_new = session.is_new
        for sampler in self._samplers():
            sampler.merge_recorded()

        def offer() -> Parcel:
            if is_new:
                raise FastPSError(
                    "it had just joined, and all workers that it joined are lost since; start the "
                    "job again from the last commit"
                )
            is_there = self._number > 0 and self._is_there() and is_first
            if is_there and self._path is not None:
                self._load(self._path)
            members = members_of(session)
            for sampler in self._samplers():
                sampler.settle(members)
            plain, described, tensors = self._take_apart(self._copies())
            layouts = [pack_spec(one) for one in session.layouts()]
            return Parcel((list(members), is_there, plain, layouts), described, tensors)

        told, tensors = take_over(session, offer, self._room)
        members: list[str] = told[0]
        is_there: bool = told[1]
        session.take_layouts([unpack_spec(one) for one in told[3]])
        is_changed = bool(self._members) and self._members != tuple(members)
        self._members = tuple(members)
        for sampler in self._samplers():
            sampler.distribute_over(self._members)
        self._saved = self._put_together(told[2], tensors)
        self.restore()
        if is_changed and self._path is not None:
            self._store()
        return is_there

    def _reset_in_views(self) -> None:
        """Call the reset callbacks, all of them again if a loss ends an operation of one."""
        while True:
            self._members = members_of(current.current())
            current.current().acknowledge_view()  # callbacks may use all operations
            try:
                self.on_reset()
            except lost_errors() as error:
                _log.info("calling the reset callbacks again: %s", error)
            else:
                return

    def _recover(self) -> None:
        """Continue from the last commit of rank 0, after an operation that a loss has ended."""
        self.restore()
        self._exchange_news(has_failed=True)

    def _call_in_views(self, train: Callable[[], _R]) -> _R:
        """Return what a function returns, which is called again after each loss that ends it."""
        while True:
            skip_sync = False
            try:
                result = train()
                if not self._exchange_news().has_failed:
                    return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except lost_errors() as error:
                _log.info("continuing from the last commit: %s", error)
                self._recover()
            self._reset_in_views()
            if not skip_sync:
                self.sync()


def run(train: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a function of a State begin with rank 0's values, or with its last commit.

    All ranks call the function. After a restart of the job rank 0 loads its last commit. All ranks
    then call the reset callbacks, and take over rank 0's values.

    In an elastic job the function is called again in the same processes: after a
    ViewChangedError, which an operation raises that cannot go on without a lost worker, with the
    last commit; after a HostsUpdatedInterrupt with the present values. All survivors call the
    reset callbacks before, and take over rank 0's values.
    """

    @functools.wraps(train)
    def begin(state: _S, /, *args: _P.args, **options: _P.kwargs) -> _R:
        if not isinstance(state, State):
            raise TypeError(
                "a function of elastic.run takes a state (TorchState, KerasState, "
                f"TensorFlowKerasState, TensorFlowState) first, not {type(state).__name__}"
            )
        state._begin(next(_runs))
        call = functools.partial(train, state, *args, **options)
        state._is_running = True
        try:
            if current.current().is_elastic:
                with leaving_on_sigterm(current.current()):
                    return state._call_in_views(call)
            return _called(state, call)
        finally:
            state._is_running = False

    return begin


def _called(state: State, train: Callable[[], _R]) -> _R:
    """Return what a function returns, which is called again when the program asks for that."""
    while True:
        try:
            return train()
        except HostsUpdatedInterrupt as interrupt:
            state.on_reset()
            if not interrupt.skip_sync:
                state.sync()


class _Kept(NamedTuple):
    """Copies of the arrays of a model, an optimizer or a list of variables."""

    arrays: list[Array]


class ArrayState(State):
    """A state of models whose variables can be read and written as NumPy arrays."""

    @abstractmethod
    def _variables_of(self, value: Any) -> list[Any] | None:
        """Return the variables of a model, an optimizer or a list; None for a plain value."""

    @abstractmethod
    def _read_variable(self, variable: Any) -> Array:
        """Return the value of a variable."""

    def _write_variable(self, variable: Any, array: Array) -> None:
        variable.assign(array)

    def _copy(self, value: Any) -> Any:
        variables = self._variables_of(value)
        if variables is None:
            return copy.deepcopy(value)
        return _Kept([np.array(self._read_variable(one)) for one in variables])

    def _put(self, name: str, value: Any, kept: Any) -> Any:
        if not isinstance(kept, _Kept):
            return copy.deepcopy(kept)
        places = self._variables_of(value) or []
        found, wanted = [tuple(one.shape) for one in places], [one.shape for one in kept.arrays]
        if found != wanted:
            raise ConfigError(
                f"{name} has variables of the shapes {found}, those of the commit or of rank 0 "
                f"are {wanted}: build models and optimizers alike before elastic.run"
            )
        for place, array in zip(places, kept.arrays, strict=True):
            self._write_variable(place, array)
        return value

    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        plain, arrays = ({}, []) if saved is None else _apart(saved)
        content = (plain, [_described(one) for one in arrays])
        plain, described = current.current().broadcast_object(content, 0, "elastic state")
        if saved is None:
            arrays = [_room(about)[0] for about in described]
        names = [f"elastic state.{place}" for place in range(len(arrays))]
        broadcast_in_place(arrays, names, 0)
        return _together(plain, arrays)

    def _take_apart(self, saved: dict[str, Any]) -> Parcel:
        plain, arrays = _apart(saved)
        return Parcel(plain, [_described(one) for one in arrays], list(map(_bytes_of, arrays)))

    def _put_together(self, plain: Any, tensors: list[Any]) -> dict[str, Any]:
        return _together(plain, tensors)

    def _room(self, about: Any) -> tuple[Array, memoryview]:
        return _room(about)


def _apart(saved: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
    """Separate the arrays of models from copies, which get their number instead."""
    plain: dict[str, Any] = {}
    arrays: list[Array] = []
    for name, kept in saved.items():
        if isinstance(kept, _Kept):
            plain[name] = ("arrays", len(kept.arrays))
            arrays += kept.arrays
        else:
            plain[name] = ("value", kept)
    return plain, arrays


def _together(plain: dict[str, Any], arrays: list[Array]) -> dict[str, Any]:
    """Undo _apart()."""
    rest = iter(arrays)
    return {
        name: _Kept(list(itertools.islice(rest, kept))) if kind == "arrays" else kept
        for name, (kind, kept) in plain.items()
    }


def _described(array: Array) -> tuple[str, tuple[int, ...]]:
    return array.dtype.name, array.shape


def _room(described: tuple[str, tuple[int, ...]]) -> tuple[Array, memoryview]:
    dtype, shape = described
    array = np.empty(shape, np.dtype(dtype))
    return array, _bytes_of(array)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _place(folder: str, number: int) -> Path:
    try:
        open_folder(Path(folder)).close()
    except OSError as error:
        raise ConfigError(
            f"FASTPS_COMMIT_DIR={folder!r} cannot be made or used: {error.strerror}; set it to a "
            "directory that only this user can write"
        ) from None
    return Path(folder) / f"commit-{number}.fastps"
