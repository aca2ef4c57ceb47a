# SPDX-License-Identifier: Apache-2.0
"""Rules over whole jobs: what servers make of the workers' tensors is what the formulas say."""

from __future__ import annotations

import programs_byzantine as programs
import pytest
from job import run_job

SMALL = {
    "FASTPS_PARTITION_BYTES": "65536",
    "FASTPS_CHUNK_BYTES": "8192",
    "FASTPS_FORCE_DISTRIBUTED": "1",
    "FASTPS_RULES": "some.module:other, programs_byzantine:largest",
}
KINDS = {
    "tcp": {"servers": 2, "environment": {"FASTPS_UNIX_SOCKETS": "0"}},
    "machines": {
        "servers": 1, "environment": {"FASTPS_SHARED_MEMORY": "1"},
        "each": {("worker", 2): {"FASTPS_SHARED_MEMORY": "0"}},
    },
    "joint": {"servers": 0, "environment": {"FASTPS_SHARED_MEMORY": "1"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_servers_do_what_the_formulas_say(kind):
    options = KINDS[kind]
    environment = SMALL | options["environment"]
    found = run_job(programs.rules, workers=6, **options | {"environment": environment})
    assert len(found[0]) == 3 * len(programs.RULES) + 1
    assert found == [found[0]] * 6


def test_what_cannot_be_is_refused_on_all_workers_and_liars_are_counted():
    found = run_job(programs.refusals, workers=4, servers=0, environment=SMALL)
    for said, _ in found:
        for text, words in zip(
            said,
            ("needs 7 updates", "needs 5 updates", "is not one of", "FASTPS_RULES", "no sum of it",
             "a rule is for floats, not int32", "median()"),
            strict=True,
        ):  # fmt: skip
            assert words in text
    counts = [counts for _, counts in found]
    assert sum(one.get("server_updates_refused", 0) for one in counts) == 3
    assert sum(one.get("server_updates_refused_of_worker_1", 0) for one in counts) == 3


def test_a_worker_alone_gets_what_the_rule_makes_of_one():
    assert run_job(programs.alone, workers=1, servers=0) == ["done"]


def test_workers_that_reduce_among_themselves_have_nobody_to_trust():
    shared = {"FASTPS_SHARED_MEMORY": "1"}
    found = run_job(programs.without_servers, workers=2, servers=0, environment=shared)
    assert all("needs trusted servers" in text for text in found)


@pytest.mark.parametrize("kind", ["tcp", "joint"])
def test_rules_see_what_codecs_leave_and_workers_may_skip_rounds(kind):
    options = KINDS[kind]
    environment = SMALL | options["environment"]
    found = run_job(programs.coded, workers=6, **options | {"environment": environment})
    assert len(found[0]) == 4 * len(programs.CODECS)
    assert found == [found[0]] * 6
