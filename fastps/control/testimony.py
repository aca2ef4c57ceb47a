# SPDX-License-Identifier: Apache-2.0
"""Which of two members is lost when one reports the other, in a job that goes on after a loss.

A part of the Membership. One member's word is no verdict: two that say the same are, and so is the
silence of the one that they name. Others are asked whether they reach it. If it lives and nobody
else misses it, one of the two is at fault, and nothing shows which. Then the reporter is lost, and
the other is doubted: in its next dispute with one that is not doubted, it is lost. So a liar that
reports others loses itself, and one that cuts its links in silence has one honest member lost
before it is lost.

Where a firewall drops datagrams, those who are asked reach nobody. So a few members are asked
about each one when its first view starts, and only who has reached it once can miss it later.

Several liars can say the same, so one of those that were believed is doubted too, and who is
doubted does not count among several. That bounds them. A member that is heard is lost on words
only if it is doubted, or if another that contradicts it is doubted from then on. One of these two
lies or cuts links, and nobody is in two such pairs. So as many honest members are lost as there
are liars, at most.

In an elastic job a member ends all its links when one has ended, so others miss it too. What it
reports itself comes first: that explains what others say of it. A member that the job needs stays,
unless more than half of the workers say the same of it. Where a loss ends the job, the report
stands as the cause. Pure.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Container, Sequence

from fastps.config import Config
from fastps.control.admission import Peer
from fastps.control.blame import (
    MAX_ASKED,
    MISSED_BEATS,
    VOTES,
    Inquest,
    Suspicion,
    Suspicions,
    difference_text,
    pulse_s,
)
from fastps.control.commits import Difference
from fastps.control.protocol import ReportLost

DIFFER_S = 10.0  # for other members of an operation to say of whom it is, where two differ


class TestimonyMixin:
    """The reports of members about others, for the Membership."""

    _config: Config
    _goes_on: bool
    _peers: dict[int, Peer]
    _suspicions: Suspicions

    def _drop(self, peer: int, cause: str, now: float) -> None:
        raise NotImplementedError

    def _programs(self) -> list[Peer]:
        raise NotImplementedError

    def _life_text(self, peer: int, now: float) -> str:
        raise NotImplementedError

    def _unheard_s(self, member: Peer, now: float) -> float:
        raise NotImplementedError

    def _begin_inquest(self, member: Peer, now: float, *, apart_from: int = 0) -> Inquest:
        raise NotImplementedError

    def _ask(self, member: Peer, some: Sequence[Peer], now: float) -> Inquest:
        raise NotImplementedError

    def _look_around(self, now: float) -> None:
        """Ask some members whether they reach each one that is new in the job."""
        peers = list(self._peers.values()) if self._outlives_losses else []
        for member in peers:
            if member.first_look is None:
                choice = random.Random(member.join.cookie + str(member.peer).encode())
                some = choice.sample(peers, min(len(peers), 2 * MAX_ASKED))
                member.first_look = self._ask(member, some, now)

    def _suspect(self, suspect: Peer, reporter: Peer, report: ReportLost, now: float) -> None:
        """Note a report, and ask others whether they reach the suspect."""
        if self._outlives_losses and not self._suspicions.accusers(suspect.peer):
            suspect.hearing = self._begin_inquest(suspect, now, apart_from=reporter.peer)
        self._suspicions.add(
            (suspect.peer, suspect.name), (reporter.peer, reporter.name), report.cause, now
        )

    def _note_difference(self, member: Peer, found: Difference, now: float) -> None:
        """Suspect those that say otherwise of whom an operation is."""
        for other in self._programs():
            if other.number in found.others:
                theirs = found.others[other.number]
                is_accused = self._suspicions.accusers(other.peer) - {member.peer}
                self._suspicions.accuse(
                    other.peer, member.peer,
                    difference_text(found.entry, theirs, member.name, found.members),
                    difference_text(found.entry, found.members, other.name, theirs), now,
                    wait_s=0.0 if is_accused else DIFFER_S,
                )  # fmt: skip

    @property
    def _outlives_losses(self) -> bool:
        """Whether the job goes on when a worker is lost."""
        return self._goes_on or self._config.is_elastic

    def _judge_report(self, item: Suspicion, now: float) -> None:
        """Lose the suspect of a report, or its reporter; or wait for a sign of life."""
        suspect = self._peers.get(item.suspect)
        can_judge = suspect is not None and suspect.is_staying and item.reporter in self._peers
        if suspect is None or not (can_judge and self._outlives_losses):
            self._lose_suspect(item, now)
            return
        beat_s, first = pulse_s(self._config), self._origin(item)
        for one in (item, first):
            member = self._peers[one.suspect]
            silent_s = self._unheard_s(member, now)
            if one.until > now:
                self._suspicions.postpone(item, one.until)
            elif silent_s >= MISSED_BEATS * beat_s:
                self._lose_suspect(one, now)
            elif words := self._denials(member):
                self._believe(words, one, now)
            elif silent_s >= now - one.since:  # no heartbeat since then: its lease may end soon
                self._suspicions.postpone(item, now + beat_s)
            else:
                continue
            return
        if words := self._misses(first.suspect):
            self._believe(words, first, now)
        else:
            self._judge_words(first, now)

    def _lose_suspect(self, item: Suspicion, now: float) -> None:
        self._drop(item.suspect, f"{item.text}; {self._life_text(item.suspect, now)}", now)

    def _origin(self, item: Suspicion) -> Suspicion:
        """Return the report that explains another: what its suspect reported, and so on.

        Where this leads back to a report, one of these is a lie. An honest member reports what
        befell it before others report what it did then. So the lie is near the report whose
        suspect reported something itself only long after.
        """
        chain = [item]
        while True:
            own = self._suspicions.by(chain[-1].suspect)
            if own is None or own.suspect not in self._peers:
                return chain[-1]
            if own in chain:
                circle = itertools.pairwise([*chain[chain.index(own) :], own])
                return max(circle, key=lambda pair: pair[1].since - pair[0].since)[0]
            chain.append(own)

    def _denials(self, member: Peer) -> list[Peer]:
        """Return those that were asked and reach a member no more, if they are enough."""
        denied = member.hearing.denied_by() if member.hearing else []
        return self._several(member.reached_by.intersection(denied), member)

    def _misses(self, peer: int) -> list[Peer]:
        """Return those that miss a member which misses nobody, if they are enough."""
        is_accuser = self._suspicions.by(peer) is not None
        accusers = () if is_accuser else self._suspicions.accusers(peer)
        return self._several(accusers, self._peers[peer])

    def _several(self, peers: Container[int], suspect: Peer) -> list[Peer]:
        """Return the members among some whose words count together; none if they are too few."""
        found = [one for one in self._peers.values() if one.peer in peers and not one.is_doubted]
        n_workers = len(self._programs()) if self._is_needed_by_all(suspect) else 0
        return found if len(found) >= max(VOTES, n_workers // 2 + 1) else []

    def _is_needed_by_all(self, member: Peer) -> bool:
        """Return whether the job ends without a member, though it goes on without workers."""
        return member.join.role != "worker" and self._goes_on

    def _believe(self, words: list[Peer], item: Suspicion, now: float) -> None:
        """Lose the suspect of a report on the word of several; if it is heard, doubt one."""
        suspect = self._peers[item.suspect]
        is_heard = self._unheard_s(suspect, now) < max(now - item.since, pulse_s(self._config))
        if is_heard and not suspect.is_doubted:
            words[0].is_doubted = True
        self._lose_suspect(item, now)

    def _judge_words(self, item: Suspicion, now: float) -> None:
        """Lose one of two members of which only one misses the other, or each the other."""
        counter = self._suspicions.by(item.suspect)
        is_mutual = counter is not None and counter.suspect == item.reporter
        if counter is not None and is_mutual and counter.since < item.since:
            item = counter
        suspect, reporter = self._peers[item.suspect], self._peers[item.reporter]
        is_worse = suspect.is_doubted and not reporter.is_doubted
        if not (suspect.is_doubted or reporter.is_doubted):
            suspect.is_doubted = reporter.is_doubted = True  # the one of them that stays
        is_needed = [self._is_needed_by_all(one) for one in (suspect, reporter)]
        if is_needed[0] != is_needed[1]:
            is_worse = is_needed[1]
        if is_worse:
            self._lose_suspect(item, now)
            return
        life = self._life_text(suspect.peer, now).removeprefix("it ")
        others = "" if is_mutual else "nobody else says so, and "
        self._drop(reporter.peer, f"{item.text_of_reporter}; {others}{suspect.name} {life}", now)
