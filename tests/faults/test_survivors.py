# SPDX-License-Identifier: Apache-2.0
"""Workers die, and with FASTPS_ON_LOSS=reweight the others go on without them."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import programs_survivors
import pytest
from harness import run_workers, slowed
from job import Job

LIMIT_S = 2.0  # between a death and the end of what needed the dead one; on an idle machine
WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "tcp": {"FASTPS_UNIX_SOCKETS": "0"},
}
REWEIGHT = {"FASTPS_ON_LOSS": "reweight"}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("workers", "way", "graph", "n_dead"),
    [
        (4, "memory", "one peer", 1), (4, "tcp", "ring", 2), (8, "memory", "static", 2),
        (8, "tcp", "one peer", 2), (4, "memory", "full", 3),
    ],
)  # fmt: skip
def test_the_others_go_on_at_whatever_moment_some_die(workers, way, graph, n_dead):
    seed = time.time_ns() % 100_000
    print("seed", seed)
    chance = random.Random(seed)
    dead = chance.sample(range(workers), n_dead)
    deaths = {str(rank): chance.uniform(0.0, 0.5) for rank in dead}
    arguments = {"steps": 300, "graph": graph, "deaths": deaths}
    with Job(programs_survivors.mixes, workers=workers, servers=0, arguments=arguments,
             environment=WAYS[way] | REWEIGHT) as job:  # fmt: skip
        left = [worker for worker in job.workers if worker.spec.rank not in dead]
        found = [worker.result() for worker in left]
        for rank in dead:
            assert job.workers[rank].wait() == -signal.SIGKILL
        assert all(one["lost"] == sorted(dead) for one in found), found
        assert max(one["slowest"] for one in found) < slowed(LIMIT_S), found
        values = [one["value"] for one in found]
        if graph != "ring":  # whose survivors may be two pieces
            assert max(values) - min(values) < 1e-6, values
        job.end_in_order()


def run(program, dead, *, workers=4, servers=0, way="memory", at_s=0.2, each=None, **arguments):
    """Run a job in which some die; give what the others found, and when."""
    deaths = {str(rank): at_s for rank in dead}
    rules = {"FASTPS_RULES": "programs_gathered:total"} if servers else {}
    with Job(program, workers=workers, servers=servers, environment=WAYS[way] | REWEIGHT | rules,
             each=each, arguments={"deaths": deaths, **arguments}) as job:  # fmt: skip
        died = 0.0
        for rank in dead:
            assert job.workers[rank].wait() == -signal.SIGKILL, job.report()
            died = time.monotonic()
        found = [one.result() for one in job.workers if one.spec.rank not in dead]
        job.end_in_order()
        return found, died


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_nothing_of_push_sum_is_lost_but_what_the_dead_had(way):
    found, _ = run(programs_survivors.push_sum, [2], way=way, steps=200)
    before, after = (sum(one["totals"][i] for one in found) for i in range(2))
    assert before == pytest.approx(after, rel=1e-9)
    assert 0 < after < 4
    assert len({round(one["value"], 6) for one in found}) == 1, found


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_what_needs_the_dead_fails_soon_and_names_it_and_the_rest_goes_on(way):
    found, died = run(programs_survivors.needs_all, [2], way=way)
    for one in found:
        assert "worker 2" in one["text"], found
        assert "worker 2" in one["again"], found
        assert one["at"] - died < slowed(LIMIT_S)
        assert one["mean"] == 1.0
        assert one["lost"] == [2]
        assert one["total"] == 3.0
        assert 2 not in one["rows"]
        assert "use allreduce()" in one["refusal"]


@pytest.mark.parametrize(("way", "graph"), [("memory", "one peer"), ("tcp", "full")])
def test_what_is_encoded_goes_on_too(way, graph):
    found, _ = run(programs_survivors.mixes_coded, [1], way=way, steps=120, graph=graph)
    assert all(one["lost"] == [1] for one in found), found
    assert max(one["slowest"] for one in found) < slowed(LIMIT_S)
    spread = np.ptp([one["value"] for one in found], axis=0).max()
    assert spread < 1e-3, spread


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_windows_of_the_dead_are_refused_and_the_others_live(way):
    found, died = run(programs_survivors.puts, [2], way=way, at_s=0.6)
    for rank, one in zip((0, 1, 3), found, strict=True):
        assert all("worker 2" in one[what] for what in ("text", "again", "got")), found
        assert one["at"] - died < slowed(LIMIT_S)
        assert one["lost"] == [2]
        assert one["value"] == [pytest.approx(4 / 3)] * 2, (rank, one)
        assert one["freed"]
        assert one["mean"] == pytest.approx(4 / 3)


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_windows_are_created_and_freed_by_all_who_are_left_while_somebody_dies(way):
    for _ in range(3):
        found, _ = run(programs_survivors.creates, [2], way=way, at_s=random.uniform(0.02, 0.3),
                       rounds=250)  # fmt: skip
        assert all(not one["errors"] for one in found), found
        assert max(one["slowest"] for one in found) < slowed(LIMIT_S), found


@pytest.mark.parametrize("when", ["start", "later"])
def test_two_that_live_and_do_not_reach_each_other_are_not_both_kept(when):
    arguments = {"when": when, "steps": 50}
    with Job(programs_survivors.cut_apart, workers=4, servers=0, arguments=arguments,
             environment=WAYS["tcp"] | REWEIGHT) as job:  # fmt: skip
        found = {}
        for rank, worker in enumerate(job.workers):
            if worker.wait() == 0:
                found[rank] = worker.result()
            else:
                assert "PeerLostError" in worker.stderr()
        assert len(found) == 3, job.report()
        assert {2, 3} < found.keys()
        (lost,) = {0, 1} - found.keys()
        assert all(one["lost"] == [lost] and one["works"] for one in found.values()), found
        assert max(one["slowest"] for one in found.values()) < slowed(10.0), found


def test_rules_withstand_no_fewer_liars_when_an_honest_neighbour_is_lost():
    found, _ = run(programs_survivors.robust, [1], workers=3)
    trimmed, adaptive, clipped, taken = found[0]["found"]
    assert trimmed == 0.0  # of two arrays, the other may lie
    assert adaptive == 0.0
    assert clipped == pytest.approx(1 / 9)  # the liar weighs as much as before
    assert taken == 0.0  # what worker 1 had is not there, and zero times one's own is no array
    assert found[1]["found"][3] == 1e9


@pytest.mark.parametrize("dead", [[1], [2, 3], [0]])
def test_machines_mix_what_those_have_that_are_left(dead):
    names = "aabbc"
    each = {("worker", rank): {"FASTPS_MACHINE": name} for rank, name in enumerate(names)}
    found, _ = run(programs_survivors.machines, dead, workers=5, each=each, at_s=0.4)
    left = {name: [rank for rank in range(5) if names[rank] == name and rank not in dead]
            for name in "abc"}  # fmt: skip
    means = {name: sum(ranks) / len(ranks) for name, ranks in left.items() if ranks}
    wanted = sum(means.values()) / len(means)  # of three, all are neighbours
    for rank, one in zip([rank for rank in range(5) if rank not in dead], found, strict=True):
        assert "worker" in one["text"]
        assert one["mean"] == pytest.approx(wanted), found
        before = means.get("abc"["abc".index(names[rank]) - 1])
        own = means[names[rank]]
        moved = own if before is None else 0.25 * own + 0.75 * before
        assert one["moved"] == pytest.approx(moved), found


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_nothing_of_a_pushed_model_is_lost_but_what_the_dead_had(way):
    found, _ = run(programs_survivors.pushes, [1], way=way, at_s=0.3, steps=150)
    for what in range(2):
        before, after = (sum(one["totals"][i][what] for one in found) for i in range(2))
        assert before == pytest.approx(after, rel=1e-9), found
        assert after > 0
    assert sum(one["totals"][1][0] for one in found) < 4
    assert len({round(one["value"], 6) for one in found}) == 1, found
    assert all(one["lost"] == [1] for one in found)


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("memory", ["AdaptThenCombine", "AdaptWithCombine", "DecentLaM", "GradientTracking"]),
        ("memory", ["WinPut", "PullGet", "PushSum"]),
        ("tcp", ["PushSum", "PullGet", "WinPut"]),
    ],
)
def test_optimizers_go_on_training(way, names):
    optimizers = {name: rank for rank, name in enumerate(names, 1)}
    arguments = {"steps": 150, "optimizers": optimizers, "deaths": {}}
    with Job(programs_survivors.trains, workers=6, servers=0, arguments=arguments,
             environment=WAYS[way] | REWEIGHT) as job:  # fmt: skip
        for rank in optimizers.values():
            assert job.workers[rank].wait() == -signal.SIGKILL, job.report()
        for losses, lost in (job.workers[rank].result() for rank in (0, 5)):
            assert lost == list(optimizers.values())
            assert all(last < first / 10 for first, last in losses), losses
        job.end_in_order()


@pytest.mark.parametrize(
    ("way", "optimizer", "dead"),
    [("memory", "gradients", [1, 3]), ("tcp", "gradients", [0]), ("memory", "models", [2])],
)
def test_averages_of_all_are_the_same_on_all_who_are_left(way, optimizer, dead):
    dies_at = {str(rank): random.randint(3, 25) for rank in dead}
    arguments = {"steps": 40, "optimizer": optimizer, "dies_at": dies_at}
    with Job(programs_survivors.averages, workers=5, servers=0, arguments=arguments,
             environment=WAYS[way] | REWEIGHT) as job:  # fmt: skip
        for rank in dead:
            assert job.workers[rank].wait() == -signal.SIGKILL, job.report()
        found = [one.result() for one in job.workers if one.spec.rank not in dead]
        job.end_in_order()
    left = [rank for rank in range(5) if rank not in dead]
    for one in found:
        assert one["prints"] == found[0]["prints"]
        assert one["lost"] == sorted(dead)
        assert one["mean"] == pytest.approx(sum(left) / len(left))
        assert np.mean(one["losses"][-5:]) < one["losses"][0] / 2, one["losses"]
        assert len(one["texts"]) == len(dead)
        assert all(f"worker {rank}" in text
                   for rank, text in zip(sorted(dead), one["texts"], strict=True))  # fmt: skip


def test_who_was_stopped_for_too_long_is_left_out_and_hears_of_it():
    lease = {"FASTPS_LEASE_S": "1", "FASTPS_HEARTBEAT_S": "0.2"}
    with Job(programs_survivors.waits, workers=3, servers=0, arguments={"asks": True},
             environment=WAYS["memory"] | REWEIGHT | lease) as job:  # fmt: skip
        job.workers[2].wait_line("STEP", times=3)
        job.workers[2].send(signal.SIGSTOP)
        count = len(job.workers[0].lines)
        job.workers[0].wait_line("STEP", times=count + 50)
        job.workers[2].send(signal.SIGCONT)
        job.workers[2].wait()
        assert "worker 2" in job.workers[2].stderr()
        job.workers[1].send(signal.SIGKILL)
        job.workers[0].result()


def test_without_the_scheduler_too():
    with Job(programs_survivors.waits, workers=3, servers=0,
             environment=WAYS["tcp"] | REWEIGHT) as job:  # fmt: skip
        job.workers[2].wait_line("STEP", times=3)
        job.scheduler.send(signal.SIGKILL)
        for victim in (1, 2):
            count = len(job.workers[0].lines)
            job.workers[0].wait_line("STEP", times=count + 50)
            job.workers[victim].send(signal.SIGKILL)
        job.workers[0].result()


def test_the_launcher_lets_the_others_go_on_and_says_so(tmp_path):
    script = """
        import os, signal
        import numpy as np
        import fastps
        fastps.init()
        x = np.ones(9)
        for step in range(50):
            if fastps.rank() == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            x = fastps.neighbor_allreduce(x)
        report(float(x[0]))
        fastps.shutdown()
        if os.environ.get("ALL_FAIL"):
            raise SystemExit(3)
    """
    found = run_workers(script, tmp_path, workers=2, servers=0, environ=REWEIGHT)
    assert found.check().reports == ((1.0,), ())
    assert "was killed by SIGKILL; 1 of 2 workers continue without it" in found.stderr
    found = run_workers(
        script, tmp_path, workers=2, servers=0, environ=REWEIGHT | {"ALL_FAIL": "1"}
    )
    assert found.returncode == 128 + signal.SIGKILL
    assert "worker 0" in found.stderr


@pytest.mark.parametrize(("way", "dead", "deadline_s"), [("memory", 2, None), ("tcp", 0, 60.0)])
def test_what_servers_hold_is_trained_without_the_dead(way, dead, deadline_s):
    exchanges = 60
    found, _ = run(
        programs_survivors.held, [dead], servers=2, way=way, at_s=random.uniform(0.05, 0.6),
        exchanges=exchanges, deadline_s=deadline_s,
    )  # fmt: skip
    ours = sum(exchanges * 1000.0**rank for rank in range(4) if rank != dead)
    for word in ("rounds", "free"):
        values = {tuple(sorted(one[word])) for one in found}
        assert len(values) == 1, found  # the same for all who are left
        for value in values.pop():  # pieces may have more or less of the dead one
            share = (value - ours) / 1000.0**dead
            assert share == int(share) >= 0, (word, value, ours)
    assert all(one["lost"] == [dead] and one["slowest"] < 30 for one in found), found
