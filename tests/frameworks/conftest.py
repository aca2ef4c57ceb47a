# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the plugins: a job of threads in place of a job of processes."""

from __future__ import annotations

import pytest
from fake_session import FakeCluster

from fastps import session


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Give a job of two ranks; each thread that enters it has its own session."""
    job = FakeCluster(2)
    monkeypatch.setattr(session, "current", job.current)
    return job


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Give a job of one rank, which the calling thread is."""
    job = FakeCluster(1)
    monkeypatch.setattr(session, "current", job.current)
    job.enter(0)
    return job


@pytest.fixture(params=["default", "loose", "copied", "views", "shared"])
def travel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let wrap() send gradients in one of the ways there are; "shared": as in one machine."""
    models = pytest.importorskip("torch_models")
    monkeypatch.setattr(models, "TRAVEL", models.WAYS.get(request.param, {}))
    monkeypatch.setattr(FakeCluster, "can_share", request.param == "shared")
    return str(request.param)
