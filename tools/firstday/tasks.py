# SPDX-License-Identifier: Apache-2.0
"""The table of tasks: what a newcomer types on the first day, and which words must be seen.

Programs are those that the pages print, or a file of examples/ that they name. Commands are those
of the pages too. A pattern is searched in all that the commands wrote, line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CRASH = r"Traceback|Segmentation|core dumped"


@dataclass(frozen=True)
class Task:
    """One thing that a newcomer does."""

    name: str
    types: str
    seen: tuple[str, ...]
    never: tuple[str, ...] = (CRASH,)
    limit_s: float = 60.0
    status: int = 0  # of the last command
    files: dict[str, str] = field(default_factory=dict)
    after: str = ""  # a task that must have succeeded
    pythons: tuple[str, ...] = ()  # empty: all
    why_not: str = ""  # for other Pythons
    machines: bool = False  # root, with a network of its own


def block(page: str, word: str) -> str:
    """Return the first block of code on a page that has a word."""
    for found in re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S):
        if word in found:
            return str(found)
    raise LookupError(f"{page} prints no block with {word!r}")


def printed(page: str, line: str) -> str:
    """Return a command, which its page prints."""
    if line not in (ROOT / page).read_text():
        raise LookupError(f"{page} does not print {line!r}")
    return line


def example(name: str) -> dict[str, str]:
    """Return the file of an example, at the place where the pages have it."""
    return {f"examples/{name}": (ROOT / "examples" / name).read_text()}


def select(tasks: Iterable[Task], words: Iterable[str]) -> list[Task]:
    """Return the tasks whose name has one of the words, and those that they come after."""
    tasks, words = list(tasks), list(words)
    chosen = {task.name for task in tasks if not words or any(w in task.name for w in words)}
    for task in reversed(tasks):  # a task stands below the one that it comes after
        if task.name in chosen and task.after:
            chosen.add(task.after)
    return [task for task in tasks if task.name in chosen]


# A newcomer's first own program: a loop that takes a while. It writes when it is well under way.
TRAIN = """import pathlib
import time
import numpy as np
import fastps

fastps.init()
for step in range(200):
    fastps.push_pull(np.ones(100_000, np.float32), "gradient")
    fastps.mark_step()
    time.sleep(0.05)
    if step == 20:
        pathlib.Path("begun").touch()
print(f"worker {fastps.rank()}: {step + 1} steps")
fastps.shutdown()
"""
UNDER_WAY = "rm -f begun; when_begun() { until test -e begun; do sleep 0.1; done; }\n"
WRONG_SHAPE = """import numpy as np
import fastps

fastps.init()
fastps.push_pull(np.ones(10 + fastps.rank(), np.float32), "layer1.weight")
"""
BUG = """import fastps

fastps.init()
if fastps.rank() == 1:
    print(undefined_name)
fastps.barrier()
"""
NO_INIT = """import fastps

print(fastps.rank())
"""
HF = """import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments
import fastps.torch

dist.init_process_group("fastps")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}


