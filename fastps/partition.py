# SPDX-License-Identifier: Apache-2.0
"""Cut tensors into partitions and share the partitions among servers.

Decides offsets, keys and owners; never knows what a tensor is called or holds. Pure: the same
calls in the same order give the same answers in every process. `Placement` is the only object
with state; one thread, the scheduler's, uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastps.errors import ConfigError

__all__ = [
    "ALIGNMENT",
    "KEY_HASHES",
    "MAX_PARTITIONS",
    "MAX_PARTITION_BYTES",
    "MAX_TENSORS",
    "Partition",
    "Placement",
    "index_of",
    "join_owners",
    "key_of",
    "make_partitions",
    "tensor_of",
]

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size
INDEX_BITS = 16
MAX_PARTITIONS = 1 << INDEX_BITS  # per tensor
MAX_TENSORS = 1 << 31
MAX_PARTITION_BYTES = 1 << 30  # offsets within a partition travel in 32 bits
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Describe one piece of a tensor: its bytes are offset to offset + nbytes."""

    key: int
    index: int
    offset: int
    nbytes: int
    owner: int


def key_of(tensor_id: int, index: int) -> int:
    """Give the key of a partition: tensor id times 2^16 plus its index."""
    _check_tensor_id(tensor_id)
    if not 0 <= index < MAX_PARTITIONS:
        raise ConfigError(f"partition {index} of tensor {tensor_id} is not 0 to 65535")
    return tensor_id << INDEX_BITS | index


def tensor_of(key: int) -> int:
    """Give the tensor id of a key."""
    return key >> INDEX_BITS


def index_of(key: int) -> int:
    """Give the partition index of a key."""
    return key & (MAX_PARTITIONS - 1)


def make_partitions(tensor_id: int, nbytes: int, partition_bytes: int) -> list[tuple[int, int]]:
    """Cut a tensor into (offset, nbytes) pieces that cover it exactly once, in order.

    All but the last are partition_bytes, rounded up to 64, long. An empty tensor has one empty
    partition. Raises ConfigError, with the value to set, when the tensor has too many.
    """
    _check_tensor_id(tensor_id)
    if nbytes < 0 or partition_bytes < 1:
        raise ConfigError(f"tensor {tensor_id}: {nbytes} bytes in partitions of {partition_bytes}")
    step = _round_up(partition_bytes)
    if step > MAX_PARTITION_BYTES:
        raise ConfigError(f"partition_bytes={step} is above {MAX_PARTITION_BYTES}")
    if nbytes > step * MAX_PARTITIONS:
        raise _too_many(tensor_id, nbytes, step)
    return [(offset, min(step, nbytes - offset)) for offset in range(0, max(nbytes, 1), step)]


def join_owners(
    tensor_id: int, pieces: Sequence[tuple[int, int]], owners: Sequence[int]
) -> tuple[Partition, ...]:
    """Join the pieces of a tensor with the servers that own them."""
    return tuple(
        Partition(key_of(tensor_id, index), index, offset, nbytes, owner)
        for index, ((offset, nbytes), owner) in enumerate(zip(pieces, owners, strict=True))
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_tensor_id(tensor_id: int) -> None:
    if not 0 <= tensor_id < MAX_TENSORS:
        raise ConfigError(f"tensor id {tensor_id} is not 0 to {MAX_TENSORS - 1}: too many tensors")


def _too_many(tensor_id: int, nbytes: int, step: int) -> ConfigError:
    needed = _round_up(-(-nbytes // MAX_PARTITIONS))
    what = f"tensor {tensor_id} of {nbytes} bytes has more than {MAX_PARTITIONS} partitions"
    if needed > MAX_PARTITION_BYTES:
        return ConfigError(f"{what} whatever partition_bytes is; split the tensor")
    return ConfigError(f"{what} of {step} bytes; set partition_bytes={needed} or more")


# ---- BytePS's hashes of a key (BytePS, Peng et al., OSDI 2020; its key encoder). All but naive
# hash the key's decimal digits, in 64-bit arithmetic.


def _naive(key: int) -> int:
    return (tensor_of(key) + index_of(key)) * 9973 & _MASK64


def _djb2(key: int) -> int:
    value = 5381
    for byte in b"%d" % key:
        value = value * 33 + byte & _MASK64
    return value


def _sdbm(key: int) -> int:
    value = 0
    for byte in b"%d" % key:
        value = byte + (value << 6) + (value << 16) - value & _MASK64
    return value


def _built_in(key: int) -> int:
    """Hash as std::hash<std::string> of libstdc++ on 64 bits does: MurmurHash64A."""
    factor = 0xC6A4A7935BD1E995
    digits = b"%d" % key
    value = 0xC70F6907 ^ len(digits) * factor & _MASK64
    whole = len(digits) & ~7
    for start in range(0, whole, 8):
        word = int.from_bytes(digits[start : start + 8], "little") * factor & _MASK64
        value = (value ^ (word ^ word >> 47) * factor & _MASK64) * factor & _MASK64
    if whole < len(digits):
        value = (value ^ int.from_bytes(digits[whole:], "little")) * factor & _MASK64
    value = (value ^ value >> 47) * factor & _MASK64
    return value ^ value >> 47


KEY_HASHES: dict[str, Callable[[int], int]] = {
    "naive": _naive,
    "built_in": _built_in,
    "djb2": _djb2,
    "sdbm": _sdbm,
}


class Placement:
    """Choose the owner of each partition, in the order of the calls.

    "bytes" takes the server with the least bytes so far (lowest index on ties), so that loads
    never differ by more than the largest partition; the other names are BytePS's hashes.
    """

    def __init__(
        self, num_servers: int, key_hash: str = "bytes", *, built_in_hash_coef: int = 1
    ) -> None:
        if num_servers < 1:
            raise ConfigError("a placement needs a server; set FASTPS_NUM_SERVERS=1 or more")
        if key_hash != "bytes" and key_hash not in KEY_HASHES:
            raise ConfigError(
                f"key_hash={key_hash!r} is not one of bytes, {', '.join(KEY_HASHES)}"
            )
        self._hash = KEY_HASHES.get(key_hash)
        self._coef = built_in_hash_coef if key_hash == "built_in" else 1
        self._loads = [0] * num_servers
        self._heap = [(0, owner) for owner in range(num_servers)]

    @property
    def loads(self) -> tuple[int, ...]:
        """Give the bytes placed on each server so far."""
        return tuple(self._loads)

    def place(self, key: int, nbytes: int) -> int:
        """Choose the server that owns a partition of nbytes; O(log servers)."""
        if self._hash is None:
            owner = self._heap[0][1]
            heapq.heapreplace(self._heap, (self._loads[owner] + nbytes, owner))
        else:
            owner = (self._hash(key) * self._coef & _MASK64) % len(self._loads)
        self._loads[owner] += nbytes
        return owner
