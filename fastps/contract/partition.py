# SPDX-License-Identifier: Apache-2.0
"""Cut tensors into partitions and share the partitions among servers.

Decides offsets, keys and owners; never knows a tensor's name or contents. Pure: the same calls in
the same order give the same answers in every process. `Placement` is the only object with state;
one thread, the scheduler's, uses it.

Shares follow Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
Heterogeneous GPU/CPU Clusters" (OSDI 2020, section 4): every network card is busy for the same
time when a server on a machine of its own gets 2(n - 1) parts, and one beside a worker n - k.
There are n worker machines and k others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from fastps.errors import ConfigError, ProtocolError

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every element size
INDEX_BITS = 16
MAX_PARTITIONS = 1 << INDEX_BITS  # per tensor
MAX_TENSORS = 1 << 31
MAX_PIECES = 1 << 20  # of all tensors of a job; cutting so many takes a few seconds
MAX_PARTITION_BYTES = 1 << 30  # offsets within a partition travel in 32 bits
MIN_SHARE_BYTES = 128 << 10  # a smaller share of a tensor is not worth a frame of its own
_MASK64 = (1 << 64) - 1


class Piece(NamedTuple):
    """Describe one partition of a tensor: its bytes, from offset on, and the server they go to."""

    offset: int
    nbytes: int
    owner: int


def key_of(tensor_id: int, index: int) -> int:
    """Return the key of a partition: tensor id times 2^16 plus its index."""
    _check_tensor_id(tensor_id)
    if not 0 <= index < MAX_PARTITIONS:
        raise ConfigError(
            f"partition of tensor {tensor_id} must be 0 to {MAX_PARTITIONS - 1}, got {index}"
        )
    return tensor_id << INDEX_BITS | index


def tensor_of(key: int) -> int:
    """Return the tensor id of a key."""
    return key >> INDEX_BITS


def index_of(key: int) -> int:
    """Return the partition index of a key."""
    return key & (MAX_PARTITIONS - 1)


def make_partitions(tensor_id: int, nbytes: int, partition_bytes: int) -> list[tuple[int, int]]:
    """Cut a tensor into (offset, nbytes) pieces that cover it exactly once, in order.

    All but the last are partition_bytes, rounded up to 64, long. An empty tensor has one empty
    partition. Raises ConfigError, with the value to set, when the tensor has too many.
    """
    _check_tensor_id(tensor_id)
    check_tensor(nbytes, partition_bytes=partition_bytes, n_owners=0)
    step = _round_up(partition_bytes)
    return [(offset, min(step, nbytes - offset)) for offset in range(0, max(nbytes, 1), step)]


def server_weights(n_machines: int, n_servers: int, *, is_colocated: bool) -> tuple[int, ...]:
    """Weigh the servers: those apart first, then, if colocated, one per worker machine.

    Servers apart that take everything (as many as machines, or more) leave weight 0 to the
    others. Without colocation all weigh the same.
    """
    if not is_colocated:
        return (1,) * n_servers
    if n_servers and n_servers >= n_machines:
        return (1,) * n_servers + (0,) * n_machines
    apart, beside = 2 * (n_machines - 1), n_machines - n_servers
    divisor = math.gcd(apart, beside) if n_servers else beside
    return (apart // divisor,) * n_servers + (beside // divisor,) * n_machines


def check_tensor(nbytes: int, *, partition_bytes: int, n_owners: int) -> None:
    """Raise ConfigError, with the value to set, for a tensor that cut_tensor would refuse."""
    if nbytes < 0 or partition_bytes < 1:
        raise ConfigError(
            "a tensor needs 0 bytes or more, and partitions 1 byte or more; got "
            f"{nbytes} bytes in partitions of {partition_bytes}"
        )
    step = _round_up(partition_bytes)
    if step > MAX_PARTITION_BYTES:
        raise ConfigError(f"partition_bytes must be at most {MAX_PARTITION_BYTES}, got {step}")
    whole = max(MAX_PARTITIONS - n_owners, 1)  # a stripe may end in a short piece
    if nbytes > step * whole:
        raise _too_many(nbytes, step, whole)


def cut_tensor(
    nbytes: int,
    *,
    partition_bytes: int,
    placement: Placement,
    tensor_id: int,
    is_whole: bool = False,
) -> tuple[Piece, ...]:
    """Cut a tensor into pieces that cover it exactly once, in order, and place them.

    A large tensor gives every server one stripe, proportional to its weight, in even pieces of
    at most partition_bytes (rounded up to 64); a small one goes whole to the server with the
    least load for its weight. All offsets are multiples of 64. Under a hash of keys all pieces
    are even. is_whole: it goes to one server like a small one. Raises ConfigError before anything
    is placed.
    """
    _check_tensor_id(tensor_id)
    owners = placement.owners
    check_tensor(nbytes, partition_bytes=partition_bytes, n_owners=len(owners))
    step = _round_up(partition_bytes)
    if nbytes <= step and (is_whole or nbytes < len(owners) * MIN_SHARE_BYTES):
        return (Piece(0, nbytes, placement.place(key_of(tensor_id, 0), nbytes)),)
    if placement.is_hashed:
        even = _even_step(nbytes, step, len(owners))
        return tuple(
            Piece(offset, size, placement.place(key_of(tensor_id, index), size))
            for index, (offset, size) in enumerate(make_partitions(tensor_id, nbytes, even))
        )
    return tuple(_stripes(nbytes, step, placement))


def most_pieces(nbytes: int, *, partition_bytes: int, placement: Placement) -> int:
    """Bound the pieces that cut_tensor makes: every owner may get a short one."""
    if nbytes < min(partition_bytes, MIN_SHARE_BYTES):
        return 1
    return nbytes // partition_bytes + len(placement.owners)


def _even_step(nbytes: int, step: int, n_owners: int = 1) -> int:
    """Return the size of even pieces of which every server gets as many."""
    count = -(-nbytes // (step * n_owners)) * n_owners
    return min(step, _round_up(-(-nbytes // count)))


def _stripes(nbytes: int, step: int, placement: Placement) -> Iterator[Piece]:
    """Cut one stripe per server and each stripe into even pieces; note the loads."""
    total = sum(placement.weights)
    first = weight = 0
    for owner in placement.owners:
        weight += placement.weights[owner]
        last = nbytes if weight == total else nbytes * weight // (total * ALIGNMENT) * ALIGNMENT
        stripe = last - first
        if stripe:
            even = _even_step(stripe, step)
            for offset, size in make_partitions(0, stripe, even):
                yield Piece(first + offset, size, owner)
            placement.add_load(owner, stripe)
        first = last


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_tensor_id(tensor_id: int) -> None:
    if not 0 <= tensor_id < MAX_TENSORS:
        raise ConfigError(
            f"too many tensors: a tensor id must be 0 to {MAX_TENSORS - 1}, got {tensor_id}"
        )


def _too_many(nbytes: int, step: int, whole: int) -> ConfigError:
    needed = _round_up(-(-nbytes // whole))
    what = f"a tensor of {nbytes} bytes has more than {MAX_PARTITIONS} partitions"
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

    "bytes" takes the server with the least bytes for its weight so far (lowest index on ties);
    the other names are BytePS's hashes, which know no weights. A server of weight 0 gets
    nothing.
    """

    def __init__(
        self, weights: Sequence[int], key_hash: str = "bytes", *, built_in_hash_coef: int = 1
    ) -> None:
        if not weights or min(weights) < 0 or not any(weights):
            raise ConfigError(
                f"a job needs a server with a weight above 0, got weights {tuple(weights)}; set "
                "FASTPS_NUM_SERVERS=1 or more"
            )
        if key_hash != "bytes" and key_hash not in KEY_HASHES:
            raise ConfigError(
                f"key_hash must be one of bytes, {', '.join(KEY_HASHES)}, got {key_hash!r}"
            )
        self.weights = tuple(weights)
        self.owners = tuple(owner for owner, weight in enumerate(weights) if weight)
        self._hash = KEY_HASHES.get(key_hash)
        self._coef = built_in_hash_coef if key_hash == "built_in" else 1
        self._loads = [0] * len(weights)
        multiple = math.lcm(*(weights[owner] for owner in self.owners))
        self._scales = [multiple // weight if weight else 0 for weight in weights]

    @property
    def is_hashed(self) -> bool:
        """Return whether keys alone decide the owners."""
        return self._hash is not None

    @property
    def loads(self) -> tuple[int, ...]:
        """Return the bytes placed on each server so far."""
        return tuple(self._loads)

    def place(self, key: int, nbytes: int) -> int:
        """Choose the server that owns a partition of nbytes; O(servers)."""
        if self._hash is None:
            owner = min(self.owners, key=lambda one: self._loads[one] * self._scales[one])
        else:
            hashed = self._hash(key) * self._coef & _MASK64
            owner = self.owners[hashed % len(self.owners)]
        self.add_load(owner, nbytes)
        return owner

    def add_load(self, owner: int, nbytes: int) -> None:
        """Note bytes that were given to a server without asking place()."""
        self._loads[owner] += nbytes


def check_pieces(
    name: str,
    nbytes: int,
    chunk_bytes: int,
    pieces: Sequence[tuple[int, int, int]],
    owners: Container[int],
) -> None:
    """Raise ProtocolError unless pieces, as (offset, nbytes, owner), make up a tensor in order.

    They come from the scheduler, and decide which memory is sent and written.
    """
    end = 0
    wrong = "" if 0 < chunk_bytes <= MAX_PARTITION_BYTES else f"chunks of {chunk_bytes} bytes"
    if not 0 < len(pieces) <= MAX_PARTITIONS:
        wrong = f"{len(pieces)} pieces"
    for offset, length, owner in pieces:
        if offset != end or not 0 <= length <= MAX_PARTITION_BYTES:
            wrong = wrong or f"a piece of {length} bytes at {offset}, where {end} was next"
        if owner not in owners:
            wrong = wrong or f"no member of number {owner} owns keys"
        end += length
    if end != nbytes:
        wrong = wrong or f"pieces of {end} bytes together"
    if wrong:
        raise ProtocolError(
            f"the scheduler's pieces do not fit tensor {name!r} of {nbytes} bytes: {wrong}"
        )
