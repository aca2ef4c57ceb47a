# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_byzantine.py do.

Worker 0 compares what costs much with the formulas in NumPy; the others return checksums of their
results, which have to be those of worker 0.
"""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import fastps
from fastps import byzantine as bz
from fastps.byzantine import attacks
from fastps.contract.codec import Coding
from fastps.errors import ConfigError, MismatchError
from fastps.reduce._partition import Coder
from fastps.session.current import current
from fastps.types import DType

COUNT = 40_003  # three pieces of 64 KiB
RULES: dict[str, bz.Choice] = {
    "median": "median",
    "average": "average",
    "trimmed": bz.TrimmedMean(1),
    "phocas": bz.Phocas(1),
    "around median": bz.MeanAroundMedian(1),
    "signs": bz.SignMajority(),
    "clip": bz.NormClipping(50.0),
    "centered": bz.CenteredClipping(50.0),
    "geometric": bz.GeometricMedian(),
    "krum": bz.Krum(1),
    "multi-krum": bz.MultiKrum(1),
    "caf": bz.CAF(1),
    "nnm smea": bz.NNM(bz.SMEA(1)),
    "buckets": bz.Bucketing(bz.TrimmedMean(1), size=2, seed=3),
    "nnm trimmed": bz.NNM(bz.TrimmedMean(1)),
    "arc nnm multi-krum": bz.ARC(bz.NNM(bz.MultiKrum(1))),
    "own": "programs_byzantine:largest",
}


def largest(rows: np.ndarray) -> np.ndarray:
    """Give a rule of the user's own."""
    found: np.ndarray = rows.max(axis=0)
    return found


def update(rank: int, step: int, count: int = COUNT) -> np.ndarray:
    """Make what a worker pushes; every process can make that of all."""
    return 3 * np.random.default_rng([rank, step, count]).random(count, np.float32) - 0.5


def same(found: np.ndarray, wanted: np.ndarray, what: object) -> None:
    """Compare with what is computed in float64."""
    np.testing.assert_allclose(found, wanted, atol=3e-6, rtol=3e-6, err_msg=str(what))


def rules() -> dict[str, int]:
    """Push by every rule for three rounds; in one a whole update is NaN."""
    fastps.init()
    rank, size = fastps.rank(), fastps.size()
    sums = {}
    for name, rule in RULES.items():
        last = None
        for step in range(1, 4):
            given = [update(worker, step) for worker in (range(size) if rank == 0 else [rank])]
            if step == 2 and rank < 2:
                given[1 - rank][...] = np.nan  # of worker 1
            own = given[0]
            found = fastps.push_pull(own, name, rule=rule if step < 3 else None)
            sums[f"{name} {step}"] = zlib.crc32(found)
            if rank == 0:
                last = bz.combine(rule, given, version=step, last=last)
                same(found, last, (name, step))
    halves(rank, size)
    attacked(rank, size)
    sums["large"] = at_once(rank, size)
    fastps.shutdown()
    return sums


def halves(rank: int, size: int) -> None:
    """Push several tensors at once, of half the width, and none at all."""
    for count in (0, 1, 300):
        given = [update(worker, 9, count).astype(np.float16) for worker in range(size)]
        names = [f"half {count} a", f"half {count} b"]
        found = fastps.push_pull([given[rank], -given[rank]], names, rule="median")
        np.testing.assert_allclose(found[0], bz.combine("median", given), atol=3e-3, rtol=3e-3)
        np.testing.assert_array_equal(found[1], -found[0])


def attacked(rank: int, size: int) -> None:
    """Let a worker lie: the average follows it, a rule does not."""
    truth = np.mean([update(worker, 5) for worker in range(1, size)], axis=0)
    lie = attacks.negative(update(0, 5), scale=200)
    pushed = lie if rank == 0 else update(rank, 5)
    plain = fastps.push_pull(pushed, "believed")
    found = fastps.push_pull(pushed, "doubted", rule=bz.TrimmedMean(1))
    scale = np.linalg.norm(truth)
    assert np.linalg.norm(plain - truth) > 10 * scale
    assert np.linalg.norm(found - truth) < scale


def at_once(rank: int, size: int) -> int:
    """Push more than a link's credit by a rule that answers nothing before all is there."""
    before = fastps.statistics().get("loans", 0)
    found = fastps.push_pull(update(rank, 7, 1 << 18), "large", rule=bz.Bulyan(0))
    if rank == 0:
        given = [update(worker, 7, 1 << 18) for worker in range(size)]
        same(found, bz.combine(bz.Bulyan(0), given), "large")
    assert fastps.statistics().get("loans", 0) == before  # it would wait for each of them
    return zlib.crc32(found)


