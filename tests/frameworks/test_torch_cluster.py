# SPDX-License-Identifier: Apache-2.0
"""The PyTorch plugin in real jobs: two workers, two servers, TCP, one machine.

Few jobs with many checks each, because a job costs seconds of start-up on a busy machine; what
needs no process is tested in the files beside this one.
"""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from aids.free_ports import free_port

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from harness import JobResult  # noqa: E402
from job import run_workers  # noqa: E402

# Shared by the workers and the single process they are compared with.
TRAINING = """
import torch
from torch import nn

torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Conv2d(1, 4, 3)
        self.middle = nn.Linear(4 * 6 * 6, 100)
        self.back = nn.Linear(100, 10)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.back(torch.relu(self.middle(torch.relu(self.front(x)).flatten(1))))

def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (16,), generator=generator)
    return x.chunk(parts)[part], y.chunk(parts)[part]

def make_optimizer(kind, net):
    if kind == "adam":
        return torch.optim.Adam(net.parameters(), lr=0.003)
    groups = [
        {"params": [p for n, p in net.named_parameters() if n.endswith("weight")]},
        {"params": [p for n, p in net.named_parameters() if n.endswith("bias")], "lr": 0.05},
    ]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)

def backward(net, step, part, parts, passes):
    for one in range(passes):
        x, y = batch(step * passes + one, part, parts)
        (nn.functional.cross_entropy(net(x), y) / passes).backward()

def weights_of(net):
    return {name: value.flatten().tolist() for name, value in net.state_dict().items()}

def digest(net):
    import hashlib
    hashes = hashlib.sha256()
    for value in net.state_dict().values():
        hashes.update(value.numpy().tobytes())
    return hashes.hexdigest()
"""


# So small that the layers of TRAINING have several partitions of several chunks.
PIECES = {"FASTPS_PARTITION_BYTES": "16384", "FASTPS_CHUNK_BYTES": "4096"}


def run(script: str, folder: Path, **options: Any) -> JobResult:
    head = "import torch, fastps, fastps.torch as fps\nfps.init()\nrank = fps.rank()\n"
    return run_workers(TRAINING + head + textwrap.dedent(script), folder, **options)


OPERATIONS = """
    assert (fps.size(), fps.local_size(), fps.local_rank()) == (2, 2, rank)
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    integers = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16]
    for dtype in floats + integers:
        for shape in [(), (0,), (1,), (3, 5), (2049,)]:
            x = torch.ones(shape).mul(3 + rank).to(dtype)
            name = f"{dtype}{shape}"
            want = torch.full(shape, 3.5 if dtype.is_floating_point else 3).to(dtype)
            assert torch.equal(fps.push_pull(x, name=name), want), name
            assert torch.equal(fps.push_pull(x, False, name), torch.full(shape, 7).to(dtype))
            assert fps.push_pull_inplace(x, True, name) is x
            assert torch.equal(x, want)
    flags = torch.tensor([rank == 0, rank == 1, False])
    assert fps.push_pull(flags, False, "flags").tolist() == [True, True, False]
    big = torch.arange(3_000_001, dtype=torch.float32) + rank
    handle = fps.push_pull_async_inplace(big, name="big", priority=3)
    small = [torch.full((7,), i + rank * 1.0) for i in range(64)]
    others = [fps.push_pull_async(x, name=f"o{i}") for i, x in enumerate(small)]
    assert [fps.synchronize(h)[0].item() for h in others] == [i + 0.5 for i in range(64)]
    assert fps.synchronize(handle) is big
    assert fps.poll(handle)
    assert torch.equal(big, torch.arange(3_000_001, dtype=torch.float32) + 0.5)
    fps.push_pull_async_inplace(torch.ones(500_000), name="dropped")
    fps.push_pull_async(torch.ones(500_000), name="dropped too")
    assert fps.push_pull(torch.ones(500_000), False, "kept").min() == 2
    matrix = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
    assert torch.equal(fps.push_pull(matrix, False, "matrix"), matrix / (rank + 1) * 3)
    x = torch.ones(5, requires_grad=True)
    (fps.push_pull(x * (rank + 1), True, "y") * torch.arange(5.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(5.0) * (rank + 1))
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    assert fps.push_pull(nan, name="nan").isnan().tolist() == [True, False, False]
    fps.declare("declared", torch.zeros(4, dtype=torch.bfloat16))
    fps.push_pull(torch.zeros(4, dtype=torch.bfloat16), name="declared")
    sent = torch.tensor([-0.0, float("nan"), 1.0]) if rank == 1 else torch.zeros(3)
    params = {"bits": sent, "t": torch.full((2, 3), rank * 1.0).t(),
              "half": torch.full((9,), rank, dtype=torch.bfloat16)}
    fps.broadcast_parameters(params, root_rank=1)
    assert sent.view(torch.int32).tolist() == [-(2**31), 0x7FC00000, 0x3F800000]
    assert params["t"].sum() == 6 and params["half"].sum() == 9
    value = {"a": (1, None, 2.5, [True]), 3: torch.arange(4), "s": "x"}
    got = fps.broadcast_object(value if rank == 0 else None)
    assert repr(got) == repr(value)
    try:
        fps.broadcast_object(object() if rank == 1 else None, root_rank=1)
        raise SystemExit("not refused")
    except TypeError:
        pass
    fps.barrier()
    report(["operations", "done"])
"""

