# SPDX-License-Identifier: Apache-2.0
"""fastps-run with real processes; a small stand-in takes the place of the server program.

The scheduler is the real one; nobody joins it here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launched import LIMIT_S, JobRunner, last_line, wait_lines

SERVER = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", *sys.argv[1:], flush=True)
pathlib.Path(__file__).with_name(f"up-{os.getpid()}").touch()
signal.sigwait([signal.SIGTERM])
print("orderly end", flush=True)
"""
# A worker that begins like this waits until so many stand-ins are up.
WAIT = """
import pathlib, time
def wait_up(count):
    end = time.monotonic() + 60
    while len(list(pathlib.Path(__file__).parent.glob("up-*"))) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
"""
# Worker 1 ends only after worker 0 has gone, as a reaped process shows.
GIVE_UP_FIRST = """
import os, pathlib, sys, time
mark = pathlib.Path(__file__).with_name("pid-0")
if os.environ["FASTPS_RANK"] == "0":
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)
    sys.exit("fastps.errors.PeerLostError: worker 1 is lost")
end = time.monotonic() + 60
while not mark.exists() or os.path.exists(f"/proc/{mark.read_text()}"):
    assert time.monotonic() < end
    time.sleep(0.01)
sys.exit(9)
"""
SCHEDULER = r"\[fastps-run\] the scheduler \(pid \d+\) "
FOREVER = "import signal; print('ready', flush=True); signal.pause()"


@pytest.fixture
def job(tmp_path):
    """Start launchers of one job and check that no process of it is left."""
    found = JobRunner(tmp_path)
    found.server(SERVER)
    yield found
    found.wait_gone()


def test_success_ends_servers_in_order_and_returns_zero(job):
    code = WAIT + "import sys; wait_up(2); print('out'); print('err', file=sys.stderr)"
    result = job.run(job.python("-np", "2", "-s", "2", code=code))
    assert result.returncode == 0, result.stderr
    *lines, last = result.stderr.splitlines()
    assert sorted(lines) == ["[worker 0] err", "[worker 1] err"]
    assert "no worker called fastps.init(): these were 2" in last
    lines = result.stdout.splitlines()
    assert {"[worker 0] out", "[worker 1] out"} <= set(lines)
    for role in ("server 0", "server 1"):
        assert lines.count(f"[{role}] up") == 1
        assert lines.count(f"[{role}] orderly end") == 1


def test_one_worker_alone_meets_nobody(job):
    names = "('FASTPS_SI', 'FASTPS_SC')"  # of the size, and of the scheduler
    code = f"import os; print(sorted(k for k in os.environ if k.startswith({names})))"
    result = job.run(job.python(code=code))
    assert result.returncode == 0
    assert result.stdout == "[worker 0] ['FASTPS_SIZE']\n"


def test_a_worker_under_a_shell_knows_the_launcher_among_its_ancestors(job):
    code = (
        "from fastps.config import load; from fastps.transport.pipe.ptrace import list_ancestors;"
        "print(list_ancestors().index(load().launcher_pid))"
    )
    python = shlex.join([sys.executable, "-c", code])
    result = job.run(job.command("sh", "-c", f"{python}; exit $?"))
    assert result.stdout == "[worker 0] 1\n", result.stderr  # behind the shell


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_first_failure_ends_the_job_and_is_named_last(job, end, code):
    program = f"""
        import os, signal, sys
        if os.environ["FASTPS_RANK"] == "0":
            signal.pause()
        print("the reason", file=sys.stderr, flush=True)
        {end}
    """
    result = job.run(job.python("-np", "3", "-s", "1", code=program))
    assert result.returncode == code
    how = "exit code 3" if code == 3 else "killed by SIGKILL"
    assert last_line(result).startswith("[fastps-run] worker ")
    assert how in last_line(result)
    assert "] the reason" in result.stderr
    assert last_line(result).endswith("Its last output: the reason") == (code == 3)