torch.manual_seed(0)
x = torch.randn(64, 10)
data = [{"x": row, "labels": row.sum(dim=0, keepdim=True)} for row in x]
arguments = TrainingArguments("out", use_cpu=True, max_steps=10, report_to=[], save_strategy="no")
result = Trainer(Model(), arguments, train_dataset=data).train()
print(f"worker {dist.get_rank()} of {dist.get_world_size()}: {result.global_step} steps")
dist.destroy_process_group()
"""
DDP = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import fastps.torch

dist.init_process_group("fastps")
model = DDP(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 10)).square().mean().backward()
    optimizer.step()
print(f"worker {dist.get_rank()} of {dist.get_world_size()}: done")
dist.destroy_process_group()
"""
HVD = """import torch
import fastps.torch as hvd

hvd.init()
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 10)).square().mean().backward()
    optimizer.step()
print(f"worker {hvd.rank()} of {hvd.size()}: done")
"""
NOTEBOOK = """import nbformat
from nbclient import NotebookClient

book = nbformat.read("examples/notebook.ipynb", 4)
NotebookClient(book, timeout=60).execute()
for cell in book.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", output.get("traceback", "")))
"""
# Machines a and b, each with its own name and network; a link joins them.
TWO_MACHINES = """
for name in a b; do ip netns add $name; ip -n $name link set lo up; done
ip -n a link add eth0 type veth peer name eth0 netns b
ip -n a addr add 10.0.0.1/24 dev eth0; ip -n a link set eth0 up
ip -n b addr add 10.0.0.2/24 dev eth0; ip -n b link set eth0 up
printf '127.0.0.1 localhost\\n10.0.0.1 a\\n10.0.0.2 b\\n' > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
at() { name=$1; shift
  ip netns exec $name unshare --uts sh -c 'hostname $0; exec "$@"' $name "$@"; }
as_user() { at $1 su newcomer -c "cd; PATH=~/fps/bin:\\$PATH; $2"; }
ssh-keygen -A >/dev/null
su newcomer -c 'mkdir -p -m 700 ~/.ssh; test -e ~/.ssh/id_ed25519 ||
  { ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/id_ed25519
    cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys; }
  echo "StrictHostKeyChecking accept-new" > ~/.ssh/config'
for name in a b; do at $name /usr/sbin/sshd -D & done
until as_user a 'ssh b true && ssh a true' 2>/dev/null; do sleep 0.2; done
"""
# Of tasks that need torch, which is pinned to a wheel for this Python.
TORCH: dict[str, Any] = {
    "pythons": ("3.11",),
    "why_not": "torch for CPUs is tried on Python 3.11 only",
}
RUN_TRAIN = printed("docs/machines.md", "python train.py")
MINIMAL = example("minimal.py")
assert MINIMAL["examples/minimal.py"].endswith(block("README.md", "fps.DistributedOptimizer"))


