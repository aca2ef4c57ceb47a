# SPDX-License-Identifier: Apache-2.0
"""Smaller gradients on the wire: casts to half types, and the codecs of fastps.Compression.

A compressor has compress(tensor) -> (tensor, context) and decompress(tensor, context) -> tensor,
both without communication; any object with these two methods will do. Codecs are applied by
workers and servers, so their compressor, WireCodec, returns tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from fastps.contract import compression as codecs
from fastps.contract.codec import Coding
from fastps.errors import ConfigError

MIN_COMPRESS_BYTES = 65536  # below it BytePS compresses nothing
# Halves and integers already are as small as these casts could make them.
_WIDE = (torch.float32, torch.float64)


class Compressor(Protocol):
    """The methods that push_pull() and DistributedOptimizer need of a compression."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context that decompress() needs."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in its original form."""


class _None:
    """Send tensors as they are."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class _Cast:
    """Send float32 and float64 as a half type; every other dtype as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast to the half type; the context is the original dtype."""
        if tensor.dtype not in _WIDE:
            return tensor, None
        return tensor.to(self._dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Cast back to the dtype in the context."""
        return tensor if context is None else tensor.to(context)


class WireCodec(_None):
    """Send tensors as they are; workers and servers encode them."""

    def __init__(self, choice: codecs.Choice) -> None:
        self.choice = choice

    def of(self, prefix: str) -> codecs.Choice:
        """Return the choice for names with a prefix, which is hidden from a user's function."""
        if not callable(self.choice) or codecs.is_own(self.choice):
            return self.choice  # the same for all names
        choice: Any = self.choice
        return lambda name: choice(name.removeprefix(prefix))


class WeightDecayMomentum(WireCodec):
    """Add weight decay with momentum to gradients before they are compressed; see wdmom()."""

    def __init__(self, choice: codecs.Choice, mu: float, wd: float, threshold: int) -> None:
        super().__init__(choice)
        if not (0 <= mu < 1 and wd >= 0):
            raise ConfigError(f"mu must be >= 0 and < 1, and wd >= 0, got {mu=} and {wd=}")
        self._mu, self._wd, self._threshold = mu, wd, threshold

    def add_to(self, parameter: torch.Tensor, momenta: dict[int, torch.Tensor]) -> None:
        """Add the decay to a parameter's gradient; momenta: kept between steps, by id.

        With x the parameter: m' = mu * (m + wd * x), g' = g + m' + wd * x; g' = g + wd * x below
        the threshold.
        """
        with torch.no_grad():
            decay = self._wd * parameter.detach()
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            if parameter.nbytes >= self._threshold:
                before = momenta.get(id(parameter))
                momentum = self._mu * (decay if before is None else before + decay)
                momenta[id(parameter)] = momentum
                parameter.grad.add_(momentum)
            parameter.grad.add_(decay)


# A compressor, or a codec as fastps.push_pull() takes it.
Compressing: TypeAlias = Compressor | Coding | Mapping[str, Any] | Callable[..., Any] | None


def compressor_of(given: Compressing) -> Compressor:
    """Return the compressor of a compression."""
    if given is None:
        return Compression.none
    compressor: Any = given
    return compressor if hasattr(given, "compress") else WireCodec(compressor)


class Compression:
    """Compressions for tensors of PyTorch, with those of fastps.Compression.

    `fp16` keeps 11 bits of a value's mantissa and overflows above 65504; `bf16` keeps 8 bits and
    the range of float32. Servers add both in float32 and round once.
    """

    onebit = staticmethod(codecs.Compression.onebit)
    topk = staticmethod(codecs.Compression.topk)
    randomk = staticmethod(codecs.Compression.randomk)
    dithering = staticmethod(codecs.Compression.dithering)
    int8 = staticmethod(codecs.Compression.int8)
    int4 = staticmethod(codecs.Compression.int4)

    @staticmethod
    def wdmom(
        compressor: codecs.Choice, mu: float, wd: float, threshold: int = MIN_COMPRESS_BYTES
    ) -> WeightDecayMomentum:
        """Decay weights with momentum on the worker, before compressing, as BytePS does.

        compressor: one of fastps.Compression. mu: the momentum, wd: the weight decay; the
        optimizer must then have no weight_decay of its own. Parameters of fewer bytes than
        threshold decay without momentum. For optimizers, not for push_pull(). ConfigError.
        """
        return WeightDecayMomentum(compressor, mu, wd, threshold)

    none: ClassVar[Compressor] = _None()
    fp16: ClassVar[Compressor] = _Cast(torch.float16)
    bf16: ClassVar[Compressor] = _Cast(torch.bfloat16)


def choice_of(compression: Compressing) -> Any:
    """Return the codec of a LocalSGD's changes; TypeError for a compressor that casts tensors."""
    if compression is None:
        return None
    given = compressor_of(compression)
    if isinstance(given, WireCodec):
        return given.choice
    raise TypeError(
        "LocalSGD needs a codec of fastps.Compression, not a compressor of tensors: use "
        "fastps.Compression.fp16() instead of fastps.torch.Compression.fp16"
    )