# Worker 1 starts 'late' only after a second thread of worker 0, which waits for 'late', has run:
# if waiting held the GIL, this would never end.
THREADS = """
    import threading
    ones = torch.ones(4)
    fps.declare("go", ones)
    fps.declare("late", ones)
    if rank == 0:
        late = fps.push_pull_async(ones, name="late")
        thread = threading.Thread(target=lambda: fps.push_pull(ones, name="go"))
        timer = threading.Timer(0.2, thread.start)
        timer.start()
        fps.synchronize(late)
        timer.join()
        thread.join()
    else:
        fps.push_pull(ones, name="go")
        fps.push_pull(ones, name="late")
    report(["threads", "done"])
"""

DISAGREEMENT = """
    try:
        net = nn.Linear(3 + rank, 1)
        optimizer = torch.optim.SGD(net.parameters())
        optimizer = fps.DistributedOptimizer(optimizer, net.named_parameters())
        net(torch.ones(1, 3 + rank)).sum().backward()
        optimizer.step()
    except fastps.MismatchError as error:
        report(["mismatch", str(error)])
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run one job with several subjects, because starting a job takes longer than they do."""
    script = "".join(map(textwrap.dedent, (OPERATIONS, THREADS, DISAGREEMENT)))
    result = run(script, tmp_path_factory.mktemp("job")).check()
    return [dict(subjects) for subjects in result.reports]


def test_operations(reports: list[dict[str, str]]) -> None:
    """All forms, dtypes, sizes around partition borders, autograd, broadcasts, objects."""
    assert [subjects["operations"] for subjects in reports] == ["done", "done"]


def test_other_threads_run_while_one_waits(reports: list[dict[str, str]]) -> None:
    assert [subjects["threads"] for subjects in reports] == ["done", "done"]


def test_workers_that_disagree(reports: list[dict[str, str]]) -> None:
    for subjects in reports:
        assert "Gradient.weight" in subjects["mismatch"]
        assert "(1, 3)" in subjects["mismatch"]
        assert "(1, 4)" in subjects["mismatch"]


def single_process(kind: str, passes: int, steps: int, clip: bool) -> dict[str, torch.Tensor]:
    space: dict[str, Any] = {}
    exec(TRAINING, space)
    net = space["Net"]()
    optimizer = space["make_optimizer"](kind, net)
    for step in range(steps):
        optimizer.zero_grad()
        space["backward"](net, step, 0, 1, passes)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {name: value.flatten() for name, value in net.state_dict().items()}


def test_training_equals_one_process(tmp_path: Path) -> None:
    """SGD with groups, accumulation, clipping, an unused layer; Adam; compared with one process.

    Then a second job in the same processes: shutdown() and init() again.
    """
    script = """
    def train(kind, passes, steps, clip):
        net = Net()
        if rank == 1:
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(1.0)
        fps.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = fps.DistributedOptimizer(
            make_optimizer(kind, net), net.named_parameters(), backward_passes_per_step=passes
        )
        for step in range(steps):
            optimizer.zero_grad()
            backward(net, step, rank, 2, passes)
            if clip:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        report({"digest": digest(net), "weights": weights_of(net) if rank == 0 else None})

    train("adam", 1, 8, False)
    fps.shutdown()
    assert not fps.is_initialized()
    fps.init()
    assert fps.rank() == rank
    train("sgd", 2, 6, True)
    """
    first, second = run(script, tmp_path, environ=PIECES).check().reports
    for place, how in enumerate([("adam", 1, 8, False), ("sgd", 2, 6, True)]):
        assert first[place]["digest"] == second[place]["digest"]
        for name, want in single_process(*how).items():
            got = torch.tensor(first[place]["weights"][name])
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


