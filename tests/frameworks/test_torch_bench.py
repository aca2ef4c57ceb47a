# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training steps: its arithmetic, its models, and one small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench import _common, _train_peer, train_torch  # noqa: E402


def test_models_have_the_sizes_that_are_claimed() -> None:
    counts = {
        name: sum(p.numel() for p in make().parameters())
        for name, (make, _) in _train_peer.MODELS.items()
    }
    assert counts == {"mlp": 269_322, "wide": 25_178_112, "many": 211_200}
    assert set(train_torch.MODELS) == set(counts) == set(train_torch.STEPS)


def test_added_time_and_ratio_are_taken_within_rounds() -> None:
    report = _common.Report("train_torch", unit="ms")
    found = {
        "local": [0.010, 0.020, 0.010],
        "gloo": [0.014, 0.028, 0.012],
        "ddp": [0.011, 0.022, 0.011],
    }
    train_torch.add_rows(report, "mlp", 5, found)
    rows = {row["name"]: row for row in report.rows}
    assert rows["ddp"]["added"] == pytest.approx(1.0)
    assert rows["gloo"]["added"] == pytest.approx(4.0)
    assert rows["ddp"]["ratio"] == pytest.approx(0.25)
    assert rows["ddp"]["worst_ratio"] == pytest.approx(0.5)
    assert rows["local"]["median"] == pytest.approx(10.0)


def test_a_base_that_adds_nothing_gives_no_ratio() -> None:
    report = _common.Report("train_torch", unit="ms")
    train_torch.add_rows(report, "mlp", 5, {"local": [0.01], "gloo": [0.009], "ddp": [0.011]})
    assert all(row["ratio"] != row["ratio"] for row in report.rows)


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_torch.parse(["--models", "mlp,other"])
    assert "unknown models: other" in capsys.readouterr().err


def test_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")}
    done = subprocess.run(
        [
            *(sys.executable, "tools/bench/train_torch.py", "--systems", "local,ddp"),
            *("--models", "mlp", "--runs", "1", "--steps", "2", "--json", str(path)),
            *("--set", "FASTPS_SPIN_US=0"),
        ],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["local", "ddp"]
    assert rows[1]["model"] == "mlp"
    assert rows[1]["median"] > 0
    assert rows[1]["settings"] == ["FASTPS_SPIN_US=0"]
