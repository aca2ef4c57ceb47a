# SPDX-License-Identifier: Apache-2.0
"""Roles that DMLC_ variables name, with fastps-server and with bpslaunch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fork_server import FORKING_PYTHON, forking

from aids.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
PYTHON = str(FORKING_PYTHON)
SERVER = [PYTHON, "-m", "fastps.server.main"]
LAUNCH = [PYTHON, "-m", "fastps.launch.byteps"]
TRAIN = """
import os, numpy as np, fastps.torch as bps, torch
bps.init()
total = bps.push_pull(torch.full((3,), 21.0), average=False, name="x")
line = f"{bps.size()} {bps.local_size()} {total.tolist()}\\n"
os.write(1, line.encode())
if "BYTEPS_LOCAL_RANK" in os.environ:  # of bpslaunch
    places = bps.rank(), bps.local_rank(), bps.size(), bps.local_size()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert places == tuple(int(os.environ[name]) for name in names)
bps.shutdown()
"""


JUDGE = {
    "DMLC_ROLE": "worker", "DMLC_WORKER_TYPE": "validator", "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_VALIDATOR": "1",
}  # fmt: skip
ZENO = """
import os, sys, numpy as np, fastps
fastps.init()
w = {"w": np.zeros(5, np.float32)}
if fastps.role() == "validator":
    judge = fastps.Validator(w, "average")
    judge.round()
    found, who = judge.arrays[0], fastps.validator_rank()
    judge.close()
else:
    held = fastps.HeldParameters(w)
    held.push([np.full(5, 3.0 + fastps.rank(), np.float32)])
    held.pull(stamp=1)
    found, who = held.arrays[0], fastps.rank()
