# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler: a dataset's indices over the workers that are left, without those used.

What a worker gets is a function of the dataset's length, seed, epoch, the used indices, and the
worker's place among the workers; so all workers know what each of them gets. A state decides when
the place changes (frameworks/elastic.py). Threads: the one that trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import torch

from fastps.frameworks.elastic_views import Members, history_of, name_of
from fastps.session import current

_Batch: TypeAlias = tuple[int, int, int]  # its size; view and steps when it was recorded
_NOTHING = torch.empty(0, dtype=torch.int64)


def order_of(count: int, *, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """Return all indices in the order of an epoch."""
    if not shuffle:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def left_of(order: torch.Tensor, used: torch.Tensor, n_used: int) -> torch.Tensor:
    """Return the indices that are left: without some, and without the first of the others."""
    others = order if not len(used) else order[~torch.isin(order, used)]
    return others[n_used:]


def share_of(left: torch.Tensor, order: torch.Tensor, rank: int, size: int) -> list[int]:
    """Return what a worker gets of the indices that are left.

    As many on each worker, so the last ones may be indices from the beginning of the order.
    """
    count = -(-len(left) // size)
    padded = itertools.chain(left.tolist(), itertools.cycle(order.tolist()))
    return list(itertools.islice(padded, rank, count * size, size))


def steps_of_batches(seen: Sequence[int], n_steps: int) -> list[range]:
    """Return for each batch the numbers of the steps that it was part of.

    seen: how many steps had been made when each batch was recorded, before its step or after it.
    Several batches may be of one step, and several steps of one batch. n_steps: how many there
    are; a batch whose step was not made has none.
    """
    found = []
    is_after = bool(seen) and seen[-1] >= n_steps
    for place, number in enumerate(seen):
        if not is_after:
            later = next((one for one in seen[place:] if one > number), n_steps)
            found.append(range(number, later))
            continue
        before = seen[place - 1] if place else 0
        steps = range(before, number) if number > before else range(number, number + 1)
        found.append(range(steps.start, min(steps.stop, n_steps)))
    return found


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distribute a dataset's indices over ranks, without those used before a commit.

    As DistributedSampler: each epoch has its own order, the same on all ranks, and is padded with
    indices from its beginning so that all ranks get as many. Put it into a TorchState. A job that
    resumes with as many workers gives each the indices that it would have got.

    After a loss in an elastic job, the next commit() distributes the indices that are left over
    the survivors. Until then each uses its own, and those of the lost worker are used by nobody.
    By default record_batch() counts a batch of each worker that the indices were distributed
    over, as Horovod's does. So the batches that the lost worker did not use until that commit
    are left out of the epoch; none is used twice.

    exact=True: only batches count as used whose gradients are in a step, and the others are
    distributed again. Each index of an epoch is then used once, and fewer than size() a second
    time to pad the last batches. This is exact where the steps are those of DistributedOptimizer
    or DistributedDataParallel, wait for their averages, and stand between the same two commits as
    record_batch(). With other operations, indices of a step with a loss may be used twice, and
    never not at all. The loader must be made anew for what is left. So commit within elastic.run,
    and once after an epoch's last batch, before set_epoch().
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, exact: bool = False
    ) -> None:
        """Take a dataset of constant length; seed: of the orders, the same on all ranks."""
        self.dataset, self.shuffle, self.seed, self.exact = dataset, shuffle, seed, exact
        self._members: Members = ()  # whom a state distributes over; none: all workers of now
        self._place = 0, 1  # among them
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, none of whose indices is used; call it when the last one has ended."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has used a batch of this size; batch_idx does not matter."""
        self.processed_num += batch_size * self._where()[1]
        if self.exact and self._members:
            session: Any = current.current()
            n_steps = history_of(session).n_steps - self._first_step
            self._batches.append((batch_size, session.view, n_steps))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that this rank has used some indices; instead of record_batch().

        Other workers are told by the next sync of the state in an elastic job. What a lost worker
        has recorded since is distributed again, and so is what others than rank 0 have recorded
        before a restart.
        """
        self._recorded.update(map(int, indices))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and what is used of it.

        processed_num: how many of its indices all ranks have used, of those that are not among
        processed_indices. recorded_indices: those of record_indices() on this rank.
        """
        found: dict[str, Any] = {"epoch": self.epoch, "processed_num": self.processed_num}
        if len(self._used):
            found["processed_indices"] = self._used
        if self._recorded:
            found["recorded_indices"] = torch.tensor(sorted(self._recorded))
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume within an epoch, and distribute its unused indices."""
        self.epoch: int = state["epoch"]
        self.processed_num: int = state["processed_num"]
        self._used = _indices(state.get("processed_indices", ()))
        self._recorded = set(_indices(state.get("recorded_indices", ())).tolist())
        self.reset()

    def reset(self) -> None:
        """Distribute the indices that are not used yet."""
        self._n_used = min(self.processed_num, len(self.dataset) - len(self._used))
        self._batches: list[_Batch] = []  # since then
        self._first_step = history_of(current.current()).n_steps if self._members else 0

    def __len__(self) -> int:
        """Return the number of indices of this rank since the last reset()."""
        size: int = self._where()[1]
        return -(-(len(self.dataset) - len(self._used) - self._n_used) // size)

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices."""
        return iter(self._share(*self._where()))

    def _where(self) -> tuple[int, int]:
        """Return this rank, and how many there are."""
        if self._members:
            return self._place
        now = current.current()
        return now.rank, now.size

    def _order(self) -> torch.Tensor:
        return order_of(len(self.dataset), shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)

    def _share(self, rank: int, size: int) -> list[int]:
        order = self._order()
        return share_of(left_of(order, self._used, self._n_used), order, rank, size)

    # ---- of a state, in an elastic job ----

    def merge_recorded(self) -> None:
        """Tell all workers what each has recorded by record_indices(); blocks."""
        session = current.current()
        count = np.array([len(self._recorded)], np.int64)
        if not session.push_pull(count, "elastic sampler news", average=False)[0]:
            return
        marks = np.zeros(len(self.dataset), np.int32)
        marks[list(self._recorded)] = 1
        found = session.push_pull(marks, f"elastic sampler of {len(marks)}", average=False)
        self._recorded = set(np.flatnonzero(found).tolist())

    def settle(self, members: Members) -> None:
        """Find out what is used, before indices are distributed over other workers."""
        is_exact = bool(self.exact and self._batches) and members != self._members
        if not (is_exact or self._recorded):
            return
        order = self._order()
        n_used = self._n_used if is_exact else self.processed_num
        first = left_of(order, self._used, 0)[:n_used]
        later = self._used_since() if is_exact else []
        recorded = [*self._recorded, *later]
        self._used = _indices(torch.cat([self._used, first, _indices(recorded)]))
        self.processed_num, self._recorded = 0, set()
        self.reset()

    def _used_since(self) -> list[int]:
        """Return the indices of all batches since the last reset() that are part of steps."""
        history = history_of(current.current())
        made = history.views_since(self._first_step)
        steps = steps_of_batches([seen for _, _, seen in self._batches], len(made))
        size = len(self._members)
        shares = [self._share(rank, size) for rank in range(size)]
        found: list[int] = []
        at = 0
        for (count, view, _), numbers in zip(self._batches, steps, strict=True):
            views = [made[number] for number in numbers] if made else [view]
            there = [set(history.members(one)) for one in views]
            for name, share in zip(self._members, shares, strict=True):
                if there and all(name in some for some in there):
                    found += share[at : at + count]
            at += count
        return found

    def distribute_over(self, members: Members) -> None:
        """Distribute indices over the workers of a view, until the next call."""
        self._members = members
        self._place = members.index(name_of(current.current())), len(members)
        self.reset()


def _indices(some: Any) -> torch.Tensor:
    """Return indices as a sorted tensor, each once."""
    if not len(some):
        return _NOTHING
    found = some if isinstance(some, torch.Tensor) else torch.tensor(list(some))
    return found.unique()  # type: ignore[no-any-return,no-untyped-call]
