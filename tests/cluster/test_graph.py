# SPDX-License-Identifier: Apache-2.0
"""Operations among neighbours over whole jobs, by every way that there is on one machine."""

from __future__ import annotations

import time

import programs_graph
import programs_random
import programs_robust
import pytest
from job import run_job
from test_collectives import WAYS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("workers", "way", "servers"),
    [(2, "memory", 0), (2, "tcp", 1), (4, "memory", 1), (4, "tcp", 0), (5, "unix", 1),
     (8, "memory", 0), (8, "tcp", 0)],
)  # fmt: skip
def test_operations_equal_numpy(workers, way, servers):
    found = run_job(
        programs_graph.everything, workers=workers, servers=servers, environment=WAYS[way],
        timeout_s=200.0,
    )  # fmt: skip
    assert found == ["done"] * workers


def test_twelve_workers_average_exactly_in_few_rounds():
    environment = WAYS["memory"]
    found = run_job(programs_graph.base_rounds, workers=12, servers=0, environment=environment)
    assert found == [5] * 12


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_one_peer_averages_exactly_in_as_many_rounds_as_two_has_to_be_doubled(rounds):
    workers = 2**rounds
    found = run_job(programs_graph.exact, workers=workers, servers=0, environment=WAYS["memory"])
    assert found == [[rounds, 2]] * workers


@pytest.mark.parametrize(("workers", "way"), [(4, "memory"), (3, "tcp")])
def test_random_operations_in_random_orders_equal_dense_matrices(workers, way):
    seed = time.time_ns() % 1_000_000
    print("seed", seed)
    found = run_job(
        programs_random.cases, workers=workers, servers=0, environment=WAYS[way],
        arguments={"seed": seed, "count": 60},
    )  # fmt: skip
    assert min(found) == max(found) > 60


def test_one_worker_is_all():
    assert run_job(programs_graph.alone, workers=1, servers=0) == ["done"]


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_who_sends_to_a_worker_that_has_left_hears_of_it_under_every_rule(way):
    found = run_job(programs_graph.leaves_early, workers=3, servers=0, environment=WAYS[way])
    assert found == ["done"] * 3


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_rules_keep_honest_workers_together_and_the_mean_does_not(way):
    found = run_job(programs_robust.liars, workers=5, servers=0, environment=WAYS[way])
    assert found == ["done"] * 5


@pytest.mark.parametrize("on_loss", ["fail", "reweight"])
def test_rules_of_another_kind_are_refused(on_loss):
    environment = {"FASTPS_ON_LOSS": on_loss}
    found = run_job(programs_robust.strange_rules, workers=2, servers=0, environment=environment)
    assert found == ["done"] * 2


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_who_believes_in_an_edge_that_is_none_hears_of_it(way):
    found = run_job(programs_graph.disagreements, workers=3, servers=0, environment=WAYS[way])
    for case in range(4):
        believer = case % 2
        assert "agree on who sends to whom" in found[believer][case], found


@pytest.mark.parametrize(
    ("machines", "sockets", "servers"),
    [("aabb", "tcp", 0), ("abbab", "unix", 1), ("abbab", "tcp", 0), ("abc", "tcp", 1),
     ("aaa", "unix", 0)],
)  # fmt: skip
def test_machines_mix_their_averages(machines, sockets, servers):
    each = {("worker", rank): {"FASTPS_MACHINE": name} for rank, name in enumerate(machines)}
    found = run_job(
        programs_graph.hierarchy, workers=len(machines), servers=servers, each=each,
        environment=WAYS["memory"] | {"FASTPS_UNIX_SOCKETS": str(int(sockets == "unix"))},
    )  # fmt: skip
    order = sorted(set(machines), key=machines.index)
    assert found == [[order.index(name), len(order)] for name in machines]
