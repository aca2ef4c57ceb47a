# SPDX-License-Identifier: Apache-2.0
"""Training while some workers have run out of data: join(), and torch's Join, in real jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from job import run_workers  # noqa: E402

TRAIN = """
import torch
from torch import nn

import fastps.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
torch.set_num_threads(1)
STEPS = [3, 1, 4]
some = hvd.add_process_set([0, 2])

def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 100), nn.Linear(100, 2))

def loss_of(model, step, worker):
    generator = torch.Generator().manual_seed(7 * step + worker)
    return model(torch.randn(5, 4, generator=generator)).square().mean()

def alone(members, op, epochs=2):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for step in range(max(STEPS[r] for r in members)):
            there = [r for r in members if step < STEPS[r]]
            optimizer.zero_grad()
            loss = sum(loss_of(model, step, r) for r in there)
            (loss / (len(there) if op is hvd.Average else 1)).backward()
            optimizer.step()
    return model

def together(name, members, **how):
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(), prefix=name, **how)
    for _ in range(2):
        for step in range(STEPS[rank]):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        last = hvd.join()
        assert last == max(range(size), key=STEPS.__getitem__), last
        for p in model.parameters():  # as Horovod's users do after an epoch
            hvd.broadcast_(p.data, last, None, how.get("process_set", hvd.global_process_set))
    return model

def compare(name, members, tolerance=1e-5, **how):
    if rank in members:
        model = together(name, members, **how)
    else:
        for _ in range(2):
            hvd.join()
        return
    twin = alone(members, how.get("op", hvd.Average))
    for mine, want in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, want, rtol=tolerance, atol=tolerance)
    digest = hvd.allgather_object([p.sum().item() for p in model.parameters()],
                                  process_set=how.get("process_set", hvd.global_process_set))
    assert all(one == digest[0] for one in digest), digest

everybody = [0, 1, 2]
compare("plain", everybody)
compare("sum", everybody, op=hvd.Sum)
compare("loose", everybody, bucket_bytes=0, gradient_views=False)
compare("half", everybody, tolerance=2e-2, compression=hvd.Compression.bf16)
compare("some", [0, 2], process_set=some)

steps = STEPS[rank]
metric = hvd.allreduce(torch.tensor(float(rank)), name="metric")
for step in range(steps):
    there = [r for r in everybody if step < STEPS[r]]
    x = torch.full((3,), rank, dtype=torch.bfloat16)
    assert hvd.allreduce_(x, name="halves").tolist() == [sum(there) / len(there)] * 3
    pair = hvd.grouped_allreduce([torch.ones(2), torch.full((2,), rank)], op=hvd.Sum)
    assert pair[0].tolist() == [len(there)] * 2 and pair[1].tolist() == [sum(there)] * 2
hvd.join()

net = hvd.DistributedDataParallel(model_of(), broadcast_buffers=False)
for step in range(steps):
    net.zero_grad()
    loss_of(net, step, rank).backward()
hvd.join(-1)
report("done")
"""


def test_join_equals_one_process(tmp_path: Path) -> None:
    environ = {"FASTPS_SHARED_MEMORY": "1"}
    result = run_workers(TRAIN, tmp_path, workers=3, servers=1, environ=environ).check()
    assert result.reports == (("done",),) * 3
