# SPDX-License-Identifier: Apache-2.0
"""Indices in an elastic job: whoever dies, whenever survivors commit, each is used once."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from fastps.frameworks.elastic_views import history_of  # noqa: E402
from fastps.frameworks.torch.elastic_sampler import (  # noqa: E402
    ElasticSampler,
    left_of,
    order_of,
    share_of,
    steps_of_batches,
)
from fastps.session import current  # noqa: E402


class FakeElasticSession:
    """What a sampler asks of a session: the members of a view, and its number."""

    is_elastic, expected = True, None

    def __init__(self, name: int, names: list[int]) -> None:
        self.name, self.view, self._calls = name, 0, []
        self.begin_view(names)

    def begin_view(self, names: list[int]) -> None:
        workers = [SimpleNamespace(hostname="host", pid=name) for name in names]
        self.rank, self.size = names.index(self.name), len(names)
        job = SimpleNamespace(workers=workers, n_workers=self.size, me=self.rank)
        self.connections = SimpleNamespace(job=job)
        for call in self._calls:
            call(SimpleNamespace(number=self.view + 1))
        self.view += 1

    def call_in_views(self, call: Any) -> None:
        self._calls.append(call)

    def push_pull(self, array: Any, name: str, *, average: bool) -> Any:
        return array  # of a job whose workers have all recorded the same, or nothing


class Death(NamedTuple):
    """A worker that dies: at a step, within it, after it, or so that others fail."""

    step: int
    victim: int
    kind: str


class Job:
    """Workers in lockstep, each with a sampler; counts the indices in steps, and the padding."""

    def __init__(
        self, patch: pytest.MonkeyPatch, count: int, size: int, batch: int, **options: Any
    ) -> None:
        self.batch, self.passes = batch, options.pop("passes")
        self.order, self.every = options.pop("order"), options.pop("every")
        self.names = list(range(size))
        self.sessions = {name: FakeElasticSession(name, self.names) for name in self.names}
        self.used: Counter[int] = Counter()
        self.padding: Counter[int] = Counter()  # of these
        self.unused: list[int] = []  # what dead workers were to use, since a commit
        self.samplers = {}
        patch.setattr(current, "current", lambda: self.sessions[self.me])
        for name in self.names:
            self.me = name
            self.samplers[name] = ElasticSampler(range(count), **options)
        self.take_over()
        self.commit()

    def each(self) -> Iterator[Any]:
        """Yield the samplers of the workers that are left, each while its worker is the one."""
        for name in self.names:
            self.me = name
            yield self.samplers[name]

    def take_over(self) -> None:
        """Do what a state's sync does."""
        members = tuple(f"host {name}" for name in self.names)
        self.me = self.names[0]
        self.samplers[self.me].settle(members)
        kept = copy.deepcopy(self.samplers[self.me].state_dict())
        for sampler in self.each():
            sampler.distribute_over(members)
            sampler.load_state_dict(copy.deepcopy(kept))
        self.distribute()

    def distribute(self) -> None:
        """Begin to iterate, on all workers; note where the padding begins."""
        self.at, self.shares = 0, {}
        for sampler in self.each():
            self.shares[self.me] = list(sampler)
            assert len(self.shares[self.me]) == len(sampler)
        self.places = {name: rank for rank, name in enumerate(self.names)}
        self.n_left = len(left_of(sampler._order(), sampler._used, sampler._n_used))
        assert len({len(share) for share in self.shares.values()}) == 1

    def is_over(self) -> bool:
        return self.at >= len(self.shares[self.names[0]])

    def lose(self, victim: int) -> None:
        self.names.remove(victim)
        for name in self.names:
            self.sessions[name].begin_view(self.names)

    def record(self) -> None:
        for sampler in self.each():
            sampler.record_batch(0, self.batch)

    def step(self, death: Death | None) -> bool:
        """Make a step; return whether it has failed for the survivors."""
        before, view = list(self.names), self.sessions[self.names[0]].view
        if death is not None and death.kind != "after":
            self.lose(before[death.victim])
            if death.kind == "fail":
                return True
            before, view = list(self.names), view + 1
        for n_batches in range(1, self.passes + 1):
            if self.is_over():
                break
            for name in self.shares:
                some = self.shares[name][self.at : self.at + self.batch]
                if name in before:
                    self.used.update(some)
                    self.padding.update(
                        index
                        for place, index in enumerate(some, self.at)
                        if place * len(self.shares) + self.places[name] >= self.n_left
                    )
                else:
                    self.unused += some
            self.at += self.batch
            is_last = n_batches == self.passes or self.is_over()
            if self.order == "before" or not is_last:
                self.record()
        if death is not None and death.kind == "after":
            self.lose(before[death.victim])
        handle = SimpleNamespace(view=view, is_committed=True, error=None)
        for name in self.names:
            history_of(self.sessions[name]).add_step(SimpleNamespace(handles=[handle]))
        if self.order == "after":
            self.record()
        return False

    def commit(self) -> bool:
        """Commit; return whether indices were distributed again."""
        is_new = len(self.names) != len(self.shares)
        if is_new:
            self.take_over()
        self.me = self.names[0]
        self.saved = copy.deepcopy(self.samplers[self.me].state_dict())
        self.kept = self.used.copy(), self.padding.copy(), list(self.unused)
        return is_new

    def restore(self) -> None:
        """Go back to the last commit, as after a ViewChangedError."""
        for sampler in self.each():
            sampler.load_state_dict(copy.deepcopy(self.saved))
        self.used, self.padding, self.unused = map(copy.copy, self.kept)
        self.take_over()

    def train(self, deaths: list[Death]) -> None:
        """Train for an epoch, and commit at its end."""
        left = sorted(deaths)
        for step in itertools.count():
            if self.is_over():
                if not self.commit() or self.is_over():
                    return
                continue
            death = None
            if left and left[0].step <= step:
                death = left.pop(0)
                if len(self.names) == 1:
                    death = None
                else:
                    death = death._replace(victim=death.victim % len(self.names))
            if self.step(death):
                self.restore()
            elif step % self.every == self.every - 1:
                self.commit()