def test_worker_killed_from_outside(job):
    with job.started(job.python("-np", "2", "-s", "1", code=print_pid_forever())) as process:
        pid = next(int(line.split()[-1]) for line in process.stdout if "[worker 1]" in line)
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 137
    assert stderr.splitlines()[-1].startswith(f"[fastps-run] worker 1 (pid {pid}) was killed")


def test_server_that_fails_is_the_cause(job):
    job.server("import sys; sys.exit('no memory')")
    result = job.run(job.python("-np", "2", "-s", "1", code=FOREVER))
    assert result.returncode == 1
    assert last_line(result).startswith("[fastps-run] server 0 (pid ")
    assert last_line(result).endswith("so the job was ended. Its last output: no memory")
    assert result.stderr.count("no memory") == 2


def test_peer_that_gives_up_first_is_not_blamed(job):
    result = job.run(job.python("-np", "2", "-s", "1", code=GIVE_UP_FIRST))
    assert result.returncode == 9
    assert last_line(result).startswith("[fastps-run] worker 1 (pid ")
    assert last_line(result).endswith("it failed first, so the job was ended")


def test_accused_peer_gets_the_grace_to_end_by_itself(job):
    """The one that gave up has ended more than two seconds before."""
    program = GIVE_UP_FIRST.replace("is lost", "is lost: its program ended with ValueError: no")
    program = program.replace("sys.exit(9)", "time.sleep(3)\nsys.exit(9)")
    result = job.run(job.python("-np", "2", "--grace", "30", code=program))
    assert result.returncode == 9
    assert last_line(result).startswith("[fastps-run] worker 1 (pid ")
    assert last_line(result).endswith(
        "ended with exit code 9; it failed first, so the job was ended"
    )


def test_peer_that_gives_up_is_believed_when_nobody_else_fails(job):
    program = """
        import os, signal, sys
        if os.environ["FASTPS_RANK"] == "1":
            sys.exit("fastps.errors.PeerLostError: worker 0 is lost")
        signal.pause()
    """
    with job.started(job.python("-np", "2", "-s", "1", code=program)) as process:
        process.stderr.readline()  # of worker 1
        began = time.monotonic()
        last = process.stderr.readlines()[-1].rstrip()
        assert time.monotonic() - began < 9  # it waits for two seconds, not for the next event
        assert process.wait(LIMIT_S) == 1
    assert last.startswith("[fastps-run] worker 0 (pid ")
    assert last.endswith(
        "is lost; it failed first, so the job was ended; see docs/troubleshooting.md#peerlosterror"
    )


def test_server_that_fails_while_stopping_is_reported(job):
    job.server(SERVER + "sys.exit(5)\n")
    result = job.run(job.python("-np", "1", "-s", "1", code=WAIT + "wait_up(1)"))
    assert result.returncode == 0
    assert last_line(result) == "[fastps-run] server 0 ended with exit code 5 while stopping"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_workers(job, number, code):
    program = """
        import signal, sys
        wait_up(1)
        numbers = [signal.SIGINT, signal.SIGTERM]
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        print("ready", flush=True)
        print("got", signal.sigwait(numbers).name, flush=True)
    """
    program = WAIT + textwrap.dedent(program)
    with job.started(job.python("-np", "2", "-s", "1", code=program)) as process:
        wait_lines(process, "ready", 2)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert stdout.count(f"got {signal.Signals(number).name}") == 2
    assert "[server 0] orderly end" in stdout
    assert f"interrupted by {signal.Signals(number).name}" in stderr.splitlines()[-1]


PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
# A checkpoint is due at each of these, and no helper of the worker knows of them.
CHECKPOINTS = """
import signal, subprocess, sys
helper = subprocess.Popen(["sleep", "100"])
numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
while numbers:
    number = signal.sigwait(numbers)
    numbers.remove(number)
    print("got", number.name, flush=True)
helper.kill()
assert helper.wait() == -signal.SIGKILL
"""


