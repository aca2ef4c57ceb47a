# SPDX-License-Identifier: Apache-2.0
"""Training that goes on from its last commit where a job is started again: Horovod's elastic.

    state = fps.elastic.TorchState(model, optimizer, epoch=0)

    @fps.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    train(state)

A worker that is lost ends all of them, and `fastps-run --restarts N` starts as many anew: rank 0
then finds what it committed last, everybody takes that over, and train() goes on. So a program is
what it is for Horovod, whose workers that are left go on themselves (Horovod, "Elastic Horovod").

Decides what a commit holds and when it is read; where it lies is a setting (FASTPS_COMMIT_DIR),
and how tensors are copied and sent is each framework's. Threads: the one that trains. All ranks
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
_runs = itertools.count(1)  # the same program makes the same runs, in each of its lives


class State(ABC):
    """What has to be the same on all workers, and is committed together.

    Values are attributes of the state, which may be set to new ones.
    """

    def __init__(self, **values: Any) -> None:
        """Take what is to be held; the values of now are the first commit."""
        self._values = values
        for name in values:
            if hasattr(type(self), name) or name.startswith("_"):
                kind = type(self).__name__
                raise ValueError(f"{kind} has a {name!r} of its own: choose another name")
        self._callbacks: list[Callable[[], object]] = []
        self._path: Path | None = None
        self._is_told = False
        self._saved = self._look()

    def __getattr__(self, name: str) -> Any:
        """Return what is held under a name."""
        values = self.__dict__.get("_values", {})
        if name not in values:
            held = ", ".join(values)
            raise AttributeError(f"this state has no {name!r}; it holds {held}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Hold another value under the name of one that is held; else an ordinary attribute."""
        values = self.__dict__.get("_values", {})
        if name in values:
            values[name] = value
        else:
            object.__setattr__(self, name, value)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called, on all ranks, when training goes on from an earlier life."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Keep everything as it is now: in memory, and on rank 0 in the job's directory.

        Copies all that is held, so seldom is cheaper. TypeError: a value that cannot be kept.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027
        """Return: a job's hosts do not change while it runs. For scripts for Horovod."""

    def save(self) -> None:
        """Do what commit() does."""
        self._saved = self._look()
        if self._path is not None:
            self._write(self._path, self._saved)
        elif not self._is_told and current.current().rank == 0:
            self._is_told = True
            _log.warning(
                "commits are in memory alone, so a job that is started again begins anew: name a "
                "directory as FASTPS_COMMIT_DIR (on one machine fastps-run --restarts N does), "
                "and commit within a function of elastic.run"
            )

    def restore(self) -> None:
        """Take back what was changed since the last commit, on this rank."""
        self._take(self._saved)

    def sync(self) -> None:
        """Take over rank 0's values, on all ranks, which call this together; blocks."""
        self._saved = self._of_root(self._look() if current.current().rank == 0 else None)
        self.restore()

    # ---- of a framework ----

    @abstractmethod
    def _copy(self, value: Any) -> Any:
        """Return a copy of what is held, as commits keep it."""

    @abstractmethod
    def _put(self, name: str, value: Any, kept: Any) -> Any:
        """Return what is held from now on: the value, written over with what was kept, or that."""

    @abstractmethod
    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's copies, None elsewhere, on all ranks; blocks."""

    @abstractmethod
    def _write(self, path: Path, saved: dict[str, Any]) -> None:
        """Write copies to a file."""

    @abstractmethod
    def _read(self, path: Path) -> dict[str, Any]:
        """Return the copies of a file."""

    # ---- the lives of a job ----

    def _look(self) -> dict[str, Any]:
        return {name: self._copy(value) for name, value in self._values.items()}

    def _take(self, saved: dict[str, Any]) -> None:
        for name, kept in saved.items():
            self._values[name] = self._put(name, self._values[name], kept)

    def _begin(self, number: int) -> None:
        """Go on from what an earlier life committed in the run of that number, or begin."""
        now = current.current()
        is_root, folder = now.rank == 0, now.config.commit_dir
        if is_root and folder:
            self._path = _place(folder, number)
        is_there = self._path is not None and commits.exists(self._path)
        was_there = now.broadcast_object(is_there, 0, "elastic")
        if was_there and self._path is not None:
            self._take(self._checked(self._read(self._path)))
        if was_there:
            self.on_reset()
        self.sync()

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        if saved.keys() != self._values.keys():
            raise ConfigError(
                f"{self._path} holds {sorted(saved)}, this program {sorted(self._values)}: it is "
                "another program's; give an empty directory as FASTPS_COMMIT_DIR"
            )
        return saved


def run(train: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a function of a State begin with rank 0's values, or with its last commit.

    The function is called by all ranks. Where an earlier life of the job has committed in it,
    that is loaded, reset callbacks are called, and everybody takes over rank 0's values.
    """

    @functools.wraps(train)
    def begin(state: _S, /, *args: _P.args, **words: _P.kwargs) -> _R:
        if not isinstance(state, State):
            raise TypeError(
                f"elastic.run takes a state (TorchState, KerasState, TensorFlowKerasState, "
                f"TensorFlowState) first, not {type(state).__name__}"
            )
        state._begin(next(_runs))
        return train(state, *args, **words)

    return begin


class _Kept(NamedTuple):
    """Copies of the arrays of a model, an optimizer or a list of variables."""

    arrays: list[Array]


class ArrayState(State):
    """A state of models whose variables can be read and written as NumPy's arrays."""

    @abstractmethod
    def _variables_of(self, value: Any) -> list[Any] | None:
        """Return the variables of a model, an optimizer or a list; None: it is a plain value."""

    @abstractmethod
    def _read_variable(self, variable: Any) -> Array:
        """Return what a variable holds."""

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
                f"{name} has variables of the shapes {found} here, what was committed or rank 0 "
                f"has {wanted}: build models and optimizers alike before elastic.run"
            )
        for place, array in zip(places, kept.arrays, strict=True):
            self._write_variable(place, array)
        return value

    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        plain, arrays = ({}, []) if saved is None else _apart(saved)
        told = (plain, [_described(one) for one in arrays])
        plain, described = current.current().broadcast_object(told, 0, "elastic state")
        if saved is None:
            arrays = [_empty(*about) for about in described]
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
    """Take the arrays of models out of copies; in their place stands how many there are."""
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


def _empty(dtype: str, shape: tuple[int, ...]) -> Array:
    return np.empty(shape, np.dtype(dtype))


def _room(about: Any) -> tuple[Array, memoryview]:
    array = _empty(*about)
    return array, _bytes_of(array)


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _place(folder: str, number: int) -> Path:
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"FASTPS_COMMIT_DIR={folder!r} cannot be made: {error}") from None
    return Path(folder) / f"commit-{number}.fastps"
