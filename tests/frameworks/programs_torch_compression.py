# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_torch_compression.py do: gradients are those of fastps.push_pull()."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fastps
import fastps.torch as fps
from fastps.contract.codec import PLAIN, Coding
from fastps.session.current import current

STEPS, RATES = 3, (0.1, 0.1, 0.05)
FEEDBACK = {"ef": "vanilla"}


def make_net() -> nn.Sequential:
    """Make a net with one weight that is worth compressing, and small ones that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(400, 100), nn.Tanh(), nn.Linear(100, 3))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    """Give this worker's loss."""
    generator = torch.Generator().manual_seed(10 * step + fastps.rank())
    return net(torch.randn(8, 400, generator=generator)).square().mean()


def codings() -> dict[str, Coding]:
    """Give what was agreed on for each name."""
    return {name: tensor.layout.coding for name, tensor in current()._tensors.items()}


def optimizer_follows(compression: object, meant: Coding, prefix: str) -> None:
    """Compare the big weight's gradients with what push_pull makes of the worker's own."""
    net, twin = make_net(), make_net()
    optimizer = fps.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=RATES[0]), net.named_parameters(),
        compression=compression, prefix=prefix, bucket_bytes=0,
    )  # fmt: skip
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        twin.load_state_dict(net.state_dict())
        twin.zero_grad()
        loss_of(twin, step).backward()
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.synchronize()
        weight = twin[0].weight.grad
        want = fastps.push_pull(
            weight.numpy(), f"{prefix} twin", compression=meant, learning_rate=rate
        )
        assert np.array_equal(net[0].weight.grad.numpy(), want)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert codings()[f"{prefix}0.weight"] == meant
    assert codings()[f"{prefix}2.weight"] == PLAIN


def by_name(name: str) -> Coding | None:
    """Choose by the name that the model has for a parameter."""
    return fastps.Compression.topk(0.1, ef="vanilla") if name == "0.weight" else None


def everything() -> None:
    """Try optimizers, DistributedDataParallel, push_pull and a dictionary."""
    fps.init()
    onebit = fps.Compression.onebit(ef="vanilla")
    optimizer_follows(onebit, onebit, "a.")
    optimizer_follows({"compressor": "onebit", "scaling": True, "ef": "vanilla"}, onebit, "b.")
    optimizer_follows(by_name, fastps.Compression.topk(0.1, ef="vanilla"), "c.")

    tensor = torch.full((100, 300), float(fastps.rank() + 1))
    mean = (fastps.size() + 1) / 2
    got = fps.push_pull(tensor, name="t", compression=fps.Compression.int8)
    assert torch.allclose(got, torch.full_like(got, mean), rtol=1e-2)
    assert codings()["t"] == fastps.Compression.int8()
    assert (fps.push_pull(tensor, name="u") == mean).all()

    net = make_net()
    module = fps.DistributedDataParallel(net, compression=fps.Compression.int4())
    loss_of(module, 0).backward()
    assert fastps.Compression.int4() in codings().values()
    counts = fastps.statistics()
    assert 0 < counts["bytes_after_compression"] < counts["bytes_before_compression"] / 4
    each_by_itself()
    fps.shutdown()


def each_by_itself() -> None:
    """Send the codecs of whole tensors no bucket: one scale, or one k, is of one gradient."""
    small = 300
    for number, choice in enumerate(
        (fps.Compression.topk(2), lambda _: fps.Compression.topk(2), fps.Compression.fp16)
    ):
        weights = [nn.Parameter(torch.zeros(n)) for n in (20_000, small, *[10_000] * 4)]
        prefix = f"alone{number}."
        optimizer = fps.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0), compression=choice, prefix=prefix
        )
        for weight in weights:
            weight.grad = torch.arange(1.0, 1 + weight.numel())
        optimizer.step()
        is_whole = number < 2
        for weight in weights:
            is_coded = is_whole and weight.nbytes >= current().config.min_compress_bytes
            assert int(torch.count_nonzero(weight)) == (2 if is_coded else weight.numel())
        mine = [name for name in codings() if name.startswith(f"{prefix}group")]
        assert len(mine) == 2, mine  # the large one, and the others side by side