@pytest.mark.parametrize("where", ["here", "machines"])
def test_signals_of_the_user_are_passed_on(job, where):
    command = job.python("-np", "2", code=CHECKPOINTS)
    if where == "machines":
        command = [sys.executable, "-m", "fastps.launch.run", "-H", "localhost:2", "--job-id",
                   job.job_id, sys.executable, command[-1]]  # fmt: skip
    with job.started(command) as process:
        wait_lines(process, "ready", 2)
        for number in PASSED_ON:
            process.send_signal(number)
            wait_lines(process, f"got {number.name}", 2)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    for number in PASSED_ON:
        assert stderr.count(f"[fastps-run] {number.name}: forwarded to the workers") == 1


def test_second_interrupt_ends_everything_at_once(job):
    program = """
        import signal
        signal.signal(signal.SIGINT, lambda *_: print("ignored", flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    with job.started(job.python("-np", "2", "--grace", "1000", code=program)) as process:
        wait_lines(process, "ready", 2)
        process.send_signal(signal.SIGINT)
        wait_lines(process, "ignored", 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130


def test_killed_launcher_leaves_nothing(job):
    with job.started(job.python("-np", "2", "-s", "1", code=FOREVER)) as process:
        wait_lines(process, "ready", 2)
        assert len(job.processes()) == 3
        process.kill()
        process.wait(LIMIT_S)
        job.wait_gone()


def test_helpers_of_a_worker_are_ended_too(job):
    program = """
        import os, subprocess, sys
        sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
        subprocess.Popen(sleeper)
        subprocess.Popen(sleeper, start_new_session=True)
        os._exit(0)
    """
    result = job.run(job.python("-np", "1", code=program))
    assert result.returncode == 0
    assert job.processes() == []


UPLOADER = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.write(int(sys.argv[1]), b"ready")
signal.sigwait([signal.SIGTERM])
print("uploaded", flush=True)
while "stays" in sys.argv:
    signal.pause()
"""


@pytest.mark.parametrize("stays", [[], ["stays"]])
@pytest.mark.parametrize("code", [0, 3])
def test_helpers_in_sessions_of_their_own_have_the_grace(job, code, stays):
    uploader = job.write("uploader.py", UPLOADER)
    program = f"""
        import os, subprocess, sys
        reader, writer = os.pipe()
        subprocess.Popen([sys.executable, {uploader!r}, str(writer), *{stays}],
                         pass_fds=[writer], start_new_session=True)
        os.read(reader, 5)
        os._exit({code})
    """
    grace = "0.5" if stays else "1000"
    result = job.run(job.python("--grace", grace, code=program))
    assert result.returncode == code, result.stderr
    assert "[worker 0] uploaded" in result.stdout
    killed = "left by the workers, did not end within 0.5 s, killed"
    assert (killed in result.stderr) == bool(stays)
    assert job.processes() == []


