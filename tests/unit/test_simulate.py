# SPDX-License-Identifier: Apache-2.0
"""The simulator against theory, against itself, and against what was measured."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.contract.partition import Placement, cut_tensor, server_weights

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import simulate
from tools.bench import shaped
from tools.simulator import cases, exact, models, ring, symmetric
from tools.simulator.plan import (
    Cluster,
    Network,
    Tensor,
    cut,
    optimum_s,
    ring_bound_s,
)

MIB = 1 << 20
NETWORK = Network(10e9)
SHARED = Cluster(4, 0, turns="weighted", credit_rule="urgent")
# Milliseconds on hosts of tools/netlab.py with queues of 20 ms: workers, servers apart, rate,
# bytes. Medians of shaped.py on a machine with two cores: where all servers are alike, with frames
# and credit as below. Fewer servers than workers: the workers serve as well.
MEASURED_WITH = "FASTPS_CHUNK_BYTES=65536,FASTPS_CREDIT_BYTES=524288"
MEASURED = [
    (4, 4, "200mbit", "256K", 62.05),
    (4, 4, "200mbit", "1M", 74.26),
    (4, 4, "200mbit", "4M", 236.1),
    (4, 4, "200mbit", "16M", 771.2),
    (4, 4, "200mbit", "64M", 2954.0),
    (4, 0, "200mbit", "16M", 1137.0),
    (4, 1, "200mbit", "16M", 982.2),
    (4, 2, "200mbit", "16M", 896.3),
    (4, 3, "200mbit", "16M", 850.0),
    (2, 2, "100mbit", "4M", 391.1),
    (3, 3, "400mbit", "32M", 716.9),
]


def step_ms(model: str, cluster: Cluster, network: Network, simulator, *, overlap="none") -> float:
    known = models.make(model)
    plan = models.schedule(
        known, compute_s=known.compute_ms / 1e3, element_bytes=2, overlap=overlap
    )
    outcome = simulator.simulate(plan.tensors, cluster, network)
    return models.step_s(plan, outcome.done_s, overlap)


# ---- against theory


@pytest.mark.parametrize("servers", range(5))
@pytest.mark.parametrize("simulator", [exact, symmetric])
def test_large_tensors_take_the_optimum(simulator, servers):
    cluster, network = replace(SHARED, servers=servers), Network(1e9)
    took = simulator.simulate([Tensor(64 * MIB)], cluster, network).end_s
    assert 1 <= took / optimum_s(64 * MIB, cluster, network) <= 1.03


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_servers_apart_take_the_busiest_link(servers):
    cluster = Cluster(4, servers, is_colocated=False)
    took = exact.simulate([Tensor(64 * MIB)], cluster, NETWORK).end_s
    theory = max(1, 4 / servers) * 64 * MIB / NETWORK.bytes_per_s
    assert 1 <= took / theory <= 1.03


def test_one_peer_takes_one_message_for_each_bucket():
    network, cluster = Network(8e9, latency_s=1e-4), Cluster(64, 0)
    found = ring.simulate(
        [Tensor(8 * MIB), Tensor(8 * MIB)], cluster, network, bucket_bytes=MIB, has_ring=False
    )
    assert found.end_s == pytest.approx(16 * MIB / network.bytes_per_s + 2 * network.head_s)
    assert found.sent_bytes["worker"] == 16 * MIB


def test_an_average_with_one_peer_costs_the_same_for_any_number_of_machines(capsys):
    words = (
        "figure --model resnet50 --local 1 --rate 25gbit --workers 16,256 --peer --overlap full"
    )
    assert simulate.main([*words.split(), "--json"]) == 0
    few, many = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert few["one peer"] == many["one peer"] > 0.95


def test_rings_take_their_bytes_and_their_steps():
    cluster, network = Cluster(8, 0), Network(10e9, latency_s=1e-3)
    took = ring.simulate([Tensor(8 * MIB)], cluster, network).end_s
    assert took == pytest.approx(ring_bound_s(8 * MIB, 8, network) + 14 * network.head_s)
    two = ring.simulate([Tensor(20 * MIB), Tensor(20 * MIB)], cluster, network).done_s
    assert two[1] == pytest.approx(2 * two[0])  # two buckets, one after the other


@pytest.mark.parametrize("simulator", [exact, symmetric])
@pytest.mark.parametrize("servers", [0, 1, 3, 4])
def test_links_carry_the_bytes_of_the_formula(simulator, servers):
    cluster = replace(SHARED, servers=servers)
    moved = simulator.simulate([Tensor(16 * MIB)], cluster, NETWORK).sent_bytes
    shape = shaped.make_shape(4, servers, "auto")
    assert moved["worker"] == pytest.approx(shape.worker_bytes(16 * MIB), rel=1e-3)
    assert moved["server"] == pytest.approx(shape.server_bytes(16 * MIB), rel=1e-3)


@given(n=st.integers(2, 40), data=st.data())
def test_the_benchmark_and_the_library_know_the_same_shares(n, data):
    k = data.draw(st.integers(0, n))
    weights = server_weights(n, k, is_colocated=True)
    shape = shaped.make_shape(n, k, "auto")
    own = weights[-1] / sum(weights) if k < n else 0.0
    assert shape.own_share == pytest.approx(own)
    network, cluster = Network(1e9), Cluster(n, k)
    assert shape.bound_s(MIB, network.bytes_per_s) == pytest.approx(
        optimum_s(MIB, cluster, network)
    )


def test_credit_brings_unlike_servers_near_the_optimum():
    for servers, most in ((1, 1.06), (2, 1.06), (3, 1.12)):
        over = []
        for credit_bytes in (0, 512 << 10):
            cluster = Cluster(4, servers, turns="tcp", credit_bytes=credit_bytes)
            took = exact.simulate([Tensor(32 * MIB)], cluster, NETWORK).end_s
            over.append(took / optimum_s(32 * MIB, cluster, NETWORK))
        assert 1 < over[0] < min(most, over[1] - 0.01)


def test_tensors_are_cut_as_the_library_cuts_them():
    tensors, cluster = [Tensor(10 * MIB), Tensor(1000), Tensor(0)], Cluster(3, 1)
    placement = Placement(cluster.weights)
    pieces = [
        cut_tensor(tensor.nbytes, partition_bytes=4096000, placement=placement, tensor_id=number)
        for number, tensor in enumerate(tensors)
    ]
    assert cut(tensors, cluster) == pieces


def test_one_machine_sums_on_its_bus():
    cluster = Cluster(1, 0, local=4)
    network = Network(1e9, bus_bytes_per_s=1e6)
    for simulator in (exact, symmetric):
        done = simulator.simulate([Tensor(1000, 1.0), Tensor(1000, 1.0)], cluster, network).done_s
        assert done == pytest.approx([1.0015, 1.00225])  # 3/4 of each, in and out


# ---- against itself


@pytest.mark.parametrize("servers", [0, 2, 4])
@pytest.mark.parametrize("turns", ["tcp", "weighted"])
@pytest.mark.parametrize("machines", [4, 8])
@pytest.mark.parametrize("credit_bytes", [0, 512 << 10])
def test_one_machine_stands_for_all(credit_bytes, machines, turns, servers):
    cluster = replace(
        SHARED, machines=machines, servers=servers, turns=turns, credit_bytes=credit_bytes
    )
    tensor = [Tensor(32 * MIB)]
    times = [one.simulate(tensor, cluster, NETWORK).end_s for one in (exact, symmetric)]
    # Of unlike servers, the credit of each counts for all of its kind.
    near, nearer = (0.07, 0.07) if servers == 2 and not credit_bytes else (0.04, 0.03)
    assert times[1] == pytest.approx(times[0], rel=nearer)
    steps = [step_ms("resnet50", cluster, NETWORK, one) for one in (exact, symmetric)]
    assert steps[1] == pytest.approx(steps[0], rel=near)


TENSORS = st.lists(
    st.builds(
        Tensor,
        st.integers(0, 2 * MIB),
        ready_s=st.floats(0, 2e-3),
        priority=st.integers(-3, 0),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(
    tensors=TENSORS,
    machines=st.integers(2, 5),
    servers=st.integers(0, 5),
    factor=st.floats(1.1, 8),
    simulator=st.sampled_from([exact, symmetric]),
)
def test_more_bandwidth_is_never_slower(tensors, machines, servers, factor, simulator):
    cluster = Cluster(machines, min(servers, machines), credit_rule="urgent")
    slow = simulator.simulate(tensors, cluster, NETWORK).end_s
    fast = simulator.simulate(tensors, cluster, Network(NETWORK.rate_bps * factor)).end_s
    assert fast <= slow * 1.02 + 1e-5  # frames meet in another order


@settings(max_examples=10)
@given(
    nbytes=st.integers(16 * MIB, 24 * MIB),
    machines=st.integers(3, 6),  # with two, a third that serves gains nothing
    servers=st.integers(0, 5),
    simulator=st.sampled_from([exact, symmetric]),
)
def test_more_machines_that_serve_are_never_slower(nbytes, machines, servers, simulator):
    few = replace(SHARED, machines=machines, servers=min(servers, machines - 1))
    more = replace(few, servers=few.servers + 1)
    network = Network(1e9)
    took = [simulator.simulate([Tensor(nbytes)], one, network).end_s for one in (few, more)]
    assert took[1] <= took[0] * 1.03


@settings(max_examples=20)
@given(tensors=TENSORS, machines=st.integers(2, 4), rule=st.sampled_from(["loans", "urgent"]))
def test_runs_are_alike_and_everything_arrives(tensors, machines, rule):
    cluster = Cluster(machines, 1, credit_rule=rule, credit_bytes=128 << 10)
    for simulator in (exact, symmetric):
        first, second = (simulator.simulate(tensors, cluster, NETWORK) for _ in range(2))
        assert first == second
        for tensor, done in zip(tensors, first.done_s, strict=True):
            assert done >= tensor.ready_s or not tensor.nbytes


@pytest.mark.parametrize("simulator", [exact, symmetric])
def test_priority_brings_the_front_layers_early(simulator):
    plan = models.schedule(models.make("resnet50"), compute_s=0.05, element_bytes=4)
    cluster = replace(SHARED, servers=4)
    urgent = simulator.simulate(plan.tensors, cluster, NETWORK)
    fifo = simulator.simulate(plan.tensors, replace(cluster, has_priority=False), NETWORK)
    assert urgent.end_s == pytest.approx(fifo.end_s, rel=0.1)
    front = range(20)
    assert max(urgent.done_s[i] for i in front) < 0.8 * max(fifo.done_s[i] for i in front)
    assert models.step_s(plan, urgent.done_s, "full") < models.step_s(plan, fifo.done_s, "full")


def test_workers_out_of_step_borrow_unless_only_the_urgent_counts():
    plan = models.schedule(models.make("resnet50"), compute_s=0.18, element_bytes=4)
    for credit_bytes in (0, 512 << 10):
        loans, urgent = (
            exact.simulate(
                plan.tensors, Cluster(4, 0, credit_rule=rule, credit_bytes=credit_bytes), NETWORK
            )
            for rule in ("loans", "urgent")
        )
        assert urgent.loans == 0
        assert urgent.end_s < loans.end_s


# ---- models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("vgg16", 138_357_544), ("bert-large", 336_226_108)],
)
def test_models_have_their_parameters(name, parameters):
    assert models.make(name).parameters == parameters


def test_a_step_waits_for_what_it_needs():
    layers = (models.Layer("front", (1,), 1.0), models.Layer("back", (1,), 2.0))
    plan = models.schedule(models.Model("m", layers, 0, 4, ""), compute_s=9, element_bytes=4)
    assert [tensor.ready_s for tensor in plan.tensors] == pytest.approx([6, 4])
    assert [tensor.priority for tensor in plan.tensors] == [0, -1]
    assert plan.forward_s == pytest.approx((1, 2))
    assert models.step_s(plan, [6, 6], "full") == pytest.approx(9)
    assert models.step_s(plan, [7, 9], "full") == pytest.approx(11)
    assert models.step_s(plan, [7, 9], "backward") == pytest.approx(12)


# ---- against measurements


def lines_of(measured: list[tuple[int, int, str, str, float]]) -> str:
    lines = [
        {
            "bench": "shaped", "name": "fastps", "workers": n, "servers": k, "colocated": k < n,
            "rate": rate, "queue_ms": 20.0, "size": size, "median": ms,
            "settings": MEASURED_WITH if k == n else "",
        }
        for n, k, rate, size, ms in measured
    ]  # fmt: skip
    gloo = {"bench": "shaped", "name": "gloo", "size": "64M", "median": 1.0}
    return "".join(json.dumps(line) + "\n" for line in [gloo, *lines])


def test_measured_times_are_met(tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    path.write_text(lines_of(MEASURED))
    assert simulate.main(["check", str(path)]) == 0
    assert f"0 of {len(MEASURED)} off" in capsys.readouterr().out


def test_a_measured_time_that_is_far_off_is_told(tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    path.write_text(lines_of([MEASURED[1], (*MEASURED[3][:4], 2 * MEASURED[3][4])]))
    assert simulate.main(["check", str(path), "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["is_near"] for row in rows] == [True, False]


def test_settings_of_a_measurement_are_simulated():
    line = {"workers": 4, "servers": 0, "colocated": True, "settings": "FASTPS_CHUNK_BYTES=32768"}
    cluster = cases.measured_cluster(line)
    assert (cluster.chunk, cluster.is_colocated, cluster.link_credit(0)) == (
        32768,
        True,
        256 << 10,
    )


@pytest.mark.parametrize("text", ["", "{}\n", "no JSON\n"])
def test_a_file_without_measurements_is_refused(text, tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    path.write_text(text)
    assert simulate.main(["check", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_shapes_of_the_benchmark():
    assert shaped.make_shape(4, 4, "auto") == shaped.Shape(4, 4, False)
    assert shaped.make_shape(4, 3, "auto") == shaped.Shape(4, 3, True)
    assert shaped.make_shape(4, 2, "off") == shaped.Shape(4, 2, False)
    with pytest.raises(SystemExit, match="nothing could sum"):
        shaped.make_shape(4, 0, "off")


# ---- the command


def rows_of(capsys, *arguments: str) -> list[dict[str, object]]:
    assert simulate.main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_step_shows_rings_and_servers(capsys):
    arguments = ["--model", "bert-large", "--workers", "256", "--local", "8", "--overlap", "none"]
    rows = rows_of(capsys, "step", *arguments, "--servers", "0,8,16,32")
    assert [row["servers"] for row in rows] == ["", 0, 8, 16, 32]
    efficiency = [float(str(row["efficiency"])) for row in rows]
    assert efficiency == sorted(efficiency)
    assert 0.6 < efficiency[0] < 0.8 < efficiency[-1] < 0.95  # published: 0.7 and 0.9


def test_tensor_shows_every_size_and_number_of_servers(capsys):
    rows = rows_of(capsys, "tensor", "--servers", "0,4", "--bytes", "1M,4M", "--rate", "1gbit")
    found = [(row["bytes"], row["servers"], row["mode"]) for row in rows]
    assert found == [(size, k, "exact") for size in (MIB, 4 * MIB) for k in (0, 4)]


def test_tables_are_printed(capsys):
    assert simulate.main(["figure", "--model", "resnet50", "--workers", "8,16"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[-3:]
    assert head.split()[:3] == ["workers", "machines", "ring"]
    assert [row.split()[0] for row in rows] == ["8", "16"]


def test_plots_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    common = ["--model", "resnet50", "--plot", str(path)]
    assert simulate.main(["figure", "--workers", "8,16", *common]) == 0
    assert "k = n/2" in path.read_text()
    assert simulate.main(["step", "--workers", "16", *common]) == 0
    assert path.stat().st_size > 1000


def test_without_matplotlib_the_cure_is_named(monkeypatch, tmp_path, capsys):
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    arguments = ["--model", "resnet50", "--workers", "16", "--plot", str(tmp_path / "x.png")]
    assert simulate.main(["step", *arguments]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["step", "--workers", "9", "--local", "8"], "do not fill machines"),
        (["tensor", "--servers", "0", "--apart"], "not 0"),
        (["tensor", "--rate", "fast"], "is not a rate"),
    ],
)
def test_impossible_cases_are_refused(arguments, what, capsys):
    assert simulate.main(arguments) == 2
    assert what in capsys.readouterr().err
