# SPDX-License-Identifier: Apache-2.0
"""What elastic training commits is what the next life goes on from; indices are used once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_session import FakeCluster, FakeSession
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from test_torch_broadcast import OPTIMIZERS, same, small_model, train  # noqa: E402

from fastps.errors import ConfigError, FastPSError  # noqa: E402
from fastps.frameworks import elastic as lives  # noqa: E402
from fastps.frameworks import saved_states as files  # noqa: E402
from fastps.frameworks.torch import elastic, saved_states  # noqa: E402
from fastps.frameworks.torch.elastic import ElasticSampler, TorchState  # noqa: E402
from fastps.session import current  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the directory where commits lie; each run() is the first of its program."""
    place = tmp_path / "made" / "by us"
    known = SimpleNamespace(**vars(FakeSession.config) | {"commit_dir": str(place)})
    monkeypatch.setattr(FakeSession, "config", known)
    monkeypatch.setattr(lives, "_runs", itertools.repeat(1))
    return place


def a_state(seed: int, **values: Any) -> TorchState:
    kind, options = OPTIMIZERS[seed % len(OPTIMIZERS)]
    model = small_model(seed)
    return TorchState(model, kind(model.parameters(), **options), **values)


def steps_of(state: TorchState, number: int) -> None:
    train(state.model, state.optimizer, number)


def held_of(state: TorchState) -> dict[str, Any]:
    return state._copies()


@pytest.mark.parametrize("kind", range(len(OPTIMIZERS)))
def test_the_next_life_goes_on_from_the_last_commit(
    cluster: FakeCluster, folder: Path, kind: int
) -> None:
    tensors = [torch.ones(3).bfloat16(), torch.tensor(True), torch.empty(0, 2), torch.arange(3)]
    tensors += [torch.tensor([1 + 2j, 3j]).conj(), torch.tensor(1j), torch.arange(6.0)[::6]]
    plain = {"epoch": 1, "seen": {3, 0}, "losses": [0.5], "tensors": tensors}

    @elastic.run
    def first(state: TorchState) -> dict[str, Any]:
        for state.epoch in range(state.epoch, 4):  # noqa: B020  (as in scripts for Horovod)
            steps_of(state, 1)
            state.losses.append(float(state.epoch))
            state.commit()
        committed = held_of(state)
        steps_of(state, 1)  # and is lost
        state.losses.append(9.0)
        return committed

    @elastic.run
    def second(state: TorchState, word: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        found = held_of(state)
        steps_of(state, 1)
        state.seen.clear()
        state.epoch, state.model[0].bias.data[:] = 77, 7
        state.restore()
        return word, found, held_of(state)

    def life(run: Any, *words: Any) -> Any:
        states = [
            a_state(
                kind + rank * len(OPTIMIZERS),
                **plain | {"losses": [0.5 + rank], "seen": {3, rank}},
            )
            for rank in range(2)
        ]
        for rank, state in enumerate(states):
            state.register_reset_callbacks([lambda rank=rank: resets.append(rank)])
        return cluster.run(lambda rank: run(states[rank], *words))

    resets: list[int] = []
    committed = life(first)
    assert same(committed[0], committed[1])
    assert committed[0]["epoch"] == 3
    assert committed[0]["losses"] == [0.5, 1.0, 2.0, 3.0]
    assert not resets
    for word, found, restored in life(second, "again"):
        assert word == "again"
        assert same(found, committed[0])
        assert same(restored, committed[0])
    assert sorted(resets) == [0, 1]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["commit-1.before", "commit-1.fastps"]


@pytest.mark.parametrize("skip_sync", [False, True])
def test_a_program_may_ask_for_another_call(
    cluster: FakeCluster, folder: Path, skip_sync: bool
) -> None:
    resets: list[int] = []

    @elastic.run
    def train(state: TorchState, rank: int) -> tuple[int, int]:
        if state.calls == 0:
            state.calls, state.number = 1, 10 + rank
            raise elastic.HostsUpdatedInterrupt(skip_sync=skip_sync)
        return state.calls, state.number

    def body(rank: int) -> tuple[int, int]:
        state = TorchState(calls=0, number=0)
        state.register_reset_callbacks([lambda: resets.append(rank)])
        return train(state, rank)

    assert cluster.run(body) == [(1, 10), (1, 11 if skip_sync else 10)]
    assert sorted(resets) == [0, 1]


def test_attributes_are_what_is_held(alone: FakeCluster) -> None:
    state = a_state(0, epoch=1, sampler=ElasticSampler(range(10), shuffle=False))
    model = small_model(5)
    state.model, state.epoch = model, 2
    state.commit()
    model[0].bias.data[:] = 7
    state.epoch = 3
    state.sampler.record_batch(0, 4)
    state.restore()
    assert same(model.state_dict(), small_model(5).state_dict())
    assert (state.epoch, state.sampler.processed_num) == (2, 0)
    assert TorchState().model is None
    with pytest.raises(AttributeError, match="no 'batch'; it holds model, optimizer, epoch"):
        state.batch  # noqa: B018  (raises)
    with pytest.raises(ValueError, match="'commit' of its own"):
        TorchState(commit=1)
    with pytest.raises(TypeError, match=r"a state .*TorchState.* first, not int"):
        elastic.run(lambda state: None)(1)  # type: ignore[arg-type]


def test_what_cannot_go_on_says_why(
    alone: FakeCluster, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit = elastic.run(lambda state: state.commit())
    with pytest.raises(TypeError, match="object"):
        commit(TorchState(what=object()))
    assert not list(folder.iterdir())
    commit(TorchState(epoch=1))
    with pytest.raises(ConfigError, match=r"holds .*'epoch'.*'batch'.* empty directory"):
        commit(TorchState(batch=1))
    (folder / "commit-1.new").mkdir()  # nothing can be written there
    with pytest.raises(FastPSError, match="where the one before it still is"):
        commit(TorchState(epoch=2))
    (folder / "commit-1.new").rmdir()
    for path in folder.iterdir():
        path.unlink()
    alone.current().config.commit_dir = "/dev/null/x"
    with pytest.raises(ConfigError, match="cannot be made"):
        commit(TorchState(epoch=1))
    alone.current().config.commit_dir = ""
    state = TorchState(epoch=1)
    with caplog.at_level(logging.WARNING):
        commit(state)
        commit(state)
    assert caplog.text.count("--restarts N") == 1


def committed(epoch: int) -> dict[str, Any]:
    """What a state may hold."""
    return {"epoch": epoch, "weights": {"a": torch.full((40,), float(epoch)), "b": torch.ones(3)}}


def flipped(whole: bytes, place: int, bit: int) -> bytes:
    """Change one bit."""
    wrong = bytearray(whole)
    wrong[place] ^= 1 << bit
    return bytes(wrong)


def damages(whole: bytes) -> Iterator[bytes]:
    """Flip a bit of each byte, cut the end off, put something behind it, or take another file."""
    yield from (flipped(whole, place, place % 8) for place in range(len(whole)))
    yield from (whole[:length] for length in range(0, len(whole), 9))
    yield whole + b"\0"
    yield b"\xff" * 1000


def test_a_damaged_commit_is_never_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "commit-1.fastps"
    saved_states.write(path, committed(1))
    whole = path.read_bytes()
    assert same(saved_states.read(path), committed(1))
    for wrong in damages(whole):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"damaged.*begin anew"):
            saved_states.read(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "lost"])
