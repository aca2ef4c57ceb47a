# SPDX-License-Identifier: Apache-2.0
"""Every line of the table of docs/launchers.md starts a job; others are told what to set."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, clean_environ

from aids.debian import require
from aids.free_ports import free_ports
from fastps.config import load
from fastps.config.launchers import find, is_left_alone
from fastps.control import foreign_launch, rendezvous
from fastps.errors import ConfigError, TransportTimeout

LIMIT_S = 100
ROWS = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|", (ROOT / "docs/launchers.md").read_text(), re.M)
TRAIN = """
import os, numpy as np, fastps
for turn in range(2):
    fastps.init()
    total = fastps.push_pull(np.full(3, 21.0), "x", average=False)
    os.write(1, f"{fastps.rank()} of {fastps.size()}: {total.tolist()}\\n".encode())
    fastps.shutdown()
"""
EXPECTED = sorted(f"{rank} of 2: [42.0, 42.0, 42.0]" for rank in (0, 1, 0, 1))
SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=p Nodes=ALL Default=YES
"""


def environment(**more: str) -> dict[str, str]:
    kept = {n: v for n, v in clean_environ().items() if n != "FASTPS_SHARED_MEMORY"}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "OMPI_MCA_rmaps_base_oversubscribe": "1"}  # fmt: skip
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "SLURM_OVERCOMMIT": "1", **mpi, **more}


