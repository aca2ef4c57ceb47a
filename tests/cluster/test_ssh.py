# SPDX-License-Identifier: Apache-2.0
"""fastps-run -H over real ssh servers: each host is a network namespace with its own sshd."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import secrets
import signal

import pytest
from ssh_hosts import LIMIT_S, SshHosts, everybody, hosts

pytestmark = [pytest.mark.root, pytest.mark.timeout(LIMIT_S + 90)]

SUM = """
import os, pathlib, socket, time, numpy as np, fastps
fastps.init()
total = fastps.push_pull(np.full(3, 1.0 + fastps.rank()), "x", average=False)
line = f"{fastps.rank()} of {fastps.size()} on {socket.gethostname()[-2:]}: {total.tolist()}\\n"
os.write(1, line.encode())
until = time.monotonic() + 60
while os.environ.get("HOLD") and not pathlib.Path("go").exists():
    assert time.monotonic() < until
    time.sleep(0.02)
fastps.shutdown()
"""
FAILS = """
import os, sys, numpy as np, fastps
fastps.init()
for step in range(1_000_000):
    fastps.push_pull(np.ones(1000), "x")
    if fastps.rank() == 1 and step == 3:
        sys.exit("no more data")
"""
STEPS = """
import os, time, numpy as np, fastps
fastps.init()
for step in range(1_000_000):
    fastps.push_pull(np.ones(1000), "x")
    if fastps.rank() == 2 and os.environ.get("SLOW"):
        time.sleep(0.02)
    if step == 3:
        os.write(1, f"pid {os.getpid()}\\n".encode())
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture
def lab(made: SshHosts):
    """Give the hosts; nothing of a job may be left on them."""
    yield made
    made.wait_gone()
    (made.folder / "go").unlink(missing_ok=True)


def test_sums_over_three_machines_and_no_secret_is_seen(lab):
    token = lab.folder / "job.token"
    token.touch(mode=0o600)
    token.write_text(secret := secrets.token_hex(24))
    words = ("-H", "a:1,b:2,c:0+1", "--token-file", str(token), "--env", "HOLD=1")
    with lab.started(*words, code=SUM) as leader:
        lines = sorted(leader.stdout.readline() for _ in range(3))
        assert [line.partition(" of")[0] for line in lines] == [
            "[a worker 0] 0", "[b worker 1] 1", "[b worker 2] 2",
        ]  # fmt: skip
        assert all("of 3 on h" in line and line.endswith(": [6.0, 6.0, 6.0]\n") for line in lines)
        assert {re.search("h[0-2]:", line)[0] for line in lines} == {"h0:", "h1:"}
        seen = list(everybody())
        assert (
            sum(b"fastps.launch.follower" in line for _, line, _ in seen) >= 6
        )  # ssh's and theirs
        assert not [pid for pid, *texts in seen if any(secret.encode() in t for t in texts)]
        (lab.folder / "go").touch()
        stdout, stderr = leader.communicate(timeout=LIMIT_S)
    assert (leader.returncode, stdout) == (0, ""), stderr
    assert stderr == ""


def test_the_leader_is_one_of_the_machines(lab):
    own = lab.lab.host_name(0)
    (lab.folder / "hosts").write_text(
        f"{own} slots=1  # here\n\nb:1\nroot@{lab.lab.address(2)}:1\n"
    )
    code, stdout, stderr = lab.run("--hostfile", "hosts", "--ssh-identity-file", "user", code=SUM)
    assert code == 0, stderr
    marks = [line.partition("]")[0] for line in sorted(stdout.splitlines())]
    assert sorted(marks) == sorted(
        [f"[{lab.lab.address(2)} worker 2", "[b worker 1", f"[{own} worker 0"]
    )


def test_who_fails_is_named_with_its_host_and_ends_all(lab):
    code, _, stderr = lab.run("-H", "a:1,b:1,c:1", code=FAILS)
    assert code == 1
    last = stderr.splitlines()[-1]
    assert re.search(r"worker 1 \(pid \d+\) on b ended with exit code 1; it failed first", last)
    assert last.endswith("Its last output: no more data")


def test_restarts_start_all_again(lab):
    program = (
        "import os; os.write(1, b'begun\\n'); exit(int(os.environ['FASTPS_RANK'] == '1') * 5)"
    )
    code, stdout, stderr = lab.run("-H", "a:1,b:1", "--restarts", "1", code=program)
    assert code == 5
    assert "on b ended with exit code 5; restart 1 of 1 in 1 s" in stderr
    assert stdout.count("begun") >= 2  # of b's; a's may have been ended before


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("dark", "(?:No route to host|timed out); check that the host is up"),
        ("locked", "Permission denied .*: run `ssh-copy-id locked`, or use --ssh-identity-file"),
        ("stranger", "Host key verification failed.*`ssh stranger` to accept its key"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_a_cure(lab, host, words):
    code, stdout, stderr = lab.run("-H", f"a:1,{host}:1", code="print('runs')")
    assert (code, stdout, len(stderr.splitlines())) == (255, "", 1), stderr
    assert re.search(rf"cannot start on {host} by ssh: .*{words}", stderr)


def test_what_cannot_be_started_there_is_said_in_one_line(lab):
    python = ("--remote-python", "/no/python")
    code, _, stderr = lab.run("-H", "a:1,b:1", *python, program=["true"])
    assert (code, len(stderr.splitlines())) == (255, 1)
    assert re.search("cannot start on [ab] by ssh: .*/no/python does not exist there", stderr)
    code, _, stderr = lab.run("-H", "b:1", program=["/no/such"])
    assert (code, len(stderr.splitlines())) == (127, 1)
    assert "] b cannot continue: cannot start worker 0: '/no/such'" in stderr


def read_to(terminal: int, pattern: str) -> str:
    """Read what a terminal shows until a pattern is there, or to its end."""
    shown = ""
    with contextlib.suppress(OSError):  # the other end has gone
        while not (pattern and re.search(pattern, shown)):
            shown += os.read(terminal, 65536).decode()
    return shown


@pytest.mark.parametrize("how", ["ssh", "leader", "interrupt"])
def test_nothing_is_left_when_a_connection_or_the_leader_goes(lab, how):
    with lab.started("-H", "a:1,b:2", code=STEPS) as leader:
        for _ in range(3):
            assert "pid " in leader.stdout.readline()
        if how == "ssh":
            (pid,) = [pid for pid, line, _ in everybody()
                      if line.startswith(b"ssh\0") and b"\0b\0" in line]  # fmt: skip
            os.kill(pid, signal.SIGKILL)
        else:
            leader.send_signal(signal.SIGKILL if how == "leader" else signal.SIGINT)
        stderr = leader.communicate(timeout=LIMIT_S)[1]
    assert leader.returncode == {"ssh": 255, "leader": -9, "interrupt": 130}[how]
    if how == "ssh":
        assert "the connection to b was lost" in stderr.splitlines()[-1]


def test_a_live_line_of_all_machines_on_a_terminal(lab):
    mine, theirs = pty.openpty()
    words = ("-H", "a:2,b:1", "--env", "SLOW=1")
    with lab.started(*words, code=STEPS, stderr=theirs) as leader:
        os.close(theirs)
        shown = read_to(mine, "waiting, slowest worker 2")  # who is not on the leader's machine
        line = r"\r\x1b\[K\[fastps-run\] [\d.e+]+ ops/s, [\d.]+ k?M?B/s reduced, \d+% waiting"
        assert re.search(line, shown), shown
        leader.send_signal(signal.SIGINT)
        shown = read_to(mine, "")
        assert leader.wait(LIMIT_S) == 130, shown
    os.close(mine)
