# SPDX-License-Identifier: Apache-2.0
"""Find out which workers delay an operation that does not end.

A worker reports what it waits for. The scheduler asks each other worker that has to begin the
operation how often it has begun it, and where its program is. The resulting text is logged once,
and again after twice the time, and is sent to the workers that asked. Pure: time is an argument,
messages are returned as (peer, message) pairs. Invariant: an inquiry ends when all workers have
answered, or ANSWER_S after it began.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fastps.control.blame import join_names
from fastps.control.protocol import Locate, StallTold, ToMember, Waiting, Whereabouts

Answers: TypeAlias = list[tuple[int, ToMember]]
Elsewhere: TypeAlias = Callable[[list[int]], str]

log = logging.getLogger(__name__)

ANSWER_S = 1.0  # for control threads to answer, which only wait for their interpreter
LEAST_S = 1.0  # shorter waits are not logged when a job is interrupted
AGAIN = 1.9  # a wait so many times as long is logged again; clocks of workers differ a little
MAX_PLACES = 1024  # remembered as logged; then all are forgotten
MAX_ASKED = 64  # questions of one worker within ANSWER_S: threads that wait at once


@dataclass
class _Inquiry:
    """One operation that does not end: which workers wait, which were asked, their answers."""

    asked: Waiting
    due: float
    is_logged: bool
    in_it: set[int]
    missing: set[int]  # without an answer
    late: dict[int, Whereabouts] = field(default_factory=dict)
    waiters: list[tuple[int, int]] = field(default_factory=list)  # peer and request
    askers: list[int] = field(default_factory=list)  # ranks, one for each question


class Stalls:
    """All inquiries of one generation."""

    def __init__(self, peers: Mapping[int, tuple[int, str]], elsewhere: Elsewhere) -> None:
        """peers: peer and full name by rank. elsewhere: names the meetings of given workers."""
        self._peers = dict(peers)
        self._elsewhere = elsewhere
        self._numbers = itertools.count(1)
        self._inquiries: dict[int, _Inquiry] = {}
        self._logged: dict[str, tuple[int, float]] = {}  # number and seconds, by place
        self._n_asked: Counter[int] = Counter()  # questions under way, by rank

    @property
    def count(self) -> int:
        """Count the inquiries under way."""
        return len(self._inquiries)

    def ask(self, rank: int, peer: int, asked: Waiting, now: float) -> Answers:
        """Handle a waiting worker's report; request 0 wants no answer.

        Who asks too often is answered without an inquiry, for that asks many others.
        """
        waiter = [(peer, asked.request)] if asked.request else []
        if self._n_asked[rank] >= MAX_ASKED:
            return [(peer, StallTold(asked.request, ""))] if asked.request else []
        for inquiry in self._inquiries.values():
            if asked.place and (inquiry.asked.place, inquiry.asked.number) == (
                asked.place, asked.number
            ):  # fmt: skip
                inquiry.waiters += waiter
                inquiry.in_it.add(rank)
                inquiry.askers.append(rank)
                self._n_asked[rank] += 1
                return []
        is_logged = not asked.request and self._is_new(asked)
        if not waiter and not is_logged:
            return []
        return self._open(asked, {rank}, waiter, now, is_logged=is_logged, asker=rank)

    def look(self, what: str, present: Iterable[int], seconds: float, now: float) -> Answers:
        """Find out why workers are missing in a meeting."""
        members = tuple(self._peers)
        asked = Waiting(0, "", 1, what, members, seconds)
        return self._open(asked, set(present), [], now, is_logged=True)

    def _open(
        self,
        asked: Waiting,
        in_it: set[int],
        waiters: list[tuple[int, int]],
        now: float,
        *,
        is_logged: bool,
        asker: int | None = None,
    ) -> Answers:
        members = dict.fromkeys(asked.members)
        others = [rank for rank in members if rank in self._peers and rank not in in_it]
        number = next(self._numbers)
        inquiry = self._inquiries[number] = _Inquiry(
            asked, now + ANSWER_S, is_logged, in_it, set(others), waiters=waiters
        )
        if asker is not None:
            inquiry.askers.append(asker)
            self._n_asked[asker] += 1
        if not others:
            return self._end(number)
        return [(self._peers[rank][0], Locate(number, asked.place)) for rank in others]

    def _is_new(self, asked: Waiting) -> bool:
        number, seconds = self._logged.get(asked.place, (-1, 0.0))
        if number == asked.number and asked.seconds < AGAIN * seconds:
            return False
        if len(self._logged) >= MAX_PLACES:
            self._logged.clear()
        self._logged[asked.place] = asked.number, asked.seconds
        return True

    def answer(self, rank: int | None, answer: Whereabouts) -> Answers:
        """Handle a worker's answer; return the messages of an inquiry that it completes."""
        inquiry = self._inquiries.get(answer.inquiry)
        if inquiry is None or rank is None or rank not in inquiry.missing:
            return []
        inquiry.missing.discard(rank)
        if inquiry.asked.place and answer.count >= inquiry.asked.number:
            inquiry.in_it.add(rank)
        else:
            inquiry.late[rank] = answer
        return [] if inquiry.missing else self._end(answer.inquiry)

    def remove(self, rank: int) -> Answers:
        """Stop asking a worker that is lost or has left; return the answers it held up."""
        self._peers.pop(rank, None)
        for inquiry in self._inquiries.values():
            inquiry.missing.discard(rank)
            inquiry.in_it.discard(rank)
            inquiry.late.pop(rank, None)
        over = [number for number, inquiry in self._inquiries.items() if not inquiry.missing]
        return [answer for number in over for answer in self._end(number)]

    def expire(self, now: float) -> Answers:
        """End the inquiries whose time is over."""
        late = [number for number, inquiry in self._inquiries.items() if inquiry.due <= now]
        return [answer for number in late for answer in self._end(number)]

    def next_deadline(self) -> float | None:
        """Return the time when expire() has something to do."""
        return min((inquiry.due for inquiry in self._inquiries.values()), default=None)

    def _end(self, number: int) -> Answers:
        inquiry = self._inquiries.pop(number)
        self._n_asked.subtract(inquiry.askers)
        text = self._text(inquiry)
        if inquiry.is_logged:
            asked = inquiry.asked
            log.warning("%s waits for %.0f s: %s", asked.what, asked.seconds, text)
        return [(peer, StallTold(request, text)) for peer, request in inquiry.waiters]

    def _text(self, inquiry: _Inquiry) -> str:
        """Return which workers are not in the operation, where they are, and which are in it."""
        lines = []
        silent = [self._name(rank) for rank in sorted(inquiry.missing - inquiry.in_it)]
        for words, ranks in _alike(inquiry).items():
            lines.append(f"{join_names([self._name(rank) for rank in ranks])} {words}")
        if silent:
            verb = "do" if len(silent) > 1 else "does"
            lines.append(
                f"{join_names(silent)} {verb} not answer: stopped, or something there holds "
                "Python's interpreter lock"
            )
        gone = [f"worker {rank}" for rank in inquiry.asked.members if rank not in self._peers]
        verb = "are" if len(gone) > 1 else "is"
        lines += [f"{join_names(gone)} {verb} lost or left the job"] * bool(gone)
        if not lines:
            return "all workers have begun it; servers or links are slow"
        elsewhere = self._elsewhere(sorted(inquiry.late))
        lines += [elsewhere] * bool(elsewhere)
        waiting = join_names([f"worker {rank}" for rank in sorted(inquiry.in_it)])
        return f"{'; '.join(lines)}; in it: {waiting}"

    def _name(self, rank: int) -> str:
        return self._peers.get(rank, (0, f"worker {rank}"))[1]


def _alike(inquiry: _Inquiry) -> dict[str, list[int]]:
    """Group the late workers with the same description, in the order of ranks."""
    found: dict[str, list[int]] = {}
    for rank, answer in sorted(inquiry.late.items()):
        if rank not in inquiry.in_it:
            found.setdefault(_words(inquiry.asked, answer), []).append(rank)
    return found


def _words(asked: Waiting, answer: Whereabouts) -> str:
    """Describe how far a late worker is, what it waits for and where its program is."""
    if not asked.place:
        how = "is not in it"
    elif answer.count:
        how = f"has begun {answer.count} operations on it"
    else:
        how = "has not begun it"
    waits = f", {answer.waits}" if answer.waits else ""
    return f"{how}{waits}, is at {answer.stack}" if answer.stack else f"{how}{waits}"
