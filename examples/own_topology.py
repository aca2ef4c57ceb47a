# SPDX-License-Identifier: Apache-2.0
"""Use your own graph: define which workers average with each other, and by which weights.

    fastps-run -np 6 -s 0 python examples/own_topology.py

The graph is two triangles joined by one edge ("barbell"), given as the in-neighbours of each rank.
A worker weights itself and its in-neighbours equally. spectral_gap() says how fast such averages
spread.
"""

import numpy as np

import fastps
from fastps import topology


def barbell(n):
    """Return two complete graphs of n / 2 workers each, joined by one edge."""
    half = n // 2
    sources = [{r for r in range(n) if (r < half) == (rank < half)} - {rank} for rank in range(n)]
    sources[half - 1].add(half)
    sources[half].add(half - 1)
    return topology.with_sources(sources)


def main():
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    graph = barbell(size)
    fastps.set_topology(graph)
    value = np.full(4, float(rank))
    for step in range(60):
        value = fastps.neighbor_allreduce(value, name=f"step {step}")
    everywhere = fastps.allgather(value[None])
    if rank == 0:
        print(
            f"spectral gap {topology.spectral_gap(graph):.3f}, "
            f"workers differ by {np.ptp(everywhere):.1e} after 60 averages"
        )
    assert np.ptp(everywhere) < 0.1
    fastps.shutdown()


if __name__ == "__main__":
    main()