TASKS = (
    Task(
        "install the wheel",
        "python3 -m venv fps; time fps/bin/pip install dist/fastps-*.whl",
        ("Successfully installed .*fastps",),
        never=(CRASH, "error:", "Building wheel"),
        limit_s=180,
    ),
    Task(
        "what this machine offers",
        printed("docs/index.md", "fastps doctor"),
        (": works$", "^GPUs: "),
        limit_s=90,
        after="install the wheel",
    ),
    Task(
        "the first job of docs/index.md",
        "python first.py\nfastps-run -np 2 python first.py",
        (r"^0 \[0\. 0\.", r"^\[worker 0\] 0 \[0\.5 0\.5", r"^\[worker 1\] 1 \[0\.5 0\.5"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        after="install the wheel",
    ),
    Task(
        "servers and sockets",
        "fastps-run -np 2 -s 2 --env FASTPS_SHARED_MEMORY=0 --server-threads 2 python first.py",
        (r"^\[worker 0\] 0 \[0\.5 0\.5",),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        after="install the wheel",
    ),
    Task(
        "python -m fastps",
        printed("docs/commands.md", "python -m fastps graph ring -n 4")
        + "\npython -m fastps --help | head -20\npython -m fastps run -np 2 python first.py",
        ("usage: fastps", r"^\[worker 1\] 1 \[0\.5 0\.5"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        after="install the wheel",
    ),
    Task(
        "a command that is misspelt",
        "fastps dcotor",
        ("doctor",),
        status=2,
        after="install the wheel",
    ),
    Task(
        "an unknown setting",
        "fastps-run -np 2 --env FASTPS_SHARED_MEMROY=0 python first.py",
        ("FASTPS_SHARED_MEMORY",),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        after="install the wheel",
    ),
    Task(
        "list settings",
        printed("docs/machines.md", "fastps config --explain")
        + "\nFASTPS_ENCRYPT=auto fastps config | grep ENCRYPT",
        ("FASTPS_TRANSPORT=auto", "FASTPS_ENCRYPT.*auto"),
        after="install the wheel",
    ),
    Task(
        "complete commands in bash",
        "fps/bin/pip install -q 'argcomplete>=3.1' 'rich>=13'\n"
        + printed("docs/commands.md", 'eval "$(fastps completion bash)"')
        + "\ncomplete -p fastps\n"
        "COMP_LINE='fastps do' COMP_POINT=9 _ARGCOMPLETE=1 _ARGCOMPLETE_IFS=, "
        "fastps 8>&1 9>/dev/null",
        ("complete .* fastps", "doctor"),
        after="install the wheel",
    ),
    Task(
        "completion without its package",
        "python3 -m venv bare && bare/bin/pip install -q dist/fastps-*.whl\n"
        "bare/bin/fastps completion bash",
        (r"pip install 'fastps\[cli\]'",),
        limit_s=120,
        status=2,
        after="install the wheel",
    ),
    Task(
        "a job over an encrypted link",
        "fastps-run --encrypt on -np 2 -s 1 --env FASTPS_SHARED_MEMORY=0"
        " --env FASTPS_LOG_LEVEL=INFO python first.py",
        (r"^\[worker 1\] 1 \[0\.5 0\.5", "(?i)encrypt.*(AES|ChaCha)"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        after="install the wheel",
    ),
    Task(
        "a wrong token",
        "for i in 1 2; do " + printed("docs/machines.md", "(umask 077; python3 -c 'import "
        "secrets; print(secrets.token_hex(32))' > job.token)") + "; mv job.token $i.token; done\n"
        "fastps-run --machines 2 --machine-rank 0 --scheduler-host 127.0.0.1 "
        "--scheduler-port 7654 --token-file 1.token -np 1 --start-timeout 10 "
        "python first.py & "
        "fastps-run --machines 2 --machine-rank 1 --scheduler-host 127.0.0.1 "
        "--scheduler-port 7654 --token-file 2.token -np 1 --start-timeout 10 "
        "python first.py; code=$?; wait; exit $code",
        ("AuthError.*set the same.*FASTPS_TOKEN_FILE", "docs/troubleshooting.md#autherror"),
        never=("Segmentation",),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        status=1,
        after="install the wheel",
    ),
    Task(
        "a port in use",
        "python -m http.server 7654 >/dev/null 2>&1 &\n"
        "until ss -ltn | grep -q :7654; do sleep 0.1; done\n"
        "fastps-run --machines 2 --machine-rank 0 --scheduler-host 127.0.0.1 "
        "--scheduler-port 7654 --token-file 1.token -np 1 python first.py",
        ("127.0.0.1:7654.*in use.*--scheduler-port",),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        status=2,
        after="a wrong token",
    ),
    Task(
        "a worker is killed",
        UNDER_WAY + "(when_begun; kill -9 $(pgrep -nf '^python train.py')) &\n"
        f"fastps-run -np 2 {RUN_TRAIN}",
        (r"worker [01] .*SIGKILL", "docs/troubleshooting.md"),
        never=("Segmentation",),
        files={"train.py": TRAIN},
        status=137,
        after="install the wheel",
    ),
    Task(
        "a worker is killed, and the others go on",
        UNDER_WAY + "(when_begun; kill -9 $(pgrep -nf '^python train.py')) &\n"
        f"fastps-run -np 3 --min 2 {RUN_TRAIN}",
        ("continue without it", r"^\[worker 0\] worker 0: 200 steps"),
        files={"train.py": TRAIN},
        after="install the wheel",
    ),
    Task(
        "Ctrl-C",
        UNDER_WAY + "(when_begun; printf '\\003'; sleep 3) | "
        f"script -qec 'fastps-run -np 2 {RUN_TRAIN}' log",
        ("interrupted by SIGINT; exit code 130",),
        never=("Segmentation",),
        files={"train.py": TRAIN},
        limit_s=30,
        status=130,
        after="install the wheel",
    ),
    Task(
        "an error in my program",
        "fastps-run -np 2 python bug.py",
        ("bug.py.*line 5", "print\\(undefined_name\\)", "worker 1 .*NameError"),
        never=("frozen runpy",),
        files={"bug.py": BUG},
        status=1,
        after="install the wheel",
    ),
    Task(
        "workers disagree",
        "fastps-run -np 2 python shapes.py",
        ("MismatchError.*layer1.weight", "10.*11"),
        never=("Segmentation",),
        files={"shapes.py": WRONG_SHAPE},
        status=1,
        after="install the wheel",
    ),
    Task(
        "init() is forgotten",
        "python forgot.py; fastps-run -np 2 python forgot.py",
        (r"call fastps.init\(\) first",),
        never=("Segmentation",),
        files={"forgot.py": NO_INIT},
        status=1,
        after="install the wheel",
    ),
    Task(
        "two jobs on one host",
        f"fastps-run -np 2 {RUN_TRAIN} & fastps-run -np 2 {RUN_TRAIN}\n"
        "code=$?; wait %1 && exit $code",
        (r"(?s)(worker 0: 200 steps.*){2}",),
        files={"train.py": TRAIN},
        after="install the wheel",
    ),
    Task(
        "watch a job",
        UNDER_WAY
        + f"fastps-run -np 2 -s 1 --env FASTPS_SHARED_MEMORY=0 {RUN_TRAIN} & when_begun\n"
        "fastps top --once; fastps top > screen & sleep 3; kill -INT %2; cat screen; wait %1",
        ("steps/s", "worker 1 ", "server 0 "),
        never=(CRASH, "\x1b"),  # in a file
        files={"train.py": TRAIN},
        after="install the wheel",
    ),
    Task(
        "timeline and report",
        "fastps-run -np 2 --timeline job.json --output-dir logs python train.py\n"
        + printed("docs/timeline.md", "fastps timeline job.json")
        + "\n"
        + printed("docs/timeline.md", "fastps report job.json --logs logs")
        + "\nls -l job.html",
        ("ms/step", "gradient", "job.html"),
        files={"train.py": TRAIN},
        after="install the wheel",
    ),
    Task(
        "measure this machine",
        printed("README.md", "fastps-bench --sizes 4K,1M --runs 2 --turn 0.05"),
        (r"^4K +registered", r"^1M +private"),
        limit_s=120,
        after="install the wheel",
    ),
    Task(
        "call a function on workers",
        "fps/bin/pip install -q 'ipython>=8' 'cloudpickle>=3'; python run.py",
        (r"\[2\.0, 2\.0\]",),
        files={"run.py": block("docs/notebooks.md", "fastps.run(train")},
        limit_s=120,
        after="install the wheel",
    ),
    Task(
        "a notebook",
        "fps/bin/pip install -q 'ipython>=8' 'cloudpickle>=3' nbclient ipykernel; python book.py",
        (r"worker 1: \[1\. 1\. 1\.\]", r"worker 0: \[2\. 2\. 2\.\]"),
        files=example("notebook.ipynb") | {"book.py": NOTEBOOK},
        limit_s=180,
        after="install the wheel",
    ),
    Task(
        "two machines by hand",
        TWO_MACHINES
        + "as_user a \"rm -f job.token; "
        + printed("docs/machines.md", "(umask 077; python3 -c 'import secrets; "
        "print(secrets.token_hex(32))' > job.token)")
        + '"\n'
        + "run='fastps-run --machines 2 --scheduler-host 10.0.0.1 --scheduler-port 7654 "
        "--token-file job.token -np 1 --machine-rank'\n"
        'as_user b "$run 1 python first.py" & as_user a "$run 0 python first.py" && wait %3',
        (r"0 \[0\.5 0\.5", r"1 \[0\.5 0\.5"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        machines=True,
        after="install the wheel",
    ),
    Task(
        "two machines by ssh",
        TWO_MACHINES + "as_user a 'fastps-run -H a:1,b:1 python first.py'",
        (r"^\[a worker 0\] 0 \[0\.5 0\.5", r"^\[b worker 1\] 1 \[0\.5 0\.5"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        machines=True,
        after="install the wheel",
    ),
    Task(
        "a machine that does not exist",
        TWO_MACHINES + "as_user a 'fastps-run -H a:1,c:1 --start-timeout 10 python first.py'",
        ("cannot start on c .*check the host name", "docs/troubleshooting.md#it-does-not-start"),
        files={"first.py": block("docs/index.md", "fastps.push_pull")},
        machines=True,
        status=255,  # ssh's
        after="install the wheel",
    ),
    Task(
        "PyTorch is missing",
        "python -c 'import fastps.torch'",
        (r"pip install .*fastps\[torch\]|pip install torch",),
        never=("Segmentation",),
        status=1,
        after="install the wheel",
    ),
    Task(
        "install torch for the CPU",
        "time fps/bin/pip install torch==2.13.0",
        ("Successfully installed .*torch",),
        limit_s=400,
        after="install the wheel",
        **TORCH,
    ),
    Task(
        "the README's program",
        "\n".join(printed("README.md", line) for line in (
            "python examples/minimal.py",
            "fastps-run -np 2 python examples/minimal.py",
            "fastps-run -np 4 -s 2 --env FASTPS_SHARED_MEMORY=0 --server-threads 2 python "
            "examples/minimal.py",
        )),
        (r"worker 0 of 1: loss 0\.0", r"worker 1 of 2: loss 0\.0", r"worker 3 of 4: loss 0\.0"),
        files=MINIMAL,
        limit_s=180,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "torchrun",
        printed("README.md", "torchrun --standalone --nproc-per-node 2 examples/minimal.py"),
        (r"worker 1 of 2: loss 0\.0",),
        files=MINIMAL,
        limit_s=90,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "does it use my GPU",
        "fastps-run -np 2 python gpu.py && fastps doctor --no-trial",
        ("^GPUs: .*copied through the host",),
        files={"gpu.py": block("docs/gpu.md", "fps.DistributedOptimizer")},
        limit_s=90,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "resume with another number of workers",
        "rm -f /tmp/model.pt\n"
        + "\n".join(printed("docs/checkpoints.md", line) for line in (
            "fastps-run -np 2 python examples/resume.py /tmp/model.pt",
            "fastps-run -np 4 python examples/resume.py /tmp/model.pt",
        )),
        ("worker 1: epochs 0 to 9", "worker 3: epochs 10 to 19"),
        files=example("resume.py"),
        limit_s=120,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "a script of Horovod",
        "fastps-run -np 2 python hvd.py",
        ("worker 1 of 2: done",),
        files={"hvd.py": HVD},
        limit_s=90,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "a script of DDP",
        "torchrun --standalone --nproc-per-node 2 ddp.py; fastps-run -np 2 python ddp.py",
        (r"(?s)(worker 1 of 2: done.*){2}",),
        files={"ddp.py": DDP},
        limit_s=90,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "Hugging Face's Trainer",
        "fps/bin/pip install -q 'transformers>=4.50' 'accelerate>=1.10'\n"
        "fastps-run -np 2 python hf.py",
        ("worker 1 of 2: 10 steps",),
        files={"hf.py": HF},
        limit_s=300,
        after="install torch for the CPU",
        **TORCH,
    ),
    Task(
        "Lightning",
        "fps/bin/pip install -q 'lightning>=2.5'\n"
        "fastps-run -np 2 python examples/lightning_fit.py",
        (r"\[worker 1\] \d+ steps, loss 0\.0",),
        files=example("lightning_fit.py"),
        limit_s=300,
        after="install torch for the CPU",
        **TORCH,
    ),
)  # fmt: skip
