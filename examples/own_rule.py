# SPDX-License-Identifier: Apache-2.0
"""Use your own rule: servers import it by name, and workers request it by the same name.

    cd examples
    fastps-run -np 5 -s 1 --env FASTPS_SHARED_MEMORY=0 --env FASTPS_RULES=own_rule:middle_half \\
        python own_rule.py

The rule is the interquartile mean: it leaves out the lowest and the highest quarter of each
element. One of the five workers is Byzantine; the average follows it, the rule does not.
"""

import numpy as np

import fastps


def middle_half(updates):
    """Return the mean of the middle half of each element; updates: [m, d], the result is [d]."""
    cut = len(updates) // 4
    return np.sort(updates, axis=0)[cut : len(updates) - cut].mean(axis=0, dtype=updates.dtype)


def main():
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    honest = np.random.default_rng(rank).normal(1.0, 0.1, 10_000).astype(np.float32)
    update = -100 * honest if rank == size - 1 else honest
    average = fastps.push_pull(update, "average")
    robust = fastps.push_pull(update, "robust", rule="own_rule:middle_half")
    rows = np.stack(fastps.allgather(update[None]))
    assert np.allclose(robust, middle_half(rows), atol=1e-6)
    if rank == 0:
        print(f"honest workers push 1.0; average {average.mean():.1f}, rule {robust.mean():.3f}")
    fastps.shutdown()


if __name__ == "__main__":
    main()
