# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with FASTPS_ENCRYPT: what is read, changed and refused on the way."""

from __future__ import annotations

from typing import Any

import programs_damage
import programs_encryption
import pytest
from job import Job

TCP = {"FASTPS_UNIX_SOCKETS": "0", "FASTPS_SHARED_MEMORY": "0"}


def run(
    program: Any, mode: str, *, servers: int = 1, links: int = 1, **arguments: Any
) -> list[Any]:
    """Run two workers; return their results."""
    with Job(
        program, workers=2, servers=servers, arguments=arguments,
        environment={**TCP, "FASTPS_ENCRYPT": mode, "FASTPS_LINKS_PER_PEER": str(links)},
    ) as job:  # fmt: skip
        return [worker.result() for worker in job.workers]


@pytest.mark.parametrize("by", ["servers", "workers"])
@pytest.mark.parametrize(
    ("mode", "is_readable"), [("off", True), ("auto", True), ("integrity", True), ("on", False)]
)
def test_nothing_of_a_job_is_readable(mode, is_readable, by):
    """The control: without encryption, and with integrity alone, the relay sees the tensors."""
    found = run(programs_encryption.watch, mode, by=by, servers=int(by == "servers"))
    assert all(one["is_right"] for one in found), found
    carried = [one for one in found if one["nbytes"] > 4 * programs_encryption.ELEMENTS]
    assert carried
    assert {one["is_readable"] for one in carried} == {is_readable}


@pytest.mark.parametrize("what", ["flip", "cut", "double", "move"])
@pytest.mark.parametrize("mode", ["on", "integrity"])
def test_bytes_that_are_changed_end_the_job_by_name(mode, what):
    links = 2 if what == "move" else 1
    results = run(programs_damage.train, mode, what=what, way="up", links=links)
    for result in results:
        assert "wrong" not in result, result
        assert result["error"] in ("PeerLostError", "ProtocolError"), result
    texts = [result["text"] for result in results]
    assert any("did not open and was not used" in text for text in texts), texts


def test_a_member_with_another_mode_is_refused_by_name():
    with Job(
        programs_encryption.try_to_join, workers=2, servers=0,
        environment={**TCP, "FASTPS_ENCRYPT": "on", "FASTPS_START_TIMEOUT_S": "8"},
        each={("worker", 1): {"FASTPS_ENCRYPT": "off"}},
    ) as job:  # fmt: skip
        found = [worker.result() for worker in job.workers]
    assert "FASTPS_ENCRYPT is off here and on at the peer" in found[1]["text"]
    assert found[0]["error"]
