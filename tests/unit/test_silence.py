# SPDX-License-Identifier: Apache-2.0
"""Whatever members do, and however late the scheduler is: nobody is lost too soon or too late."""

from __future__ import annotations

from control_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

LEASE_S, BEAT_S, STEP_S = 1.2, 0.2, 0.05
SPREAD_S = CONFIRM_S = LEASE_S / 3
HOSTS = "aaabb"  # processes of machine a are seen by the scheduler
STEPS = 120
PLACES = st.integers(0, len(HOSTS) - 1)
CHANGES = st.tuples(
    st.integers(0, STEPS), PLACES, st.sampled_from(["beats", "stopped", "starved"])
)
DELAYS = st.tuples(st.integers(0, STEPS), st.sampled_from([0.01, 0.1, 0.3]))


class Fleet:
    """The members of one job, what each does, and when its last heartbeat was heard."""

    def __init__(self) -> None:
        self.driver = Driver(
            size=len(HOSTS), num_servers=0, lease_s=LEASE_S, elastic_min=1, start_timeout_s=100
        )
        self.driver.is_apart = True
        self.peers = [self.driver.enter(rank=n, hostname=host) for n, host in enumerate(HOSTS)]
        self.driver.keep_alive()
        self.does = ["beats"] * len(HOSTS)
        self.heard_at = [self.driver.now] * len(HOSTS)
        self.changed_at = [self.driver.now] * len(HOSTS)
        self.late_s = [0.0] * len(HOSTS)  # of the scheduler, since that heartbeat

    def is_lost(self, place: int) -> bool:
        return self.peers[place] in self.driver.closed

    def change(self, place: int, does: str) -> None:
        """Let a member do something else; starvation of another machine is mere silence there."""
        self.does[place], self.changed_at[place] = does, self.driver.now
        if HOSTS[place] == "a":
            states = {"beats": "S", "stopped": "T", "starved": "R"}
            self.driver.states[100 + self.peers[place]] = states[does]

    def beat(self, step: int) -> None:
        for place, peer in enumerate(self.peers):
            is_due = (step + place) % round(BEAT_S / STEP_S) == 0
            if is_due and self.does[place] == "beats" and not self.is_lost(place):
                self.driver.machine.pulse(peer, self.driver.now)
                self.heard_at[place], self.late_s[place] = self.driver.now, 0.0

    def delay(self, seconds: float) -> None:
        self.driver.machine.delayed(seconds)
        self.late_s = [late_s + seconds for late_s in self.late_s]

    def pass_time(self) -> None:
        """Let a step of time pass, and check who was lost in it."""
        before = [self.is_lost(place) for place in range(len(HOSTS))]
        self.driver.advance(STEP_S)
        if self.driver.machine.first_cause is not None:
            return
        for place, was_lost in enumerate(before):
            silent_s = self.driver.now - self.heard_at[place]
            if self.is_lost(place) and not was_lost:
                assert silent_s > LEASE_S - STEP_S / 2
                assert HOSTS[place] == "b" or self.does[place] != "starved"
            elif not self.is_lost(place):
                assert silent_s < self._limit_s(place)
        if self.driver.machine.is_changing:
            for peer, _, _ in self.driver.machine.members():
                if self.driver.machine._peers[peer].start_request is None:
                    self.driver.wait(peer, 100.0)

    def _limit_s(self, place: int) -> float:
        """Return after how long a silence a member has to be lost."""
        if HOSTS[place] == "b":
            return LEASE_S + self.late_s[place] + CONFIRM_S + SPREAD_S + STEP_S
        if self.does[place] == "starved":
            return LEASE_S + 10.0
        seen_s = self.changed_at[place] - self.heard_at[place] + BEAT_S  # at the next look
        return max(LEASE_S, seen_s) + BEAT_S + SPREAD_S + STEP_S


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(CHANGES, max_size=12), delays=st.lists(DELAYS, max_size=12))
def test_nobody_is_lost_too_soon_or_too_late(
    changes: list[tuple[int, int, str]], delays: list[tuple[int, float]]
) -> None:
    fleet = Fleet()
    for step in range(STEPS):
        for at, place, does in changes:
            if at == step:
                fleet.change(place, does)
        for at, seconds in delays:
            if at == step:
                fleet.delay(seconds)
        fleet.beat(step)
        fleet.pass_time()


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 20), who=st.sets(PLACES, min_size=1, max_size=4))
def test_who_falls_silent_together_is_lost_together(at: int, who: set[int]) -> None:
    fleet = Fleet()
    for step in range(STEPS):
        if step == at:
            for place in who:
                fleet.change(place, "stopped")
        fleet.beat(step)
        fleet.pass_time()
        if any(map(fleet.is_lost, range(len(HOSTS)))):
            break
    assert {place for place in range(len(HOSTS)) if fleet.is_lost(place)} == who
