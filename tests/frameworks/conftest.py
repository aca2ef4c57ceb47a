# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the plugins: a job of threads in place of a job of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_session import FakeCluster

from fastps.session import current


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Give a job of two ranks; each thread that enters it has its own session."""
    job = FakeCluster(2)
    monkeypatch.setattr(current, "current", job.current)
    return job


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Give a job of one rank, which the calling thread is."""
    job = FakeCluster(1)
    monkeypatch.setattr(current, "current", job.current)
    job.enter(0)
    return job


@pytest.fixture(params=["default", "loose", "copied", "views", "shared"])
def travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let wrap() send gradients in one of the ways there are; "shared": as in one machine."""
    models = pytest.importorskip("torch_models")
    monkeypatch.setattr(models, "TRAVEL", models.WAYS.get(request.param, {}))
    monkeypatch.setattr(FakeCluster, "can_share", request.param == "shared")
    return str(request.param)


@pytest.fixture(params=["ddp", "optimizer"])
def wrap(request: pytest.FixtureRequest, travel: str) -> Callable[..., tuple[Any, Any]]:
    """Give the way to wrap a module; it gives what to call and what to step."""
    torch = pytest.importorskip("torch")
    fps = pytest.importorskip("fastps.torch")
    ways = pytest.importorskip("torch_models").ALL_WAYS[travel]

    def do(module: Any, **options: Any) -> tuple[Any, Any]:
        options = {**ways, **options}
        if request.param == "ddp":
            model = fps.DistributedDataParallel(module, **options)
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return module, fps.DistributedOptimizer(optimizer, module.named_parameters(), **options)

    return do