def test_mixed_precision_checkpoints_and_loaders(tmp_path: Path) -> None:
    """Autocast with a scaler that overflows on one rank, both compressions, a state sent from a
    checkpoint on one rank, branches that differ between ranks, and a loader that forks."""
    script = """
    def train(compression, prefix, steps=4):
        net = Net()
        optimizer = fps.DistributedOptimizer(
            torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters(), compression,
            prefix=prefix,
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(steps):
            optimizer.zero_grad()
            x, y = batch(step, rank, 2)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x), y)
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return net, optimizer, scaler.get_scale()

    for name in ("none", "fp16", "bf16"):
        net, optimizer, scale = train(getattr(fps.Compression, name), f"{name}.")
        assert scale == 128.0, scale
        report(digest(net))

    fresh = Net()
    other = torch.optim.Adam(fresh.parameters(), lr=0.5)
    if rank == 1:
        other.load_state_dict(optimizer.state_dict())
        fresh.load_state_dict(net.state_dict())
    fps.broadcast_parameters(fresh.state_dict(), root_rank=1, prefix="Fresh.")
    fps.broadcast_optimizer_state(other, root_rank=1)
    assert other.param_groups[0]["lr"] == 0.01 and len(other.state) == 8
    other.zero_grad()
    backward(fresh, 9, 0, 1, 1)
    other.step()
    report(digest(fresh))

    arms = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    fps.broadcast_parameters(arms.state_dict(), prefix="Arms.")
    optimizer = torch.optim.SGD(arms.parameters(), lr=0.1)
    optimizer = fps.DistributedOptimizer(optimizer, prefix="Arms.")
    data = torch.utils.data.DataLoader(torch.arange(12.0).reshape(4, 3), num_workers=1)
    for x in data:
        optimizer.zero_grad()
        arms[rank](x).sum().backward()
        optimizer.step()
    report(digest(arms))
    """
    first, second = run(script, tmp_path).check().reports
    assert len(first) == 5
    assert first == second


def test_a_worker_killed_in_mid_training(tmp_path: Path) -> None:
    script = """
    import os, signal, time
    net = Net()
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    for step in range(10_000):
        optimizer.zero_grad()
        backward(net, step, rank, 2, 1)
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            optimizer.step()
        except fastps.PeerLostError as error:
            report([time.monotonic() - began, str(error)])
            break
    """
    result = run(script, tmp_path)
    assert result.returncode == -signal.SIGKILL
    ((seconds, message),) = result.reports[0]
    assert seconds < 5
    assert "worker 1" in message


PARALLEL = """
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=os.environ["TEST_GLOO"], rank=rank, world_size=fps.size()
    )

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(rank)
            self.front = nn.Linear(64, 40)
            self.norm = nn.BatchNorm1d(40)
            self.deep = nn.Sequential(*[nn.Linear(40, 40) for _ in range(10)])
            self.back = nn.Linear(40, 10)
            self.arms = nn.ModuleList([nn.Linear(40, 10) for _ in range(2)])

        def forward(self, x, arm):
            x = torch.tanh(self.norm(self.front(x.flatten(1))))
            return self.back(self.deep(x)) + self.arms[arm](x)

    def train(wrap, arms):
        net = wrap(Normed())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 2)
            with net.no_sync():
                x, y = batch(2 * step, rank, 2)
                nn.functional.cross_entropy(net(x, arms), y).backward()
            x, y = batch(2 * step + 1, rank, 2)
            nn.functional.cross_entropy(net(x, arms), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return net

    def compare(arm, **options):
        ours = train(lambda net: fps.DistributedDataParallel(net, **options), arm)
        theirs = train(
            lambda net: nn.parallel.DistributedDataParallel(net, find_unused_parameters=True), arm
        )
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            if rank == 0:  # the others take them over at the next forward pass only
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        weights = fps.broadcast_object([p.detach().numpy() for p in ours.parameters()])
        same = [bool((p.detach().numpy() == w).all()) for p, w in zip(ours.parameters(), weights)]
        assert all(same), same

    compare(0)
    compare(rank)
    compare(rank, gradient_views=False)
    compare(1, gradient_views=True, bucket_bytes=8192)
    report(["equal to torch"])

    try:
        fps.DistributedDataParallel(nn.Linear(3 + rank, 1), prefix="Other.")
    except fastps.MismatchError as error:
        report(["mismatch", str(error)])
    dist.destroy_process_group()
"""


