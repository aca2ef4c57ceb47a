# SPDX-License-Identifier: Apache-2.0
"""Names that are forgotten leave nothing behind, whatever carries them, and can be used again."""

from __future__ import annotations

import programs_forget
import pytest
from job import Job, run_job

from fastps.contract.contract import ANY_STALENESS

SMALL = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "8192"}
SHARED = {"FASTPS_SHARED_MEMORY": "1"}
MIXED = {("worker", 2): {"FASTPS_SHARED_MEMORY": "0"}}
# workers, servers, settings of all, of some
WAYS = {
    "alone": (1, 0, {}, {}),
    "shared": (2, 0, SHARED, {}),
    "apart": (2, 2, {"FASTPS_COLOCATE": "off"}, {}),
    "joint": (2, 0, {}, {}),
    "machines": (3, 1, SHARED, MIXED),
}
BATCH = 300
BATCHES = 16
WARM = 4
MAX_GROWTH_BYTES = 3 << 20  # of a process; what is kept of 3600 names would be more


@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_nameless_operations_leave_nothing_behind(way):
    workers, servers, environment, each = WAYS[way]
    with Job(
        programs_forget.cycles,
        workers=workers,
        servers=servers,
        arguments={"batches": BATCHES, "batch": BATCH, "warm": WARM},
        environment=SMALL | environment,
        each=each,
    ) as job:
        apart = [*job.servers, job.scheduler] if workers > 1 else []
        job.workers[0].wait_line("WARM")
        before = [programs_forget.memory_of(process.pid) for process in apart]
        results = job.results()
        after = [programs_forget.memory_of(process.pid) for process in apart]
        job.end_in_order()
    for warm, end in results:
        assert warm[0] == end[0]
        assert warm[0]["tensors"] <= 1
        assert warm[0]["names"] <= 2
        assert end[1] - warm[1] < BATCH, "Python objects"  # 12 * BATCH names were used
        assert end[2] - warm[2] < MAX_GROWTH_BYTES
    for process, old, new in zip(apart, before, after, strict=True):
        assert new - old < MAX_GROWTH_BYTES, process.spec.name


@pytest.mark.parametrize("way", WAYS)
def test_after_a_mistake_every_name_works_on(way):
    workers, servers, environment, each = WAYS[way]
    found = run_job(
        programs_forget.mistakes,
        workers=workers,
        servers=servers,
        environment=SMALL | environment,
        each=each,
    )
    for rank, errors in enumerate(found):
        assert errors["unknown"][0] == "ConfigError"
        assert (
            "cannot forget 'never': no tensor or operation has this name" in errors["unknown"][1]
        )
        if workers == 1:
            continue
        assert errors["in order"][0] == errors["some"][0] == "StallError"
        other = "worker 1" if rank == 0 else "worker 0"
        assert f"missing: {other}" in errors["some"][1]
    if workers > 1:
        texts = " ".join(errors["some"][1] for errors in found)
        assert "waits in forget 'a'" in texts  # who has waited longest hears of the others
        said = dict(errors["poisoned"] for errors in found)
        assert "'p' differs between workers" in said["MismatchError"]
        assert said.keys() <= {"MismatchError", "ConfigError"}  # whose declaration was refused
        assert found[0]["in flight"] == [
            "FastPSError", "tensor 'a' is in flight; wait for its handle first"
        ]  # fmt: skip


@pytest.mark.parametrize("way", ["shared", "apart", "joint", "machines"])
def test_what_failed_is_forgotten_too(way):
    workers, servers, environment, each = WAYS[way]
    run_job(
        programs_forget.mismatched,
        workers=workers,
        servers=servers,
        environment=SMALL | environment,
        each=each,
    )


@pytest.mark.parametrize("way", ["shared", "apart", "joint", "machines"])
@pytest.mark.parametrize("is_grouped", [False, True], ids=["sums", "and operations of a group"])
def test_nobody_waits_to_forget_what_workers_disagree_about(way, is_grouped):
    """Those that have heard of it raise an error at once, so that some would wait in vain."""
    workers, servers, environment, each = WAYS[way]
    found = run_job(
        programs_forget.disputed,
        workers=workers,
        servers=servers,
        arguments={"is_grouped": is_grouped},
        environment=SMALL | environment,
        each=each,
    )
    assert found[0][0] == "MismatchError"
    assert "'p'" in found[0][1]
    for kind, text in found[1:]:
        assert kind in {"MismatchError", "ConfigError"}  # whose declaration was refused
        assert "'p'" in text


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("staleness", [ANY_STALENESS, 3])
def test_values_that_were_added_to_begin_anew(servers, staleness):
    """Though some workers have come further than others with the number that is used again."""
    steps = [9, 2, 5] if staleness == ANY_STALENESS else [4, 2, 3]
    found = run_job(
        programs_forget.accumulated,
        workers=3,
        servers=servers,
        environment=SMALL,
        arguments={"staleness": staleness, "steps": steps},
    )
    assert found == [[sum(steps) * (turn + 1) for turn in range(3)]] * 3
