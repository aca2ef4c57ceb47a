# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_weights.py do."""

from __future__ import annotations

import pytest
import torch

import fastps
import fastps.torch as fps

ALL = "the weights of worker 1, worker 2 are not those of worker 0"


def forget_to_broadcast() -> str:
    """Begin with other weights on each worker, in each way to step; then with the same."""
    fps.init()
    for number, options in enumerate(({}, {"staleness": 1}, {"cross_barrier": True})):
        with pytest.raises(fastps.MismatchError, match=ALL) as caught:
            step(fps.rank(), f"w{number}.", options)
        assert "broadcast_parameters(" in str(caught.value)
        step(0, f"s{number}.", options)
    even = fps.add_process_set([0, 2])
    if fps.rank() != 1:
        with pytest.raises(fastps.MismatchError, match="of worker 2 are not those of worker 0"):
            step(fps.rank(), "set.", {"process_set": even})
    step(fps.rank(), "rule.", {"rule": "median"})
    join_early()
    grow_a_buffer(fps.global_process_set, "all.")
    if fps.rank() != 1:
        grow_a_buffer(even, "even.")
    fps.shutdown()
    fps.init(check_weights=False)
    step(fps.rank(), "off.", {})
    fps.shutdown()
    return "done"


def step(seed: int, prefix: str, options: dict[str, object]) -> None:
    """Take two steps from the weights of a seed."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fps.DistributedOptimizer(plain, prefix=prefix, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def grow_a_buffer(members: fps.ProcessSet, prefix: str) -> None:
    """Let a buffer grow on all members, then on the last one alone."""
    last = torch.nn.Identity()
    last.register_buffer("scale", torch.ones(1))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), last)
    model = fps.DistributedDataParallel(model, prefix=prefix, process_set=members)
    grown = [2, 3 if fps.rank() == members.ranks[-1] else 2]
    for size in grown:
        model(torch.ones(1, 3)).sum().backward()
        last.scale = torch.ones(size)
    told = r"'1\.scale' of shape \(3,\), torch.float32 on worker 2 and '1\.scale' of shape \(2,\)"
    with pytest.raises(fastps.MismatchError, match=told):
        model(torch.ones(1, 3))


def join_early() -> None:
    """Let a worker without any data hold nobody up."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fps.DistributedOptimizer(plain, prefix="uneven.")
    if fps.rank():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    fps.join()
