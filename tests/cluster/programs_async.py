# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_async.py do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import fastps
from fastps.errors import ConfigError, MismatchError, ShutdownError, StallError
from fastps.session import current as _current

COUNT, STEPS = 30_001, 24


def dawdle() -> None:
    """Be slower the higher the rank."""
    for _ in range(3000 * fastps.rank()):
        pass


def marks(staleness: float | None, prefix: str) -> None:
    """Each worker counts its pushes in a row of its own; nothing is lost, nothing counts twice."""
    rank, size = fastps.rank(), fastps.size()
    values = {"a": np.full((COUNT, size), rank + 5), "b": np.full(size, rank - 7.0)}
    held = fastps.ServerParameters(values, staleness=staleness, prefix=prefix)
    assert all(array is values[name] for name, array in zip("ab", held.arrays, strict=True))
    mine = np.zeros(size, int)
    mine[rank] = 1
    deltas = {"a": np.tile(mine, (COUNT, 1)), "b": mine.astype(float)}
    for step in range(1, STEPS + 1):
        dawdle()
        held.push(deltas)
        for seen in (values["a"] - 5, np.atleast_2d(values["b"] + 7)):
            assert (seen[:, rank] == step).all(), "what I gave is there, once"
            if staleness is not None:
                assert seen.min() >= step - staleness
                assert seen.max() <= step + staleness + 1
            if staleness == 0:
                assert (seen == step).all(), "in step"
    fastps.barrier()
    held.push([np.zeros_like(array) for array in held.arrays])
    assert (values["a"] == 5 + STEPS).all(), "the seed of rank 0 and all that was given"
    assert (values["b"] == STEPS - 7).all()


def least_squares(staleness: float | None, prefix: str) -> float:
    """Find what all workers' data agree on; each has too few to find it alone."""
    luck = np.random.default_rng(0)
    inputs, wanted = luck.normal(size=(3, 8, 12)), luck.normal(size=12)
    mine = inputs[fastps.rank()]
    held = fastps.ServerParameters({"w": np.zeros(12)}, staleness=staleness, prefix=prefix)
    (weights,) = held.arrays
    steps = 0
    while steps < 2000:
        held.push([-0.01 * mine.T @ (mine @ (weights - wanted))])
        steps += 1
        if steps % 50 == 0:  # who has all processors to itself is not to end before others begin
            fastps.barrier()
    fastps.barrier()
    held.push([np.zeros(12)])
    return float(np.abs(weights - wanted).max())


def refused(*args: object, **options: object) -> str:
    """Give what is said against parameters."""
    try:
        held = fastps.ServerParameters(*args, **options)
        held.push([np.zeros(3)])  # rank 0 has given its own before it can hear of others
    except (ConfigError, MismatchError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compensates(compensation: float | str, prefix: str) -> None:
    """Workers push in turns; each knows all that is pushed, and what the formulas make of it."""
    size, seed, rates = fastps.size(), np.linspace(-1, 1, 700, dtype=np.float32), (0.5, 0.25)
    mine = {"w": seed * (1 + fastps.rank()), "v": np.zeros(3)}
    held = fastps.ServerParameters(mine, prefix=prefix, delay_compensation=compensation)
    fastps.barrier()  # all have the seed, before somebody adds to it
    value, squares, backups = seed, np.zeros_like(seed), [seed] * size
    for turn in range(4 * size):
        rank, rate = turn % size, np.float32(rates[turn // (2 * size)])
        delta = np.sin(seed * (turn + 1))
        gradient = delta / rate
        squares = np.float32(0.95) * squares + (1 - np.float32(0.95)) * gradient * gradient
        factor = np.float32(compensation if type(compensation) is float else 0) / rate
        if compensation == "adaptive":
            factor = np.float32(2) / np.sqrt(squares + np.float32(1e-7)) / rate
        value = value + delta - factor * delta * delta * (value - backups[rank])
        backups[rank] = value
        if rank == fastps.rank():
            found, _ = held.push([delta, np.ones(3)], learning_rate=float(rate))
            np.testing.assert_array_equal(found, value)
        fastps.barrier()
    assert "learning_rate=None" in said_of(held.push, [seed, np.ones(3)])
    assert "learning_rate=-1" in said_of(held.push, [seed, np.ones(3)], learning_rate=-1)


def said_of(call: Callable[..., object], *args: object, **options: object) -> str:
    """Give the text of the ValueError that a call raises."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def everything() -> list[float]:
    """Do all that needs servers, in one job."""
    fastps.init()
    for place, staleness in enumerate((None, 0, 1, 3)):
        marks(staleness, f"marks{place}.")
    found = [least_squares(staleness, f"fit{staleness}.") for staleness in (None, 0, 4)]
    shares = fastps.allreduce(np.array([int(_current.current().can_share)]), op=fastps.Max)
    if not shares[0]:  # those who share memory push together
        compensates(0.04, "constant.")
        compensates("adaptive", "adaptive.")
    array = {"w": np.zeros(3)}
    assert "must be a number" in refused(array, delay_compensation="yes", prefix="x.")
    assert "needs a finite strength" in refused(array, delay_compensation=-0.1, prefix="x.")
    whole = {"w": np.zeros(3, np.int64)}
    assert "supports float32 and float64 only" in refused(whole, delay_compensation=1, prefix="x.")
    assert "staleness must be >= 0" in refused(array, staleness=-1, prefix="x.")
    assert "TypeError" in refused(array, staleness=1.5, prefix="x.")
    said = refused(array, staleness=fastps.rank(), prefix="differ.")
    assert "MismatchError" in said, said
    assert "ACCUMULATE (staleness 1)" in said or "ACCUMULATE (staleness 2)" in said, said
    fastps.shutdown()
    return found


def late() -> str:
    """Let worker 2 stop while others go on; they say who is late."""
    fastps.init(op_timeout_s=8.0)
    held = fastps.ServerParameters({"w": np.zeros(100)}, staleness=2)
    text = ""
    try:
        for _ in range(4 if fastps.rank() < 2 else 1):
            held.push([np.ones(100)])
    except StallError as error:
        text = str(error)
    fastps.barrier(timeout_s=60.0)
    return text


def without_servers() -> str:
    """Say what is missing; a worker without others needs nobody."""
    fastps.init()
    if fastps.size() > 1:
        return refused({"w": np.zeros(3)})
    held = fastps.ServerParameters({"w": np.ones(3)})
    assert (held.push({"w": np.ones(3)})[0] == 2).all()
    kept = held.kept()
    fastps.shutdown()
    for use in (lambda: held.push({"w": np.ones(3)}), lambda: held.restore(kept)):
        try:
            use()
        except ShutdownError:
            continue
        return "used after shutdown()"
    return ""
