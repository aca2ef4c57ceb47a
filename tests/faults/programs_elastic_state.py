# SPDX-License-Identifier: Apache-2.0
"""Training by Horovod's State in elastic jobs: weights count how often each index was used."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from run_program import mark

import fastps.torch as hvd

COUNT = 300  # indices


class Counting(torch.nn.Module):
    """A weight for each index, which rises by one for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.zeros(COUNT))
        self.other = torch.nn.ParameterList(torch.zeros(70, 90) for _ in range(3))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return what has the number of each index, negative, as its gradient."""
        return -self.used[indices].sum() - sum(one.sum() for one in self.other)


def kill_myself() -> None:
    """End as a process that the kernel kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def count(
    *,
    deaths: dict[str, int],
    exact: bool = True,
    epochs: int = 3,
    batch: int = 7,
    every: int = 3,
    passes: int = 1,
    order: str = "after",
    gathers: bool = False,
    skew_s: float = 0.0,
    kind: str = "plain",
) -> dict[str, Any]:
    """Train; workers die at steps, by their first ranks; return how often each index was used.

    order: when batches are recorded, before or after the step. gathers: also gather in each step,
    which a loss ends. skew_s: how much later each rank is than the one before.
    """
    hvd.init(elastic=hvd.Elastic(min=1))
    me = hvd.rank()
    mark("READY")
    torch.manual_seed(me)
    model = Counting()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    net: Any = model
    if kind == "ddp":
        net = hvd.DistributedDataParallel(model, op=hvd.Sum)
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), op=hvd.Sum, backward_passes_per_step=passes,
            finish_in_backward=kind == "early",
        )  # fmt: skip
    sampler = hvd.elastic.ElasticSampler(range(COUNT), seed=5, exact=exact)
    loader = torch.utils.data.DataLoader(sampler.dataset, batch_size=batch, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    ends: dict[int, list[float]] = {}
    calls, sizes, gathered, n_steps = [], [], [], 0
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> str:
        nonlocal n_steps
        calls.append((state.epoch, state.step))
        optimizer.zero_grad()
        for state.epoch in range(state.epoch, epochs):  # noqa: B020  (as in Horovod's programs)
            for place, indices in enumerate(loader):
                if deaths.get(str(me)) == n_steps:
                    kill_myself()
                time.sleep(skew_s * hvd.rank())
                net(indices).backward()
                if gathers:
                    some = hvd.allgather(torch.full((1,), float(state.step)))
                    gathered.append(some.tolist())
                if order == "before":
                    sampler.record_batch(place, batch)
                if place % passes == passes - 1 or place == len(loader) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    state.step += 1
                    n_steps += 1
                if order == "after":
                    sampler.record_batch(place, batch)
                if state.step % every == 0 and place % passes == passes - 1:
                    state.commit()
                mark("STEP", state.step)
            state.commit()
            ends[state.epoch] = model.used.tolist()
            sampler.set_epoch(state.epoch + 1)
        return "done"

    result = train(state)
    weights = [one.double().sum().item() for one in model.parameters()]
    hvd.shutdown()
    return {
        "ends": {str(epoch): used for epoch, used in ends.items()}, "calls": calls,
        "sizes": sizes, "gathered": gathered, "steps": n_steps, "weights": weights,
        "result": result,
    }  # fmt: skip


def go_on(*, deaths: dict[str, int], steps: int = 40) -> dict[str, Any]:
    """Train without a sampler: a loss has callbacks called, and nothing else."""
    hvd.init(elastic=hvd.Elastic(min=1))
    me = hvd.rank()
    mark("READY")
    model = Counting()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=float(hvd.size())), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    calls, rates, learnt = 0, [], []

    def reset() -> None:
        optimizer.param_groups[0]["lr"] = float(hvd.size())
        rates.append(hvd.size())

    state.register_reset_callbacks([reset])

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal calls
        calls += 1
        for _ in range(steps):
            if deaths.get(str(me)) == state.step:
                kill_myself()
            optimizer.zero_grad()
            model(torch.arange(COUNT)).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            learnt.append(model.used[0].item())
            mark("STEP", state.step)

    train(state)
    hvd.shutdown()
    return {"calls": calls, "rates": rates, "step": state.step, "learnt": learnt}


def restore_from(*, root: int) -> dict[str, Any]:
    """Lose rank 0 in a gather before the others have committed; take over another's values."""
    hvd.init(elastic=hvd.Elastic(min=1))
    me = hvd.rank()
    mark("READY")
    state = hvd.elastic.TorchState(
        who=me, values={"a": torch.full((100_000,), float(me)), "b": torch.empty(0, 3)}, step=0
    )
    before = state.who
    seen = []

    @hvd.elastic.run
    def train(state: Any) -> list[int]:
        seen.append([state.who, state.step])
        if state.step == 0:
            state.who, state.step = me, 1  # differs, which no State should
            state.save()
            state.step = 2
            if me == 0:
                kill_myself()
            hvd.allgather(torch.ones(3))
        return [state.who, state.step, int(state.values["a"].sum())]

    result = train(state)
    hvd.shutdown()
    return {"before": before, "result": result, "seen": seen}


def use_a_set(*, victim: int) -> dict[str, Any]:
    """Reduce in a process set, which callbacks add again; one worker comes late to it."""
    hvd.init(elastic=hvd.Elastic(min=1))
    me = hvd.rank()
    mark("READY")
    sets = [hvd.add_process_set([0, 1])]
    state = hvd.elastic.TorchState(step=0, found=[])
    state.register_reset_callbacks([lambda: sets.append(hvd.add_process_set([0, 1]))])
    calls = 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal calls
        calls += 1
        while state.step < 20:
            if me == victim and state.step == 10:
                kill_myself()
            if me == 1 and state.step == 10 and calls == 1:
                while hvd.size() == 3:  # until the set is of an earlier view
                    time.sleep(0.01)
            if hvd.rank() < 2:
                some = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=sets[-1])
                state.found.append(int(some[0]))
            state.step += 1
            state.commit()

    train(state)
    hvd.shutdown()
    return {"found": state.found, "calls": calls}
