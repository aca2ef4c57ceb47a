# SPDX-License-Identifier: Apache-2.0
"""Training that continues from its last commit when a job is restarted: Horovod's elastic.

    state = fps.elastic.TorchState(model, optimizer, epoch=0)

    @fps.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(state)

A lost worker ends the job, and `fastps-run --restarts N` starts all workers again. Rank 0 then
reads its last commit, all ranks take it over, and train() continues. Programs look as they do for
Horovod, where the remaining workers continue by themselves (Horovod, "Elastic Horovod").

Decides what a commit contains and when it is read. A setting (FASTPS_COMMIT_DIR) decides where it
is, and each framework how tensors are copied and sent. Threads: the one that trains. All ranks
call run(), sync() and reset callbacks alike.
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

from fastps.errors import ConfigError
from fastps.frameworks import commits
from fastps.frameworks.array_exchange import broadcast_in_place
from fastps.session import current
from fastps.worker.handle import Array

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="State")
_runs = itertools.count(1)  # numbers of run(); a restarted program has the same ones


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
        self._has_warned = False
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
        """Register functions that all ranks call when training continues after a restart."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Save the current values: in memory, and on rank 0 in the job's directory.

        Copies all values, so rare commits cost less. TypeError for a value that cannot be saved.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027
        """Do nothing: a job's hosts do not change while it runs. For Horovod's scripts."""

    def save(self) -> None:
        """Do what commit() does."""
        self._saved = self._copies()
        if self._path is not None:
            self._write(self._path, self._saved)
        elif not self._has_warned and current.current().rank == 0:
            self._has_warned = True
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
    def _write(self, path: Path, saved: dict[str, Any]) -> None:
        """Write copies to a file."""

    @abstractmethod
    def _read(self, path: Path) -> dict[str, Any]:
        """Return the copies of a file."""

    # ---- starts and restarts ----

    def _copies(self) -> dict[str, Any]:
        return {name: self._copy(value) for name, value in self._values.items()}

    def _put_all(self, saved: dict[str, Any]) -> None:
        for name, kept in saved.items():
            self._values[name] = self._put(name, self._values[name], kept)

    def _begin(self, number: int) -> None:
        """Continue from the commit of the run of that number, or begin."""
        now = current.current()
        is_root, folder = now.rank == 0, now.config.commit_dir
        if is_root and folder:
            self._path = _place(folder, number)
        is_there = self._path is not None and commits.exists(self._path)
        was_there = now.broadcast_object(is_there, 0, "elastic")
        if was_there and self._path is not None:
            saved = self._read(self._path)
            if saved.keys() != self._values.keys():
                raise ConfigError(
                    f"{self._path} holds {sorted(saved)}, this program {sorted(self._values)}, so "
                    "another program wrote it: set FASTPS_COMMIT_DIR to an empty directory"
                )
            self._put_all(saved)
        if was_there:
            self.on_reset()
        self.sync()


def run(train: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a function of a State begin with rank 0's values, or with its last commit.

    All ranks call the function. After a restart of the job rank 0 loads its last commit. All ranks
    then call the reset callbacks, and take over rank 0's values.
    """

    @functools.wraps(train)
    def begin(state: _S, /, *args: _P.args, **options: _P.kwargs) -> _R:
        if not isinstance(state, State):
            raise TypeError(
                "a function of elastic.run takes a state (TorchState, KerasState, "
                f"TensorFlowKerasState, TensorFlowState) first, not {type(state).__name__}"
            )
        state._begin(next(_runs))
        return train(state, *args, **options)

    return begin


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

    def _write(self, path: Path, saved: dict[str, Any]) -> None:
        plain, arrays = _apart(saved)
        described = [_described(one) for one in arrays]
        commits.write(path, plain, described, map(_bytes_of, arrays))

    def _read(self, path: Path) -> dict[str, Any]:
        return _together(*commits.read(path, _room))


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
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"FASTPS_COMMIT_DIR={folder!r} cannot be made: {error}; set it to a directory that "
            "can be written"
        ) from None
    return Path(folder) / f"commit-{number}.fastps"
