# SPDX-License-Identifier: Apache-2.0
"""Declarations of tensors that workers send each other, beside the scheduler's protocol. Pure."""

from __future__ import annotations

import msgspec

from fastps.control.protocol import TensorSpec
from fastps.errors import ProtocolError

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_to_spec = msgspec.msgpack.Decoder(TensorSpec)


def relaid(spec: TensorSpec, chunk_bytes: int) -> TensorSpec:
    """Return a declaration for links that carry other frames."""
    layout = msgspec.structs.replace(spec.layout, chunk_bytes=chunk_bytes)
    return msgspec.structs.replace(spec, layout=layout)


def pack_spec(spec: TensorSpec) -> bytes:
    """Encode a worker's declaration for another worker."""
    return _encoder.encode(spec)


def unpack_spec(data: bytes) -> TensorSpec:
    """Decode another worker's declaration; ProtocolError if it is malformed."""
    try:
        return _to_spec.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"a declaration of another worker is malformed: {error}") from error