def test_parallel_equals_torchs(tmp_path: Path) -> None:
    """Views and copies, buffers, no_sync, unused layers, a deep model of small tensors."""
    environ = {**PIECES, "TEST_GLOO": f"tcp://127.0.0.1:{free_port()}", "GLOO_SOCKET_IFNAME": "lo"}
    script = "import os\n" + textwrap.dedent(PARALLEL)
    result = run(script, tmp_path, servers=1, environ=environ).check()
    for reports in result.reports:
        assert reports[0] == ["equal to torch"]
        assert "Other.Gradient.weight" in reports[1][1]


REPLACED = """
    changes = {
        "data": lambda m: setattr(m.weight.grad, "data", m.weight.grad.data.clamp(-9, 9)),
        "set_": lambda m: m.weight.grad.set_(m.weight.grad.clone()),
        "halves": lambda m: m.bfloat16().float(),
        "share_memory": lambda m: m.share_memory(),
        "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    }

    def wrapped(kind, module, name, op=fps.Average):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if kind == "ddp":
            return fps.DistributedDataParallel(module, op=op), optimizer
        return module, fps.DistributedOptimizer(optimizer, prefix=name)

    for kind in ("ddp", "optimizer"):
        for name, change in changes.items():
            for width in (1, 20_000):  # in a bucket, and alone
                module = nn.Conv2d(3, width, 1)
                model, optimizer = wrapped(kind, module, f"{name}{width}")
                for step in range(3):
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    model(torch.ones(1, 3, 1, 1)).sum().mul(1.0 + rank).backward()
                    optimizer.step()
                    assert module.weight.grad.unique().tolist() == [1.5], (kind, name, step)
                    change(module)

    model, _ = wrapped("ddp", module := nn.Linear(1, 1, bias=False), "", fps.Sum)
    sums = []
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        sums.append(module.weight.grad.item())
    report(sums)

    module.register_buffer("nothing", torch.zeros(0))
    model = fps.DistributedDataParallel(module)
    model(torch.ones(1, 1)).sum().backward()
    module.load_state_dict(nn.Linear(1, 1, bias=False).state_dict(), False, assign=True)
    try:
        model(torch.ones(1, 1))
    except fastps.FastPSError as error:
        report(str(error))

    pair = [nn.Linear(2, 1), nn.Linear(2, 1)]
    same = [fps.DistributedOptimizer(torch.optim.SGD(m.parameters())) for m in pair]
    if rank == 1:
        fastps.barrier()  # until worker 0 has begun twice; ours may be over before it begins again
    try:
        sum(m(torch.ones(1, 2)) for m in pair).backward()
        report("nothing")
    except fastps.FastPSError as error:
        report(str(error))
    if rank == 0:
        fastps.barrier()
    other = [nn.Linear(300, 300), nn.Linear(300, 301)]
    try:
        same = [fps.DistributedOptimizer(torch.optim.SGD(m.parameters()), prefix="Other.")
                for m in other]
    except fastps.MismatchError as error:
        report(str(error))
"""


@pytest.mark.parametrize("shared", ["0", "1"])
def test_what_is_replaced_after_wrapping(tmp_path: Path, shared: str) -> None:
    environ = {**PIECES, "FASTPS_SHARED_MEMORY": shared}
    result = run(REPLACED, tmp_path, servers=1, environ=environ).check()
    for rank, (sums, replaced, busy, mismatch) in enumerate(result.reports):
        assert sums == [2, 4, 6]
        assert replaced.startswith("weight came into the module after it was wrapped")
        is_busy = "already in flight" in busy and "another prefix" in busy
        assert is_busy or (rank == 1 and busy == "nothing")
        assert "another prefix" in mismatch
