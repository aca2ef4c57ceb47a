# SPDX-License-Identifier: Apache-2.0
"""Threads of _core: named, pinned, deaf to signals, joined with a deadline; faults strike once."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from aids import faces
from fastps import _core
from fastps.errors import ConfigError, StallError


@pytest.fixture
def start():
    """Make threads that end with the test."""
    made = []

    def make(*arguments):
        made.append(faces.CoreThread(*arguments))
        return made[-1]

    yield make
    for thread in made:
        thread.stop()
        thread.join(timeout_s=30.0)


def status_of(thread: faces.CoreThread) -> dict[str, str]:
    """Read what the kernel knows of a thread."""
    lines = Path(f"/proc/self/task/{thread.tid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize(
    ("stage", "index", "name"),
    [("push", 3, "fastps:push:3"), ("a_long_stage", 12, "fastps:a_long_s"), ("", 0, "fastps::0")],
)
def test_threads_are_named_when_the_constructor_returns(start, stage, index, name):
    assert status_of(start(stage, index))["Name"] == name


@pytest.fixture
def place():
    """Place threads until the test ends."""
    yield _core.set_thread_placement
    _core.set_thread_placement([], -1)


def test_threads_made_later_are_pinned(start, place, caplog):
    cpu = max(os.sched_getaffinity(0))
    earlier = start("before", 0)
    place([cpu], -1)
    assert os.sched_getaffinity(start("after", 0).tid) == {cpu}
    assert os.sched_getaffinity(earlier.tid) == os.sched_getaffinity(0)
    place([], -1)
    assert os.sched_getaffinity(start("reset", 0).tid) == os.sched_getaffinity(0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("cpus", "node"), [([-1], -1), ([1024], -1), ([1023], -1), (range(2000), -1), ([], 5000)]
)
def test_a_refused_placement_is_tolerated_and_told(start, place, caplog, cpus, node):
    if os.sched_getaffinity(0) >= set(cpus) and cpus:
        pytest.skip("this machine has CPU 1023")
    with caplog.at_level(logging.WARNING):
        place(cpus, node)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "unpinned" in caplog.text
    assert os.strerror(errno.EINVAL) in caplog.text
    start("free", 0)


def test_numa_node_is_set_where_the_kernel_allows(start, place, caplog):
    place([], 0)
    maps = Path(f"/proc/self/task/{start('numa', 0).tid}/numa_maps")
    if not caplog.records and maps.exists():
        assert "prefer:0" in maps.read_text()
    place([], 1023)
    assert "unpinned" in caplog.text


def test_signals_are_blocked_in_our_threads_only(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    blocked = int(status_of(start("mask", 0))["SigBlk"], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM):
        assert blocked >> (number - 1) & 1
    assert not blocked >> (signal.SIGSEGV - 1) & 1  # crashes are told
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_join_keeps_its_deadline_and_the_thread(start):
    thread = start("join", 0)
    begin = time.monotonic()
    with pytest.raises(StallError, match=r"0\.1 s"):
        thread.join(timeout_s=0.1)
    assert time.monotonic() - begin >= 0.1
    assert status_of(thread)["Name"] == "fastps:join:0"
    thread.stop()
    thread.stop()
    thread.join(timeout_s=30.0)
    thread.join()
    assert thread.tid == 0


def test_alive_counts_created_and_not_ended():
    before = faces.threads_alive()
    threads = [faces.CoreThread("count", number) for number in range(5)]
    assert faces.threads_alive() == before + 5
    threads[0].stop()
    threads[0].join(timeout_s=30.0)
    assert faces.threads_alive() == before + 4
    del threads  # a collected thread is stopped and joined
    assert faces.threads_alive() == before


def test_a_forked_child_has_no_thread_and_does_not_wait_for_one(start):
    thread = start("fork", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        begin = time.monotonic()
        thread.join(timeout_s=60.0)
        os._exit(faces.threads_alive() + 2 * (time.monotonic() - begin > 30.0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert faces.threads_alive() > 0


@pytest.mark.parametrize(
    "spec",
    [
        "server_sum",
        "server_sum@0:kill",
        "server_sum@-1:kill",
        "nowhere@1:kill",
        "server_sum@1:explode",
        "server_sum@1:delay",
        "server_sum@1:exit",
        "server_sum@1:kill ",
        "SERVER_SUM@1:kill",
        "server_sum@99999999999:kill",
    ],
)
def test_fault_specs_that_do_not_parse(spec):
    with pytest.raises(ConfigError, match="server_sum@3:kill"):
        _core.arm_fault(spec)


HIT_SEVERAL_TIMES = """
import sys
sys.path[:0] = {path!r}
from aids.faces import hit_probe
from fastps import _core
_core.arm_fault(sys.argv[1])
for number in range(1, 6):
    for point in range(1, 8):
        hit_probe(point)
    print(number, flush=True)
"""


@pytest.mark.parametrize(
    ("spec", "code", "lines"),
    [
        ("", 0, 5),
        ("server_sum@3:exit7", 7, 2),
        ("worker_start@1:kill", -signal.SIGKILL, 0),
        ("link_recv@5:kill", -signal.SIGKILL, 4),
        ("link_send@2:delay1", 0, 5),
        ("server_result@6:kill", 0, 5),
    ],
)
def test_a_fault_strikes_at_the_nth_hit(spec, code, lines):
    command = [sys.executable, "-c", HIT_SEVERAL_TIMES.format(path=sys.path), spec]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stdout.split())) == (code, lines), done.stderr


def test_a_stopped_process_goes_on():
    command = [
        sys.executable,
        "-c",
        HIT_SEVERAL_TIMES.format(path=sys.path),
        "server_landing@2:stop",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().split() == [b"1", b"2", b"3", b"4", b"5"]
        assert process.wait(60) == 0


def test_a_delay_delays():
    _core.arm_fault("worker_result@2:delay50")
    try:
        begin = time.monotonic()
        faces.hit_probe(2)
        faces.hit_probe(2)
        assert time.monotonic() - begin >= 0.05
    finally:
        _core.arm_fault("")