def test_stopped_worker_is_ended(job):
    with job.started(job.python("-np", "2", "-s", "1", code=print_pid_forever())) as process:
        found = {}
        while len(found) < 2:
            name, _, pid = process.stdout.readline().rpartition(" ")
            if name.startswith("[worker"):
                found[name.split("]")[0]] = int(pid)
        os.kill(found["[worker 0"], signal.SIGSTOP)
        os.kill(found["[worker 1"], signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_worker_that_is_stopped_before_its_end_is_said_and_not_waited_for(job, is_continued):
    program = """
        import os, signal, sys
        if os.environ["FASTPS_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    job.prelude = "import fastps.launch.job as job; job._STOPPED_S = job._LOOK_S = 0.1"
    grace = "1000" if is_continued else "0.2"
    with job.started(job.python("-np", "2", "--grace", grace, code=program)) as process:
        line = process.stderr.readline()
        assert line.startswith("[fastps-run] worker 1 (pid ")
        assert "stopped by a signal (SIGSTOP), and the only one left to end" in line
        pid = int(line.split("(pid ")[1].split(")")[0])
        assert f"resume it with `kill -CONT {pid}`" in line
        if is_continued:
            os.kill(pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (0 if is_continued else 1), stderr
    assert is_continued or "after its work, and not resumed within" in stderr


def test_time_limit(job):
    result = job.run(job.python("-np", "2", "--timeout", "0.5", code=FOREVER))
    assert result.returncode == 124
    assert "--timeout 0.5" in last_line(result)


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(job):
    program = """
        import os, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["FASTPS_RANK"] == "1":
            print("ready", flush=True)
            sys.stdin.read()
            sys.exit(4)
        while True:
            signal.pause()
    """
    result = job.run(job.python("-np", "2", "--grace", "0.2", code=program))
    assert result.returncode == 4
    assert "worker 1" in last_line(result)


@pytest.mark.parametrize(("word", "code"), [("no-such-program", 127), ("./not-a-program", 126)])
def test_program_that_cannot_run(job, word, code):
    (job.folder / "not-a-program").write_text("x")
    command = job.command("-np", "2", word)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=job.folder,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert result.returncode == code
    assert word in last_line(result)


def test_dry_run_starts_nothing_and_hides_the_token(job):
    result = job.run(job.python("-np", "2", "-s", "2", "--dry-run", code="open('x', 'w')"))
    assert result.returncode == 0
    commands = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == 4
    assert all("FASTPS_TOKEN=*** " in line for line in commands)
    assert result.stdout.startswith("# scheduler: a process of fastps-run")
    assert not (job.folder / "x").exists()


def test_output_dir_keeps_one_file_per_process_and_stream(job):
    folder = job.folder / "logs"
    code = "import os, sys; wait_up(1); print('o', os.environ['FASTPS_RANK'])"
    code = f"{WAIT}{code}; print('e', file=sys.stderr)"
    result = job.run(job.python("-np", "2", "-s", "1", "--output-dir", str(folder), code=code))
    assert result.returncode == 0
    assert (folder / "worker-1.stdout").read_text() == "o 1\n"
    assert (folder / "worker-0.stderr").read_text() == "e\n"
    assert (folder / "server-0.stdout").read_text() == "up\norderly end\n"
    assert (folder / "scheduler.stderr").exists()


def test_output_dir_is_for_its_user_alone_and_follows_no_links(job):
    folder, precious = job.folder / "new" / "logs", job.folder / "precious"
    command = job.python("-np", "1", "--output-dir", str(folder), code="print('o')")
    assert job.run(command).returncode == 0
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    precious.write_text("precious")
    log = folder / "worker-0.stdout"
    for make in (log.symlink_to, log.hardlink_to, lambda _: os.mkfifo(log)):
        log.unlink()
        make(precious)
        assert job.run(command).returncode == 0
        assert precious.read_text() == "precious"
        assert log.read_text() == "o\n"
        assert log.stat().st_mode & 0o777 == 0o600
    (job.folder / "link").symlink_to(folder)
    result = job.run(job.command("-np", "1", "--output-dir", str(job.folder / "link"), "true"))
    assert result.returncode == 1
    assert str(job.folder / "link") in last_line(result)


def test_output_dir_that_cannot_be_made_is_said_plainly(job):
    result = job.run(job.command("-np", "2", "--output-dir", os.devnull, "true"))
    assert result.returncode == 1
    assert os.devnull in last_line(result)
    assert "Traceback" not in result.stderr


def test_scheduler_answers_from_the_beginning(job):
    program = """
        import os, socket
        address = os.environ["FASTPS_SCHEDULER_HOST"], int(os.environ["FASTPS_SCHEDULER_PORT"])
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.0 and 32 bytes more or less"[:32])
            print("closed" if connection.recv(5) == b"" else "answered")
    """
    result = job.run(job.python("-np", "2", "--log-level", "WARNING", code=program))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[worker 0] closed", "[worker 1] closed"]
    lines = result.stderr.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("[scheduler] ")
    assert "scheduler WARNING fastps.transport.handshake_gate: refused a connection" in lines[0]


def test_scheduler_that_nobody_joins_is_the_cause(job):
    result = job.run(job.python("-np", "2", "--start-timeout", "0.3", code=FOREVER))
    assert result.returncode == 1
    assert re.match(SCHEDULER + "ended with exit code 1; it failed first", last_line(result))
    assert "nobody joined within 0.3 s" in result.stderr.splitlines()[-2]


def test_scheduler_that_dies_is_the_cause(job):
    job.prelude = """
        from fastps.launch import scheduler_process
        class Mortal(scheduler_process.Scheduler):
            async def run(self):
                raise RuntimeError("out of luck")
        scheduler_process.Scheduler = Mortal
    """
    result = job.run(job.python("-np", "2", "-s", "1", code=FOREVER))
    assert result.returncode == 1
    assert re.match(SCHEDULER + "ended with exit code 1; it failed first", last_line(result))
    assert last_line(result).endswith("Its last output: RuntimeError: out of luck")


def test_scheduler_that_does_not_end_is_cut_off(job):
    job.prelude = """
        import asyncio
        from fastps.launch import scheduler_process
        class Stubborn(scheduler_process.Scheduler):
            def stop(self, reason):
                pass
        scheduler_process.Scheduler = Stubborn
    """
    result = job.run(job.python("-np", "2", "--grace", "0.2", code="pass"))
    assert result.returncode == 0
    assert "scheduler: did not end within 0.2 s, killed" in result.stderr


def test_wrong_setting_is_said_before_anything_is_started(job):
    result = job.run(job.python("-np", "2", "--env", "FASTPS_LEASE_S=no", code="print('ran')"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert "FASTPS_LEASE_S='no'" in last_line(result)


def test_each_process_has_a_new_token_of_its_own(job):
    code = """
        import os
        assert "FASTPS_TOKEN" not in os.environ
        print(open(os.environ["FASTPS_TOKEN_FILE"]).read())
    """
    tokens = set()
    for _ in range(2):
        result = job.run(job.python("-np", "2", code=code))
        seen = {line.split()[-1] for line in result.stdout.splitlines() if "[worker" in line}
        assert {token.rpartition(":")[0] for token in seen} == {
            "fastps-own:worker:0", "fastps-own:worker:1"
        }  # fmt: skip
        tokens |= seen
    assert len(tokens) == 4


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_what_workers_start_does_not_inherit_the_token(job, is_by_hand, monkeypatch):
    """Neither before init() nor after it, whether by fork and exec or by a shell."""
    code = """
        import os, pathlib, subprocess, sys, fastps
        from fastps import config
        is_by_hand = "FASTPS_TOKEN" in os.environ
        secret = config.load().token_bytes().decode()
        assert len(secret) >= 32
        def look():
            for command in (["env"], ["sh", "-c", "sh -c env"], [sys.executable, "-c",
                    "import os; print(open('/proc/self/environ').read(), os.environ)"]):
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert "FASTPS_JOB_ID" in shown and secret not in shown, shown
        if not is_by_hand:
            look()
            assert secret not in pathlib.Path("/proc/self/environ").read_text()
        for _ in range(2):
            fastps.init()
            look()
            assert secret not in pathlib.Path("/proc/self/environ").read_text()
            fastps.shutdown()
        print("looked")
    """
    if is_by_hand:
        monkeypatch.setenv("FASTPS_TOKEN", "9f3a61c07be2d5849f3a61c07be2d584")
        monkeypatch.setenv("FASTPS_JOB_ID", job.job_id)
        result = job.run([sys.executable, job.write("train.py", code)])
    else:
        result = job.run(job.python("-np", "2", code=code))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("looked") == 2 - is_by_hand


def test_the_launcher_shows_no_token_of_its_environment(job, monkeypatch):
    token = "9f3a61c07be2d5849f3a61c07be2d584"
    monkeypatch.setenv("FASTPS_TOKEN", token)
    code = """
        import os
        with open(f"/proc/{os.getppid()}/environ") as file:
            print("FASTPS_TOKEN=" in file.read())
            file.seek(0)
            assert "SECRET" not in file.read()
    """.replace("SECRET", token)
    program = [sys.executable, job.write("train.py", code)]
    result = job.run([sys.executable, "-m", "fastps.launch.run", "-np", "1", *program])
    assert result.returncode == 0, result.stderr
    assert "True" in result.stdout


def test_token_of_a_file_stays_with_the_launcher(job):
    token = job.folder / "job.token"
    token.write_text("9f3a61c07be2d5849f3a61c07be2d584")
    token.chmod(0o600)
    code = """
        import json, os
        text = open(os.environ["FASTPS_TOKEN_FILE"]).read()
        print(json.dumps([text[:19], os.environ["FASTPS_RANK"], "FASTPS_TOKEN" in os.environ]))
    """
    result = job.run(job.python("-np", "2", "--token-file", str(token), code=code))
    for line in result.stdout.splitlines():
        mark, rank, is_shown = json.loads(line.partition("] ")[2])
        assert (mark, is_shown) == (f"fastps-own:worker:{rank}", False)
    token.chmod(0o644)
    result = job.run(job.python("-np", "2", "--token-file", str(token), code=code))
    assert result.returncode == 2
    assert "has mode 0644" in last_line(result)
    assert "run `chmod 600 " in last_line(result)


def test_reader_that_goes_away_ends_the_job(job):
    code = "while True: print('line')"
    with job.started(job.python("-np", "2", code=code)) as process:
        process.stdout.readline()
        process.stdout.close()
        process.wait(LIMIT_S)
    assert process.returncode == 141


def print_pid_forever() -> str:
    return "import os, signal; print(os.getpid(), flush=True); signal.pause()"


# ---- a reader who is behind ----

# Writes until nobody has taken a byte for a moment, then says so and goes on.
FILL = """
import os, pathlib, select, sys
def fill(rank="0"):
    line = b"%063d\\n"
    poll, count = select.poll(), 0
    poll.register(1, select.POLLOUT)
    while poll.poll(500):
        for _ in range(16):
            os.write(1, line % count)
            count += 1
    pathlib.Path(__file__).with_name("full").touch()
    return count
"""
STEPS = """
import fastps
fastps.init()
if fastps.rank() == 0:
    fill()
for step in range(6):  # longer than the lease
    fastps.barrier()
    time.sleep(0.5)
fastps.shutdown()
pathlib.Path(__file__).with_name(f"left-{fastps_rank}").touch()
"""


def wait_for_file(job, name):
    """Wait until a process of the job has made a file."""
    end = time.monotonic() + LIMIT_S
    while not (job.folder / name).exists():
        assert time.monotonic() < end, f"no {name}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "number", "code"),
    [((), signal.SIGINT, 130), ((), signal.SIGTERM, 143), (("--timeout", "5"), None, 124)],
)
def test_signals_and_time_limit_count_while_nobody_reads(job, options, number, code):
    text = FILL + "fill()\nwhile True: print('more', flush=True)"
    with job.started(job.python("-np", "2", *options, code=text)) as process:
        wait_for_file(job, "full")
        if number is not None:
            process.send_signal(number)
        process.wait(LIMIT_S)
        assert process.returncode == code
        job.wait_gone()


def test_a_signal_counts_while_the_last_is_cleared_away(job):
    """Though nobody serves signals any more: who reads must not be waited for."""
    job.prelude = """
        import signal
        from fastps.launch import job
        def sweep():
            signal.raise_signal(signal.SIGINT)
            return []
        job.sweep = sweep
    """
    with job.started(job.python("-np", "1", code=FILL + "fill()")) as process:
        process.wait(LIMIT_S)
    assert process.returncode == 130


def test_a_signal_that_another_thread_takes_ends_the_wait_for_a_reader(job):
    """The kernel gives it to any thread, and only the one that has it is woken by it."""
    job.prelude = """
        import selectors, signal, threading
        from fastps.launch import output
        def interrupt():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        class Selector(selectors.EpollSelector):
            def select(self, timeout=None):
                threading.Timer(0.2, interrupt).start()
                return super().select(timeout)
        class Selectors:
            EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
            EpollSelector = Selector
        output.selectors = Selectors
    """
    with job.started(job.python("-np", "1", code=FILL + "fill()")) as process:
        process.wait(LIMIT_S)
    assert process.returncode == 130


def test_who_reads_late_gets_everything(job):
    text = FILL + "count = fill()\nprint('end', count, flush=True)"
    with job.started(job.python("-np", "1", code=text)) as process:
        wait_for_file(job, "full")
        lines = [line.removeprefix("[worker 0] ").rstrip() for line in process.stdout]
        process.wait(LIMIT_S)
    assert process.returncode == 0
    count = int(lines[-1].split()[1])
    assert lines[:-1] == [f"{number:063d}" for number in range(count)]


def test_a_job_that_nobody_reads_goes_on_and_ends(job, monkeypatch):
    """Workers that write nothing, the scheduler and the ends of all are not held up."""
    monkeypatch.setenv("FASTPS_LEASE_S", "2")
    monkeypatch.setenv("FASTPS_HEARTBEAT_S", "0.2")
    text = FILL + STEPS.replace("{fastps_rank}", "{os.environ['FASTPS_RANK']}")
    with job.started(job.python("-np", "2", code="import time\n" + text)) as process:
        for name in ("full", "left-0", "left-1"):
            wait_for_file(job, name)
        end = time.monotonic() + LIMIT_S
        while job.processes():  # the launcher is left, for the sake of the reader
            assert time.monotonic() < end
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    assert process.returncode == 130, process.stderr.read()


def test_workers_that_never_join_were_separate_runs(job):
    result = job.run(job.python("-np", "2", code="print('trained')"))
    assert result.returncode == 0
    assert last_line(result).startswith(
        "[fastps-run] no worker called fastps.init(): these were 2"
    )


@pytest.mark.parametrize(
    "program",
    [
        # worker 0 does not come into the job, and goes on; worker 1 has never asked
        """
        import fastps, os, pathlib, time
        mark = pathlib.Path(__file__).with_name("gone")
        if os.environ["FASTPS_RANK"] == "0":
            try: fastps.init(start_timeout_s=0.1)
            except fastps.FastPSError: mark.touch()
        end = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        """,
        "import fastps; fastps.init(size=1, rank=0)",  # each in a job of its own
    ],
)
def test_workers_that_were_never_in_one_job_have_failed(job, program):
    result = job.run(job.python("-np", "2", code=program))
    assert result.returncode == 1, result.stderr
    last = last_line(result)
    assert last.startswith("[fastps-run] the 2 workers ended with code 0 but were never")
    assert "let all of them call fastps.init()" in last


def test_a_job_that_fails_is_started_again_as_a_whole(job):
    program = """
        import os, pathlib, sys, time
        commits = pathlib.Path(os.environ["FASTPS_COMMIT_DIR"])
        pathlib.Path(__file__).with_name("commits").write_text(str(commits))
        commits.joinpath(os.environ["FASTPS_RANK"]).open("a").write("x")
        runs = pathlib.Path(__file__).with_name("runs-" + os.environ["FASTPS_RANK"])
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        if os.environ["FASTPS_RANK"] == "1":
            other, until = pathlib.Path(__file__).with_name("runs-0"), time.monotonic() + 30
            while not other.exists() or other.read_text() != runs.read_text():
                assert time.monotonic() < until, "worker 0 did not start"
                time.sleep(0.01)
            assert commits.joinpath("1").read_text() == runs.read_text()  # the same in each run
            sys.exit(0 if runs.read_text() == "xxx" else f"no memory {len(runs.read_text())}")
        time.sleep(60 if runs.read_text() != "xxx" else 0)
    """
    result = job.run(job.python("-np", "2", "--restarts", "5", code=program))
    assert result.returncode == 0, result.stderr
    assert [job.folder.joinpath(f"runs-{rank}").read_text() for rank in (0, 1)] == ["xxx"] * 2
    assert not Path(job.folder.joinpath("commits").read_text()).exists()  # gone with the job
    told = [line for line in result.stderr.splitlines() if "restart" in line]
    assert len(told) == 2
    for number, line in enumerate(told, 1):
        assert line.endswith(f"ended with exit code 1; restart {number} of 5 in {number} s")
    result = job.run(job.python("-np", "2", "--restarts", "1", code="import sys; sys.exit(7)"))
    assert result.returncode == 7
    assert result.stderr.count("restart 1 of 1") == 1
