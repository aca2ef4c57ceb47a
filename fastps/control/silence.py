# SPDX-License-Identifier: Apache-2.0
"""When a silent member is lost: others are asked, and a starved process gets more time.

A part of the Membership. Before a member's lease ends, others are asked whether they reach it. If
one does, only its path to the scheduler is cut. A process of the scheduler's machine that waits
for a processor or a disk may be silent for longer. Pure, as the Membership is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastps.config import Config
from fastps.control.actions import Phase
from fastps.control.admission import Peer
from fastps.control.blame import (
    MAX_ASKED,
    MIN_MEMBERS,
    VOTES,
    Inquest,
    confirm_s,
    life_text,
    machine_text,
    pulse_s,
    silence_text,
    unreached_text,
)
from fastps.control.protocol import Confirm, Confirmed, Join, ToMember

log = logging.getLogger(__name__)

STARVED_S = 10.0  # beyond its lease, for a process of this machine that gets no processor


class SilenceMixin:
    """The silences of members, for the Membership."""

    phase: Phase
    _config: Config
    _peers: dict[int, Peer]
    _state_of: Callable[[Join], str]

    def _send(self, peer: int, message: ToMember) -> None:
        raise NotImplementedError

    def _drop(self, peer: int, cause: str, now: float) -> None:
        raise NotImplementedError

    def _judged_at(self, member: Peer) -> float:
        """Return when others are asked about a silent member, or when their answers count."""
        if member.inquest is None:
            return member.lease_until - confirm_s(self._config.lease_s)
        return max(member.lease_until, member.inquest.until)

    def _judge_silence(self, member: Peer, now: float) -> None:
        """Ask others about a silent member before its lease ends, or take their answers."""
        if member.inquest is None:
            member.inquest = self._begin_inquest(member, now)
        is_alive = member.inquest.is_alive(now)
        if is_alive is False and member.lease_until <= now:
            if self._is_starved(member, now):
                member.lease_until = now + pulse_s(self._config)
                return
            self._drop(member.peer, self._silence_text(member, now), now)
        elif is_alive:
            log.log(
                logging.INFO if member.is_cut else logging.WARNING,
                "the path of %s to the scheduler is cut: others reach it, but its heartbeats do "
                "not arrive", member.full_name,
            )  # fmt: skip
            member.inquest, member.is_cut = None, True
            member.lease_until = now + self._config.lease_s

    def _is_starved(self, member: Peer, now: float) -> bool:
        """Return whether a silent process waits for a processor or a disk, and may a while longer.

        If its thread sleeps, it has got one just now, and what it sent is read before the next
        look.
        """
        before, member.seen = member.seen, self._state_of(member.join)
        member.starved_until = member.starved_until or now + STARVED_S
        waits = member.seen in ("R", "D") or (member.seen == "S" and before != "S")
        return waits and now < member.starved_until

    def _begin_inquest(self, member: Peer, now: float, *, apart_from: int = 0) -> Inquest:
        """Ask others, apart from one, whether they reach a member, if there are any to ask."""
        heard = [
            item for item in self._peers.values()
            if item is not member and item.peer != apart_from
            and self._silent_s(item, now) < self._config.lease_s / 2
        ]  # fmt: skip
        if (
            self.phase is not Phase.RUNNING
            or len(self._peers) < MIN_MEMBERS
            or len(heard) < VOTES
            or not member.join.cookie
        ):
            return Inquest([], now)
        heard.sort(key=lambda item: item.join.hostname == member.join.hostname)
        join, seconds = member.join, confirm_s(self._config.lease_s)
        question = Confirm(member.peer, join.probe_host, join.probe_port, join.cookie, seconds)
        for item in heard[:MAX_ASKED]:
            self._send(item.peer, question)
        return Inquest([item.peer for item in heard[:MAX_ASKED]], now + seconds)

    def _take_answer(self, member: Peer, message: Confirmed, now: float) -> None:
        suspect = self._peers.get(message.suspect)
        if suspect is None:
            return
        for inquest in (suspect.inquest, suspect.hearing):
            if inquest is not None:
                inquest.add(member.peer, is_reached=message.reached_ms is not None)
        if suspect.inquest is not None:
            self._judge_silence(suspect, now)

    def _silence_text(self, member: Peer, now: float) -> str:
        """Return how a member was silent, alone or with its machine, and who confirms that."""
        host = member.join.hostname
        there = [item for item in self._peers.values() if item.join.hostname == host]
        text = silence_text(self._config.lease_s)
        is_silent = [self._silent_s(item, now) > self._config.lease_s / 2 for item in there]
        if len(there) > 1 and all(is_silent) and len(there) < len(self._peers):
            text = f"{machine_text(host, len(there))}; {text}"
        denied = member.inquest.denied_by() if member.inquest else []
        return text + unreached_text([self._peers[p].name for p in denied if p in self._peers])

    def _silent_s(self, member: Peer, now: float) -> float:
        return now - member.lease_until + self._config.lease_s

    def _life_text(self, peer: int, now: float) -> str:
        """Return the text about a suspect's heartbeats."""
        member = self._peers.get(peer)
        silent_s = self._silent_s(member, now) if member else 0.0
        return life_text(silent_s, beat_s=pulse_s(self._config))