def run(lines: list[str], folder: Path, **more: str) -> list[str]:
    """Run commands beside each other; give what their programs say."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "train_torch.py").write_text(f"import fastps.torch\n{TRAIN}")
    (folder / "shared").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        parts = []
        for line in lines:
            parts.append(subprocess.Popen(
                ["bash", "-c", f"exec env {line}"], cwd=folder, env=environment(**more),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ))  # fmt: skip
            stack.callback(parts[-1].wait, LIMIT_S)
            stack.callback(parts[-1].kill)
        said = [part.communicate(timeout=LIMIT_S) for part in parts]
        assert [part.returncode for part in parts] == [0] * len(parts), said
    return sorted(re.findall(r"\d of 2: .*", "\n".join(out for out, _ in said)))


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "line", [pytest.param(line, id=name) for name, line in ROWS if "train" in line
             and not line.startswith(("mpirun", "srun", "salloc")) and " -H " not in line],
)  # fmt: skip
def test_launchers_that_are_here(line, tmp_path):
    line = line.replace("HOST", "127.0.0.1")
    line = re.sub(r"\b29\d{3}\b", str(free_ports(1)[0]), line)
    is_twice = "--nnodes 2" in line or "=R " in line
    lines = [line.replace("=R ", f"={rank} ") for rank in range(1 + is_twice)]
    more = {}
    if "FASTPS_ENCRYPT" in clean_environ():  # no launcher may carry the token then
        token = tmp_path / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex())
        more["FASTPS_TOKEN_FILE"] = str(token)
    assert run(lines, tmp_path, **more) == EXPECTED
    assert not list((tmp_path / "shared").iterdir())


@pytest.mark.alone
@pytest.mark.timeout(LIMIT_S + 300)
def test_open_mpi(tmp_path):
    require("mpirun", "openmpi-bin")
    one, several = [line for _, line in ROWS if line.startswith("mpirun")]
    assert run([one], tmp_path) == EXPECTED
    apart = several.replace("mpirun", "mpirun -x LOCAL_WORLD_SIZE=1 -x LOCAL_RANK=0")
    assert run([apart], tmp_path) == EXPECTED


@pytest.mark.alone
@pytest.mark.timeout(LIMIT_S + 300)
def test_slurm(tmp_path):
    require("srun", "slurmctld", "slurmd", "slurm-client", "munge")
    with slurm(tmp_path) as settings:
        for line in [line for _, line in ROWS if line.startswith(("srun", "salloc"))]:
            assert run([line], tmp_path, SLURM_CONF=settings) == EXPECTED
    assert not list(tmp_path.glob(".fastps*"))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[str]:
    """Run munged, slurmctld and two slurmd of this machine; give where their settings are."""
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o600)
    settings = folder / "slurm.conf"
    settings.write_text(
        SLURM.format(host=socket.gethostname(), folder=folder, ports=free_ports(3))
    )
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key",
             f"--socket={folder}/munge", f"--pid-file={folder}/munge.pid",
             f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed"]  # fmt: skip
    more = {**environment(), "SLURM_CONF": str(settings)}
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context((folder / "daemons.log").open("ab"))
            daemon = subprocess.Popen(command, env=more, stdout=log, stderr=log)
            stack.callback(daemon.wait, LIMIT_S)
            stack.callback(daemon.terminate)

        start(*munge)
        wait_until((folder / "munge").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n0")
        start("slurmd", "-D", "-N", "n1")
        seen = ["sinfo", "-h", "-o", "%T %D"]
        wait_until(lambda: "idle 2" in subprocess.run(
            seen, env=more, capture_output=True, text=True, check=False).stdout)  # fmt: skip
        yield str(settings)


def wait_until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # other people's daemons tell nobody when they are ready


@pytest.mark.parametrize(
    ("environ", "name", "is_one"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", "SLURM_STEP_ID": "1", "LOCAL_WORLD_SIZE": "2"},
         "torchrun", True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_STEP_ID": "1"},
         "mpirun", False),
        ({"SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "2"}, "srun", False),
        ({"DMLC_NUM_WORKER": "1", "BYTEPS_LOCAL_SIZE": "2"}, "BytePS", True),
        ({"MASTER_PORT": "1", "MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR", False),
        ({}, None, None),
    ],
)  # fmt: skip
def test_who_started_this_process(environ, name, is_one):
    config = load({"size": 2}, environ)
    found = find(config, environ)
    assert (found and found.name, found and found.is_one_machine) == (name, is_one)
    assert is_left_alone(config)
    assert not is_left_alone(load({"size": 2, "scheduler_port": 7}, environ))


def test_the_inner_launcher_gives_the_rank():
    """mpirun within an allocation of SLURM starts its daemons by srun, with numbers of those."""
    environ = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "OMPI_COMM_WORLD_RANK": "3",
               "OMPI_COMM_WORLD_SIZE": "4"}  # fmt: skip
    assert (load({}, environ).rank, load({}, environ).size) == (3, 4)


def test_what_to_set_where_nothing_is_private(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.7")
    with pytest.raises(ConfigError, match=r"FASTPS_MEETING_DIR .* FASTPS_TOKEN_FILE everywhere"):
        foreign_launch.meet(load({"size": 2, "rank": 1}))


def test_a_file_of_others_is_not_trusted(tmp_path):
    path = tmp_path / "board"
    board = foreign_launch.FileBoard(path)
    with pytest.raises(TransportTimeout, match="has left no file"):
        board.read(timeout_s=0.01)
    board.post("secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert board.read(timeout_s=1) == "secret"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"is not trusted .*mode 0640.*remove it"):
        board.read(timeout_s=1)
    board.clear()
    board.clear()
    assert not list(tmp_path.iterdir())


def test_a_socket_gives_its_text_until_it_is_cleared():
    name = f"fastps-test-{secrets.token_hex(8)}"
    found: list[str] = []
    board = foreign_launch.UnixBoard(name)
    reader = threading.Thread(target=lambda: found.append(
        foreign_launch.UnixBoard(name).read(timeout_s=LIMIT_S)))  # fmt: skip
    reader.start()
    board.post("secret")
    reader.join(LIMIT_S)
    assert found == ["secret"]
    board.clear()
    with pytest.raises(ConfigError, match=r"process \d+ .* began.* its own MASTER_PORT"):
        rendezvous.find(load({}), foreign_launch.UnixBoard(name), is_one_machine=True)
    with pytest.raises(ConfigError, match=r"is taken, by another job with the same MASTER_PORT"):
        foreign_launch.UnixBoard(name).post("of another job")
    board.close()
    board.close()
    with pytest.raises(TransportTimeout, match="has not called init"):
        foreign_launch.UnixBoard(name).read(timeout_s=0.01)


def test_a_forked_child_does_not_keep_the_name():
    name = f"fastps-test-{secrets.token_hex(8)}"
    board = foreign_launch.UnixBoard(name)
    board.post("secret")
    reader, writer = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.write(tell, b"1")  # it has closed its copies
        os.read(reader, 1)  # until its parent is done
        os._exit(0)
    try:
        os.close(reader)
        os.read(told, 1)
        board.close()
        again = foreign_launch.UnixBoard(name)
        again.post("secret")
        again.close()
    finally:
        for descriptor in (writer, told, tell):
            os.close(descriptor)
        os.waitpid(child, 0)


class TwoJobs:
    """Ranks of two jobs of one parent, with one MASTER_PORT."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = clean_environ() | {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip

    def start(self, program: str, rank: int) -> subprocess.Popen[str]:
        """Start a rank that waits, when it has begun, for the file `go`."""
        path = self.folder / program
        path.write_text(
            "import os, time, fastps\nfastps.init()\nprint('begun', flush=True)\n"
            f"while not os.path.exists({str(self.folder / 'go')!r}): time.sleep(0.01)\n"
        )
        return subprocess.Popen(
            [sys.executable, str(path)], env=self.environ | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def test_two_jobs_of_one_port_do_not_mix(tmp_path):
    jobs = TwoJobs(tmp_path)
    first = [jobs.start("a.py", rank) for rank in range(2)]
    try:
        assert [one.stdout.readline() for one in first] == ["begun\n"] * 2
        for rank, said in enumerate(("meeting place of this job is taken", "began with all its")):
            stderr = jobs.start("a.py", rank).communicate(timeout=LIMIT_S)[1]
            assert said in stderr
            assert "its own MASTER_PORT" in stderr
        (tmp_path / "go").touch()
        assert [one.wait(LIMIT_S) for one in first] == [0, 0]
    finally:
        for one in first:
            one.kill()
            one.communicate(timeout=LIMIT_S)


def test_a_rank_of_another_program_takes_no_place(tmp_path):
    jobs = TwoJobs(tmp_path)
    other = jobs.start("b.py", 1)
    first = [jobs.start("a.py", 0)]
    try:
        stderr = other.communicate(timeout=LIMIT_S)[1]
        assert "rank 0 runs 'a.py', this process 'b.py': two jobs use one MASTER_PORT" in stderr
        first.append(jobs.start("a.py", 1))
        assert [one.stdout.readline() for one in first] == ["begun\n"] * 2
        (tmp_path / "go").touch()
        assert [one.wait(LIMIT_S) for one in first] == [0, 0]
    finally:
        for one in (*first, other):
            one.kill()
            one.communicate(timeout=LIMIT_S)
