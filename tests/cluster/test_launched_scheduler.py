# SPDX-License-Identifier: Apache-2.0
"""The scheduler's process under fastps-run: its death, that of its launcher, and their channel."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import LIMIT_S, JobRunner, wait_lines

from fastps.control.actions import Phase
from fastps.control.launcher_protocol import End, FrameReader, RequestLocations, pack, unpack_news
from fastps.control.stall_inquiry import LEAST_S
from fastps.launch.output import Screen, Stream, outlets
from fastps.launch.scheduler import SchedulerProcess
from fastps.launch.scheduler_process import EXIT_DIED, LaunchedScheduler
from fastps.transport import sockets

JOINED = """
import fastps, os, pathlib, signal, time
from fastps.config import load
here = pathlib.Path(__file__).parent
def wait_for(name):
    end = time.monotonic() + 60
    while not (here / name).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
fastps.init()
print("ready", flush=True)
"""


@pytest.fixture
def job(tmp_path):
    """Start launchers of one job and check that no process of it is left."""
    found = JobRunner(tmp_path)
    yield found
    found.wait_gone()


def scheduler_of(process) -> int:
    """Return the process id that the launcher reports; it needs --log-level INFO."""
    for line in process.stderr:
        if found := re.search(r"scheduler is pid (\d+)", line):
            return int(found[1])
    raise AssertionError("the launcher has ended")


def wait_ended(pid: int) -> float:
    """Wait until a process has gone; return the seconds."""
    began = time.monotonic()
    while Path(f"/proc/{pid}").exists() and state_of(pid) != "Z":
        assert time.monotonic() < began + LIMIT_S, f"process {pid} is left"
        time.sleep(0.01)
    return time.monotonic() - began


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("rest", ["signal.pause()", "fastps.barrier(timeout_s=60)"])
def test_a_killed_scheduler_is_the_cause(job, rest):
    code = JOINED + f"if fastps.rank(): signal.pause()\n{rest}"
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert stderr.splitlines()[-1] == (
        f"[fastps-run] the scheduler (pid {pid}) was killed by SIGKILL; it failed first, so the "
        "job was ended; see docs/troubleshooting.md#it-stops"
    )


def test_a_killed_launcher_leaves_no_scheduler(job):
    code = JOINED + "signal.pause()"
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        process.kill()
        process.wait(LIMIT_S)
        wait_ended(pid)


def test_a_scheduler_that_outlives_its_launcher_serves_to_the_end(job):
    job.prelude = """
        from fastps.launch import survival
        survival.OUTLIVING = ("scheduler", "worker")
    """
    code = (
        JOINED
        + """
wait_for("killed")
fastps.barrier()
fastps.shutdown()
(here / f"done-{os.environ['FASTPS_RANK']}").touch()
"""
    )
    options = ("-np", "2", "--log-level", "INFO", "--env", "FASTPS_LINGER_S=0.5")
    with job.started(job.python(*options, code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        process.kill()
        process.wait(LIMIT_S)
        assert state_of(pid) != "Z"
        (job.folder / "killed").touch()
        wait_ended(pid)
    assert (job.folder / "done-0").exists()
    assert (job.folder / "done-1").exists()


def test_a_stopped_launcher_delays_no_heartbeat(job, monkeypatch):
    """Nor one that is busy with output: nothing of the scheduler runs in the launcher."""
    monkeypatch.setenv("FASTPS_LEASE_S", "1")
    monkeypatch.setenv("FASTPS_HEARTBEAT_S", "0.1")
    code = (
        JOINED
        + """
if fastps.rank() == 0:
    os.kill(load().launcher_pid, signal.SIGSTOP)
for _ in range(5):  # longer than the lease
    fastps.barrier()
    time.sleep(0.5)
if fastps.rank() == 0:
    os.kill(load().launcher_pid, signal.SIGCONT)
for _ in range(30000):
    print("line", flush=True)
fastps.barrier()
fastps.shutdown()
"""
    )
    result = job.run(job.python("-np", "2", code=code))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.count("line") == 60000


def test_a_stopped_scheduler_is_reported_and_resumed_for_the_end(job):
    code = JOINED + "wait_for('go'); os._exit(0)"
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        os.kill(pid, signal.SIGSTOP)
        report = next(line for line in process.stderr if "SIGSTOP" in line)
        assert report.startswith(f"[fastps-run] the scheduler (pid {pid}): stopped by a signal")
        assert f"`kill -CONT {pid}`" in report
        (job.folder / "go").touch()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_a_scheduler_that_was_stopped_before_the_start_is_to_blame(job, monkeypatch):
    """Worker 0 gives it up and ends; when it runs again, it must not blame worker 0 alone."""
    monkeypatch.setenv("FASTPS_LEASE_S", "0.6")
    code = """
import fastps, os, pathlib, time
from fastps.control.client import ControlClient
begin_pulse = ControlClient._start_pulse
def tell(self, *args):
    begin_pulse(self, *args)
    print("joined", os.getpid(), flush=True)
