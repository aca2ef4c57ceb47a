# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_unwrapped.py do: they train in one way after the other."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

import fastps.torch as fps
from fastps.frameworks.torch.gradients import unwrapped

WARN, QUIET = [], []  # ways to train that are warned of, and those that are not


class Trained:
    """A model whose gradients differ between workers, and optimizers of it."""

    def __init__(self) -> None:
        torch.manual_seed(fps.rank())
        self.model = nn.Linear(3, 2)
        fps.broadcast_parameters(self.model.state_dict(), root_rank=fps.size() - 1)

    def plain(self) -> torch.optim.Optimizer:
        """Make an optimizer of torch alone."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, optimizer, model=None, *, scale=None, then=lambda: None) -> None:
        """Do some steps; then: what to do with gradients before each."""
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model or self.model)(torch.ones(1, 3)).sum()
            (loss * (fps.rank() + 1 if scale is None else scale)).backward()
            then()
            optimizer.step()


def everything() -> list[tuple[str, list[str]]]:
    """Train in all ways, each in a session of its own; list what rank 0 was warned of."""
    torch.set_num_threads(1)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("fastps.session.drift").addHandler(handler)
    found = []
    for way in (*WARN, *QUIET):
        fps.init(check_weights=way is not one_that_is_to_differ)
        way(Trained())
        fps.broadcast_object(None, 0)  # comes after what was told
        found.append((way.__name__, told.copy()))
        told.clear()
        fps.shutdown()
    return found


def way(ways):
    """Add a function to ways to train."""
    return lambda function: ways.append(function) or function


@way(WARN)
def forgotten(trained):
    trained.steps(trained.plain())


@way(WARN)
def forgotten_by_who_averages_once_in_a_while(trained):
    optimizer = trained.plain()
    fps.allreduce(torch.ones(1))
    trained.steps(optimizer)
    fps.allreduce(torch.ones(1))
    trained.steps(trained.plain())


@way(QUIET)
def wrapped(trained):
    named = trained.model.named_parameters()
    trained.steps(fps.DistributedOptimizer(trained.plain(), named))
    trained.steps(trained.plain())  # whoever wraps one knows of it


@way(QUIET)
def wrapped_before(trained):
    optimizer = fps.DistributedOptimizer(trained.plain(), op=fps.Adasum)
    fps.broadcast_parameters(trained.model.state_dict(), 0)
    assert not _global_optimizer_post_hooks
    trained.steps(optimizer)


@way(QUIET)
def wrapped_model(trained):
    trained.steps(trained.plain(), fps.DistributedDataParallel(trained.model))


@way(QUIET)
def torch_s_own_wrapper(trained):
    dist.init_process_group("fastps")
    trained.steps(trained.plain(), DistributedDataParallel(trained.model))
    dist.destroy_process_group()


@way(QUIET)
def gradients_by_hand(trained):
    def push_pull():
        for name, one in trained.model.named_parameters():
            fps.push_pull_inplace(one.grad, name=name)

    trained.steps(trained.plain(), then=push_pull)


@way(QUIET)
def models_by_hand(trained):
    def mix():
        for one in trained.model.parameters():
            fps.allreduce_(one.data)

    trained.steps(trained.plain(), then=mix)


@way(QUIET)
def models_by_windows(trained):
    weight = trained.model.weight.data
    fps.win_create(weight, "weight")
    trained.steps(trained.plain(), then=lambda: fps.win_put(weight, "weight"))
    fps.win_free("weight")


@way(QUIET)
def local_sgd(trained):
    trained.steps(fps.LocalSGD(trained.model, trained.plain(), sync_every=4))


@way(QUIET)
def decentralized(trained):
    fps.set_topology()
    optimizer = fps.DistributedAdaptWithCombineOptimizer(
        trained.plain(), trained.model, fps.CommunicationType.neighbor_allreduce,
        num_steps_per_communication=3,
    )  # fmt: skip
    trained.steps(optimizer)


@way(QUIET)
def one_that_is_to_differ(trained):
    trained.steps(trained.plain())


@way(QUIET)
def the_same_data(trained):
    trained.steps(trained.plain(), scale=1.0)
    assert unwrapped._watches


@way(QUIET)
def one_worker_alone(trained):
    if fps.rank() == 0:
        trained.steps(trained.plain())


@way(QUIET)
def another_model(trained):
    own = nn.Linear(3, 2)
    trained.steps(torch.optim.SGD(own.parameters(), lr=0.1), own)
