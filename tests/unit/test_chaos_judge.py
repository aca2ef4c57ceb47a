# SPDX-License-Identifier: Apache-2.0
"""The judge of tools/chaos accepts a job that does right, and finds each thing that is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.chaos import report
from tools.chaos.events import STEPS, Event, draw, plan, victims_of
from tools.chaos.gradients import first_model
from tools.chaos.history import Replay
from tools.chaos.judge import Verdict, expectation, judge
from tools.chaos.layouts import LAYOUTS
from tools.chaos.seen import Seen

MEMORY = LAYOUTS["memory"]
KILL = Event(3, "memory", "kill", "worker", 1, "running", 4)
TEXT = "tensor 'x' cannot be reduced: worker 1 (h, pid 9) is lost: its control connection closed"
LAST = "[fastps-run] worker 1 (pid 9) was killed by SIGKILL; it failed first, so the job was ended"


def seen(*, steps=(5, 5, 5), text=TEXT, kind="PeerLostError", after_s=0.1, code=137, last=LAST,
         errors=(0, 2), event_at=50.0, ended_at=52.0, **more):  # fmt: skip
    """Make what a driver sees of a job whose worker 1 is killed after step 4."""
    replay = Replay(3, has_fractions=True)
    hashes = [replay.add([[0, 1, 2]] * 3) for _ in range(max(steps))]
    records = []
    for rank, count in enumerate(steps):
        own = {"member": f"{rank}:9", "rank": rank}
        records += [own | {"what": "begin", "at": 0.0}, own | {"what": "joined", "at": 1.0}]
        records += [
            own | {"what": "step", "at": 2.0 + step, "step": step, "hash": hashes[step],
                   "who": [[0, 1, 2]] * 3}
            for step in range(count)
        ]  # fmt: skip
        if rank in errors:
            records.append(own | {"what": "error", "at": (event_at or 60.0) + after_s, "step": 5,
                                  "type": kind, "text": text})  # fmt: skip
    launchers = {"launcher 0": {"code": code, "stderr": f"...\n{last}\n"}}
    return Seen(
        event_at, ended_at, 0.0, launchers, records, load={"seed": 3, "share": 1.0}, **more
    )


def kinds(event, *, layout=MEMORY, **options):
    return [one.kind for one in judge(event, layout, seen(**options)).findings]


def test_a_job_that_ends_well_has_no_finding():
    verdict = judge(KILL, MEMORY, seen())
    assert (verdict.findings, verdict.blames, verdict.expected) == ([], 2, "lost")
    assert verdict.detections == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"text": "worker 2 is lost"}, ["wrong blame"] * 2),
        ({"text": "worker 11 is lost"}, ["wrong blame"] * 2),
        ({"kind": "KeyError"}, ["wrong type"] * 2),
        ({"after_s": 7.0}, ["late"] * 2),
        ({"errors": (0,)}, ["no error"]),
        ({"code": 1}, ["exit code"]),
        ({"code": 0}, ["exit code", "unnoticed"]),
        ({"ended_at": 99.0}, ["slow end"]),
        ({"last": LAST.replace("worker 1", "worker 0")}, ["wrong report"]),
        ({"left": ["process 7 (worker 0): python"]}, ["left behind"]),
        ({"is_hung": True, "code": None}, ["hang"]),
        ({"steps": (5, 5, 4), "event_at": None, "errors": ()}, ["lost job"] * 3 + ["exit code"]),
    ],
)
def test_each_wrong_thing_is_found(wrong, found):
    assert kinds(KILL, **wrong) == found


def test_a_wrong_result_is_found():
    one = seen()
    next(record for record in one.records if record["what"] == "step")["hash"] = "0"
    assert "wrong result" in [finding.kind for finding in judge(KILL, MEMORY, one).findings]


def test_a_short_pause_must_cost_nothing():
    pause = replace(KILL, kind="stop", seconds=0.4)
    assert expectation(pause) == "fine"
    assert kinds(pause, steps=(STEPS,) * 3, errors=(), code=0) == []
    assert set(kinds(pause)) == {"lost job", "exit code"}
    assert expectation(replace(pause, seconds=5.0)) == "lost"


def test_survivors_must_agree_about_the_first_of_two():
    both = replace(KILL, then_role="worker", then_rank=2, then_s=0.1)
    layout = LAYOUTS["sets"]
    one = seen(steps=(5, 5, 5, 5), errors=(0, 3))
    one.records = [record for record in one.records if record["what"] != "step"]
    assert judge(both, layout, one).findings == []
    one.records[-1]["text"] = "worker 2 is lost"
    (finding,) = judge(both, layout, one).findings
    assert "survivors blame different members" in finding.text


def test_a_survivor_may_name_a_worker_that_left_because_of_the_loss():
    one = seen()
    one.records[-1]["text"] = "barrier 'barrier' cannot complete: worker 0 left the job"
    assert judge(KILL, MEMORY, one).findings == []
    one.records[-1]["text"] = "barrier 'barrier' cannot complete: worker 2 left the job"
    assert [finding.kind for finding in judge(KILL, MEMORY, one).findings] == ["wrong blame"]


def gone_on(
    *, steps=(STEPS, 5, STEPS), views=(2,), cause="worker 1 (h, pid 9) is lost: it", **more
):
    """Make what a driver sees of an elastic job that goes on without worker 1."""
    one = seen(steps=steps, errors=(), code=0, event_at=6.5, **more)
    replay = Replay(3, has_fractions=True)
    for step in range(STEPS):
        who = [[0, 1, 2] if step < 5 else [0, 2]] * 3
        found = replay.add(who)
        for record in one.records:
            if record.get("step") == step:
                record |= {"hash": found, "who": who}
    for rank in (0, 2):
        own = {"member": f"{rank}:{rank}", "rank": rank}
        one.records += [own | {"what": "view", "at": 6.7 + number, "number": number, "size": 2,
                               "cause": cause, "seconds": 0.1} for number in views]  # fmt: skip
        one.records += [own | {"what": "left", "at": 50.0}]
    return one


def test_an_elastic_job_must_go_on():
    verdict = judge(KILL, MEMORY, gone_on(), least=1)
    assert (verdict.findings, verdict.expected) == ([], "goes on")
    assert verdict.detections == pytest.approx([2.5, 2.5])
    assert verdict.news == pytest.approx([2.1, 2.1])
    assert judge(KILL, MEMORY, gone_on()).findings  # other jobs must not


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"steps": (STEPS - 1, 5, STEPS)}, ["lost job"]),
        ({"views": (2, 3)}, ["more views"] * 2),
        ({"cause": "worker 1 (h, pid 8) is lost"}, ["wrong blame"] * 2),
        ({"left": ["process 7 (worker 0): python"]}, ["left behind"]),
    ],
)
def test_what_is_wrong_with_an_elastic_job_is_found(wrong, found):
    verdict = judge(KILL, MEMORY, gone_on(**wrong), least=1)
    assert [one.kind for one in verdict.findings] == found


def test_a_victim_that_had_left_has_the_exit_code_of_its_signal():
    """The second one is killed after its last step, while its process ends."""
    event = replace(KILL, layout="two-machines", then_role="worker", then_rank=2, then_s=0.3)
    one = gone_on()
    one.launchers = {f"launcher {m}": {"code": 137 * m, "stderr": ""} for m in range(2)}
    layout = LAYOUTS["two-machines"]
    assert judge(event, layout, one, least=1).findings == []
    once = replace(event, then_role="")
    assert [x.kind for x in judge(once, layout, one, least=1).findings] == ["exit code"]


def test_a_machine_whose_loss_was_outlived_has_the_exit_code_of_what_ended_the_job():
    event = replace(KILL, layout="three-machines", rank=0, then_role="worker", then_rank=1)
    layout = LAYOUTS["three-machines"]
    text = "worker 0 is lost: its control connection closed"
    one = seen(steps=(5, 5), errors=(1,), text=text, code=1, last=text)
    assert "exit code" in [x.kind for x in judge(event, layout, one).findings]
    one.records.append({"member": "1:9", "rank": 1, "what": "view", "at": 51.0, "number": 2,
                        "size": 1, "cause": text, "seconds": 0.1})  # fmt: skip
    assert "exit code" not in [x.kind for x in judge(event, layout, one, least=1).findings]
    at_home = replace(event, layout="memory", then_rank=2)
    assert "exit code" in [x.kind for x in judge(at_home, MEMORY, one, least=1).findings]


def test_an_elastic_job_may_end_where_it_need_not_go_on():
    one = seen()
    assert "lost job" in [x.kind for x in judge(KILL, MEMORY, one, least=1).findings]
    assert judge(KILL, MEMORY, one, least=3).findings == []  # too few are left
    assert judge(replace(KILL, phase="start", step=0), MEMORY, one, least=1).findings == []
    raises = seen(steps=(0, 0, 0, 0), errors=(0, 2, 3), kind="ViewChangedError")
    assert judge(replace(KILL, layout="sets"), LAYOUTS["sets"], raises, least=1).findings == []


FIVE = LAYOUTS["five-machines"]
SILENT = "scheduler (10.0.0.1:5) is lost: it has been silent for 0.9 s"


def split(event, *, lost, cause="", error=SILENT, after_s=1.5):
    """Make what a driver sees of an elastic job of five machines that a cut has split."""
    ranks, replay, records = range(5), Replay(3, has_fractions=True), []
    left = [rank for rank in ranks if rank not in lost]
    for step in range(STEPS):
        there = list(ranks) if step < 5 else left
        who = [there] * 3
        found = replay.add(who)
        records += [
            {"member": f"{rank}:{rank}", "rank": rank, "what": "step", "step": step, "who": who,
             "hash": found, "at": 2.0 + step} for rank in there
        ]  # fmt: skip
    for rank in ranks:
        own = {"member": f"{rank}:{rank}", "rank": rank}
        records.append(own | {"what": "begin", "at": 0.0})
        if rank in left:
            cause = cause or f"worker {lost[-1]} (h, pid {lost[-1]}) is lost: it"
            records += [own | {"what": "view", "at": 6.9, "number": 2, "size": len(left),
                               "cause": cause, "seconds": 0.1}]  # fmt: skip
            records.append(own | {"what": "left", "at": 50.0})
        elif error:
            records.append(own | {"what": "error", "at": 6.5 + after_s, "step": 5,
                                  "type": "PeerLostError", "text": error})  # fmt: skip
    codes = {f"launcher {rank}": {"code": int(rank in lost), "stderr": ""} for rank in ranks}
    return Seen(6.5, 52.0, 0.0, codes, records, load={"seed": 3, "share": 1.0})


def test_all_partitions_of_five_machines_are_drawn_in_turn():
    many = plan(0, 35, [FIVE])
    sides = {frozenset(one.side) for one in many if one.kind == "split"}
    assert len(sides) == 15
    assert not any(0 in side for side in sides)
    ways = {one.ways(5)[0] for one in many if one.kind == "cut-one-way"}
    assert len(ways) == 20
    assert Event(0, "five-machines", "split", side=(1, 3, 4)).ways(5) == [
        (1, 0), (1, 2), (3, 0), (3, 2), (4, 0), (4, 2),
        (0, 1), (2, 1), (0, 3), (2, 3), (0, 4), (2, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({}, set()),
        ({"error": ""}, {"no error"}),
        ({"error": "worker 0 is lost"}, {"wrong blame"}),
        ({"after_s": 8.0}, {"late"}),
        ({"lost": [1, 2, 3]}, {"lost job", "more lost", "wrong blame", "exit code"}),
    ],
)
def test_a_split_ends_the_side_without_the_scheduler(wrong, found):
    event = Event(9, "five-machines", "split", "machine", 0, "running", 4, side=(1, 2))
    one = split(event, **({"lost": [1, 2]} | wrong))
    verdict = judge(event, FIVE, one, least=2)
    assert verdict.expected == "goes on"
    assert {one.kind for one in verdict.findings} == found


def test_a_cut_between_two_machines_loses_one_of_them():
    event = Event(33, "five-machines", "cut-one-way", "machine", 4, "running", 4, other=2)
    both = "worker 2 (h, pid 2) is lost: worker 4 lost its data connection to it"
    one = split(event, lost=[2], cause=both, error=f"this process was taken for lost: {both}")
    one.records += [{"member": "4:4", "rank": 4, "what": "left", "at": 50.0}]
    assert judge(event, FIVE, one, least=2).findings == []
    two = split(event, lost=[2, 4], cause=both, error=f"this process was taken for lost: {both}")
    assert {x.kind for x in judge(event, FIVE, two, least=2).findings} == {"more lost"}


def test_the_same_seed_draws_the_same_events_and_all_kinds_come():
    layouts = [one for one in LAYOUTS.values() if not one.is_split]
    many = plan(1, 1200, layouts)
    assert many == plan(1, 1200, layouts)
    assert many[7] == draw(many[7].seed, LAYOUTS[many[7].layout])
    assert len(set(many)) == len(many)
    for layout in layouts:
        own = {(one.role, one.rank) for one in many if one.layout == layout.name}
        assert own >= set(victims_of(layout))
    assert {one.kind for one in many} == {
        "kill", "term", "segv", "stop", "cut", "cut-one-way", "disk", "clock",
    }  # fmt: skip


def test_tables_count_what_happened():
    verdict = judge(KILL, MEMORY, seen(text="worker 2 is lost"))
    row = {"event": KILL.to_json(), "name": KILL.name, "words": KILL.words(),
           "verdict": verdict.to_json(), "load": {}}  # fmt: skip
    line = report.table([row, row]).splitlines()[1]
    assert line.split()[2:] == ["memory", "2", "0", "2", "0.10", "0.10", "0", "4", "0", "0"]
    assert report.findings([row]).count("wrong blame: memory: kill, worker 1") == 2
    assert len(first_model(has_fractions=True)) == 3


def test_a_table_says_how_long_survivors_stood_still():
    verdict = judge(KILL, MEMORY, gone_on(), least=1)
    row = {"event": KILL.to_json(), "verdict": verdict.to_json()}
    assert report.stalls([row | {"verdict": Verdict("lost").to_json()}]) == ""
    lines = [line.split()[2:] for line in report.stalls([row, row]).splitlines()[1:]]
    assert lines == [
        [where, "2", "2.500", "2.500", "2.100", "2.100"] for where in ("all", "memory")
    ]
