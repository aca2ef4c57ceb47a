# SPDX-License-Identifier: Apache-2.0
"""Factors of operations on tensors of torch, whose threads may flush subnormal numbers to zero."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from fastps.frameworks.torch.ops.wire_tensors import scaled, wire_of

# of a size that torch would share out among threads, which inherit what their maker had
FLUSHED = """
import torch
from fastps.frameworks.torch.ops.wire_tensors import scaled
torch.set_num_threads(4)
torch.set_flush_denormal(True)
small = torch.full((1 << 20,), 3, dtype=torch.int32).view(torch.float32)
assert torch.all(small * 2.0 == 0)
assert torch.all(scaled(small, 2.0).view(torch.int32) == 6)
print("same")
"""


def test_large_tensors_keep_subnormal_numbers_on_all_threads():
    done = subprocess.run(
        [sys.executable, "-c", FLUSHED], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_floats_are_scaled_as_torch_does(dtype):
    tensor = torch.randn(1000, 3, generator=torch.Generator().manual_seed(7), dtype=dtype)
    for one in (tensor, tensor.t(), tensor[::2], tensor[0, 0]):
        made = scaled(one, 1 / 3)
        torch.testing.assert_close(made, one * (1 / 3), rtol=0, atol=0)
    assert scaled(tensor, 1.0) is tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integers_are_scaled_in_float64_and_cut(dtype):
    tensor = torch.arange(100, dtype=dtype)
    made = scaled(tensor, 0.7)
    assert torch.equal(made, (tensor.double() * 0.7).to(dtype))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (np.ones(3), r"'w' must be a torch.Tensor, not ndarray"),
        (torch.eye(3).to_sparse(), "tensor 'w' is sparse"),
        (torch.ones(3, device="meta"), "tensor 'w' is on meta"),
        (torch.ones(3, dtype=torch.uint32), "tensor 'w' has dtype torch.uint32"),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_cannot_be_sent_is_refused_with_a_factor_too(tensor, said, factor):
    with pytest.raises(TypeError, match=said):
        wire_of(tensor, "w", factor=factor)