ControlClient._start_pulse = tell
while os.environ["FASTPS_RANK"] == "1" and not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.01)
fastps.init()
"""
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        worker = int(next(line for line in process.stdout if "joined" in line).split()[-1])
        os.kill(pid, signal.SIGSTOP)
        silent = next(line for line in process.stderr if "PeerLostError: scheduler" in line)
        assert "raise FASTPS_LEASE_S if such pauses are normal" in silent
        (job.folder / "go").touch()
        wait_ended(worker)
        os.kill(pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    lines = stderr.splitlines()
    assert lines[-1].startswith("[fastps-run] scheduler ("), stderr
    assert "is lost: it has been silent for" in lines[-1]
    assert "worker 0" in lines[-1]
    # the launcher sees that it is stopped, and may end the job before the scheduler knows
    words = "the job cannot start: worker 0: it lost the scheduler (it has been silent for"
    ended = "scheduler ends: fastps-run on the scheduler's machine ended it: scheduler ("
    assert words in stderr or ended in stderr, stderr


def test_signals_to_the_scheduler_alone_end_nothing(job):
    code = JOINED + "wait_for('go'); fastps.barrier()"
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, number)
        ignored = (line for line in process.stderr if "ignored: fastps-run ends" in line)
        found = {re.search(r"(\w+) ignored", next(ignored))[1] for _ in range(2)}
        assert found == {"SIGINT", "SIGTERM"}
        (job.folder / "go").touch()
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_an_interrupt_asks_the_workers_where_they_are_before_they_end(job):
    code = JOINED + "if fastps.rank(): wait_for('never')\nfastps.barrier(timeout_s=60)"
    with job.started(job.python("-np", "2", code=code)) as process:
        wait_lines(process, "ready", 2)
        time.sleep(2 * LEAST_S)  # shorter waits are not logged
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "wait_for" in stderr.partition("KeyboardInterrupt")[0], stderr


def test_the_scheduler_holds_no_descriptor_of_the_launcher(job):
    code = JOINED + "wait_for('go')"
    with job.started(job.python("-np", "2", "--log-level", "INFO", code=code)) as process:
        pid = scheduler_of(process)
        wait_lines(process, "ready", 2)
        shared = files_of(process.pid) & files_of(pid)
        (job.folder / "go").touch()
        process.communicate(timeout=LIMIT_S)
    (pipe,) = shared  # of the log, whose ends have one name
    assert pipe.startswith("pipe:")


def files_of(pid: int) -> set[str]:
    """Return the pipes, sockets and files that a process has open."""
    found = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {one for one in found if one != "/dev/null" and not one.startswith("anon_inode")}


# ---- the channel ----


def launched(**settings: object) -> LaunchedScheduler:
    """Return a scheduler for two workers that do not come."""
    from fastps.config import load  # noqa: PLC0415

    given = {"size": 2, "token": "9f3a61c07be2d584", "job_id": "job", "start_watch_s": 0.0}
    listeners = sockets.listen("127.0.0.1", 0)
    return LaunchedScheduler(
        load(given | settings, {}), listeners, others=0, patience_s=0.1, machines={}
    )


@pytest.fixture
def log():
    """Return the writer of a pipe, and a function that returns what was written."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    yield writer, lambda: os.read(reader, 1 << 16).decode()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "garbage", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x04\0\0\0\x93\xa3End", b"\x01\0\0\0\xc0"]
)
def test_garbage_for_orders_ends_the_scheduler(log, garbage):
    writer, read = log
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(garbage)
        assert launched().run(theirs, writer) == EXIT_DIED
    assert "so the scheduler ends" in read()


def test_orders_are_carried_out_and_answered(log):
    writer, _ = log
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(pack(RequestLocations(7)) + pack(End("the test is over")))
        assert launched().run(theirs, writer) == 0
        ours.setblocking(False)
        told = [unpack_news(body) for body in FrameReader().feed(ours.recv(1 << 16))]
    states = [one for one in told if hasattr(one, "phase")]
    assert (states[0].phase, states[-1].phase) == (Phase.LOBBY, Phase.OVER)
    assert [one.request for one in told if hasattr(one, "request")] == [7]


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a process which only stands for a scheduler."""
    made = []
    with open(tmp_path / "out", "wb") as file:
        screen = Screen(*outlets(file.fileno(), file.fileno()), has_colour=False)

        def start(run) -> SchedulerProcess:
            stderr = Stream(screen, "scheduler", rank=0, is_error=True, log=None)
            settings = SimpleNamespace(size=2, lease_s=10.0)
            work = SimpleNamespace(settings=settings, listeners=[], term=0, run=run)
            made.append(SchedulerProcess(work, stderr=stderr))
            return made[-1]

        yield start
        for scheduler in made:
            scheduler.send(signal.SIGKILL)
            scheduler.wait(LIMIT_S)
            for pipe, _ in scheduler.pipes():
                pipe.close()


def test_garbage_for_news_is_the_cause(started):
    def run(launcher, log_to):
        launcher.sendall(b"\0\0\0\0")
        signal.pause()

    scheduler, end = started(run), time.monotonic() + LIMIT_S
    while scheduler.is_alive and time.monotonic() < end:
        scheduler.receive_news()
        scheduler.wait(0.01)
    assert scheduler.exit_code == -signal.SIGKILL
    assert scheduler.describe_end().startswith("was killed by SIGKILL, because a frame between")


def test_a_scheduler_that_takes_no_orders_holds_nobody_up(started):
    scheduler = started(lambda *_: signal.pause())
    places = [("worker", rank) for rank in range(1000)]
    for _ in range(200):
        scheduler.expect_ends(places, "no reason")  # 2 MB, more than the sockets hold
    scheduler.request_locations()
    assert not scheduler.has_located
    scheduler.send(signal.SIGKILL)
    scheduler.wait(LIMIT_S)
    scheduler.expect_ends(places, "too late")
    assert scheduler.has_located
    assert scheduler.describe_end() == "was killed by SIGKILL"


def test_news_that_nobody_reads_hold_no_scheduler_up(log):
    writer, _ = log
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with ours:
        orders = b"".join(pack(RequestLocations(number)) for number in range(5000))
        ours.setblocking(False)
        sent = ours.send(orders + pack(End("the test is over")))
        assert sent == len(orders) + len(pack(End("the test is over")))
        assert launched().run(theirs, writer) == 0
