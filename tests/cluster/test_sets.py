# SPDX-License-Identifier: Apache-2.0
"""Mistakes with process sets, and what operations leave behind, over whole jobs."""

from __future__ import annotations

import programs_sets
import pytest
from job import run_job
from test_collectives import WAYS

MAX_GROWTH_BYTES = 3 << 20  # of a worker; a hundred bytes for each operation would be more


def test_sets_in_different_orders_are_named_with_their_ranks():
    first, second, _ = run_job(programs_sets.orders, workers=3, servers=0)
    assert first.startswith("StallError: allreduce of process set [0, 1] (operation 1"), first
    assert " for allreduce of process set [0, 1, 2] (operation 1 without a name)" in first
    assert second.startswith("StallError: allreduce of process set [0, 1, 2]"), second
    assert " for allreduce of process set [0, 1] (operation 1 without a name)" in second
    assert all("process sets in one order" in text for text in (first, second))


@pytest.mark.parametrize(("way", "servers"), [("memory", 0), ("tcp", 1)])
def test_a_name_that_goes_two_ways_is_told_on_all(way, servers):
    watch = {"FASTPS_STALL_WATCH_S": "1"}  # a look at what waits is taken four times as often
    found = run_job(programs_sets.ways, workers=3, servers=servers, environment=WAYS[way] | watch)
    for errors in found:
        assert len(errors) == 6
        for first, second in errors:
            assert first.startswith("MismatchError"), found
            assert second.startswith("MismatchError"), found
    kinds = ("shape", "large", "dtype", "op", "kind", "grouped")
    for kind, texts in zip(kinds, zip(*found, strict=True), strict=True):
        firsts = [first for first, _ in texts]
        assert any(kind in first and "among the workers" in first for first in firsts), texts


def test_who_is_late_or_ahead_does_not_disagree():
    watch = {"FASTPS_STALL_WATCH_S": "1"}
    found = run_job(programs_sets.ahead_of_others, workers=3, servers=1, environment=watch)
    assert found == ["done"] * 3


def test_a_set_in_use_is_not_removed():
    for texts in run_job(programs_sets.removal, workers=3, servers=0):
        for text, what in zip(texts, ("allreduce odd", "receive with tag 0"), strict=True):
            assert text.startswith("FastPSError: remove_process_set(ProcessSet([0, 1])): worker 0")
            assert f"has '{what} of process set [0, 1]' in flight" in text


def test_nothing_begins_on_a_set_while_it_is_removed():
    found = run_job(
        programs_sets.removal_beside_a_thread, workers=3, servers=0,
        environment={"FASTPS_OP_TIMEOUT_S": "20"},
    )  # fmt: skip
    assert found[1:] == [[], []]
    (text,) = found[0]
    assert text.startswith("ValueError: allreduce of process set [0, 1]: "), text
    assert text.endswith("was removed; call add_process_set() again on all workers"), text


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_names_of_operations_among_members_are_forgotten(way):
    found = run_job(
        programs_sets.forgotten, workers=3, servers=0, environment=WAYS[way],
        arguments={"batches": 4, "batch": 60},
    )  # fmt: skip
    for full, first, last in found:
        assert full["channels"] >= 2 * 60
        assert last["channels"] == first["channels"] < 10
        assert last["parts"] <= first["parts"] < 4  # of what forget() itself does
        assert last["entries"] <= first["entries"] + 4  # credit, and what others sent meanwhile
        assert last["entries"] < 60 < full["entries"]


def test_nameless_operations_keep_memory_flat():
    found = run_job(
        programs_sets.nameless, workers=2, servers=0, environment=WAYS["memory"],
        arguments={"operations": 50_000, "warm": 8000}, timeout_s=100.0,
    )  # fmt: skip
    for warm, end in found:
        assert end - warm < MAX_GROWTH_BYTES, found
