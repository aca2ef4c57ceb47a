# SPDX-License-Identifier: Apache-2.0
"""Command lines about workers that join a running job."""

from __future__ import annotations

import pytest

from fastps.launch.options import FIRST_OF_OTHERS, Options, parse
from fastps.launch.plan import Identity, choose_job_id, choose_secret, goes_on, make_plan
from fastps.launch.request import pack, unpack

PYTHON = ("python", "train.py")


def environments(options: Options) -> list[dict[str, str]]:
    identity = Identity("job", ("FASTPS_TOKEN", "x"), ("10.0.0.1", 7654))
    plan = make_plan(options, identity, cpus=2, inherited={})
    return [dict(spec.environment) for spec in plan]


def test_workers_that_join_know_the_schedulers_address_and_nothing_of_the_size():
    options = parse(["--join", "10.0.0.1:7654", "-np", "2", *PYTHON])
    assert (options.scheduler_host, options.scheduler_port) == ("10.0.0.1", 7654)
    assert options.layout.needs_scheduler
    assert not options.layout.has_scheduler
    assert goes_on(options, {})
    found = environments(options)
    assert [one["FASTPS_ELASTIC_JOIN"] for one in found] == ["1", "1"]
    assert [one["FASTPS_SIZE"] for one in found] == ["2", "2"]
    assert [one["FASTPS_LOCAL_RANK"] for one in found] == ["0", "1"]
    first, second = (int(one["FASTPS_RANK"]) for one in found)
    assert FIRST_OF_OTHERS <= first < second == first + 1
    assert choose_job_id(options, {}, new_id="new") == "job-7654"
    assert choose_secret(options, {}, new_token="new") is None


def test_workers_of_two_machines_that_join_have_other_ranks():
    ranks = {
        one["FASTPS_RANK"]
        for _ in range(8)
        for one in environments(parse(["--join", "a:1", "-np", "2", *PYTHON]))
    }
    assert len(ranks) > 10


def test_one_worker_may_join():
    assert parse(["--join", "[fd00::1]:7654", *PYTHON]).scheduler_host == "fd00::1"
    assert len(environments(parse(["--join", "a:1", *PYTHON]))) == 1


def test_a_job_of_one_machine_may_be_open_to_others():
    words = ["-np", "2", "--min", "1", "--scheduler-host", "a", "--scheduler-port", "7", *PYTHON]
    assert not parse(words).is_open
    assert parse(["--max", "3", *words]).is_open


def test_a_job_that_replaces_workers_takes_as_many_as_it_had():
    (first, _) = environments(parse(["-np", "2", "--min", "1", "--respawn", "3", *PYTHON]))
    assert first["FASTPS_ELASTIC_MAX"] == "2"


def test_spares_are_workers_that_join_with_ranks_of_their_own():
    words = ["-H", "a:2,b:1", "--min", "2", "--spares", "2", *PYTHON]
    options = parse(words)
    found = []
    for machine in range(2):
        here = unpack(pack(options, machine))
        found += environments(here)
    assert [one["FASTPS_RANK"] for one in found] == ["0", "1", "3", "4", "2", "5", "6"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "2", "3", "0", "1", "2"]
    assert ["FASTPS_ELASTIC_JOIN" in one for one in found] == [0, 0, 1, 1, 0, 1, 1]
    assert {one["FASTPS_ELASTIC_MAX"] for one in found} == {"3"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--join", "a"], "HOST:PORT"),
        (["--join", "a:1", "-s", "1"], "neither servers"),
        (["--join", "a:1", "-np", "2,2", "--machine-rank", "0"], "this machine alone"),
        (["--join", "a:1", "--spares", "1"], "wait as spares too"),
        (["-np", "2", "--spares", "1"], "needs --min"),
        (["--min", "1", "--spares", "1"], "two or more workers"),
        (["-np", "2", "--min", "1", "--max", "3", "--spares", "1"], "would not wait"),
    ],
)
def test_what_does_not_go_together_is_refused(words, text, capsys):
    with pytest.raises(SystemExit):
        parse([*words, *PYTHON])
    assert text in capsys.readouterr().err
