# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say, by the command that stands in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from fork_server import forking  # noqa: E402
from harness import clean_environ  # noqa: E402

EXAMPLES = ROOT / "examples"
TOGETHER = (
    "sampler.py",
    "mixed_precision.py",
    "clip_and_accumulate.py",
    "checkpoint.py {folder}/digits",
    "checkpoint.py {folder}/digits",
    "resume.py {folder}/model.pt",
    "resume.py {folder}/model.pt",
    "ddp_port.py",
    "recommend.py",
    "gpt_text.py --steps 60",
)
LIMIT_S = 230


def run(*command: object, **environ: str) -> str:
    """Run a command with this interpreter's programs first; give what it printed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, text=True, timeout=LIMIT_S, check=False,
        env=forking(clean_environ()) | {"PYTHONPATH": str(ROOT)} | environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(LIMIT_S + 10)
def test_examples_of_torch_learn_on_two_workers(tmp_path: Path) -> None:
    runner = "tests/frameworks/programs_examples.py"
    said = run("fastps-run", "-np", "2", "python", runner, tmp_path, *TOGETHER)
    assert [len(re.findall(rf"== {line.split()[0]}", said)) for line in TOGETHER] == [
        2 * sum(other == line for other in TOGETHER) for line in TOGETHER
    ]
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 2 * len(TOGETHER)
    assert said.count("epochs 0 to 9") == said.count("epochs 10 to 19") == 2
    assert max(losses) < 10, said  # an untrained layer of ten inputs has about 11
    assert max(map(float, re.findall(r"loss ([\d.]+) nats", said))) < 3.3, said  # of 4.6
    assert max(map(float, re.findall(r"loss ([\d.]+) \(zero", said))) < 0.5, said  # of 4


def test_the_table_lists_every_example() -> None:
    listed = re.findall(r"^\| `(\S+)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    assert sorted(listed) == sorted(names)


@pytest.mark.timeout(LIMIT_S + 10)
def test_lightning_fits_over_the_backend() -> None:
    pytest.importorskip("lightning")
    said = run("torchrun", "--nproc-per-node", "2", "examples/lightning_fit.py")
    assert len(re.findall(r"40 steps, loss 0\.\d{4}", said)) == 2, said


@pytest.mark.timeout(LIMIT_S + 10)
def test_the_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=LIMIT_S).execute()
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "[1. 1. 1.]" in said
    assert "[2. 2. 2.]" in said


@pytest.mark.timeout(LIMIT_S + 10)
def test_scripts_for_several_machines_start_each(tmp_path: Path) -> None:
    """Two launchers of this machine stand for two machines, without and with SLURM's commands."""
    program = tmp_path / "who.py"
    program.write_text(
        "import fastps as f\nf.init()\nprint(f.rank(), 'of', f.size())\nf.shutdown()"
    )
    for name, text in {
        "scontrol": "echo 127.0.0.1",
        "srun": 'SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; wait',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    said = run(
        "bash", "-c", f'PATH="{tmp_path}:$PATH" exec examples/slurm.sh {program}',
        HOME=str(tmp_path), SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="n[0-1]",
        SLURM_NNODES="2", SLURM_PROCID="0", SLURM_NTASKS="2", WORKERS="1",
    )  # fmt: skip
    assert "0 of 2" in said
    assert "1 of 2" in said
    assert not list(tmp_path.glob(".fastps-*")), "the token is left"


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_validator_keeps_random_lies_out_at_each_workers_pace(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "runs.jsonl"
    run(
        "fastps-run", "-np", "4", "-s", "1", "-v", "1", "python", "examples/zenops.py",
        "--asynchronous", "--seeds", "1", "--rounds", "20", "--json", file,
    )  # fmt: skip
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    ends = {(line["rule"], line["attack"]): line["accuracy"] for line in lines}
    assert len(ends) == len(lines) == 8
    assert all(len(line["curve"]) == 20 for line in lines)
    assert ends["Zeno++", "random 1"] > ends["FedAsync", "random 1"] + 0.2, ends
    wrong = {(line["rule"], line["attack"]): line["false_negatives"] for line in lines}
    assert wrong["FedAsync", "random 1"] == 1
    assert wrong["FedAsync", "none"] == 0
    assert wrong["Zeno++", "negative 2"] < 0.3, wrong


@pytest.mark.timeout(LIMIT_S + 10)
def test_the_worst_attack_on_rules_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    said = run(
        "python", "examples/byzantine.py", "--grid", "--rules", "average", "CAF", "--before", "",
        "--attacks", "best inner product", "infinity", "--liars", "2", "--alphas", "1",
        "--seeds", "0", "--compare", "byzfl", "--plot", tmp_path / "worst.png",
    )  # fmt: skip
    rows = {line[:26].strip(): line[26:].split() for line in said.splitlines()}
    assert float(rows["CAF"][0].strip("*")) > float(rows["average"][0].strip("*")) + 0.2, said
    assert rows["CAF"][1:] == rows["average"][1:] == ["best", "inner", "product"]
    assert ("byzfl is not compared" in said) != ("byzfl: CAF" in rows)
    assert (tmp_path / "worst.png").stat().st_size > 1000


@pytest.mark.timeout(LIMIT_S + 10)
def test_in_step_zeno_stands_what_the_mean_does_not(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "runs.jsonl"
    run(
        "fastps-run", "-np", "8", "-s", "1", "-v", "1", "python", "examples/zenops.py",
        "--seeds", "1", "--only", "mean", "Zeno", "--json", file,
    )  # fmt: skip
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    ends = {(line["rule"], line["attack"], line["control"]): line["accuracy"] for line in lines}
    assert len(ends) == 12
    assert all(len(line["curve"]) == 40 for line in lines)
    assert abs(ends["Zeno", "none", ""] - ends["mean", "none", ""]) <= 0.02, ends  # of one seed
    for attack in ("negative 6", "random 1"):
        assert ends["mean", attack, ""] < 0.6, ends
        assert ends["Zeno", attack, ""] > 0.94, ends
    most = "6 of 8 negative 1"
    assert ends["mean", most, ""] < 0.2, ends
    assert ends["Zeno", most, ""] > 0.92, ends
    assert ends["Zeno", "none", "its labels flipped"] < ends["Zeno", "none", ""] - 0.05, ends
    assert ends["Zeno", "none", "no steps of its own"] < 0.5, ends
