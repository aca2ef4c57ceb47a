# SPDX-License-Identifier: Apache-2.0
"""What the workers of test_local_steps.py do: NumPy's LocalSGD beside the algorithm in a loop."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from codec_oracle import Reference

import fastps
from fastps.algorithms import outer
from fastps.algorithms.async_local_sgd import Polynomial
from fastps.algorithms.local_blocks import ParticipationSchedule
from fastps.algorithms.local_sgd_base import Terms
from fastps.contract.codec import Option
from fastps.contract.contract import Policy
from fastps.session.current import current
from fastps.types import DType

STEPS, EVERY = 13, 3
SHAPES = {"a": (5, 4), "b": (7,), "c": (2, 3), "d": ()}


def start() -> tuple[int, int]:
    fastps.init(min_compress_bytes=0)
    return fastps.rank(), fastps.size()


def end() -> str:
    fastps.barrier()
    fastps.shutdown()
    return "done"


def model(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Make parameters, the same on all workers."""
    random = np.random.default_rng(5)
    return {name: np.asarray(random.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def do_step(arrays: list[np.ndarray], rank: int, step: int) -> None:
    """Do a step of a worker's own: towards values that are each worker's own, with noise."""
    random = np.random.default_rng([rank, step])
    for place, one in enumerate(arrays):
        goal = 1.0 + rank + place
        one -= np.asarray(0.1 * (one - goal + random.normal(size=one.shape)), one.dtype)


# ---- against the algorithm, all workers of it in one process ----


def simulate(size: int, terms: Terms, optimizer: outer.Outer) -> list[list[np.ndarray]]:
    """Give the workers' parameters in the end, of one fragment without delay."""
    own = [list(model().values()) for _ in range(size)]
    base, agreed = copy.deepcopy(own), list(model().values())
    for step in range(1, STEPS + 1):
        for rank in range(size):
            do_step(own[rank], rank, step)
        if step % terms.sync_every:
            continue
        lots = terms.draw(size, 0, step // terms.sync_every - 1, len(agreed))
        if not terms.sparsity:
            lots = np.repeat(terms.draw(size, 0, step // terms.sync_every - 1, 1), 4, axis=1)
        for place, one in enumerate(agreed):
            givers = [rank for rank in range(size) if lots[rank, place]]
            if not givers:
                continue
            last = one.copy()
            optimizer.step(place, one, np.mean([base[r][place] - own[r][place] for r in givers],
                                               axis=0))  # fmt: skip
            for rank in range(size):
                own[rank][place][...] += one - last if rank not in givers else 0
                if rank in givers:
                    own[rank][place][...] = one
                    base[rank][place][...] = one
                elif terms.error_reset == "literal":
                    base[rank][place][...] = own[rank][place]
                else:
                    base[rank][place][...] = one
    return own


def recursions(outer_on: str = "workers") -> str:
    """Follow the algorithm, with whoever takes part and whatever is left out."""
    rank, size = start()
    cases = [
        ({}, outer.Outer),
        ({}, outer.Nesterov),
        ({"participation": 0.5}, outer.Nesterov),
        ({"sparsity": 0.4}, outer.Adam),
        ({"participation": 0.6, "sparsity": 0.3, "seed": 3}, outer.Nesterov),
        ({"participation": 0.6, "sparsity": 0.3, "error_reset": "literal"}, outer.Nesterov),
    ]
    for number, (words, make) in enumerate(cases):
        expected = simulate(size, Terms(sync_every=EVERY, **words), make())
        parameters = model()
        if rank:
            for one in parameters.values():
                one.fill(0)  # what rank 0 has is what counts
        local = fastps.LocalSGD(
            parameters, make(), sync_every=EVERY, prefix=f"{number}.", outer_on=outer_on, **words
        )
        for step in range(1, STEPS + 1):
            do_step(list(parameters.values()), rank, step)
            local.step()
        for found, one in zip(parameters.values(), expected[rank], strict=True):
            np.testing.assert_allclose(found, one, atol=1e-12, err_msg=str(words))
        local.synchronize()
        flat = np.concatenate([one.ravel() for one in parameters.values()])
        everybody = fastps.allgather(flat[None])
        assert (everybody == everybody[:1]).all(), words
    return end()


# ---- what is lost, and what travels ----


def conserved() -> str:
    """Change each tensor by known steps: what is left out comes later, unless that is literal."""
    rank, size = start()
    for reset in ("kept", "literal"):
        parameters = {"w": np.zeros(1000), "v": np.zeros(10)}
        local = fastps.LocalSGD(
            parameters, sync_every=1, participation=0.5, sparsity=0.3, error_reset=reset,
            prefix=f"{reset}.",
        )  # fmt: skip
        blocks = local._fragments[0].blocks
        sent = np.zeros(2)
        for exchange in range(40):
            for one in parameters.values():
                one += 1.0 + rank
            pending = [float((block.own - block.base)[0]) for block in blocks]
            local.step()
            sent += local._terms.draw(size, 0, exchange, 2)[rank] * pending
        found = sent + [float((block.own - block.base)[0]) for block in blocks]
        made = 40 * (1.0 + rank)
        if reset == "kept":
            np.testing.assert_allclose(found, made)
        else:
            assert (found < 0.7 * made).all(), found  # 0.35 of 40 exchanges are sent: 3 sigma
        local.synchronize()
        assert np.ptp(parameters["w"]) == 0
    return end()


def uploads() -> dict[str, float]:
    """Count what leaves on the links: p (1 - s) of the model, and indicators."""
    rank, size = start()
    shapes = {f"p{i}": (20_000 + 1000 * i,) for i in range(8)}
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    terms = Terms(sync_every=1, participation=0.5, sparsity=0.25, seed=11)
    local = fastps.LocalSGD(parameters, sync_every=1, participation=0.5, sparsity=0.25, seed=11)
    local.step()  # what is made at the first use
    fastps.barrier()
    before, expected, frames = fastps.statistics(), 0.0, 0
    for exchange in range(1, 41):
        lots = terms.draw(size, 0, exchange, 8)[rank]
        sizes = [one.nbytes for one in parameters.values()]
        expected += sum(nbytes for nbytes, gives in zip(sizes, lots, strict=True) if gives)
        local.step()
    after = fastps.statistics()
    frames = after["frames_sent"] - before["frames_sent"]
    found = {
        "sent": after["bytes_sent"] - before["bytes_sent"], "expected": expected,
        "frames": frames, "whole": 40.0 * sum(one.nbytes for one in parameters.values()),
    }  # fmt: skip
    end()
    return found


# ---- halves ----


def halves() -> str:
    """Step by what halves hold, agree on what they round: as with float32, it adds up."""
    start()
    for number, words in enumerate([
        {}, {"outer_on": "servers"}, {"participation": 0.5}, {"fragments": 1, "delay": 1},
        {"participation": 0.5, "error_reset": "literal"},
    ]):  # fmt: skip
        ends = []
        for dtype in (np.float16, np.float32):
            own = np.full(8, 1000, dtype)  # the next smaller half is 999.5
            local = fastps.LocalSGD(
                {"own": own}, outer.Outer(lr=1 / 8), sync_every=2,
                prefix=f"halves {number} {own.dtype}.", **words,
            )  # fmt: skip
            for _ in range(16):
                own -= dtype(0.5)
                local.step()
            agreed = local._fragments[0].blocks[0].agreed
            ends.append(float(agreed[0]))
            local.synchronize()
            ends.append(float(agreed[0]))
        assert np.allclose(ends[:2], ends[2:], rtol=0, atol=2e-3), (words, ends)
        assert words or ends[0] == 999, ends
    return end()


# ---- codecs, rules, checkpoints ----


def coded() -> str:
    """Leave out and compress at once, under a rule too; end near what all agree is best."""
    rank, _ = start()
    for number, (compression, rule, words) in enumerate([
        (fastps.Compression.int4(ef="vanilla"), None, {"participation": 0.7, "sparsity": 0.2}),
        (fastps.Compression.int8(), "median", {"fragments": 2, "delay": 1}),
        (fastps.Compression.onebit(ef="vanilla"), None, {"sparsity": 0.5}),
        (fastps.Compression.topk(0.5, ef="vanilla"), "average", {}),
        (fastps.Compression.fp16(), None, {"participation": 0.5}),
    ]):  # fmt: skip
        parameters = {"w": np.zeros(512, np.float32), "h": np.zeros((16, 16), np.float16)}
        local = fastps.LocalSGD(
            parameters, sync_every=4, compression=compression, rule=rule, prefix=f"{number}.",
            **words,
        )  # fmt: skip
        for _ in range(160):
            for one in parameters.values():
                one -= np.asarray(0.05 * (one - 2.0), one.dtype)
            local.step()
        local.synchronize()
        for one in parameters.values():
            assert abs(float(one.mean()) - 2.0) < 0.1, (compression, rule, one.mean())
    resumed(rank)
    return end()


def resumed(rank: int) -> None:
    """Go on from a state as if nothing had happened, with what was left out and codecs keep."""
    saved = go_on(
        rank, lambda: outer.Nesterov(), participation=0.6, sparsity=0.3,
        compression=fastps.Compression.fp16(),
    )  # fmt: skip
    for label, words in {
        "averaged.": {"compression": fastps.Compression.int4(ef="vanilla")},
        "left out.": {
            "compression": fastps.Compression.int4(11, ef="vanilla"),
            "participation": 0.6,
            "sparsity": 0.3,
        },
    }.items():
        state = go_on(rank, lambda: outer.Nesterov(), label, **words)
        kept = [one["residuals"] for one in state["fragments"]]
        assert all((one is None) == (rank > 0) for one in kept)
        assert rank or max(np.abs(one).max() for rows in kept for one in rows) > 0
    keeps = fastps.LocalSGD(
        {"w": np.zeros(512, np.float32)}, sync_every=1, prefix="keeps.",
        compression=fastps.Compression.onebit(ef="vanilla"),
    )  # fmt: skip
    keeps._fragments[0].blocks[0].own += np.arange(512) * 0.01
    keeps.step()
    state = keeps.state_dict()
    (((residual, _),),) = (one["kept"][0] for one in state["fragments"])
    assert np.abs(np.frombuffer(residual, np.float32)).sum() > 0
    keeps._fragments[0].blocks[0].own += 1.0
    keeps.step()
    keeps.load_state_dict(state)
    assert keeps.state_dict()["fragments"][0]["kept"][0][0][0] == residual
    with pytest.raises(ValueError, match="the same fragments"):
        keeps.load_state_dict(saved)
    own = keeps._fragments[0].names[0]
    for beside, message in (("nobody", "no tensor 'nobody'"), (own, "have no state")):
        with pytest.raises(fastps.ConfigError, match=message):
            current().declare(
                [("lacks", (3,), DType.FLOAT32)], policy=Policy.CODEC_STATE, beside=beside
            )


def go_on(rank: int, optimizer: Any, label: str = "", **words: Any) -> dict[str, Any]:
    """Train on from a state, beside one who was not interrupted; give the state."""

    def make(prefix: str) -> tuple[dict[str, np.ndarray], fastps.LocalSGD]:
        parameters = model(np.float32)
        return parameters, fastps.LocalSGD(
            parameters, optimizer(), sync_every=4, fragments=2, delay=2,
            prefix=f"{optimizer().__class__.__name__}.{label}{prefix}", **words,
        )  # fmt: skip

    def train(parameters: dict[str, np.ndarray], local: fastps.LocalSGD, steps: range) -> None:
        for step in steps:
            do_step(list(parameters.values()), rank, step)
            local.step()

    parameters, local = make("first.")
    train(parameters, local, range(9))
    saved = copy.deepcopy((parameters, local.state_dict()))
    train(parameters, local, range(9, 25))
    again, second = make("second.")
    for name, one in saved[0].items():
        again[name][...] = one
    second.load_state_dict(saved[1])
    train(again, second, range(9, 25))
    for name, one in parameters.items():
        np.testing.assert_array_equal(one, again[name])
    return dict(saved[1])


# ---- without rounds ----


def asynchronous() -> tuple[list[float], float, list[float]]:
    """Train at one's own pace: what servers hold in the end is the sum of what was added."""
    rank, _ = start()
    parameters = {"w": np.full(50, 0.5 if rank == 0 else 9.0), "v": np.zeros((2, 2))}
    local = fastps.AsyncLocalSGD(
        parameters, sync_every=2, alpha=Polynomial(0.5), proximal=0.1, prefix="paced"
    )
    # rank 0's, with what others may have added by now
    assert 0.5 <= parameters["w"].min() == parameters["w"].max() < 9.0
    added, seen = 0.0, []
    for _ in range(20 * (1 + rank)):
        base = float(local._blocks[0].agreed[0])
        parameters["w"] += 0.01 * (rank + 1)
        local.step()
        if local.steps % 2 == 0:
            moved = (0.01 * (rank + 1)) * (1 - 0.1) * (1 + (1 - 0.1))
            assert 0 < local.share <= 0.5
            added += local.share * moved
            seen.append(local.staleness)
        else:
            moved = 0.01 * (rank + 1) * 0.9
            np.testing.assert_allclose(parameters["w"][0], base + moved)
    fastps.barrier()
    state = local.state_dict()
    local.exchange()  # nothing has changed since: gives what is there
    held = float(parameters["w"][0])
    local.load_state_dict(state)
    with pytest.raises(ValueError, match="not of an AsyncLocalSGD"):
        local.load_state_dict({"changes": []})
    for words in ({"sync_every": 0}, {"sync_every": 1, "proximal": 1.0}):
        with pytest.raises(ValueError, match="sync_every="):
            fastps.AsyncLocalSGD(parameters, prefix="wrong", **words)
    with pytest.raises(ValueError, match="alpha must be"):
        fastps.AsyncLocalSGD(parameters, sync_every=1, alpha=lambda _: -1.0, prefix="wrong")
    end()
    return [held], added, seen


class Server:
    """The algorithm without rounds, in one process: what servers hold, and what each has of it."""

    def __init__(self, size: int, server: int, coding: Any, words: dict[str, Any]) -> None:
        self.lots, self.coding = ParticipationSchedule(**words), coding
        self.value = model(np.float32)
        self.own = [copy.deepcopy(self.value) for _ in range(size)]
        self.agreed = copy.deepcopy(self.own)
        self.base = copy.deepcopy(self.own)
        self.alpha, self.updates, self.stamps = Polynomial(0.5), 0, [0] * size
        self.changes = dict.fromkeys(self.value, 0)  # that each tensor has seen
        self.up = [
            {name: self.coder(coding, name, one.size, rank, pushes=True)
             for name, one in self.value.items()}
            for rank in range(size)
        ]  # fmt: skip
        coding = coding.without_memory()
        self.down = {
            name: self.coder(coding, name, one.size, server) for name, one in self.value.items()
        }

    @staticmethod
    def coder(coding: Any, name: str, count: int, rank: int, **words: Any) -> Reference:
        return Reference(coding, count, name=f"turns.{name}", rank=rank, **words)

    def exchange(self, rank: int, exchange: int) -> None:
        """Let a worker add what it sends, and have what is there then."""
        share = self.alpha(float(self.updates - self.stamps[rank]))
        gives = self.lots.draw(len(self.own), 0, exchange, len(self.value))[rank]
        for place, name in enumerate(self.value):
            self.move(rank, name, share, gives=bool(gives[place]))
        self.updates += bool(gives.any())
        self.stamps[rank] = self.updates

    def move(self, rank: int, name: str, share: float, *, gives: bool) -> None:
        """Do one tensor's part: both ways encoded."""
        own, base, agreed = self.own[rank], self.base[rank], self.agreed[rank]
        last, value = agreed[name].copy(), self.value[name]
        if gives:
            change = np.asarray(share * (own[name] - base[name]))
            value += self.up[rank][name].encode(change.reshape(-1)).reshape(value.shape)
            self.changes[name] += 1
        behind = np.asarray(value - agreed[name]).reshape(-1)
        agreed[name] += self.down[name].encode(behind).reshape(value.shape)
        if gives:
            own[name][...] = base[name][...] = agreed[name]
            return
        own[name] -= last - agreed[name]
        base[name][...] = own[name] if self.lots.error_reset == "literal" else agreed[name]


def in_turns() -> str:
    """Exchange one after the other, with codecs and what is left out: as the algorithm, by bit."""
    rank, size = start()
    for number, (coding, words) in enumerate([
        (fastps.Compression.int4(11, ef="vanilla"), {}),
        (fastps.Compression.topk(0.3, ef="vanilla"), {"participation": 0.6}),
        (fastps.Compression.int8(), {"sparsity": 0.5, "error_reset": "literal", "seed": 4}),
        (fastps.Compression.fp16(ef="vanilla"), {"participation": 0.7, "sparsity": 0.3}),
    ]):  # fmt: skip
        expected = Server(size, size, coding, words)
        parameters = model(np.float32)
        if rank:
            for one in parameters.values():
                one.fill(0)
        local = fastps.AsyncLocalSGD(
            parameters, sync_every=1, alpha=Polynomial(0.5), compression=coding,
            prefix=f"turns{number}", **words,
        )  # fmt: skip
        fastps.barrier()  # all begin with rank 0's, and nothing that was added since
        for step in range(6):
            for turn in range(size):
                do_step(list(expected.own[turn].values()), turn, step)
                expected.exchange(turn, step)
                if turn == rank:
                    do_step(list(parameters.values()), rank, step)
                    local.step()
                fastps.barrier()
        for name, one in parameters.items():
            np.testing.assert_array_equal(one, expected.own[rank][name], err_msg=str(words))
        kept = [np.frombuffer(bytes(one[0][0] or b""), np.float32) for one in local._held.kept()]
        if ef := coding.has(Option.FEEDBACK):
            for found, coder in zip(kept, expected.up[rank].values(), strict=True):
                np.testing.assert_array_equal(found, coder.residual)
        assert ef or not any(one.size for one in kept)
    return end()


def on_without_rounds() -> str:
    """Go on from a state, between two exchanges and in turns, as one who was not interrupted."""
    rank, size = start()
    int4 = fastps.Compression.int4(11, ef="vanilla")
    for number, (dtype, words) in enumerate([
        (np.float64, {"proximal": 0.1}),
        (np.float16, {"proximal": 0.2, "participation": 0.6}),
        (np.float32, {"compression": int4, "participation": 0.7, "sparsity": 0.3}),
        (np.float16, {"compression": int4, "sparsity": 0.5, "error_reset": "literal"}),
    ]):  # fmt: skip

        def make(
            label: str, number: int = number, dtype: Any = dtype, words: Any = words
        ) -> tuple[dict[str, np.ndarray], fastps.AsyncLocalSGD]:
            parameters = model(dtype)
            local = fastps.AsyncLocalSGD(
                parameters, sync_every=3, alpha=Polynomial(0.5), prefix=f"{label}{number}", **words
            )
            fastps.barrier()  # all begin with rank 0's, and nothing that was added since
            return parameters, local

        def train(
            parameters: dict[str, np.ndarray], local: fastps.AsyncLocalSGD, steps: range
        ) -> list[float]:
            seen = []
            for step in steps:
                for turn in range(size):
                    if turn == rank:
                        do_step(list(parameters.values()), rank, step)
                        local.step()
                        seen.append(local.share)
                    fastps.barrier()
            return seen

        parameters, local = make("first")
        train(parameters, local, range(11))  # two more than are exchanged
        saved = copy.deepcopy(local.state_dict())
        fastps.barrier()
        shares = train(parameters, local, range(11, 30))
        again, second = make("second")
        for one in again.values():
            one.fill(7)
        second.load_state_dict(saved)
        assert train(again, second, range(11, 30))[1:] == shares[1:]
        for name, one in parameters.items():
            np.testing.assert_array_equal(one, again[name], err_msg=str(words))
        for mine, its in zip(local._held.arrays, second._held.arrays, strict=True):
            np.testing.assert_array_equal(mine, its)
        if rank == 0:
            with pytest.raises(ValueError, match="needs its own state"):
                second.load_state_dict(saved | {"held": None})
    return end()


def halves_without_rounds() -> str:
    """Pull halves back to what they cannot hold, and go on from states: as with float32."""
    start()
    ends = []
    for dtype in (np.float16, np.float32):
        own = np.full(8, 1000, dtype)  # the next smaller half is 999.5
        local = fastps.AsyncLocalSGD(
            {"own": own}, sync_every=2, alpha=1 / 8, proximal=0.3, prefix=own.dtype.name
        )
        for _ in range(16):
            own -= dtype(0.5)
            local.step()
            local.load_state_dict(copy.deepcopy(local.state_dict()))
        ends.append(float(local._blocks[0].agreed[0]))
    assert abs(ends[0] - ends[1]) < 2e-3, ends
    return end()


def stopped() -> dict[str, list[float]]:
    """Exchange while another worker's process is stopped for three seconds."""
    rank, _ = start()
    parameters = {"w": np.zeros(20_000)}
    local = fastps.AsyncLocalSGD(parameters, sync_every=1, alpha=0.5, prefix="stopped")
    took: dict[str, list[float]] = {"before": [], "during": []}
    their = Path(f"/proc/{fastps.broadcast_object(os.getpid(), 2)}/stat")
    for phase in took:
        fastps.barrier()
        if phase == "during" and rank == 2:
            me = os.getpid()
            subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 3; kill -CONT {me}"]).wait()
            continue
        while phase == "during" and their.read_text().rpartition(") ")[2][0] != "T":
            os.sched_yield()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            parameters["w"] += 0.001
            began = time.monotonic()
            local.step()
            took[phase].append(time.monotonic() - began)
    end()
    return took
