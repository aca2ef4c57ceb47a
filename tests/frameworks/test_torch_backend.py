# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's backend "fastps" in real jobs, and how it gets known and joins one.

One job of torchrun for each number of ranks and way to travel runs all cases of
programs_torch_backend.py and of the programs that it imports.
"""

from __future__ import annotations

import configparser
import functools
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from aids.free_ports import free_port

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "cluster"))

from fork_server import FORKING_PYTHON, forking  # noqa: E402
from harness import clean_environ  # noqa: E402
from job import run_workers  # noqa: E402

from fastps.errors import StallError  # noqa: E402

PROGRAM = HERE / "programs_torch_backend.py"
PROGRAMS = (
    PROGRAM, HERE / "programs_torch_trained.py", HERE / "programs_torch_built_on.py",
    HERE / "programs_torch_written.py",
)  # fmt: skip
CASES = [
    name
    for path in PROGRAMS
    for name in re.findall(r"^@case\ndef (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
]
TCP = {"FASTPS_SHARED_MEMORY": "0", "FASTPS_UNIX_SOCKETS": "0"}
JOB_S = 400.0


def environ(**more: str) -> dict[str, str]:
    """Give the environment of a job on one machine that may share memory, if not told else."""
    kept = forking(clean_environ()) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    kept.pop("FASTPS_SHARED_MEMORY", None)
    return kept | more


def torchrun(size: int, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program as `size` ranks of torchrun."""
    command = [
        str(FORKING_PYTHON), "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(size), "--no-python", str(FORKING_PYTHON), *words,
    ]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_S, check=False, env=environ(**more)
    )


@pytest.fixture(
    scope="module",
    params=[(2, TCP), (3, {})],
    ids=["2 ranks over TCP", "3 ranks"],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Give what became of each case, by rank, and the job's output."""
    folder = tmp_path_factory.mktemp("torchrun")
    size, travel = request.param
    job = torchrun(size, str(PROGRAM), str(folder), FASTPS_BANNER="1", **travel)
    way = "memory, TCP" if travel else "memory of this machine"
    assert f"transport: {way}" in job.stderr, job.stdout + job.stderr
    return outcomes_of(folder, size), job


def outcomes_of(folder: Path, size: int) -> list[dict[str, str]]:
    """Read what became of each case, by rank."""
    found = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in found]


@pytest.mark.timeout(JOB_S + 60)
@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    by_rank, job = results
    for rank, outcomes in enumerate(by_rank):
        outcome = outcomes.get(name, f"did not run\n{job.stdout[-3000:]}\n{job.stderr[-3000:]}")
        assert not outcome, f"rank {rank}: {outcome}"


@pytest.mark.timeout(JOB_S + 60)
def test_job_ends_well(results):
    _, job = results
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.timeout(JOB_S + 60)
def test_shards_that_are_replicated(tmp_path):
    """With 4 ranks a mesh of two dimensions has two of each."""
    job = torchrun(4, str(PROGRAM), str(tmp_path), "hsdp")
    assert outcomes_of(tmp_path, 4) == [{"hsdp": ""}] * 4, job.stdout + job.stderr


def test_job_of_the_launcher(tmp_path):
    """Neither addresses nor ranks are given to torch: it finds the job of fastps-run."""
    script = """
    import torch
    import torch.distributed as dist
    import fastps.torch as fps
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("fastps")
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model.register_comm_hook(None, fps.comm_hook())
    for step in range(3):  # torch lays out its buckets anew after the first
        model.zero_grad()
        model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    report([fps.rank(), tensor.tolist(), model.module.weight.grad.tolist()])
    dist.destroy_process_group()
    """
    result = run_workers(script, tmp_path).check()
    for rank in range(2):
        assert result.reports[rank] == ([rank, [1.0] * 3, [[0.5] * 3]],)


