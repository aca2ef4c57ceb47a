# SPDX-License-Identifier: Apache-2.0
"""Jobs on a real cluster of Ray, of this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not here: make test-frameworks", allow_module_level=True)

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

import fastps.ray
import fastps.torch as fps
from fastps.errors import ConfigError, StallError
from fastps.frameworks.ray import job as jobs

LIMIT_S = 240
PRESTART = "RAY_enable_worker_prestart"
SECRET = "5ec2e7d1c94b8f03a67e21dc"
pytestmark = [
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, which come and go
]


class Worker:
    """An actor that a user could have written; Ray sends its code along."""

    def train(self, times: int) -> list[float]:
        fastps.init()
        ones = np.ones(100_000, np.float32)
        sums = [fastps.push_pull(ones, "g", average=False)[0] for _ in range(times)]
        sent = fastps.statistics()["bytes_sent"]
        size, rank = fastps.size(), fastps.rank()
        fastps.shutdown()
        return [rank, size, *map(float, sums), sent]

    def wait_for_another(self) -> str:
        fastps.init()
        try:
            fastps.push_pull(np.ones(10, np.float32), "never")
        except fastps.PeerLostError as error:
            return str(error)
        return "not lost"

    def die(self) -> None:
        fastps.init()
        os._exit(7)

    def settings(self) -> list[str]:
        return [name for name in os.environ if name.startswith("FASTPS_")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Ray would start as many processes as it has CPUs, before anybody wants one.
    # A minute is little for its own processes to start on a machine that has much to do.
    given = {PRESTART: "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT_S)}
    os.environ.update(given)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which no actor could import
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    for name in given:
        del os.environ[name]


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return [ray.remote(Worker).options(num_cpus=1).remote() for _ in range(2)]


def exposed(secrets: tuple[str, ...]) -> list[str]:
    """List the files of processes, which other users may see, that hold a secret."""
    found = []
    for name in ("cmdline", "environ"):
        for path in Path("/proc").glob(f"[0-9]*/{name}"):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            found += [str(path) for one in secrets if one.encode() in text]
    return found


def test_actors_are_workers(workers, monkeypatch):
    monkeypatch.setattr(jobs.secrets, "token_hex", lambda n: SECRET[: 2 * n])
    before = ray.get(workers[0].settings.remote(), timeout=LIMIT_S)
    terms = {"servers": 1, "settings": {"shared_memory": False}, "timeout_s": LIMIT_S}
    with fastps.ray.start(workers, **terms) as job:
        for _ in range(2):  # another generation of the same job
            found = ray.get([one.train.remote(3) for one in workers], timeout=LIMIT_S)
            assert [one[:5] for one in found] == [[0, 2, 2, 2, 2], [1, 2, 2, 2, 2]]
            assert all(one[5] >= 3 * 400_000 for one in found)  # all of it goes to the server
        assert "FASTPS_TOKEN_FILE" in ray.get(workers[0].settings.remote(), timeout=LIMIT_S)
        assert job.size == 2
        assert not exposed((SECRET, "fastps-own:"))
    assert ray.get(workers[0].settings.remote(), timeout=LIMIT_S) == before
    job.close()


def test_a_worker_that_dies_is_named(workers):
    other = ray.remote(Worker).options(num_cpus=1).remote()
    with fastps.ray.start([workers[0], other], timeout_s=LIMIT_S):  # without a server, this time
        waits = workers[0].wait_for_another.remote()
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(other.die.remote(), timeout=LIMIT_S)
        assert "worker 1" in ray.get(waits, timeout=LIMIT_S)
    with fastps.ray.start(workers, timeout_s=LIMIT_S):
        found = ray.get([one.train.remote(1) for one in workers], timeout=LIMIT_S)
    assert [one[:3] for one in found] == [[0, 2, 2], [1, 2, 2]]


def test_what_cannot_be_is_said(workers, monkeypatch):
    with pytest.raises(ConfigError, match="'rank', which the job sets by itself"):
        fastps.ray.start(workers, settings={"rank": 3})
    with pytest.raises(ConfigError, match="colour"):
        fastps.ray.start(workers, settings={"colour": 3})
    with pytest.raises(StallError, match=r"no room for 1 servers with {'CPU': 99}"):
        fastps.ray.start(workers, servers=1, resources_per_server={"CPU": 99}, timeout_s=1)
    monkeypatch.setattr(ray, "nodes", lambda: [{}, {}])
    with pytest.raises(ConfigError, match=r"Ray would carry the job token .* set RAY_USE_TLS=1"):
        fastps.ray.start(workers, settings={"encrypt": "on"})


def test_a_run_with_torch_is_started_again(cluster, workers, tmp_path):
    for one in workers:  # they need the processors that the trainer wants
        ray.kill(one)

    def train(config: dict[str, str]) -> None:
        fps.init()
        context = get_context()
        assert (fps.rank(), fps.size()) == (context.get_world_rank(), context.get_world_size())
        torch.manual_seed(fps.rank())
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = fps.DistributedOptimizer(optimizer, model.named_parameters())
        fps.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        mark = Path(config["folder"], f"rank-{fastps.rank()}")
        is_first = not mark.exists()
        mark.touch()
        if is_first and fastps.rank() == 1:
            os._exit(3)
        dist.init_process_group("fastps")  # not the first time
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        weight = model.weight.flatten().tolist()
        Path(f"{mark}.done").write_text(f"{is_first} {total.item()} {weight}")

    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        torch_config=fastps.ray.Config(servers=1, timeout_s=LIMIT_S),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
        ),
    )
    trainer.fit()
    found = [path.read_text() for path in tmp_path.glob("*.done")]
    assert len(found) == 2
    assert found[0].startswith("False 2.0 [")
    assert found[0] == found[1]  # the weights, too
