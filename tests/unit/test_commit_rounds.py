# SPDX-License-Identifier: Apache-2.0
"""Rounds of commits, with losses at any point: survivors hand out the same results, once each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fastps.session.commit_log import CommitLog, Round

NAMES = ("a", "b", "c")
Contributors = frozenset[int]


@dataclass
class Worker:
    """One worker: what has landed in this view, and what it has handed out, by entry."""

    me: int
    log: CommitLog = field(default_factory=CommitLog)
    active: dict[str, str] = field(default_factory=dict)  # entry in flight, by name
    landed: dict[str, Contributors] = field(default_factory=dict)  # by entry
    out: dict[str, Contributors] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start the next operation on a name, once the last one is handed out."""
        if name not in self.active:
            self.active[name] = self.log.entry(name)

    def take(self, entries: Sequence[str]) -> None:
        """Hand out what was committed."""
        for entry in entries:
            assert entry not in self.out, f"{entry} was committed twice"
            assert self.active.pop(entry.rpartition("#")[0]) == entry
            self.out[entry] = self.landed.pop(entry)


class Job:
    """Workers whose operations land and are committed; steps come from Hypothesis."""

    def __init__(self, size: int) -> None:
        self.workers = {rank: Worker(rank) for rank in range(size)}
        self.at_sea: dict[str, Contributors] = {}  # sums that are complete, by entry

    def begin(self, rank: int, name: str) -> None:
        """Let a worker start; the sum is complete once all have."""
        self.workers[rank].start(name)
        entries = {worker.active.get(name) for worker in self.workers.values()}
        if len(entries) == 1 and (entry := entries.pop()) is not None:
            self.at_sea.setdefault(entry, frozenset(self.workers))

    def land(self, rank: int, name: str) -> None:
        """Let a complete sum land on a worker."""
        worker = self.workers[rank]
        entry = worker.active.get(name)
        if entry is not None and entry in self.at_sea:
            worker.landed[entry] = self.at_sea[entry]

    def round(self, deaf: Sequence[int]) -> None:
        """Let all take part in a round; the deaf do not learn of its end, and a view follows."""
        told = [list(worker.landed) for worker in self.workers.values()]
        for rank, worker in self.workers.items():
            if rank not in deaf:
                worker.take(worker.log.complete(told))

    def lose(self, ranks: Sequence[int]) -> None:
        """Lose workers, and begin the next view as ElasticSession does."""
        for rank in ranks:
            if len(self.workers) > 1:
                self.workers.pop(rank, None)
        rounds = [Round(*worker.log.last) for worker in self.workers.values()]
        for worker in self.workers.values():
            worker.take(worker.log.adopt(rounds))
            worker.landed.clear()  # is started again
        self.at_sea.clear()
        for name in NAMES:
            for rank in self.workers:
                if name in self.workers[rank].active:
                    self.begin(rank, name)

    def check(self) -> None:
        """Check that who hands out an entry hands out the same, and nobody is two rounds ahead."""
        found: dict[str, Contributors] = {}
        for worker in self.workers.values():
            for entry, who in worker.out.items():
                assert found.setdefault(entry, who) == who
        numbers = [worker.log.last.number for worker in self.workers.values()]
        assert max(numbers) - min(numbers) <= 1

    def check_alike(self) -> None:
        """Check that, after a view has begun, all have handed out the same entries."""
        outs = [worker.out for worker in self.workers.values()]
        assert all(out == outs[0] for out in outs)


RANKS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "land"]), RANKS, st.sampled_from(NAMES)),
        st.tuples(st.just("round"), st.just(0), st.just("")),
        st.tuples(
            st.just("lose"), RANKS, st.sets(RANKS).map(lambda some: "".join(map(str, some)))
        ),
        st.tuples(st.just("go"), st.just(0), st.sampled_from(NAMES)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_survivors_hand_out_the_same_once(steps):
    job = Job(4)
    for what, rank, word in steps:
        if what == "lose":  # during a round, whose end only some learn: word says who does not
            job.round([int(one) for one in word])
            job.lose([rank])
            job.check_alike()
        elif what == "round":
            job.round([])
            job.check_alike()
        elif what == "go":
            for one in job.workers:
                job.begin(one, word)
            for one in job.workers:
                job.land(one, word)
        elif rank in job.workers:
            getattr(job, what)(rank, word)
        job.check()


@given(steps=STEPS, second=RANKS, ranks=st.sets(RANKS))
def test_a_loss_while_survivors_compare_changes_nothing(steps, second, ranks):
    """Some have caught up when the next member is lost, and compare again."""
    job = Job(4)
    for _ in range(2):
        for what, rank, word in steps:
            if what == "go":
                for one in job.workers:
                    job.begin(one, word)
                for one in job.workers:
                    job.land(one, word)
            elif what in ("begin", "land") and rank in job.workers:
                getattr(job, what)(rank, word)
        job.round(sorted(ranks))
        rounds = [Round(*worker.log.last) for worker in job.workers.values()]
        for rank in sorted(job.workers)[::2]:
            job.workers[rank].take(job.workers[rank].log.adopt(rounds))
        job.lose([second])
        job.check()
        job.check_alike()
