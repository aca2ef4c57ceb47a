# SPDX-License-Identifier: Apache-2.0
"""The training program of a chaos job: exact sums, and a line of history for each step.

CHAOS holds a JSON object: folder, seed, work, steps, pause_s, elastic (the least number of workers
that go on, or null), is_polite (record SIGTERM and continue, as a trainer that saves its state
would), late ({rank, step, s}: a straggler), and act ({rank, phase, step, delay_s, signal, probe}:
the signal that one worker sends itself).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PLAN: dict[str, Any] = json.loads(os.environ["CHAOS"])
RANK = int(os.environ.get("FASTPS_RANK") or os.environ.get("RANK") or 0)
ACT: dict[str, Any] = PLAN["act"] if (PLAN["act"] or {}).get("rank") == RANK else {}
SKEW_S = float(os.environ.get("CHAOS_SKEW_S", "0"))
MEMBER = f"{RANK}:{os.getpid()}"
FILE = os.open(
    f"{PLAN['folder']}/history.{RANK}.{os.getpid()}.jsonl",
    os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600,
)  # fmt: skip

if ACT.get("probe"):
    os.environ["FASTPS_FAULT"] = ACT["probe"]


def write(what: str, **fields: Any) -> None:
    """Append a record to this worker's history, in one write."""
    record = {"member": MEMBER, "rank": RANK, "what": what, "at": time.monotonic() - SKEW_S}
    os.write(FILE, (json.dumps(record | fields) + "\n").encode())


def act(phase: str, step: int = 0) -> None:
    """Send this process its signal, a moment later, if this is the time for it."""
    if ACT.get("phase") == phase and ACT.get("step") == step and not ACT.get("probe"):
        threading.Thread(target=_act, daemon=True).start()


def _act() -> None:
    time.sleep(ACT["delay_s"])
    write("event", signal=ACT["signal"])
    os.kill(os.getpid(), ACT["signal"])


write("begin")
faulthandler.register(signal.SIGQUIT, all_threads=True)  # the driver asks a job that hangs
if PLAN["is_polite"] and not ACT:
    signal.signal(signal.SIGTERM, lambda number, frame: write("term"))
act("start")

import numpy as np  # noqa: E402  (what follows takes long, and may be interrupted)

import fastps  # noqa: E402
from tools.chaos.gradients import (  # noqa: E402
    Floats,
    contributors,
    digest,
    first_model,
    fractions,
    gradient,
)

Sum = Callable[[int, list[Floats]], list[Floats]]
SIZES: list[int] = []  # of the views of an elastic job


def push_pull(step: int, gradients: list[Floats]) -> list[Floats]:
    """Sum by name: shared memory of a machine, or servers."""
    names = [f"tensor.{place}" for place in range(len(gradients))]
    handles = [
        fastps.push_pull_async(one, name, average=False)
        for one, name in zip(gradients, names, strict=True)
    ]
    return [fastps.synchronize(handle) for handle in handles]


def compressed() -> Sum:
    """Sum by name, in float16 on the wire."""

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        return [
            fastps.push_pull(one, f"tensor.{place}", average=False,
                             compression=fastps.Compression.fp16)
            for place, one in enumerate(gradients)
        ]  # fmt: skip

    return sums


