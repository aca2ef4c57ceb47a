# SPDX-License-Identifier: Apache-2.0
"""Weight-decay momentum against its formula, in a real session of one worker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fastps.torch as fps  # noqa: E402
from fastps.errors import ConfigError  # noqa: E402

MU, WD, RATE = 0.75, 0.125, 0.5


@pytest.fixture
def job() -> Iterator[None]:
    fps.init()
    yield
    fps.shutdown()


@pytest.mark.parametrize("options", [{}, {"cross_barrier": True}, {"bucket_bytes": 0}], ids=str)
def test_weights_decay_with_momentum(job: None, options: dict[str, object]) -> None:
    large, small = (torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (20000, 50))
    unused = torch.nn.Parameter(torch.ones(20000))
    wanted = [p.detach().numpy().copy() for p in (large, small, unused)]
    momenta = [np.zeros_like(x) for x in wanted]
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD([large, small, unused], lr=RATE),
        compression=fps.Compression.wdmom(fps.Compression.onebit(), mu=MU, wd=WD), **options,
    )  # fmt: skip
    for step in range(4):
        optimizer.zero_grad()
        ((large * step).sum() + (small * step).sum()).backward()
        optimizer.step()
        for place, x in enumerate(wanted):
            gradient = np.full_like(x, step if place < 2 else 0)
            decay = np.float32(WD) * x
            if place != 1:  # it has fewer bytes than the threshold
                momenta[place] = np.float32(MU) * (momenta[place] + decay)
            wanted[place] = x - np.float32(RATE) * (gradient + momenta[place] + decay)
    for found, x in zip((large, small, unused), wanted, strict=True):
        np.testing.assert_allclose(found.detach().numpy(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mu", "wd"), [(1.0, 0.1), (-0.1, 0.1), (0.5, -1.0)])
def test_what_means_nothing(mu: float, wd: float) -> None:
    with pytest.raises(ConfigError, match="mu must be"):
        fps.Compression.wdmom(None, mu=mu, wd=wd)
