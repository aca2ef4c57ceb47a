# SPDX-License-Identifier: Apache-2.0
"""Scripts in the shape of the examples of Horovod and BytePS run with one line changed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from fork_server import FORKING_PYTHON, forking  # noqa: E402
from harness import clean_environ  # noqa: E402


def run(
    example: str, *words: str, launch: tuple[str, ...] = ("-np", "2"), shared: str = "1",
    codes: tuple[int, ...] = (0,),
) -> str:  # fmt: skip
    """Run an example as two workers, or as it is launched; give what it printed."""
    command = [str(FORKING_PYTHON), "-m", "fastps.launch.run", *launch, "--timeout", "200"]
    command += [str(FORKING_PYTHON), f"examples/{example}.py", *words]
    environ = forking(clean_environ()) | {"PYTHONPATH": str(ROOT), "FASTPS_SHARED_MEMORY": shared}
    job = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=230, check=False
    )
    assert job.returncode in codes, job.stdout + job.stderr
    return job.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words", [["--fp16-allreduce"], ["--use-mixed-precision"], ["--use-adasum", "--lr", "0.05"]]
)
def test_digits_are_learnt(words: list[str]) -> None:
    said = run("horovod_mnist", *words)
    accuracies = [float(found) for found in re.findall(r"Accuracy: ([\d.]+)%", said)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 60, said


@pytest.mark.timeout(240)
def test_a_worker_that_is_lost_changes_no_weight() -> None:
    whole = run("horovod_elastic")
    words = ("--lose-worker-at", "7")
    again = run("horovod_elastic", *words, launch=("-np", "2", "--restarts", "2"))
    assert re.findall(r"epoch (\d): .* before: (\d)", whole) == [
        ("1", "0"),
        ("2", "0"),
        ("3", "0"),
    ]
    assert re.findall(r"epoch (\d): .* before: (\d)", again) == [
        ("1", "0"),
        ("2", "1"),
        ("3", "1"),
    ]
    assert re.findall("weights: .*", again) == re.findall("weights: .*", whole) != []


@pytest.mark.timeout(240)
def test_survivors_of_an_elastic_job_share_the_data_that_is_left() -> None:
    words = ("--lose-worker-at", "7", "--batch-size", "16")
    said = run("horovod_elastic", *words, launch=("-np", "3", "--min", "1"))
    assert re.findall(r"epoch (\d): .* before: (\d)", said) == [
        ("1", "0"),
        ("2", "1"),
        ("3", "1"),
    ]
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", said)]
    assert losses[2] < losses[1] < losses[0], said


@pytest.mark.timeout(240)
def test_synthetic_benchmark() -> None:
    assert re.search(
        r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-", run("horovod_synthetic_benchmark")
    )


@pytest.mark.timeout(480)
def test_pictures_are_learnt_and_a_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    words = ("--folder", str(tmp_path), "--batches-per-allreduce", "2")
    found = re.findall(
        r"epoch (\d): .* accuracy ([\d.]+)%", run("horovod_imagenet", *words, "--epochs", "1")
    )
    more = ("--fp16-allreduce", "--gradient-predivide-factor", "2", "--epochs", "2")
    found += re.findall(
        r"epoch (\d): .* accuracy ([\d.]+)%", run("horovod_imagenet", *words, *more, shared="0")
    )
    assert [number for number, _ in found] == ["1", "2"]  # the second job began with the second
    assert float(found[-1][1]) > 90, found
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.timeout(240)
def test_digits_are_learnt_by_a_script_for_byteps() -> None:
    said = run("byteps_mnist", "--no-cuda", "--fp16-pushpull")
    accuracies = [float(found) for found in re.findall(r"Accuracy: ([\d.]+)%", said)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 60, said


@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", [[], ["--ddp"], ["--cross-barrier"]])
def test_benchmarks_for_byteps(words: list[str]) -> None:
    said = run("byteps_benchmark", "--num-iters", "2", *words)
    assert re.search(r"Total img/sec on 2 CPU\(s\): [\d.]+ \+-", said)


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_a_bound_lets_workers_go_on_while_one_pauses() -> None:
    """The short form of what docs/async.md has figures of; it is nearer to its thresholds."""
    said = run(
        "asynchronous", "--seeds", "1", "--steps", "60", launch=("-np", "3", "-s", "1"),
        shared="0", codes=(0, 1),
    )  # fmt: skip
    found = {
        way: (float(speed), float(points))
        for way, speed, points in re.findall(
            r"\] (.+?) +[\d.]+ ms a step, ([\d.]+) x, accuracy [\d.]+ \(([-+][\d.]+) points", said
        )
    }
    assert set(found) == {"in step", "staleness 8", "staleness 32", "no bound", "PipeSGD"}, said
    assert found["staleness 32"][0] > 1.2, said
    assert all(points > -4 for _, points in found.values()), said


@pytest.mark.timeout(240)
def test_error_feedback_is_what_lets_a_model_be_learnt() -> None:
    """The short form of what docs/compression.md has figures of."""
    only = "topk 1 %;topk 1 %, no feedback"
    said = run(
        "compression_models", "--seeds", "1", "--steps", "200", "--only", only,
        launch=("-np", "2", "-s", "1"), shared="0", codes=(0, 1),
    )  # fmt: skip
    _, fed, lost = (float(found) for found in re.findall(r"accuracy ([\d.]+)", said))
    assert fed > lost + 0.05, said


@pytest.mark.timeout(240)
@pytest.mark.parametrize("liars", [0, 1])
def test_rare_exchanges_learn_with_few_bytes_and_beside_liars(tmp_path: Path, liars: int) -> None:
    """The short form of what docs/slow-links.md has figures of."""
    runs = tmp_path / "runs.jsonl"
    run(
        "diloco", "--seeds", "1", "--steps", "80", "--only", "Digits", "--liars", str(liars),
        "--json", str(runs), launch=("-np", str(4 + liars), "-s", "1"), shared="0",
    )  # fmt: skip
    example = runpy.run_path(str(ROOT / "examples" / "diloco.py"))
    table = example["gathered"]([json.loads(line) for line in runs.read_text().splitlines()])
    example["report"](table)
    (rows,) = table.values()
    base = rows[0][1][0]
    loss, share = ({way.name: row[0][i] / base[i] for way, row in rows} for i in (0, 1))
    exact, coded = ("liars, multi-Krum", "liars, multi-Krum, int4") if liars else (
        "DiLoCo", "DiLoCo, int4")  # fmt: skip
    assert 20 * share[exact] == pytest.approx(1, rel=0.02), share
    assert share[coded] < 1 / 160, share
    assert max(loss[exact], loss[coded]) < 1.2, loss
    assert not liars or loss["liars, average"] > 2, loss
