# SPDX-License-Identifier: Apache-2.0
"""Whether a program trains by torch, as far as its modules show."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fastps.session.outside_job import _has_trained


class Optimizer:
    def step(self) -> None:
        pass


class Momentum(Optimizer):
    def step(self) -> None:
        pass


class Adam(Momentum):
    def step(self) -> None:
        pass


TORCH = SimpleNamespace(optim=SimpleNamespace(Optimizer=Optimizer))


@pytest.mark.parametrize("kind", [Optimizer, Momentum, Adam])
def test_an_optimizer_that_was_made_shows(kind, monkeypatch):
    assert not _has_trained(TORCH)
    monkeypatch.setattr(kind.step, "hooked", True, raising=False)
    assert _has_trained(TORCH)
    groups = ModuleType("distributed")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", groups)
    assert _has_trained(TORCH)
    groups._default_pg_init_method = "env://"  # a group of processes was made
    assert not _has_trained(TORCH)


def test_without_optimizers_nothing_was_trained():
    assert not _has_trained(None)
    assert not _has_trained(SimpleNamespace())  # torch that is half imported