def test_the_store_of_a_job_listens_on_one_address(tmp_path):
    """It authenticates nobody: on all addresses, any host of the network could change its keys."""
    script = """
    import os
    import torch.distributed as dist
    import fastps.torch

    def listening():
        found = set()
        for table, nothing in (("tcp", 8 * "0"), ("tcp6", 32 * "0")):
            for line in open(f"/proc/self/net/{table}").readlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    found.add((words[9], words[1].split(":")[0] == nothing))
        return found

    def own():
        for name in os.listdir("/proc/self/fd"):
            try:
                yield os.readlink(f"/proc/self/fd/{name}").strip("socket:[]")
            except OSError:
                pass

    before = listening()
    dist.init_process_group("fastps")
    mine = set(own())
    report(sorted(is_open for inode, is_open in listening() - before if inode in mine))
    dist.barrier()
    dist.destroy_process_group()
    """
    found = [reports[0] for reports in run_workers(script, tmp_path).check().reports]
    assert sum(map(len, found)) >= 1
    assert not any(map(any, found)), found


def test_who_cannot_host_the_scheduler_tells_the_others(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch.distributed as dist, fastps.torch\n"
        "try: dist.init_process_group('fastps')\n"
        "except Exception as error:\n"
        "    sys.stdout.write(f'REFUSED {type(error).__name__} {error}\\n')  # in one piece\n"
    )
    job = torchrun(2, str(program), FASTPS_HOST="203.0.113.7")
    refused = [line for line in job.stdout.splitlines() if "REFUSED ConfigError" in line]
    assert len(refused) == 2, job.stdout + job.stderr
    assert all("203.0.113.7" in line for line in refused)


BESIDE = """
import sys, torch, torch.distributed as dist, fastps.torch

dist.init_process_group("gloo")
rank, told = dist.get_rank(), ""
try: dist.new_group([0], backend="fastps")  # no job is there, and rank 1 does not join one
except Exception as error: told = f"{type(error).__name__} {error}"
assert rank or told.startswith("ConfigError"), told
assert rank or "call fastps.init() before new_group(backend='fastps'), or make" in told, told
for turn in range(2):
    group = dist.new_group(backend="fastps")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    sys.stdout.write(f"SUM {tensor.item()}\\n")  # in one piece
    dist.destroy_process_group(group)
dist.destroy_process_group()
"""


def test_groups_beside_gloo_join_a_job(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BESIDE)
    job = torchrun(2, str(program))
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("SUM 2.0") == 4, job.stdout


def test_another_rank_than_that_of_the_job_is_refused(tmp_path):
    script = """
    import torch.distributed as dist
    import fastps.torch as fps

    fps.init()
    store = dist.FileStore(__file__ + ".store", 2)
    try:
        dist.init_process_group("fastps", store=store, rank=1 - fps.rank(), world_size=2)
    except ValueError as error:
        report(str(error))
    fps.shutdown()
    """
    result = run_workers(script, tmp_path).check()
    assert all("leave RANK and WORLD_SIZE" in reports[0] for reports in result.reports)


ALONE = """
import os, sys
from datetime import timedelta
import torch.distributed as dist, fastps.torch

def begin(rank, timeout_s, turn):
    try:
        dist.init_process_group(
            "fastps", store=dist.FileStore(sys.argv[1] + turn, 2), rank=rank, world_size=2,
            timeout=timedelta(seconds=timeout_s))
    except Exception as error:
        print(type(error).__name__, error)

begin(1, 0.5, "a")  # before rank 0 has said where the job is
begin(0, 1.5, "b")
os.environ["FASTPS_START_TIMEOUT_S"] = "1"
begin(0, 300, "c")
"""


def test_who_is_missing_is_said_after_torch_s_timeout(tmp_path):
    clear = {"FASTPS_ENCRYPT": "off"}  # torch's store may not carry the token otherwise
    job = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "store")], capture_output=True,
        text=True, check=True, timeout=100, env=environ() | clear,
    )  # fmt: skip
    told = job.stdout.splitlines()
    assert re.match(r"TransportTimeout rank 0 has not posted .* within 0\.5 s: see", told[0]), told
    for line, limit in zip(told[1:], ("1.5 s", "1 s"), strict=True):
        assert re.search(rf"within {re.escape(limit)}: .* missing: worker 1;", line), told


LOSER = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch.distributed._functional_collectives as funcol
import fastps.torch

dist.init_process_group("fastps")
model = DistributedDataParallel(torch.nn.Linear(1000, 100), bucket_cap_mb=0.1)
if dist.get_rank():
    model(torch.ones(1, 1000)).sum().backward()
    os._exit(3)
