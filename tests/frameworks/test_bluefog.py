# SPDX-License-Identifier: Apache-2.0
"""BlueFog's tests and examples, with the import line changed, in jobs of four workers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import programs_bluefog  # noqa: E402
from fork_server import FORKING_PYTHON, forking  # noqa: E402
from harness import clean_environ  # noqa: E402
from job import run_job  # noqa: E402

import fastps.bluefog.torch as bf  # noqa: E402
from aids.timeline_rules import check_timeline  # noqa: E402

WORKERS = 4
MEMORY = {"FASTPS_SHARED_MEMORY": "1"}
LIMIT_S = 400
CONVEX = (
    "bluefog_consensus.py --data-size 1000 --max-iters 60 --virtual-topology star",
    "bluefog_consensus.py --data-size 1000 --max-iters 20 --enable-dynamic-topology",
    "bluefog_consensus.py --data-size 1000 --asynchronous-mode --enable-dynamic-topology",
    *(
        f"bluefog_optimization.py --method {method}"
        for method in ("diffusion", "exact_diffusion", "gradient_tracking", "push_diging")
    ),
    "bluefog_optimization.py --method exact_diffusion --task linear --topology ring",
)
TRAINED = (
    "bluefog_mnist.py",
    "bluefog_mnist.py --dist-optimizer win_put",
    "bluefog_mnist.py --dist-optimizer gradient_allreduce --disable-dynamic-topology",
    "bluefog_benchmark.py --model lenet",
    "bluefog_benchmark.py --batches-per-allreduce 2 --atc-style",
)


# BlueFog's parameters, in its order; ours may have more after them.
PARAMETERS = {
    **dict.fromkeys(
        ("allreduce", "allreduce_", "allreduce_nonblocking", "allreduce_nonblocking_"),
        "tensor average is_hierarchical_local name",
    ),
    **dict.fromkeys(
        ("broadcast", "broadcast_", "broadcast_nonblocking", "broadcast_nonblocking_"),
        "tensor root_rank name",
    ),
    **dict.fromkeys(("allgather", "allgather_nonblocking"), "tensor name"),
    **dict.fromkeys(
        ("neighbor_allgather", "neighbor_allgather_nonblocking"),
        "tensor src_ranks dst_ranks enable_topo_check name",
    ),
    **dict.fromkeys(
        ("hierarchical_neighbor_allreduce", "hierarchical_neighbor_allreduce_nonblocking"),
        "tensor self_weight src_machine_weights dst_machine_weights enable_topo_check name",
    ),
    **dict.fromkeys(
        ("pair_gossip", "pair_gossip_nonblocking"),
        "tensor target_rank self_weight pair_weight name",
    ),
    **dict.fromkeys(
        (
            f"{kind}{form}"
            for kind in ("win_put", "win_accumulate")
            for form in ("", "_nonblocking")
        ),
        "tensor name self_weight dst_weights require_mutex",
    ),
    **dict.fromkeys(("win_get", "win_get_nonblocking"), "name src_weights require_mutex"),
    "win_create": "tensor name zero_init",
    "win_free": "name",
    "win_update": "name self_weight neighbor_weights reset clone require_mutex",
    "win_update_then_collect": "name require_mutex",
    "win_mutex": "name for_self ranks",
    "get_win_version": "name",
    "win_associated_p": "name",
    **dict.fromkeys(("poll", "synchronize", "wait", "win_poll", "win_wait"), "handle"),
    "init": "topology_fn is_weighted",
    "set_topology": "topology is_weighted",
    "set_skip_negotiate_stage": "value",
    "timeline_start_activity": "tensor_name activity_name",
    "timeline_end_activity": "tensor_name",
    "timeline_context": "tensor_name activity_name",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank",
    "allreduce_parameters": "params",
    "DistributedGradientAllreduceOptimizer": "optimizer model num_steps_per_communication",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_bluefog_s_names(name):
    signature = inspect.signature(getattr(bf, name))
    theirs, ours = PARAMETERS[name].split(), list(signature.parameters.values())
    assert [one.name for one in ours][: len(theirs)] == theirs
    assert all(one.kind is one.KEYWORD_ONLY for one in ours[len(theirs) :])
    is_started = "Handle" in str(signature.return_annotation)
    assert is_started == ("nonblocking" in name), signature


@pytest.mark.parametrize("name", ["neighbor_allreduce", "neighbor_allreduce_nonblocking"])
def test_neighbor_allreduce_has_bluefog_s_parameters(name):
    signature = inspect.signature(getattr(bf, name))
    theirs = ["self_weight", "src_weights", "dst_weights", "enable_topo_check", "name"]
    assert set(theirs) < set(signature.parameters)
    assert all(signature.parameters[one].kind is inspect.Parameter.KEYWORD_ONLY for one in theirs)


def run(program, **how):
    return run_job(program, workers=WORKERS, servers=0, environment=MEMORY, timeout_s=110.0, **how)


def test_the_table_of_operations():
    assert run(programs_bluefog.table) == ["done"] * WORKERS


def test_machines():
    environment = MEMORY | {"BLUEFOG_NODES_PER_MACHINE": "2"}
    found = run_job(programs_bluefog.machines, workers=WORKERS, servers=0, environment=environment)
    assert found == ["done"] * WORKERS


def test_average_consensus():
    assert max(run(programs_bluefog.consensus)) < 1e-15


def test_regression_comes_down_to_the_noise():
    for found in run(programs_bluefog.regression):
        for name, error in found.items():
            assert error < (2 if "empty" in name else 1.5), found


def test_own_ways_of_its_programs():
    for said in run(programs_bluefog.own_ways):
        assert len(said) == 4, said  # once for each optimizer
        assert all(line.startswith("Unexpected behavior: more backward") for line in said)


def test_activities_are_in_the_timeline(tmp_path):
    folder = tmp_path / "run1"
    how = {"workers": 2, "servers": 0, "environment": MEMORY | {"BLUEFOG_TIMELINE": str(folder)}}
    assert run_job(programs_bluefog.shown, **how) == [True, True]
    found = check_timeline(folder / "timeline.json")["traceEvents"]
    for rank in (0, 1):
        mine = [(event["name"], event["args"].get("of")) for event in found
                if event["ph"] == "X" and event["pid"] == rank]  # fmt: skip
        for one in (("LOAD", "outer"), ("inside", "of it"), ("PREPARE", "x")):
            assert mine.count(one) == 1, mine
        assert mine.count(("FORWARD", "1")) == mine.count(("GRADIENT COMPT.", "0.weight")) == 3


def test_without_a_timeline_nothing_is_shown():
    assert run_job(programs_bluefog.shown, workers=2, servers=0, environment=MEMORY) == [False] * 2


def run_examples(folder: Path, lines: tuple[str, ...]) -> str:
    """Run examples one after the other, each of which asserts its result, in one job of four."""
    command = [str(FORKING_PYTHON), "-m", "fastps.launch.run", "-np", str(WORKERS)]
    done = subprocess.run(
        [*command, command[0], "tests/frameworks/programs_examples.py", str(folder), *lines],
        cwd=ROOT, env=forking(clean_environ()) | MEMORY | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S - 10, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(LIMIT_S)
def test_examples_agree_and_find_the_optimum(tmp_path):
    said = run_examples(tmp_path, CONVEX)
    errors = [float(found) for found in re.findall(r"first, ([\d.e-]+) at last", said)]
    assert len(errors) == 3 * WORKERS
    assert max(errors) < 1e-6
    found = re.findall(r"\[(\w+)\] rank \d: gradient ([\d.e-]+), apart ([\d.e-]+)", said)
    assert len(found) == 5 * WORKERS
    exact = [float(norm) for method, norm, _ in found if method != "diffusion"]
    assert max(exact) < 1e-6
    assert min(float(apart) for method, _, apart in found if method == "diffusion") > 1e-4


@pytest.mark.timeout(LIMIT_S)
def test_examples_learn_digits_and_random_pictures(tmp_path):
    pytest.importorskip("sklearn")
    said = run_examples(tmp_path, TRAINED)
    accuracies = [float(found) for found in re.findall(r"all models: ([\d.]+) %", said)]
    assert len(accuracies) == 3
    assert min(accuracies) > 85, said
    assert len(re.findall(r"Total img/sec on 4 CPU\(s\): [\d.]+ \+-", said)) == 2
