# SPDX-License-Identifier: Apache-2.0
"""The training program of a job whose workers come and go: a line of history for each step.

CHURN holds a JSON object: folder and seed. Each process draws a number that no other has. It adds
a one at the place of that number, so a sum tells who contributed to it. Behind the places come
small integers that depend on seed, step and number, so their sums are exact in any order. When
the driver has made the file `stop`, the workers that see it say so in a sum, and all end together.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLACES = 4096  # processes that may take part, one after the other
SIZE = 20_000  # integers of a step
STOP = PLACES  # the place at which workers say that they have seen the file

Integers = NDArray[np.int64]


def integers(seed: int, step: int, number: int) -> Integers:
    """Return what one process adds in one step."""
    chance = np.random.Generator(np.random.Philox(key=[seed, step << 16 | number]))
    return chance.integers(-1000, 1000, SIZE)


def digest(weights: Integers) -> str:
    """Return a hash of the weights."""
    return hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()


def number_of(folder: Path) -> int:
    """Draw a number that no other process has."""
    for number in range(PLACES):
        try:
            os.close(os.open(folder / f"number.{number}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        return number
    raise RuntimeError(f"more than {PLACES} processes took part")


def main() -> None:
    """Train until the driver says that it is enough."""
    plan: dict[str, Any] = json.loads(os.environ["CHURN"])
    folder, seed = Path(plan["folder"]), int(plan["seed"])
    number = number_of(folder)
    file = os.open(folder / f"history.{number}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(what: str, **fields: Any) -> None:
        record = {"number": number, "what": what, "at": time.monotonic()}
        os.write(file, (json.dumps(record | fields) + "\n").encode())

    write("begin", pid=os.getpid(), joins="FASTPS_ELASTIC_JOIN" in os.environ)
    import fastps  # noqa: PLC0415  (what precedes takes no time)
    from fastps import elastic  # noqa: PLC0415

    fastps.init()
    state = elastic.State(weights=np.zeros(SIZE, np.int64), step=0, stop=False)
    mine = np.zeros(PLACES + 1 + SIZE, np.int64)
    mine[number] = 1

    @elastic.run
    def train(state: elastic.State) -> None:
        write("train", step=state.step, size=fastps.size())
        while not state.stop:
            mine[STOP] = (folder / "stop").exists()
            mine[STOP + 1 :] = integers(seed, state.step, number)
            size = fastps.size()
            total = fastps.push_pull(mine, "step", average=False)
            state.weights -= total[STOP + 1 :]
            who = np.flatnonzero(total[:PLACES])
            write(
                "step", step=state.step, hash=digest(state.weights), who=who.tolist(),
                most=int(total[:PLACES].max()), sizes=[size, fastps.size()],
            )  # fmt: skip
            state.stop = bool(total[STOP])
            state.step += 1
            time.sleep(plan["pause_s"])
            state.commit()

    try:
        train(state)
    except SystemExit:
        write("left")
        raise
    except BaseException as error:
        write("error", type=type(error).__name__, text=str(error))
        raise
    write("end", step=state.step)
    fastps.shutdown()


if __name__ == "__main__":
    main()