model(torch.ones(1, 1000)).sum().backward()
began = time.monotonic()
for call in (
    lambda: model(torch.ones(1, 1000)).sum().backward(),
    lambda: dist.all_reduce(torch.ones(3)),
    lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
    lambda: funcol.wait_tensor(funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)),
    lambda: dist.recv(torch.ones(3), 1),
):
    try:
        call()
        print("NO ERROR")
    except Exception as error:
        print("LOST", "worker 1" in str(error), time.monotonic() - began < 10, flush=True)
        if "worker 1" not in str(error):
            print(type(error), error)
"""


def test_a_lost_rank_is_named_wherever_the_others_wait(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOSER)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environ(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        )
        for port in [free_port()] for rank in range(2)
    ]  # fmt: skip
    try:
        out = ranks[0].communicate(timeout=90)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    assert out.count("LOST True True") == 5, out


def test_a_work_is_kept_for_a_torch_that_forgets_it(monkeypatch):
    """Before 2.7 torch's C++ loses what Python adds to a Work, then its wait() has no end."""
    module = importlib.import_module("fastps.frameworks.torch.distributed.work")
    monkeypatch.setattr(module, "_MUST_KEEP", True)
    for end in (module.Work.wait, module.Work.get_future, module.Work.is_completed):
        work = module.Work(module.Operation([], None), [], module.Completer(), 1.0)
        kept = weakref.ref(work)
        del work
        gc.collect()
        end(kept())
        gc.collect()
        assert kept() is None, end


def test_an_operation_that_could_not_be_finished_has_failed_for_all_who_wait():
    module = importlib.import_module("fastps.frameworks.torch.distributed.work")
    entered, go, calls, found = threading.Event(), threading.Event(), [], []

    def finish():
        calls.append(1)
        entered.set()
        assert go.wait(60)
        raise ValueError("no room")

    operation = module.Operation([], finish)

    def wait():
        try:
            operation.complete(60.0)
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    wait()
    assert found == ["no room"] * 9
    assert calls == [1]


def test_a_time_that_is_over_is_no_error_of_the_operation():
    module = importlib.import_module("fastps.frameworks.torch.distributed.work")

    class Late:
        has_failed = False
        waits = 0

        def poll(self):
            return True  # it ends while the error is on its way

        def wait(self, timeout_s):
            self.waits += 1
            if self.waits == 1:
                raise StallError(f"{timeout_s} s are over")

    operation = module.Operation([Late()], None)
    with pytest.raises(StallError):
        operation.complete(0.0)
    assert operation.error is None
    operation.complete(0.0)


def test_groups_end_with_a_torch_that_only_ends_nccl_s(monkeypatch):
    """Before 2.7 destroy_process_group() calls this for each group, and shutdown() of none."""
    backend = importlib.import_module("fastps.frameworks.torch.distributed.backend")
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    told = []
    monkeypatch.setattr(c10d, "_shutdown_backend", told.append, raising=False)
    backend._patch_shutdown()
    for name in ("fastps", "gloo"):
        ended = functools.partial(told.append, f"{name} ended")
        c10d._shutdown_backend(SimpleNamespace(name=lambda name=name: name, shutdown=ended))
    assert told[0] == "fastps ended"
    assert [group.name() for group in told[1:]] == ["gloo"]


PROBE = """
import sys, torch
import torch.distributed as dist
print(dist.is_backend_available("fastps"), "fastps.session.session" in sys.modules)
"""


def install(folder):
    """Make Python believe that fastps is installed there, entry points and all; give the path."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    entry = metadata["options.entry_points"]["torch.backends"].strip()
    installed = folder / "fastps-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fastps\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize(
    "face", ["fastps.torch", "fastps.frameworks.torch.distributed.process_group"]
)
def test_torch_may_be_imported_by_us(tmp_path, face):
    """Who imports fastps.torch and no torch before has torch load our backend meanwhile."""
    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {face}\n{PROBE}"], capture_output=True,
        text=True, check=False, env=environ(PYTHONPATH=install(tmp_path)),
    )  # fmt: skip
    assert probe.stdout.split()[:1] == ["True"], probe.stderr


@pytest.mark.parametrize("is_on", [True, False])
def test_importing_torch_makes_the_backend_known(tmp_path, is_on):
    path = install(tmp_path)
    words = {} if is_on else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True,
        check=True, env=environ(PYTHONPATH=path, **words),
    )  # fmt: skip
    assert probe.stdout.split() == [str(is_on), "False"]
