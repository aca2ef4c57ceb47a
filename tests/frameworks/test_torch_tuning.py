# SPDX-License-Identifier: Apache-2.0
"""Jobs that tune their settings while they train: it ends, all agree, and no bit changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

from fastps.session.autotune import BUCKETS, CREDITS, PARTITIONS  # noqa: E402

PROGRAM = Path(__file__).with_name("programs_torch_tuning.py")
CHOSEN = ("autotune_credit_bytes", "autotune_partition_bytes", "autotune_bucket_bytes")


@pytest.mark.parametrize(
    ("is_wrapped", "servers", "environ"),
    [
        (False, 2, {"FASTPS_SHARED_MEMORY": "0", "HOROVOD_AUTOTUNE": "1"}),
        (True, 0, {"FASTPS_AUTOTUNE": "1"}),
    ],
)
def test_what_is_tuned_changes_no_bit(tmp_path, is_wrapped, servers, environ):
    script = f"import sys\nsys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    script += f"import programs_torch_tuning as p\nreport(p.everything({is_wrapped}))\n"
    environ = environ | {"FASTPS_AUTOTUNE_STEPS": "2"}
    job = run_workers(script, tmp_path, servers=servers, environ=environ).check()
    (one,), (other,) = job.reports
    assert one["autotune_is_over"]
    assert other["autotune_is_over"]
    assert [one[word] for word in CHOSEN] == [other[word] for word in CHOSEN]
    assert one["autotune_credit_bytes"] in (0, *CREDITS)
    assert one["autotune_partition_bytes"] in (4096000, *PARTITIONS)
    assert one["autotune_bucket_bytes"] in (1 << 20, *BUCKETS)
    assert 0 <= one["autotune_gain"] < 1
    assert one["autotune_trials"] <= 60
    assert one["seen"] >= (6 if servers else 3)  # settings that were really in force
    assert job.stderr.count("tuned in") + job.stdout.count("tuned in") == 1
