# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an elastic job dies: its launcher starts another one, and no step is lost."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Sequence

import pytest
from harness import slowed
from test_join_launched import write_program
from watched_job import LAYOUTS, job, two_launchers

from fastps.control.view_log import read_records

NEW_ONE_S = 2.5  # from a kill to the view after it; the best of some on a loaded machine


def digests(shown: str, ranks: Sequence[int] = (0, 1, 2)) -> set[str]:
    """Return the digests of the sums of workers that have all come to their end."""
    found = dict(re.findall(r"worker (\d)\] END (\w+)", shown))
    assert found.keys() == set(map(str, ranks)), shown
    return set(found.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_is_lost(layout, tmp_path):
    """Killed five times: at work, before others have come back to it, and while a view changes."""
    log, times = tmp_path / "views.jsonl", []
    with job(70, "--view-log", str(log), layout=layout) as run:
        for kill in range(2):
            run.wait("STEP", 20 + 60 * kill)
            killed = run.kill_scheduler()
            found = run.wait(rf"VIEW {kill + 2} ([\d.]+)", 3)
            times.append(float(found[1]) - killed)
        run.wait("STEP", 140)
        run.kill_scheduler()
        run.kill_scheduler()
        run.wait("took over from", 3)
        run.kill_scheduler()
        shown = run.end()
    print(f"{layout}: the next view began after", *(f"{one:.2f} s" for one in times))
    assert run.process.returncode == 0, shown
    assert len(digests(shown)) == 1
    assert "continue without it" not in shown
    assert min(times) < slowed(NEW_ONE_S)
    records = read_records(str(log))
    assert {one.workers for one in records} == {(0, 1, 2)}
    assert records[-1].committed["t0"] == 70


def test_one_that_is_stopped_is_replaced():
    """Members that have given it up come back, and leave in order at the end."""
    with job(60) as run:
        run.wait("STEP", 20)
        stopped = run.kill_scheduler(signal.SIGSTOP)
        found = run.wait(r"VIEW 2 ([\d.]+)", 3)
        shown = run.end()
    print(f"the next view began after {float(found[1]) - stopped:.2f} s")
    assert run.process.returncode == 0, shown
    assert "is stopped by a signal (SIGSTOP), so it is killed" in shown
    assert len(digests(shown)) == 1
    assert float(found[1]) - stopped < slowed(1.0 + NEW_ONE_S)


def test_the_launcher_of_one_of_two_machines_starts_another_one(tmp_path):
    """The third time a worker of the other machine dies too."""
    with two_launchers(tmp_path, steps=70) as (here, there):
        for kill in range(2):
            there.wait("STEP", 10 + 20 * kill)
            here.kill_scheduler()
            there.wait(f"VIEW {kill + 2}")
        there.wait("STEP", 50)
        here.kill_scheduler()
        there.kill_worker(2)
        there.end()
        shown = here.end()
    assert here.process.returncode == 0, shown
    assert len(digests(shown, (0, 1))) == 1
    assert len(re.findall(r"^\[fastps-run\].* takes over$", shown, re.M)) == 3, shown


def test_the_other_launcher_hears_the_first_cause_from_the_one_that_took_over(tmp_path):
    """It cannot see itself that its worker, which is only stopped, is lost."""
    with two_launchers(tmp_path, steps=400, least="3") as (here, there):
        there.wait("STEP", 10)
        here.kill_scheduler()
        there.wait("VIEW 2")
        there.kill_worker(2, signal.SIGSTOP)
        shown = there.end()
        here.end()
    assert there.process.returncode != 0
    assert re.search(r"worker 2 \(pid \d+\) is lost: it was silent", shown.splitlines()[-1]), shown


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_dies_too_and_the_job_can_be_made_again(layout, tmp_path):
    log = tmp_path / "views.jsonl"
    with job(50, "--view-log", str(log), layout=layout) as run:
        run.wait("STEP", 30)
        run.kill_scheduler()
        run.kill_worker(2)
        shown = run.end()
    assert run.process.returncode == 0, shown
    survivors = digests(shown, (0, 1))
    assert len(survivors) == 1
    with job(50, "--replay", str(log), layout=layout) as again:
        shown = again.end()
    assert again.process.returncode == 0, shown
    assert digests(shown, (0, 1)) == survivors


def test_workers_that_are_about_to_join_do_so_later(tmp_path):
    """Killed when one is about to say hello, when it waits, and as soon as it has joined."""
    program = write_program(tmp_path, victim=2)
    with job(0, "--respawn", "1", program=program) as run:
        run.wait("is started instead")
        run.kill_scheduler()
        run.wait("waits to join")
        run.kill_scheduler()
        run.wait("view .* joined")
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode == 0, shown
    assert shown.count("LAST 7 3") == 3, shown


def test_too_few_are_left_when_both_die():
    with job(400, least="3") as run:
        run.wait("STEP", 20)
        run.kill_worker(1)
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode != 0
    assert re.search(r"worker 1.*killed by SIGKILL", shown), shown


def test_a_scheduler_that_dies_before_the_start_ends_the_job():
    with job(10) as run:
        run.wait("scheduler is pid")
        run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode != 0
    assert "killed by SIGKILL" in shown


def test_one_that_dies_while_workers_leave_changes_no_exit_code():
    with job(20) as run:
        run.wait("STEP 19")
        run.kill_scheduler()
        run.wait("END")
        with contextlib.suppress(ProcessLookupError):  # it has ended with the job
            run.kill_scheduler()
        shown = run.end()
    assert run.process.returncode == 0, shown
    assert len(digests(shown)) == 1
