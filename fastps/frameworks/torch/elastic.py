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

Decides what a commit holds and when it is read; where it lies is a setting (FASTPS_COMMIT_DIR).
Threads: the one that trains. All ranks call run(), sync() and reset callbacks alike.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from fastps import session
from fastps.errors import ConfigError
from fastps.frameworks.torch import commits
from fastps.frameworks.torch.broadcast import broadcast_object

__all__ = ["ElasticSampler", "TorchState", "run"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_runs = itertools.count(1)  # the same program makes the same runs, in each of its lives


class TorchState:
    """What has to be the same on all workers, and is committed together.

    model, optimizer and any others are attributes of the state, which may be set to new values.
    What has state_dict() and load_state_dict() (modules, optimizers, learning rate schedulers,
    samplers, scalers) is held by these, in place; all else is a plain value, of the kinds that
    broadcast_object() takes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        """Take what is to be held; the values of now are the first commit."""
        self._values = {"model": model, "optimizer": optimizer, **others}
        for name in self._values:
            if hasattr(type(self), name) or name.startswith("_"):
                raise ValueError(f"TorchState has a {name!r} of its own: choose another name")
        self._callbacks: list[Callable[[], object]] = []
        self._path: Path | None = None
        self._is_told = False
        self._saved = self._look()

    def __getattr__(self, name: str) -> Any:
        """Give what is held under a name."""
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

    def check_host_updates(self) -> None:
        """Return: a job's hosts do not change while it runs. For scripts for Horovod."""

    def save(self) -> None:
        """Do what commit() does."""
        self._saved = self._look()
        if self._path is not None:
            commits.write(self._path, self._saved)
        elif not self._is_told and session.current().rank == 0:
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
        is_root = session.current().rank == 0
        self._saved = broadcast_object(self._look() if is_root else None, 0, "elastic state")
        self.restore()

    def _look(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(value.state_dict() if _has_state(value) else value)
            for name, value in self._values.items()
        }

    def _take(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            if _has_state(self._values[name]):
                self._values[name].load_state_dict(copy.deepcopy(value))
            else:
                self._values[name] = copy.deepcopy(value)

    def _begin(self, number: int) -> None:
        """Go on from what an earlier life committed in the run of that number, or begin."""
        now = session.current()
        is_root, folder = now.rank == 0, now.config.commit_dir
        if is_root and folder:
            self._path = _place(folder, number)
        is_there = self._path is not None and commits.exists(self._path)
        was_there = broadcast_object(is_there, 0, "elastic")
        if was_there and self._path is not None:
            self._take(self._checked(commits.read(self._path)))
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


def run(
    train: Callable[Concatenate[TorchState, _P], _R],
) -> Callable[Concatenate[TorchState, _P], _R]:
    """Make a function of a TorchState begin with rank 0's values, or with its last commit.

    The function is called by all ranks. Where an earlier life of the job has committed in it,
    that is loaded, reset callbacks are called, and everybody takes over rank 0's values.
    """

    @functools.wraps(train)
    def begin(state: TorchState, /, *args: _P.args, **words: _P.kwargs) -> _R:
        if not isinstance(state, TorchState):
            raise TypeError(f"elastic.run takes a TorchState first, not {type(state).__name__}")
        state._begin(next(_runs))
        return train(state, *args, **words)

    return begin


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Share out a dataset's indices, without those that were used before a commit.

    As DistributedSampler: each epoch in an order of its own, the same on all ranks, filled up with
    indices from its beginning so that all ranks get as many. Held by a TorchState. Where a job
    goes on with as many workers, each gets what it would have got.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Take a dataset of constant length. seed: of the order, the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it has been used. To be called when one has ended."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has used a batch of that size; its number does not matter."""
        self.processed_num += batch_size * session.current().size

    def state_dict(self) -> dict[str, int]:
        """Give the epoch, and how many of its indices have been used by all ranks together."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on within an epoch; what is left of it is shared out anew."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what has not been used."""
        self._n_used = min(self.processed_num, len(self.dataset))

    def __len__(self) -> int:
        """Tell how many indices this rank gets, from the last reset() on."""
        return -(-(len(self.dataset) - self._n_used) // session.current().size)

    def __iter__(self) -> Iterator[int]:
        """Give this rank's indices."""
        now, order = session.current(), self._order()
        shared = itertools.chain(order[self._n_used :], itertools.cycle(order))
        return itertools.islice(shared, now.rank, len(self) * now.size, now.size)

    def _order(self) -> Sequence[int]:
        """Give all indices in this epoch's order."""
        if not self.shuffle:
            return range(len(self.dataset))
        chance = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self.dataset), generator=chance).tolist()
        return order


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _place(folder: str, number: int) -> Path:
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"FASTPS_COMMIT_DIR={folder!r} cannot be made: {error}") from None
    return Path(folder) / f"commit-{number}.fastps"
