# SPDX-License-Identifier: Apache-2.0
"""State dicts of PyTorch come back with all bits, also by torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fastps.torch as fps
from aids.thread_teams import save_by
from fastps import checkpoint
from fastps.checkpoint.trees import NUMPY
from fastps.frameworks.torch.checkpoint import TorchKind

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Return whether two states are the same, types, dtypes and bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and torch.equal(
                one.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8),
                other.reshape(-1).view(torch.uint8),
            )
        )
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and bool((one == other).all())
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model and an optimizer that has states."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_dicts_come_back(tmp_path):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    fps.checkpoint.save(state, tmp_path, step=1)
    found = fps.checkpoint.restore(tmp_path)
    assert same(state, found.state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    assert same(found.state["model"], model.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
def test_each_dtype_and_shape_comes_back(tmp_path, dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    state = [tensor, tensor.T if len(shape) == 2 else tensor, torch.nn.Parameter(torch.ones(2))]
    fps.checkpoint.save({"x": state, "n": np.arange(3)}, tmp_path, step=1)
    found = fps.checkpoint.restore(tmp_path).state
    assert same(state, found["x"])
    assert same(np.arange(3), found["n"])
    arrays = checkpoint.restore(tmp_path).state["x"]
    assert arrays[0].shape == shape
    assert (
        arrays[0].tobytes()
        == found["x"][0].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).to_sparse(), torch.ones(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_what_has_no_plain_memory_is_refused(tmp_path, tensor):
    with pytest.raises(TypeError, match=r"state\['x'\]: tensors of layout"):
        fps.checkpoint.save({"x": tensor}, tmp_path, step=1)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_distributed_checkpoint_reads_it(tmp_path, workers):
    pytest.importorskip("safetensors")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip("this PyTorch has no reader of safetensors")
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = save_by([state] * workers, tmp_path, kinds=(TorchKind(), NUMPY))[0].wait()
    assert len(list(path.glob("*.safetensors"))) == workers
    target = {
        "model": {name: torch.zeros_like(one) for name, one in state["model"].items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3, 4)}}},
    }
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert same(dict(state["model"]), target["model"])
    wanted = optimizer.state_dict()["state"][0]["exp_avg"]
    assert same(wanted, target["optimizer"]["state"][0]["exp_avg"])