JOBS = {
    "count": st.integers(0, 70),
    "size": st.integers(1, 5),
    "batch": st.integers(1, 6),
    "passes": st.integers(1, 3),
    "every": st.integers(1, 9),
    "order": st.sampled_from(["before", "after"]),
    "shuffle": st.booleans(),
    "deaths": st.lists(
        st.builds(
            Death, st.integers(0, 12), st.integers(0, 4), st.sampled_from(["in", "after", "fail"])
        ),
        max_size=4,
    ),
}
MANY = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@MANY
@given(**JOBS)
def test_exactly_once_whoever_dies_and_whenever_others_commit(
    monkeypatch: pytest.MonkeyPatch, deaths: list[Death], **options: Any
) -> None:
    with monkeypatch.context() as patch:
        job = Job(patch, exact=True, **options)
        job.train(deaths)
    assert set(job.used) == set(range(options["count"]))
    assert all(number <= 1 + job.padding[index] for index, number in job.used.items())
    assert job.padding.total() <= (options["size"] - 1) * (1 + len(deaths))


@MANY
@given(**JOBS)
def test_by_default_at_most_once_and_only_a_lost_workers_batches_are_missing(
    monkeypatch: pytest.MonkeyPatch, deaths: list[Death], **options: Any
) -> None:
    with monkeypatch.context() as patch:
        job = Job(patch, exact=False, **options)
        job.train(deaths)
    missing = set(range(options["count"])) - set(job.used)
    assert missing <= set(job.unused)
    assert all(number <= 1 + job.padding[index] for index, number in job.used.items())


@given(
    count=st.integers(0, 50), size=st.integers(1, 6), used=st.sets(st.integers(0, 49)),
    n_used=st.integers(0, 50), shuffle=st.booleans(),
)  # fmt: skip
def test_shares_are_a_function_of_what_is_used_and_of_the_place(
    count: int, size: int, used: set[int], n_used: int, shuffle: bool
) -> None:
    used = {one for one in used if one < count}
    order = order_of(count, shuffle=shuffle, seed=3, epoch=4)
    left = left_of(order, torch.tensor(sorted(used), dtype=torch.int64), n_used)
    shares = [share_of(left, order, rank, size) for rank in range(size)]
    assert len({len(one) for one in shares}) == 1
    dealt = [one for some in zip(*shares, strict=True) for one in some]
    assert dealt[: len(left)] == left.tolist()
    assert len(dealt) - len(left) < size
    assert not set(left.tolist()) & used


@pytest.mark.parametrize(
    ("seen", "n_steps", "expected"),
    [
        ([0, 1, 2], 3, [[0], [1], [2]]),  # recorded before the step,
        ([1, 2, 3], 3, [[0], [1], [2]]),  # and after it
        ([0, 0, 0, 1], 2, [[0], [0], [0], [1]]),
        ([0, 0, 1, 2], 2, [[0], [0], [0], [1]]),
        ([0, 2], 4, [[0, 1], [2, 3]]),  # two steps for each
        ([2, 4], 4, [[0, 1], [2, 3]]),
        ([0, 1, 1], 1, [[0], [0], []]),  # whose step is not made
        ([], 2, []),
    ],
)
def test_batches_are_of_the_steps_that_were_made_with_them(
    seen: list[int], n_steps: int, expected: list[list[int]]
) -> None:
    assert [list(one) for one in steps_of_batches(seen, n_steps)] == expected


def test_recorded_indices_are_left_out_after_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 20, 2, 3, passes=1, order="after", every=1, shuffle=False)
    for sampler in job.each():
        sampler.record_indices([0, 7, 19])
        sampler.merge_recorded()
    state = job.samplers[0].state_dict()
    assert state["recorded_indices"].tolist() == [0, 7, 19]
    job.take_over()
    state = job.samplers[1].state_dict()
    assert state["processed_indices"].tolist() == [0, 7, 19]
    assert "recorded_indices" not in state
    assert {*job.shares[0], *job.shares[1]} == set(range(20)) - {7, 19}
