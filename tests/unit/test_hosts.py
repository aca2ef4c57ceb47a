# SPDX-License-Identifier: Apache-2.0
"""Which hosts a job is to have, from words, files and other launchers' options."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import ConfigError
from fastps.launch import allocation
from fastps.launch.follower import check_version, go_to
from fastps.launch.hosts import Host, parse_hostfile, parse_hosts
from fastps.launch.layout import Layout
from fastps.launch.leader import STAYS, command, rendezvous_host, request, way_to
from fastps.launch.limits import StartError
from fastps.launch.machine import Machine
from fastps.launch.options import parse
from fastps.launch.output import Screen, outlets
from fastps.launch.request import pack, unpack

NAMES = st.from_regex(
    r"(?:[a-z][a-z0-9_]{0,5}@)?[a-z0-9](?:[a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True
)
COUNTS = st.tuples(st.integers(0, 4096), st.integers(0, 9), st.integers(0, 9))
HOSTS = st.lists(st.tuples(NAMES, COUNTS), min_size=1, max_size=6, unique_by=lambda pair: pair[0])
RUN = ("python", "train.py")


@given(HOSTS)
def test_a_list_says_the_same_as_the_lines_of_a_file(hosts):
    expected = tuple(Host(name, counts) for name, counts in hosts)
    words = [(name, "+".join(map(str, counts))) for name, counts in hosts]
    assert parse_hosts(",".join(f"{name}:{text}" for name, text in words)) == expected
    lines = "\n".join(f"  {name}:{text}  # {name}\n" for name, text in words)
    assert parse_hostfile(f"# hosts\n{lines}", "hosts") == expected
    lines = "\n".join(
        f"{name} slots={a} max_slots=9 servers={b} validators={c}" for name, (a, b, c) in hosts
    )
    assert parse_hostfile(lines, "hosts") == expected


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_an_error_and_no_name_is_an_option(text):
    try:
        hosts = parse_hosts(text)
    except ValueError:
        return
    for host in hosts:
        assert host.name
        assert not host.name.startswith("-")
        assert not set(host.name) & set(" \t\n'\"$`;&|<>()")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:4,c:0+1", [("a", (4, 0, 0)), ("b", (4, 0, 0)), ("c", (0, 1, 0))]),
        ("a, b", [("a", None), ("b", None)]),
        ("me@a.example:2+1+1", [("me@a.example", (2, 1, 1))]),
        ("[::1]:2,[fe80::1%eth0],you@[fd00::1]:3",
         [("::1", (2, 0, 0)), ("fe80::1%eth0", None), ("you@fd00::1", (3, 0, 0))]),
        ("10.0.0.1:2", [("10.0.0.1", (2, 0, 0))]),
        ("a,b,a", [("a", (2, 0, 0)), ("b", (1, 0, 0))]),
    ],
)  # fmt: skip
def test_hosts_are_read(text, hosts):
    assert parse_hosts(text) == tuple(Host(name, counts) for name, counts in hosts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("::1", r"IPv6 address in brackets, such as \[fd00::1\]:4"),
        ("a:", "after the colon comes WORKERS"),
        ("a:-1", "after the colon comes WORKERS"),
        ("a:\u0664", "after the colon comes WORKERS"),
        ("a:5000", "at most 4096"),
        ("a:1+1+1+1", "after the colon"),
        ("-oProxyCommand=x:1", "is not a host; write HOST:WORKERS"),
        ("a b:1", "is not a host; write HOST:WORKERS"),
        ("a;reboot", "is not a host; write HOST:WORKERS"),
        ("x@-a:1", "is not a host; write HOST:WORKERS"),
        ("a:1,b:1,a:2", "names a twice"),
    ],
)
def test_what_is_no_host_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=4\nb slots=x", "hosts, line 2: 'slots=x' is not understood"),
        ("a 4", "write a line as `a slots=4`"),
        ("a:2 slots=4", "its number twice"),
        ("# nothing", "hosts names no host"),
    ],
)
def test_what_is_no_line_of_a_hostfile_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("words", "workers", "servers"),
    [
        (["-H", "a:4,b:4,c:0+1"], (4, 4, 0), (0, 0, 1)),
        (["-H", "a,b", "-np", "4"], (4, 4), (0, 0)),
        (["-H", "a,b"], (1, 1), (0, 0)),
        (["-H", "a:2,b:2", "-s", "1"], (2, 2), (1, 1)),
        (["-H", "a:4,b:4", "-np", "8"], (4, 4), (0, 0)),  # Horovod's total
        (["-H", "a:4,b:4", "-n", "6"], (4, 2), (0, 0)),
        (["-H", "a:4,b:4", "--num-proc", "3"], (3,), (0,)),
        (["-H", "a,b", "-n", "6"], (3, 3), (0, 0)),
        (["-n", "6"], (6,), (0,)),
        (["--nproc_per_node", "3"], (3,), (0,)),
        (["--host", "a:1"], (1,), (0,)),
    ],
)
def test_numbers_of_other_launchers_are_understood(words, workers, servers):
    options = parse([*words, *RUN])
    assert (options.layout.workers, options.layout.servers) == (workers, servers)
    assert len(options.hosts) in (0, len(workers))


def test_torchruns_words_for_several_machines():
    words = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4", "--master-addr", "a",
             "--master_port", "29500"]  # fmt: skip
    options = parse([*words, *RUN])
    assert options.layout == Layout((4, 4), (0, 0), 1, (0, 0))
    assert (options.scheduler_host, options.scheduler_port) == ("a", 29500)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["-H", "a:4,b:4", "-np", "4"], "numbers of the hosts, 4,4; leave -np out"),
        (["-H", "a:4,b"], "host b has no number of workers"),
        (["-H", "a:1,b:0"], "b has neither workers nor servers"),
        (["-H", "a:1", "--hostfile", "x"], "give one of them"),
        (["--hostfile", "/no/such"], "--hostfile /no/such cannot be read"),
        (["-H", "a:1,b:1", "--machine-rank", "0"], "--machine-rank is for one command on each"),
        (["-H", "a:1,b:1", "--machines", "3"], "there are 2 hosts"),
        (["-H", "a,b", "-n", "3"], "cannot be split evenly over 2 machines"),
        (["-H", "a:1,b:1", "-n", "3"], "-n 3 is more than the 2 workers"),
        (["-n", "3", "-np", "3"], "give one"),
        (["--nnodes", "1:4"], "whole number"),
        (["--nproc-per-node", "gpu"], "whole number"),
        (["--rdzv-endpoint", "a:1"], "--scheduler-host"),
        (["--standalone"], "one machine needs no flag"),
        (["--host-discovery-script", "x", "--min-np", "2"], "needs --min and --max"),
        (["--host-discovery-script", "x", "-H", "a"], "lists the hosts"),
        (
            ["--host-discovery-script", "x", "--min-np", "2", "--max-np", "4", "-s", "1"],
            "leave out -s",
        ),
    ],
)
def test_words_that_mean_something_else_are_answered(words, answer, capsys):
    with pytest.raises(SystemExit):
        parse([*words, *RUN])
    assert answer in capsys.readouterr().err.replace("\n", " ")


def test_options_travel_whole():
    options = parse([
        "-H", "a:2,b:1+1", "--env", "A=b c", "--grace", "2", "--output-dir", "logs", "--gdb",
        "--scheduler-port", "7000", "--io-threads", "3", "--log-level", "INFO", *RUN,
    ])  # fmt: skip
    there = unpack(json.loads(json.dumps(pack(options, 1))))
    assert there.layout == dataclasses.replace(options.layout, machine=1)
    own = {
        "hosts": (),
        "environment": tuple(options.environment),
        "layout": there.layout,
        "is_placed": True,
        "is_counted": True,
    }
    assert there == dataclasses.replace(options, **own)


def test_what_travels_and_what_stays():
    options = parse(["-H", "b:1", *RUN])
    given = {"FASTPS_RAIL": "x", "PYTHONPATH": "lib", "HOME": "/root", STAYS[0]: "10.0.0.1"}
    words = request(options, 0, "ssh", given)
    assert words["environment"] == {"FASTPS_RAIL": "x", "PYTHONPATH": "lib"}
    assert request(options, 0, "here", given)["environment"][STAYS[0]] == "10.0.0.1"


def test_nothing_that_a_shell_reads_is_unquoted():
    words = ["-H", "me@[fd00::1]:1", "--remote-python",
             "/opt/my python/$(reboot)", "--ssh-port", "2222", "--ssh-identity-file", "k",
             "--ssh-args", "-F 'my config'"]  # fmt: skip
    options = parse([*words, *RUN])
    line = command(options.hosts[0], "ssh", options, {"PYTHONPATH": "/a;b"})
    assert line[:3] == ("ssh", "-F", "my config")
    assert line[-3:-1] == ("--", "me@fd00::1")
    assert line[-7:-3] == ("-p", "2222", "-i", "k")
    said = subprocess.run(
        ["sh", "-c", line[-1].replace("exec env", "printf '%s\\n'")],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert said.stdout.splitlines()[:2] == ["PYTHONPATH=/a;b", "/opt/my python/$(reboot)"]


def test_how_a_host_is_reached():
    options = parse(["-H", "a:1", *RUN])
    here = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    assert {way_to(Host(name), options) for name in here} == {"here"}
    assert {way_to(Host(name), options) for name in ("me@localhost", "a", "203.0.113.7")} == {
        "ssh"
    }
    assert way_to(Host("localhost"), dataclasses.replace(options, has_srun=True)) == "srun"


@pytest.mark.parametrize(
    ("told", "host"),
    [
        ([{"own": "10.0.0.1", "theirs": "10.0.0.9"}, {"own": "10.0.0.2"}], "10.0.0.1"),
        ([{}, {"own": "10.0.0.2", "theirs": "10.0.0.9"}], "10.0.0.9"),  # machine 0 is here
        ([{"own": "127.0.0.1"}, {"own": "10.0.0.2", "theirs": "10.0.0.9"}], "10.0.0.9"),
        ([{}, {}], "127.0.0.1"),
    ],
)
def test_where_the_scheduler_is_met(told, host):
    assert rendezvous_host(told) == host


def test_a_follower_refuses_another_version_and_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="install the same version on all"):
        check_version("0.0.1")
    with pytest.raises(ConfigError, match=r"the folder of the job, .*/none, cannot be used"):
        go_to(str(tmp_path / "none"))


def test_a_follower_started_by_hand_says_what_it_is():
    words = [sys.executable, "-m", "fastps.launch.follower"]
    with open("/dev/null") as nothing:
        done = subprocess.run(words, stdin=nothing, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "starts this program on each host" in done.stderr


# ---- SLURM


def slurm(step: str = "", count: str = "2", **more: str) -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": count, "SLURM_STEP_ID": step,
            "SLURM_TASKS_PER_NODE": "4(x2)", **more}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "environ", "workers"),
    [
        ([], slurm(), (1, 1)),
        ([], slurm(SLURM_NTASKS="8"), (4, 4)),
        ([], slurm(SLURM_NTASKS="3", SLURM_TASKS_PER_NODE="2,1"), (2, 1)),
        (["-np", "2"], slurm(SLURM_NTASKS="8"), (2, 2)),
        ([], slurm(step="4294967290"), (1, 1)),  # salloc's own shell
        ([], slurm(step="0"), None),
        ([], slurm(count="1"), None),
        (["--machines", "1"], slurm(), None),
        (["-H", "a:1"], slurm(), None),
        ([], {}, None),
    ],
)
def test_the_nodes_of_an_allocation(words, environ, workers, monkeypatch):
    monkeypatch.setattr(allocation, "names_of", lambda nodes: ["n0", "n1"])
    options = parse([*words, *RUN])
    found = allocation.spread(options, environ)
    if workers is None:
        assert found == options
    else:
        assert found.layout.workers == workers
        assert (found.has_srun, found.hosts) == (True, (Host("n0"), Host("n1")))


def test_an_allocation_without_scontrol_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--machines 1 to run on this machine alone"):
        allocation.spread(parse([*RUN]), slurm())


# ---- what ssh says


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "check the host name"),
        ("ssh: connect to host b port 22: Connection refused", "set --ssh-port"),
        ("ssh: connect to host b port 22: Connection timed out", "can be reached"),
        (
            "No RSA host key is known\nHost key verification failed.",
            "with `ssh b` to accept",
        ),
        ("root@b: Permission denied (publickey).\nbye", "`ssh-copy-id b`, or use --ssh-identity"),
        ("/x/python: No module named 'fastps'", "install the same version of fastps there for /x"),
        ("env: '/x/python': No such file or directory", "/x/python does not exist there"),
        ("kex_exchange_identification: read: x", "kex_exchange"),
        ("", "by sh: ended with exit code 7"),
    ],
)
def test_what_ssh_says_has_a_cure(said, words, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        screen = Screen(*outlets(out.fileno(), out.fileno()), has_colour=False)
        machine = Machine(
            1, "b", ["sh", "-c", 'printf "%s\\n" "$0" >&2; exit 7', said], environment={},
            screen=screen, mark="mark", python="/x/python",
        )  # fmt: skip
        for pipe, stream in machine.pipes():
            stream.receive(pipe.read(), now=0.0)
            pipe.close()
        machine.wait(30)
    assert machine.exit_code == 255
    assert machine.describe() == "cannot start on b"
    assert words in machine.describe_end()
    assert (tmp_path / "out").read_bytes() == b""


def test_a_request_that_no_pipe_holds_is_refused(tmp_path):
    with (tmp_path / "out").open("wb") as out:
        screen = Screen(*outlets(out.fileno(), out.fileno()), has_colour=False)
        machine = Machine(
            0, "a", ["sleep", "60"], environment={}, screen=screen, mark="mark", python=""
        )
        with pytest.raises(StartError, match="too long to be sent"):
            machine.order({"x": "y" * (2 << 20)})
        machine.send(9)
        machine.wait(30)
        for pipe, _ in machine.pipes():
            pipe.close()
    assert machine.describe_end().endswith("killed by SIGKILL")
