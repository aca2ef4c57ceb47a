# SPDX-License-Identifier: Apache-2.0
"""Compression of fastps.tensorflow as Horovod's programs use it, on stand-ins for tensors."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from fastps.contract import compression as codecs
from fastps.contract.codec import PLAIN, Coding


@pytest.fixture
def found(monkeypatch):
    """Yield the module, imported with a stand-in for TensorFlow."""
    tf = SimpleNamespace(
        **{name: name for name in ("float16", "bfloat16", "float32", "float64")},
        cast=lambda tensor, dtype: SimpleNamespace(dtype=dtype, of=tensor),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    name = "fastps.frameworks.tensorflow.compression"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).Compression
    sys.modules.pop(name)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_casts_compress_and_decompress(found, kind):
    compression = getattr(found, kind)
    for dtype in ("float32", "float64"):
        sent, context = compression.compress(SimpleNamespace(dtype=dtype))
        assert sent.dtype == {"fp16": "float16", "bf16": "bfloat16"}[kind]
        assert compression.decompress(sent, context).dtype == dtype
    for dtype in ("float16", "int32"):
        tensor = SimpleNamespace(dtype=dtype)
        sent, context = compression.compress(tensor)
        assert sent is tensor
        assert compression.decompress(sent, context) is tensor


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_casts_are_codecs_too(found, kind):
    ours, plain = getattr(found, kind), getattr(codecs.Compression, kind)
    assert codecs.coding_of(ours, "layer.weight") == plain()
    assert ours(ef="vanilla") == plain(ef="vanilla")


def test_none(found):
    assert found.none == PLAIN
    assert isinstance(found.none, Coding)
    assert codecs.coding_of(found.none) == PLAIN
    assert found.none.decompress(*found.none.compress("tensor")) == "tensor"


def test_the_other_codecs_are_the_same(found):
    assert found.onebit() == codecs.Compression.onebit()