def test_the_commit_before_takes_the_place_of_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    path, before = tmp_path / "commit-1.fastps", tmp_path / "commit-1.before"
    for epoch in (1, 2, 3):
        saved_states.write(path, committed(epoch))
    if is_lost:
        path.unlink()
    else:
        path.write_bytes(flipped(path.read_bytes(), 7, 3))
    assert files.exists(path)
    with caplog.at_level(logging.WARNING):
        assert same(saved_states.read(path), committed(2))
    assert f"{path} is damaged" in caplog.text
    assert str(before) in caplog.text
    assert same(saved_states.read(path), committed(2))  # by the next life
    saved_states.write(path, committed(4))
    assert same(saved_states.read(path), committed(4))
    path.unlink()
    assert same(saved_states.read(path), committed(2))  # which nothing damaged has replaced
    before.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"before.*begin anew"):
        saved_states.read(path)


def test_one_commit_is_whole_whenever_a_write_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that can fail does, once; what is read then is the last commit or the new one."""
    path, calls = tmp_path / "commit-1.fastps", 0

    def failing(real: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                raise OSError("no more")
            return real(*args, **words)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(os, "rename", failing(os.rename))
    for last in range(1, 6):
        calls, found = -1000, 2 * last
        saved_states.write(path, committed(found))
        calls = 0
        with contextlib.suppress(FastPSError):
            saved_states.write(path, committed(found + 1))
        assert calls >= min(last, 4)
        last = -1
        assert saved_states.read(path)["epoch"] in (found, found + 1)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    n=st.integers(0, 60),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_each_index_is_used_once_whatever_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    lives: list[tuple[int, int]],
    batch: int,
    shuffle: bool,
) -> None:
    used: Counter[int] = Counter()
    state = {"epoch": 3, "processed_num": 0}
    for number, (size, batches) in enumerate(lives):
        shares = []
        for rank in range(size):
            me = SimpleNamespace(rank=rank, size=size)
            monkeypatch.setattr(current, "current", lambda me=me: me)
            sampler = ElasticSampler(range(n), shuffle, seed=1)
            sampler.load_state_dict(state)
            share = list(sampler)
            assert len(share) == len(sampler)
            shares.append(share)
        assert len(set(map(len, shares))) == 1
        is_last = number == len(lives) - 1
        for place in range(len(shares[0]) if is_last else min(batches * batch, len(shares[0]))):
            used.update(share[place] for share in shares)
        for place in range(batches):
            before = len(sampler)
            sampler.record_batch(place, batch)
            assert len(sampler) == before  # of an epoch that goes on
        state = sampler.state_dict()
    assert set(used) == set(range(n))
    filled_up = sum(used.values()) - n
    assert filled_up < lives[-1][0] + sum(size for size, _ in lives)


@pytest.mark.parametrize(("n", "size", "used"), [(640, 3, 5), (10, 4, 1), (10, 4, 3), (1, 4, 0)])
def test_as_many_workers_get_what_they_would_have_got(
    monkeypatch: pytest.MonkeyPatch, n: int, size: int, used: int
) -> None:
    for rank in range(size):
        me = SimpleNamespace(rank=rank, size=size)
        monkeypatch.setattr(current, "current", lambda me=me: me)
        sampler = ElasticSampler(range(n))
        whole = list(sampler)
        sampler.record_batch(0, used)
        sampler.load_state_dict(sampler.state_dict())
        assert list(sampler) == whole[used:]


def test_each_epoch_has_an_order_of_its_own(alone: FakeCluster) -> None:
    sampler = ElasticSampler(range(50))
    first = list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)
    sampler.set_epoch(0)
    assert first == list(sampler)
