# SPDX-License-Identifier: Apache-2.0
"""Simulate workers without servers, in buckets, in order: ring all-reduce, or one peer each.

Gradients are fused into buckets in the order in which they are ready. A bucket starts when its
last gradient is ready and the bucket before it is done, and takes 2(n-1) steps, each a message
of 1/n of it and one latency (Patarasuk and Yuan, 2009). Machines with several workers sum on
their bus before and publish on it after. There is no priority. With one peer (the one-peer
exponential graph of docs/decentralized.md, adapt then combine) a bucket is one message of all of
it, while another one comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tools.simulator.plan import Cluster, Network, Outcome, Tensor, local_share

BUCKET_BYTES = 25 << 20  # of PyTorch's DistributedDataParallel
PEER_BUCKET_BYTES = 2 << 20  # of fastps.torch's decentralized optimizers


def simulate(
    tensors: Sequence[Tensor],
    cluster: Cluster,
    network: Network,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    has_ring: bool = True,
) -> Outcome:
    """Simulate the sums of all tensors by rings over the machines, or means with one peer each."""
    exchange_s = ring_s if has_ring else peer_s
    done_s = [tensor.ready_s for tensor in tensors]
    free_at = bus_free_at = moved = 0.0
    for bucket in fuse(tensors, bucket_bytes):
        nbytes = sum(tensors[index].nbytes for index in bucket)
        bus_s = nbytes * local_share(cluster) / network.bus_bytes_per_s
        ready = max(tensors[index].ready_s for index in bucket)
        bus_free_at = max(bus_free_at, ready) + bus_s
        free_at = max(free_at, bus_free_at) + exchange_s(nbytes, cluster.machines, network)
        moved += (2 * (cluster.machines - 1) / cluster.machines if has_ring else 1) * nbytes
        for index in bucket:
            done_s[index] = free_at + bus_s
    return Outcome(done_s, {"worker": moved, "server": 0.0})


def ring_s(nbytes: float, machines: int, network: Network) -> float:
    """Give the time of one ring all-reduce."""
    step_s = nbytes / machines / network.bytes_per_s + network.head_s
    return 2 * (machines - 1) * step_s


def peer_s(nbytes: float, machines: int, network: Network) -> float:
    """Give the time of a message to a peer while another one comes; alone there is none."""
    return nbytes / network.bytes_per_s + network.head_s if machines > 1 else 0.0


def fuse(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Put tensors into buckets in the order of their time, each up to bucket_bytes."""
    buckets: list[list[int]] = []
    room = 0
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].ready_s):
        if not buckets or tensors[index].nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= tensors[index].nbytes
    return buckets
