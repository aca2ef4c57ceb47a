# SPDX-License-Identifier: Apache-2.0
"""Operations among workers over whole jobs, by every way that there is on one machine."""

from __future__ import annotations

import programs_collectives
import pytest
from job import run_job

WAYS = {
    "memory": {"FASTPS_SHARED_MEMORY": "1"},
    "pipes": {"FASTPS_SHARED_MEMORY": "1", "FASTPS_PEER_MEMORY": "0"},
    "unix": {"FASTPS_SHARED_MEMORY": "0"},
    "tcp": {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "0"},
}


@pytest.mark.parametrize(
    ("workers", "way"), [(2, "memory"), (3, "memory"), (3, "unix"), (3, "tcp")]
)
def test_operations_equal_numpy(workers, way):
    found = run_job(
        programs_collectives.everything, workers=workers, servers=0, environment=WAYS[way]
    )
    assert all(messages > 0 and nbytes > 0 for messages, nbytes in found)


def test_nine_workers_go_in_few_rounds():
    run_job(
        programs_collectives.everything, workers=9, servers=0, environment=WAYS["memory"],
        arguments={"counts": [0, 3, 1000]},
    )  # fmt: skip


def test_one_worker_is_all():
    run_job(programs_collectives.everything, workers=1, servers=0)


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_sets_work_at_once(way):
    run_job(programs_collectives.sets_at_once, workers=4, servers=0, environment=WAYS[way])


def test_a_letter_of_wrong_size_is_of_two_workers_alone():
    run_job(programs_collectives.letters_of_wrong_size, workers=3, servers=0)


def test_operations_without_a_name_leave_nothing_behind():
    for kept in run_job(programs_collectives.nothing_kept, workers=2, servers=0):
        assert max(kept) < 20, kept  # counts, and what others sent meanwhile


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_mistakes_are_everybodys_to_know(way):
    for texts in run_job(
        programs_collectives.mistakes, workers=3, servers=0, environment=WAYS[way]
    ):
        assert all("not the same operation" in text for text in texts), texts


@pytest.mark.parametrize("way", ["memory", "tcp"])
def test_mistakes_of_which_no_message_tells(way):
    program = programs_collectives.mistakes_without_a_message
    assert run_job(program, workers=3, servers=0, environment=WAYS[way]) == ["done"] * 3


def test_a_mistake_of_ours_is_told_with_its_cure():
    for op, name in run_job(programs_collectives.mistakes_of_one, workers=2, servers=0):
        assert "op must be fastps.Average, Sum" in op
        assert "'again' was declared before as float64 of shape (3,)" in name
        assert "now declares float64 of shape (4,)" in name
        assert "another name" in name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["memory", "unix"])
def test_a_worker_among_many_costs_what_it_costs_among_few(way):
    """Links, threads and memory follow from whom a worker talks to, not from the job's size."""
    settings = WAYS[way] | {"FASTPS_START_TIMEOUT_S": "180", "FASTPS_COPY_THREADS": "1"}
    many = 64 if way == "memory" else 16
    few = run_job(programs_collectives.ring, workers=4, servers=0, environment=settings)
    found = run_job(
        programs_collectives.ring, workers=many, servers=0, environment=settings, timeout_s=200.0
    )
    for threads, private_bytes, links in found:
        assert threads == few[0][0]
        assert private_bytes < few[0][1] + (3 << 20)
        assert links == few[0][2] == 2


@pytest.mark.parametrize("way", ["memory", "unix"])
def test_who_is_done_leaves_and_harms_nobody(way):
    run_job(programs_collectives.leave_at_once, workers=3, servers=0, environment=WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_what_no_cache_holds(way):
    settings = WAYS[way]
    found = run_job(programs_collectives.past_caches, workers=2, servers=0, environment=settings)
    assert found == [int(way == "memory")] * 2  # workers whose memory is open to this one


@pytest.mark.parametrize("way", ["memory", "pipes"])
def test_long_arrays_by_many_hands(way):
    """Copies and sums that several threads share, on however few cores."""
    settings = WAYS[way] | {"FASTPS_COPY_THREADS": "3"}
    run_job(programs_collectives.past_caches, workers=2, servers=0, environment=settings)