os.write(1, f"{fastps.role()} {who} {sys.argv[1:]} {found.tolist()}\\n".encode())
fastps.shutdown()
"""


def start(argv: list[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FASTPS_", "DMLC_"))}
    environment = {**forking(kept), "PYTHONPATH": str(ROOT), "FASTPS_LINGER_S": "1", **more}
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def job_of(secret: str, machines: int) -> dict[str, str]:
    return {
        "DMLC_NUM_WORKER": str(machines), "DMLC_NUM_SERVER": "1", "FASTPS_TOKEN": secret,
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_INTERFACE": "127.0.0.1",
    }  # fmt: skip


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("by", ["fastps-server", "bpslaunch"])
def test_a_job_of_two_machines(tmp_path: Path, by: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    train = [PYTHON, "train.py"]
    more = job_of("9f3a61c07be2d584" * 2, 2)
    first, size = (SERVER, 1) if by == "fastps-server" else ([*LAUNCH, "nothing"], 2)
    if size == 2:
        more["BYTEPS_LOCAL_SIZE"] = "2"
    apart = [{**more, "FASTPS_MACHINE": str(machine)} for machine in range(2)]
    parts = [start(first, tmp_path, DMLC_ROLE=role, **more) for role in ("scheduler", "server")]
    parts += [
        start(train if size == 1 else [*LAUNCH, *train], tmp_path, DMLC_ROLE="worker",
              DMLC_WORKER_ID=str(machine), **apart[machine])
        for machine in range(2)
    ]  # fmt: skip
    found = [part.communicate(timeout=LIMIT_S) for part in parts]
    assert [part.returncode for part in parts] == [0] * 4, found
    lines = "".join(out for out, _ in found[2:]).splitlines()
    total = 21.0 * 2 * size
    assert lines == [f"{2 * size} {size} {[total] * 3}"] * (2 * size)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("by", ["fastps-server", "bpslaunch"])
@pytest.mark.parametrize("workers", [1, 2])
def test_validators_run_the_program_of_the_workers(tmp_path: Path, by: str, workers: int) -> None:
    (tmp_path / "train.py").write_text(ZENO)
    train = [PYTHON, "train.py", "--to", "the", "program"]
    more = job_of("9f3a61c07be2d584" * 2, workers) | {"DMLC_NUM_VALIDATOR": "2"}
    ours = SERVER if by == "fastps-server" else [*LAUNCH, "nothing"]
    parts = [start(ours, tmp_path, DMLC_ROLE=role, **more) for role in ("scheduler", "server")]
    judge = [*SERVER, "--role", "validator", "--"] if by == "fastps-server" else LAUNCH
    parts += [
        start([*judge, *train], tmp_path, DMLC_ROLE="worker", DMLC_WORKER_TYPE="validator",
              DMLC_VALIDATOR_ID=str(number), **more)
        for number in range(2)
    ]  # fmt: skip
    parts += [
        start([*(LAUNCH if by == "bpslaunch" else []), *train], tmp_path, DMLC_ROLE="worker",
              DMLC_WORKER_TYPE="worker", DMLC_WORKER_ID=str(number), **more)
        for number in range(workers)
    ]  # fmt: skip
    found = [part.communicate(timeout=LIMIT_S) for part in parts]
    assert [part.returncode for part in parts] == [0] * (4 + workers), found
    lines = "".join(out for out, _ in found[2:]).splitlines()
    mean = (3.0 + (4.0 if workers == 2 else 0.0)) / 2
    told = f"['--to', 'the', 'program'] {[mean] * 5}"
    who = [("validator", 0), ("validator", 1), *(("worker", n) for n in range(workers))]
    assert lines == [f"{role} {number} {told}" for role, number in who]


def test_one_machine_needs_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    parts = [
        start([*LAUNCH, PYTHON, "train.py"], tmp_path, DMLC_ROLE=role,
              NVIDIA_VISIBLE_DEVICES="0,1", DMLC_NUM_WORKER="1")
        for role in ("worker", "server")
    ]  # fmt: skip
    found = [part.communicate(timeout=LIMIT_S) for part in parts]
    assert [part.returncode for part in parts] == [0, 0], found
    assert found[0][0].count("2 2 [42.0, 42.0, 42.0]") == 2
    assert found[1][0] == ""


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (["train.py"], {"DMLC_ROLE": "server"}, "init() is for workers"),
        (SERVER[1:], {"DMLC_ROLE": "worker"}, "start the training script in its place"),
        ([*LAUNCH[1:], "x"], {"DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER='' must be a whole number"),
        ([*LAUNCH[1:], "x"], {"DMLC_NUM_WORKER": "2"}, "DMLC_WORKER_ID='' must be a whole number"),
        (LAUNCH[1:], {"DMLC_NUM_WORKER": "1"}, "no command given"),
        (LAUNCH[1:], JUDGE, "no command given"),
        ([*LAUNCH[1:], "x"], JUDGE, "DMLC_VALIDATOR_ID='' must be a whole number"),
        ([*SERVER[1:], "--role", "validator"], JUDGE, "a validator runs the workers' program"),
        (SERVER[1:], JUDGE, "a validator runs the workers' program"),
        ([*SERVER[1:], "--role", "validator", "--", "x"], {}, "needs FASTPS_NUM_VALIDATORS"),
        ([*SERVER[1:], "--", "./none"], JUDGE | {"DMLC_VALIDATOR_ID": "0"}, "cannot be started"),
        ([*SERVER[1:], "--", "x"], JUDGE | {"DMLC_VALIDATOR_ID": "1"}, "NUM_VALIDATORS above it"),
        ([*SERVER[1:], "--", "x"], {}, "a server runs no program, and 'x' was given"),
    ],
)
def test_wrong_roles_are_told(
    tmp_path: Path, argv: list[str], environ: dict[str, str], text: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    part = start([PYTHON, *argv], tmp_path, **environ)
    _, told = part.communicate(timeout=LIMIT_S)
    assert part.returncode != 0
    assert text in told


def test_a_worker_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = "import os, sys, time; rank = os.environ['BYTEPS_LOCAL_RANK']\n"
    script += "sys.exit(7) if rank == '1' else time.sleep(60)"
    (tmp_path / "train.py").write_text(script)
    part = start([*LAUNCH, PYTHON, "train.py"], tmp_path, DMLC_NUM_WORKER="2",
                 DMLC_WORKER_ID="0", BYTEPS_LOCAL_SIZE="2")  # fmt: skip
    part.communicate(timeout=30)
    assert part.returncode == 7