def sets() -> Sum:
    """Sum over rows and then over columns of a square of workers."""
    side = round(fastps.size() ** 0.5)
    rows = [fastps.add_process_set(range(row * side, row * side + side)) for row in range(side)]
    columns = [fastps.add_process_set(range(c, fastps.size(), side)) for c in range(side)]
    mine = rows[RANK // side], columns[RANK % side]

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        for one in mine:
            gradients = fastps.grouped_allreduce(gradients, op=fastps.Sum, process_set=one)
        return gradients

    return sums


def local_sgd() -> Sum:
    """Average the models of two local steps, each of half the gradient.

    The average is over the workers of the view in which it was made.
    """
    held = {str(place): np.zeros_like(one) for place, one in enumerate(gradient(0, 0, 0))}
    local = fastps.LocalSGD(held, sync_every=2)

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        before = [one.copy() for one in held.values()]
        for _ in range(2):
            for one, change in zip(held.values(), gradients, strict=True):
                one += change / 2
            local.step()
        size = np.float32(SIZES[-1] if SIZES else fastps.size())
        return [(one - old) * size for one, old in zip(held.values(), before, strict=True)]

    return sums


def windows() -> Sum:
    """Put models into the windows of all others, and average what is there."""
    from fastps import topology  # noqa: PLC0415

    fastps.set_topology(topology.fully_connected_graph(fastps.size()))
    mine = [np.zeros_like(one) for one in gradient(0, 0, 0)]
    for place, one in enumerate(mine):
        fastps.win_create(one, str(place), zero_init=True)
    share = 1 / fastps.size()
    others = {rank: share for rank in range(fastps.size()) if rank != RANK}

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        for place, one in enumerate(gradients):
            mine[place][...] = one * np.float32(fastps.size())
            fastps.win_put(mine[place], str(place))
        fastps.barrier()
        found = [fastps.win_update(str(place), share, others).copy() for place in range(len(mine))]
        fastps.barrier()
        return found

    return sums


def torch_backend() -> Sum:
    """Sum by torch.distributed."""
    import torch  # noqa: PLC0415
    from torch import distributed as dist  # noqa: PLC0415

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        found = [torch.from_numpy(one.copy()) for one in gradients]
        for one in found:
            dist.all_reduce(one)
        return [one.numpy() for one in found]

    return sums


def ddp() -> Sum:
    """Average by torch's DistributedDataParallel, whose loss has our gradients."""
    import torch  # noqa: PLC0415

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            arrays = [torch.from_numpy(np.zeros_like(one)) for one in gradient(0, 0, 0)]
            self.weights = torch.nn.ParameterList(arrays)

        def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
            return sum((one * w).sum() for one, w in zip(given, self.weights, strict=True))

    model = torch.nn.parallel.DistributedDataParallel(Model())

    def sums(step: int, gradients: list[Floats]) -> list[Floats]:
        model.zero_grad()
        model([torch.from_numpy(one) for one in gradients]).backward()
        size = np.float32(torch.distributed.get_world_size())
        return [one.grad.numpy() * size for one in model.module.weights]

    return sums


WORKS: dict[str, Callable[[], Sum]] = {
    "push_pull": lambda: push_pull, "compression": compressed, "sets": sets,
    "local_sgd": local_sgd, "windows": windows, "torch": torch_backend, "ddp": ddp,
}  # fmt: skip


def start() -> None:
    """Join the job, in torch's way where the work is torch's."""
    if PLAN["work"] in ("torch", "ddp"):
        from torch import distributed as dist  # noqa: PLC0415

        dist.init_process_group("fastps")
    elif PLAN["elastic"] is not None:
        fastps.init(elastic=fastps.Elastic(min=PLAN["elastic"], on_view=told))
        SIZES.insert(0, fastps.size())
    else:
        fastps.init()


def leave() -> None:
    """Leave the job in order."""
    if PLAN["work"] in ("torch", "ddp"):
        from torch import distributed as dist  # noqa: PLC0415

        dist.destroy_process_group()
    else:
        fastps.shutdown()


def told(view: fastps.View) -> None:
    """Record a view of an elastic job."""
    SIZES.append(view.size)
    write("view", number=view.number, size=view.size, cause=view.cause, seconds=view.seconds)


def train() -> None:
    """Take all steps, each with its record."""
    model = first_model(has_fractions=PLAN["has_fractions"])
    sums = WORKS[PLAN["work"]]()
    late = PLAN["late"] or {}
    for step in range(PLAN["steps"]):
        gradients = gradient(PLAN["seed"], step, RANK)
        if PLAN["has_fractions"]:
            gradients.append(fractions(PLAN["seed"], step, RANK))
        before = digest(gradients)
        act("running", step)
        act("late", step)
        if late.get("rank") == RANK and late["step"] == step:
            time.sleep(late["s"])
        write("enter", step=step)
        most = SIZES[-1] if SIZES else None
        act("inside", step)
        act("waiting", step)
        try:
            found = sums(step, gradients)
            who = [contributors(one) for one in found]
        except BaseException as error:
            write("error", step=step, type=type(error).__name__, text=str(error),
                  is_source_kept=digest(gradients) == before)  # fmt: skip
            raise
        for array, change in zip(model, found, strict=True):
            array -= change
        least = SIZES[-1] if SIZES else None
        write("step", step=step, hash=digest(model), who=who, most=most, least=least)
        time.sleep(PLAN["pause_s"])


def main() -> None:
    """Join, train, leave; record what fails."""
    where = "joining"
    try:
        start()
        write("joined")
        where = "training"
        train()
        where = "leaving"
        write("leave")
        act("leaving")
        leave()
        write("left")
    except BaseException as error:
        if where != "training":
            write("error", step=None, type=type(error).__name__, text=str(error), where=where)
        write("failed", where=where)
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
