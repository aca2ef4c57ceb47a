# SPDX-License-Identifier: Apache-2.0
"""Training with PyTorch goes on when members die: no step is lost, and all weights stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import programs_elastic_torch as programs
import pytest
import torch
from job import Job
from test_elastic import LAYOUTS, results_of

STEPS = 24


def check(results: Mapping[int, Mapping[str, Any]], *, steps: int = STEPS) -> None:
    """Check that survivors have all steps, and the same weights after each of them."""
    hashes = [result["hashes"] for result in results.values()]
    assert all(result["steps"] == len(result["hashes"]) == steps for result in results.values())
    for step, alike in enumerate(zip(*hashes, strict=True)):
        assert len(set(alike)) == 1, (step, alike)
    assert all(result["views"] for result in results.values())


def check_sums(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that each step is of one set of workers, and weights are what these steps make."""
    least = sum(1 << rank for rank in results)
    masks = []
    for found in results.values():
        masks.append([int(min(sums)) & 0xFF for sums in found["sums"]])
        for step, (mask, sums) in enumerate(zip(masks[-1], found["sums"], strict=True)):
            assert sums == [mask + (step % 4) * (mask << 8)] * len(programs.SIZES), (step, sums)
            assert mask & least == least
    assert all(one == masks[0] for one in masks)
    assert (masks[0][0], masks[0][-1]) == (7, least)
    assert replayed(masks[0]) == next(iter(results.values()))["hashes"]


def replayed(masks: Sequence[int]) -> list[str]:
    """Return the hashes of a training by one process, in which such workers take part."""
    model = programs.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    hashes = []
    for step, mask in enumerate(masks):
        model(programs.UNIT * (mask + (step % 4) * (mask << 8))).backward()
        optimizer.step()
        optimizer.zero_grad()
        hashes.append(programs.hash_of(model))
    return hashes


def run(layout: str, victim: int, fault: str, **arguments: Any) -> dict[int, Any]:
    """Train with 3 workers, one of which dies; return the results of the others."""
    environment, servers = LAYOUTS[layout]
    each = {("worker", victim): {"FASTPS_FAULT": f"{fault}:kill"}}
    with Job(
        programs.train, workers=3, servers=servers, environment=environment, each=each,
        arguments=arguments,
    ) as job:  # fmt: skip
        return results_of(job, victim)


KILLS = {
    "shared": ["local_arrive@40", "local_arrive@41", "local_chunk@40", "worker_start@50"],
    "sockets": ["worker_start@50", "worker_result@150", "link_send@100", "link_recv@100",
                "server_landing@150", "server_sum@60", "server_result@100"],
    "apart": ["worker_start@51", "worker_result@151", "link_send@101", "link_recv@102"],
    "mixed": ["local_arrive@40", "worker_start@52"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "fault"), [(layout, fault) for layout, some in KILLS.items() for fault in some]
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_step_is_of_all_survivors_or_made_again(layout, fault, victim):
    results = run(layout, victim, fault, set_to_none=bool(victim))
    check(results)
    check_sums(results)
