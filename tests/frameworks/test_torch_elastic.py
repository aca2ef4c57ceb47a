# SPDX-License-Identifier: Apache-2.0
"""What elastic training commits is what the next life goes on from; indices are used once."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_session import FakeCluster, FakeSession
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from test_torch_broadcast import OPTIMIZERS, same, small_model, train  # noqa: E402

from fastps import session  # noqa: E402
from fastps.errors import ConfigError, FastPSError  # noqa: E402
from fastps.frameworks.torch import elastic  # noqa: E402
from fastps.frameworks.torch.elastic import ElasticSampler, TorchState  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the directory where commits lie; each run() is the first of its program."""
    place = tmp_path / "made" / "by us"
    known = SimpleNamespace(**vars(FakeSession.config) | {"commit_dir": str(place)})
    monkeypatch.setattr(FakeSession, "config", known)
    monkeypatch.setattr(elastic, "_runs", itertools.repeat(1))
    return place


def a_state(seed: int, **values: Any) -> TorchState:
    kind, options = OPTIMIZERS[seed % len(OPTIMIZERS)]
    model = small_model(seed)
    return TorchState(model, kind(model.parameters(), **options), **values)


def steps_of(state: TorchState, number: int) -> None:
    train(state.model, state.optimizer, number)


def held_of(state: TorchState) -> dict[str, Any]:
    return state._look()


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
    assert [path.name for path in folder.iterdir()] == ["commit-1.fastps"]


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
    with pytest.raises(TypeError, match="a TorchState first, not int"):
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
    (folder / "commit-1.fastps").unlink()
    commit(TorchState(epoch=1, weights=torch.ones(99)))
    whole = (folder / "commit-1.fastps").read_bytes()
    for length in range(len(whole)):
        (folder / "commit-1.fastps").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"spoiled.*begin anew"):
            commit(TorchState(epoch=1, weights=torch.ones(99)))
    for place in range(len(whole) - 99 * 4):  # of what says what there is
        for byte in (0, 127, 255):
            wrong = bytearray(whole)
            wrong[place] = byte
            (folder / "commit-1.fastps").write_bytes(wrong)
            with contextlib.suppress(ConfigError):  # else another value, which nobody can tell
                elastic._read(folder / "commit-1.fastps")
    (folder / "commit-1.fastps").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"spoiled.*begin anew"):
        commit(TorchState(epoch=1))
    alone.current().config.commit_dir = "/dev/null/x"
    with pytest.raises(ConfigError, match="cannot be made"):
        commit(TorchState(epoch=1))
    alone.current().config.commit_dir = ""
    state = TorchState(epoch=1)
    with caplog.at_level(logging.WARNING):
        commit(state)
        commit(state)
    assert caplog.text.count("--restarts N") == 1


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
            monkeypatch.setattr(session, "current", lambda me=me: me)
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
        monkeypatch.setattr(session, "current", lambda me=me: me)
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
