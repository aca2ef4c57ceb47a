# SPDX-License-Identifier: Apache-2.0
"""The compressions of fastps.Compression, of which casts also compress tensors directly.

Programs for Horovod call Compression.fp16.compress(tensor), which returns the tensor to send and
a context, and decompress(tensor, context). As compression= workers and servers apply the codec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fastps.contract import compression as codecs
from fastps.contract.codec import Coding

# Halves and integers already are as small as these casts could make them.
_WIDE = (tf.float32, tf.float64)


class _None(Coding):
    """Send tensors as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: Any, _context: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class _Cast:
    """Send float32 and float64 as a half type; every other dtype as it is."""

    def __init__(self, codec: Callable[..., Coding], dtype: Any) -> None:
        self._codec, self._dtype = codec, dtype

    def __call__(self, _name: str = "", **options: Any) -> Coding:
        """Return the codec for compression=, with options of fastps.Compression."""
        return self._codec(**options)

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Cast to the half type; the context is the original dtype."""
        if tensor.dtype not in _WIDE:
            return tensor, None
        return tf.cast(tensor, self._dtype), tensor.dtype

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Cast back to the dtype in the context."""
        return tensor if context is None else tf.cast(tensor, context)


class Compression(codecs.Compression):
    """Compressions for tensors of TensorFlow, with those of fastps.Compression."""

    none = _None()
    fp16: Any = _Cast(codecs.Compression.fp16, tf.float16)
    bf16: Any = _Cast(codecs.Compression.bf16, tf.bfloat16)
