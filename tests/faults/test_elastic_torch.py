# SPDX-License-Identifier: Apache-2.0
"""Training with PyTorch goes on when members die: no step is lost, and all weights stay equal."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import programs_elastic_torch as programs
import pytest
import torch
from harness import clean_environ
from job import Job
from test_elastic import LAYOUTS, results_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24


def check(results: Mapping[int, Mapping[str, Any]], *, steps: int = STEPS) -> None:
    """Check that survivors have all steps, and the same weights after each of them."""
    hashes = [result["hashes"] for result in results.values()]
    assert all(result["steps"] == len(result["hashes"]) == steps for result in results.values())
    for step, alike in enumerate(zip(*hashes, strict=True)):
        assert len(set(alike)) == 1, (step, alike)
    assert all(result["views"] for result in results.values())


def check_sums(results: Mapping[int, Mapping[str, Any]], *, workers: int = 3) -> None:
    """Check that each step is of one set of workers, and weights are what these steps make."""
    least = sum(1 << rank for rank in results)
    masks = []
    for found in results.values():
        masks.append([int(min(sums)) & 0xFF for sums in found["sums"]])
        for step, (mask, sums) in enumerate(zip(masks[-1], found["sums"], strict=True)):
            assert sums == [mask + (step % 4) * (mask << 8)] * len(programs.SIZES), (step, sums)
            assert mask & least == least
    assert all(one == masks[0] for one in masks)
    assert (masks[0][0], masks[0][-1]) == ((1 << workers) - 1, least)
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
    "apart": ["worker_start@51", "worker_result@151", "link_send@61", "link_recv@102"],
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


@pytest.mark.parametrize(
    ("kind", "passes", "set_to_none", "views"),
    [
        ("plain", 2, False, True),
        ("plain", 3, True, False),
        ("early", 1, False, "auto"),
        ("early", 2, True, "auto"),
        ("ddp", 1, True, "auto"),
        ("ddp", 2, False, False),
    ],
)
@pytest.mark.parametrize(
    ("layout", "fault"),
    [("shared", "local_arrive@45"), ("sockets", "link_recv@150"), ("apart", "worker_start@50")],
)
def test_gradients_accumulate_and_lie_where_they_may(
    layout, fault, kind, passes, set_to_none, views
):
    results = run(layout, 1, fault, kind=kind, passes=passes, set_to_none=set_to_none, views=views)
    check(results)
    check_sums(results)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("layout", "fault"),
    [("shared", "local_arrive@60"), ("sockets", "link_recv@160"), ("apart", "link_recv@160")],
)
def test_buffers_come_from_the_first_worker_that_is_left(layout, fault, victim):
    results = run(layout, victim, fault, kind="ddp")
    check(results)
    check_sums(results)
    # what all had before a forward pass: the sums of one worker, the first of that step
    buffers = [result["buffers"] for result in results.values()]
    assert buffers[0] == buffers[1]


@pytest.mark.parametrize("compression", ["fp16", "int8", "onebit", "topk:0.1", "wdmom"])
@pytest.mark.parametrize(
    ("layout", "fault"),
    [("sockets", "link_recv@110"), ("apart", "worker_result@130"), ("mixed", "local_arrive@40")],
)
def test_compressed_gradients_stay_equal(layout, fault, compression):
    """Residuals begin at zero in each view on all workers alike."""
    check(run(layout, 1, fault, compression=compression))


@pytest.mark.parametrize("kind", ["pipe", "barrier"])
@pytest.mark.parametrize(
    ("layout", "fault"), [("shared", "local_arrive@45"), ("sockets", "link_recv@110")]
)
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_steps_that_do_not_wait_are_units_too(layout, fault, kind, compression):
    check(run(layout, 2, fault, kind=kind, compression=compression))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["plain", "ddp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_die_at_random(layout, kind, seed):
    environment, servers = LAYOUTS[layout]
    rng = random.Random(f"{layout} {kind} {seed}")
    victims = rng.sample(range(4), 2)
    with Job(
        programs.train, workers=4, servers=servers, environment=environment,
        arguments={"kind": kind, "steps": 60, "set_to_none": bool(seed), "pause_s": 0.002},
    ) as job:  # fmt: skip
        for worker in job.workers:
            worker.wait_line("STEP 1")
        for rank in victims:
            time.sleep(rng.uniform(0.0, 0.1))
            job.workers[rank].send(signal.SIGKILL)
        results = results_of(job, *victims)
    check(results, steps=60)
    check_sums(results, workers=4)


def test_the_example_goes_on_when_a_worker_is_killed():
    words = ["fastps-run", "-n", "3", "--min", "1", "python", "examples/elastic_torch.py"]
    assert " ".join(words) in (ROOT / words[-1]).read_text()
    environ = clean_environ()
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT) as job:
        assert job.stdout is not None
        said = ""
        while "step 50: worker 0" not in said:
            said += (line := job.stdout.readline())
            assert line, said
        found = re.search(r"worker 1 of 3 has pid (\d+)", said)
        assert found, said
        os.kill(int(found[1]), signal.SIGKILL)
        said += job.stdout.read()
    assert job.returncode == 0, said
    assert said.count("view 2: worker 1 (") >= 2, said
    sums = re.findall(r"worker \d of 2 ends with weights of sum (\S+)", said)
    assert len(sums) == 2, said
    assert sums[0] == sums[1], said


def test_what_needs_members_that_stay_is_refused_with_a_cure():
    with Job(programs.refuse, workers=2, servers=0, environment=LAYOUTS["shared"][0]) as job:
        for worker in job.workers:
            said = worker.result()
            assert len(said) == 11, sorted(said)
            for what, text in said.items():
                assert text.startswith("ConfigError"), (what, text)
                assert "FASTPS_ELASTIC_MIN" in text or "--min" in text, (what, text)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("shared", "local_arrive@20"), ("sockets", "link_recv@110"), ("apart", "worker_start@20")],
)
def test_local_steps_go_on(layout, fault):
    environment, servers = LAYOUTS[layout]
    each = {("worker", 1): {"FASTPS_FAULT": f"{fault}:kill"}}
    with Job(
        programs.local_steps, workers=3, servers=servers, environment=environment, each=each
    ) as job:  # fmt: skip
        check(results_of(job, 1), steps=20)


@pytest.mark.parametrize(("victim", "root"), [(2, 0), (0, 1), (0, 0)])
def test_parameters_and_states_are_broadcast_past_a_loss(victim, root):
    each = {("worker", victim): {"FASTPS_FAULT": "local_arrive@30:kill"}}
    with Job(
        programs.broadcasts, workers=3, servers=0, environment=LAYOUTS["shared"][0], each=each,
        arguments={"root": root},
    ) as job:  # fmt: skip
        results = results_of(job, victim)
    first, second = results.values()
    assert first["found"] == second["found"]


def test_torch_distributed_names_the_lost_worker_and_can_begin_anew():
    with Job(programs.c10d, workers=3, servers=0, environment=LAYOUTS["shared"][0]) as job:
        job.workers[1].wait_line("STEP 20")
        job.workers[1].send(signal.SIGKILL)
        results = results_of(job, 1)
    for result in results.values():
        assert result["sums"][0] == 7.0
        assert result["sums"][-1] == 5.0
        first, later = result["errors"]
        assert first.startswith("ViewChangedError")
        for text in (first, later):
            assert "worker 1 (" in text
            assert "destroy_process_group()" in text
