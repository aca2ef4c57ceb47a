# SPDX-License-Identifier: Apache-2.0
"""`fastps.torch.elastic`: the state of modules and optimizers, and a sampler that resumes.

States and how training resumes: `fastps.frameworks.elastic`. Threads: the one that trains.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from fastps.frameworks.elastic import State, run
from fastps.frameworks.torch import commits
from fastps.frameworks.torch.ops.broadcast import broadcast_object
from fastps.session import current

__all__ = ["ElasticSampler", "TorchState", "run"]


class TorchState(State):
    """Values that must be the same on all workers, and are committed together.

    model, optimizer and any others are attributes of the state, which may be set to new values.
    Objects with state_dict() and load_state_dict() (modules, optimizers, learning rate schedulers,
    samplers, scalers) are restored in place by these. Others must be plain values of the types
    that broadcast_object() takes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        """Take the values; their present state is the first commit."""
        super().__init__(model=model, optimizer=optimizer, **others)

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value.state_dict() if _has_state(value) else value)

    def _put(self, name: str, value: Any, kept: Any) -> Any:
        if not _has_state(value):
            return copy.deepcopy(kept)
        value.load_state_dict(copy.deepcopy(kept))
        return value

    def _of_root(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = broadcast_object(saved, 0, "elastic state")
        return found

    def _write(self, path: Path, saved: dict[str, Any]) -> None:
        commits.write(path, saved)

    def _read(self, path: Path) -> dict[str, Any]:
        return commits.read(path)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distribute a dataset's indices over ranks, without those used before a commit.

    As DistributedSampler: each epoch has its own order, the same on all ranks, and is padded with
    indices from its beginning so that all ranks get as many. Put it into a TorchState. A job that
    resumes with as many workers gives each the indices that it would have got.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Take a dataset of constant length; seed: of the orders, the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, none of whose indices is used; call it when the last one has ended."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has used a batch of this size; batch_idx does not matter."""
        self.processed_num += batch_size * current.current().size

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its indices that all ranks have used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume within an epoch, and distribute its unused indices."""
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the indices that are not used yet."""
        self._n_used = min(self.processed_num, len(self.dataset))

    def __len__(self) -> int:
        """Return the number of indices of this rank since the last reset()."""
        return -(-(len(self.dataset) - self._n_used) // current.current().size)

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices."""
        now, order = current.current(), self._order()
        shared = itertools.chain(order[self._n_used :], itertools.cycle(order))
        return itertools.islice(shared, now.rank, len(self) * now.size, now.size)

    def _order(self) -> Sequence[int]:
        """Return all indices in this epoch's order."""
        if not self.shuffle:
            return range(len(self.dataset))
        chance = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self.dataset), generator=chance).tolist()
        return order


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
