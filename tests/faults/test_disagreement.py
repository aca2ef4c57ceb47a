# SPDX-License-Identifier: Apache-2.0
"""Workers that disagree, and workers that misuse their arrays: a typed error, and life goes on."""

from __future__ import annotations

import programs_faults
import pytest
from job import run_job


def on_machines(workers, apart):
    """Give some workers machines of their own; the others share one."""
    return {
        ("worker", rank): {"FASTPS_SHARED_MEMORY": str(int(rank not in apart))}
        for rank in range(workers)
    }


@pytest.mark.parametrize(
    ("workers", "servers", "apart"),
    [(2, 2, (0, 1)), (3, 1, (0, 1, 2)), (3, 1, (0,)), (3, 0, (0,))],
)
def test_mismatch_reaches_everybody_and_names_both_sides(workers, servers, apart):
    """apart: workers on machines of their own, the others share one; the last is at odds."""
    environment = {"FASTPS_PARTITION_BYTES": "65536", "FASTPS_CHUNK_BYTES": "16384"}
    found = run_job(
        programs_faults.disagree,
        workers=workers,
        servers=servers,
        environment=environment,
        each=on_machines(workers, apart),
    )
    labels = ("shape", "layout", "dtype", "operation", "root", "small root", "kind",
              "kind of the root", "changed")  # fmt: skip
    sides = {
        "shape": ("shape (3,)", "shape (4,)"),
        "layout": ("shape (2, 3)", "shape (3, 2)"),
        "dtype": ("int32", "float32"),
        "changed": ("shape (6,)", "shape (7,)"),
        "operation": ("started a sum", f"worker {workers - 1} started an average"),
        "root": ("a broadcast from worker 0", "a broadcast from worker 1"),
        "small root": (
            "a broadcast from worker 0",
            f"worker {workers - 1} started a broadcast from worker {workers - 1}",
        ),
        "kind": ("started a sum", f"worker {workers - 1} started a broadcast from worker 0"),
        "kind of the root": ("worker 0 started a sum", "started a broadcast from worker 0"),
    }
    for errors in found:
        for label, error in zip(labels, errors, strict=True):
            assert error, f"{label}: no error"
            name, text = error
            assert name == "MismatchError", (label, error)
            assert repr(label) in text
            assert "worker" in text
            for side in sides.get(label, ()):
                assert side in text, (label, text)
    for label in sides:
        texts = {errors[labels.index(label)][1] for errors in found}
        assert len(texts) == 1, f"all hear the same about {label}: {texts}"
        assert f"worker {workers - 1}" in texts.pop()


@pytest.mark.parametrize(
    ("roots", "count"), [([0, 3, 0, 0], 5), ([0, 0, 3, 0], 5), ([1, 1, 1, 2], 600_000)]
)
def test_who_names_another_root_on_another_machine_is_noticed(roots, count):
    """Where another rank speaks for both, and where both roots are on one machine."""
    found = run_job(
        programs_faults.disagree_about_root,
        workers=4,
        servers=1,
        each=on_machines(4, (0, 3)),
        arguments={"roots": roots, "count": count},
    )
    assert [error[0] for error in found] == ["MismatchError"] * 4
    texts = {error[1] for error in found}
    assert len(texts) == 1
    text = texts.pop()
    for root in set(roots):
        assert f"worker {roots.index(root)}" in text
        assert f"started a broadcast from worker {root}" in text


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("FASTPS_PARTITION_BYTES", ("at most 65536 bytes", "at most 131072 bytes")),
        ("FASTPS_CHUNK_BYTES", ("chunks of 65536", "chunks of 131072")),
    ],
)
def test_other_partitions_on_one_worker(name, sides):
    found = run_job(
        programs_faults.declare_partitions,
        environment={name: "65536"},
        each={("worker", 1): {name: "131072"}},
    )
    for error, text in found:
        assert error == "MismatchError"
        for part in ("'partitions'", "worker 0", "worker 1", *sides):
            assert part in text


def test_misuse_of_arrays_and_names():
    found = run_job(programs_faults.misuse)[0]
    assert found.pop("freed") == []
    assert found.pop("stall")[0] == "StallError"
    for label in ("twice", "twice in a list"):
        error, text = found.pop(label)
        assert error == "DuplicateNameError"
        assert "'busy' is already in flight" in text
    assert found.pop("resized")[0] == "ValueError"
    types = ("complex", "big endian", "object", "unsigned", "list", "mean of booleans",
             "broken priority")  # fmt: skip
    for label in ("long name", "name that is no text"):
        assert found.pop(label)[0] == "ConfigError"
    for label, error in found.items():
        assert error, f"{label}: no error"
        name, text = error
        assert name == ("TypeError" if label in types else "ValueError"), (label, error)
        assert len(text) > 20
    for label in ("not contiguous", "fortran", "output not contiguous"):
        assert "not C-contiguous" in found[label][1]
    for label, name in (("read-only output", "n9"), ("read-only broadcast", "n11")):
        assert repr(name) in found[label][1]


@pytest.mark.parametrize("apart", [(0, 1, 2, 3), (3,), (0,), (1,)])
def test_repeated_mismatch_with_stragglers(apart):
    """A round that failed must not be taken over before everybody has come to it."""
    found = run_job(
        programs_faults.disagree_often,
        workers=4,
        each=on_machines(4, apart),
        arguments={"times": 30},
    )
    assert found == [30] * 4


def test_shutdown_ends_waits():
    environment = {"FASTPS_LINGER_S": "60"}
    found = run_job(programs_faults.shut_down_in_flight, environment=environment)
    for waited, after in zip(found[0][::2], found[0][1::2], strict=True):
        # PeerLostError: the other worker was faster to leave
        assert waited[0] in ("ShutdownError", "PeerLostError"), waited
        assert "status" not in waited[1]
        if waited[0] == "ShutdownError":
            assert "shutdown() was called before it was complete" in waited[1]
        assert after[0] == "NotInitializedError"
