# SPDX-License-Identifier: Apache-2.0
"""PipeSGD against a model of versions: which step's gradient is applied when, and once."""

from __future__ import annotations

import pytest
from fake_session import FakeCluster
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import FastPSError
from fastps.session import current

torch = pytest.importorskip("torch")

import fastps.torch as fps  # noqa: E402


class Model:
    """The recursion: step t applies what step t - 1 has sent; a checkpoint what is left."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.held: int | None = None
        self.applied: list[int] = []
        self.sent = 0

    def step(self) -> None:
        before, self.held = self.held, self.sent
        self.sent += 1
        if self.warmup:
            self.warmup -= 1
            assert before is None
            before, self.held = self.held, None
        if before is not None:
            self.applied.append(before)

    def checkpoint(self) -> None:
        if self.held is not None:
            self.applied.append(self.held)
        self.held = None


@given(
    warmup=st.integers(0, 4),
    events=st.lists(st.sampled_from(["step", "step", "step", "checkpoint"]), max_size=12),
)
def test_every_gradient_is_applied_once_and_at_most_one_step_late(
    warmup: int, events: list[str]
) -> None:
    """Gradients are powers of two of the step, so parameters tell which were applied."""
    cluster, model = FakeCluster(2), Model(warmup)
    expected: list[float] = []
    for event in events:
        model.step() if event == "step" else model.checkpoint()
        assert len(set(model.applied)) == len(model.applied)
        assert model.sent - len(model.applied) <= 1
        expected.append(float(sum(2**number for number in model.applied)))
    patch = pytest.MonkeyPatch()
    patch.setattr(current, "current", cluster.current)

    def run(rank: int) -> list[float]:
        w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        unused = torch.nn.Parameter(torch.zeros(2))
        optimizer = fps.DistributedOptimizer(
            torch.optim.SGD([w, unused], lr=1.0), staleness=1, pipesgd_warmup_iter=warmup
        )
        found, number = [], 0
        for event in events:
            if event == "step":
                # the mean over both ranks is 2 ** number
                w.grad = torch.full_like(w, 2.0**number + (1 if rank else -1))
                number += 1
                optimizer.step()
            else:
                kept = w.grad
                optimizer.prepare_stale_states()
                assert w.grad is kept
            found.append(-float(w.detach()[0]))
        return found

    with patch.context():
        assert cluster.run(run) == [expected, expected]
    patch.undo()


def test_words(alone: FakeCluster) -> None:
    w = torch.nn.Parameter(torch.zeros(3))
    make = torch.optim.SGD
    for options, text in [
        ({"staleness": 2}, "needs asynchronous=True; without it, staleness is 0, or 1"),
        ({"staleness": 1, "pipesgd_warmup_iter": -1}, ">= 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            fps.DistributedOptimizer(make([w], lr=1), prefix=str(options), **options)
    with pytest.raises(ValueError, match="does not support LBFGS"):
        fps.DistributedOptimizer(torch.optim.LBFGS([w]), prefix="l", staleness=1)
    plain = fps.DistributedOptimizer(make([w], lr=1), staleness=0, prefix="p")
    plain.prepare_stale_states()
    optimizer = fps.DistributedOptimizer(make([w], lr=1), staleness=1)
    assert type(optimizer).__name__ == "PipelinedSGD"
    for call in (optimizer.synchronize, optimizer.skip_synchronize):
        with pytest.raises(FastPSError, match="clip each worker"):
            call()
    with pytest.raises(NotImplementedError, match="does not support add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    w.grad = torch.ones(3)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert not w.any()
    optimizer.step()
    assert (w == -1).all()
