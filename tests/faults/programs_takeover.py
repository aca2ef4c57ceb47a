# SPDX-License-Identifier: Apache-2.0
"""What a worker does while the scheduler of its job dies: all that goes by the scheduler.

Prints its steps, its views with the time of the system's clock, and at the end a digest of all
sums, which are compared with NumPy's as long as nobody is lost.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import numpy as np

import fastps

SIZES = (1, 3000, 70_000)
N = 3


def array_of(step: int, rank: int, size: int) -> np.ndarray:
    return np.random.default_rng((step, rank, size)).standard_normal(size, np.float32)


def say(*words: object) -> None:
    print(*words, flush=True)


def main(steps: int) -> None:
    me = int(os.environ["FASTPS_RANK"])

    def tell(view: fastps.View) -> None:
        say("VIEW", view.number, time.monotonic(), f"{view.seconds:.3f}")

    least = int(os.environ["FASTPS_ELASTIC_MIN"])
    fastps.init(elastic=fastps.Elastic(min=least, on_view=tell))
    digest = hashlib.blake2b(digest_size=8)
    for step in range(steps):
        own = [array_of(step, me, size) for size in SIZES]
        handles = [
            fastps.push_pull_async(
                one, f"t{place}", average=False, out=one if place == step % N else None
            )
            for place, one in enumerate(own)
        ]
        for size, handle in zip(SIZES, handles, strict=True):
            found = fastps.synchronize(handle)
            digest.update(found.tobytes())
            if fastps.size() == N:
                first, second, third = (array_of(step, rank, size) for rank in range(N))
                np.testing.assert_array_equal(found, first + second + third)
        while step % 3 == 0:
            try:
                there = fastps.allgather(np.full(1, me))
            except fastps.ViewChangedError:
                continue
            assert me in there
            break
        if step % 4 == 0:
            fastps.barrier()
        if step % 5 == 0:
            assert fastps.broadcast_object(step, 0) == step
        say("STEP", step)
        time.sleep(0.01)
    fastps.barrier()
    fastps.shutdown()
    say("END", digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]))