def refusals() -> tuple[list[str], dict[str, float]]:
    """Ask for what cannot be; then one worker sends infinity, and is counted."""
    fastps.init()
    rank = fastps.rank()
    said = []
    one = np.ones(10, np.float32)
    wrong = [
        (one, {"rule": bz.Krum(2)}, ConfigError),
        (one, {"rule": bz.TrimmedMean(2)}, ConfigError),
        (one, {"rule": "krum"}, ConfigError),
        (one, {"rule": "os:getcwd"}, Exception),
        (one, {"rule": "median", "average": False}, ValueError),
        (one.astype(np.int32), {"rule": "median"}, TypeError),
        (one, {"rule": bz.TrimmedMean(1) if rank else "median"}, MismatchError),
    ]
    for number, (array, options, kind) in enumerate(wrong):
        with pytest.raises(kind) as caught:
            fastps.push_pull(array, f"wrong {number}", **options)
        said.append(str(caught.value))
    fastps.push_pull(one, "ruled", rule="median")
    with pytest.raises(ValueError, match="under a rule"):
        fastps.broadcast(one, 0, name="ruled")
    for _ in range(3):
        mine = one * np.inf if rank == 1 else one
        np.testing.assert_array_equal(fastps.push_pull(mine, "ruled"), one)
    fastps.barrier()
    counts = {name: n for name, n in fastps.statistics().items() if "refused" in name}
    fastps.shutdown()
    return said, counts


def alone() -> str:
    """Be the only worker, of a job without servers."""
    fastps.init()
    one = np.full(4, 3.0, np.float32)
    np.testing.assert_array_equal(fastps.push_pull(one, "a", rule="median"), one)
    np.testing.assert_allclose(fastps.push_pull(one, "b", rule=bz.NormClipping(1.0)), one / 6)
    np.testing.assert_allclose(fastps.push_pull(one, "b"), one / 6)
    with pytest.raises(ConfigError, match="needs 3 updates or more; there are 1 workers"):
        fastps.push_pull(one, "c", rule=bz.Krum(0))
    with pytest.raises(ValueError, match="no sum of it"):
        fastps.push_pull(one, "a", average=False)
    fastps.shutdown()
    return "done"


def without_servers() -> str:
    """Ask for a rule where workers reduce among themselves."""
    fastps.init()
    with pytest.raises(ConfigError) as caught:
        fastps.push_pull(np.ones(3, np.float32), "a", rule="median")
    fastps.shutdown()
    return str(caught.value)


CODECS = {
    "int8": fastps.Compression.int8(),
    "onebit": fastps.Compression.onebit(),
    "topk": fastps.Compression.topk(0.1),
    "fp16": fastps.Compression.fp16(),
}


def decoded(array: np.ndarray, coding: Coding) -> np.ndarray:
    """Give what a codec makes of an array, in one piece as this file's tensors travel."""
    coder = Coder(coding, DType.FLOAT32, nbytes=array.nbytes, chunk_bytes=1 << 16, pushes=True)
    found = np.empty_like(array)
    coder.decode(coder.encode(array.view(np.uint8)), found.view(np.uint8))
    return found


def coded() -> dict[str, int]:
    """Push through codecs under rules, which see what was decoded; one worker gives NaN."""
    fastps.init(min_compress_bytes=0)
    rank, size = fastps.rank(), fastps.size()
    given = [update(worker, 1, 5000) for worker in range(size)]
    given[3][:] = np.nan
    sums = {}
    for name, coding in CODECS.items():
        seen = [decoded(one, coding) for one in given] if rank == 0 else []
        for rule in ("median", bz.Krum(1), bz.NNM(bz.TrimmedMean(1)), "average"):
            label = f"{name} {rule}"
            found = fastps.push_pull(given[rank], label, rule=rule, compression=coding)
            sums[label] = zlib.crc32(found)
            if rank > 0:
                continue
            wanted = decoded(bz.combine(rule, seen).astype(np.float32), coding)
            near = 0.02 if name in ("int8", "fp16") else 1e-5  # of a step, where sums are rounded
            np.testing.assert_allclose(found, wanted, atol=near, rtol=1e-5, err_msg=label)
    feedback(rank, size)
    skips(rank, size)
    counts = fastps.statistics()
    assert counts["bytes_after_compression"] < 0.5 * counts["bytes_before_compression"]
    fastps.shutdown()
    return sums


def feedback(rank: int, size: int) -> None:
    """Push the same through one bit: over rounds, with error feedback, nothing is lost."""
    given = [update(worker, 2, 2000) for worker in range(size)]
    total = np.zeros(2000)
    for _ in range(200):
        total += fastps.push_pull(
            given[rank], "fed", rule="average", compression=fastps.Compression.int4(ef="vanilla")
        )
    np.testing.assert_allclose(total / 200, np.mean(given, axis=0), atol=0.01)


def skips(rank: int, size: int) -> None:
    """Leave workers out of rounds: the rule sees what the others give, of none it gives zeros."""
    session = current()
    session.declare([("skipped", (3000,), DType.FLOAT32)], rule="average")
    session.declare(
        [("skipped too", (3000,), DType.FLOAT32)],
        rule="median",
        compression=fastps.Compression.int8(),
    )
    for step, away in enumerate([{0}, set(range(size)), {1, 2}, set(), {size - 1}]):
        given = [update(worker, step, 3000) for worker in range(size)]
        some = [one for worker, one in enumerate(given) if worker not in away]
        out = [np.full(3000, 7, np.float32) for _ in range(2)]
        session.push_pull_async(
            [given[rank]] * 2, ["skipped", "skipped too"], out=out, contributes=rank not in away
        ).wait()
        for found, rule, near in zip(out, ("average", "median"), (1e-6, 0.05), strict=True):
            wanted = bz.combine(rule, some) if some else np.zeros(3000)
            np.testing.assert_allclose(found, wanted, atol=near, err_msg=f"{rule} {away}")
    with pytest.raises(ValueError, match="is a sum, to which"):
        session.push_pull_async(out[0], "plain", contributes=False)
