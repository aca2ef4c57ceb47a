# SPDX-License-Identifier: Apache-2.0
"""An _async form returns at once, also where it has to find out sizes of others."""

from __future__ import annotations

import programs_at_once
import pytest
from harness import slowed
from job import run_job

CALL_S = 1.0  # others come when all calls have returned: a call that waited for them would stall
# told with their rows, in two exchanges, and in two for a part of the members
ROWS = [4, 4000]


@pytest.mark.parametrize(
    ("face", "workers", "memory", "is_polled"),
    [
        ("numpy", 2, "1", True),
        ("numpy", 3, "0", False),
        ("torch", 2, "1", False),
        ("torch", 3, "0", True),
    ],
)
def test_forms_that_find_out_sizes_return_at_once(face, workers, memory, is_polled):
    if face == "torch":
        pytest.importorskip("torch")
    first, *_ = run_job(
        programs_at_once.at_once, workers=workers, servers=0, timeout_s=120.0,
        arguments={"face": face, "rows": ROWS, "is_polled": is_polled},
        environment={"FASTPS_SHARED_MEMORY": memory},
    )  # fmt: skip
    assert first < slowed(CALL_S)


def test_a_handle_that_waits_for_sizes_ends_with_the_session():
    first, *_ = run_job(programs_at_once.ends, workers=2, servers=0)
    text, stalled, *ended = first
    assert "already in flight" in text
    assert stalled in ("StallError", "PeerLostError")
    assert len(ended) == 3
    assert all(one in ("ShutdownError", "PeerLostError") for one in ended), ended


def test_a_failure_comes_with_the_handle_and_no_other():
    for texts in run_job(programs_at_once.failing, workers=3, servers=0):
        assert len(texts) == 2, texts
        assert all("is not the same operation" in text for text in texts), texts
