# SPDX-License-Identifier: Apache-2.0
"""Workers that do not call the same operation on the same: one error on all of them, with all.

Every operation with every difference, and every pair of operations; see programs_differing.py.
"""

from __future__ import annotations

import programs_differing
import pytest
from job import run_job
from programs_differing import SHAPE, cases

from fastps.collectives.descriptions import form_of

LATE = ". It was over here when others noticed"
MEMORY, SOCKETS = {"FASTPS_SHARED_MEMORY": "1"}, {"FASTPS_SHARED_MEMORY": "0"}
WATCH = {"FASTPS_STALL_WATCH_S": "1"}  # a look at what waits is taken four times as often


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("face", "workers", "odd", "names", "is_async", "environment", "every"),
    [
        ("numpy", 2, -1, "none", False, MEMORY, 1),
        ("numpy", 3, 0, "set", True, SOCKETS, 3),
        ("numpy", 3, 1, "none", True, SOCKETS, 3),
        ("torch", 2, 0, "set", False, MEMORY, 7),
        ("torch", 3, -1, "none", True, MEMORY, 7),
    ],
)
def test_all_workers_hear_of_a_difference_and_of_both_sides(
    face, workers, odd, names, is_async, environment, every
):
    found = differences(face, workers, odd, names, is_async, environment, every)
    for label, right, wrong, texts in found:
        for of_worker in texts:
            assert 1 <= sum(map(bool, of_worker)) <= 2, (label, texts)
            assert not of_worker[3], (label, texts)  # all have heard by the next but one
        check_sides(label, (right, wrong), texts, odd % workers)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("face", "workers", "servers", "odd", "is_async", "environment", "every"),
    [
        ("numpy", 2, 0, -1, False, MEMORY, 6),
        ("numpy", 3, 2, 0, True, SOCKETS, 11),
        ("numpy", 2, 2, 1, False, SOCKETS, 11),
        ("numpy", 3, 0, 1, True, MEMORY, 13),
        ("torch", 2, 0, 0, False, MEMORY, 13),
    ],
)
def test_all_workers_hear_of_a_difference_under_a_name(
    face, workers, servers, odd, is_async, environment, every
):
    found = differences(face, workers, odd, "all", is_async, environment, every, servers)
    for label, right, wrong, texts in found:
        for of_worker in texts:
            assert any(of_worker[:2]), (label, texts)
            assert of_worker[2:] == texts[0][2:], (label, texts)  # lost for all, or for nobody
        check_sides(label, (right, wrong), texts, odd % workers)


def differences(face, workers, odd, names, is_async, environment, every, servers=0):
    """Give label, both calls and what each worker heard, of each case."""
    if face == "torch":
        pytest.importorskip("torch")
    found = run_job(
        programs_differing.differ, workers=workers, servers=servers, timeout_s=240.0,
        arguments={
            "face": face, "odd": odd, "names": names, "is_async": is_async, "every": every,
        },
        environment=environment | WATCH,
    )  # fmt: skip
    return [
        (*case, [of_worker[number][1] for of_worker in found])
        for number, case in enumerate(cases()[::every])
    ]


def check_sides(label, calls, texts, odd):
    """See that all workers heard the same, and what each had called."""
    heard = {next(text for text in of_worker if text).partition(LATE)[0] for of_worker in texts}
    first = {text.partition("\n")[0] for text in heard}  # others follow where several differ
    assert len(first) == 1, (label, first)
    text = first.pop().replace(f"({len(texts)}, ", "(")
    is_declared = "declared" in text
    for call in calls:
        name = call.operation.removeprefix("grouped_")
        is_sum = name == "allreduce" and "started a" in text
        assert is_declared or is_sum or name in text, (label, text)
        assert f"{call.dtype} of shape {call.shape}" in text, (label, text)
    assert f"worker {odd} {'declared' if is_declared else 'started'}" in text, (label, text)


@pytest.mark.parametrize(("face", "names"), [("numpy", "set"), ("numpy", "all"), ("torch", "all")])
def test_two_of_one_name_are_refused_at_once(face, names):
    if face == "torch":
        pytest.importorskip("torch")
    operations = ["allreduce", "reduce", "reducescatter", "grouped_reducescatter"]
    first, *others = run_job(
        programs_differing.doubled, workers=2, servers=0,
        arguments={"face": face, "operations": operations, "names": names},
    )  # fmt: skip
    assert len(first) == len(operations), first
    assert all("already in flight" in text for text in first), first
    assert others == [[]]


@pytest.mark.parametrize("names", ["set", "all"])
def test_another_number_of_arrays_is_a_difference(names):
    found = run_job(
        programs_differing.counted, workers=2, servers=0, arguments={"names": names},
        environment=WATCH,
    )  # fmt: skip
    for text, other in zip(*found, strict=True):
        assert text == other
        assert "is not the same operation" in text, text


def test_forms_tell_shapes_of_one_size_apart():
    shapes = [(102,), (17, 6), (6, 17), (17, 2, 3), (17, 3, 2), (1, 102), (102, 1), (2, 51)]
    forms = {form_of(((0, shape),)) for shape in shapes} | {form_of(((1, (102,)),)), form_of(())}
    assert len(forms) == len(shapes) + 2
    assert all(0 < form < 1 << 16 for form in forms)
    assert form_of(((0, SHAPE), (0, SHAPE))) != form_of(((0, SHAPE),))
