# SPDX-License-Identifier: Apache-2.0
"""Any order of joins, requests, deaths and silences keeps the promises of the Membership.

The promises: ranks are unique; the generation only grows; the first cause is one and stays; every
request is answered exactly once or its peer is dropped; while somebody waits, a tick is due; and
in the end the scheduler finishes.
"""

from __future__ import annotations

import itertools
from collections import Counter

from control_driver import Driver, make_spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fastps.control.actions import Phase
from fastps.control.declarations import Declarations
from fastps.control.protocol import (
    Absent,
    Confirmed,
    DeclareKeys,
    Dispute,
    Done,
    Dropped,
    Forget,
    ForgetKeys,
    Joined,
    KeysFailed,
    KeysReady,
    PeerLost,
    Regroup,
    ReportLost,
    ResultsCommitted,
    ResultsLanded,
    Started,
    Unheard,
    ViewJoined,
    ViewLost,
)

SIZE, SERVERS = 2, 1
MAX = 4  # workers of an elastic job, with those that join it
JOINT = 2  # servers in workers' processes, where the workers are on two machines
PICK = st.integers(0, 63)


class MembershipMachine(RuleBasedStateMachine):
    """Drives a job of two workers and one server with arbitrary events."""

    is_joint = False
    is_elastic = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            size=SIZE, num_servers=SERVERS, lease_s=5, linger_s=3,
            elastic_min=int(self.is_elastic), elastic_max=MAX * self.is_elastic,
        )  # fmt: skip
        self.driver.is_apart = self.is_joint
        self.asked: set[tuple[int, int]] = set()
        self.seen: dict[int, int] = {}
        self.generation = 1
        self.cause: PeerLost | None = None
        self.ranks: dict[int, set[tuple[str, int]]] = {}
        self.gone: set[int] = set()
        self.table: Declarations | None = None
        self.reached: dict[int, int] = {}  # last version of each id

    # ---- choosing ----

    def members(self, role: str | None = None) -> list[int]:
        return [p for p, r, _ in self.driver.machine.members() if role in (None, r)]

    def present(self) -> list[int]:
        """List those whose requests are answered some time."""
        return self.members()

    def ask(self, peer: int, number: int) -> None:
        self.asked.add((peer, number))

    # ---- events ----

    @rule(
        role=st.sampled_from(["worker", "server"]),
        rank=st.sampled_from([None, None, 0, 1, 2]),
        is_watched=st.booleans(),
    )
    def join(self, role: str, rank: int | None, is_watched: bool) -> None:
        peer = self.driver.join(role, rank=rank, is_watched=is_watched, cookie=b"c" * 32)
        if isinstance(self.driver.sent[peer][0], Joined):
            self.driver.machine.pulse(peer, self.driver.now)

    @initialize(is_wanted=st.booleans())
    def begin(self, is_wanted: bool) -> None:
        if is_wanted:
            self.fill_up()

    @rule()
    def fill_up(self) -> None:
        """Let whoever is missing join, so that jobs start often."""
        for role, total in (("worker", SIZE), ("server", SERVERS)):
            for _ in range(total - len(self.members(role))):
                self.driver.join(role)
        for peer in self.members():
            self.wait_for_start(peer, 10.0)

    def wait_for_start(self, peer: int, timeout_s: float) -> None:
        number = self.driver.request()
        self.ask(peer, number)
        self.driver._requests -= 1
        self.driver.wait(peer, timeout_s)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, timeout_s=st.sampled_from([0.0, 2.0, 20.0]))
    def start(self, pick: int, timeout_s: float) -> None:
        members = self.members()
        self.wait_for_start(members[pick % len(members)], timeout_s)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, name=st.sampled_from("ab"), timeout_s=st.sampled_from([0.5, 4.0, 50.0]))
    def barrier(self, pick: int, name: str, timeout_s: float) -> None:
        members = self.members()
        peer = members[pick % len(members)]
        self.ask(peer, self.driver.barrier(peer, name, timeout_s))

    @precondition(lambda self: self.members())
    @rule(pick=PICK, root=st.integers(0, 2), has_data=st.booleans())
    def blob(self, pick: int, root: int, has_data: bool) -> None:
        members = self.members()
        peer = members[pick % len(members)]
        self.ask(peer, self.driver.blob(peer, root, b"x" if has_data else None))

    @precondition(lambda self: self.members())
    @rule(
        pick=PICK,
        names=st.lists(st.sampled_from("uvw"), max_size=3),
        extent=st.sampled_from([3, 3, 3, 4]),
        timeout_s=st.sampled_from([1.0, 30.0]),
    )
    def declare(self, pick: int, names: list[str], extent: int, timeout_s: float) -> None:
        members = self.members()
        peer = members[pick % len(members)]
        specs = [make_spec(name, (extent,)) for name in names]
        self.ask(peer, self.driver.declare(peer, *specs, timeout_s=timeout_s))

    @precondition(lambda self: self.members())
    @rule(
        pick=PICK,
        names=st.lists(st.sampled_from("uvw"), min_size=1, max_size=2),
        version=st.integers(0, 9),
    )
    def forget(self, pick: int, names: list[str], version: int) -> None:
        members, number = self.members(), self.driver.request()
        peer = members[pick % len(members)]
        self.ask(peer, number)
        self.driver.say(peer, Forget(number, tuple((name, version) for name in names), 5.0))

    @precondition(lambda self: self.members("worker"))
    @rule(name=st.sampled_from("uvw"), versions=st.lists(st.integers(0, 9), min_size=SIZE))
    def all_workers_forget(self, name: str, versions: list[int]) -> None:
        """Let all of them declare, use and forget a name, so that ids are used again."""
        for peer in self.members("worker"):
            self.ask(peer, self.driver.declare(peer, make_spec(name)))
        self.answer_keys(is_good=True)
        for peer, version in zip(self.members("worker"), versions, strict=False):
            number = self.driver.request()
            self.ask(peer, number)
            self.driver.say(peer, Forget(number, ((name, version),), 5.0))

    @precondition(lambda self: self.members("worker"))
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        """Let a worker carry out what it was told is forgotten, perhaps twice."""
        members = self.members("worker")
        peer = members[pick % len(members)]
        for done in self.driver.events(peer, Done)[-3:]:
            assert isinstance(done, Done)
            self.driver.say(peer, Dropped(done.request))

    @precondition(lambda self: self.members())
    @rule(pick=PICK, version=st.integers(1, 2), started=st.sampled_from(["a sum", "an average"]))
    def dispute(self, pick: int, version: int, started: str) -> None:
        members, number = self.members(), self.driver.request()
        peer = members[pick % len(members)]
        self.ask(peer, number)
        self.driver.say(peer, Dispute(number, "w", version, started, 2.0))

    @precondition(lambda self: self.members())
    @rule(is_good=st.sampled_from([True, True, True, False]))
    def answer_keys(self, is_good: bool) -> None:
        for server in self.members():
            asked = self.driver.events(server, DeclareKeys)[-2:]
            for event in asked + self.driver.events(server, ForgetKeys)[-2:]:
                assert isinstance(event, DeclareKeys | ForgetKeys)
                number = event.request_id
                message = KeysReady(number) if is_good else KeysFailed(number, "no memory")
                self.driver.say(server, message)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, timeout_s=st.sampled_from([0.0, 1.0, 10.0]))
    def leave(self, pick: int, timeout_s: float) -> None:
        members = self.members()
        peer = members[pick % len(members)]
        self.ask(peer, self.driver.leave(peer, timeout_s))

    @precondition(lambda self: self.members("worker"))
    @rule()
    def all_workers_leave(self) -> None:
        for peer in self.members("worker"):
            self.ask(peer, self.driver.leave(peer))

    @precondition(lambda self: self.members())
    @rule(pick=PICK)
    def die(self, pick: int) -> None:
        members = self.members()
        self.driver.die(members[pick % len(members)])

    @precondition(lambda self: self.members())
    @rule(pick=PICK, of=PICK, reached_ms=st.sampled_from([None, 1]))
    def confirm(self, pick: int, of: int, reached_ms: int | None) -> None:
        members = self.members()
        answer = Confirmed(members[of % len(members)], reached_ms)
        self.driver.say(members[pick % len(members)], answer)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, is_right=st.booleans())
    def launcher_reports(self, pick: int, is_right: bool) -> None:
        members = self.driver.machine.members()
        peer, role, rank = members[pick % len(members)]
        if rank is not None:
            gone = Absent(role, rank, "node", 100 + peer * is_right, "it was killed")
            self.driver.say(0, gone)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, number=st.integers(0, SIZE + SERVERS), is_owner=st.booleans())
    def report(self, pick: int, number: int, is_owner: bool) -> None:
        members = self.members()
        report = ReportLost(number, "reset", is_owner)
        self.driver.say(members[pick % len(members)], report)

    @precondition(lambda self: self.members())
    @rule(pick=PICK, slept_s=st.sampled_from([0.0, 1.0, 4.0]))
    def give_up_the_scheduler(self, pick: int, slept_s: float) -> None:
        members = self.members()
        if slept_s:
            self.driver.do(self.driver.machine.slept(self.driver.now, slept_s))
        self.driver.say(members[pick % len(members)], Unheard(5.0))

    @precondition(lambda self: self.members())
    @rule(pick=PICK)
    def pulse_ends(self, pick: int) -> None:
        members = self.members()
        peer = members[pick % len(members)]
        self.driver.do(self.driver.machine.pulse_closed(peer, self.driver.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.keep_alive()
        self.driver.advance(seconds)

    @rule()
    def silence(self) -> None:
        self.driver.advance(6.0)

    @rule(is_meant=st.integers(0, 9))
    def stop(self, is_meant: int) -> None:
        if is_meant == 0:
            self.driver.do(self.driver.machine.stop("a signal", self.driver.now))

    # ---- promises ----

    @invariant()
    def answers_are_wanted(self) -> None:
        for peer, messages in self.driver.sent.items():
            for message in messages[self.seen.get(peer, 0) :]:
                number = getattr(message, "request", None)
                if number is not None and (peer, number) in self.asked:
                    self.asked.discard((peer, number))
                elif number is not None:
                    assert message is messages[0], f"{message} answers nothing"
            self.seen[peer] = len(messages)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.answers_are_wanted()
        open_requests = {pair for pair in self.asked if pair[0] in self.present()}
        assert self.driver.machine.pending() == open_requests
        for peer, _ in self.asked - open_requests:
            assert peer in self.driver.closed or peer not in self.present()
        if self.driver.machine.phase in (Phase.BROKEN, Phase.OVER):
            assert not open_requests
        if open_requests:
            assert self.driver.machine.next_deadline() is not None

    @invariant()
    def ranks_are_unique(self) -> None:
        current = [(role, rank) for _, role, rank in self.driver.machine.members()]
        running = [pair for pair in current if pair[1] is not None and pair[0] == "server"]
        assert len(running) == len(set(running))
        for messages in self.driver.sent.values():
            for message in messages:
                if isinstance(message, Started):
                    job = message.job
                    assert [member.rank for member in job.workers] == list(range(SIZE))
                    assert [member.rank for member in job.members[SIZE:]] == list(range(SERVERS))
                    assert len(set(job.owners)) == SERVERS + JOINT * self.is_joint

    @invariant()
    def ids_are_unique(self) -> None:
        table = self.driver.machine._declarations
        used = [tensor.tensor_id for tensor in table._tensors.values()]
        resting = [number for ids, _ in table._unreleased for number, _ in ids]
        numbers = used + resting + [number for number, _ in table._free_ids]
        assert len(numbers) == len(set(numbers))
        leaving = [tensor for tensors in table._leaving.values() for tensor, _ in tensors]
        assert all(table._tensors[tensor.name] is tensor for tensor in leaving)
        assert table._n_pieces == sum(len(tensor.pieces) for tensor in table._tensors.values())
        assert sum(table._placement.loads) == sum(
            nbytes for tensor in table._tensors.values() for nbytes, _ in tensor.pieces
        )

    @invariant()
    def what_members_have_is_counted(self) -> None:
        """What bounds a member is what it has in the tables of the scheduler."""
        meetings = self.driver.machine._collectives
        entered: Counter[int] = Counter()
        for meeting in meetings._meetings.values():
            entered.update(list(meeting.entries))
        assert +meetings._n_entered == entered
        assert meetings._n_entered.total() or not meetings._held.total()
        table, alone = self.driver.machine._declarations, Counter[int]()
        for tensor in table._tensors.values():
            if tensor.agreed.bit_count() == 1:
                alone[tensor.agreed.bit_length() - 1] += 1
        assert +table._alone == alone
        assert all(table._alone_bytes[rank] for rank in alone)
        stalls = meetings.stalls
        assert +stalls._n_asked == Counter(
            rank for inquiry in stalls._inquiries.values() for rank in inquiry.askers
        )

    @invariant()
    def versions_go_on(self) -> None:
        """No tensor begins below what those that had its id before have reached."""
        table = self.driver.machine._declarations
        if table is not self.table:
            self.table, self.reached = table, {}
        for tensors in table._leaving.values():
            for tensor, version in tensors:
                number = tensor.tensor_id
                self.reached[number] = max(self.reached.get(number, 0), version)
        leaving = {id(one) for tensors in table._leaving.values() for one, _ in tensors}
        for tensor in table._tensors.values():
            if id(tensor) not in leaving and tensor.poison is None:
                assert tensor.version >= self.reached.get(tensor.tensor_id, 0)

    @invariant()
    def generation_grows(self) -> None:
        assert self.driver.machine.generation >= self.generation
        self.generation = self.driver.machine.generation

    @invariant()
    def first_cause_stays(self) -> None:
        cause = self.driver.machine.first_cause
        assert self.cause is None or cause is self.cause
        self.cause = cause
        told = {id(m) for ms in self.driver.sent.values() for m in ms if isinstance(m, PeerLost)}
        assert told <= {id(cause)}
        if cause is not None:
            assert self.driver.machine.phase in (Phase.BROKEN, Phase.OVER)

    def teardown(self) -> None:
        """Everybody dies: the scheduler must end, and owe nobody an answer."""
        for peer in self.present():
            self.driver.die(peer)
        self.driver.advance(1000.0)
        assert self.driver.finish is not None
        assert not self.driver.machine.pending()
        assert self.driver.machine.next_deadline() is None


class JointMachine(MembershipMachine):
    """The same with a server in each worker's process, beside the one apart."""

    is_joint = True


class ElasticMachine(MembershipMachine):
    """The same, where the job goes on with one worker when others are lost, and newcomers join."""

    is_elastic = True

    def __init__(self) -> None:
        super().__init__()
        self.boundary: dict[int, set[int]] = {}  # who is there, by the generation of the next view
        self.landed: dict[tuple[int, str], set[int]] = {}  # on whom, by generation and entry

    @precondition(lambda self: self.driver.machine.is_changing)
    @rule(count=st.integers(1, SIZE + SERVERS))
    def survivors_come(self, count: int) -> None:
        """Let some of the survivors await the next view, and all of them in the end."""
        for peer in self.members()[:count]:
            self.wait_for_start(peer, 30.0)

    def waiting(self) -> list[int]:
        return [item.peer for item in self.driver.machine._newcomers.all]

    def present(self) -> list[int]:
        return self.members() + self.waiting()

    @rule(rank=st.sampled_from([None, None, 0, 5]))
    def a_newcomer_comes(self, rank: int | None) -> None:
        before = self.driver.machine.members()
        peer = self.driver.join(rank=rank, size=1, elastic_min=1, is_newcomer=True)
        assert self.driver.machine.members() == before
        if isinstance(self.driver.sent[peer][0], Joined):
            self.driver.machine.pulse(peer, self.driver.now)

    @precondition(lambda self: self.waiting())
    @rule(pick=PICK)
    def a_newcomer_is_ready(self, pick: int) -> None:
        waiting = self.waiting()
        peer = waiting[pick % len(waiting)]
        self.wait_for_start(peer, 1000.0)

    @precondition(lambda self: self.waiting())
    @rule(pick=PICK, is_leave=st.booleans())
    def a_newcomer_goes(self, pick: int, is_leave: bool) -> None:
        waiting, before = self.waiting(), self.driver.machine.members()
        peer, generation = waiting[pick % len(waiting)], self.driver.machine.generation
        if is_leave:
            self.ask(peer, self.driver.leave(peer))
        else:
            self.driver.die(peer)
        assert self.driver.machine.members() == before
        assert self.driver.machine.generation == generation

    @precondition(lambda self: self.members("worker"))
    @rule(
        pick=PICK, count=st.sampled_from([1, MAX, MAX, MAX]),
        leavers=st.sampled_from([0, 0, 0, 1, 2, 5, 63]),
    )  # fmt: skip
    def come_to_a_boundary(self, pick: int, count: int, leavers: int = 0) -> None:
        for peer in [*self.members("worker")[pick % MAX :], *self.members("worker")][:count]:
            number, generation = self.driver.request(), self.driver.machine.generation
            self.ask(peer, number)
            self.boundary.setdefault(generation + 1, set()).add(peer)
            leaves = bool(leavers >> (peer % 6) & 1)
            self.driver.say(peer, Regroup(number, "boundary", generation, 20.0, leaves))

    @precondition(lambda self: self.driver.machine.phase is Phase.RUNNING)
    @rule(count=st.integers(1, MAX))
    def some_join(self, count: int) -> None:
        """Let newcomers come and join, so that this happens often."""
        for _ in range(count):
            self.a_newcomer_comes(None)
        for peer in self.waiting():
            self.wait_for_start(peer, 1000.0)
        self.come_to_a_boundary(0, MAX)

    @invariant()
    def who_joins_comes_last(self) -> None:
        """In a view that all workers of the last one have agreed to; these keep their order."""
        views: dict[int, list[int]] = {}
        joined: set[int] = set()
        for messages in self.driver.sent.values():
            for message in messages:
                if isinstance(message, Started):
                    job = message.job
                    views[job.generation] = [one.pid for one in job.workers]
                elif isinstance(message, ViewJoined):
                    joined.add(message.generation)
        for generation in joined & self.boundary.keys():
            if (before := views.get(generation - 1)) is not None:
                there = {100 + peer for peer in self.boundary[generation]}
                assert there.issuperset(before)
        for (_, one), (_, other) in itertools.pairwise(sorted(views.items())):
            kept = [pid for pid in one if pid in other]
            assert kept == other[: len(kept)]

    @precondition(lambda self: self.members("worker"))
    @rule(pick=PICK, name=st.sampled_from("ab"), is_old=st.booleans())
    def land(self, pick: int, name: str, is_old: bool) -> None:
        members = self.members("worker")
        peer, generation = members[pick % len(members)], self.generation - is_old
        is_in = self.driver.machine.phase is Phase.RUNNING and any(
            isinstance(one, Started) and one.job.generation == generation
            for one in self.driver.sent[peer]
        )
        self.driver.say(peer, ResultsLanded(generation, (f"{name}#{self.generation}",)))
        if is_in and not is_old:
            self.landed.setdefault((generation, f"{name}#{generation}"), set()).add(peer)

    @invariant()
    def what_is_committed_has_landed(self) -> None:
        """On all workers of its view; survivors of a view are told of the same commits in it."""
        told: dict[int, list[set[str]]] = {}  # to those that went through a whole view
        workers = self.members("worker")
        for peer, messages in self.driver.sent.items():
            view, seen = 0, set()
            for message in messages:
                if isinstance(message, Started):
                    view, seen = message.job.generation, set()
                    n_workers = message.job.n_workers
                elif isinstance(message, ResultsCommitted):
                    for entry in message.entries:
                        assert len(self.landed[view, entry]) == n_workers
                        seen.add(entry)
                elif getattr(message, "survives", isinstance(message, ViewJoined)) and (
                    peer in workers
                ):
                    told.setdefault(view, []).append(seen)
        for found in told.values():
            assert all(seen == found[0] for seen in found)

    @invariant()
    def ranks_are_unique(self) -> None:
        """One view of a generation starts, with ranks that close up, and the same for all."""
        started: dict[int, set[tuple[object, ...]]] = {}
        for messages in self.driver.sent.values():
            for message in messages:
                if isinstance(message, Started):
                    job = message.job
                    assert [member.rank for member in job.workers] == list(range(job.n_workers))
                    assert 1 <= job.n_workers <= MAX
                    started.setdefault(job.generation, set()).add(job.members)
        assert all(len(views) == 1 for views in started.values())

    @invariant()
    def who_is_lost_is_told(self) -> None:
        """A member that is taken for lost hears of no later view as a survivor."""
        for messages in self.driver.sent.values():
            told = [one for one in messages if isinstance(one, ViewLost | ViewJoined)]
            survives = [message.survives for message in told]  # who leaves may be lost meanwhile
            assert survives == sorted(survives, reverse=True)
            generations = [message.generation for message in told]
            assert generations == sorted(set(generations))


TestElasticMachine = ElasticMachine.TestCase
TestElasticMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestJointMachine = JointMachine.TestCase
TestJointMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
